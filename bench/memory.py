"""Where the memory of a serving process goes: its peak RSS, explained.

    python bench/memory.py [--model smollm2-135m] [--kv 1GiB]

Builds the engine in this process step by step, reads the resident set after each, fills the KV pool
to the last block with real requests, and prints what was promised beside what was measured.
"""

from __future__ import annotations

import argparse
import json
import random


def resident() -> dict[str, int]:
    """Bytes resident now: in all, anonymous, and file-backed; and the peak so far."""
    names = {"VmRSS": "rss", "RssAnon": "anonymous", "RssFile": "files", "VmHWM": "peak"}
    out = {}
    with open("/proc/self/status") as f:
        for line in f:
            key, _, value = line.partition(":")
            if key in names:
                out[names[key]] = int(value.split()[0]) * 1024
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kv", default="1GiB")
    args = parser.parse_args()

    steps = {"python": resident()}
    import octavo.server.app  # noqa: F401
    from octavo import LLM, SamplingParams
    from octavo.config import parse_bytes, show_bytes

    steps["imports (server, numpy, tokenizers)"] = resident()
    from octavo.models import hub
    from octavo.models.tokenizer import load_tokenizer
    from octavo.models.weights import open_checkpoint

    tokenizer = load_tokenizer(open_checkpoint(hub.resolve(args.model)))
    steps["tokenizer"] = resident()
    llm = LLM(args.model, kv_memory=parse_bytes(args.kv))
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, temperature=0.0))
    steps["engine: packed weights, arena, second tokenizer"] = resident()

    executor = llm.assembly.executor
    capacity = executor.capacity
    rng = random.Random(1)
    length = min(1024, capacity.max_context - 64)
    count = -(-capacity.num_blocks * capacity.block_size // length) + 16
    prompts = [[rng.randrange(tokenizer.vocab_size) for _ in range(length)] for _ in range(count)]
    llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9), progress=False)
    steps[f"after {count} requests of {length} tokens: the KV pool is full"] = resident()

    promised = executor.memory()
    print("resident after each step (all / anonymous / file pages)")
    before = 0
    for name, now in steps.items():
        print(
            f"  {show_bytes(now['rss']):>12s}  +{show_bytes(now['rss'] - before):>11s}"
            f"  ({show_bytes(now['anonymous'])} / {show_bytes(now['files'])})  {name}"
        )
        before = now["rss"]
    print("what the executor says that it holds")
    for name, size in promised.items():
        print(f"  {show_bytes(size):>12s}  {name}")
    last = resident()
    named = sum(promised.values())
    rest = last["peak"] - named
    print(
        f"peak RSS {show_bytes(last['peak'])} = {show_bytes(named)} named + {show_bytes(rest)} rest"
    )
    print(json.dumps({"steps": steps, "executor": promised, "peak": last["peak"], "rest": rest}))


if __name__ == "__main__":
    main()
