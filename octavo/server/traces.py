"""Traces: what is kept of each request, so that it can be said why it took as long as it did.

A `Trace` follows one HTTP request from its first header to its last byte; the engine's `Timing`s of
its sequences join it as they end. The latest of those that generated are kept in a ring. No text
and no tokens: ids, counts and times alone.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from octavo.core.history import Journal
from octavo.core.request import NO_SLO, Request, Sequence, Slo
from octavo.core.stats import Timing
from octavo.server.meters import Meter


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request was turned away, in words and numbers of ours. said: to the client. param: the
    field that was wrong. Seconds: retry, until it may come again; ttft and tpot, as forecast;
    ahead, of prefill that is before it."""

    said: str = ""
    param: str = ""
    retry: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    ahead: float | None = None


@dataclass(slots=True)
class Trace:
    """One HTTP request. Times are on the driver's clock; None until then.

    id: the x-request-id, perhaps the client's choice; key: the name of the caller's API key, or "";
    client: its address.
    arrival: its body was here; parsed: it was tokens; first: its first token came back. completion:
    the id in the answer. outcome: how it ended. scheduled, pace: of one whose client left, its
    first step, and seconds a token until then. ahead: sequences running and waiting when it came.
    meter: what its key may use. parent: the caller's W3C traceparent. num_bytes: of its body;
    num_wanted: tokens that it may write, where it says how many; slo: the deadlines asked for.
    """

    id: str
    method: str
    path: str
    started: float
    wall: float = field(default_factory=time.time)
    key: str = ""
    client: str = ""
    status: int = 0
    arrival: float | None = None
    parsed: float | None = None
    first: float | None = None
    scheduled: float | None = None
    pace: float | None = None
    finished: float | None = None
    completion: str = ""
    requests: tuple[str, ...] = ()
    stream: bool = False
    num_bytes: int = 0
    num_wanted: int | None = None
    slo: Slo = NO_SLO
    refusal: Refusal | None = None
    num_prompt: int = 0
    num_output: int = 0
    num_cached: int = 0
    outcome: str = ""
    ahead: tuple[int, int] = (0, 0)
    meter: Meter | None = None
    parent: str = ""
    timings: list[Timing] = field(default_factory=list)

    def measure(self, requests: tuple[Request, ...]) -> None:
        """It is tokens now: how much it asks for, whether it is let in or not."""
        self.num_prompt = sum(len(request.prompt) for request in requests)
        most = [request.params.max_tokens for request in requests]
        if None not in most:
            wanted = (
                r.params.n * (r.params.max_tokens or 0) for r in requests if not r.params.embed
            )
            self.num_wanted = sum(wanted)
        self.slo = requests[0].slo

    @property
    def ttft(self) -> float | None:
        """Seconds from the body's arrival to the first token."""
        if self.first is None or self.arrival is None:
            return None
        return self.first - self.arrival

    @property
    def queued(self) -> float | None:
        """Seconds in the queue: from its prompt being tokens to the first step with any of it."""
        found = [t.first_scheduled for t in self.timings if t.first_scheduled is not None]
        found += [] if self.scheduled is None else [self.scheduled]
        return None if not found or self.parsed is None else max(0.0, min(found) - self.parsed)

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first, of its slowest choice."""
        return max((t.tpot for t in self.timings if t.tpot is not None), default=self.pace)


class Live(Protocol):
    """What can be asked of sequences that have not ended; `Scheduler` is one."""

    def choices(self, request_id: str) -> tuple[Sequence, ...]: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...


class Traces:
    """The traces of requests in the house, and of the latest `most` that have left it."""

    def __init__(self, most: int, live: Live, journal: Journal, clock: Callable[[], float]) -> None:
        self.most = most
        self.live = live
        self.journal = journal
        self.clock = clock
        self._open: dict[str, Trace] = {}  # by completion id
        self._done: OrderedDict[str, Trace] = OrderedDict()
        self._by_engine: dict[str, Trace] = {}
        self._by_client: dict[tuple[str, str], Trace] = {}  # key and x-request-id: the latest

    def enter(self, trace: Trace, completion: str, requests: tuple[Request, ...]) -> None:
        """It is tokens now, and about to be handed to the engine."""
        trace.parsed = self.clock()
        trace.completion = completion
        trace.requests = tuple(request.id for request in requests)
        trace.ahead = (self.live.num_running, self.live.num_waiting)
        if self.most:
            self._open[completion] = trace
            self._by_client[trace.key, trace.id] = trace
            for id in trace.requests:
                self._by_engine[id] = trace

    def ended(self, timing: Timing) -> None:
        """A sequence has ended."""
        trace = self._by_engine.get(timing.request_id)
        if trace is not None:
            trace.timings.append(timing)

    def leave(self, trace: Trace) -> None:
        """Its last byte was handed to the socket, or its client is gone."""
        if self._open.pop(trace.completion, None) is None:
            return
        self._done[trace.completion] = trace
        while len(self._done) > self.most:
            _, old = self._done.popitem(last=False)
            for id in old.requests:
                self._by_engine.pop(id, None)
            if self._by_client.get((old.key, old.id)) is old:
                del self._by_client[old.key, old.id]

    def find(self, id: str, key: str | None) -> Trace | None:
        """By completion id or x-request-id: one of that key's own, or anybody's if `key` is None.
        Clients choose x-request-ids; of equal ones the latest counts."""
        trace = self._open.get(id) or self._done.get(id)
        if trace is None and key is not None:
            return self._by_client.get((key, id))
        if trace is None:
            named = [t for (_, given), t in self._by_client.items() if given == id]
            return max(named, key=lambda t: t.started, default=None)
        return trace if key is None or trace.key == key else None
