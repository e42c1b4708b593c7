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
LATEST = 30  # seconds from now: nobody is sent away for longer
MOST = 64  # places: who looks for one looks at all of them
TRUST = 0.25  # share of places taken above which every refusal has one
FOLLOW = 0.2
SELDOM = 8  # below that, one refusal in so many has one, to see whether it comes back


class _Place(NamedTuple):
    at: float  # when it was told to come
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
        place = self._places.get(key)
        if place is not None and place.at > now:  # it came too soon
            return float(ceil(place.at - now))
        self._refused += 1
        wanted = self.trust >= TRUST or self._refused % SELDOM == 0
        if not wanted or len(self._places) >= MOST:
            return soonest
        for wait in range(ceil(soonest), LATEST):
            if seconds + self._within(now + wait) <= max(SHARE, seconds):
                self._places[key] = _Place(now + wait, now + wait + ttft, seconds)
                return float(wait)
        return max(soonest, float(LATEST))

    def __contains__(self, key: int) -> bool:
        return key in self._places

    def _within(self, at: float) -> float:
        """Seconds of prefill that are kept for about then."""
        return sum([p.seconds for p in self._places.values() if abs(p.at - at) < 1.0])

    def take(self, key: int, now: float) -> None:
        """Whoever has a place and comes at its time takes it."""
        place = self._places.get(key)
        if place is not None and now >= place.at - EARLY:
            del self._places[key]
            self.trust += FOLLOW * (1.0 - self.trust)

    def backlog(self, now: float) -> list[tuple[float, float]]:
        """(deadline, seconds of prefill) of each place; those whose time is over are given up."""
        over = [key for key, place in self._places.items() if place.at + GRACE < now]
        for key in over:
            del self._places[key]
            self.trust -= FOLLOW * self.trust
        return [(place.due, place.seconds) for place in self._places.values()]


def known_by(request: Request) -> int:
    """What a request is known by when it comes again."""
    return hash((request.tenant, request.namespace, request.prompt.tobytes()))
