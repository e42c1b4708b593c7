"""Replicas on an event heap: each is an engine with a simulated executor, and time is virtual.

Events are ordered by (time, replica): a step that ends at the moment of an arrival ends first,
and the same seed gives the same run. A router sees the replicas' public state without delay; what
real routers suffer from stale state is not modelled.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple, Protocol

from octavo.core.admission import Admission
from octavo.core.batch import Batch, Row
from octavo.core.brief import InBrief
from octavo.core.engine import Engine
from octavo.core.executor import Capacity
from octavo.core.policy import Policy
from octavo.core.probe import probes
from octavo.core.request import FinishReason, Request, Sequence, Slo
from octavo.core.scheduler import Scheduler
from octavo.core.steptime import StepFeatures, StepModel
from octavo.core.stretch import foresee
from octavo.errors import InvalidRequest, Overloaded
from octavo.sim.executor import TOKEN, Durations, SimulatedExecutor
from octavo.sim.workload import Item, Workload

UNBOUNDED = 1 << 40
PROBES = 3  # passes over the start-up probes


class Outcome(NamedTuple):
    """What became of one request. Times in seconds from the start; None where they never came.

    refused: why it was not served, "" if it was. replica: its index.
    """

    item: Item
    replica: int
    first_token: float | None
    finished: float | None
    num_output: int
    num_cached: int = 0
    num_preemptions: int = 0
    refused: str = ""

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.item.at

    @property
    def tpot(self) -> float | None:
        """(E2E - TTFT) / (tokens - 1), as vLLM's bench defines it; None below two tokens."""
        if self.first_token is None or self.finished is None or self.num_output < 2:
            return None
        return (self.finished - self.first_token) / (self.num_output - 1)

    @property
    def e2e(self) -> float | None:
        return None if self.finished is None else self.finished - self.item.at


@dataclass(frozen=True, slots=True)
class Run:
    """A simulated run: outcomes in the order of arrival, gaps between tokens, and totals.

    seconds: from the first arrival to the last end. wall_seconds: what simulating took. counters:
    the schedulers' own, summed. gauges: what does not add up, one value a replica. busy: seconds
    that each replica computed.
    """

    workload: Workload
    outcomes: tuple[Outcome, ...]
    gaps: array[float]
    seconds: float
    wall_seconds: float
    counters: dict[str, float]
    gauges: dict[str, tuple[float, ...]]
    busy: tuple[float, ...]
    names: tuple[str, ...]
    price: float | None = None
    notes: tuple[str, ...] = field(default=())


class Spec(NamedTuple):
    """How to build a replica: its sizes, its speed and its policy (made anew for each). kind: what
    has to be bought, where several names differ in settings alone. admits: whether the second gate
    (`octavo.core.admission`) judges each request before it is queued."""

    name: str
    capacity: Capacity
    seconds: Durations
    policy: Callable[[], Policy]
    noise: float = 0.0
    price: float | None = None
    max_waiting: int = UNBOUNDED
    kind: str = ""
    admits: bool = False


def wanting(slo: Slo) -> Callable[[Item], dict[str, Any]]:
    """For `Fleet.run`: every request wants this."""
    return lambda _: {"slo": slo}


class _Unasked(StepModel):
    """The model of a policy that never asks it: it need not learn."""

    def observe(self, features: StepFeatures, seconds: float) -> None:
        pass


class Replica:
    """One engine in virtual time. make: of a scheduler, from what `Scheduler` is made from."""

    def __init__(
        self,
        spec: Spec,
        index: int,
        *,
        seed: int,
        prefix_caching: bool,
        make: Callable[..., Scheduler] = Scheduler,
    ) -> None:
        self.spec = spec
        self.index = index
        self.executor = SimulatedExecutor(
            spec.capacity, spec.seconds, noise=spec.noise, seed=hash((seed, index))
        )
        policy = spec.policy()
        self.scheduler = make(
            spec.capacity,
            policy,
            max_waiting=spec.max_waiting,
            prefix_caching=prefix_caching,
            model=StepModel() if policy.timed or spec.admits else _Unasked(),
        )
        self.engine = Engine(self.executor, self.scheduler)
        self.gate = Admission(self.scheduler) if spec.admits else None
        if self.scheduler.policy.timed:
            self._learn()
        self.prompt_tokens = 0  # of requests that have no first token yet
        self.requests = 0
        self.gaps = array("d")
        self.waits: dict[str, int] = {}  # tokens of prompts, of requests without a first token

    def _learn(self) -> None:
        """Probe the machine as a server does when it starts; virtual time stands still."""
        model, predicted = self.scheduler.model, self.spec.seconds
        for _ in range(PROBES):
            for batch in probes(self.spec.capacity):
                model.observe(StepFeatures.of(batch), predicted(batch))

    def add(self, request: Request, now: float) -> None:
        """Raises what the gate and `Engine.add` raise."""
        self.executor.now = now
        if self.gate is not None:
            request = self.gate.judge(request, now)
        self.engine.add(request)
        self.waits[request.id] = len(request.prompt)
        self.prompt_tokens += len(request.prompt)
        self.requests += 1

    def started(self, request_id: str) -> None:
        """Its first token is there."""
        self.prompt_tokens -= self.waits.pop(request_id, 0)

    def ended(self, request_id: str) -> None:
        self.started(request_id)
        self.requests -= 1


