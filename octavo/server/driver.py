"""The engine's thread: the only one that touches the engine, and the only clock it is told.

Commands go in through a queue; a step's news goes out in one call into the event loop. The next
step is submitted before the last one's news is handed over, so that text, JSON and sockets overlap
the running step. An exception in `add` concerns that request alone; one out of a step ends all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from octavo.core.request import Event, Request
from octavo.core.stats import Timing
from octavo.errors import EngineError, Overloaded

log = logging.getLogger("octavo")

BLOCKED_PAUSE = 0.002
RESTART_SECONDS = 10.0  # when to try again after a server that stops; nobody can know


class EngineLike(Protocol):
    """What the thread drives; `octavo.core.engine.Engine` is one."""

    @property
    def has_work(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str, now: float) -> object: ...
    def pump(self, now: float) -> bool: ...
    def drain(self, now: float) -> list[Event]: ...


@dataclass(frozen=True, slots=True)
class Admitted:
    """All requests of one ticket are in the engine."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The ticket is over: it was refused, or the engine is lost."""

    error: Exception


News = Admitted | Failed | tuple[int, Event]
Item = Event | Timing | Admitted | Failed


class Ticket:
    """The loop's side of one HTTP request: its engine requests and what has come for them.

    News of choice c of the i-th request arrives as (i * n + c, event). `reader`, if there is one,
    is shown the news of a step while the request's task sleeps in `take`, and says whether it has
    dealt with it: most steps of a stream then wake no task. It must not raise. Used in the loop
    only.
    """

    __slots__ = (
        "gone",
        "left",
        "news",
        "ping",
        "reader",
        "requests",
        "sending",
        "task",
        "touched",
        "waiter",
    )

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = tuple(requests)
        self.left = sum(request.params.n for request in requests)
        self.news: list[News] = []
        self.gone = False
        self.ping = False
        self.touched = 0.0  # when bytes were last handed to the socket
        self.sending = False
        self.reader: Callable[[list[News]], bool] | None = None
        self.task: asyncio.Task[Any] | None = None
        self.waiter: asyncio.Future[None] | None = None

    def push(self, item: News) -> None:
        self.news.append(item)
        self.wake()

    def hand_over(self) -> None:
        """A step's news is complete: to the reader, or to the task."""
        waiter, reader = self.waiter, self.reader
        if waiter is None or waiter.done():
            return  # the task is at work and will find it
        if reader is not None and not self.gone and not self.ping and reader(self.news):
            self.news = []
        else:
            waiter.set_result(None)

    def wake(self) -> None:
        waiter = self.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def take(self) -> list[News]:
        """What has come since; empty if woken for `gone` or `ping`."""
        if not self.news and not self.gone and not self.ping:
            self.waiter = asyncio.get_running_loop().create_future()
            try:
                await self.waiter
            finally:
                self.waiter = None
        news, self.news = self.news, []
        return news


