"""What the endpoints share: the model, the engine's driver, the limits, and who is in the house."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from octavo.config import ServerConfig
from octavo.core.admission import Admission
from octavo.core.request import shown
from octavo.core.stats import Timing
from octavo.core.steptime import Coefficients
from octavo.door import Door
from octavo.errors import Overloaded, UnknownModel
from octavo.server.auth import Keys
from octavo.server.compiling import Compiling
from octavo.server.deadlines import Deadlines
from octavo.server.dialect import PLAIN, Dialect
from octavo.server.driver import Driver
from octavo.server.exchange import Bodies
from octavo.server.meters import Meters
from octavo.server.metrics import Metrics
from octavo.server.protocol import Limits
from octavo.server.store import Store
from octavo.server.traces import Traces
from octavo.text import Tokenizer

Template = Callable[..., list[int]]


@dataclass(frozen=True, slots=True)
class Served:
    """The model that is served. template: chat messages to token ids, or None. dialect: how it
    writes calls and thoughts. priority, timed: whether the policy looks at `priority`, and whether
    it keeps deadlines. hidden_size: how many numbers an embedding has."""

    name: str
    tokenizer: Tokenizer
    template: Template | None
    door: Door
    system_fingerprint: str
    version: str
    created: int
    priority: bool = False
    timed: bool = False
    dialect: Dialect = PLAIN
    hidden_size: int = 0


class Occupancy:
    """How full the house is, and how fast it empties."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self.limit = limit
        self.live = 0
        self._clock = clock
        self._ended: deque[float] = deque(maxlen=64)

    def check(self) -> None:
        """Raises `Overloaded`, with the time in which half of the places will be free."""
        if self.live >= self.limit:
            raise Overloaded(
                f"all {self.limit} places of this server are taken (--max-queue)",
                self.retry_after(),
            )

    def enter(self) -> None:
        """Take a place."""
        self.live += 1

    def leave(self) -> None:
        self.live -= 1
        self._ended.append(self._clock())

    def retry_after(self) -> float:
        """Seconds, from the rate at which the latest requests ended; at least 1, at most 120."""
        if len(self._ended) < 2:
            return 5.0
        rate = len(self._ended) / max(self._clock() - self._ended[0], 1e-3)
        return min(max(self.live / 2 / rate, 1.0), 120.0)


class Life(Protocol):
    """What runs beside the requests while the server does."""

    def start(self) -> None: ...
    async def stop(self) -> None: ...
    def wake(self) -> None:
        """The keys may have changed."""


class Service:
    """One served model with everything that its endpoints need. Used in the event loop."""

    def __init__(
        self,
        served: Served,
        driver: Driver,
        config: ServerConfig,
        metrics: Metrics,
        admission: Admission,
        keys: Keys,
    ) -> None:
        self.served = served
        self.keys = keys
        self.driver = driver
        self.config = config
        self.metrics = metrics
        self.admission = admission
        self.deadlines = Deadlines.read(served.timed, config.slo)
        self.draining = False
        self.measured_floor: Callable[[], Coefficients] | None = None  # a step's least time
        self.store = Store(config.batch_dir) if config.batch_dir is not None else None
        self.lives: list[Life] = []
        self.bodies = Bodies(config.max_body, config.max_bodies)
        self.occupancy = Occupancy(config.max_queue, driver.clock)
        self.limits = Limits(
            config.max_n,
            config.max_prompts,
            served.priority,
            config.strict,
            config.max_stops,
            config.max_logprobs,
            config.max_output_tokens,
        )
        scheduler = admission.scheduler
        journal = scheduler.stats.journal
        self.traces = Traces(config.traces, scheduler, journal, driver.clock)
        self.meters = Meters(driver.clock)
        self.parsers = ThreadPoolExecutor(2, thread_name_prefix="octavo-parse")
        # Of their own: grammars that take long to compile keep no other request waiting.
        self.compilers = ThreadPoolExecutor(2, thread_name_prefix="octavo-compile")
        self.compiling = Compiling(served.door.grammars, self.parsers, self.compilers)

    def ended(self, timing: Timing) -> None:
        """A sequence has ended."""
        self.metrics.ended(timing)
        self.traces.ended(timing)

    def check_open(self) -> None:
        """Raises `Overloaded` while no new work is taken."""
        if self.draining:
            raise Overloaded("the server is shutting down", self.config.drain or 1.0)
        self.occupancy.check()

    def check_model(self, name: str) -> None:
        """Raises `UnknownModel`."""
        if name != self.served.name:
            raise UnknownModel(
                f"the model {shown(name)} is not served here; {self.served.name!r} is", "model"
            )
