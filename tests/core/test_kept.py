"""Places kept for those who were told to come back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.core.kept import BUSY, EARLY, GRACE, LATEST, MOST, SELDOM, SHARE, Kept, known_by
from tests.core.machine import ask


def test_who_comes_back_in_time_takes_its_place() -> None:
    kept = Kept()
    wait = kept.keep(1, 0.1, 0.5, 1.0, now=10.0)
    assert wait == 1.0
    assert kept.backlog(10.0) == [(11.5, 0.1)]
    kept.take(1, 10.2)  # too soon: it stays
    assert kept.keep(1, 0.1, 0.5, 5.0, now=10.2) == 1.0
    assert kept.backlog(10.2) == [(11.5, 0.1)]
    kept.take(1, 11.0 - EARLY)
    assert not kept.backlog(11.0)


def test_places_are_given_up_and_spread_over_the_seconds() -> None:
    kept = Kept()
    waits = [kept.keep(i, 0.6 * SHARE, 0.5, 1.0, now=0.0) for i in range(5)]
    assert waits == [1.0, 2.0, 3.0, 4.0, 5.0]  # two would be more than a second may keep
    assert len(kept.backlog(1.0 + GRACE + 0.1)) == 4
    assert kept.keep(9, 9.0, 20.0, 1.0, now=60.0) == 1.0  # a long one has its turn too


def test_long_prompts_in_turn_leave_time_for_others() -> None:
    """Thirty of 3 s, due within 6 s of their time: places a second apart were 90 s of work."""
    kept = Kept()
    for i in range(30):
        kept.keep(i, 3.0, 6.0, 1.0, now=0.0)
    taken = 0.0
    for due, seconds in sorted(kept.backlog(0.0)):
        taken += seconds
        assert taken <= BUSY * due
    assert len(kept) > 3


@pytest.mark.parametrize("now", [10.0 + i / 16 for i in range(72)])
def test_who_came_too_soon_and_comes_again_as_told_still_has_its_place(now: float) -> None:
    kept = Kept()
    assert kept.keep(1, 0.1, 1.0, 5.0, now=10.0) == 5.0
    wait = kept.keep(1, 0.1, 1.0, 1.0, now)
    assert wait == int(wait)
    assert kept.backlog(now + wait) == [(16.0, 0.1)]
    kept.take(1, now + wait)
    assert 1 not in kept
    assert kept.trust > 0.5


def test_who_asks_all_the_time_has_its_place_when_it_is_due() -> None:
    kept = Kept()
    kept.keep(1, 0.1, 1.0, 2.0, now=0.0)
    for i in range(1, 5):
        kept.take(1, 0.3 * i)
        kept.keep(1, 0.1, 1.0, 2.0, now=0.3 * i)
    kept.take(1, 1.5)
    assert 1 not in kept


def test_places_whose_time_is_over_keep_nobody_out() -> None:
    """Also while nobody asks for the backlog, as where all are refused for other reasons."""
    kept = Kept()
    for i in range(MOST):
        kept.keep(i, 1e-4, 0.5, 1.0, now=0.0)
    trust = kept.trust
    kept.take(0, 1000.0)  # too late
    assert not len(kept)
    assert kept.trust < trust


def test_a_flood_of_refusals_has_few_places() -> None:
    kept = Kept()
    waits = [kept.keep(i, 1e-4, 0.5, 1.0, now=0.0) for i in range(10_000)]
    assert len(kept) == MOST
    assert max(waits) <= LATEST
    full = Kept()
    for i in range(LATEST + 5):
        wait = full.keep(i, SHARE, 0.5, 1.0, now=0.0)
    assert wait == LATEST
    assert LATEST + 4 not in full


def test_where_nobody_comes_back_few_places_are_kept() -> None:
    kept, places = Kept(), 0
    for i in range(400):
        kept.backlog(10.0 * i)
        before = len(kept)
        kept.keep(i, 0.1, 0.5, 1.0, now=10.0 * i)
        places += len(kept) > before
    assert places < 400 / SELDOM + 12
    assert kept.trust < 0.25


def test_a_request_is_known_by_who_asks_and_what() -> None:
    asked = ask("a", 40, 4, tenant="t")
    assert known_by(asked) == known_by(replace(asked, id="b", arrival=9.0))
    assert known_by(asked) != known_by(replace(asked, tenant="u"))
    assert known_by(asked) != known_by(replace(asked, namespace=b"salt"))
    assert known_by(asked) != known_by(replace(asked, prompt=asked.prompt[:-1]))
