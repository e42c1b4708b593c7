"""A model's matrices as a step reads them: all threads through all of them, nothing else.

    python bench/stream.py qwen2.5-coder-1.5b                  GB/s of one row, by type and in all
    python bench/stream.py smollm2-135m --rows 1,2,4,8,16,64   what more rows cost

What is left of a step when attention, norms, barriers and Python cost nothing: the bound of what an
engine around these kernels can reach. Beside every figure stands what the machine does in the same
run, in turn with it: a pass that only reads the same bytes, and the peak of the products. Figures
are medians over the repeats (and the best in brackets); a fraction is of the time that reading or
multiplying allows, whichever is longer.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from dataclasses import dataclass, field

from octavo.ceilings import UNITS
from octavo.kernels import _cpu
from octavo.models import hub
from octavo.models.weights import open_checkpoint
from octavo.ops.trace import trace
from octavo.runtime.cpu import WEIGHT_TYPES

NAMES = {number: name for name, number in WEIGHT_TYPES.items()}


def matrices(name: str, threads: int) -> list[_cpu.PackedWeight]:
    """All that a step multiplies by, in its order; a tied head once, at its end."""
    checkpoint = open_checkpoint(hub.resolve(name))
    program = trace(checkpoint.config)
    specs = {spec.name: spec for spec in program.weights}
    packed = []
    for instr in program.instrs:
        if instr.op == "embed":
            continue
        for weight in instr.weights:
            if weight is None or specs[weight].kind == "vector":
                continue
            for part in specs[weight].parts:
                tensor = checkpoint.tensor(part)
                rows, cols = tensor.shape
                kind = WEIGHT_TYPES[tensor.type]
                packed.append(
                    _cpu.pack(kind, tensor.data, rows, cols, tensor.permute_heads, threads)
                )
                checkpoint.release(part)
    return packed


@dataclass
class Cell:
    """Seconds of passes through the same matrices: with `rows` rows, and only reading."""

    name: str
    weights: list[_cpu.PackedWeight]
    rows: int
    linear: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(w.nbytes for w in self.weights)

    @property
    def ops(self) -> int:
        """Of quantised weights; each is one product and one sum of every row."""
        return 2 * self.rows * sum(w.panels * 16 * w.k for w in self.weights)

    def line(self, peak: float) -> str:
        seconds, read = statistics.median(self.linear), statistics.median(self.read)
        bound = max(read, self.ops / peak)
        return (
            f"{self.name:7}{self.rows:4}{self.nbytes / 1e6:9.1f}{1e3 * seconds:9.2f}"
            f" ({1e3 * min(self.linear):6.2f}){self.nbytes / seconds / 1e9:8.1f}"
            f"{self.nbytes / read / 1e9:8.1f}{self.ops / seconds / 1e9:8.0f}{bound / seconds:8.0%}"
        )


HEADER = (
    f"{'type':7}{'rows':>4}{'MB':>9}{'ms':>9} ({'best':>6}){'GB/s':>8}{'read':>8}{'GOP/s':>8}"
    f"{'of bound':>8}"
)


def groups(weights: list[_cpu.PackedWeight]) -> dict[str, list[_cpu.PackedWeight]]:
    by_type = defaultdict(list)
    for w in weights:
        by_type[NAMES[w.type]].append(w)
    found = dict(sorted(by_type.items(), key=lambda item: -sum(w.nbytes for w in item[1])))
    return found | {"all": weights} if len(found) > 1 else found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--rows", default="1")
    parser.add_argument("--act", choices=("int8", "mixed", "pairs", "bf16", "fp32"), default="int8")
    parser.add_argument("--isa", default=_cpu.isas()[0])
    parser.add_argument("--threads", type=int, default=_cpu.affinity_count())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", help="this type alone, or all")
    args = parser.parse_args()
    weights = matrices(args.model, args.threads)
    cells = [
        Cell(name, group, int(rows))
        for name, group in groups(weights).items()
        if args.only in (None, name)
        for rows in args.rows.split(",")
    ]
    kind = {"bf16": "bf16", "fp32": "f32"}.get(args.act, "int8")
    peak = 0.0
    for _ in range(args.repeats):
        found = _cpu.probe_ops(args.threads, UNITS.index(kind), 0.02, args.isa)
        peak = max(peak, found / (2 if args.act == "pairs" else 1))
        for cell in cells:
            given = (1, args.threads, args.isa, args.act)
            cell.read += _cpu.time_stream(cell.weights, 0, *given)
            cell.linear += _cpu.time_stream(cell.weights, cell.rows, *given)
    print(
        f"{args.model}, {args.isa}, {args.threads} threads, {args.act}, peak {peak / 1e9:.0f}e9/s"
    )
    print(HEADER)
    for cell in cells:
        print(cell.line(peak))
    record = [
        {"type": c.name, "rows": c.rows, "bytes": c.nbytes, "linear": c.linear, "read": c.read}
        for c in cells
    ]
    print(json.dumps({"bench": "stream", **vars(args), "peak": peak, "cells": record}))


if __name__ == "__main__":
    main()
