"""How long a step takes, as a function of its shape: a linear model, learned from every step.

    t = pace (fixed + token T + bend max(0, T - knee) + context K + area A + decode n + sample s)

with T the tokens of the step, n its decodes (rows of one token) and K the sum of their contexts,
A the sum over longer rows of c (start + c / 2), the pairs that attention looks at, and s the
sampled positions. The bend is where a step stops waiting for weights and waits for arithmetic.

A machine has not one speed: clocks rise and fall by a quarter from one second to the next, and all
steps with them. A pace follows that, by the last few steps beside what their shapes take in the
long run, which the coefficients say. What only decodes waits for memory and the rest for
arithmetic, so each has a pace of its own, and a third of what one sees moves the other.

Nor is it quite a line: rows go by tiles, and a tile that is half empty takes as long as a full one.
What mixed steps of about so many tokens take beside the line is an `edge`, a factor near 1.

Coefficients start from a prior (the cost of the model's program on the machine) and follow the
steps: least squares on the relative error with forgetting, kept near the prior by a ridge, never
negative (what is collinear stays where the prior has it). Pure decodes and mixed steps are fitted
apart. A step far off the others (a page fault, another process) counts little; while the errors
stay large the model forgets quickly, trusts every step, and says so (`drifting`).

What an idle machine can do is what it did: the fastest steps are remembered as they were, and read
beside the line of now. So who learned among others' work, and has a slow line, knows better.

Numbers only: no tensors, no clock. Times are seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from math import sqrt
from operator import mul
from typing import NamedTuple

from octavo.core.batch import Batch

KEEP = 0.999  # of the evidence, with each step
HURRY = 0.95  # the same, while the errors are large
RIDGE = 0.5  # steps of evidence that the prior weighs
LEAN = 1e-4
RECENT = 512  # steps over which errors are reported
WINDOW = 128  # steps from which spread and bias are taken
REFRESH = 16  # steps between two looks at the spread
SOLVE = (4, 16)  # steps of a kind between two solutions, at first and once it is settled: in
# sixteen no more than a sixtieth of the evidence is new, and what changes sooner is the pace's
LATE = 32  # steps that say whether the machine has changed
FEW = 3  # steps whose median is the pace
LASTS = 0.3  # seconds: how soon a machine's pace is the usual one again
REST = 2.0  # seconds without a step in which half of a pace's distance to the usual one passes
LINKED = 0.3  # of a change of pace, in logarithms: what the other kind of step follows
EDGE = 0.02  # weight of the latest step in an edge; more while it is new
HOME = 0.2  # of an edge, beside an error: edges are drawn to 1, the pace is what all have in common
MOST_EDGE = 0.15  # of an error, relative, that an edge learns from
KNEES = (2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0)  # tokens: where probes may put the bend
YOUNG = 32  # steps after which a step far off is taken for an outlier
SETTLED = 128  # steps after which a kind has a pace of its own, and edges
SLIP = 2.0  # times as fast as predicted: beyond that a step counts no more for being faster
POSSIBLE = (1e-7, 1e6)  # seconds: what takes less or more is a slip of the clock and no step
DRIFT = 0.08  # mean error at which the model no longer trusts what it learned
FAR = (0.7, 1.4)  # paces beyond which the long run is another one
GAMMA = (1.03, 1.07, 1.25)  # least, first, most
MANY = 1e9  # tokens, where they seem to cost nothing
LOG = 16_384  # steps kept for the log
PROOFS = 8  # steps that must have been as fast: one may be a slip of the clock

# A NamedTuple without the detour over its own __new__: every step makes one.
_new = tuple.__new__


class StepFeatures(NamedTuple):
    """The shape of a step, as far as its time depends on it."""

    tokens: float = 0.0
    decode_context: float = 0.0
    prefill_area: float = 0.0
    decodes: float = 0.0
    sampled: float = 0.0

    @classmethod
    def of(cls, batch: Batch) -> StepFeatures:
        """The features of a batch as it is submitted."""
        tokens = context = decodes = sampled = 0
        area = 0.0
        for _, start, row, _, wants in batch.rows:
            count = len(row)
            tokens += count
            sampled += len(wants)
            if count == 1:
                decodes += 1
                context += start + 1
            else:
                area += count * (start + 0.5 * count)
        return cls(tokens, context, area, decodes, sampled)

    def plus(self, start: int, count: int, outputs: int) -> StepFeatures:
        """With one more row: `count` tokens from `start` on."""
        if count == 1:
            return StepFeatures(
                self.tokens + 1,
                self.decode_context + start + 1,
                self.prefill_area,
                self.decodes + 1,
                self.sampled + outputs,
            )
        return StepFeatures(
            self.tokens + count,
            self.decode_context,
            self.prefill_area + count * (start + 0.5 * count),
            self.decodes,
            self.sampled + outputs,
        )


Took = tuple[StepFeatures, float, float]  # a step's shape, and when it started and finished


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Seconds per unit of each feature; `knee` is in tokens, and learned from probes alone."""

    fixed: float
    token: float
    context: float = 0.0
    area: float = 0.0
    decode: float = 0.0
    sample: float = 0.0
    bend: float = 0.0
    knee: float = 0.0

    def seconds(self, features: StepFeatures) -> float:
        """The time of a step of that shape."""
        tokens, context, area, decodes, sampled = features
        beyond = tokens - self.knee
        return (
            self.fixed
            + self.token * tokens
            + self.bend * (beyond if beyond > 0.0 else 0.0)
            + self.context * context
            + self.area * area
            + self.decode * decodes
            + self.sample * sampled
        )

    def prefill(self, start: int, count: int) -> float:
        """What so many tokens of a prompt from `start` on add to steps that run anyway."""
        each = self.token + self.bend + self.area * (start + 0.5 * count)
        return count * each + self.sample

    def times(self, factor: float) -> Coefficients:
        """The same on a machine that takes `factor` times as long."""
        return Coefficients(
            factor * self.fixed,
            factor * self.token,
            factor * self.context,
            factor * self.area,
            factor * self.decode,
            factor * self.sample,
            factor * self.bend,
            self.knee,
        )


