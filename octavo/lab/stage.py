"""Where experiments on the real engine play: one loaded model, a new scheduler for each run.

Requests come when they are due, whatever the engine is doing; the driver is one thread that steps
the engine and notes when each token came. Runs that are compared go in turn, in an order that
rotates, so that a noisy machine is noisy for all.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple, TypeVar

from octavo.assembly import Assembly
from octavo.core.engine import Engine
from octavo.core.executor import Executor
from octavo.core.policy import Policy, fcfs
from octavo.core.probe import learn_machine
from octavo.core.request import NO_SLO, Event, Request, SamplingParams, Slo
from octavo.core.scheduler import Scheduler
from octavo.core.stats import Timing
from octavo.core.steptime import StepModel
from octavo.errors import EngineError, InvalidRequest
from octavo.sim.workload import Sizes

Watch = Callable[[str], None]

Of = TypeVar("Of")


@dataclass(frozen=True, slots=True)
class Setting:
    """One contestant: a policy, and how much of the executor's capacity it may use (None: all)."""

    name: str
    policy: Callable[[], Policy] = fcfs
    rows: int | None = None
    tokens: int | None = None
    blocks: int | None = None
    prefix_caching: bool = False
    model: Callable[[], StepModel] = StepModel

    def engine(self, executor: Executor) -> Engine:
        """A new engine on `executor`. Nothing of earlier runs can be read: it has no index."""
        capacity = executor.capacity
        wanted = {"max_rows": self.rows, "max_tokens": self.tokens, "num_blocks": self.blocks}
        for name, value in wanted.items():
            if value is not None and value > getattr(capacity, name):
                raise InvalidRequest(f"{self.name}: {name} {value} is beyond the engine's own")
        given = {name: value for name, value in wanted.items() if value is not None}
        scheduler = Scheduler(
            dataclasses.replace(capacity, **given),
            self.policy(),
            max_waiting=1 << 20,
            prefix_caching=self.prefix_caching,
            model=self.model(),
        )
        return Engine(executor, scheduler)


class Visit(NamedTuple):
    """One request of a workload: when, how long, whose. shared: what its prompt begins with."""

    at: float
    prompt: int
    output: int
    tenant: str = ""
    priority: int = 0
    slo: Slo = NO_SLO
    shared: tuple[int, ...] = ()


def drawn(
    seed: str, count: int, rate: float, prompt: Sizes, output: Sizes, least: int = 4
) -> list[Visit]:
    """Poisson arrivals at `rate` a second (inf: all at once), lengths drawn anew for each."""
    draw, now, made = random.Random(f"lab {seed}"), 0.0, []
    for _ in range(count):
        now += draw.expovariate(rate) if rate != float("inf") else 0.0
        made.append(Visit(now, max(least, prompt(draw)), max(2, output(draw))))
    return made


def numbers(seed: str, count: int, below: int) -> list[int]:
    """Token ids, as good as any for how long things take."""
    return random.Random(seed).choices(range(below), k=count)


def requests(visits: Sequence[Visit], vocab: int, seed: str) -> list[Request]:
    """Visits as requests, lengths forced. A prompt is its shared beginning, then its own tokens."""
    made = []
    for number, visit in enumerate(visits):
        own = numbers(f"{seed} {number}", visit.prompt - len(visit.shared), vocab)
        params = SamplingParams(
            max_tokens=visit.output, temperature=0.0, ignore_eos=True, speculation=False
        )
        prompt = array("i", [*visit.shared, *own])
        made.append(
            Request(
                f"r{number}",
                prompt,
                params,
                visit.at,
                seed=number,
                tenant=visit.tenant,
                priority=visit.priority,
                slo=visit.slo,
            )
        )
    return made


@dataclass(slots=True)
class Trial:
    """One run. Times in seconds from its start; tokens: when each came, by request."""

    seconds: float = 0.0
    timings: list[Timing] = field(default_factory=list)
    tokens: dict[str, list[float]] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)

    @property
    def output_tokens(self) -> int:
        return sum(t.num_output for t in self.timings)

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds

    def gaps(self, ids: Iterable[str] | None = None) -> list[float]:
        """Between two tokens of a request (ITL), of these requests or all."""
        chosen = self.tokens if ids is None else ids
        lists = [self.tokens[id] for id in chosen]
        return [b - a for times in lists for a, b in pairwise(times)]

    @property
    def ttfts(self) -> list[float]:
        return [t.ttft for t in self.timings if t.ttft is not None]

    @property
    def e2es(self) -> list[float]:
        return [t.finished - t.queued for t in self.timings]


