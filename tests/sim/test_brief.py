"""A scheduler in brief plans and leaves what any scheduler does, whatever comes between."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from octavo.core.batch import Batch
from octavo.core.brief import Brief, InBrief
from octavo.core.engine import Engine
from octavo.core.executor import Capacity
from octavo.core.policies import POLICIES
from octavo.core.request import Request, SamplingParams, Slo
from octavo.core.scheduler import Scheduler
from octavo.core.steptime import Coefficients, StepFeatures
from octavo.sim.executor import TOKEN, Fitted, SimulatedExecutor, shape_of, split

STEP = Coefficients(5e-3, 4e-5, 1e-7, 1e-9, 1e-5, 2e-5, bend=2e-5, knee=40.0)
KINDS: list[dict[str, Any]] = [
    {},
    {},
    {"logprobs": 2},
    {"min_tokens": 4},
    {"frequency_penalty": 0.5},
    {"prompt_logprobs": 1},
    {"n": 3},
]


class Blind:
    """Fails at its third token."""

    def __init__(self) -> None:
        self._seen = 0

    def advance(self, tokens: Any) -> tuple[int, None]:
        self._seen += len(tokens)
        return len(tokens), None

    def mask(self, position: int) -> None:
        if position == 3:
            raise ValueError("blind")

    def ahead(self, draft: Any) -> list[None]:
        return [None for _ in draft]

    def forced(self) -> tuple[int, ...]:
        return ()


def drawn(draw: random.Random, name: str, at: float) -> Request:
    params = SamplingParams(max_tokens=draw.randint(1, 30), **draw.choice(KINDS))
    prompt = array("i", [draw.randrange(3) for _ in range(draw.choice((1, 5, 16, 40)))])
    stops = frozenset((TOKEN,)) if draw.random() < 0.1 else frozenset((7,))
    watcher = Blind if draw.random() < 0.1 else None
    slo = draw.choice((Slo(), Slo(ttft=0.5, tpot=0.02), Slo(e2e=0.6)))
    tenant = draw.choice("ab")
    return Request(
        name, prompt, params, at, 1, stops, tenant=tenant, watcher=watcher, slo=slo
    )  # fmt: skip


def played(seed: int, policy: str, make: Callable[..., Scheduler]) -> list[object]:
    """All that is seen of a run: batches as they go out, events, and what is left."""
    draw = random.Random(seed)
    depth, size = draw.choice((1, 1, 2)), draw.choice((4, 8))
    capacity = Capacity(draw.choice((24, 40, 400)), size, draw.choice((16, 64)), 12, 64, 90, depth)
    caching = draw.random() < 0.5
    scheduler = make(capacity, POLICIES[policy](), prefix_caching=caching)
    executor = SimulatedExecutor(capacity, Fitted(STEP), noise=0.1, seed=seed)
    engine, seen, submit, now, names = Engine(executor, scheduler), [], executor.submit, 0.0, []

    def submitted(batch: Batch) -> None:
        seen.append(("batch", batch.step, batch.rows))
        assert shape_of(batch) == StepFeatures.of(batch)
        ends, others = split(batch)
        assert (sorted(ends), others) == _split(batch)
        submit(batch)

    executor.submit = submitted  # type: ignore[method-assign]
    turn = 0
    while turn < 100 or engine.has_work:
        turn += 1
        for i in range(draw.choice((0, 0, 1, 2)) if turn < 100 else 0):
            request = drawn(draw, f"r{turn}.{i}", now)
            names.append(request.id)
            engine.add(request)
        executor.now = now
        engine.pump(now)
        if names and draw.random() < 0.1:  # perhaps with a row on its way
            seen.append(("abort", engine.abort(draw.choice(names), now)))
        now = executor.now = max(now, executor.ready_at() or now + 0.01)
        for event in engine.drain(now):
            told = event.request_id, event.choice, event.tokens, event.finish, event.error
            seen.append(("event", *told))
        scheduler.check()
    left = [timing._replace(record=None) for timing in scheduler.stats.take_timings()]
    model, stats = scheduler.model, scheduler.stats
    return [
        *seen,
        left,
        list(model.steps),
        model.describe(),
        stats.snapshot(),
        stats.journal.mark(),
    ]


def _split(batch: Batch) -> tuple[list[int], list[tuple[int, int, int]]]:
    """The same by the rows alone."""
    rows = [(row.start, len(row.tokens), len(row.outputs)) for row in batch.rows]
    ends = [start + 1 for start, n, outputs in rows if n == 1 and outputs]
    return sorted(ends), [(start, n, o) for start, n, o in rows if n != 1 or not o]


def brief(*args: Any, **more: Any) -> InBrief:
    return InBrief(*args, token=TOKEN, **more)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(8))
def test_nothing_depends_on_being_brief(policy: str, seed: int) -> None:
    assert played(seed, policy, brief) == played(seed, policy, Scheduler)


def test_what_is_more_than_a_token_of_a_stream_is_spelt_out_and_nothing_else() -> None:
    capacity = Capacity(40, 16, 64, 8, 64, 200)
    scheduler = brief(capacity)
    executor = SimulatedExecutor(capacity, Fitted(STEP))
    engine, spelt = Engine(executor, scheduler), []
    for name, size in (("a", 10), ("b", 90)):
        params = SamplingParams(max_tokens=9)
        engine.add(Request(name, array("i", [1] * size), params, 0.0, 1))
    for _ in range(4):
        batch = scheduler.schedule(0.0)
        assert isinstance(batch, Brief)
        executor.submit(batch)
        spelt.append((len(batch.rows), [len(row.tokens) for row in batch.spelt.values()]))
        result = executor.collect()
        assert result.rows.keys() == batch.spelt.keys()
        scheduler.commit(batch, result, 0.0)
    # A prompt's chunks, and the first row of each stream: what it wants is not known before.
    assert spelt == [(2, [10, 54]), (2, [1, 36]), (2, [1]), (2, [])]
