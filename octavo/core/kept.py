"""Places kept for those who were told to come back: what makes `Retry-After` true.

Under a lasting overload a guess at a better moment is no more than that: others come meanwhile, and
a long prompt, which needs a quiet moment, finds none. So who is refused has a place from then on:
its work, due when its deadline would be if it comes as it was told. Newcomers that would take it
are refused as if it waited already (`Admission._squeezed`); it is known again by what it sent and
the deadlines that it asked for, for a tighter one would need another place. A place is given up
soon after its time.

Places are shared out. Of each thing that they take (their number, the prefill of a second, the time
until they are due) a tenant may hold LEAVES times what is left of it: alone three quarters, two
three sevenths each, and a newcomer always finds some (the dynamic threshold of shared buffers,
Choudhury and Hahne, 1998). Where those who are refused do not come back, places would only keep
others out: a tenant that leaves its own empty gets few. Who is new is trusted as the new ones
before were, or many names would be as good as a good one.

Sans-IO: no clock, told `now`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

GRACE = 0.5  # seconds after its time for which a place is kept
EARLY = 0.5  # seconds before its time from which a place can be taken
LEAVES = 3.0  # what a tenant may hold of anything, beside what is left of it
SHARE = 0.2  # of the prefill in a second that may be kept
BUSY = 2 / 3  # of the time until a place is due, for it and all that are due before it
LATEST = 30  # seconds from now that a place may be away; who is told more has none
MOST = 64  # places: who looks for one looks at all of them
TRUST = 0.25  # share of places taken above which every refusal has one
FOLLOW = 0.3  # weight of the latest place
SELDOM = 32  # below that ever fewer have one, but one in so many, to see whether it comes back
MEMORY = 1024  # tenants whose trust is known


class Wanted(NamedTuple):
    """What a place is for. seconds: of prefill; ttft: what is wanted for the first token."""

    tenant: str
    seconds: float
    ttft: float


class _Place(NamedTuple):
    tenant: str
    at: float  # when it was told to come
    last: float  # the same, if it was told more than once
    due: float  # its first token, if it comes as it was told
    by: float  # for when that must be forecast
    seconds: float  # of prefill


@dataclass(slots=True)
class _Standing:
    """A tenant. trust: the share of its places that it took, of late; credit: toward a place, which
    each of its refusals adds to and only a place takes away."""

    trust: float = TRUST
    credit: float = 0.0


class Kept:
    """The places."""

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}
        self._known: dict[str, _Standing] = {}  # those that had a place; the latest last
        self._new = _Standing()  # all others

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: int) -> bool:
        return key in self._places

    def trust(self, tenant: str) -> float:
        """The share of its places that a tenant took, of late."""
        return self._known.get(tenant, self._new).trust

    def keep(self, key: int, wanted: Wanted, within: float, soonest: float, now: float) -> float:
        """One is refused that could come in `soonest` seconds: in how many seconds it should (whole
        ones, if there is a place). within: what is to be forecast then: less than it must, so
        that it is let in though others are slower meanwhile than they are thought to be."""
        self._give_up(now)
        place = self._places.get(key)
        if place is not None:
            if place.at > now:  # it came too soon; seconds are told whole
                wait = float(ceil(place.at - now))
                self._places[key] = place._replace(last=now + wait)
                return wait
            del self._places[key]  # it came as it was told, and is refused all the same
            self._learn(place.tenant, 1.0)
        tenant, seconds, ttft = wanted
        who = self._known.get(tenant, self._new)
        who.credit = min(who.credit + max(who.trust, TRUST / SELDOM), TRUST)
        if who.credit < TRUST or not self._room(tenant):
            return soonest
        for wait in range(ceil(soonest), LATEST):
            at = now + wait
            place = _Place(tenant, at, at, at + ttft, at + within, seconds)
            if self._small(place) and self._bearable(place, now):
                self._places[key] = place
                who.credit = 0.0
                return float(wait)
        return max(soonest, float(LATEST))

    def _room(self, tenant: str) -> bool:
        """Whether a tenant may have one more."""
        places = self._places.values()
        own = sum([place.tenant == tenant for place in places])
        return own + 1 <= LEAVES * (MOST - len(places) - 1)

    def _small(self, new: _Place) -> bool:
        """Whether the second has room for it: at least for one place of each tenant, or a long
        prompt would have none."""
        own = total = new.seconds
        for place in self._places.values():
            if abs(place.at - new.at) < 1.0:
                total += place.seconds
                if place.tenant == new.tenant:
                    own += place.seconds
        return own <= max(LEAVES * (SHARE - total), new.seconds)

    def _bearable(self, new: _Place, now: float) -> bool:
        """Whether with one more the places still leave time for others: a long prompt has its turn
        whatever the second's share, and many in turn would be all that is ever computed."""
        total, own = 0.0, dict[str, float]()
        for place in sorted([*self._places.values(), new], key=_due):
            tenant = place.tenant
            total += place.seconds
            own[tenant] = mine = own.get(tenant, 0.0) + place.seconds
            if place.due >= new.due:
                left = BUSY * (place.due - now) - total
                if left < 0.0 or (tenant == new.tenant and mine > LEAVES * left):
                    return False
        return True

    def take(self, key: int, now: float) -> bool:
        """Whoever has a place and comes at its time takes it; whether that is so."""
        self._give_up(now)
        place = self._places.get(key)
        if place is not None and now >= place.at - EARLY:
            del self._places[key]
            self._learn(place.tenant, 1.0)
            return True
        return False

    def backlog(
        self, now: float, skip: Callable[[set[str]], Collection[str]] = lambda _: ()
    ) -> list[tuple[float, float, float]]:
        """(due, seconds of prefill, when that must be done) of each place; those whose time is over
        are given up. skip: of the tenants that have places, those whose do not count."""
        self._give_up(now)
        places = self._places.values()
        skipped = skip({place.tenant for place in places})
        return [(one.due, one.seconds, one.by) for one in places if one.tenant not in skipped]

    def _give_up(self, now: float) -> None:
        over = [key for key, place in self._places.items() if place.last + GRACE < now]
        for key in over:
            self._learn(self._places.pop(key).tenant, 0.0)

    def _learn(self, tenant: str, came: float) -> None:
        """A place was taken, or not."""
        who = self._known.pop(tenant, None)
        if who is None:
            who = _Standing(self._new.trust)
            self._new.trust += FOLLOW * (came - self._new.trust)
            if len(self._known) >= MEMORY:
                del self._known[next(iter(self._known))]
        who.trust += FOLLOW * (came - who.trust)
        self._known[tenant] = who


def _due(place: _Place) -> float:
    return place.due
