"""Places kept for those who were told to come back: what makes `Retry-After` true.

Under a lasting overload a guess at a better moment is no more than that: others come meanwhile, and
a long prompt, which needs a quiet moment, finds none. So who is refused has a place from then on:
its work, due when its deadline would be if it comes as it was told. Newcomers that would take it
are refused as if it waited already (`Admission._squeezed`); it is known again by its tenant and its
prompt. A place is given up soon after its time. Where those who are refused do not come back,
places would only keep others out: then few are kept.

Sans-IO: no clock, told `now`.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from octavo.core.request import Request

GRACE = 0.5  # seconds after its time for which a place is kept
EARLY = 0.5  # seconds before its time from which a place can be taken
SHARE = 0.15  # of the prefill in a second that may be kept
BUSY = 0.5  # of the time until a place is due, for it and all that are due before it
LATEST = 30  # seconds from now that a place may be away
MOST = 64  # places: who looks for one looks at all of them
TRUST = 0.25  # share of places taken above which every refusal has one
FOLLOW = 0.2
SELDOM = 8  # below that, one refusal in so many has one, to see whether it comes back


class _Place(NamedTuple):
    at: float  # when it was told to come
    last: float  # the same, if it was told more than once
    due: float
    seconds: float  # of prefill


class Kept:
    """The places. trust: the share of them that were taken, of late."""

    def __init__(self) -> None:
        self.trust = 0.5
        self._places: dict[int, _Place] = {}
        self._refused = 0

    def __len__(self) -> int:
        return len(self._places)

    def keep(self, key: int, seconds: float, ttft: float, soonest: float, now: float) -> float:
        """A request of so many seconds of prefill is refused and could come in `soonest` seconds:
        in how many seconds it should (whole ones, if there is a place). ttft: within which it must
        be forecast to begin then.
        """
        self._give_up(now)
        place = self._places.get(key)
        if place is not None and place.at > now:  # it came too soon; seconds are told whole
            wait = float(ceil(place.at - now))
            self._places[key] = place._replace(last=now + wait)
            return wait
        self._refused += 1
        wanted = self.trust >= TRUST or self._refused % SELDOM == 0
        if not wanted or len(self._places) >= MOST:
            return soonest
        for wait in range(ceil(soonest), LATEST):
            at = now + wait
            place = _Place(at, at, at + ttft, seconds)
            small = seconds + self._within(at) <= max(SHARE, seconds)
            if small and self._bearable(place, now):
                self._places[key] = place
                return float(wait)
        return max(soonest, float(LATEST))

    def __contains__(self, key: int) -> bool:
        return key in self._places

    def _within(self, at: float) -> float:
        """Seconds of prefill that are kept for about then."""
        return sum([p.seconds for p in self._places.values() if abs(p.at - at) < 1.0])

    def _bearable(self, place: _Place, now: float) -> bool:
        """Whether with one more the places still leave time for others: a long prompt has its turn
        whatever the second's share, and many in turn would be all that is ever computed."""
        taken = 0.0
        for one in sorted([*self._places.values(), place], key=lambda one: one.due):
            taken += one.seconds
            if one.due >= place.due and taken > BUSY * (one.due - now):
                return False
        return True

    def take(self, key: int, now: float) -> None:
        """Whoever has a place and comes at its time takes it."""
        self._give_up(now)
        place = self._places.get(key)
        if place is not None and now >= place.at - EARLY:
            del self._places[key]
            self.trust += FOLLOW * (1.0 - self.trust)

    def backlog(self, now: float) -> list[tuple[float, float]]:
        """(deadline, seconds of prefill) of each place; those whose time is over are given up."""
        self._give_up(now)
        return [(place.due, place.seconds) for place in self._places.values()]

    def _give_up(self, now: float) -> None:
        over = [key for key, place in self._places.items() if place.last + GRACE < now]
        for key in over:
            del self._places[key]
            self.trust -= FOLLOW * self.trust


def known_by(request: Request) -> int:
    """What a request is known by when it comes again."""
    return hash((request.tenant, request.namespace, request.prompt.tobytes()))
