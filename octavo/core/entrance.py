"""Where a tenant that comes is put among those who wait, whose counters say what they got so far.

Not beside the least of them: where every request comes under a new name, each is served once and
gone, the least never grows, and whoever was served before stands behind all the names that are
still to come. It goes in rounds, as round robin does: a newcomer is put beside the last of those
who wait, so that each of them has its turn before, and then the newcomer has; and one that always
has work waiting is served once for each that waited meanwhile. No further than a bound, though,
where they are far apart.

One that comes back is put before all by a credit: what it did not ask for meanwhile, within a
bound. All of them together are by no more than was served to others since, or a thousand names that
asked for a word each would have an hour before everybody else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

CREDIT = 2048.0  # tokens that one who comes back may be behind the others, or a newcomer before
TOGETHER = 4.0 * CREDIT  # tokens that all who come back may be behind, at once


class Entrance:
    """Who is in the house, and what they were let in before. counters, weights: of the tenants;
    read only."""

    def __init__(self, counters: Mapping[str, float], weights: Mapping[str, float]) -> None:
        self._counters = counters
        self._weights = weights
        self._here: dict[str, set[int]] = {}  # of each tenant, its sequences
        self._before: dict[str, float] = {}  # where those who have a credit would have been
        self._levels: dict[str, float] = {}  # the same of all that have something waiting
        self._last = 0.0  # where the others are while nobody waits
        self._credit = TOGETHER  # that is left
        self._furthest = 0.0  # that a stranger was ever put

    def __contains__(self, tenant: str) -> bool:
        return tenant in self._here

    def size(self, tenant: str) -> int:
        """How many sequences it has in the house."""
        return len(self._here.get(tenant, ()))

    def place(self, tenant: str, waiting: Collection[str]) -> float:
        """The counter with which a tenant would come now. Only looks: another thread may ask."""
        least, most = self._ends(waiting)
        return self._placed(tenant, least, most, self._left(_level(least, most), len(waiting)))

    def enter(self, tenant: str, waiting: Collection[str]) -> float:
        """The same of one that comes, which must be counted with it."""
        least, most = self._ends(waiting)
        self._levels[tenant] = level = _level(least, most)
        self._credit = self._left(level, len(waiting))
        self._furthest = max(self._furthest, level)
        counter = self._placed(tenant, least, most, self._credit)
        if tenant not in self._here and counter < level:
            self._before[tenant] = level
            self._credit -= (level - counter) * self._weight(tenant)
        return counter

    def wait(self, tenant: str, seq_id: int) -> None:
        """One of its sequences waits, newly or again."""
        self._here.setdefault(tenant, set()).add(seq_id)

    def emptied(self, tenant: str) -> None:
        """It has nothing waiting any more. If nobody has, the others are where it is, or where it
        was put before them: of their credits they would each be before the one that came last."""
        self._last = max(self._levels.pop(tenant), self._counters[tenant])

    def leave(self, tenant: str, seq_id: int) -> None:
        """One of its sequences has ended."""
        here = self._here.get(tenant, set())
        here.discard(seq_id)
        if not here and self._here.pop(tenant, None) is not None:
            level = self._before.pop(tenant, 0.0)
            unused = level - self._counters.get(tenant, level)
            self._credit += max(0.0, unused) * self._weight(tenant)

    def _ends(self, waiting: Collection[str]) -> tuple[float, float]:
        found = [self._counters.get(tenant, 0.0) for tenant in waiting]
        return (min(found), max(found)) if found else (self._last, self._last)

    def _left(self, level: float, waiting: int) -> float:
        """Of the credit. What was served to those who wait adds to it: to each as much as strangers
        are put further than any ever was. Not as the furthest is: a tenant of little weight may be
        so far that nobody gets there for hours after it has gone."""
        return min(self._credit + max(0.0, level - self._furthest) * waiting, TOGETHER)

    def _placed(self, tenant: str, least: float, most: float, credit: float) -> float:
        known, level = self._counters.get(tenant), _level(least, most)
        if known is None:  # who was never here has no credit: names are cheap
            return level
        if tenant in self._here:
            return max(known, least - CREDIT)
        left = max(0.0, credit) / self._weight(tenant)
        return max(known, least - CREDIT, level - left)

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)


def _level(least: float, most: float) -> float:
    return min(most, least + CREDIT)
