"""What `linear` reaches, for every type of weight, beside what this machine can reach.

    python bench/kernels.py [--isa avx512] [--types Q4_0,Q8_0] [--act int8] [--k 1536]

Per type: from cache on one core, GB/s of packed weights for one row of activations and GOP/s for 16
and 64 rows; from memory on all cores at once, GB/s for 1, 2, 4 and 8 rows. A fraction after a
figure is of its ceiling: of the products' peak for GOP/s (int8, bf16 or f32); from memory, of the
time that the roofline allows: reading the weights or multiplying, whichever takes longer. Ceilings
are measured in the same run: the best peak, the median of the reads. int8_scaled and int8_minima
(with AVX-512) are what of the int8 peak remains where every 32 values need a float multiply-add for
their scale, and another for their minimum: a type without and one with minima cannot be nearer to
the peak than that. Each figure is the 5th percentile of many short calls, so that a neighbour on
the machine does not count; every type is checked against its fp32 mode first. --act as in the
engine; of pairs, GOP/s are the model's and the fractions of the int8 peak count both bytes'
products.
"""

from __future__ import annotations

import argparse
import json
import statistics

import numpy as np

from octavo.ceilings import UNITS
from octavo.kernels import _cpu

# ggml's number; elements and bytes of a block in the file; which peak bounds the products.
TYPES = {
    "Q4_0": (2, 32, 18, "int8"),
    "Q4_1": (3, 32, 20, "int8"),
    "Q5_0": (6, 32, 22, "int8"),
    "Q5_1": (7, 32, 24, "int8"),
    "Q8_0": (8, 32, 34, "int8"),
    "Q4_K": (12, 256, 144, "int8"),
    "Q5_K": (13, 256, 176, "int8"),
    "Q6_K": (14, 256, 210, "int8"),
    "BF16": (30, 1, 2, "bf16"),
    "F16": (1, 1, 2, "f32"),
    "F32": (0, 1, 4, "f32"),
}
CACHE_BYTES, MEMORY_BYTES, CALL_BYTES = 400_000, 128_000_000, 3_000_000
CACHE_ROWS, MEMORY_ROWS = (1, 16, 64), (1, 2, 4, 8)


