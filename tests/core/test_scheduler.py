"""Laws of the scheduler, one at a time; test_properties has them all at once."""

from __future__ import annotations

import pytest

from octavo.core.batch import RowResult, StepResult
from octavo.core.policy import priority
from octavo.core.request import FinishReason
from octavo.errors import ContextOverflow, EngineError, InvalidRequest, Overloaded
from tests.core.audit import VOCAB
from tests.core.machine import Machine, ask
from tests.core.workload import PlantedWatcher

# ---- the door -----------------------------------------------------------------------------------


def test_what_can_never_fit_the_context_is_refused_with_its_numbers() -> None:
    machine = Machine(max_context=50)
    machine.add(ask("fits", 40, 10))
    with pytest.raises(ContextOverflow, match=r"51 tokens .*40 .*11 .*context holds 50") as caught:
        machine.add(ask("long", 40, 11))
    assert caught.value.param == "max_tokens"
    with pytest.raises(ContextOverflow) as caught:
        machine.add(ask("longer", 50, None))
    assert caught.value.param == "prompt"


def test_what_can_never_fit_the_pool_is_refused_and_what_just_fits_is_served() -> None:
    machine = Machine(num_blocks=5)
    with pytest.raises(ContextOverflow, match="KV pool holds 21"):
        machine.add(ask("long", 12, 10))
    machine.add(ask("fits", 12, 9))
    assert len(machine.run()["fits", 0]) == 9


def test_without_max_tokens_a_sequence_ends_with_the_context() -> None:
    machine = Machine(max_context=30)
    machine.add(ask("open", 12, None))
    assert len(machine.run()["open", 0]) == 18
    assert machine.ends()["open", 0].finish is FinishReason.LENGTH


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    machine = Machine(max_waiting=4)
    machine.add(ask("many", 4, n=9))  # alone it may pass the bound, or it could never be served
    with pytest.raises(Overloaded) as caught:
        machine.add(ask("more", 4))
    assert caught.value.retry_after >= 1.0
    machine.run()
    machine.add(*(ask(f"r{i}", 4) for i in range(4)))
    with pytest.raises(Overloaded):
        machine.add(ask("fifth", 4))
    assert machine.scheduler.stats.counters.refused == 2


def test_a_refused_request_leaves_nothing_behind() -> None:
    def broken() -> PlantedWatcher:
        raise RuntimeError("planted")

    machine = Machine()
    with pytest.raises(InvalidRequest, match="watcher"):
        machine.add(ask("a", 4, watcher=broken))
    assert not machine.engine.has_work
    machine.add(ask("a", 4))
    with pytest.raises(InvalidRequest, match="in use"):
        machine.add(ask("a", 4))
    machine.run()
    machine.add(ask("a", 4))  # an ended request's id is free again


# ---- steps --------------------------------------------------------------------------------------


def test_decodes_go_first_and_a_long_prompt_takes_what_is_left() -> None:
    machine = Machine(max_tokens=10)
    machine.add(ask("a", 4, 20), ask("b", 4, 20))
    machine.turn()
    machine.add(ask("long", 30, 2), ask("late", 3, 2))
    machine.turn(5)
    assert machine.rows()[1:5] == [[(0, 1), (1, 1), (2, 8)]] * 3 + [
        [(0, 1), (1, 1), (2, 6), (3, 2)]
    ]


def test_several_prompts_share_a_step() -> None:
    machine = Machine(max_tokens=64)
    machine.add(*(ask(f"r{i}", 10) for i in range(6)))
    machine.turn()
    assert machine.rows()[0] == [(i, 10) for i in range(6)]


def test_n_samples_of_a_prompt_compute_its_blocks_once() -> None:
    machine = Machine(max_tokens=32)
    machine.add(ask("r", 41, 3, n=8))
    tokens = machine.run()
    counters = machine.scheduler.stats.counters
    # Ten full blocks once, the last token by each, and two output tokens each.
    assert counters.computed_tokens == 40 + 8 * (1 + 2)
    assert counters.cached_tokens == 7 * 40
    assert len({tuple(t) for t in tokens.values()}) > 1
    assert machine.ends()["r", 0].num_cached == 0
    assert machine.ends()["r", 5].num_cached == 40


def test_a_burst_on_one_system_prompt_computes_it_once() -> None:
    machine = Machine(max_tokens=48)
    system = [i % VOCAB for i in range(80)]
    machine.add(*(ask(f"r{i}", [*system, i, i + 1], 2) for i in range(10)))
    machine.run()
    assert machine.scheduler.stats.counters.computed_tokens == 80 + 10 * (2 + 1)


