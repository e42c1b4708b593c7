"""Laws of the policies: pure orders, and when the door is open."""

from __future__ import annotations

from octavo.core.policy import Occupancy, fcfs, priority, sjf, static
from octavo.core.request import Sequence
from tests.core.machine import Machine, ask


def seq(index: int, arrival: float, level: int = 0) -> Sequence:
    return Sequence(index, ask(f"r{index}", 3, arrival=arrival, priority=level), 0, index)


def test_fcfs_orders_by_arrival_then_by_index() -> None:
    key = fcfs().rank
    assert key(seq(5, 1.0, 9)) < key(seq(1, 2.0)) < key(seq(2, 2.0))


def test_priority_puts_the_urgent_first_until_the_other_has_waited_long_enough() -> None:
    key = priority(ageing=10.0).rank
    assert key(seq(1, 9.0, 0)) < key(seq(0, 0.0, 1))
    assert key(seq(0, 0.0, 1)) < key(seq(1, 11.0, 0))
    assert key(seq(0, 0.0, 0)) < key(seq(1, 0.0, 0))


def test_a_low_priority_request_is_served_under_an_endless_urgent_load() -> None:
    machine = Machine(priority(ageing=10.0), max_rows=1)
    machine.add(ask("patient", 3, 1, priority=1, arrival=0.0))
    for i in range(100):
        machine.add(ask(f"urgent{i}", 3, 1, priority=0, arrival=float(i)))
        machine.turn()
        if ("patient", 0) in machine.ends():
            break
    assert 10 <= i <= 12


def test_continuous_policies_admit_while_a_row_is_free() -> None:
    for policy in (fcfs(), priority()):
        assert policy.admits(seq(0, 0.0), Occupancy(running=3, limit=4, seats=9, opened=0))
        assert not policy.admits(seq(0, 0.0), Occupancy(running=4, limit=4, seats=9, opened=0))


def test_static_admits_a_full_group_of_those_that_waited_when_the_batch_was_empty() -> None:
    admits = static().admits
    assert admits(seq(3, 0.0), Occupancy(running=2, limit=4, seats=3, opened=5))
    assert not admits(seq(5, 0.0), Occupancy(running=2, limit=4, seats=2, opened=5))
    assert not admits(seq(3, 0.0), Occupancy(running=1, limit=4, seats=4, opened=5))


def test_static_serves_groups_one_after_the_other() -> None:
    machine = Machine(static(), max_rows=3, max_tokens=8)
    lengths = {"a": 2, "b": 9, "c": 4, "d": 3, "e": 3}
    for name, max_tokens in lengths.items():
        machine.add(ask(name, 6, max_tokens))
    machine.turn()
    machine.add(ask("late", 6, 1))
    machine.run()
    order = [e.request_id for e in machine.events if e.finish]
    assert order == ["a", "c", "b", "d", "late", "e"]
    together = [{r.seq_id for r in batch.rows} for batch in machine.batches]
    assert any(len(rows) == 3 for rows in together)
    assert all(rows <= {0, 1, 2} or not rows & {0, 1, 2} for rows in together)


def test_static_is_charged_the_tokens_that_padding_would_have_added() -> None:
    machine = Machine(static(), max_rows=3)
    for name, num_prompt, max_tokens in (("a", 5, 2), ("b", 9, 7), ("c", 1, 4), ("d", 6, 6)):
        machine.add(ask(name, num_prompt, max_tokens))
    machine.run()
    # a, b, c are a group of 3 x (9 + 7) tokens; d is alone.
    assert machine.scheduler.stats.counters.padding_tokens == 3 * 16 - (5 + 9 + 1) - (2 + 7 + 4)


def test_continuous_batching_needs_fewer_steps_than_static() -> None:
    steps = {}
    for policy in (fcfs(), static()):
        machine = Machine(policy, max_rows=4)
        for i in range(16):
            machine.add(ask(f"r{i}", 5, 1 + 3 * (i % 4)))
        machine.run()
        steps[policy.name] = machine.scheduler.stats.counters.steps
    assert steps["fcfs"] < 0.75 * steps["static"]


def test_sjf_serves_the_shortest_prompt_first_by_what_is_not_cached() -> None:
    machine = Machine(sjf(doubling=1000.0), max_rows=1)
    machine.add(ask("warm", 60, 1))
    machine.run()
    machine.add(ask("busy", 4, 3))
    machine.turn()
    cached = [*ask("warm", 60, 1).prompt, 1, 2, 3]
    machine.add(ask("long", 40, 1), ask("middle", 20, 1), ask("cached", cached, 1))
    machine.run()
    order = [e.request_id for e in machine.events if e.finish]
    assert order == ["warm", "busy", "cached", "middle", "long"]


def test_sjf_lets_a_long_prompt_go_before_shorter_ones_that_come_late_enough() -> None:
    machine = Machine(sjf(doubling=2.0), max_rows=1)
    machine.add(ask("long", 64, 1, arrival=0.0))
    # A prompt of 4 tokens is worth 2 log2(64 / 4) = 8 seconds.
    for i in range(40):
        machine.add(ask(f"short{i}", 4, 1, arrival=float(i)))
        machine.turn()
        if ("long", 0) in machine.ends():
            break
    assert 8 <= i <= 10
