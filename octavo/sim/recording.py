"""A real run written down as it happens, and run again: does the scheduler decide the same?

`Recorder` stands around an `Engine` and writes a line of JSON for every call that reaches it and
every step that comes back. `replay` makes the same calls, with the recorded times and tokens, on a
new scheduler, and compares every batch with the recorded one, row by row. A recording is also a
trace (`octavo.sim.workload.read`) and a log of steps to fit durations to (`steps`).

It holds prompts as token ids: treat the file as what people wrote.
"""

from __future__ import annotations

import contextlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from octavo.core.batch import Batch, Row, RowResult, StepResult
from octavo.core.blocks import block_hashes
from octavo.core.drafter import NoDrafter, PromptLookup
from octavo.core.engine import Engine
from octavo.core.executor import Capacity, Executor
from octavo.core.policy import Policy
from octavo.core.request import (
    Event,
    FinishReason,
    Forecast,
    Request,
    SamplingParams,
    Slo,
    Tier,
    TokenLogprob,
)
from octavo.core.scheduler import Scheduler
from octavo.core.steptime import Coefficients, StepFeatures, StepModel
from octavo.errors import BadFile, OctavoError, in_words
from octavo.sim.workload import MALFORMED, RECORDED, UNREADABLE, Item, Workload, open_text

Line = dict[str, Any]
VERSION = 1
FIELDS = {
    kind: frozenset(names.split())
    for kind, names in {
        "head": "version policy max_waiting prefix_caching capacity prior drafter learned",
        "add": "request_id arrival_s prompt n max_tokens min_tokens prompt_logprobs seed stop_ids "
        "priority tenant namespace slo tier predicted speculation",
        "abort": "request_id now",
        "pump": "now",
        "step": "step started finished features rows results",
        "drain": "now ended",
    }.items()
}  # what `open_recording` wants of each kind of line


class Recorder(Engine):
    """The engine of `engine`'s parts, which tells `write` everything; use it in its place. model:
    what it runs, by name.

    Requests with a grammar or stop strings are recorded by what their watcher decided.
    """

    def __init__(self, engine: Engine, write: Callable[[str], object], model: str = "") -> None:
        self._write = write
        super().__init__(_Overheard(engine.executor, self.say), engine.scheduler)
        capacity, scheduler = self.executor.capacity, self.scheduler
        self.say(
            "head",
            version=VERSION,
            model=model,
            policy=scheduler.policy.name,
            max_waiting=scheduler.max_waiting,
            prefix_caching=scheduler.blocks.prefix_caching,
            capacity={name: getattr(capacity, name) for name in Capacity.__slots__},
            prior=asdict(scheduler.model.prior),
            drafter=type(scheduler.drafter).__name__,
            learned=[[*o.features, o.seconds] for o in scheduler.model.steps],
        )

    def say(self, kind: str, **fields: Any) -> None:
        """Write one line."""
        self._write(json.dumps({"kind": kind, **fields}, separators=(",", ":")) + "\n")

    def add(self, request: Request) -> None:
        params = request.params
        fields = {
            "request_id": request.id,
            "arrival_s": request.arrival,
            "prompt": list(request.prompt),
            "n": params.n,
            "max_tokens": params.max_tokens,
            "min_tokens": params.min_tokens,
            "prompt_logprobs": params.prompt_logprobs,
            "seed": request.seed,
            "stop_ids": sorted(request.stop_ids),
            "priority": request.priority,
            "tenant": request.tenant,
            "namespace": request.namespace.hex(),
            "slo": asdict(request.slo),
            "tier": request.tier,
            "predicted": request.predicted,
            "speculation": params.speculation,
        }
        try:
            super().add(request)
        except OctavoError as error:
            self.say("refused", error=type(error).__name__, **fields)
            raise
        self.say("add", **fields)

    def abort(self, request_id: str, now: float) -> list[Event]:
        self.say("abort", request_id=request_id, now=now)
        return super().abort(request_id, now)

    def pump(self, now: float) -> bool:
        self.say("pump", now=now)
        return super().pump(now)

    def drain(self, now: float) -> list[Event]:
        events = super().drain(now)
        ended = [[e.request_id, e.choice, list(e.tokens), e.finish]
                 for e in events if e.finish is not None]  # fmt: skip
        self.say("drain", now=now, ended=ended)
        return events


class _Overheard:
    """An executor of which every step is told."""

    def __init__(self, executor: Executor, say: Callable[..., None]) -> None:
        self._executor = executor
        self._say = say
        self._batches: list[Batch] = []

    @property
    def capacity(self) -> Capacity:
        return self._executor.capacity

    def submit(self, batch: Batch) -> None:
        self._executor.submit(batch)
        self._batches.append(batch)

    def collect(self) -> StepResult:
        result = self._executor.collect()
        batch = self._batches.pop(0)
        self._say(
            "step",
            step=batch.step,
            started=result.started,
            finished=result.finished,
            features=list(StepFeatures.of(batch)),
            rows=[_plan(row) for row in batch.rows],
            results=[
                [seq_id, list(r.tokens), [s.token for s in r.scores], r.error]
                for seq_id, r in result.rows.items()
            ],
        )
        return result

    def ready_at(self) -> float | None:
        return self._executor.ready_at()


