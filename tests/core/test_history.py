"""A sequence's record says what it waited for, in seconds that add up, and whose company it had."""

from __future__ import annotations

import pytest

from octavo.core.history import Cold, Journal, Record, Slow, Wait
from octavo.core.policies import policy_of
from octavo.core.stats import Timing
from tests.core.machine import Machine, ask
from tests.core.workload import Run, draw, random


def timings(machine: Machine) -> dict[str, Timing]:
    return {t.request_id: t for t in machine.scheduler.stats.take_timings()}


def record(timing: Timing) -> Record:
    assert timing.record is not None
    return timing.record


@pytest.mark.parametrize("seed", range(0, 400, 5))
def test_waits_add_up_and_chunks_are_whole(seed: int) -> None:
    work = Run(draw(seed), random.Random(seed))
    work.finish()
    for t in work.scheduler.stats.take_timings():
        kept = record(t)
        assert all(seconds >= 0.0 for seconds in kept.waits.values())
        assert kept.ended is not None
        if t.first_scheduled is not None and not t.num_preemptions:
            waited = t.first_scheduled - t.queued
            assert sum(kept.waits.values()) == pytest.approx(max(0.0, waited))
        if t.first_token is not None:
            assert kept.joined is not None
            assert kept.first is not None
            assert kept.first.steps - kept.joined.steps > 0
            assert kept.ended.rows - kept.joined.rows >= t.num_steps
            if not t.num_preemptions and not t.num_drafted:
                done = t.num_cached
                for chunk in kept.chunks:
                    assert chunk.start == done
                    done += chunk.tokens
                # A last token alone goes with the decodes.
                assert t.num_prompt - done in (0, 1) or kept.num_chunks > len(kept.chunks)
        assert len(kept.preemptions) == min(16, t.num_preemptions)


def test_what_stops_the_queue_is_charged_by_the_second() -> None:
    rows = Machine(max_rows=1, max_tokens=8)
    rows.add(ask("a", 12, 3), ask("b", 4, 1))
    rows.run()
    found = timings(rows)
    assert record(found["b"]).waits == {Wait.ROWS: 4.0, Wait.TURN: 0.0}
    tokens = Machine(max_rows=4, max_tokens=4)
    tokens.add(ask("a", 12, 1), ask("b", 4, 1))
    tokens.run()
    assert record(timings(tokens)["b"]).waits[Wait.TOKENS] == 3.0


def test_short_pools_closed_groups_and_twins_are_named() -> None:
    pool = Machine(num_blocks=8, max_rows=4)
    pool.add(ask("a", 24, 4), ask("b", 20, 2))
    pool.run()
    assert record(timings(pool)["b"]).waits[Wait.BLOCKS] >= 3.0
    group = Machine(policy_of("static"))
    group.add(ask("a", 4, 4))
    group.turn()
    group.add(ask("b", 4, 1))
    group.run()
    assert record(timings(group)["b"]).waits[Wait.GROUP] >= 1.0
    twins = Machine()
    twins.add(ask("a", list(range(1, 17)), 1), ask("b", list(range(1, 17)), 1))
    twins.run()
    found = timings(twins)["b"]
    assert record(found).waits[Wait.TWIN] > 0.0
    assert found.num_cached == 12


def test_why_no_more_was_cached() -> None:
    prompt = list(range(1, 18))
    machine = Machine()
    for name in ("a", "b"):
        machine.add(ask(name, prompt, 1))
        machine.run()
    machine.add(ask("c", [*prompt[:10], 60, 61, 62, 63], 1))
    machine.run()
    machine.add(ask("d", prompt, 1, prompt_logprobs=0))
    machine.run()
    found = timings(machine)
    assert [(found[n].num_cached, record(found[n]).cold) for n in "abcd"] == [
        (0, Cold.NEW),
        (16, Cold.ALL),
        (8, Cold.NEW),
        (0, Cold.SCORED),
    ]
    short = Machine()
    short.add(ask("a", 3, 1))
    short.run()
    assert record(timings(short)["a"]).cold is Cold.SHORT
    off = Machine(prefix_caching=False)
    off.add(ask("a", prompt, 1))
    off.run()
    assert record(timings(off)["a"]).cold is Cold.OFF
    small = Machine(num_blocks=8)
    for name, ids in (("a", prompt), ("b", list(range(30, 61))), ("c", prompt)):
        small.add(ask(name, ids, 1))
        small.run()
    assert record(timings(small)["c"]).cold is Cold.EVICTED


def test_company_is_what_the_steps_carried() -> None:
    machine = Machine()
    machine.add(ask("a", 4, 9), ask("b", 4, 4))
    machine.run()
    found = timings(machine)
    for name, steps, rows in (("a", 9, 13), ("b", 4, 8)):
        kept = record(found[name])
        assert kept.joined is not None
        assert kept.ended is not None
        assert kept.ended.steps - kept.joined.steps == steps == found[name].num_steps
        assert kept.ended.rows - kept.joined.rows == rows  # of a alone, and of both in four


def test_one_that_still_waits_knows_for_what() -> None:
    machine = Machine(max_rows=1)
    machine.add(ask("a", 4, 9), ask("b", 4, 1))
    machine.turn(4)
    (waiting,) = machine.scheduler.choices("b")
    journal = machine.scheduler.stats.journal
    assert journal.why is Wait.ROWS
    assert sum(waiting.record.waited(journal, machine.now).values()) == 4.0
    assert waiting.record.waits == {}
    machine.engine.abort("b", 5.0)
    assert sum(record(timings(machine)["b"]).waits.values()) == 5.0
    assert machine.scheduler.choices("b") == ()


def test_slow_steps_are_those_of_its_own_time() -> None:
    journal = Journal()
    for i in range(20):
        journal.stepped(2, 2.0, 0.01, float(i))
    early = Record(20.0)
    early.queue(journal)
    early.join(journal)
    journal.stepped(3, 514.0, 0.4, 20.0)
    for i in range(21, 30):
        journal.stepped(2, 2.0, 0.01, float(i))
    late = Record(30.0)
    late.queue(journal)
    late.join(journal)
    for i in range(30, 40):
        journal.stepped(2, 2.0, 0.01, float(i))
    early.end(journal, 40.0)
    late.end(journal, 40.0)
    assert early.slow == [Slow(20.0, 0.4, 3, 514.0)]
    assert late.slow == []
    for i in range(1000):
        journal.stepped(1, 1.0, 0.01 * 3**i if i < 5 else 1.0, 50.0 + i)
    assert len(journal.slow) <= 128
    assert len(journal.slowest(0.0)) == 3


def test_a_record_is_bounded() -> None:
    kept = Record(0.0)
    for i in range(1000):
        kept.chunk(float(i), i, 1)
        kept.preempted(float(i), i)
    assert (len(kept.chunks), kept.num_chunks, len(kept.preemptions)) == (64, 1000, 16)
