"""The counters add up, and the times are in order."""

from __future__ import annotations

import pytest

from octavo.core.request import FinishReason
from tests.core.machine import Machine, ask
from tests.core.workload import Run, draw, random


@pytest.mark.parametrize("seed", range(0, 400, 5))
def test_counters_add_up(seed: int) -> None:
    work = Run(draw(seed), random.Random(seed))
    work.finish()
    scheduler, batches = work.scheduler, work.executor.batches
    totals = scheduler.snapshot()
    assert totals["steps"] == len(batches)
    assert totals["computed_tokens"] == sum(b.num_tokens for b in batches)
    assert totals["rows"] == sum(len(b.rows) for b in batches)
    assert totals["output_tokens"] == sum(len(o.tokens) for o in work.outcomes.values())
    ended = ("stopped", "length", "tool_calls", "aborted", "failed")
    assert sum(totals[name] for name in ended) == totals["added"] == len(work.outcomes)
    assert 0 <= totals["recomputed_tokens"] <= totals["computed_tokens"]
    assert totals["cached_tokens"] <= totals["prompt_tokens"]
    assert totals["running"] == totals["waiting"] == totals["blocks_held"] == 0
    timings = scheduler.stats.take_timings()
    assert len(timings) == totals["added"]
    assert sum(t.num_preemptions for t in timings) == totals["preemptions"]
    assert sum(t.num_cached for t in timings) == totals["cached_tokens"]
    assert sum(t.num_output for t in timings) == totals["output_tokens"]
    for t in timings:
        times = [t.queued, t.first_scheduled, t.first_token, t.finished]
        known = [time for time in times if time is not None]
        assert known == sorted(known)
        assert (t.first_token is None) or t.num_steps > 0
    assert scheduler.stats.take_timings() == []


def test_a_request_is_timed_from_arrival_to_end() -> None:
    machine = Machine(max_rows=1, max_tokens=8)
    machine.add(ask("a", 12, 3), ask("b", 4, 1, arrival=1.0))
    machine.run()
    a, b = machine.scheduler.stats.take_timings()
    assert (a.queued, a.first_scheduled, a.first_token, a.finished) == (0.0, 0.0, 2.0, 4.0)
    assert (a.num_steps, a.num_output, a.finish) == (4, 3, FinishReason.LENGTH)
    assert (b.queued, b.first_scheduled, b.first_token, b.finished) == (1.0, 4.0, 5.0, 5.0)


def test_unread_timings_are_bounded() -> None:
    machine = Machine()
    for i in range(9000):
        machine.add(ask(f"r{i}", 1))
        machine.engine.abort(f"r{i}", 0.0)
    assert len(machine.scheduler.stats.timings) == 8192
    assert machine.scheduler.stats.counters.aborted == 9000
