"""What each API key may use: requests and tokens a minute, and how many at once.

A bucket holds a minute's worth and fills evenly, so that a key that was quiet may burst, and what
it waits for is known to the second. Tokens are reserved when a request is admitted (its prompt and
the most it may write, or what the key's requests wrote of late where it names no limit) and what
was not used is given back at its end. A request larger than the whole bucket is let in by a full
one, or it could never be served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

from octavo.core.request import Request
from octavo.errors import TenantLimit
from octavo.server.auth import Key

MINUTE = 60.0
FIRST_OUTPUT = 256.0  # tokens expected of a request that names no limit, before any was seen
FOLLOW = 0.1


class Bucket:
    """`limit` a minute; filled evenly, never above `limit`; debts are paid first."""

    def __init__(self, limit: float, now: float) -> None:
        self.limit = limit
        self._level = limit
        self._at = now

    def level(self, now: float) -> float:
        """What is in it now; below zero it is in debt."""
        self._level = min(self.limit, self._level + (now - self._at) * self.limit / MINUTE)
        self._at = now
        return self._level

    def take(self, amount: float, now: float) -> None:
        """Take so much out, whether it is there or not; a negative amount is given back."""
        self._level = min(self.limit, self.level(now) - amount)

    def wait(self, amount: float, now: float) -> float:
        """Seconds until so much is in it (all it can hold, if that is less); 0 if it is."""
        lacking = min(amount, self.limit) - self.level(now)
        return max(0.0, lacking) * MINUTE / self.limit

    def resize(self, limit: float, now: float) -> None:
        """Another limit; what was used stays used."""
        used = self.limit - self.level(now)
        self.limit = limit
        self._level = limit - used


class Meter:
    """One key's use."""

    def __init__(self, key: Key, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.name = key.name
        self.live = 0
        self.seconds = 1.0  # that its requests took of late
        self.output = FIRST_OUTPUT
        self.concurrent: int | None = None
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.hold(key)

    def hold(self, key: Key) -> None:
        """Take over the key's limits, which a reload may have changed."""
        now = self.clock()
        self.concurrent = key.concurrent
        self.requests = _sized(self.requests, key.rpm, now)
        self.tokens = _sized(self.tokens, key.tpm, now)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What is left, in the headers that OpenAI's clients know."""
        now, found = self.clock(), []
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                left = max(0, int(bucket.level(now)))
                reset = shown_seconds(bucket.wait(bucket.limit, now))
                found += [
                    (f"x-ratelimit-limit-{name}".encode(), b"%d" % bucket.limit),
                    (f"x-ratelimit-remaining-{name}".encode(), b"%d" % left),
                    (f"x-ratelimit-reset-{name}".encode(), reset.encode()),
                ]
        return found


def _sized(bucket: Bucket | None, limit: int | None, now: float) -> Bucket | None:
    if limit is None:
        return None
    if bucket is None:
        return Bucket(limit, now)
    if bucket.limit != limit:
        bucket.resize(limit, now)
    return bucket


def shown_seconds(seconds: float) -> str:
    """As OpenAI writes it: 12ms, 1.5s, 6m0s."""
    if seconds < 1.0:
        return f"{ceil(seconds * 1e3)}ms"
    if seconds < MINUTE:
        return f"{ceil(seconds * 10) / 10:g}s"
    minutes, rest = divmod(ceil(seconds), 60)
    return f"{minutes}m{rest}s"


class Lease:
    """One request's part of its key's limits, for the time of a `with`; `used`: tokens, once it is
    known. A request without a key, or whose key has no limits, has one that does nothing."""

    def __init__(self, meter: Meter | None) -> None:
        self.used = 0
        self._meter = meter
        self._reserved = 0.0
        self._prompt = 0
        self._entered = meter.clock() if meter is not None else 0.0

    def reserve(self, requests: Sequence[Request]) -> None:
        """It is tokens now: reserve what it may use. Raises `TenantLimit`."""
        meter = self._meter
        if meter is None or meter.tokens is None:
            return
        self._prompt = sum(len(request.prompt) for request in requests)
        params = requests[0].params
        most = meter.output if params.max_tokens is None else params.max_tokens
        need = self._prompt + params.n * len(requests) * most
        now = meter.clock()
        wait = meter.tokens.wait(need, now)
        if wait > 0.0:
            text = (
                f"the key {meter.name!r} may use {meter.tokens.limit:.0f} tokens a minute; this "
                f"request may need {need:.0f} and {max(0.0, meter.tokens.level(now)):.0f} are left"
            )
            raise TenantLimit(text, wait)
        meter.tokens.take(need, now)
        self._reserved = need

    def withdraw(self) -> None:
        """It was not served and will come again by itself: it was no request yet."""
        if self._meter is not None and self._meter.requests is not None:
            self._meter.requests.take(-1.0, self._meter.clock())

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        """It is over: what was not used is given back."""
        meter = self._meter
        if meter is None:
            return
        meter.live -= 1
        now = meter.clock()
        if meter.tokens is not None and self._reserved:
            meter.tokens.take(self.used - self._reserved, now)
        if self.used:
            meter.seconds += FOLLOW * (now - self._entered - meter.seconds)
            meter.output += FOLLOW * (self.used - self._prompt - meter.output)


class Meters:
    """The meters of all keys that have limits."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_name: dict[str, Meter] = {}

    def of(self, key: Key | None) -> Meter | None:
        """The key's meter, if it has limits."""
        if key is None or not key.limited:
            return None
        meter = self._by_name.get(key.name)
        if meter is None:
            meter = self._by_name[key.name] = Meter(key, self._clock)
        meter.hold(key)
        return meter

    def enter(self, meter: Meter | None) -> Lease:
        """A request comes in. Raises `TenantLimit`, and then counts nothing."""
        if meter is None:
            return Lease(None)
        now = self._clock()
        if meter.concurrent is not None and meter.live >= meter.concurrent:
            text = f"the key {meter.name!r} may have {meter.concurrent} requests at once"
            raise TenantLimit(text, meter.seconds / meter.concurrent, "requests")
        if meter.requests is not None:
            wait = meter.requests.wait(1.0, now)
            if wait > 0.0:
                most = meter.requests.limit
                text = f"the key {meter.name!r} may make {most:.0f} requests a minute"
                raise TenantLimit(text, wait, "requests")
        if meter.tokens is not None and meter.tokens.level(now) <= 0.0:
            text = f"the key {meter.name!r} may use {meter.tokens.limit:.0f} tokens a minute"
            raise TenantLimit(text, meter.tokens.wait(1.0, now))
        if meter.requests is not None:
            meter.requests.take(1.0, now)
        meter.live += 1
        return Lease(meter)