def _plan(row: Row) -> list[Any]:
    """What was decided about a row: all that crosses to the executor but the sampler's numbers."""
    wants = [[w.position, w.sample is not None, w.target] for w in row.outputs]
    return [row.seq_id, row.start, list(row.tokens), list(row.block_table), wants]


# ---- reading ----


@dataclass(frozen=True, slots=True)
class Recording:
    """The lines of a run, its capacity and policy."""

    path: Path
    head: Line
    lines: tuple[Line, ...]

    @property
    def capacity(self) -> Capacity:
        return Capacity(**self.head["capacity"])

    @property
    def model_name(self) -> str:
        """What the recorded server ran; "" where the recording does not say."""
        return str(self.head.get("model", ""))

    def of(self, kind: str) -> Iterator[Line]:
        return (line for line in self.lines if line["kind"] == kind)

    def model(self) -> StepModel:
        """The step-time model as it was when the recording began."""
        model = StepModel(Coefficients(**self.head["prior"]))
        for *features, seconds in self.head["learned"]:
            model.observe(StepFeatures(*features), seconds)
        return model

    def steps(self) -> list[tuple[StepFeatures, float]]:
        """(shape, seconds) of every step: what a `StepModel` learns from."""
        return [(StepFeatures(*s["features"]), s["finished"] - s["started"])
                for s in self.of("step")]  # fmt: skip


def is_recording(path: str | Path) -> bool:
    """Whether a file begins as a recording does."""
    try:
        with open_text(Path(path)) as file:
            return file.read(len(RECORDED)) == RECORDED
    except UNREADABLE:
        return False


def open_recording(path: str | Path) -> Recording:
    """A recording, `.gz` too. Raises BadFile, naming the line."""
    path = Path(path)
    lines: list[Line] = []
    try:
        with open_text(path) as file:
            for number, text in enumerate(file, 1):
                try:
                    line = json.loads(text)
                    lacking = FIELDS.get(line["kind"], frozenset()) - line.keys()
                except MALFORMED as error:
                    raise BadFile(f"{path}, line {number}: no line of a recording") from error
                if number == 1 and (line["kind"], line.get("version")) != ("head", VERSION):
                    raise BadFile(f"{path}: not a recording of version {VERSION}")
                if lacking:
                    raise BadFile(f"{path}, line {number}: no {', '.join(sorted(lacking))}")
                lines.append(line)
    except UNREADABLE as error:
        raise BadFile(f"{path}: {in_words(error)}") from error
    if not lines:
        raise BadFile(f"{path}: not a recording of version {VERSION}")
    recording = Recording(path, lines[0], tuple(lines[1:]))
    with _reading(recording):
        recording.capacity, recording.model()
    return recording


@contextlib.contextmanager
def _reading(recording: Recording) -> Iterator[None]:
    """Fields are looked at: what they hold may be something else than it should."""
    try:
        yield
    except MALFORMED as error:
        raise BadFile(f"{recording.path}: a line of it holds what none can: {error!r}") from error


# ---- running again ----


@dataclass(frozen=True, slots=True)
class Parity:
    """How far a replay went the same way. differs: the first difference in words, "" if none."""

    steps: int
    same: int
    rows: int
    differs: str = ""

    @property
    def identical(self) -> bool:
        return not self.differs and self.same == self.steps


