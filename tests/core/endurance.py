"""A long run under everything at once: bursts, floods, aborts, faults, guesses, a small pool.

    python -m tests.core.endurance --steps 100000

The test suite runs the same with fewer steps. Unlike the random workloads of `workload.py`, which
end after a few dozen requests, this one goes on until nothing that could creep up has not.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from octavo.core.engine import Engine
from octavo.core.executor import Capacity
from octavo.core.fair import fair
from octavo.core.offline import behind
from octavo.core.policy import Policy, fcfs, priority, sjf, static
from octavo.core.request import EXPIRED, FinishReason, Request, Slo, Tier
from octavo.core.scheduler import PINNED, Scheduler
from octavo.core.slo import slo
from octavo.errors import Overloaded
from tests.core.audit import VOCAB, AuditExecutor
from tests.core.machine import ask
from tests.core.oracle import Outcome, expected
from tests.core.workload import PlantedDrafter

POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": fcfs,
    "priority": priority,
    "sjf": sjf,
    "fair": lambda: fair({"a": 2.0}),
    "slo": slo,
    "fair-slo": lambda: fair(within=slo()),
    "static": static,
    "behind-fcfs": lambda: behind(fcfs()),
    "behind-fair-slo": lambda: behind(fair(within=slo())),
}
CAPACITY = Capacity(
    num_blocks=64, block_size=4, max_tokens=48, max_rows=12, max_outputs=48, max_context=120
)
MOOD = 97  # steps after which the load changes its mind
EVERY = 7  # steps between two full checks


class Endurance:
    """One policy's run. `turn` is a step; `finish` drains and compares with the oracle."""

    def __init__(self, policy: str, seed: int, depth: int = 1) -> None:
        self.rng = random.Random(f"{policy} {seed}")
        capacity = replace(CAPACITY, depth=depth)
        self.scheduler = Scheduler(
            capacity,
            POLICIES[policy](),
            max_waiting=40,
            drafter=PlantedDrafter(random.Random(seed), 0.2, 0.3),
        )
        self.faults: dict[str, int] = {}
        self.executor = AuditExecutor(
            capacity, self.rng, lambda i: self.scheduler._live[i].request, self.faults
        )
        self.engine = Engine(self.executor, self.scheduler)
        # Only where it is kept apart is there work that nobody waits for.
        self.tiers = list(Tier) if policy.startswith("behind") else list(Tier)[: Tier.BATCH]
        self.requests: dict[str, Request] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.aborted: set[str] = set()
        self.totals: Counter[str] = Counter()
        self.rate, self.closed = 0.3, False
        self.steps = 0
        self.now = 0.0
        self.bases = [[self.rng.randrange(VOCAB) for _ in range(40)] for _ in range(3)]

    def arrive(self) -> None:
        rng, name = self.rng, f"r{len(self.requests) + self.totals['refused']}"
        base = rng.choice(self.bases)[: rng.choice((0, 8, 40))]
        prompt = base + [rng.randrange(VOCAB) for _ in range(rng.choice((1, 4, 30)))]
        wanted = Slo(
            ttft=rng.choice((None, 0.05, 1.0, 9.0)),
            tpot=rng.choice((None, 0.01, 0.2)),
            e2e=rng.choice((None, None, 3.0, 60.0)),
        )
        request = ask(
            name,
            prompt,
            rng.choice((1, 6, 30)),
            arrival=self.now,
            seed=rng.getrandbits(16),
            tenant=rng.choices("abc", (8, 1, 1))[0],
            priority=rng.choice((0, 0, 3)),
            tier=rng.choice(self.tiers),
            slo=wanted,
        )
        try:
            self.engine.add(request)
        except Overloaded:
            self.totals["refused"] += 1
            return
        self.requests[name] = request
        self.outcomes[name] = Outcome()
        if rng.random() < 0.02:
            self.faults[name] = rng.randrange(60)

    def abort_some(self, share: float) -> None:
        for name in [n for n, o in self.outcomes.items() if o.finish is None]:
            if self.rng.random() < share:
                self.aborted.add(name)
                self.note(self.engine.abort(name, self.now))

    def note(self, events: list) -> None:
        for event in events:
            out = self.outcomes[event.request_id]
            assert out.finish is None, "news of a request that had ended"
            out.tokens.extend(event.tokens)
            out.finish = event.finish
            if event.error == EXPIRED:
                self.totals["expired"] += 1
                self.aborted.add(event.request_id)
            if event.finish is not None:
                self.settle(event.request_id)

    def settle(self, name: str) -> None:
        """What has ended gave what the oracle says, and is forgotten."""
        request, got = self.requests[name], self.outcomes.pop(name)
        self.requests[name] = None  # type: ignore[assignment]
        want = expected(request, 0, self.scheduler.max_len, self.faults.get(name))
        self.totals["ended"] += 1
        if got.finish is FinishReason.ABORT:
            assert name in self.aborted
            assert got.tokens == want.tokens[: len(got.tokens)]
        else:
            assert (got.tokens, got.finish) == (want.tokens, want.finish), name

    def turn(self) -> None:
        rng, scheduler = self.rng, self.scheduler
        self.steps += 1
        if self.steps % MOOD == 0:
            self.rate = rng.choice((0.0, 0.1, 0.4, 1.5, 6.0))
            if rng.random() < 0.15:
                self.abort_some(0.9)
        while not self.closed and rng.random() < self.rate / (1.0 + self.rate):
            self.arrive()
        if rng.random() < 0.02:
            self.abort_some(0.1)
        ranks = [seq.key for seq in scheduler.running]
        given = {seq.id: seq.num_preemptions for seq in scheduler.running}
        self.engine.pump(self.now)
        for seq in scheduler.waiting:
            if seq.num_preemptions > max(PINNED, given.get(seq.id, seq.num_preemptions)):
                assert min(ranks) < seq.key, "pinned, and preempted by none of higher rank"
        if self.steps % EVERY == 0:
            scheduler.check()
        news = self.engine.drain(self.now)
        self.note(news)
        self.now += 0.03

    def finish(self) -> None:
        self.closed, end = True, self.steps + 20_000
        while self.engine.has_work:
            self.turn()
            assert self.steps < end, "no end"
        scheduler = self.scheduler
        scheduler.check()
        assert scheduler.blocks.num_held == 0
        assert not self.outcomes, "requests that never ended"
        assert not scheduler._shapes
        self.totals.update({k: int(v) for k, v in scheduler.snapshot().items()})


def endure(policy: str, steps: int, seed: int = 0, depth: int = 1) -> Counter[str]:
    """Run so many steps of one policy, drain, and return what happened."""
    run = Endurance(policy, seed, depth)
    while run.steps < steps:
        run.turn()
    run.finish()
    return run.totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--policy", choices=POLICIES, action="append")
    args = parser.parse_args()
    for name in args.policy or POLICIES:
        started = time.perf_counter()
        totals = endure(name, args.steps)
        shown = ("ended", "refused", "preemptions", "expired", "aborted", "failed", "held")
        words = ", ".join(f"{totals[word]} {word}" for word in shown)
        print(f"{name:10} {args.steps} steps, {time.perf_counter() - started:.0f} s: {words}")


if __name__ == "__main__":
    main()