@dataclass(frozen=True, slots=True)
class Clock:
    """What time it is, and how to wait; the tests have another."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


Look = Callable[[Scheduler, list[Event], float], None]
Gate = Callable[[Request, float], Request | None]


def play(
    engine: Engine,
    wanted: Sequence[Request],
    clock: Clock = Clock(),
    look: Look = lambda *_: None,
    gate: Gate = lambda request, _: request,
) -> Trial:
    """Run requests, each when it is due. look: called after every step, with its news. gate: who
    is let in, and how; None turns a request away.

    Raises `EngineError` where one of them fails.
    """
    start, trial, waiting = clock.now(), Trial(), list(reversed(wanted))
    scheduler = engine.scheduler
    while waiting or engine.has_work:
        now = clock.now()
        while waiting and start + waiting[-1].arrival <= now:
            due = waiting.pop()
            admitted = gate(dataclasses.replace(due, arrival=start + due.arrival), now)
            if admitted is not None:
                engine.add(admitted)
                trial.tokens[due.id] = []
        if not engine.has_work:
            if waiting:
                clock.sleep(max(0.0, start + waiting[-1].arrival - now))
            continue
        engine.pump(now)
        events = engine.drain(clock.now())
        done = clock.now()
        for event in events:
            if event.error is not None:
                raise EngineError(event.error)
            trial.tokens[event.request_id].extend([done - start] * len(event.tokens))
        look(scheduler, events, done - start)
    trial.seconds = clock.now() - start
    trial.timings = scheduler.stats.take_timings()
    trial.counters = scheduler.snapshot()
    return trial


SECONDS = 80.0  # for all rounds of an experiment, so that it ends within two minutes


@dataclass(frozen=True, slots=True)
class Rounds:
    """So many rounds, or as many as there is time for: `seconds` on `clock`."""

    number: int
    seconds: float = inf
    clock: Clock = Clock()


def too_long(spent: float, rounds: int, seconds: float) -> bool:
    """Whether one round more would end after `seconds`; the first is always played."""
    return rounds > 0 and spent * (rounds + 1) > seconds * rounds


def in_turn(
    names: Sequence[str],
    rounds: Rounds,
    run: Callable[[str, int], Of],
    watch: Watch,
    label: Callable[[str], str] = str,
) -> dict[str, list[Of]]:
    """run(name, round) of each name once a round; who begins rotates. label: a name in words."""
    seen: dict[str, list[Of]] = {name: [] for name in names}
    started = rounds.clock.now()
    for number in range(rounds.number):
        if too_long(rounds.clock.now() - started, number, rounds.seconds):
            break
        k = number % len(names)
        for name in (*names[k:], *names[:k]):
            watch(f"{label(name)}, round {number + 1} of {rounds.number}")
            seen[name].append(run(name, number))
    return seen


def shortened(values: Mapping[str, Any]) -> tuple[str, ...]:
    """A paragraph where there was no time for all that was asked for: `asked` and `had`, by what
    they count."""
    less = [
        f"{had} of {asked} {what}"
        for (what, asked), had in zip(values["asked"].items(), values["had"].values(), strict=True)
        if had < asked
    ]
    return (f"Cut short so as to end in two minutes: {'; '.join(less)}.",) if less else ()


def warm(assembly: Assembly) -> None:
    """A first step writes memory that later ones find; it counts for nobody."""
    vocab = assembly.door.vocab_size
    play(Setting("warm").engine(assembly.executor), requests([Visit(0.0, 64, 4)], vocab, "warm"))


# ---- figures ----


def middle(values: Iterable[float]) -> dict[str, float]:
    """Median, least and most of repeats."""
    found = sorted(values)
    return {"median": statistics.median(found), "least": found[0], "most": found[-1]}


def shown(figure: Mapping[str, float], scale: float = 1.0, digits: int = 0) -> str:
    """A median with its spread."""
    text, low, high = (f"{figure[k] * scale:.{digits}f}" for k in ("median", "least", "most"))
    return text if low == high else f"{text} ({low}–{high})"


def spread(rounds: int) -> str:
    """What the figures of a table are; of one round there is no median."""
    return f"medians of {rounds} (least–most)" if rounds > 1 else "one run of each"


def bars(rounds: int) -> str:
    """The same of a plot."""
    return f"medians of {rounds}, bars from the least to the most" if rounds > 1 else spread(1)


def quantile(values: Sequence[float], share: float) -> float:
    """Interpolated linearly, as everywhere here."""
    found = sorted(values)
    place = share * (len(found) - 1)
    low = int(place)
    high = min(low + 1, len(found) - 1)
    return found[low] + (found[high] - found[low]) * (place - low)


def blocks_of(scheduler: Scheduler) -> Iterator[tuple[int, int, int]]:
    """(tokens computed, blocks held, tokens at its end) of each running sequence that holds any."""
    for seq in scheduler.running:
        if seq.block_table:
            yield seq.num_computed, len(seq.block_table), seq.max_len


def learned(assembly: Assembly, clock: Clock) -> Callable[[], StepModel]:
    """Makes step models that know this machine: probed once, then each run has its own copy."""
    model = StepModel(assembly.engine.scheduler.model.prior)
    learn_machine(assembly.executor, model, clock.now)
    return lambda: copy.deepcopy(model)
