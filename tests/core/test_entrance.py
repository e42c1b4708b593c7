"""Where a tenant that comes is put among those who wait."""

from __future__ import annotations

import random

import pytest

from octavo.core.entrance import CREDIT, TOGETHER, Entrance


class Books:
    """Tenants that wait, their counters, and what is written down of them."""

    def __init__(self, **weights: float) -> None:
        self.weights = weights
        self.counters: dict[str, float] = {}
        self.entrance = Entrance(self.counters, weights)
        self.waiting: list[str] = []

    def come(self, name: str) -> float:
        seen = self.entrance.place(name, self.waiting)
        self.counters[name] = self.entrance.enter(name, self.waiting)
        assert self.counters[name] == seen, "to look is to know"
        self.entrance.wait(name, 0)
        self.waiting.append(name)
        return self.counters[name]

    def serve(self, name: str, tokens: float) -> None:
        self.counters[name] += tokens / self.weights.get(name, 1.0)

    def go(self, name: str) -> None:
        self.waiting.remove(name)
        self.entrance.emptied(name)
        self.entrance.leave(name, 0)


@pytest.mark.parametrize("size", [1.0, 100.0, 1000.0])
@pytest.mark.parametrize("house", [2, 3, 10, 50])
def test_one_that_stays_is_served_once_in_a_round_of_those_who_come_and_go(
    house: int, size: float
) -> None:
    books = Books()
    books.come("stays")
    turns, made = 0, 0
    for _ in range(20 * house):
        while len(books.waiting) < house:
            books.come(f"n{made}")
            made += 1
        first = min(books.waiting, key=lambda name: books.counters[name])
        books.serve(first, size)
        if first == "stays":
            turns += 1
        else:
            books.go(first)
    assert 19 <= turns <= 21


def test_whoever_comes_is_neither_behind_all_nor_far_from_the_first() -> None:
    rng, books = random.Random(3), Books(a=2.0, b=0.5)
    books.come("a")
    books.come("b")
    for i in range(2000):
        books.serve(rng.choice(books.waiting), rng.expovariate(0.01))
        if rng.random() < 0.3:
            counters = [books.counters[name] for name in books.waiting]
            least, most = min(counters), max(counters)
            assert least <= books.come(f"n{i}") <= min(most, least + CREDIT)
        if len(books.waiting) > 2 and rng.random() < 0.3:
            books.go(books.waiting[rng.randrange(2, len(books.waiting))])


def test_beside_one_that_waits_a_stranger_is_where_that_one_is() -> None:
    books = Books()
    books.come("a")
    for i in range(50):
        books.serve("a", 100.0)
        assert books.come(f"b{i}") == books.counters["a"]
        books.serve(f"b{i}", 60.0)
        books.go(f"b{i}")


def a_thousand_had_a_word_each(books: Books) -> None:
    for i in range(1000):
        books.come(f"b{i}")
        books.serve(f"b{i}", 1.0)
        books.go(f"b{i}")


def test_those_who_come_back_are_together_before_others_by_what_these_were_served() -> None:
    """A thousand that had a word each, and then ask for much, one after another."""
    books, spent = Books(), 0.0

    def again(name: str) -> float:
        given = books.counters["a"] - books.come(name)
        assert 0.0 <= given <= CREDIT
        books.serve(name, given)
        books.go(name)
        return given

    a_thousand_had_a_word_each(books)
    books.come("a")
    books.serve("a", 10 * CREDIT)
    for i in range(1000):
        spent += again(f"b{i}")
    assert spent == TOGETHER
    for i in range(200):  # and no more than others are served meanwhile
        books.serve("a", 100.0)
        spent += again(f"b{i}")
    assert TOGETHER < spent <= TOGETHER + 200 * 100.0


def test_those_who_come_back_one_by_one_leave_the_others_where_they_are() -> None:
    """Nobody waits then, and each goes before the one that came last by next to nothing."""
    books = Books()
    a_thousand_had_a_word_each(books)
    books.come("a")
    books.serve("a", 100 * CREDIT)
    books.go("a")
    for i in range(1000):
        books.come(f"b{i}")
        books.serve(f"b{i}", 1.0)
        books.go(f"b{i}")
    assert books.come("new") >= books.counters["a"]


@pytest.mark.parametrize("weight", [1.0, 0.1, 0.001])
def test_one_of_little_weight_that_has_gone_leaves_others_their_credits(weight: float) -> None:
    books = Books(light=weight)
    books.come("back")
    books.serve("back", 1.0)
    books.go("back")
    books.come("a")
    books.come("light")
    books.serve("light", 4000.0)
    books.come("b")
    books.go("b")
    books.go("light")
    for _ in range(60):
        books.serve("a", 2 * CREDIT)
        given = books.counters["a"] - books.come("back")
        assert given == CREDIT
        books.serve("back", given)
        books.go("back")


def test_a_credit_that_was_not_used_is_there_for_the_next() -> None:
    books = Books()
    for i in range(20):
        books.come(f"b{i}")
        books.go(f"b{i}")
    books.come("a")
    books.serve("a", 10 * CREDIT)
    for i in range(20):
        assert books.counters["a"] - books.come(f"b{i}") == CREDIT
        books.go(f"b{i}")
