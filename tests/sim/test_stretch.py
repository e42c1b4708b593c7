"""Steps taken by the stretch leave what steps taken one by one leave, bit for bit."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from octavo.core.batch import Batch
from octavo.core.executor import Capacity
from octavo.core.fair import Fair
from octavo.core.history import Record
from octavo.core.policies import POLICIES
from octavo.core.policy import fcfs
from octavo.core.request import Request, SamplingParams, Sequence, Slo
from octavo.core.scheduler import Plan, Scheduler
from octavo.core.slo import slo
from octavo.core.steptime import Coefficients
from octavo.core.stretch import foresee
from octavo.errors import InvalidRequest
from octavo.sim.executor import TOKEN, Durations, Fitted, Learned, Scaled
from octavo.sim.fleet import Fleet, LeastTokens, Replica, Spec
from octavo.sim.workload import Item, Sizes, Workload, synthetic

STEP = Coefficients(5e-3, 4e-5, 1e-7, 1e-9, 1e-5, 2e-5, bend=2e-5, knee=40.0)


@dataclass(frozen=True)
class Case:
    """One fleet and one load."""

    seed: int
    policy: str
    admits: bool
    capacity: Capacity
    rate: float
    sizes: tuple[float, float]
    noise: float
    prefix_caching: bool
    replicas: int
    e2e: float | None
    tenants: int

    def load(self) -> Workload:
        prompt, output = self.sizes
        drawn = synthetic(
            self.rate, 2.0, Sizes(prompt, 0.9, 300), Sizes(output, 0.9, 90), cv=2.0, seed=self.seed
        )
        draw = random.Random(self.seed)
        items = [
            item._replace(
                tenant=f"t{draw.randrange(self.tenants)}",
                priority=draw.randrange(3),
                blocks=tuple(draw.choice((0, 1)) for _ in range(-(-item.prompt // 16))),
                at=round(item.at, draw.choice((1, 9))),
            )
            for item in drawn.items
        ]
        return Workload("w", tuple(sorted(items, key=lambda item: item.at)), block_tokens=16)

    def wanted(self) -> Callable[[Item], dict[str, Any]]:
        draw = random.Random(self.seed)

        def fields(_: Item) -> dict[str, Any]:
            kinds = (Slo(), Slo(ttft=0.3, tpot=0.02), Slo(tpot=0.03), Slo(e2e=self.e2e))
            return {"slo": draw.choice(kinds)}

        return fields


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size, rows = draw(st.sampled_from((4, 16, 32))), draw(st.integers(2, 24))
    blocks = draw(st.integers(400 // size, 3000 // size))
    tokens = draw(st.sampled_from((rows, 48, 200, 512)))
    capacity = Capacity(blocks, size, max(tokens, rows), rows, max(tokens, rows), 400)
    policy = draw(st.sampled_from(sorted(POLICIES)))
    return Case(
        seed=draw(st.integers(0, 10**6)),
        policy=policy,
        admits=draw(st.booleans()),
        capacity=capacity,
        rate=draw(st.sampled_from((2.0, 8.0, 30.0))),
        sizes=(draw(st.sampled_from((5.0, 60.0))), draw(st.sampled_from((3.0, 40.0)))),
        noise=draw(st.sampled_from((0.0, 0.2))),
        prefix_caching=draw(st.booleans()),
        replicas=draw(st.sampled_from((1, 1, 3))),
        e2e=draw(st.sampled_from((0.2, 1.0))),
        tenants=draw(st.integers(1, 3)),
    )


class Watched(Fleet):
    """A fleet that remembers what became of each sequence, and each batch that was submitted."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.ends: dict[str, tuple[object, ...]] = {}
        self.batches: dict[tuple[int, int], tuple[object, ...]] = {}
        for replica in self.replicas:
            replica.executor.submit = self._seen(replica)  # type: ignore[method-assign]

    def _seen(self, replica: Replica) -> Callable[[Batch], None]:
        submit = replica.executor.submit

        def seen(batch: Batch) -> None:
            rows = tuple((r.seq_id, r.start, [*r.tokens], [*r.block_table]) for r in batch.rows)
            self.batches[replica.index, batch.step] = (replica.executor.now, rows)
            submit(batch)

        return seen

    def _ended(self, replica: Replica) -> None:
        for timing in replica.scheduler.stats.timings:
            record = timing.record
            assert record is not None
            told = tuple(getattr(record, name) for name in Record.__slots__ if name != "_queued")
            self.ends[timing.request_id] = (timing._replace(record=None), told)
        super()._ended(replica)


def played(case: Case, durations: Durations, *, foresight: bool) -> tuple[Watched, dict[str, Any]]:
    """A run, and all of it that can be compared."""
    spec = Spec(
        "r", case.capacity, durations, POLICIES[case.policy], noise=case.noise, admits=case.admits
    )
    fleet = Watched(
        [spec] * case.replicas,
        LeastTokens(),
        seed=case.seed,
        prefix_caching=case.prefix_caching,
        foresight=foresight,
    )
    run = fleet.run(case.load(), case.wanted())
    for replica in fleet.replicas:
        replica.scheduler.check()
    return fleet, {
        "outcomes": run.outcomes,
        "gaps": run.gaps,
        "counters": run.counters,
        "busy": run.busy,
        "seconds": run.seconds,
        "ends": fleet.ends,
        "replicas": [left(replica) for replica in fleet.replicas],
    }