class _Told:
    """An executor that answers what was recorded, and keeps the batch to be compared."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.batches: list[Batch] = []
        self.answers: dict[int, Line] = {}

    def submit(self, batch: Batch) -> None:
        self.batches.append(batch)

    def collect(self) -> StepResult:
        batch = self.batches.pop(0)
        line = self.answers[batch.step]
        rows = {
            seq_id: RowResult(
                tuple(tokens),
                tuple(TokenLogprob(t, 0.0) for t in tokens),
                tuple(TokenLogprob(t, 0.0) for t in scores),
                error,
            )
            for seq_id, tokens, scores, error in line["results"]
        }
        return StepResult(batch.step, rows, line["started"], line["finished"])

    def ready_at(self) -> float | None:
        return None


class _Scripted:
    """A watcher that stops where the recorded sequence stopped, and why."""

    def __init__(self, most: int, reason: FinishReason) -> None:
        self._left = most
        self._reason = reason

    def advance(self, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        self._left -= len(tokens)
        return len(tokens), self._reason if self._left <= 0 else None

    def mask(self, position: int) -> bytes | None:
        return None

    def ahead(self, draft: Sequence[int]) -> list[bytes | None]:
        return [None] * len(draft)

    def forced(self) -> tuple[int, ...]:
        return ()


def replay(recording: Recording, policy: Callable[[], Policy]) -> Parity:
    """Make the recorded calls again and compare each step's plan with the recorded one."""
    told = _Told(recording.capacity)
    with _reading(recording):
        told.answers = {line["step"]: line for line in recording.of("step")}
        stops = _stops(recording)
        requests = {line["request_id"]: _request(line, stops) for line in recording.of("add")}
    scheduler = Scheduler(
        recording.capacity,
        policy(),
        max_waiting=recording.head["max_waiting"],
        prefix_caching=recording.head["prefix_caching"],
        model=recording.model(),
        drafter=PromptLookup() if recording.head["drafter"] == "PromptLookup" else NoDrafter(),
    )
    engine = Engine(told, scheduler)
    same = rows = 0
    total = len(told.answers)
    for line in recording.lines:
        kind = line["kind"]
        if kind == "add":
            engine.add(requests[line["request_id"]])
        elif kind == "abort":
            engine.abort(line["request_id"], line["now"])
        elif kind == "pump":
            engine.pump(line["now"])
        elif kind == "drain":
            wrong = _compare(told)
            if wrong:
                return Parity(total, same, rows, wrong)
            if told.batches:
                same += 1
                rows += len(told.batches[0].rows)
            engine.drain(line["now"])
    return Parity(total, same, rows)


def _compare(told: _Told) -> str:
    """What is different about the oldest outstanding batch, in words."""
    if not told.batches:
        return ""
    batch = told.batches[0]
    line = told.answers.get(batch.step)
    if line is None:
        return f"step {batch.step} was not in the recorded run"
    mine, theirs = [_plan(row) for row in batch.rows], line["rows"]
    for a, b in zip(mine, theirs, strict=False):
        if a != b:
            names = ("sequence", "start", "tokens", "blocks", "outputs")
            what = next(n for n, x, y in zip(names, a, b, strict=True) if x != y)
            return f"step {batch.step}, sequence {b[0]}: {what} differ"
    if len(mine) != len(theirs):
        return f"step {batch.step} has {len(mine)} rows, {len(theirs)} were recorded"
    return ""


Stop = tuple[int, FinishReason] | None


def _stops(recording: Recording) -> dict[str, list[Stop]]:
    """For each choice that neither a stop id nor its length ended, where its watcher did."""
    made, requests = _made(recording), {line["request_id"]: line for line in recording.of("add")}
    found: dict[str, list[Stop]] = {}
    for line in recording.of("drain"):
        for request_id, choice, tokens, finish in line["ended"]:
            own, reason = requests[request_id], FinishReason(finish)
            by_id = bool(tokens) and tokens[-1] in own["stop_ids"]
            if reason in (FinishReason.STOP, FinishReason.TOOL_CALLS) and not by_id:
                stops = found.setdefault(request_id, [None] * own["n"])
                stops[choice] = (made[request_id, choice], reason)
    return found


def _made(recording: Recording) -> Counter[tuple[str, int]]:
    """Tokens that each choice was given. Sequences are numbered as they arrive, n at a time."""
    owners = [
        (line["request_id"], choice) for line in recording.of("add") for choice in range(line["n"])
    ]
    made: Counter[tuple[str, int]] = Counter()
    for line in recording.of("step"):
        for seq_id, tokens, _, _ in line["results"]:
            made[owners[seq_id]] += len(tokens)
    return made


def _request(line: Line, stops: dict[str, list[Stop]]) -> Request:
    params = SamplingParams(
        max_tokens=line["max_tokens"],
        min_tokens=line["min_tokens"],
        prompt_logprobs=line["prompt_logprobs"],
        n=line["n"],
        speculation=line["speculation"],
    )
    choices = iter(stops.get(line["request_id"], ()))

    def watcher() -> _Scripted:
        stop = next(choices)
        return _Scripted(*stop) if stop is not None else _Scripted(1 << 62, FinishReason.STOP)

    return Request(
        id=line["request_id"],
        prompt=array("i", line["prompt"]),
        params=params,
        arrival=line["arrival_s"],
        seed=line["seed"],
        stop_ids=frozenset(line["stop_ids"]),
        priority=line["priority"],
        tenant=line["tenant"],
        namespace=bytes.fromhex(line["namespace"]),
        slo=Slo(**line["slo"]),
        tier=Tier(line["tier"]),
        predicted=None if line["predicted"] is None else Forecast(*line["predicted"]),
        watcher=watcher if line["request_id"] in stops else None,
    )


# ---- using it elsewhere ----