# The belief of those who know nothing: a small model on a few cores.
UNKNOWN = Coefficients(2e-3, 5e-4, 1e-7, 2e-8, 1e-5, 1e-4)


class _Fit:
    """One regime: the evidence as normal equations over columns, each a part of the prior.

    Least squares of x . theta / t = 1 over steps, plus a ridge toward theta = 1; theta >= 0 by
    coordinate descent, which from the last solution takes a sweep or two. What always comes
    together shares a column: in a pure decode a token is a decode is a sample; in a mixed step a
    decode is a sample.

    pace: how long steps of this kind take now, beside what `seconds` says of the long run. least:
    the same of the fastest that were ever seen, if that was below 1.
    """

    __slots__ = (
        "_edges",
        "_fastest",
        "_fresh",
        "_gram",
        "_groups",
        "_moved",
        "_parts",
        "_prior",
        "_ratios",
        "_right",
        "_theta",
        "least",
        "pace",
        "seen",
        "solved",
    )

    def __init__(self, prior: Coefficients, groups: tuple[tuple[str, ...], ...]) -> None:
        # A coefficient that the prior leaves out is learned too, in units of next to nothing.
        least = 1e-9 * (prior.fixed + prior.token)
        names = [name for group in groups for name in group]
        self._prior = replace(prior, **{n: max(getattr(prior, n), least) for n in names})
        self._groups = groups
        # Each coefficient as the prior has it, and the column that it belongs to, if to one.
        at = {name: i for i, group in enumerate(groups) for name in group}
        self._parts = [(v, at.get(n, -1)) for n, v in asdict(self._prior).items()]
        size = range(len(groups))
        self._theta = [1.0] * len(groups)
        self._gram = [[RIDGE * (i == j) for j in size] for i in size]
        self._right = [RIDGE] * len(groups)
        # Steps that are not in the equations yet: (shape, 1 / seconds, weight, keep).
        self._fresh: list[tuple[StepFeatures, float, float, float]] = []
        self._moved = False  # since the fastest were last read beside the line
        self.solved = self._prior
        self.seen = 0
        self.pace = self.least = 1.0
        self._fastest: list[tuple[StepFeatures, float]] = []  # and seconds; the fastest first
        self._ratios: deque[float] = deque(maxlen=FEW)  # seconds / those of the long run
        self._edges: dict[int, tuple[float, int]] = {}  # factor and steps seen, by tokens

    def seconds(self, features: StepFeatures) -> float:
        """Of a step of that shape, at the pace of the long run."""
        seconds = self.solved.seconds(features)
        if features.prefill_area > 0.0:
            seconds *= self._edges.get(_tile(features.tokens), _NO_EDGE)[0]
        return seconds

    def follow(self, features: StepFeatures, seconds: float, usual: float) -> float:
        """A step took so long, and `usual` is what `seconds` says of it: mind the edge and the
        pace; by which factor the pace changed."""
        before = self.pace
        if not usual > 0.0:
            return 1.0
        ratio = seconds / usual
        if features.prefill_area > 0.0 and self.seen > SETTLED:
            place = _tile(features.tokens)
            factor, seen = self._edges.get(place, _NO_EDGE)
            off = min(max(ratio / before - 1.0, -MOST_EDGE), MOST_EDGE)
            off -= HOME * (factor - 1.0)
            self._edges[place] = (factor * (1.0 + off * max(EDGE, 1.0 / (seen + 8))), seen + 1)
        ratios = self._ratios  # a door may begin anew in between (`rest`)
        ratios.append(ratio)
        self.pace = _pace(ratios)
        if ratio < self.least or len(self._fastest) < PROOFS:
            self._fastest.append((features, seconds))
            self._moved = True
            self.recall()
        self._moved = True
        return self.pace / before

    def rest(self, pace: float) -> None:
        """No step was seen for a while, and this is what may be thought of the pace. Another thread
        may be at a step after all: what that reads is replaced, not emptied."""
        self._ratios = deque(maxlen=FEW)
        self.pace = pace

    def recall(self) -> None:
        """Read the fastest steps beside the line of now, if that has moved."""
        if not self._moved:
            return
        self._moved = False
        self._fastest.sort(key=self._beside)
        del self._fastest[PROOFS:]
        if len(self._fastest) == PROOFS:
            self.least = min(1.0, self._beside(self._fastest[-1]))

    def _beside(self, step: tuple[StepFeatures, float]) -> float:
        features, seconds = step
        return seconds / self.seconds(features)

    def add(self, features: StepFeatures, seconds: float, weight: float, keep: float) -> None:
        """A step, `weight` times; the evidence before it fades by `keep`."""
        self._fresh.append((features, 1.0 / seconds, weight, keep))
        self.seen += 1

    def _fold(self) -> None:
        """Put the fresh steps into the equations, all at once: that is much less work."""
        gram, right, fresh, fade = self._gram, self._right, self._fresh, 1.0
        weights = []
        for _, _, weight, keep in reversed(fresh):
            weights.append(weight * fade)
            fade *= keep
        weights.reverse()
        columns = self._columns()
        fresh.clear()
        for i, column in enumerate(columns):
            pulls, row = [*map(mul, weights, column)], gram[i]
            right[i] = fade * right[i] + sum(pulls)
            for j in range(i + 1):
                row[j] = gram[j][i] = fade * row[j] + sum(map(mul, pulls, columns[j]))

    def _columns(self) -> list[list[float]]:
        """What the prior says that each column takes, as a share of what each fresh step took."""
        p, steps = self._prior, [(*features, each) for features, each, _, _ in self._fresh]
        token, bend, knee, decode, sample = p.token, p.bend, p.knee, p.decode, p.sample
        fixed = [p.fixed * each for *_, each in steps]
        bent = [bend * (t - knee if t > knee else 0.0) * each for t, _, _, _, _, each in steps]
        contexts = [p.context * context * each for _, context, _, _, _, each in steps]
        if len(self._groups) == 4:
            rows = [(token * t + decode * d + sample * s) * each for t, _, _, d, s, each in steps]
            return [fixed, rows, bent, contexts]
        return [
            fixed,
            [token * tokens * each for tokens, *_, each in steps],
            bent,
            contexts,
            [p.area * area * each for _, _, area, *_, each in steps],
            [(decode * d + sample * s) * each for _, _, _, d, s, each in steps],
        ]

    def due(self, drifting: bool) -> bool:
        """Whether it is time to solve again."""
        settled = self.seen > SETTLED and not drifting
        return self.seen < YOUNG or len(self._fresh) >= SOLVE[settled]

    def solve(self, sweeps: int) -> None:
        """Move toward the least error without a negative coefficient."""
        self._fold()
        theta = self._theta
        for _ in range(sweeps):
            for i, (row, right) in enumerate(zip(self._gram, self._right, strict=True)):
                rest = sum(map(mul, row, theta)) - row[i] * theta[i]
                # LEAN holds what no step has told apart where it is; forgetting wears out the ridge
                part = (right + LEAN * theta[i] - rest) / (row[i] + LEAN)
                theta[i] = part if part > 0.0 else 0.0
        parts = [part if at < 0 else part * theta[at] for part, at in self._parts]
        self.solved = Coefficients(*parts)


