"""Places kept for those who were told to come back."""

from __future__ import annotations

from dataclasses import replace

from octavo.core.kept import EARLY, GRACE, LATEST, MOST, SELDOM, SHARE, Kept, known_by
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
    assert kept.keep(9, 9.0, 0.5, 1.0, now=60.0) == 1.0  # a long one has its turn too


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
