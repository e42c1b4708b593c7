"""Octavo's library as a bench worker: a JSON task a line in, a JSON answer out (after '@')."""

from __future__ import annotations

import json
import sys
import time

from octavo import LLM, SamplingParams


def main() -> None:
    model, threads = sys.argv[1], int(sys.argv[2])
    llm = LLM(model, threads=threads, speculation="off")
    print("@{}", flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        print("@" + json.dumps({"output_tok_s": rate(llm, task)}), flush=True)


def rate(llm: LLM, task: dict) -> float:
    """Prompt tokens a second until the first token (prefill), or tokens a second after all first
    ones (single, batch8), as llama.cpp's benches count them."""
    jobs = task["jobs"]
    params = [
        SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True)
        for job in jobs
    ]
    first: dict[int, float] = {}
    made = 0
    started = now = time.perf_counter()
    for piece in llm.stream([job["prompt"] for job in jobs], params):
        now = time.perf_counter()
        if piece.error is not None:
            raise SystemExit(piece.error)
        first.setdefault(piece.prompt_index, now)
        made += len(piece.token_ids)
    if made != sum(job["max_tokens"] for job in jobs):
        raise SystemExit(f"made {made} tokens, not what was asked for")
    begun = max(first.values())
    if task["cell"] == "prefill":
        return len(jobs[0]["prompt"]) / (begun - started)
    return (made - len(jobs)) / max(now - begun, 1e-9)


if __name__ == "__main__":
    main()