class Router(Protocol):
    """Chooses the replica of a request; sees all of them as they are."""

    def choose(self, request: Request, replicas: list[Replica], now: float) -> int: ...


class RoundRobin:
    """Each in turn, whatever they do."""

    def __init__(self) -> None:
        self._next = -1

    def choose(self, request: Request, replicas: list[Replica], now: float) -> int:
        self._next = (self._next + 1) % len(replicas)
        return self._next


class LeastTokens:
    """The fewest prompt tokens still to be computed, then the fewest requests."""

    def choose(self, request: Request, replicas: list[Replica], now: float) -> int:
        return min(replicas, key=lambda r: (r.prompt_tokens, r.requests, r.index)).index


class PredictedCost:
    """The replica where the first token is predicted soonest, given its speed and queue.

    Waiting prompts and this one at the replica's own prefill rate, plus the running step; a tie is
    broken by the time that running requests add to every token. Replicas may differ in hardware.
    """

    def __init__(self, prefill_rate: Callable[[Spec], float]) -> None:
        self._rate = prefill_rate
        self._rates: dict[int, float] = {}

    def choose(self, request: Request, replicas: list[Replica], now: float) -> int:
        return min(replicas, key=lambda r: (self._cost(request, r, now), r.index)).index

    def _cost(self, request: Request, replica: Replica, now: float) -> float:
        rate = self._rates.get(replica.index)
        if rate is None:
            rate = self._rates[replica.index] = self._rate(replica.spec)
        left = max(0.0, (replica.executor.ready_at() or now) - now)
        work = replica.prompt_tokens + len(request.prompt)
        crowd = replica.requests / replica.spec.capacity.max_rows
        return left + work / rate * (1.0 + crowd)


def prefill_rate(spec: Spec) -> float:
    """Prompt tokens a second of a replica, from how long a full step of one prompt takes."""
    count = min(spec.capacity.max_tokens, spec.capacity.max_context)
    row = Row(0, 0, array("i", bytes(4 * count)), array("i"), ())
    return count / spec.seconds(Batch(0, (row,)))


ROUTERS: dict[str, str] = {
    "round-robin": "each in turn",
    "least-tokens": "fewest prompt tokens waiting",
    "predicted": "soonest predicted first token, by each replica's own speed",
}


