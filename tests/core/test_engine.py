"""Laws of the engine, and what a step may cost the interpreter."""

from __future__ import annotations

import sys

import pytest

from octavo.core.batch import Batch, RowResult, StepResult
from octavo.core.engine import Engine
from octavo.core.executor import Capacity
from octavo.core.request import FinishReason
from octavo.core.scheduler import Scheduler
from octavo.errors import EngineError
from tests.core.machine import ROOMY, Machine, ask
from tests.core.workload import PlantedWatcher


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_pump_fills_the_pipeline_and_drain_takes_the_oldest(depth: int) -> None:
    machine = Machine(depth=depth, max_rows=2)
    machine.add(*(ask(f"r{i}", 4, 3) for i in range(6)))
    assert machine.engine.pump(0.0)
    assert machine.engine.num_outstanding == depth
    assert not machine.engine.pump(0.0)
    events = machine.engine.drain(1.0)
    assert [e.request_id for e in events] == ["r0", "r1"]
    assert machine.engine.num_outstanding == depth - 1


def test_decoding_sequences_spread_over_the_batches_in_flight() -> None:
    machine = Machine(depth=2)
    machine.add(*(ask(f"r{i}", 4, 60) for i in range(8)))
    while len(machine.batches) < 40:
        machine.engine.pump(machine.now)
        machine.events += machine.engine.drain(machine.now)
    assert all(len(batch.rows) == 4 for batch in machine.batches[4:])


def test_a_token_exists_from_the_moment_its_step_finished_not_from_when_the_driver_asked() -> None:
    class Slow:
        capacity = ROOMY

        def submit(self, batch: Batch) -> None:
            self.batch = batch

        def collect(self) -> StepResult:
            rows = {row.seq_id: RowResult((7,)) for row in self.batch.rows}
            return StepResult(self.batch.step, rows, started=2.0, finished=5.0)

        def ready_at(self) -> float | None:
            return None

    engine = Engine(Slow(), Scheduler(ROOMY))
    engine.add(ask("r", 4, 1))
    engine.pump(2.0)
    (event,) = engine.drain(2.0)
    (timing,) = engine.scheduler.stats.take_timings()
    assert event.finish is FinishReason.LENGTH
    assert (timing.first_token, timing.finished) == (5.0, 5.0)


def test_an_idle_engine_does_nothing() -> None:
    machine = Machine()
    assert not machine.engine.has_work
    assert not machine.engine.pump(0.0)
    assert machine.engine.drain(0.0) == []


def test_news_without_a_batch_are_work_until_they_are_drained() -> None:
    machine = Machine()
    machine.add(ask("r", 4, watcher=lambda: PlantedWatcher("raise in mask", 0)))
    assert not machine.engine.pump(0.0)
    assert machine.engine.has_work
    (event,) = machine.engine.drain(0.0)
    assert event.finish is FinishReason.ERROR
    assert not machine.engine.has_work


def test_a_lost_executor_is_an_error_of_the_engine() -> None:
    class Lost:
        capacity = ROOMY

        def submit(self, batch: object) -> None: ...

        def collect(self) -> StepResult:
            raise EngineError("gone")

        def ready_at(self) -> None: ...

    engine = Engine(Lost(), Scheduler(ROOMY))
    engine.add(ask("r", 4))
    engine.pump(0.0)
    with pytest.raises(EngineError, match="gone"):
        engine.drain(0.0)


def calls_of_a_decode_step(rows: int, waiting: int, context: int) -> int:
    """Python and C calls of one schedule and one commit, all rows decoding: a cost that does not
    depend on the machine."""
    capacity = Capacity(
        num_blocks=rows * (context // 32 + 4),
        block_size=32,
        max_tokens=10**6,
        max_rows=rows,
        max_outputs=rows,
        max_context=10**4,
    )
    scheduler = Scheduler(capacity, max_waiting=10**6)
    for i in range(rows + waiting):
        scheduler.add(ask(f"r{i}", context, 50))

    def step() -> None:
        batch = scheduler.schedule(0.0)
        rows = {row.seq_id: RowResult((1,)) for row in batch.rows}
        scheduler.commit(batch, StepResult(batch.step, rows), 0.0)

    step()
    step()
    assert scheduler.num_running == rows
    calls = 0

    def count(frame: object, event: str, arg: object) -> None:  # noqa: ARG001
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def test_a_step_costs_by_its_rows_and_not_by_the_queue_or_the_context() -> None:
    few = calls_of_a_decode_step(rows=16, waiting=0, context=65)
    many = calls_of_a_decode_step(rows=64, waiting=0, context=65)
    assert many < 4.1 * few
    assert calls_of_a_decode_step(rows=16, waiting=2000, context=65) <= few + 10
    assert calls_of_a_decode_step(rows=16, waiting=0, context=3201) <= few
    assert many / 64 < 40