def left(replica: Replica) -> dict[str, Any]:
    """What a replica's scheduler keeps when all is over."""
    scheduler = replica.scheduler
    blocks, model, journal = scheduler.blocks, scheduler.model, scheduler.stats.journal
    order, pace = scheduler._order, scheduler._pace
    return {
        "free": list(blocks._free),
        "cached": list(blocks._cached),
        "index": dict(blocks._index),
        "gone": list(blocks._gone),
        "model": (list(model.steps), model.describe(), model.snapshot()),
        "journal": (journal.mark(), list(journal.slow), journal.why),
        "reserve": vars(scheduler.reserve),
        "margin": scheduler.margin.factor,
        "counters": order.counters if isinstance(order, Fair) else None,
        "pace": {k: v for k, v in vars(pace).items() if k in ("_credit", "_owed")},
        "mean": scheduler._mean_context,
        "step": scheduler._step,
    }


def learned() -> Learned:
    return Learned(Replica(Spec("r", CAPACITY, Fitted(STEP), slo), 0, seed=0,
                           prefix_caching=False).scheduler.model)  # fmt: skip


CAPACITY = Capacity(200, 16, 256, 16, 256, 400)
DURATIONS: dict[str, Callable[[], Durations]] = {
    "fitted": lambda: Fitted(STEP),
    "scaled": lambda: Scaled(Fitted(STEP), 1.1),
    "learned": learned,
}


@settings(max_examples=150, derandomize=True, deadline=None)
@given(cases(), st.sampled_from(sorted(DURATIONS)))
def test_nothing_depends_on_foresight(case: Case, durations: str) -> None:
    try:
        case.load()
    except InvalidRequest:  # drawn so that nothing arrives
        reject()
    slow, truth = played(case, DURATIONS[durations](), foresight=False)
    fast, found = played(case, DURATIONS[durations](), foresight=True)
    for name, value in truth.items():
        assert found[name] == value, name
    for step, batch in fast.batches.items():
        assert slow.batches[step] == batch


class Mixed(Case):
    """Paces so mixed, and rows so dear, that the slower streams stand still for the tightest."""

    def wanted(self) -> Callable[[Item], dict[str, Any]]:
        draw = random.Random(self.seed)

        def fields(_: Item) -> dict[str, Any]:
            promptly = Slo(ttft=draw.choice((0.3, 2.0)), tpot=draw.choice((0.015, 0.03)))
            kinds = (Slo(), Slo(), promptly, Slo(tpot=0.08), Slo(tpot=0.3), Slo(e2e=self.e2e))
            return {"slo": draw.choice(kinds)}

        return fields


@pytest.mark.parametrize("noise", [0.2, 0.8])
@pytest.mark.parametrize("policy", ["slo", "fair-slo"])
def test_nothing_depends_on_foresight_where_streams_stand_still(
    policy: str, noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The more noise the more often they begin and cease to."""
    stood = [0]

    def still(self: Scheduler, plan: Plan, seqs: Collection[Sequence]) -> None:
        stood[0] += len(seqs)
        stand_still(self, plan, seqs)

    stand_still = Scheduler._stand_still
    monkeypatch.setattr(Scheduler, "_stand_still", still)
    dear, capacity = Fitted(replace(STEP, decode=3e-3)), Capacity(200, 16, 48, 12, 48, 400)
    for seed in range(20):
        case = Mixed(seed, policy, True, capacity, 20.0, (5.0, 60.0), noise, True, 1, 4.0, 2)
        _, truth = played(case, dear, foresight=False)
        _, found = played(case, dear, foresight=True)
        assert found == truth, seed
    assert stood[0] > 1000


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_most_steps_of_a_light_load_are_foreseen(policy: str) -> None:
    case = Case(1, policy, False, CAPACITY, 4.0, (60.0, 60.0), 0.1, False, 1, 2.0, 2)
    fast, found = played(case, Fitted(STEP), foresight=True)
    assert 0 < len(fast.batches) < 0.5 * found["counters"]["steps"]


def test_where_blocks_are_short_the_line_is_foreseen_too() -> None:
    """A full house: who waits cannot join before somebody ends, and those steps are alike."""
    load = Workload("w", tuple(Item(f"r{i}", 0.0, 40, 80) for i in range(60)))
    small = Capacity(64, 8, 256, 64, 256, 400)
    fleet = Watched([Spec("r", small, Fitted(STEP), fcfs)], prefix_caching=False)
    run = fleet.run(load)
    assert len(fleet.batches) < 0.5 * run.counters["steps"]


def test_durations_that_need_the_batch_are_asked_step_by_step() -> None:
    load = Workload("w", (Item("a", 0.0, 10, 20),))
    fleet = Watched([Spec("r", CAPACITY, lambda batch: 0.01 * len(batch.rows), fcfs)])
    assert fleet.run(load).counters["steps"] == len(fleet.batches) == 20


def test_what_cannot_be_foreseen_is_not() -> None:
    def foreseen(waits: int = 0, token: int = TOKEN, **params: Any) -> bool:
        replica = Replica(Spec("r", CAPACITY, Fitted(STEP), fcfs), 0, seed=0, prefix_caching=False)
        chosen = SamplingParams(**{"max_tokens": 9} | params)
        for i in range(1 + waits):
            request = Request(f"{i}", array("i", [1] * 8), chosen, 0.0, 0, frozenset((7,)))
            replica.engine.add(request)
            if not i:
                replica.engine.pump(0.0)
                replica.engine.drain(0.0)
        return foresee(replica.scheduler, token) is not None

    assert foreseen()
    assert not foreseen(token=7)  # it would end
    assert not foreseen(waits=1)  # there is a row for it
    assert not foreseen(logprobs=1)
    assert not foreseen(min_tokens=5)
    assert not foreseen(frequency_penalty=1.0)
    assert not foreseen(prompt_logprobs=1)
