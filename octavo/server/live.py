"""GET /v1/engine/live: the engine as it runs, as server-sent events, for as long as one watches.

While somebody watches, the engine's thread keeps what each step carried, and looks at itself ten
times a second between two steps; all else happens in the event loop. While nobody does, it does
nothing. Frames go to everybody alike; who falls behind is sent the whole state again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from octavo.assembly import Assembly
from octavo.ceilings import hardware, measure_ceilings
from octavo.core.batch import Batch, StepResult
from octavo.core.scheduler import unwatched
from octavo.core.steptime import Coefficients
from octavo.core.view import View, look
from octavo.errors import Overloaded
from octavo.ops.cost import step_terms
from octavo.ops.table import KV_DTYPES
from octavo.server.frames import Frames, Step
from octavo.server.service import Service

log = logging.getLogger("octavo")

INTERVAL = 0.1  # seconds between two looks
HEARTBEAT = 1.0  # seconds after which a frame comes though nothing has changed
WATCHERS = 32
BEHIND = 8  # frames that may wait for a watcher
KEPT_STEPS = 4096  # between two looks
SEND_SECONDS = 60.0  # a watcher that reads nothing for so long has left

_HEAD = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


def routes(service: Service) -> list[Route]:
    return [Route("/v1/engine/live", Watch(Live(service)), methods=["GET"])]


def measured_floor(made: Assembly) -> Callable[[], Coefficients]:
    """Measures this machine for about half a second, and says what is the least that a step of
    this model can take on it: the roofline of the program that is run."""

    def measure() -> Coefficients:
        weights = made.executor.memory()["weights"]  # type: ignore[attr-defined]
        found = measure_ceilings(made.config.threads, made.config.isa, 0.5, weights)
        machine = hardware(found, made.program, made.config.act)
        return Coefficients(**step_terms(made.program, machine, KV_DTYPES[made.config.kv_dtype]))

    return measure


class Watcher:
    """One connection: frames that wait for it, or that it is to be told everything anew."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.anew = True
        self.over = False
        self.wake = asyncio.Event()

    def push(self, frame: bytes) -> None:
        if len(self.frames) >= BEHIND:
            self.frames.clear()
            self.anew = True
        if not self.anew:
            self.frames.append(frame)
        self.wake.set()

    def end(self) -> None:
        self.over = True
        self.wake.set()


class Live:
    """Who watches, and what they are shown. Used in the event loop, but for `_keep`, `_look`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._driver = service.driver
        self._scheduler = service.admission.scheduler
        self._watchers: set[Watcher] = set()
        self._frames = Frames(self._about(), self._scheduler.capacity.num_blocks)
        self._steps: list[Step] = []
        self._beat: asyncio.Task[None] | None = None
        self._asked = False
        self._shown: tuple[Any, ...] = ()
        self._sent = 0.0
        self._measuring: asyncio.Task[None] | None = None
        service.driver.ended.append(self._frames.ended)

    def _about(self) -> dict[str, Any]:
        served, scheduler, capacity = (
            self._service.served,
            self._scheduler,
            self._scheduler.capacity,
        )
        return {
            "model": served.name,
            "octavo": served.version,
            "policy": scheduler.policy.name,
            "block_size": capacity.block_size,
            "num_blocks": capacity.num_blocks,
            "max_rows": capacity.max_rows,
            "max_tokens": capacity.max_tokens,
            "max_context": scheduler.max_len,
            "prefix_caching": scheduler.blocks.prefix_caching,
            "chat": served.template is not None,
        }

    def enter(self) -> Watcher:
        """One more watches. Raises `Overloaded`."""
        if len(self._watchers) >= WATCHERS:
            raise Overloaded(f"{WATCHERS} watch this engine already", 10.0)
        if self._service.draining:
            raise Overloaded("the server is shutting down", 10.0)
        watcher = Watcher()
        self._watchers.add(watcher)
        self._shown = ()  # so that a frame comes at once
        if self._beat is None:
            self._driver.between_steps(self._begin)
            self._beat = asyncio.create_task(self._beats())
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """It watches no more."""
        self._watchers.discard(watcher)

    async def _beats(self) -> None:
        """Ask the engine's thread for a look, again and again, while anybody watches."""
        loop = asyncio.get_running_loop()
        try:
            while self._watchers:
                if not self._asked:
                    self._asked = True
                    self._driver.between_steps(lambda: self._look(loop))
                await asyncio.sleep(INTERVAL)
                self._learn_floor()
                if self._service.draining and not self._service.occupancy.live:
                    for watcher in self._watchers:
                        watcher.end()
        finally:
            self._beat, self._asked = None, False
            self._driver.between_steps(self._cease)

    def _learn_floor(self) -> None:
        """Once, while somebody watches and nothing runs: a measurement beside a step harms both."""
        measure = self._service.measured_floor
        if measure is None or self._measuring is not None or self._service.occupancy.live:
            return

        async def learn() -> None:
            try:
                found = await asyncio.to_thread(measure)
                self._frames.floor = lambda seen: found.seconds(seen.features)
            except Exception:
                log.exception("the ceilings could not be measured")

        self._measuring = asyncio.create_task(learn())

    # ---- the engine's thread ----

    def _begin(self) -> None:
        self._steps.clear()
        self._scheduler.witness = self._keep

    def _cease(self) -> None:
        if self._beat is None:  # nobody came meanwhile
            self._scheduler.witness = unwatched

    def _keep(self, batch: Batch, result: StepResult) -> None:
        """A step came back: a reference is kept, and turned into numbers elsewhere."""
        seen = self._scheduler.model.steps
        took = result.finished - result.started
        known = seen[-1] if seen and took > 0.0 and seen[-1].seconds == took else None
        if len(self._steps) < KEPT_STEPS:
            self._steps.append(Step(batch, result, known))

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            view = look(self._scheduler, self._driver.clock())
            steps, self._steps = self._steps, []
        except Exception:  # watching must never harm who is watched
            log.exception("the engine could not be looked at")
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._show, view, steps)

    # ---- back in the loop ----

    def _show(self, view: View, steps: list[Step]) -> None:
        """A look came: make a frame of it, unless it looks as it did."""
        self._asked = False
        counters = self._scheduler.stats.counters
        state = (counters.steps, counters.added, counters.aborted, view.num_waiting, view.running)
        if state == self._shown and view.now - self._sent < HEARTBEAT:
            return
        self._shown, self._sent = state, view.now
        frame = self._frames.frame(view, steps, counters)
        for watcher in self._watchers:
            watcher.push(frame)

    def hello(self) -> bytes:
        return self._frames.hello()


class Watch:
    """The endpoint, as a raw ASGI application."""

    def __init__(self, live: Live) -> None:
        self._live = live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = self._live.enter()
        left = asyncio.create_task(_until_left(receive, watcher))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEAD})
            while True:
                await watcher.wake.wait()
                watcher.wake.clear()
                if watcher.over:
                    break
                data = self._live.hello() if watcher.anew else b"".join(watcher.frames)
                watcher.anew = False
                watcher.frames.clear()
                async with asyncio.timeout(SEND_SECONDS):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            left.cancel()
            self._live.leave(watcher)


async def _until_left(receive: Receive, watcher: Watcher) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    watcher.end()
