"""Python's share of a decode step: scheduling, flat arrays, results, commit, against the C++ call.

    python bench/step_share.py [--model smollm2-135m] [--rows 1,16,64] [--steps 200]

The same calls in the same order as `Engine.pump` and `Engine.drain`, on a real model, every row
decoding. Medians of single steps: what is cold after the weights have passed through the caches is
cold here too, which is why a microbenchmark of the same functions shows a fraction of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from array import array
from dataclasses import replace
from itertools import pairwise

from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.models import hub
from octavo.models.weights import open_checkpoint
from octavo.runtime.cpu import CpuExecutor, CpuOptions

PARTS = ("schedule", "encode", "native", "decode", "commit")
KINDS = {
    "greedy": SamplingParams(temperature=0, ignore_eos=True),
    "logprobs": SamplingParams(temperature=0, logprobs=5, ignore_eos=True),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9, ignore_eos=True),
}
PROMPT = 64


def decoding(executor: CpuExecutor, kind: str, rows: int, steps: int) -> Scheduler:
    """A scheduler with `rows` sequences whose prompts are computed."""
    scheduler = Scheduler(executor.capacity)
    params = replace(KINDS[kind], max_tokens=steps + 10)
    vocab = executor.config.vocab_size
    for i in range(rows):
        prompt = array("i", [(i * 977 + j * 31 + 13) % vocab for j in range(PROMPT)])
        scheduler.add(Request(f"r{i}", prompt, params, 0.0, i, frozenset()))
    while not all(seq.num_output for seq in scheduler._running) or scheduler.num_waiting:
        step(executor, scheduler)
    return scheduler


def step(executor: CpuExecutor, scheduler: Scheduler) -> dict[str, float]:
    """One step; microseconds of each part."""
    executor.reset_timing()
    times = [time.perf_counter()]
    batch = scheduler.schedule(0.0)
    times.append(time.perf_counter())
    assert batch is not None
    executor.submit(batch)
    times.append(time.perf_counter())
    result = executor.collect()
    times.append(time.perf_counter())
    scheduler.commit(batch, result, 0.0)
    times.append(time.perf_counter())
    native = executor.timing()["total"]
    schedule, encode, collect, commit = (b - a for a, b in pairwise(times))
    seconds = schedule, encode, native, collect - native, commit
    return {name: t * 1e6 for name, t in zip(PARTS, seconds, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", default="1,16,64")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    executor = CpuExecutor(open_checkpoint(hub.resolve(args.model)), CpuOptions(kv_bytes=1 << 30))
    cells = []
    print(f"{'kind':9} {'rows':>4}  " + "".join(f"{p + ' us':>13}" for p in PARTS) + "   Python")
    for kind in KINDS:
        for rows in map(int, args.rows.split(",")):
            scheduler = decoding(executor, kind, rows, args.steps)
            seen = [step(executor, scheduler) for _ in range(args.steps)]
            cell = {p: statistics.median(s[p] for s in seen) for p in PARTS}
            share = 1 - cell["native"] / sum(cell.values())
            print(f"{kind:9} {rows:4}  " + "".join(f"{cell[p]:13.1f}" for p in PARTS), end="")
            print(f"{share:9.2%}")
            cells.append({"kind": kind, "rows": rows, "share": share} | cell)
    print(json.dumps({"bench": "step_share", "model": args.model, "cells": cells}))


if __name__ == "__main__":
    main()
