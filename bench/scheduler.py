"""What the scheduler costs a step: schedule + commit, all rows decoding, no executor; and what a
request costs at the door.

    python bench/scheduler.py [--steps 400]

Medians, and their share of the goal where there is one (less than 100 % is better): 250 us for 128
rows with 1000 waiting, 1 ms for 512 with 5000; at the door 50 us until it is decided who is let in,
and 300 us until a refusal is ready, with a place and its words. All rows are taken, so with a
deadline of a minute all are refused, and with one of a day all are let in; the decision is the
slower of these two. At the door `warm` is one request after another, and `cold` one after each
step, with the caches emptied before the step's end, as a model's weights empty them: that is what a
server pays. The ceiling beside a step is the time in which this interpreter builds the objects that
cross to the executor and back to the caller (a row, a want, its sample spec, two arrays, an event).
Most sequences have one want for all their life, so the scheduler builds fewer than that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import time
from array import array
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from octavo.core.admission import Admission
from octavo.core.batch import Row, RowResult, SampleSpec, StepResult, Want
from octavo.core.executor import Capacity
from octavo.core.fair import fair
from octavo.core.policy import fcfs
from octavo.core.request import Event, Request, SamplingParams, Slo
from octavo.core.scheduler import Scheduler
from octavo.core.slo import slo
from octavo.errors import Unattainable

CONTEXT = 300


POLICIES = {"fcfs": fcfs, "slo": slo, "fair-slo": lambda: fair(within=slo())}
CHAT = Slo(ttft=60.0, tpot=0.05)  # is refused where so many wait
PATIENT = Slo(ttft=86400.0, tpot=0.05)  # is not
STEP = 0.02  # seconds that a step takes on the clock that the scheduler is told
GOALS = {(128, 1000): 250.0, (512, 5000): 1000.0}  # us a step, by rows and waiting
DECISION_GOAL, REFUSAL_GOAL = 50.0, 300.0  # us a request
DOOR = ("decision_us", "decision_cold_us", "refusal_us", "refusal_cold_us")
EMPTYING = 64 << 20  # bytes that are walked over, so that the caches hold nothing else


def decoding(policy: str, rows: int, waiting: int, steps: int) -> Scheduler:
    """A scheduler whose `rows` sequences all decode, with others waiting."""
    output = steps + 1000  # nobody ends
    blocks = rows * ((CONTEXT + output) // 32 + 1)  # there is room for all that they will write
    capacity = Capacity(blocks, 32, 4096, rows, rows, 10**5)
    scheduler = Scheduler(capacity, POLICIES[policy](), max_waiting=10**6)
    rng = random.Random(0)
    for i in range(rows + waiting):
        prompt = array("i", [rng.randrange(50_000) for _ in range(CONTEXT)])
        params = SamplingParams(max_tokens=output)
        wanted, tenant = (CHAT, f"t{i % 10}") if scheduler.policy.timed else (Slo(), "")
        scheduler.add(
            Request(f"r{i}", prompt, params, 0.0, i, frozenset((2,)), slo=wanted, tenant=tenant)
        )
    now = 0.0
    while not all(s.num_output for s in scheduler.running) or scheduler.num_running < rows:
        step(scheduler, now)
        now += STEP
    return scheduler


def step(scheduler: Scheduler, now: float, compute: Callable[[], object] = lambda: None) -> float:
    """One step; seconds in schedule and commit. compute: what is done in between."""
    started = time.perf_counter()
    batch = scheduler.schedule(now)
    spent = time.perf_counter() - started
    assert batch is not None
    rows = {r.seq_id: RowResult((7,)) if r.outputs else RowResult() for r in batch.rows}
    result = StepResult(batch.step, rows, now, now + STEP)
    compute()
    started = time.perf_counter()
    scheduler.commit(batch, result, now + STEP)
    return spent + time.perf_counter() - started


def floor(rows: int, repeats: int = 200) -> float:
    """Seconds to build what a decode step of so many rows must build."""
    params, tokens, table = SamplingParams(), array("i", range(CONTEXT)), array("i", range(10))
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        for i in range(rows):
            want = Want(0, SampleSpec(params, i, 0, None, CONTEXT, ()), None, 0, None)
            Row(i, CONTEXT - 1, tokens[CONTEXT - 1 : CONTEXT], table, (want,))
            Event("r", 0, (7,), None, None, None, None, 0, 0)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


class Door(NamedTuple):
    """Seconds at the door, in the median: until it is decided, and until that is answered."""

    decision: float
    answer: float


def at_the_door(scheduler: Scheduler, now: float, slo: Slo, *, cold: bool) -> Door:
    """What requests take there that are all admitted, or all refused."""
    admission, junk = Admission(scheduler), np.ones(EMPTYING // 8)
    prompt, decisions, answers = array("i", range(CONTEXT)), [], []
    for i in range(60 if cold else 300):
        request = Request(f"q{i}", prompt, SamplingParams(max_tokens=50), now, i, slo=slo)
        if cold:
            step(scheduler, now, lambda: np.add(junk, 1.0, out=junk))
        started = time.perf_counter()
        verdict = admission.weigh((request,), now + STEP * cold)
        decided = time.perf_counter()
        with contextlib.suppress(Unattainable):
            admission.answer(verdict)
        answered = time.perf_counter()
        assert (verdict.why is None) == (slo is PATIENT)
        decisions.append(decided - started)
        answers.append(answered - started)
        admission.forget(request)
        now += STEP * cold
    return Door(statistics.median(decisions), statistics.median(answers))


def doors(scheduler: Scheduler, now: float) -> list[float]:
    """Microseconds: the decision, warm and cold, and a refusal in all, likewise."""
    if not scheduler.policy.timed or scheduler.num_waiting != 1000:
        return []
    found = [
        [at_the_door(scheduler, now, slo, cold=cold) for slo in (CHAT, PATIENT)]
        for cold in (False, True)
    ]
    decisions = [1e6 * max(door.decision for door in both) for both in found]
    return decisions + [1e6 * refused.answer for refused, _ in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    out = []
    head = "policy      rows  waiting   step us  of goal   us/row  objects us  quotient"
    print(f"{head}  decision us   of goal    cold  of goal  refusal  of goal    cold  of goal")
    plain = ((1, 0), (16, 0), (64, 0), (128, 0), (128, 1000), (256, 0), (512, 5000))
    cells = [("fcfs", *cell) for cell in plain]
    cells += [(policy, 128, 1000) for policy in ("slo", "fair-slo")] + [("slo", 512, 5000)]
    for policy, rows, waiting in cells:
        scheduler = decoding(policy, rows, waiting, steps + 100)
        now = 1000.0
        spent = statistics.median(step(scheduler, now + STEP * i) for i in range(steps)) * 1e6
        least = floor(rows) * 1e6
        now += STEP * steps
        door = doors(scheduler, now)
        goal = GOALS.get((rows, waiting))
        share = f"{spent / goal:8.0%}" if goal else "       -"
        goals = (DECISION_GOAL, DECISION_GOAL, REFUSAL_GOAL, REFUSAL_GOAL)
        asked = " ".join(
            [f"{us:8.1f} {us / most:7.0%}" for us, most in zip(door, goals, strict=False)]
        )
        print(
            f"{policy:9} {rows:6} {waiting:8} {spent:9.1f} {share} {spent / rows:8.2f}"
            f" {least:11.1f} {least / spent:9.1%} {asked}"
        )
        out.append(
            {
                "policy": policy,
                "rows": rows,
                "waiting": waiting,
                "step_us": spent,
                "goal_us": goal,
                "objects_us": least,
            }
            | dict(zip(DOOR, door, strict=False))
        )
    print(json.dumps({"bench": "scheduler", "cells": out}))


if __name__ == "__main__":
    main()
