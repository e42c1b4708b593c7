"""Places kept for those who were told to come back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.core.admission import known_by
from octavo.core.kept import (
    BUSY,
    EARLY,
    GRACE,
    LATEST,
    LEAVES,
    MEMORY,
    MOST,
    SELDOM,
    SHARE,
    TRUST,
    Kept,
    Wanted,
)
from tests.core.machine import ask

ALONE = LEAVES / (1 + LEAVES)  # what one tenant may have of anything


def keep(
    kept: Kept, key: int, seconds: float, now: float, soonest: float = 1.0, **want: object
) -> float:
    """A refusal; the forecast must be what was asked for, 0.5 s if nothing is said."""
    fields = {"tenant": "", "ttft": 0.5, **want}
    wanted = Wanted(fields["tenant"], seconds, fields["ttft"])
    return kept.keep(key, wanted, wanted.ttft, soonest, now)


def count(kept: Kept, tenant: str) -> int:
    return sum(place.tenant == tenant for place in kept._places.values())


# ---- time ---------------------------------------------------------------------------------------


def test_who_comes_back_in_time_takes_its_place() -> None:
    kept = Kept()
    assert kept.keep(1, Wanted("", 0.1, 0.5), 0.4, 1.0, now=10.0) == 1.0
    assert kept.backlog(10.0) == [(11.5, 0.1, 11.4)]
    assert not kept.take(1, 10.2)  # too soon: it stays
    assert keep(kept, 1, 0.1, 10.2, soonest=5.0) == 1.0
    assert kept.backlog(10.2) == [(11.5, 0.1, 11.4)]
    assert kept.take(1, 11.0 - EARLY)
    assert not kept.backlog(11.0)


def test_places_are_given_up_and_spread_over_the_seconds() -> None:
    kept = Kept()
    waits = [keep(kept, i, 0.6 * ALONE * SHARE, 0.0) for i in range(5)]
    assert waits == [1.0, 2.0, 3.0, 4.0, 5.0]  # two would be more than a second may keep
    assert len(kept.backlog(1.0 + GRACE + 0.1)) == 4
    assert keep(kept, 9, 9.0, 60.0, ttft=20.0) == 1.0  # a long one has its turn too


def test_long_prompts_in_turn_leave_time_for_others() -> None:
    """Thirty of 3 s, due within 6 s of their time: places a second apart were 90 s of work."""
    kept = Kept()
    for i in range(30):
        keep(kept, i, 3.0, 0.0, ttft=6.0)
    taken = 0.0
    for due, seconds, _ in sorted(kept.backlog(0.0)):
        taken += seconds
        assert taken <= ALONE * BUSY * due + 1e-9
    assert len(kept) > 3


@pytest.mark.parametrize("now", [10.0 + i / 16 for i in range(72)])
def test_who_came_too_soon_and_comes_again_as_told_still_has_its_place(now: float) -> None:
    kept = Kept()
    assert keep(kept, 1, 0.1, 10.0, soonest=5.0, ttft=1.0) == 5.0
    wait = keep(kept, 1, 0.1, now, ttft=1.0)
    assert wait == int(wait)
    assert kept.backlog(now + wait) == [(16.0, 0.1, 16.0)]
    assert kept.take(1, now + wait)
    assert 1 not in kept
    assert kept.trust("") > TRUST


def test_who_asks_all_the_time_has_its_place_when_it_is_due() -> None:
    kept = Kept()
    keep(kept, 1, 0.1, 0.0, soonest=2.0, ttft=1.0)
    for i in range(1, 5):
        kept.take(1, 0.3 * i)
        keep(kept, 1, 0.1, 0.3 * i, soonest=2.0, ttft=1.0)
    assert kept.take(1, 1.5)


def test_who_comes_as_told_and_is_refused_all_the_same_is_believed_more() -> None:
    """Before its body is read, where no place lets anybody past."""
    kept, now = Kept(), 0.0
    told = keep(kept, 1, 0.1, now)
    for _ in range(20):
        now, before = now + told, kept.trust("")
        told = keep(kept, 1, 0.1, now)
        assert kept.trust("") > before
        assert [due for due, _, _ in kept.backlog(now)] == [now + told + 0.5]
    assert kept.trust("") > 0.9


def test_places_whose_time_is_over_keep_nobody_out() -> None:
    """Also while nobody asks for the backlog, as where all are refused for other reasons."""
    kept = Kept()
    for i in range(MOST):
        keep(kept, i, 1e-4, 0.0)
    trust = kept.trust("")
    assert not kept.take(0, 1000.0)  # too late
    assert not len(kept)
    assert kept.trust("") < trust


def test_nobody_is_told_of_a_place_beyond_the_last() -> None:
    full = Kept()
    for i in range(LATEST + 5):
        wait = keep(full, i, ALONE * SHARE, 0.0)
    assert wait == LATEST
    assert LATEST + 4 not in full
    # Who could not come sooner is told so, and has none: a guess is no promise.
    assert keep(full, 99, 1e-3, 0.0, soonest=200.0) == 200.0
    assert 99 not in full


def test_what_a_cap_denies_costs_no_credit() -> None:
    """Whose turn it was has its place as soon as there is room again."""
    kept = Kept()
    for i in range(int(ALONE * MOST)):
        keep(kept, i, 1e-4, 0.0)
    now = LATEST + 2.0  # all of them are over, and nobody came: few places for this tenant now
    kept.backlog(now)
    turns = [keep(kept, 1000 + i, 1e-4, now, soonest=200.0) for i in range(2 * SELDOM)]
    assert turns == [200.0] * (2 * SELDOM)  # its turn came, and nothing is free so soon
    keep(kept, 5000, 1e-4, now)
    assert 5000 in kept


# ---- tenants ------------------------------------------------------------------------------------


def test_a_flood_of_refusals_has_few_places_and_leaves_some() -> None:
    kept = Kept()
    waits = [keep(kept, i, 1e-4, 0.0, tenant="flood") for i in range(10_000)]
    assert max(waits) <= LATEST
    assert len(kept) == ALONE * MOST
    for i in range(8):
        keep(kept, -1 - i, 1e-4, 0.0, tenant="other")
    assert count(kept, "other") == 8


@pytest.mark.parametrize("tenants", [2, 3, 5])
def test_tenants_that_all_want_places_have_as_many(tenants: int) -> None:
    """Also where one was there first, once its own are over: all come back as told."""
    kept, told = Kept(), dict[int, float]()
    for i in range(40 * MOST):
        now = 5.0 * i / MOST
        for key in [key for key, at in told.items() if at <= now]:
            del told[key]
            kept.take(key, now)
        tenant = f"t{i % tenants}" if i >= MOST else "t0"
        told[i] = now + keep(kept, i, 1e-4, now, soonest=20.0, tenant=tenant)
    had = [count(kept, f"t{n}") for n in range(tenants)]
    assert min(had) >= 0.8 * max(had)
    assert sum(had) > 0.8 * MOST


def test_no_tenant_holds_all_of_a_second_or_of_the_time_until_then() -> None:
    kept = Kept()
    for i in range(40):
        keep(kept, i, 0.03, 0.0, tenant="many")
        keep(kept, 100 + i, 0.03, 0.0, tenant="many", ttft=9.0)
    # A newcomer's place is as soon as where it is alone.
    assert keep(kept, 1000, 0.03, 0.0, tenant="few") == 1.0
    assert keep(kept, 1001, 3.0, 0.0, tenant="long", ttft=30.0) == 1.0
    for when, _, _ in kept.backlog(0.0):
        near = [s for due, s, _ in kept.backlog(0.0) if abs(due - when) < 0.5 and s < 1.0]
        assert sum(near) <= SHARE + 1e-9


def test_who_does_not_come_back_loses_nobody_else_s_places() -> None:
    kept = Kept()
    for i in range(400):
        now = 10.0 * i
        keep(kept, i, 0.1, now, tenant="gone")
        told = keep(kept, 1000 + i, 0.1, now, tenant="faithful")
        assert kept.take(1000 + i, now + told)
    assert kept.trust("gone") < 0.1 * TRUST
    assert kept.trust("faithful") > 0.9


def test_where_nobody_comes_back_ever_fewer_places_are_kept() -> None:
    kept, places = Kept(), [0, 0]
    for i in range(2000):
        kept.backlog(10.0 * i)
        before = len(kept)
        keep(kept, i, 0.1, 10.0 * i)
        places[i >= 1000] += len(kept) > before
    assert places[0] < 50
    assert places[1] <= 1000 / SELDOM + 1
    # One that comes back at last is known to.
    assert kept.trust("") < TRUST
    told, key = 0.0, 2000
    while key - 1 not in kept:
        told, key = keep(kept, key, 0.1, 1e6), key + 1
    assert kept.take(key - 1, 1e6 + told)
    assert kept.trust("") > 0.2


def test_new_names_are_trusted_as_the_ones_before() -> None:
    kept, places = Kept(), 0
    for i in range(4000):
        before = len(kept)
        keep(kept, i, 1e-3, 10.0 * i, tenant=f"name {i}")
        places += len(kept) > before
    assert places < 4000 / SELDOM + 40
    assert len(kept._known) <= MEMORY


# ---- who ----------------------------------------------------------------------------------------


def test_a_request_is_known_by_who_asks_and_what() -> None:
    asked = ask("a", 40, 4, tenant="t")
    assert known_by(asked) == known_by(replace(asked, id="b", arrival=9.0))
    assert known_by(asked) != known_by(replace(asked, tenant="u"))
    assert known_by(asked) != known_by(replace(asked, namespace=b"salt"))
    assert known_by(asked) != known_by(replace(asked, prompt=asked.prompt[:-1]))
    assert known_by(asked, asked) != known_by(asked)
