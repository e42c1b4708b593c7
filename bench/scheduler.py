"""What the scheduler costs a step: schedule + commit, all rows decoding, no executor.

    python bench/scheduler.py [--steps 400]

The ceiling beside it is the time in which this interpreter builds the objects that cross to the
executor and back to the caller (a row, a want, its sample spec, two arrays, an event): the least
that a step of so many rows can cost with these types.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from array import array

from octavo.core.batch import Row, RowResult, SampleSpec, StepResult, Want
from octavo.core.executor import Capacity
from octavo.core.request import Event, Request, SamplingParams
from octavo.core.scheduler import Scheduler

CONTEXT = 300


def decoding(rows: int, waiting: int, steps: int) -> Scheduler:
    """A scheduler whose `rows` sequences all decode, with others waiting."""
    blocks = rows * ((CONTEXT + steps) // 32 + 3)
    capacity = Capacity(blocks, 32, 4096, rows, rows, 10**5)
    scheduler = Scheduler(capacity, max_waiting=10**6)
    rng = random.Random(0)
    for i in range(rows + waiting):
        prompt = array("i", [rng.randrange(50_000) for _ in range(CONTEXT)])
        params = SamplingParams(max_tokens=steps + 50)
        scheduler.add(Request(f"r{i}", prompt, params, 0.0, i, frozenset((2,))))
    while not all(s.num_output for s in scheduler._running) or scheduler.num_running < rows:
        step(scheduler)
    return scheduler


def step(scheduler: Scheduler) -> float:
    """One step; seconds in schedule and commit."""
    started = time.perf_counter()
    batch = scheduler.schedule(0.0)
    spent = time.perf_counter() - started
    assert batch is not None
    rows = {r.seq_id: RowResult((7,)) if r.outputs else RowResult() for r in batch.rows}
    result = StepResult(batch.step, rows)
    started = time.perf_counter()
    scheduler.commit(batch, result, 0.0)
    return spent + time.perf_counter() - started


def floor(rows: int, repeats: int = 200) -> float:
    """Seconds to build what a decode step of so many rows must build."""
    params, tokens, table = SamplingParams(), array("i", range(CONTEXT)), array("i", range(10))
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        for i in range(rows):
            want = Want(0, SampleSpec(params, i, 0, CONTEXT, None, CONTEXT, ()), None, 0, None)
            Row(i, CONTEXT - 1, tokens[CONTEXT - 1 : CONTEXT], table, (want,))
            Event("r", 0, (7,), None, None, None, None, 0, 0)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    out = []
    print("  rows  waiting   step us   us/row   objects us   quotient")
    for rows, waiting in ((1, 0), (16, 0), (64, 0), (128, 0), (128, 1000), (256, 0)):
        scheduler = decoding(rows, waiting, steps)
        spent = statistics.median(step(scheduler) for _ in range(steps)) * 1e6
        least = floor(rows) * 1e6
        print(
            f"{rows:6} {waiting:8} {spent:9.1f} {spent / rows:8.2f} {least:12.1f}"
            f" {least / spent:10.1%}"
        )
        out.append({"rows": rows, "waiting": waiting, "step_us": spent, "objects_us": least})
    print(json.dumps({"bench": "scheduler", "cells": out}))


if __name__ == "__main__":
    main()
