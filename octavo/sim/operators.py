"""Durations from measured operators: a profile of one model on one device, looked up and added up.

The profile has the layout of LLMServingSim's (MIT): `dense` (microseconds of each layer's products
and norms by tokens), `per_sequence` (head and sampler by sequences) and `attention` on a grid of
(prefill chunk, its history, decodes, their mean context). Between grid points time is taken as
linear; a step with several prompts pays for each of them. Contexts that differ cost more than as
many that are all the mean, for the last block of threads works alone on the longest: where the
profile has measured that (`skew_fit`), it counts.
"""

from __future__ import annotations

import csv
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from math import inf
from pathlib import Path

from octavo.core.batch import Batch
from octavo.core.stretch import Stretch
from octavo.errors import BadFile
from octavo.sim.executor import Rows, split

# How often each dense operator runs in a layer; those outside the layers are apart.
PER_LAYER = {"layernorm": 2, "qkv_proj": 1, "rotary_emb": 1, "o_proj": 1, "gate_up_proj": 1,
             "act_fn": 1, "down_proj": 1}  # fmt: skip
ONCE = ("embedding", "final_layernorm")


class Curve:
    """A function of one number, linear between measured points and beyond the last two."""

    def __init__(self, points: Mapping[int, float]) -> None:
        self.x = sorted(points)
        self.y = [points[x] for x in self.x]

    def __call__(self, x: float) -> float:
        if len(self.x) == 1:
            return self.y[0]
        i = min(max(bisect_right(self.x, x), 1), len(self.x) - 1)
        x0, x1, y0, y1 = self.x[i - 1], self.x[i], self.y[i - 1], self.y[i]
        if x <= x0:
            return y0
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


class Grid:
    """Values at nested points: axis by axis, each slice with a grid of its own. Linear between the
    neighbours in each slice, and beyond its last two; zero is not a small size but another kernel.
    """

    def __init__(self, points: Mapping[tuple[int, ...], float]) -> None:
        below: dict[int, dict[tuple[int, ...], float]] = {}
        for (x, *rest), value in points.items():
            below.setdefault(x, {})[tuple(rest)] = value
        self._x = sorted(below)
        self._below: list[Grid | float] = [
            below[x][()] if () in below[x] else Grid(below[x]) for x in self._x
        ]

    def __call__(self, *wanted: float) -> float:
        value, rest = wanted[0], wanted[1:]
        xs = self._x
        i = bisect_right(xs, value)
        if i and xs[i - 1] == value:
            return self._at(i - 1, rest)
        least = 1 if len(xs) > 1 and not xs[0] else 0  # the first place that is a size
        if value <= 0 or len(xs) - least < 2:
            return self._at(0 if value <= 0 else least, rest)
        i = min(max(i, least + 1), len(xs) - 1)
        low, high = xs[i - 1], xs[i]
        if value < low:
            return self._at(i - 1, rest)
        share = (value - low) / (high - low)
        return (1.0 - share) * self._at(i - 1, rest) + share * self._at(i, rest)

    def _at(self, place: int, rest: tuple[float, ...]) -> float:
        below = self._below[place]
        return below(*rest) if isinstance(below, Grid) else below


class Skew:
    """How far the longest context counts beyond the mean (LLMServingSim's alpha, measured with its
    profiles): attention takes t(mean) + alpha (t(longest) - t(mean)).

    By the prompt's chunk, decodes, (mean - shortest) / (longest - shortest), the longest, and the
    prompt's history, each in a bucket; 0 where nothing was measured. It depends on how many blocks
    of threads there are for each multiprocessor, so on a device with more of them (`wider` times
    as many) it is that of fewer decodes.
    """

    def __init__(self, alphas: Mapping[tuple[float, ...], float], wider: float = 1.0) -> None:
        self._alphas = alphas
        self._bounds = [sorted(set(bounds)) for bounds in zip(*alphas, strict=True)]
        self._wider = wider

    def __call__(self, chunk: int, history: int, ends: list[int], mean: float) -> float:
        shortest, longest = min(ends), max(ends)
        if longest == shortest:
            return 0.0
        share = (mean - shortest) / (longest - shortest)
        at = (chunk, len(ends) / self._wider, share, longest, history)
        # Chunks are points that were measured, of which the next one stands for those below it.
        places = [bisect_left(bounds, x) for bounds, x in zip(self._bounds, at, strict=True)]
        found = [b[min(i, len(b) - 1)] for b, i in zip(self._bounds, places, strict=True)]
        return self._alphas.get(tuple(found), 0.0)