def weight(name: str, k: int, nbytes: int) -> _cpu.PackedWeight:
    """About nbytes of weights: any bits, but scales that are finite."""
    number, elements, size, _ = TYPES[name]
    row = k // elements * size
    n = max(64, nbytes // row // 64 * 64)
    one = np.random.default_rng(number).integers(0, 256, (64, row), dtype=np.uint8) & 0x3B
    return _cpu.pack(number, np.tile(one, (n // 64, 1)).reshape(-1), n, k)


def check(handle: _cpu.PackedWeight, isa: str, act: str) -> None:
    """The products agree with those of the dequantised weights."""
    x = np.random.default_rng(0).normal(size=(3, handle.k)).astype(np.float32)
    part = (0, 4, 0, 3)
    exact = _cpu.linear(handle, x, isa, "fp32", part)
    got = _cpu.linear(handle, x, isa, act, part)
    if not np.linalg.norm(got - exact) <= 2e-2 * np.linalg.norm(exact):
        raise SystemExit("wrong products: nothing is measured")


def best(a: dict[str, float], b: dict[str, float]) -> dict[str, float]:
    return {key: max(a[key], b[key]) for key in a}


class Bench:
    """Ceilings and cells of one instruction set."""

    def __init__(self, isa: str, threads: int, seconds: float, act: str) -> None:
        self.isa, self.threads, self.seconds, self.act = isa, threads, seconds, act
        self.peaks, self.reads = self.probe(), [0.0]

    def probe(self) -> dict[str, float]:
        """Operations a second of one core."""
        # The chains of the last two fit in registers with AVX-512 only.
        remains = ("int8_scaled", "int8_minima") if self.isa == "avx512" else ()
        return {
            f"{unit}_ops_per_s": _cpu.probe_ops(1, kind, 0.1, self.isa)
            for kind, unit in enumerate((*UNITS, *remains))
        }

    @property
    def read(self) -> float:
        """Bytes a second from memory, all cores: the median of what was read before each cell."""
        return statistics.median(self.reads)

    def cell(self, handle: _cpu.PackedWeight, rows: int, memory: bool) -> tuple[float, float]:
        """Bytes and operations a second, of one core in cache or of all of them from memory."""
        threads = self.threads if memory else 1
        panel_bytes = handle.nbytes / handle.panels
        panels = max(4, int(CALL_BYTES / panel_bytes)) if memory else handle.panels
        if memory:
            reads = _cpu.time_reads(handle, panels, threads, self.seconds, self.isa)
            self.reads.append(sum(panels * panel_bytes / t for t in reads))
        times = _cpu.time_linear(handle, rows, panels, threads, self.seconds, self.isa, self.act)
        calls = sum(1 / t for t in times)
        return calls * panels * panel_bytes, calls * 2 * rows * panels * 16 * handle.k

    def row(self, name: str, k: int) -> dict[str, object]:
        """All cells of one type."""
        cached, large = weight(name, k, CACHE_BYTES), weight(name, k, MEMORY_BYTES)
        check(cached, self.isa, self.act)
        cells = [
            ("memory" if memory else "cache", rows, *self.cell(handle, rows, memory))
            for memory, handle, counts in ((0, cached, CACHE_ROWS), (1, large, MEMORY_ROWS))
            for rows in counts
        ]
        return {"type": name, "isa": self.isa, "k": k, "cells": cells}

    def fraction(self, name: str, cell: tuple[str, int, float, float]) -> float:
        """Of the roofline of all cores from memory; of one core's peak in cache."""
        where, _, bytes_s, ops_s = cell
        kind = TYPES[name][3]
        ops_s *= 2 if self.act == "pairs" and kind == "int8" else 1
        products = {"bf16": "bf16", "fp32": "f32"}.get(self.act, kind) if kind == "int8" else kind
        peak = f"{products}_ops_per_s"
        if where == "cache":
            return ops_s / self.peaks[peak]
        return max(bytes_s / self.read, ops_s / (self.peaks[peak] * self.threads))


def line(bench: Bench, row: dict[str, object]) -> str:
    name, out = str(row["type"]), []
    for cell in row["cells"]:
        where, rows, bytes_s, ops_s = cell
        part = bench.fraction(name, cell)
        if where == "cache":
            out.append(f"{bytes_s / 1e9:6.1f}" if rows == 1 else f"{ops_s / 1e9:6.0f} {part:4.0%}")
        else:
            out.append(f"{bytes_s / 1e9:6.1f} {part:4.0%}")
    return f"{name:5}" + " ".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", default=",".join(_cpu.isas()))
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--act", choices=("mixed", "pairs", "int8", "bf16", "fp32"), default="int8")
    parser.add_argument("--k", type=int, default=1536)
    parser.add_argument("--seconds", type=float, default=0.05)
    args = parser.parse_args()
    report = []
    for isa in args.isa.split(","):
        bench = Bench(isa, _cpu.affinity_count(), args.seconds, args.act)
        rows = [bench.row(name, args.k) for name in args.types.split(",")]
        bench.peaks = best(bench.peaks, bench.probe())
        peaks = {key: f"{bench.peaks[key] / 1e9:.1f}" for key in bench.peaks}
        print(
            f"{isa}, {args.act}; 1e9/s: {peaks}; {bench.threads} cores read {bench.read / 1e9:.1f}"
        )
        print("     cache, one core:              memory, all cores, GB/s and share of roofline:")
        print("     M=1   M=16        M=64        M=1         M=2         M=4         M=8")
        print("     GB/s  GOP/s       GOP/s")
        print("\n".join(line(bench, row) for row in rows), end="\n\n")
        report.append(
            {"isa": isa, "act": args.act, "peaks": bench.peaks, "read": bench.read, "rows": rows}
        )
    print(json.dumps({"bench": "kernels", "report": report}))


if __name__ == "__main__":
    main()
