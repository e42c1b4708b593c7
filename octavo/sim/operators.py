"""Durations from measured operators: a profile of one model on one device, looked up and added up.

The profile has the layout of LLMServingSim's (MIT): `dense` (microseconds of each layer's products
and norms by tokens), `per_sequence` (head and sampler by sequences) and `attention` on a grid of
(prefill chunk, its history, decodes, their mean context). Between grid points time is taken as
linear; a step with several prompts pays for each of them.
"""

from __future__ import annotations

import csv
from bisect import bisect_right
from collections.abc import Iterable, Mapping
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


class OperatorTable:
    """Durations of batches of one model on one device.

    skew: how far the longest context counts beyond the mean (LLMServingSim's alpha, part of its
    profiles): attention takes t(mean) + skew (t(longest) - t(mean)).
    """

    def __init__(
        self,
        layers: int,
        dense: Mapping[str, Curve],
        per_sequence: Mapping[str, Curve],
        attention: Grid,
        skew: float = 0.0,
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
        if self._skew and decodes > 1:
            most = self._attention(*first, decodes, max(ends))
            attention += self._skew * (most - attention)
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


def read_operators(prefix: str | Path, layers: int, skew: float = 0.0) -> OperatorTable:
    """From `PREFIX.dense.csv`, `PREFIX.per_sequence.csv` and `PREFIX.attention.csv`.

    Raises BadFile naming the file.
    """
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