class Driver:
    """Owns the engine and its thread. All methods but the thread's are for the event loop.

    timings: takes those of sequences that have ended; all of `ended` are called with each.
    """

    def __init__(
        self,
        engine: EngineLike,
        *,
        clock: Callable[[], float] = time.monotonic,
        timings: Callable[[], list[Timing]] = list,
    ) -> None:
        self.clock = clock
        self.failed: Exception | None = None
        self.progress = clock()
        self.tickets: set[Ticket] = set()
        self.ended: list[Callable[[Timing], None]] = []
        self._engine = engine
        self._timings = timings
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._routes: dict[str, tuple[Ticket, int]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._outbox: list[tuple[str | Ticket, Item]] = []
        self._blocked = False
        self._idle = True  # the thread waits for a command, or has not begun to

    def start(self) -> None:
        """Start the thread; news goes to the running loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread; whatever still runs gets an error."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, 10.0)
        self._fail_all(Overloaded("the server has stopped", RESTART_SECONDS))

    @property
    def alive(self) -> bool:
        return self.failed is None and self._thread.is_alive()

    def check(self) -> None:
        """Raises `EngineError` once the engine is lost: what the scheduler says then is of the
        past, and nothing is to be forecast of it."""
        if self.failed is not None:
            raise EngineError(str(self.failed))

    @property
    def busy(self) -> bool:
        return bool(self._routes)

    def stalled(self, limit: float, now: float) -> bool:
        """Whether there is work, and no step has finished for `limit` seconds."""
        return self.busy and self.failed is None and now - self.progress > limit

    def add(self, ticket: Ticket) -> None:
        """Hand the ticket's requests over; `Admitted` or `Failed` is its first news."""
        self.tickets.add(ticket)
        if self.failed is not None:
            ticket.push(Failed(self.failed))
            return
        if self._idle:  # that it had nothing to do is no stall, until it has taken this
            self.progress = self.clock()
        base = 0
        for request in ticket.requests:
            self._routes[request.id] = (ticket, base)
            base += request.params.n
        self._commands.put(lambda: self._admit(ticket))

    def release(self, ticket: Ticket) -> None:
        """Nobody waits for the ticket any more: abort what still runs."""
        self.tickets.discard(ticket)
        if ticket.left > 0:
            self.abort(ticket)

    def abort(self, ticket: Ticket) -> None:
        """Stop the ticket's requests; their blocks are free after the running step."""
        ids = [r.id for r in ticket.requests if self._routes.pop(r.id, None) is not None]
        if ids:
            self._commands.put(lambda: self._abort(ids))

    def between_steps(self, call: Callable[[], None]) -> None:
        """Have the engine's thread call it when no step runs. It must not raise: that would end
        the engine."""
        self._commands.put(call)

    def abort_all(self, error: Exception) -> None:
        """End every ticket with `error`."""
        for ticket in list(self.tickets):
            self.fail(ticket, error)

    def fail(self, ticket: Ticket, error: Exception) -> None:
        """End a ticket with `error`."""
        self.abort(ticket)
        ticket.left = 0
        ticket.push(Failed(error))

    # ---- the engine's thread ----

    def _run(self) -> None:
        try:
            while self._obey():
                self._step()
        except Exception as error:
            log.exception("the engine failed")
            self.failed = error if isinstance(error, EngineError) else EngineError(str(error))
        finally:
            self._post()

    def _step(self) -> None:
        running = self._engine.pump(self.clock())
        if self._outbox:
            self._post()
        if running or self._engine.has_work:
            events = self._engine.drain(self.clock())
            self._outbox.extend((event.request_id, event) for event in events)
            self._outbox.extend((timing.request_id, timing) for timing in self._timings())
            if running or events:
                self.progress = self.clock()
            # Work that cannot go on yet is no reason to spin.
            self._blocked = not running and not events

    def _obey(self) -> bool:
        """Carry out what has been asked; sleep while there is nothing to do."""
        idle = not self._engine.has_work and not self._outbox
        wait: float | None = None if idle else BLOCKED_PAUSE if self._blocked else 0.0
        self._blocked, self._idle = False, idle
        while True:
            try:
                command = self._commands.get(wait != 0.0, wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            self.progress = self.clock() if idle else self.progress
            self._idle = False
            command()
            wait = 0.0

    def _admit(self, ticket: Ticket) -> None:
        for request in ticket.requests:
            try:
                self._engine.add(request)
            except Exception as error:
                # Those before it, and those behind it: the door expects them.
                self._abort([one.id for one in ticket.requests if one is not request])
                self._outbox.append((ticket, Failed(error)))
                return
        self._outbox.append((ticket, Admitted()))

    def _abort(self, ids: Sequence[str]) -> None:
        for id in ids:
            self._engine.abort(id, self.clock())

    def _post(self) -> None:
        """Hand the news over: one call into the loop."""
        assert self._loop is not None
        news, self._outbox = self._outbox, []
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._deliver, news)

    # ---- back in the loop ----

    def _deliver(self, news: list[tuple[str | Ticket, Item]]) -> None:
        routes = self._routes
        told_of: dict[Ticket, None] = {}
        for to, item in news:
            if isinstance(item, Event):
                route = routes.get(item.request_id)
                if route is None:
                    continue
                ticket, base = route
                if item.finish is not None or item.error is not None:
                    self._ended(ticket)
                ticket.news.append((base + item.choice, item))
                told_of[ticket] = None
            elif isinstance(item, Timing):
                for told in self.ended:
                    told(item)
            elif isinstance(to, Ticket):
                if isinstance(item, Failed):
                    self._forget(to)
                    to.left = 0
                to.push(item)
        for ticket in told_of:
            ticket.hand_over()
        if self.failed is not None:
            self._fail_all(self.failed)

    def _ended(self, ticket: Ticket) -> None:
        ticket.left -= 1
        if ticket.left == 0:
            self._forget(ticket)

    def _forget(self, ticket: Ticket) -> None:
        for request in ticket.requests:
            self._routes.pop(request.id, None)

    def _fail_all(self, error: Exception) -> None:
        for ticket in list(self.tickets):
            if ticket.left > 0:
                self._forget(ticket)
                ticket.left = 0
                ticket.push(Failed(error))