def test_when_the_leader_is_aborted_the_held_go_on() -> None:
    machine = Machine(max_tokens=16)
    leader = ask("leader", 60, 2)
    machine.add(leader, ask("twin", list(leader.prompt), 2, seed=8))
    machine.turn()
    assert machine.scheduler.num_waiting == 1
    machine.events += machine.engine.abort("leader", machine.now)
    assert len(machine.run()["twin", 0]) == 2


def test_prompt_logprobs_score_every_position_despite_a_warm_cache() -> None:
    machine = Machine(max_tokens=16, max_outputs=6)
    machine.add(ask("warm", 30))
    machine.run()
    prompt = list(ask("warm", 30).prompt)
    machine.add(ask("scored", prompt, 2, prompt_logprobs=2, n=2))
    machine.run()
    scores = [e.prompt_logprobs for e in machine.events if e.prompt_logprobs is not None]
    assert len(scores) == 1, "once, with the first token of choice 0"
    assert scores[0][0] is None
    assert [s.token for s in scores[0][1:]] == prompt[1:]
    assert all(len(s.top) == 2 for s in scores[0][1:])
    assert machine.ends()["scored", 0].num_cached == 0
    assert machine.ends()["scored", 1].num_cached == 28


def test_a_preempted_sequence_repeats_its_tokens() -> None:
    def tokens(num_blocks: int) -> tuple[dict, int]:
        machine = Machine(num_blocks=num_blocks)
        machine.add(*(ask(f"r{i}", 6 + i, 40) for i in range(6)))
        return machine.run(), machine.scheduler.stats.counters.preemptions

    (roomy, none), (tight, some) = tokens(500), tokens(14)
    assert none == 0 < some
    assert roomy == tight


def test_the_oldest_is_never_preempted() -> None:
    machine = Machine(num_blocks=14)
    machine.add(*(ask(f"r{i}", 6, 40) for i in range(6)))
    machine.run()
    ends = machine.ends()
    assert ends["r0", 0].num_preemptions == 0
    assert next(e.request_id for e in machine.events if e.finish) == "r0"


def test_a_request_too_large_for_now_bars_later_ones_and_gets_its_turn() -> None:
    machine = Machine(num_blocks=20)
    machine.add(ask("first", 30, 20))
    machine.turn()
    machine.add(ask("large", 60, 2), *(ask(f"small{i}", 4, 8) for i in range(8)))
    machine.run()
    times = {t.request_id: t.first_scheduled for t in machine.scheduler.stats.timings}
    assert times["large"] <= min(times[f"small{i}"] for i in range(8))


def test_urgent_requests_take_blocks_from_others() -> None:
    machine = Machine(priority(), num_blocks=16)
    machine.add(*(ask(f"r{i}", 8, 40) for i in range(4)))
    machine.turn(3)
    machine.add(ask("urgent", 8, 40, priority=-1, arrival=3.0))
    machine.run()
    assert machine.ends()["urgent", 0].num_preemptions == 0


# ---- outputs ------------------------------------------------------------------------------------


def test_stop_ids_end_a_sequence_and_come_last_but_not_before_min_tokens() -> None:
    everything = frozenset(range(VOCAB - 1))
    machine = Machine()
    machine.add(ask("early", 5, 50, stop_ids=everything))
    machine.add(ask("later", 5, 50, stop_ids=everything, min_tokens=6))
    tokens = machine.run()
    assert tokens["later", 0][:6] == [VOCAB - 1] * 6
    assert tokens["later", 0][-1] in everything
    assert len(tokens["early", 0]) < 6
    assert machine.ends()["later", 0].finish is FinishReason.STOP


def test_history_goes_with_the_row_only_under_a_penalty() -> None:
    machine = Machine()
    machine.add(ask("plain", 5), ask("penalised", 5, repetition_penalty=1.2))
    machine.run()
    for batch in machine.batches:
        for row in batch.rows:
            history = row.outputs[-1].sample.history
            assert (history is not None) == (row.seq_id == 1)
            if history is not None:
                assert len(history) == row.start + len(row.tokens)


@pytest.mark.parametrize("kind", ["raise in advance", "raise in mask"])
def test_a_watcher_that_raises_fails_its_sequence_alone(kind: str) -> None:
    alone = Machine()
    alone.add(ask("good", 9, 8))
    machine = Machine()
    machine.add(ask("bad", 9, 8, watcher=lambda: PlantedWatcher(kind, 2)), ask("good", 9, 8))
    tokens = machine.run()
    assert tokens["good", 0] == alone.run()["good", 0]
    bad = machine.ends()["bad", 0]
    assert bad.finish is FinishReason.ERROR
    assert "planted" in bad.error


