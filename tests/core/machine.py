"""A small engine on the audit executor, turned by hand: for tests of single laws."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from heapq import heappop, heappush
from math import inf

from octavo.core.admission import Admission
from octavo.core.batch import Batch
from octavo.core.drafter import Drafter
from octavo.core.engine import Engine
from octavo.core.executor import Capacity
from octavo.core.policy import Policy
from octavo.core.request import Event, Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.stats import Timing
from octavo.core.steptime import Coefficients, StepFeatures, StepModel
from octavo.errors import TooTight, Unattainable
from tests.core.audit import VOCAB, AuditExecutor

ROOMY = Capacity(
    num_blocks=512,
    block_size=4,
    max_tokens=64,
    max_rows=16,
    max_outputs=64,
    max_context=400,
    depth=1,
)


def ask(
    name: str, prompt: int | list[int], max_tokens: int | None = 4, **fields: object
) -> Request:
    """A request; an integer prompt is a length, its tokens drawn from the name."""
    if isinstance(prompt, int):
        rng = random.Random(name)
        prompt = [rng.randrange(VOCAB) for _ in range(prompt)]
    own = ("arrival", "seed", "stop_ids", "priority", "namespace", "watcher", "prediction")
    own += ("slo", "tier", "tenant")
    rest = {k: v for k, v in fields.items() if k not in own}
    params = SamplingParams(max_tokens=max_tokens, **rest)
    kept = {"arrival": 0.0, "seed": 7, **{k: v for k, v in fields.items() if k in own}}
    return Request(id=name, prompt=array("i", prompt), params=params, **kept)


class Machine:
    """An engine, its batches and its events; `turn` is one pump and one drain, then check()."""

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        prefix_caching: bool = True,
        max_waiting: int = 1024,
        drafter: Drafter | None = None,
        model: StepModel | None = None,
        **capacity: int,
    ) -> None:
        self.capacity = replace(ROOMY, **capacity)
        self.scheduler = Scheduler(
            self.capacity,
            policy,
            prefix_caching=prefix_caching,
            max_waiting=max_waiting,
            drafter=drafter,
            model=model,
        )
        self.faults: dict[str, int] = {}
        self.executor = AuditExecutor(
            self.capacity,
            random.Random(0),
            lambda i: self.scheduler._live[i].request,
            self.faults,
        )
        self.engine = Engine(self.executor, self.scheduler)
        self.events: list[Event] = []
        self.now = 0.0

    @property
    def batches(self) -> list[Batch]:
        return self.executor.batches

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.engine.add(request)

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.engine.pump(self.now)
            self.scheduler.check()
            self.now += 1.0
            self.events += self.engine.drain(self.now)
            self.scheduler.check()

    def run(self) -> dict[tuple[str, int], list[int]]:
        """Turn until all is done; the tokens of each choice."""
        while self.engine.has_work:
            self.turn()
            assert self.now < 10_000, "no progress"
        tokens: dict[tuple[str, int], list[int]] = {}
        for event in self.events:
            tokens.setdefault((event.request_id, event.choice), []).extend(event.tokens)
        return tokens

    def ends(self) -> dict[tuple[str, int], Event]:
        """The last event of each choice that ended."""
        return {(e.request_id, e.choice): e for e in self.events if e.finish is not None}

    def rows(self) -> list[list[tuple[int, int]]]:
        """For each batch the (seq_id, tokens) of its rows, sorted."""
        return [sorted((r.seq_id, len(r.tokens)) for r in b.rows) for b in self.batches]


class Clocked(Machine):
    """A machine whose steps take what `truth` says, on a clock of its own; it learns nothing new.

    `at` says when requests come; `serve` turns until all is done. Times are in `stats.timings`.
    """

    def __init__(self, policy: Policy, truth: Coefficients, **capacity: int) -> None:
        super().__init__(policy, model=StepModel(truth), **capacity)
        self.truth = truth
        self.admission: Admission | None = None
        self.refused: dict[str, TooTight | Unattainable] = {}
        self.steps: list[float] = []
        self._due: list[tuple[float, int, Request]] = []
        self._asked = 0

    def at(self, *requests: Request) -> None:
        for request in requests:
            self._asked += 1
            heappush(self._due, (request.arrival, self._asked, request))

    def serve(self, until: float = inf) -> dict[str, Timing]:
        while (self._due or self.engine.has_work) and self.now < until:
            if not self.engine.has_work:
                self.now = max(self.now, self._due[0][0])
            while self._due and self._due[0][0] <= self.now:
                self.come(heappop(self._due)[2])
            if self.engine.has_work:
                self.tick()
        return {t.request_id: t for t in self.scheduler.stats.timings}

    def come(self, request: Request) -> None:
        """A request at the door."""
        if self.admission is not None:
            try:
                request = self.admission.judge(request, self.now)
            except (TooTight, Unattainable) as error:
                self.refused[request.id] = error
                return
        self.engine.add(request)

    def tick(self) -> None:
        batch = self.scheduler.schedule(self.now)
        if len(self.steps) % 16 == 0:  # it looks at every block
            self.scheduler.check()
        if batch is None:
            news = self.scheduler.take_events()
            assert news, "work, and nothing moves"
            self.events += news
            return
        self.end(batch)

    def end(self, batch: Batch) -> None:
        """A step that was planned runs and comes back."""
        seconds = self.truth.seconds(StepFeatures.of(batch))
        self.executor.submit(batch)
        result = replace(self.executor.collect(), started=self.now, finished=self.now + seconds)
        self.steps.append(seconds)
        self.now += seconds
        self.events += self.scheduler.commit(batch, result, self.now)


def tpot(timing: Timing) -> float:
    """As the field measures it."""
    assert timing.first_token is not None
    return (timing.finished - timing.first_token) / max(1, timing.num_output - 1)


def ttft(timing: Timing) -> float:
    assert timing.first_token is not None
    return timing.first_token - timing.queued