class OperatorTable:
    """Durations of batches of one model on one device; skew: see there."""

    def __init__(
        self,
        layers: int,
        dense: Mapping[str, Curve],
        per_sequence: Mapping[str, Curve],
        attention: Grid,
        skew: Skew | None = None,
    ) -> None:
        missing = {*PER_LAYER, *ONCE} - dense.keys()
        if missing:
            raise BadFile(f"the profile lacks {', '.join(sorted(missing))}")
        self._layers = layers
        self._dense = dense
        self._sequences = per_sequence
        self._attention = attention
        self._skew = skew
        self._known: dict[int, float] = {}
        self._choosing: dict[int, float] = {}

    def __call__(self, batch: Batch) -> float:
        return self._of(*split(batch))

    def decoding(self, steps: Stretch) -> float:
        return self._of(steps.ends, [])

    def _of(self, ends: list[int], others: Rows) -> float:
        chunks = [(n, start) for start, n, _ in others]
        tokens = len(ends) + sum([n for n, _ in chunks])
        outputs = len(ends) + sum([bool(wanted) for _, _, wanted in others])
        decodes = len(ends)
        mean = sum(ends) / decodes if decodes else 0.0
        first = chunks[0] if chunks else (0, 0)
        attention = self._attention(*first, decodes, mean)
        if self._skew is not None and decodes > 1:
            alpha = self._skew(*first, ends, mean)
            if alpha:
                most = self._attention(*first, decodes, max(ends))
                attention += max(0.0, alpha * (most - attention))
        attention += sum([self._attention(n, start, 0, 0) for n, start in chunks[1:]])
        return self._products(tokens) + self._layers * attention + self._heads(max(1, outputs))

    def _products(self, tokens: int) -> float:
        found = self._known.get(tokens)
        if found is None:
            layer = sum(n * self._dense[name](tokens) for name, n in PER_LAYER.items())
            once = sum(self._dense[name](tokens) for name in ONCE)
            found = self._known[tokens] = self._layers * layer + once
        return found

    def _heads(self, outputs: int) -> float:
        found = self._choosing.get(outputs)
        if found is None:
            found = sum(curve(outputs) for curve in self._sequences.values())
            self._choosing[outputs] = found
        return found


def read_operators(prefix: str | Path, layers: int, skew: Skew | None = None) -> OperatorTable:
    """From `PREFIX.dense.csv`, `PREFIX.per_sequence.csv` and `PREFIX.attention.csv`; where no skew
    is given from `PREFIX.skew_fit.csv` too, if that is there.

    Raises BadFile naming the file.
    """
    if skew is None and Path(f"{prefix}.skew_fit.csv").exists():
        skew = read_skew(prefix)
    dense = _curves(Path(f"{prefix}.dense.csv"), "tokens")
    sequences = _curves(Path(f"{prefix}.per_sequence.csv"), "sequences")
    path = Path(f"{prefix}.attention.csv")
    points: dict[tuple[int, ...], float] = {}
    try:
        for row in _rows(path):
            at = (
                int(row["prefill_chunk"]),
                int(row["kv_prefill"]),
                int(row["n_decode"]),
                int(row["kv_decode"]),
            )
            points[at] = float(row["time_us"]) * 1e-6
    except (KeyError, ValueError) as error:
        raise BadFile(f"{path}: {error}") from None
    if not points:
        raise BadFile(f"{path}: no measurement in it")
    return OperatorTable(layers, dense, sequences, Grid(points), skew)


def read_skew(prefix: str | Path, wider: float = 1.0) -> Skew:
    """From `PREFIX.skew_fit.csv`. Raises BadFile naming the file."""
    path = Path(f"{prefix}.skew_fit.csv")
    names = ("n_label", "skew_rate_label", "kv_big_label", "kp_label")
    try:
        alphas = {
            (float(row["pc"]), *(_bound(row[name]) for name in names)): float(row["alpha"])
            for row in _rows(path)
        }
    except (KeyError, ValueError) as error:
        raise BadFile(f"{path}: {error}") from None
    if not alphas:
        raise BadFile(f"{path}: no measurement in it")
    return Skew(alphas, wider)


def _bound(label: str) -> float:
    """The most that belongs to a bucket: kvB<=4k, sr<=15%, kp=0, n>256 (no bound)."""
    if ">" in label:
        return inf
    number = label.partition("=")[2]
    unit = {"k": 1024.0, "%": 0.01}.get(number[-1:], 1.0)
    return float(number.rstrip("k%")) * unit


def _rows(path: Path) -> Iterable[dict[str, str]]:
    try:
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    except OSError as error:
        raise BadFile(f"{path}: {error.strerror}") from error


def _curves(path: Path, key: str) -> dict[str, Curve]:
    points: dict[str, dict[int, float]] = {}
    try:
        for row in _rows(path):
            points.setdefault(row["layer"], {})[int(row[key])] = float(row["time_us"]) * 1e-6
    except (KeyError, ValueError) as error:
        raise BadFile(f"{path}: {error}") from None
    return {layer: Curve(values) for layer, values in points.items()}