def test_a_watcher_that_breaks_its_contract_fails_its_sequence_alone() -> None:
    class Hungry:
        def advance(self, tokens: tuple[int, ...]) -> tuple[int, None]:
            return 0, None

        def mask(self, position: int) -> None:
            return None

    class Wordy(Hungry):
        def mask(self, position: int) -> str:
            return "all"

    class Rambling(Hungry):
        def advance(self, tokens: tuple[int, ...]) -> tuple[int, str]:
            return 1, "because"

    machine = Machine()
    for name, watcher in (("hungry", Hungry), ("wordy", Wordy), ("rambling", Rambling)):
        machine.add(ask(name, 9, watcher=watcher))
    machine.add(ask("good", 9, 5))
    assert len(machine.run()["good", 0]) == 5
    assert sum(e.finish is FinishReason.ERROR for e in machine.events) == 3


def test_an_error_in_a_row_fails_that_sequence_alone() -> None:
    machine = Machine()
    machine.faults["bad"] = 12
    machine.add(ask("bad", 9, 8), ask("good", 9, 8))
    tokens = machine.run()
    assert len(tokens["bad", 0]) == 4
    assert machine.ends()["bad", 0].error == "planted"
    assert len(tokens["good", 0]) == 8


def test_a_result_that_lacks_what_was_wanted_fails_that_sequence_alone() -> None:
    machine = Machine()
    machine.add(*(ask(f"r{i}", 4) for i in range(3)))
    batch = machine.scheduler.schedule(0.0)
    rows = {0: RowResult((3,)), 1: RowResult()}
    events = machine.scheduler.commit(batch, StepResult(batch.step, rows), 1.0)
    assert [e.finish for e in events] == [None, FinishReason.ERROR, FinishReason.ERROR]
    machine.scheduler.check()


def test_a_result_of_another_step_stops_the_engine() -> None:
    machine = Machine()
    machine.add(ask("a", 4))
    batch = machine.scheduler.schedule(0.0)
    with pytest.raises(EngineError):
        machine.scheduler.commit(batch, StepResult(batch.step + 1, {}), 1.0)


def test_logprobs_come_with_the_tokens_they_belong_to() -> None:
    machine = Machine()
    machine.add(ask("with", 5, logprobs=3), ask("without", 5))
    machine.run()
    for event in machine.events:
        if event.request_id == "without":
            assert event.logprobs is None
        else:
            assert [p.token for p in event.logprobs] == list(event.tokens)
            assert all(len(p.top) == 3 for p in event.logprobs)


# ---- ends ---------------------------------------------------------------------------------------


def test_abort_ends_waiting_held_running_and_flying_choices_at_once() -> None:
    machine = Machine(max_rows=2, depth=2, max_tokens=16)
    machine.add(ask("running", 8, 30), ask("n", 50, 30, n=4), ask("waiting", 6, 30))
    machine.engine.pump(0.0)
    for name, choices in (("running", 1), ("n", 4), ("waiting", 1)):
        events = machine.engine.abort(name, 0.0)
        assert [e.choice for e in events] == list(range(choices))
        assert all(e.finish is FinishReason.ABORT for e in events)
        machine.scheduler.check()
    assert machine.engine.abort("running", 0.0) == []
    assert machine.engine.abort("never seen", 0.0) == []
    machine.run()
    assert machine.events == []
    assert machine.scheduler.blocks.num_available == machine.capacity.num_blocks


def test_an_abort_storm_on_a_blocked_queue_leaves_no_trace() -> None:
    machine = Machine(max_rows=1)
    machine.add(ask("running", 8, 30))
    machine.turn()
    for i in range(1000):
        machine.add(ask(f"r{i}", 8, 30))
        machine.engine.abort(f"r{i}", 0.0)
    assert machine.scheduler.num_waiting == 0
    assert len(machine.scheduler._order._waiting) < 200


def test_batches_in_flight_hold_disjoint_or_consecutive_work() -> None:
    machine = Machine(depth=3, max_tokens=8, max_rows=4)
    machine.add(ask("long", 40, 4), *(ask(f"r{i}", 6, 4) for i in range(4)))
    machine.engine.pump(0.0)
    assert machine.engine.num_outstanding == 3
    assert [b[0] for b in machine.rows()] == [(0, 8)] * 3
    tokens = machine.run()
    assert all(len(t) == 4 for t in tokens.values())