class Fleet:
    """Runs one workload over replicas. Build a new one for each run.

    foresight: steps that are all alike are taken by the stretch (`octavo.core.stretch`), and of the
    others only rows that are more than a token of a stream are made (`octavo.core.brief`). Nothing
    but the time it takes to simulate depends on it.
    """

    def __init__(
        self,
        specs: Iterable[Spec],
        router: Router | None = None,
        *,
        seed: int = 0,
        prefix_caching: bool = True,
        keep_gaps: bool = True,
        foresight: bool = True,
    ) -> None:
        brief = partial(InBrief, token=TOKEN, tells=keep_gaps)
        make = brief if foresight else Scheduler
        self.replicas = [
            Replica(spec, i, seed=seed, prefix_caching=prefix_caching, make=make)
            for i, spec in enumerate(specs)
        ]
        if not self.replicas:
            raise InvalidRequest("a fleet has at least one replica")
        self.router = router if router is not None else RoundRobin()
        self._heap: list[tuple[float, int]] = []
        self._outcomes: dict[str, Outcome] = {}
        self._items: dict[str, tuple[Item, int]] = {}
        self._last: dict[str, float] = {}
        self._keep_gaps = keep_gaps
        self._foresight = foresight
        self._hopeless: Callable[[Outcome], bool] = lambda _: False
        self._lost = False
        self._now = 0.0
        self._arrival = inf  # of the next request
        self._last_end = 0.0

    def run(
        self,
        workload: Workload,
        on: Callable[[Item], dict[str, Any]] = lambda _: {},
        progress: Callable[[int, int], None] = lambda *_: None,
        *,
        hopeless: Callable[[Outcome], bool] = lambda _: False,
    ) -> Run:
        """Every request to its end. on: fields of each `Request` beside sizes (its SLO).
        progress: told (ended or refused, all). hopeless: asked with each outcome; once it says yes
        the rest is refused unserved, for who only wants to know whether a fleet is enough."""
        if not workload.items:
            changes = "; ".join(workload.changes)
            raise InvalidRequest(f"{workload.name} has no request to serve ({changes})", "trace")
        self._hopeless = hopeless
        started = time.perf_counter()
        source = workload.requests(on)
        upcoming = next(source, None)
        heap, steps = self._heap, 0
        while (upcoming is not None or heap) and not self._lost:
            if upcoming is not None and (not heap or upcoming[0].at < heap[0][0]):
                self._now = upcoming[0].at
                self._arrive(*upcoming)
                upcoming = next(source, None)
                continue
            self._arrival = inf if upcoming is None else upcoming[0].at
            self._now, index = heappop(heap)
            self._step(self.replicas[index])
            steps += 1
            if steps & 4095 == 0:
                progress(len(self._outcomes), len(workload))
        if self._lost:
            for item in workload.items:
                left = Outcome(item, 0, None, None, 0, refused="given up")
                self._outcomes.setdefault(item.id, left)
        progress(len(self._outcomes), len(workload))
        return self._result(workload, time.perf_counter() - started)

    def _arrive(self, item: Item, request: Request) -> None:
        replica = self.replicas[self.router.choose(request, self.replicas, self._now)]
        try:
            replica.add(request, self._now)
        except (Overloaded, InvalidRequest) as error:
            why = str(error)
            self._end(Outcome(item, replica.index, None, None, 0, refused=why))
            return
        self._items[item.id] = (item, replica.index)
        if replica.engine.num_outstanding < replica.spec.capacity.depth:
            self._pump(replica, self._now)

    def _step(self, replica: Replica) -> None:
        now = self._now
        replica.executor.now = now
        events = replica.engine.drain(now)
        if replica.waits:
            for event in events:
                if event.tokens and event.request_id in replica.waits:
                    replica.started(event.request_id)
        if self._keep_gaps:
            last, gaps = self._last, replica.gaps
            for event in events:
                if event.tokens:
                    name = event.request_id
                    if name in last:
                        gaps.append(now - last[name])
                    last[name] = now
        if replica.scheduler.stats.timings:
            self._ended(replica)
        if replica.engine.num_outstanding:
            self._await(replica)
        elif self._foresight and replica.executor.foresees:
            self._coast(replica)
        self._last_end = max(self._last_end, replica.executor.now)
        self._pump(replica, replica.executor.now)

    def _coast(self, replica: Replica) -> None:
        """Take the coming steps up to the next arrival, as far as they are alike.

        Until then no replica knows of another, so one may be ahead of the others.
        """
        executor, scheduler = replica.executor, replica.scheduler
        stretch = foresee(scheduler, TOKEN)
        if stretch is None:
            return
        while (steps := stretch.most) and not self._lost:
            seqs = stretch.seqs
            ended = executor.coast(stretch, self._arrival)
            if ended and self._keep_gaps:
                self._note_gaps(replica, seqs, ended)
            if scheduler.stats.timings:
                self._ended(replica)
            if len(ended) < steps:
                break
        stretch.close()

    def _note_gaps(self, replica: Replica, seqs: list[Sequence], ended: array[float]) -> None:
        last, gaps = self._last, replica.gaps
        for seq in seqs:
            name = seq.request.id
            gaps.append(ended[0] - last[name])
            last[name] = ended[-1]
        for before, after in pairwise(ended):
            gaps.extend([after - before] * len(seqs))

    def _pump(self, replica: Replica, now: float) -> None:
        """Let it begin what it can; while it computes it has one entry in the heap."""
        engine, executor = replica.engine, replica.executor
        idle = not engine.num_outstanding
        executor.now = now
        engine.pump(now)
        if idle:
            self._await(replica)

    def _await(self, replica: Replica) -> None:
        ready = replica.executor.ready_at()
        if ready is not None:
            heappush(self._heap, (ready, replica.index))

    def _ended(self, replica: Replica) -> None:
        for timing in replica.scheduler.stats.take_timings():
            name = timing.request_id
            item, index = self._items.pop(name)
            self._last.pop(name, None)
            replica.ended(name)
            refused = "" if timing.finish is FinishReason.LENGTH else str(timing.finish)
            self._end(
                Outcome(
                    item, index, timing.first_token, timing.finished, timing.num_output,
                    timing.num_cached, timing.num_preemptions, refused,
                )
            )  # fmt: skip

    def _end(self, outcome: Outcome) -> None:
        self._outcomes[outcome.item.id] = outcome
        if self._hopeless(outcome):
            self._lost = True

    def _result(self, workload: Workload, wall: float) -> Run:
        counters: dict[str, float] = {}
        for replica in self.replicas:
            for name, value in replica.scheduler.totals().items():
                counters[name] = counters.get(name, 0.0) + value
        factors = [replica.scheduler.factors() for replica in self.replicas]
        gaps = array("d")
        for replica in self.replicas:
            gaps.extend(replica.gaps)
        missing = [item.id for item in workload.items if item.id not in self._outcomes]
        if missing:
            raise InvalidRequest(f"{len(missing)} requests never ended, {missing[0]} among them")
        outcomes = tuple(self._outcomes[item.id] for item in workload.items)
        start = workload.items[0].at
        prices = [r.spec.price for r in self.replicas]
        known = [price for price in prices if price is not None]
        return Run(
            workload=workload,
            outcomes=outcomes,
            gaps=gaps,
            seconds=max(self._last_end - start, workload.seconds),
            wall_seconds=wall,
            counters=counters,
            gauges={name: tuple(own[name] for own in factors) for name in factors[0]},
            busy=tuple(r.executor.busy_seconds for r in self.replicas),
            names=tuple(r.spec.name for r in self.replicas),
            price=sum(known) if len(known) == len(prices) else None,
        )
