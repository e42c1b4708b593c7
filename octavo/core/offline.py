"""Work that nobody waits for: requests of `Tier.BATCH` are served from what the others leave.

`behind(policy)` is the policy for everybody else, unchanged, with the offline ones after all of
them: last by rank, so that they wait last and give way first. While anybody else is in the house
one of them decodes in a step, the first by rank, or takes a few tokens of its prompt; the others
keep their blocks and stand still, or give them back if one of the others finds no room (twice at
most; then they are pinned). So what a step costs the others more is bounded by one row, and
an offline request that was begun still ends under an endless load. With the house to themselves
they run like anybody.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from math import inf

from octavo.core.policy import House, Loss, Offers, Order, Pace, Policy, Rank, by_rank
from octavo.core.request import Sequence, State, Tier

LAST = 1e12  # seconds: beyond any time of arrival, and doubles still tell a millisecond
SIP = 32  # tokens of a prompt that a step takes while somebody waits for it


def _offline(seq: Sequence) -> bool:
    return seq.request.tier is Tier.BATCH


class Behind:
    """An order within, and after it those that nobody waits for, as they rank."""

    def __init__(self, within: Order, house: House) -> None:
        self.within = within
        self._last = by_rank(house)
        self._online: dict[int, Sequence] = {}
        self._offline: dict[int, Sequence] = {}

    def _of(self, seq: Sequence) -> Order:
        return self._last if _offline(seq) else self.within

    def push(self, seq: Sequence, now: float) -> None:
        (self._offline if _offline(seq) else self._online)[seq.id] = seq
        self._of(seq).push(seq, now)

    def met(self, tenant: str, now: float) -> None:
        self.within.met(tenant, now)

    def candidates(self, started: list[Sequence], now: float) -> Offers:
        if not self._offline:
            yield from self.within.candidates(started, now)
            return
        yield from self.within.candidates([s for s in started if not _offline(s)], now)
        behind = [s for s in started if _offline(s)]
        if not self._online:
            yield from self._last.candidates(behind, now)
        elif behind:
            yield min(behind, key=_rank), SIP
        elif not self._busy():
            for seq, most in self._last.candidates([], now):
                yield seq, min(most, SIP)
                return

    def _busy(self) -> bool:
        """Whether an offline one runs already, or one of the others waits: what they need next
        must not be taken by one that may keep it for long."""
        return any(s.state is State.RUNNING for s in self._offline.values()) or any(
            s.state is State.WAITING for s in self._online.values()
        )

    def only(self) -> Sequence | None:
        return None

    def served(self, seq: Sequence, start: int, tokens: int) -> None:
        self._of(seq).served(seq, start, tokens)

    def decoded(self, seqs: Iterable[Sequence]) -> None:
        if self._offline:
            seqs = [seq for seq in seqs if not _offline(seq)]
        self.within.decoded(seqs)

    def ended(self, seq: Sequence) -> None:
        (self._offline if _offline(seq) else self._online).pop(seq.id, None)
        self._of(seq).ended(seq)

    def ahead(self, due: float, tenant: str, work: float) -> tuple[float, int]:
        return self.within.ahead(due, tenant, work)

    def give_way(self, tenants: Collection[str], other: str) -> Collection[str]:
        return self.within.give_way(tenants, other)

    def backlog(self) -> list[tuple[float, float]] | None:
        return self.within.backlog()

    @property
    def overdue(self) -> bool:
        return self.within.overdue

    def tidy(self, num_waiting: int) -> None:
        self.within.tidy(num_waiting)
        self._last.tidy(num_waiting)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.within
        yield from self._last


def _rank(seq: Sequence) -> Rank:
    return seq.key


def _when(seq: Sequence) -> float:
    return seq.key[0]


def moving(running: list[Sequence]) -> int:
    """How many of those that run, by rank, go on: all that somebody waits for, and one more."""
    online = bisect_left(running, LAST / 2, key=_when)
    return online + 1 if online else len(running)


def to_the_others(seq: Sequence, other: Sequence) -> bool:
    """An offline one makes room for any that is not."""
    return _offline(seq) and not _offline(other)


def behind(policy: Policy) -> Policy:
    """`policy`, and requests of `Tier.BATCH` after all that it orders."""

    def rank(seq: Sequence) -> Rank:
        arrival, index = policy.rank(seq)
        return (arrival + LAST, index) if _offline(seq) else (arrival, index)

    def order(house: House) -> Order:
        return Behind(policy.order(house), house)

    def pace(house: House, order: Order) -> Pace:
        assert isinstance(order, Behind)
        return policy.pace(house, order.within)

    def loss(seq: Sequence, now: float, house: House) -> Loss:
        # Among them, who came last loses least: nothing else is kept of an offline one's promise.
        if _offline(seq):
            return -inf, -seq.key[0], -seq.key[1]
        return policy.loss(seq, now, house)

    return replace(
        policy, rank=rank, order=order, pace=pace, loss=loss, moving=moving, yields=to_the_others
    )