_NO_EDGE = (1.0, 0)


def _tile(tokens: float) -> int:
    """Steps of about so many tokens: those of a tile are alike."""
    return int(tokens) // 4


_DECODE = (("fixed",), ("token", "decode", "sample"), ("bend",), ("context",))
_MIXED = (("fixed",), ("token",), ("bend",), ("context",), ("area",), ("decode", "sample"))


class Observation(NamedTuple):
    """One step: its shape, how long it took, and what had been predicted before it was seen."""

    features: StepFeatures
    seconds: float
    predicted: float


class StepModel:
    """Predicts step times and learns from them; one for each executor.

    origin: the prior as it was given, before any step was seen, if it was one of this model and
    machine; `prior` is at the machine's speed.
    gamma: by how much to exceed a prediction so that nine steps in ten keep to it. gap: seconds
    between two steps in which the executor waits for the host. drifting: whether the errors of late
    are so large that old evidence is dropped.
    """

    def __init__(self, prior: Coefficients = UNKNOWN) -> None:
        if not (prior.fixed > 0 and prior.token > 0):
            raise ValueError("a prior needs a fixed and a token cost above 0")
        self.prior = prior
        self.origin = None if prior == UNKNOWN else prior
        self.gamma = GAMMA[1]
        self.gap = 0.0
        self.drifting = False
        self.steps: deque[Observation] = deque(maxlen=LOG)
        self._decode = _Fit(prior, _DECODE)
        self._mixed = _Fit(prior, _MIXED)
        self._now: Coefficients | None = None  # of mixed steps at this pace
        self._errors: deque[float] = deque(maxlen=RECENT)  # predicted / seconds - 1
        self._spread = 0.25  # median of the absolute errors
        self._seen = 0
        self._left: tuple[float, float] | None = None  # both paces when the rest began, if it did
        # The shape that was last asked about and what the long run says of it: most steps are
        # asked about three times, when they are filled, go out and come back.
        self._asked: tuple[StepFeatures | None, float] = (None, 0.0)

    @property
    def pace(self) -> float:
        """How long mixed steps take now, beside what the coefficients of the long run say."""
        return self._mixed.pace

    @property
    def coefficients(self) -> Coefficients:
        """Of mixed steps at the pace of now, which is what planning asks about."""
        now = self._now
        if now is None:
            now = self._now = self._mixed.solved.times(self.pace)
        return now

    @property
    def decode_coefficients(self) -> Coefficients:
        """Of steps that only decode, at the pace of now."""
        return self._decode.solved.times(self._decode.pace)

    def predict(self, features: StepFeatures) -> float:
        """Seconds of a step of that shape now, most likely."""
        fit = self._mixed if features.prefill_area > 0.0 else self._decode
        asked, usual = self._asked
        if asked is not features:
            usual = fit.seconds(features)
            self._asked = features, usual
        return fit.pace * usual

    def decoding(self, rows: float, context: float, *, prompts: bool = False) -> float:
        """Seconds of a step in which so many decode, with so much context in all, most likely;
        prompts: of one with prompts besides, but for what `prefilling` says of those."""
        fit = self._mixed if prompts else self._decode
        w = fit.solved
        bend = w.bend * (rows - w.knee) if rows > w.knee else 0.0
        each = w.token + w.decode + w.sample
        return fit.pace * (w.fixed + each * rows + bend + w.context * context)

    def lasting(self, seconds: float) -> float:
        """The pace of mixed steps that is to be expected in the mean of so many seconds from now,
        beside that of now. A pace passes, so over a long wait it is nearly the usual one."""
        pace = self._mixed.pace
        return (1.0 + (pace - 1.0) / (1.0 + 0.5 * seconds / LASTS)) / pace

    @property
    def per_step(self) -> float:
        """Seconds that a step with a prompt takes now, whatever is in it."""
        return self._mixed.pace * self._mixed.solved.fixed

    @property
    def per_token(self) -> float:
        """Seconds that a token of a prompt adds now to steps that run anyway, without attention."""
        fit = self._mixed
        return fit.pace * (fit.solved.token + fit.solved.bend)

    def prefilling(self, start: int, count: int) -> float:
        """What so many tokens of a prompt from `start` on add now to steps that run anyway."""
        fit = self._mixed
        return fit.pace * fit.solved.prefill(start, count)

    def usual(self, features: StepFeatures) -> float:
        """Seconds of a step of that shape at the pace of the long run."""
        fit = self._mixed if features.prefill_area > 0.0 else self._decode
        return fit.seconds(features)

    # At best: now, in the long run, when it was fastest, or as it was thought before it was seen;
    # for all that was seen may have been among others' work.

    def best(self, features: StepFeatures) -> float:
        """Seconds of a step of that shape at best."""
        fit = self._mixed if features.prefill_area > 0.0 else self._decode
        seconds = min(fit.pace, fit.least) * fit.seconds(features)
        return seconds if self.origin is None else min(seconds, self.origin.seconds(features))

    def best_prefill(self, parts: Sequence[tuple[int, int]], most: int) -> float:
        """Seconds at best of steps of `most` tokens that compute nothing but prompts: of each
        (tokens, how many are before them already)."""
        total = sum([count for count, _ in parts])
        steps = -(-total // most)
        fit, origin = self._mixed, self.origin
        seconds = _prefilling(fit.solved, min(fit.pace, fit.least), parts, total, steps)
        if origin is None:
            return seconds
        return min(seconds, _prefilling(origin, 1.0, parts, total, steps))

    def most_tokens(self, features: StepFeatures, start: int, seconds: float) -> float:
        """How many tokens from `start` on may be added to a step of that shape so that it takes
        at most `seconds`: the positive root of a quadratic on either side of the knee. By the line:
        an edge is of the tokens that the step will have, which the answer decides, and after it who
        asks rounds down; edges are a few per cent, less than what a step leaves of the slack."""
        w = self.coefficients
        left = seconds - w.seconds(features) - w.sample
        if left <= 0.0:
            return 0.0
        slope, room = w.token + w.area * start, max(0.0, w.knee - features.tokens)
        count = _root(w.area, slope, left)
        if count > room and w.bend:
            count = max(room, _root(w.area, slope + w.bend, left + w.bend * room))
        return count

    def observe(self, features: StepFeatures, seconds: float) -> None:
        """A step of that shape took so long; what no step takes is not looked at."""
        if not POSSIBLE[0] <= seconds <= POSSIBLE[1]:  # a NaN is not
            return
        self._left = None
        fit, other = self._mixed, self._decode
        if not features.prefill_area > 0.0:
            fit, other = other, fit
        asked, usual = self._asked
        if asked is not features:
            usual = fit.seconds(features)
        self._asked = (None, 0.0)
        predicted = fit.pace * usual
        self.steps.append(_new(Observation, (features, seconds, predicted)))
        error = predicted / seconds - 1.0
        self._errors.append(error)
        # Beyond five times the usual error a step counts as if it were just that far off.
        far = abs(error) / (5.0 * self._spread + 0.02)
        young = fit.seen < YOUNG
        trusted = young or self.drifting or far <= 1.0
        keep = HURRY if self.drifting else KEEP
        # Errors are relative: one step out of nowhere that took no time would outweigh all others.
        weight = min(1.0, (SLIP * seconds / predicted) ** 2) if predicted > 0.0 else 1.0
        fit.add(features, seconds, weight if trusted else min(weight, 1.0 / far), keep)
        if young or fit.due(self.drifting):
            fit.solve(8 if young or self.drifting else 2)
            usual = fit.seconds(features)
        link = LINKED if other.seen > SETTLED else 1.0  # what was hardly seen has none of its own
        other.pace *= fit.follow(features, seconds, usual) ** link
        self._now = None
        self._seen += 1
        if self._seen % REFRESH == 0:
            self._look()

    def calibrate(self, steps: list[tuple[StepFeatures, float]]) -> None:
        """Begin with these (shape, seconds): the prior is first brought to the machine's speed, so
        that what they do not tell apart is at least of the right size, and bends where they do."""
        if not steps:
            return
        knees = dict.fromkeys((self.prior.knee, *KNEES))
        priors = [_scaled(replace(self.prior, knee=knee), steps) for knee in knees]
        self.prior = min(priors, key=lambda prior: _misfit(prior, steps))
        self._decode = _Fit(self.prior, _DECODE)
        self._mixed = _Fit(self.prior, _MIXED)
        for shape, seconds in steps:
            self.observe(shape, seconds)

    def rest(self, seconds: float, *, best: bool = False) -> None:
        """Nothing ran for so long: what is known of the pace of now passes. Else who refuses for a
        pace, and so sees no step, would never know another. best: steps may be as fast again as
        they ever were; for the line too may have been learned when they were not."""
        fits, left = (self._mixed, self._decode), self._left
        if left is None:
            left = self._left = (self._mixed.pace, self._decode.pace)
        for fit, pace in zip(fits, left, strict=True):
            usual = 1.0 + (pace - 1.0) / (1.0 + seconds / REST)
            fit.rest(min(usual, fit.least) if best else usual)
        self._now = None

    def _look(self) -> None:
        """Spread, bias and drift, from the latest steps."""
        recent = list(islice(reversed(self._errors), WINDOW))
        ordered = sorted(recent)
        sizes = sorted(map(abs, ordered))
        self._spread = sizes[len(sizes) // 2]
        self._mixed.recall()
        self._decode.recall()
        # A few wild steps are no drift: the latest ones' trimmed mean decides.
        late = sorted(map(abs, recent[:LATE]))[: LATE * 7 // 8]
        paces = (self._mixed.pace, self._decode.pace)  # few of the errors may be of one kind
        off = sum(late) / len(late) > DRIFT or not FAR[0] < min(paces) <= max(paces) < FAR[1]
        self.drifting = len(recent) >= LATE and off
        if len(recent) >= LATE:
            tail = 1.0 / (1.0 + ordered[-1 - int(0.9 * len(ordered))])  # seconds / predicted
            self.gamma = GAMMA[2] if self.drifting else min(max(tail, GAMMA[0]), GAMMA[2])

    def waited(self, seconds: float) -> None:
        """Between the last step and this one, with work at hand, the executor stood still."""
        self.gap += 0.05 * (min(seconds, 0.05) - self.gap)

    def error(self) -> tuple[float, float]:
        """(mean absolute, mean signed) relative error of the latest predictions, each made before
        its step was seen. Positive: too pessimistic."""
        errors = self._errors
        if not errors:
            return 0.0, 0.0
        return sum(map(abs, errors)) / len(errors), sum(errors) / len(errors)

    def snapshot(self) -> dict[str, float]:
        """What there is to know about it, by name."""
        mape, bias = self.error()
        return {
            "steptime_error": mape,
            "steptime_bias": bias,
            "steptime_gamma": self.gamma,
            "steptime_pace": self.pace,
            "steptime_drifting": float(self.drifting),
            "steptime_gap_seconds": self.gap,
        }

    def log(self) -> Iterator[str]:
        """The latest steps as lines of JSON: what a simulator calibrates from."""
        names = (*StepFeatures._fields, "seconds", "predicted")
        for features, seconds, predicted in list(self.steps):
            values = (*features, seconds, predicted)
            pairs = [f'"{n}": {float(v)!r}' for n, v in zip(names, values, strict=True)]
            yield "{" + ", ".join(pairs) + "}"

    def describe(self) -> dict[str, dict[str, float]]:
        """The coefficients in force, by regime."""
        return {"decode": asdict(self.decode_coefficients), "mixed": asdict(self.coefficients)}


def _prefilling(
    line: Coefficients, pace: float, parts: Sequence[tuple[int, int]], total: int, steps: int
) -> float:
    """Seconds of so many steps, at a pace, in which `total` tokens of prompts are computed and
    nothing else: of each (tokens, how many are before them already)."""
    each, area, sample = pace * line.token + pace * line.bend, pace * line.area, pace * line.sample
    work = sum([n * (each + area * (start + 0.5 * n)) + sample for n, start in parts])
    # These are all taken for ones beyond the bend.
    return work + steps * (pace * line.fixed) - pace * line.bend * min(total, steps * line.knee)


def _scaled(prior: Coefficients, steps: list[tuple[StepFeatures, float]]) -> Coefficients:
    """The prior at the speed that these steps had in the median."""
    ratios = sorted(seconds / prior.seconds(shape) for shape, seconds in steps)
    return prior.times(ratios[len(ratios) // 2])


def _misfit(prior: Coefficients, steps: list[tuple[StepFeatures, float]]) -> float:
    """How far these steps are from the best line that starts from `prior`: the mean relative error
    of the nearest seven eighths."""
    fits = (_Fit(prior, _DECODE), _Fit(prior, _MIXED))
    for shape, seconds in steps:
        fits[shape.prefill_area > 0.0].add(shape, seconds, 1.0, 1.0)
    for fit in fits:
        fit.solve(32)
    errors = sorted(
        abs(fits[shape.prefill_area > 0.0].solved.seconds(shape) / seconds - 1.0)
        for shape, seconds in steps
    )
    near = errors[: max(1, len(errors) * 7 // 8)]
    return sum(near) / len(near)


def _pace(ratios: deque[float]) -> float:
    """The median, drawn toward 1 where the ratios agree among themselves no better than with 1."""
    if len(ratios) < FEW:
        half = len(ratios) // 2
        middle = sorted(ratios)[half]
        spread = sorted([abs(ratio - middle) for ratio in ratios])[half]
    else:  # of three, the second of the distances is the lesser of the two that are any
        low, middle, high = sorted(ratios)
        below, above = middle - low, high - middle
        spread = below if below < above else above
    off = middle - 1.0
    square = off * off
    return 1.0 + off * square / (square + spread * spread + 1e-12)


def _root(area: float, slope: float, left: float) -> float:
    """The x > 0 at which area / 2 x^2 + slope x = left."""
    if left <= 0.0:
        return 0.0
    below = slope + sqrt(slope * slope + 2.0 * area * left)
    return 2.0 * left / below if below > 0.0 else MANY
