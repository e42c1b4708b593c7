"""Octavo's library as a bench worker: a JSON task a line in, a JSON answer out (after '@')."""

from __future__ import annotations

import json
import sys
import time

from octavo import LLM, SamplingParams


def main() -> None:
    model, threads = sys.argv[1], int(sys.argv[2])
    llm = LLM(model, threads=threads)
    print("@{}", flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        (job,) = task["jobs"]
        params = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True)
        started = time.perf_counter()
        stamps = [time.perf_counter() for _ in llm.stream(job["prompt"], params)]
        if task["cell"] == "single":  # as llama-bench's tg: the steps after the prompt's
            rate = (job["max_tokens"] - 1) / (stamps[-1] - stamps[0])
        else:
            rate = len(job["prompt"]) / (stamps[0] - started)
        print("@" + json.dumps({"output_tok_s": rate}), flush=True)


if __name__ == "__main__":
    main()
