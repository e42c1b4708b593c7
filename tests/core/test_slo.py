"""Deadlines: what is due when, how long steps take, who goes first and who gives way.

On a machine whose step times are known and that keeps its own clock.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import pytest

from octavo.core.admission import Admission
from octavo.core.fair import fair
from octavo.core.policy import Policy, fcfs
from octavo.core.request import EXPIRED, FinishReason, Forecast, Request, Slo, Tier
from octavo.core.slo import first_due, pace_from, slo
from octavo.core.stats import Timing
from octavo.core.steptime import Coefficients
from octavo.errors import InvalidRequest
from tests.core.machine import Clocked, Machine, ask, tpot, ttft

# 10 ms a step, 1 ms a prompt token, 1 ms a decode.
SLOW = Coefficients(0.010, 0.001, 1e-8, 1e-9, 1e-6, 1e-6)
LARGE = {"num_blocks": 2048, "max_context": 4000, "max_tokens": 512, "max_outputs": 512}
CHAT = Slo(ttft=1.0, tpot=0.05)


# ---- what is due --------------------------------------------------------------------------------


def test_the_first_token_is_due_at_ttft_and_the_others_from_there() -> None:
    both = ask("r", 5, arrival=100.0, slo=Slo(ttft=2.0, tpot=0.1))
    assert first_due(both, 7.0) == 102.0
    assert pace_from(both, 101.0, 50.0) == pytest.approx(0.097)
    only_e2e = ask("r", 5, arrival=100.0, slo=Slo(e2e=10.0))
    assert first_due(only_e2e, 7.0) == 103.0
    assert first_due(only_e2e, 20.0) == 101.0  # a tenth is for the first token at least
    assert pace_from(only_e2e, 102.0, 81.0) == pytest.approx(0.97 * 8.0 / 80)
    nothing = ask("r", 5, arrival=100.0)
    assert first_due(nothing, 7.0) == pace_from(nothing, 101.0, 9.0) == inf


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), inf, "1", True, 1e9])
@pytest.mark.parametrize("field", ["ttft", "tpot", "e2e"])
def test_a_deadline_is_a_sane_number_of_seconds(field: str, bad: object) -> None:
    with pytest.raises(InvalidRequest, match=field):
        Slo(**{field: bad})


# ---- steps --------------------------------------------------------------------------------------


def test_a_long_prompt_among_streams_breaks_no_stream() -> None:
    def worst(policy) -> float:
        machine = Clocked(policy, SLOW, **LARGE)
        machine.at(*(ask(f"chat{i}", 20, 60, slo=CHAT) for i in range(8)))
        machine.at(ask("long", 3000, 2, arrival=0.5, slo=Slo(ttft=60.0)))
        done = machine.serve()
        assert done["long"].num_output == 2
        return max(tpot(done[f"chat{i}"]) for i in range(8))

    assert worst(slo()) <= CHAT.tpot
    assert worst(fcfs()) > CHAT.tpot


def test_steps_take_most_of_the_slack_and_no_more_than_a_third_of_a_second() -> None:
    machine = Clocked(slo(), SLOW, **(LARGE | {"max_tokens": 4000}))
    machine.at(ask("long", 3500, 1))
    machine.serve()
    assert 0.30 < max(machine.steps) <= 0.350
    machine = Clocked(slo(), SLOW, **LARGE)
    machine.at(ask("stream", 10, 200, slo=Slo(tpot=0.08)), ask("long", 3000, 1, arrival=0.1))
    done = machine.serve()
    assert done["long"].finished < done["stream"].finished
    # Slack saved up in shorter steps may be spent too.
    assert 0.06 < max(machine.steps[20:-3]) <= 0.350
    assert tpot(done["stream"]) <= 0.08


def test_a_prompt_s_first_token_does_not_wait_for_the_prompts_behind_it() -> None:
    """Unless they are so short that a step of their own would cost as much."""
    machine = Clocked(slo(), SLOW, **LARGE)
    machine.at(*(ask(f"r{i}", 130, 1, slo=CHAT) for i in range(2)))
    done = machine.serve()
    assert ttft(done["r0"]) == pytest.approx(0.140, rel=0.01)
    assert ttft(done["r1"]) == pytest.approx(0.280, rel=0.01)
    machine = Clocked(slo(), SLOW, **LARGE)
    machine.at(*(ask(f"r{i}", 20, 1, slo=CHAT) for i in range(4)))
    machine.serve()
    assert len(machine.steps) == 1


def test_prefill_goes_on_even_if_the_streams_want_more_than_the_machine_has() -> None:
    machine = Clocked(slo(), SLOW, **LARGE)
    machine.at(*(ask(f"stream{i}", 4, 300, slo=Slo(tpot=0.001)) for i in range(8)))
    machine.at(ask("other", 100, 2, arrival=0.2, slo=Slo(ttft=1.0)))
    done = machine.serve()
    assert ttft(done["other"]) < 4.0, "5 % of the time is for prompts"


def test_a_machine_slower_than_any_budget_still_moves() -> None:
    machine = Clocked(slo(), Coefficients(2.0, 0.5, 0.01, 1e-3), **LARGE)
    machine.at(*(ask(f"r{i}", 70, 3, slo=CHAT) for i in range(3)))
    assert all(t.num_output == 3 for t in machine.serve().values())


# ---- who goes first -----------------------------------------------------------------------------


def test_the_one_that_must_start_first_goes_first() -> None:
    machine = Clocked(slo(), SLOW, **(LARGE | {"max_rows": 1}))
    machine.at(ask("busy", 10, 5))
    machine.at(ask("patient", 100, 1, arrival=0.001, slo=Slo(ttft=9.0)))
    machine.at(ask("hurried", 100, 1, arrival=0.002, slo=Slo(ttft=0.6)))
    machine.at(ask("long", 900, 1, arrival=0.003, slo=Slo(ttft=2.5)))
    machine.at(ask("none", 10, 1, arrival=0.0))
    done = machine.serve()
    order = sorted(done, key=lambda name: done[name].first_scheduled)
    assert order[:2] == ["busy", "none"] or order[0] == "busy"
    with_deadline = [name for name in order if name in ("patient", "hurried", "long")]
    assert with_deadline == ["hurried", "long", "patient"]
    for name in with_deadline:
        assert ttft(done[name]) <= {"patient": 9.0, "hurried": 0.6, "long": 2.5}[name]


def test_where_prefill_has_its_share_no_step_is_longer_than_the_streams_were_promised() -> None:
    """Not even of an answer of two tokens, which has no later ones to make good with."""
    machine, promised = Clocked(slo(), SLOW, **LARGE), Slo(ttft=3.0, tpot=0.03)
    # Always one stream at least, and prompts without end beside it.
    machine.at(*(ask(f"r{i}", 100, 2 + i % 9, arrival=0.3 * i, slo=promised) for i in range(60)))
    machine.at(ask("stream", 20, 700, slo=promised), ask("bulk", 2000, 1, arrival=1.0))
    done = machine.serve()
    assert max(tpot(t) for t in done.values() if t.num_output > 1) <= promised.tpot
    assert done["bulk"].first_token is not None


def test_a_lost_cause_does_not_hold_up_those_that_can_make_it() -> None:
    machine = Clocked(slo(), SLOW, **LARGE)
    machine.at(ask("lost", 3000, 1, slo=Slo(ttft=0.5)))
    machine.at(*(ask(f"r{i}", 200, 1, arrival=0.25 * i, slo=CHAT) for i in range(20)))
    done = machine.serve()
    assert all(ttft(done[f"r{i}"]) <= CHAT.ttft for i in range(20))
    assert done["lost"].num_output == 1


def test_lost_causes_have_a_share_under_endless_load() -> None:
    machine = Clocked(slo(), SLOW, **LARGE)
    machine.at(ask("lost", 300, 1, slo=Slo(ttft=0.01)), ask("none", 300, 1))
    # 200 tokens of prompt every 0.21 s: all that the machine can do.
    machine.at(*(ask(f"r{i}", 200, 1, arrival=0.212 * i, slo=CHAT) for i in range(300)))
    done = machine.serve(until=60.0)
    assert {"lost", "none"} <= set(done)
    kept = [ttft(t) <= CHAT.ttft for name, t in done.items() if name.startswith("r")]
    assert sum(kept) >= 0.9 * len(kept)


def test_when_all_are_lost_all_are_served_the_short_ones_first() -> None:
    machine = Clocked(slo(), SLOW, **LARGE)
    machine.at(*(ask(f"r{i}", 50 + 40 * (i % 10), 2, slo=Slo(ttft=0.01)) for i in range(60)))
    done = machine.serve()
    assert len(done) == 60
    order = sorted(done.values(), key=lambda t: t.first_token)
    assert sum(t.num_prompt for t in order[:20]) < 0.5 * sum(t.num_prompt for t in order[-20:])


def test_a_lost_cause_is_promoted_when_the_cache_makes_it_feasible() -> None:
    machine = Clocked(slo(), SLOW, **(LARGE | {"max_rows": 2}))
    shared = ask("first", 1000, 1)
    machine.at(ask("first", list(shared.prompt), 1, slo=Slo(ttft=2.0)))
    machine.serve()
    start = machine.now
    machine.at(ask("busy", 20, 8, arrival=start), ask("busy2", 20, 8, arrival=start))
    # Without the cache 1,000 tokens take over a second.
    twin = ask("twin", [*shared.prompt, 1], 1, arrival=start, slo=Slo(ttft=0.5))
    machine.at(twin)
    assert ttft(machine.serve()["twin"]) <= 0.5


# ---- who gives way ------------------------------------------------------------------------------


def crowd(**fields) -> Machine:
    machine = Machine(slo(), num_blocks=24)
    machine.scheduler.reserve.rho = 0.0
    for i in range(5):
        own = {name: values[i] for name, values in fields.items()}
        machine.add(ask(f"r{i}", 8, 40, **own))
    return machine


def test_the_lower_tier_gives_way_first() -> None:
    tiers = [Tier.DEFAULT, Tier.FLEX, Tier.DEFAULT, Tier.PRIORITY, Tier.DEFAULT]
    machine = crowd(tier=tiers)
    while not machine.scheduler.stats.counters.preemptions:
        machine.scheduler.reserve.rho = 0.0
        machine.turn()
    given = [s.request.id for s in machine.scheduler.waiting if s.num_preemptions]
    assert given == ["r1"]


def test_nobody_is_preempted_more_than_twice_but_by_a_higher_rank() -> None:
    machine = crowd(slo=[Slo(ttft=5.0, tpot=0.5 + i) for i in range(5)])
    while machine.engine.has_work:
        machine.scheduler.reserve.rho = 0.0
        ranks = {s.id: s.key for s in machine.scheduler.running}
        before = {s.id: s.num_preemptions for s in machine.scheduler._live.values()}
        machine.turn()
        for seq in machine.scheduler._live.values():
            if seq.num_preemptions > max(2, before.get(seq.id, 0)):
                assert any(rank < seq.key for rank in ranks.values())
        assert machine.now < 2000
    assert machine.scheduler.stats.counters.preemptions
    assert all(len(e.tokens) or e.finish for e in machine.events)


def test_a_preempted_request_keeps_its_place() -> None:
    machine = crowd()
    while not (gone := [s for s in machine.scheduler.waiting if s.num_preemptions]):
        machine.scheduler.reserve.rho = 0.0
        machine.turn()
    machine.add(ask("late", 8, 2, arrival=machine.now))
    machine.run()
    ends = [e.request_id for e in machine.events if e.finish]
    first = {t.request_id: t.first_scheduled for t in machine.scheduler.stats.timings}
    again = gone[0].request.id
    assert first["late"] >= first[again]
    assert set(ends) == {*(f"r{i}" for i in range(5)), "late"}


# ---- deadlines in the queue ---------------------------------------------------------------------


@pytest.mark.parametrize("policy", [fcfs, slo])
def test_what_is_past_its_deadline_is_dropped_unprefilled(policy) -> None:
    machine = Clocked(policy(), SLOW, **(LARGE | {"max_rows": 1}))
    machine.at(ask("busy", 10, 200))
    machine.at(ask("gone", 10, 5, arrival=0.001, slo=Slo(e2e=1.0), n=2))
    machine.at(ask("stays", 10, 5, arrival=0.001, slo=Slo(e2e=60.0)))
    done = machine.serve()
    ends = {(e.request_id, e.choice): e for e in machine.events if e.finish}
    for choice in (0, 1):
        assert ends["gone", choice].finish is FinishReason.ABORT
        assert ends["gone", choice].error == EXPIRED
    assert done["gone"].first_scheduled is None
    assert 1.0 <= done["gone"].finished < 1.1
    assert done["stays"].num_output == 5
    assert machine.scheduler.stats.counters.expired == 2


def test_one_that_was_started_is_not_dropped() -> None:
    machine = Clocked(slo(), SLOW, **LARGE)
    machine.at(ask("late", 10, 100, slo=Slo(e2e=0.2)))
    assert machine.serve()["late"].num_output == 100


# ---- paces of those that have no other deadline -------------------------------------------------

# Steps of 5 ms and 0.45 ms a row.
EACH = Coefficients(5e-3, 4e-5, 1e-8, 1e-9, 4e-4, 1e-5)


def promised(policy: Policy, *requests: Request) -> dict[str, Timing]:
    """What became of those that the door let in; all are known to write 40 tokens."""
    machine = Clocked(policy, EACH, num_blocks=2000, max_rows=32, max_tokens=256, max_outputs=256)
    machine.admission = Admission(machine.scheduler)
    for request in requests:
        machine.scheduler.reserve._by_tenant[request.tenant] = 40.0
    machine.at(*requests)
    done = machine.serve()
    assert done.keys() | machine.refused.keys() == {request.id for request in requests}
    assert not machine.scheduler._roster.paces
    return done


@pytest.mark.parametrize("policy", [slo, lambda: fair(within=slo())], ids=["slo", "fair-slo"])
@pytest.mark.parametrize("paces", [(0.01,), (0.0075, 0.01), (0.0075, 0.04), (0.0075, None)])
@pytest.mark.parametrize("tightest_last", [False, True])
def test_whoever_was_promised_a_pace_alone_has_it_however_many_come_at_once(
    policy: Callable[[], Policy], paces: tuple[float | None, ...], tightest_last: bool
) -> None:
    """No first token is due, so they wait for each other as far as their paces ask for: nothing
    streams yet that would say so, and the door counts none of them beside another."""
    wanted = [paces[0], *[paces[-1]] * 20]
    if tightest_last:
        wanted.reverse()
    asked = [ask(f"r{i}", 12, 40, slo=Slo(tpot=pace)) for i, pace in enumerate(wanted)]
    done = promised(policy(), *asked)
    assert len(done) == 21
    for request in asked:
        pace = request.slo.tpot
        assert pace is None or tpot(done[request.id]) <= pace


def test_who_has_no_deadline_does_not_fill_the_steps_before_a_promised_pace_begins() -> None:
    """Twelve of twenty-five are being read when it comes; the others were not counted beside it."""
    asked = [ask(f"r{i}", 20, 40, slo=Slo(tpot=0.04)) for i in range(25)]
    tight = ask("tight", 20, 40, arrival=0.003, slo=Slo(tpot=0.0075))
    done = promised(slo(), *asked, tight)
    assert tpot(done["tight"]) <= 0.0075
    assert all(tpot(timing) <= 0.04 for timing in done.values())


def test_a_pace_that_others_break_already_holds_up_nobody() -> None:
    """It was promised, and then those with deadlines came in such numbers that it cannot be had:
    who has none joins, and it too."""
    machine = Clocked(slo(), EACH, num_blocks=2000, max_rows=32, max_tokens=256, max_outputs=256)
    machine.add(*[ask(f"r{i}", 6, 300, slo=Slo(ttft=1.0, tpot=0.02)) for i in range(20)])
    machine.tick()
    tight = ask("tight", 6, 40, slo=Slo(tpot=0.0075)).forecast(Forecast(0.01, 0.006))
    machine.add(ask("free", 6, 40), tight)
    machine.serve(1.5)
    assert {"free", "tight"} <= {timing.request_id for timing in machine.scheduler.stats.timings}
    assert machine.scheduler.num_running == 20
