"""A whole server on the fake executor: in process, or on a real socket in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx

from octavo.config import ServerConfig
from octavo.core.admission import Admission, Limits
from octavo.core.drafter import Drafter
from octavo.core.engine import Engine
from octavo.core.policy import Policy, fcfs
from octavo.core.scheduler import Scheduler
from octavo.door import Door
from octavo.grammar.compiled import Grammars
from octavo.grammar.trial import Trial
from octavo.server.app import App
from octavo.server.auth import Keys
from octavo.server.dialect import PLAIN, Dialect
from octavo.server.driver import Driver
from octavo.server.metrics import Metrics
from octavo.server.serve import Shutdown, bind, serve
from octavo.server.service import Served
from tests.server.fakes import VOCAB, FakeExecutor, FakeTokenizer, fake_template

PATIENCE = 60.0  # seconds until a test that hangs is given up; no law is about it

TRIAL = Trial(PATIENCE)  # one process for all servers of a test run


def wait_for(condition: Callable[[], Any]) -> bool:
    """Whether it came to be true. What a test is about it has to show otherwise: not by how long
    this took."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return False


class House:
    """The parts of one server, to look into."""

    def __init__(
        self,
        executor: FakeExecutor | None = None,
        *,
        tokenizer: FakeTokenizer | None = None,
        template: Any = fake_template,
        drafter: Drafter | None = None,
        policy: Policy = fcfs(),
        dialect: Dialect = PLAIN,
        keys: Keys | None = None,
        clock: Callable[[], float] = time.monotonic,
        trial: Trial = TRIAL,
        **config: Any,
    ) -> None:
        self.executor = executor or FakeExecutor()
        self.tokenizer = tokenizer or FakeTokenizer()
        self.scheduler = Scheduler(self.executor.capacity, policy, drafter=drafter)
        self.engine = Engine(self.executor, self.scheduler)
        self.driver = Driver(self.engine, clock=clock, timings=self.scheduler.stats.take_timings)
        speculates = drafter is not None
        self.grammars = Grammars(self.tokenizer, VOCAB, trial)
        capacity, weights = self.executor.capacity, "fake-weights"
        door = Door(self.tokenizer, capacity, VOCAB, weights, speculates, self.grammars)
        served = Served(
            "fake",
            self.tokenizer,
            template,
            door,
            "fp_fake",
            "0.0",
            1,
            timed=policy.timed,
            dialect=dialect,
            hidden_size=8,
        )
        settings = ServerConfig(**config)
        keys = keys or Keys.read(settings.api_key_file)
        metrics = Metrics(self.engine.snapshot)
        self.admission = Admission(self.scheduler, Limits(weights=keys.weights))
        self.app = App(served, self.driver, settings, metrics, keys, self.admission)
        self.shutdown: Callable[[], None] = lambda: None
        self.url = ""
        self.loop: asyncio.AbstractEventLoop  # while it serves

    def held_blocks(self) -> float:
        return self.engine.snapshot()["blocks_held"]

    def idle(self) -> bool:
        """Wait until no sequence and no block is in use."""

        def nothing() -> bool:
            snapshot = self.engine.snapshot()
            return not any(snapshot[k] for k in ("running", "waiting", "blocks_held"))

        return wait_for(nothing)

    def later(self, seconds: float) -> None:
        """So much time passes at once for the event loop's timers: heads and bodies that must have
        come, requests that must have ended. Clocks of ours are another matter: see `clock`."""
        real = self.loop.time
        self.loop.time = lambda: real() + seconds  # type: ignore[method-assign]
        self.loop.call_soon_threadsafe(lambda: None)  # or it would sleep on


@contextlib.asynccontextmanager
async def inside(house: House, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client wired straight to the application."""
    house.loop = asyncio.get_running_loop()
    house.app.start()
    transport = httpx.ASGITransport(house.app)
    try:
        async with httpx.AsyncClient(
            transport=transport, base_url="http://octavo", headers=headers
        ) as client:
            yield client
    finally:
        await house.app.stop()


@contextlib.contextmanager
def outside(house: House) -> Iterator[House]:
    """The server on a socket; `house.url` and `house.shutdown` are set."""
    bound = bind(house.app.config)
    house.url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    up = threading.Event()

    async def main() -> None:
        shutdown, loop = Shutdown(), asyncio.get_running_loop()
        house.loop = loop
        house.shutdown = lambda: loop.call_soon_threadsafe(shutdown.ask)
        await serve(house.app, bound, shutdown, up.set)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert up.wait(PATIENCE)
    try:
        yield house
    finally:
        for _ in range(2):
            with contextlib.suppress(RuntimeError):
                house.shutdown()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def events(text: str) -> list[Any]:
    """The data of an SSE body; comments are dropped and "[DONE]" stays a string."""
    out = []
    for block in text.split("\n\n"):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            out.append(data if data == "[DONE]" else json.loads(data))
    return out


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    """A greedy chat body."""
    messages = [{"role": "user", "content": text}]
    return {"model": "fake", "messages": messages, "temperature": 0, "max_tokens": 40} | fields


def completion(prompt: Any = "hello", **fields: Any) -> dict[str, Any]:
    """A greedy completions body."""
    return {"model": "fake", "prompt": prompt, "temperature": 0, "max_tokens": 40} | fields