def workload(recording: Recording) -> Workload:
    """The recorded requests as a trace: arrivals, sizes, and who shares which prefix blocks.

    Each choice of a request is one item; its output is what it was given.
    """
    with _reading(recording):
        items = _items(recording)
    if not items:
        raise BadFile(f"{recording.path}: no request in it")
    items.sort(key=lambda item: item.at)
    start = items[0].at
    moved = tuple(item._replace(at=item.at - start) for item in items)
    size = recording.capacity.block_size
    name = Path(recording.path.name.removesuffix(".gz")).stem
    return Workload(name, moved, block_tokens=size, source=recording.path.name)


def _items(recording: Recording) -> list[Item]:
    made, size = _made(recording), recording.capacity.block_size
    numbers: dict[bytes, int] = {}
    items = []
    for line in recording.of("add"):
        prompt = array("i", line["prompt"])
        hashes = block_hashes(bytes.fromhex(line["namespace"]), prompt, size)
        own = [numbers.setdefault(h, len(numbers)) for h in hashes]
        tail = [numbers.setdefault(line["request_id"].encode(), len(numbers))]
        for choice in range(line["n"]):
            name = line["request_id"] if line["n"] == 1 else f"{line['request_id']}.{choice}"
            count = made[line["request_id"], choice]
            items.append(
                Item(name, line["arrival_s"], len(prompt), max(1, count), line["tenant"],
                     line["priority"], tuple(own + tail))
            )  # fmt: skip
    return items


def model_of(recording: Recording) -> StepModel:
    """A step-time model that has seen every recorded step, in order. Raises BadFile without any."""
    model = recording.model()
    with _reading(recording):
        steps = recording.steps()
    if not steps:
        raise BadFile(f"{recording.path}: no step in it")
    for features, seconds in steps:
        model.observe(features, seconds)
    return model


FAR = 3.0  # times what such steps take else: beyond that a step was disturbed
ENOUGH = 64  # steps of which half can foretell the other half
MISSING = 0.1  # of the time: what a forecast may leave out before it is said
DISTURBED = 0.05  # of the time: what disturbed steps may take before it is said
OFF = 0.25  # median error beyond which shapes say little


@dataclass(frozen=True, slots=True)
class Explained:
    """How well a model of step times, learned from half of the recorded steps, foretells the other
    half; both halves in turn. error: the median of the relative errors' sizes. explained: predicted
    time over recorded time. far: steps that took over FAR times as long as predicted; far_share:
    of all time."""

    steps: int
    error: float
    explained: float
    far: int
    far_share: float

    def words(self) -> str:
        """In a line."""
        return (
            f"{self.steps} steps, each foretold from the others within {self.error:.0%} in the "
            f"median, their time in all to {self.explained:.0%}; {self.far} took over {FAR:g} "
            f"times as long, {self.far_share:.0%} of the time"
        )

    def doubts(self) -> str:
        """Why forecasts from these steps are not to be trusted, and what to do; "" if they are."""
        again = "Record again on a machine that does nothing else, for longer if it was short."
        if self.steps < ENOUGH:
            return f"{self.steps} recorded steps are too few to learn step times from. {again}"
        if self.far_share > DISTURBED:
            why = (
                f"{self.far} of {self.steps} recorded steps took over {FAR:g} times as long as "
                f"such steps do, and {self.far_share:.0%} of all time, as where others have the "
                "processors meanwhile"
            )
        elif abs(self.explained - 1.0) > MISSING:
            why = f"the step model comes to {self.explained:.0%} of the time that the steps took"
        elif self.error > OFF:
            why = f"the step model is off by {self.error:.0%} in the median"
        else:
            return ""
        hopeful = "hopeful" if self.explained < 1.0 else "gloomy"
        return (
            f"{why}. The simulated steps take {self.explained:.0%} of the recorded time: forecasts "
            f"are too {hopeful} by the rest; at most they are what an undisturbed server does. "
            f"{again}"
        )


def explained(recording: Recording) -> Explained:
    """What of the recorded time a simulation from this recording accounts for. Raises BadFile."""
    with _reading(recording):
        steps = recording.steps()
    halves = recording.model(), recording.model()
    for number, (shape, seconds) in enumerate(steps):
        halves[number % 2].observe(shape, seconds)
    pairs = [
        (halves[1 - number % 2].usual(shape), seconds)
        for number, (shape, seconds) in enumerate(steps)
        if seconds > 0.0
    ]
    whole = sum(seconds for _, seconds in pairs)
    if not whole > 0.0:
        raise BadFile(f"{recording.path}: no step in it")
    far = [seconds for predicted, seconds in pairs if seconds > FAR * predicted]
    errors = sorted(abs(predicted / seconds - 1.0) for predicted, seconds in pairs)
    return Explained(
        len(pairs),
        errors[len(errors) // 2],
        sum(predicted for predicted, _ in pairs) / whole,
        len(far),
        sum(far) / whole,
    )
