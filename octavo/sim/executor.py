"""An executor that computes nothing: it says how long each batch takes, and chooses fixed tokens.

Where durations come from is a function `Durations`: a roofline of the traced program, coefficients
(fitted or given), a table of measured operators, or a recording. Time is virtual: whoever drives
sets `now` before it pumps, and drains at `ready_at()`.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from octavo.core.batch import Batch, Row, RowResult, StepResult, Want
from octavo.core.brief import Brief
from octavo.core.executor import Capacity
from octavo.core.request import TokenLogprob
from octavo.core.steptime import Coefficients, StepFeatures, StepModel
from octavo.core.stretch import Stretch
from octavo.errors import EngineError
from octavo.ops.cost import Hardware
from octavo.ops.program import Instr, Program
from octavo.ops.table import TABLE, KvFormat, RowShape, S, StepShape, Work

Durations = Callable[[Batch], float]
Decoding = Callable[[Stretch], float]  # of the next step of a stretch, to the last bit
Rows = list[tuple[int, int, int]]  # (start, tokens, wanted outputs)

TOKEN = 0  # what every sequence "says"; lengths are forced by max_tokens

_SAMPLED = RowResult((TOKEN,))
_NOTHING = RowResult()


class SimulatedExecutor:
    """Implements `octavo.core.executor.Executor` in virtual time.

    seconds: the predicted duration of a batch. noise: standard deviation of a factor around 1 that
    each duration is multiplied by, drawn from `seed`; durations stay positive.

    Durations that have a method `decoding` can tell what a step of decodes takes without a batch:
    then a stretch of them can be coasted over.
    """

    def __init__(
        self, capacity: Capacity, seconds: Durations, *, noise: float = 0.0, seed: int = 0
    ) -> None:
        self.capacity = capacity
        self.now = 0.0
        self.busy_seconds = 0.0
        self._seconds = seconds
        self._decoding = decoding_of(seconds)
        self._noise = noise
        self._draw = random.Random(seed).gauss
        self._factor: float | None = None  # of the next step, if it was drawn already
        self._free = 0.0
        self._pending: list[tuple[Batch, float, float]] = []

    def submit(self, batch: Batch) -> None:
        """Take a batch at `now`; batches run one after another."""
        if len(self._pending) >= self.capacity.depth:
            raise EngineError("as many batches are outstanding as there may be")
        seconds = self._noisy(self._seconds(batch))
        self._factor = None
        if not seconds >= 0.0:
            raise EngineError(f"step {batch.step} was predicted to take {seconds} seconds")
        started = max(self.now, self._free)
        self._free = started + seconds
        self.busy_seconds += seconds
        self._pending.append((batch, started, self._free))

    def _noisy(self, seconds: float) -> float:
        """With the factor of the next step, however often that is looked at."""
        if not self._noise:
            return seconds
        if self._factor is None:
            self._factor = max(0.05, self._draw(1.0, self._noise))
        return seconds * self._factor

    @property
    def foresees(self) -> bool:
        """Whether `coast` can be asked for."""
        return self._decoding is not None

    def coast(self, stretch: Stretch, until: float) -> array[float]:
        """Take the steps of a stretch one behind the other while they end by `until`. Nothing is
        outstanding, and the first begins at `now`. Returns when each ended; `now` is the last."""
        ended = array("d")
        decoding, started = self._decoding, max(self.now, self._free)
        assert decoding is not None
        for _ in range(stretch.most):
            seconds = self._noisy(decoding(stretch))
            finished = started + seconds
            if not started <= finished <= until or not stretch.step(started, finished):
                break
            self._factor = None
            self.busy_seconds += seconds
            ended.append(finished)
            started = finished
        if ended:
            self.now = self._free = started
        return ended

    def ready_at(self) -> float | None:
        return self._pending[0][2] if self._pending else None

    def collect(self) -> StepResult:
        if not self._pending:
            raise EngineError("no batch is outstanding")
        batch, started, finished = self._pending.pop(0)
        spelt = batch.spelt.values() if isinstance(batch, Brief) else batch.rows
        rows = {}
        for seq_id, _, _, _, wants in spelt:
            # What most rows are: one that wants its next token, and nothing about it.
            if len(wants) == 1 and (spec := wants[0][1]) is not None and spec[0].logprobs is None:
                rows[seq_id] = _SAMPLED
            else:
                rows[seq_id] = _result(wants)
        return StepResult(batch.step, rows, started, finished)


def decoding_of(seconds: Durations) -> Decoding | None:
    """How these durations tell the time of a step of decodes without a batch, if they do."""
    found: Decoding | None = getattr(seconds, "decoding", None)
    return found


def _result(wants: tuple[Want, ...]) -> RowResult:
    if not wants:
        return _NOTHING
    sampled = [want.sample for want in wants if want.sample is not None]
    scored = [want.target for want in wants if want.target is not None]
    logprobs = tuple(TokenLogprob(TOKEN, 0.0) for s in sampled if s.params.logprobs is not None)
    scores = tuple(TokenLogprob(target, 0.0) for target in scored)
    return RowResult((TOKEN,) * len(sampled), logprobs, scores)


def split(batch: Batch) -> tuple[list[int], Rows]:
    """(contexts of the rows of one token that want the next one, all other rows): most steps are
    all of the first kind, and simulating is mostly this."""
    rows: Collection[Row] = batch.rows
    streams = []
    if isinstance(batch, Brief):
        streams, rows = batch.ends, batch.spelt.values()
    ends = streams + [row[1] + 1 for row in rows if row[4] and len(row[2]) == 1]
    if len(ends) == len(streams) + len(rows):
        return ends, []
    others = [(row[1], len(row[2]), len(row[4])) for row in rows]
    return ends, [row for row in others if row[1] != 1 or not row[2]]


def shape_of(batch: Batch) -> StepFeatures:
    """The shape of a batch, which a brief one knows."""
    return batch.shape if isinstance(batch, Brief) else StepFeatures.of(batch)


class Fitted:
    """A linear model's durations: coefficients that were fitted, or given.

    `Coefficients` may come from a `StepModel` (`model.coefficients`), from a log, or from a paper.
    """

    def __init__(self, coefficients: Coefficients) -> None:
        self.coefficients = coefficients

    def __call__(self, batch: Batch) -> float:
        return self.coefficients.seconds(shape_of(batch))

    def decoding(self, steps: Stretch) -> float:
        return self.coefficients.seconds(steps.shape)


class Learned:
    """Durations that a `StepModel` predicts at the pace of the long run, and the host's gap between
    two steps."""

    def __init__(self, model: StepModel) -> None:
        self.model = model

    def __call__(self, batch: Batch) -> float:
        return self.model.usual(shape_of(batch)) + self.model.gap

    def decoding(self, steps: Stretch) -> float:
        return self.model.usual(steps.shape) + self.model.gap


class Scaled:
    """Durations of another model times a factor (one scale fitted on a few requests)."""

    def __init__(self, seconds: Durations, factor: float) -> None:
        self._seconds = seconds
        self.factor = factor
        inner = decoding_of(seconds)
        self.decoding: Decoding | None = inner and (lambda steps: inner(steps) * factor)

    def __call__(self, batch: Batch) -> float:
        return self._seconds(batch) * self.factor


# ---- the roofline of a traced program ----


class _Term(NamedTuple):
    """One kind of op, `repeats` times in the program. Each quantity is constant + per token T + per
    output S; attention adds per visible pair and per position read under a `window`, of all rows or
    of the `wanted` ones."""

    repeats: int
    flops: tuple[float, float, float]
    bytes: tuple[float, float, float]
    per_pair: float
    per_span: float
    window: int | None
    wanted: bool
    rate: float


class Roofline:
    """`octavo.ops.cost.cost` compiled: the same seconds, without a pass over the program.

    The table's rules are linear in T and S, and attention's in pairs and positions, so a few
    probes of each rule give its coefficients. What cannot be compiled so is an EngineError here,
    not a wrong number later. extra: seconds by (T, S) that the program does not contain
    (communication of tensor parallelism).
    """

    def __init__(
        self,
        program: Program,
        hardware: Hardware,
        *,
        kv_itemsize: int = 2,
        extra: Callable[[int, int], float] | None = None,
    ) -> None:
        self.hardware = hardware
        self._extra = extra
        self._terms = list(_terms(program, hardware, kv_itemsize))
        self._views = {(t.window, t.wanted) for t in self._terms if t.per_pair}

    def __call__(self, batch: Batch) -> float:
        return self._of(*split(batch))

    def decoding(self, steps: Stretch) -> float:
        return self._of(steps.ends, [])

    def seconds(self, rows: Iterable[tuple[int, int, int]]) -> float:
        """Of a step of rows (start, tokens, wanted outputs)."""
        return self._of([], list(rows))

    def _of(self, ends: list[int], others: Rows) -> float:
        """Of a step, `split`."""
        tokens = len(ends) + sum([row[1] for row in others])
        outputs = len(ends) + sum([row[2] for row in others])
        seen = {view: _seen(ends, others, *view) for view in self._views}
        bandwidth, each = self.hardware.bytes_per_s, self.hardware.op_seconds
        total = self.hardware.step_seconds
        if self._extra is not None:
            total += self._extra(tokens, outputs)
        for count, flops, moved, per_pair, per_span, window, wanted, rate in self._terms:
            # Constants are weights, which a step without such rows does not read.
            work = flops[1] * tokens + flops[2] * outputs
            work = work and flops[0] + work
            nbytes = moved[1] * tokens + moved[2] * outputs
            nbytes = nbytes and moved[0] + nbytes
            if per_pair:
                pairs, span = seen[window, wanted]
                work += per_pair * pairs
                nbytes += per_span * span
            memory, compute = nbytes / bandwidth, work / rate
            total += count * ((memory if memory > compute else compute) + each)
        return total


def _seen(ends: list[int], others: Rows, window: int | None, wanted: bool) -> tuple[int, int]:
    """(visible pairs, positions read) of all rows, or of their wanted positions alone."""
    pairs = span = sum(ends if window is None else [min(end, window) for end in ends])
    for start, n, outputs in others:
        if outputs or not wanted:
            row = RowShape(start, n, outputs)
            row = row.wanted() if wanted else row
            pairs += row.visible(window)
            span += row.span(window)
    return pairs, span


def _terms(program: Program, hardware: Hardware, itemsize: int) -> Iterable[_Term]:
    kinds: dict[object, list[Instr]] = {}
    for instr in program.instrs:
        call = program.call(instr)
        weights = tuple(w and (w.kind, w.shape, w.row_bytes, w.rows) for w in call.weights)
        attrs = tuple((n, v) for n, v in instr.attrs if n != "layer")
        kinds.setdefault((instr.op, call.inputs, weights, attrs), []).append(instr)
    for same in kinds.values():
        yield _term(program, same[0], len(same), hardware, itemsize)


def _term(program: Program, instr: Instr, count: int, hw: Hardware, itemsize: int) -> _Term:
    call, rule = program.call(instr), TABLE[instr.op].work

    def work(*rows: tuple[int, int, int]) -> Work:
        return rule(call, StepShape(tuple(RowShape(*row) for row in rows), KvFormat(itemsize)))

    if instr.op == "attend":
        window = dict(instr.attrs)["window"]
        assert window is None or isinstance(window, int)
        one, two = work((0, 1, 1)), work((0, 1, 1), (0, 1, 1))
        wanted = call.inputs[0].rows == S
        moved = two.activation_bytes - one.activation_bytes
        line = (0.0, 0.0, moved) if wanted else (0.0, moved, 0.0)
        nothing = (0.0, 0.0, 0.0)
        term = _Term(
            count, nothing, line, one.flops, one.kv_bytes, window, wanted, hw.attend_flops_per_s
        )
    else:
        t1, t2, s2 = work((0, 1, 1)), work((0, 2, 1)), work((0, 2, 2))
        lines = []
        for a, b, c in ((t1.flops, t2.flops, s2.flops), (t1.bytes, t2.bytes, s2.bytes)):
            per_token, per_output = b - a, c - b
            lines.append((a - per_token - per_output, per_token, per_output))
        term = _Term(count, lines[0], lines[1], 0.0, 0.0, None, False, hw.flops_per_s)
    _check(term, work)
    return term


def _check(term: _Term, work: Callable[..., Work]) -> None:
    """The compiled term must give what the rule gives, on a shape it was not made from."""
    rows = [(300, 5, 1), (70, 1, 1), (0, 9, 0)]
    pairs, span = _seen([], rows, term.window, term.wanted)
    truth = work(*rows)
    flops, moved = (
        constant + 15 * per_token + 2 * per_output
        for constant, per_token, per_output in (term.flops, term.bytes)
    )
    flops, moved = flops + term.per_pair * pairs, moved + term.per_span * span
    if abs(flops - truth.flops) > 1e-6 * truth.flops + 1 or abs(moved - truth.bytes) > 1:
        raise EngineError("a rule of the op table is not linear: it cannot be compiled")
