"""Which roof an op stands under, and how near it comes: shared by the benches.

An op takes at least the longer of its bytes at the memory's speed and its operations at its unit's
peak. Operations are those that the hardware does: two for each of the model's where activations
are pairs of bytes. Bytes are the op table's, each counted once; where they come from a cache
instead of memory, an op can stand above its roof.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.ceilings import Ceilings, units
from octavo.ops.program import Program
from octavo.ops.table import TABLE, StepShape

NEAR = 0.5  # of its roof: what stands lower is held up by something else
TILE_ROWS = 48  # fewest rows of a product that uses matrix tiles, as kernels/cpu/linear.h has it
ABOVE = "Above 100 %: part of the bytes came from a cache, which is faster than memory."
SCORE_BYTES = 12  # of each visible pair: f32 scores and bf16 weights, each written and read


@dataclass(frozen=True, slots=True)
class Demand:
    """What one instruction of a step asks of the machine. least_s: seconds under its roof."""

    op: str
    unit: str
    bytes: float
    operations: float
    least_s: float
    bound: str  # "memory", or the unit


@dataclass(frozen=True, slots=True)
class Dot:
    """One kind of op in some steps, all layers together: where it stands, and for how long."""

    op: str
    unit: str
    bytes: float
    operations: float
    least_s: float
    seconds: float
    bound: str

    @property
    def intensity(self) -> float:
        return self.operations / self.bytes if self.bytes else 0.0

    @property
    def fraction(self) -> float:
        """Of the roof: the least time over the time taken."""
        return self.least_s / self.seconds if self.seconds else 0.0

    def as_dict(self, whole: float) -> dict[str, Any]:
        per = 1 / self.seconds if self.seconds else 0.0
        return {
            "op": self.op,
            "unit": self.unit,
            "seconds": self.seconds,
            "share": self.seconds / whole if whole else 0.0,
            "bytes": self.bytes,
            "operations": self.operations,
            "bytes_per_s": self.bytes * per,
            "operations_per_s": self.operations * per,
            "intensity": self.intensity,
            "least_s": self.least_s,
            "bound": self.bound,
            "fraction": self.fraction,
        }


def demands(program: Program, shape: StepShape, ceilings: Ceilings, act: str) -> list[Demand]:
    """Of each instruction of one step, in order."""
    asked, found = [], units(program, act)
    for instr in program.instrs:
        work = TABLE[instr.op].work(program.call(instr), shape)
        unit, times = found[instr.op]
        operations = work.flops * times
        memory, compute = work.bytes / ceilings.all.dram, operations / ceilings.all.ops(unit)
        bound = "memory" if memory >= compute else unit
        asked.append(Demand(instr.op, unit, work.bytes, operations, max(memory, compute), bound))
    return asked


def dots(steps: Iterable[Sequence[Demand]], seconds: Sequence[float]) -> list[Dot]:
    """One dot for each kind of op. seconds: of each instruction, over all the steps together."""
    sums: dict[str, list[float]] = {}
    units: dict[str, str] = {}
    bounds: dict[str, dict[str, float]] = {}
    for step in steps:
        for d in step:
            total = sums.setdefault(d.op, [0.0, 0.0, 0.0, 0.0])
            total[0], total[1], total[2] = (
                total[0] + d.bytes, total[1] + d.operations, total[2] + d.least_s
            )  # fmt: skip
            units[d.op] = d.unit
            held = bounds.setdefault(d.op, {})
            held[d.bound] = held.get(d.bound, 0.0) + d.least_s
        names = [d.op for d in step]
    if sums:
        for op, spent in zip(names, seconds, strict=True):
            sums[op][3] += spent
    return [
        Dot(op, units[op], moved, done, least, spent, max(held, key=lambda bound: held[bound]))
        for op, (moved, done, least, spent) in sums.items()
        for held in (bounds[op],)
    ]


def bound_by(memory_share: float, fraction: float) -> str:
    """What a step waits for, by what was measured: "memory" or "compute" where it comes near that
    roof, else "neither". memory_share: of its least time. fraction: of its roof."""
    if fraction < NEAR:
        return "neither"
    return roof_of(memory_share)


def roof_of(memory_share: float) -> str:
    """Which roof is the lower one, "memory" or "compute"."""
    return "memory" if memory_share >= 0.5 else "compute"


def why_below(isa: str, unit: str) -> str:
    """What keeps steps from their roof, in words. unit: whose peak the roof is, as in `UNITS`."""
    parts = "`octavo bench step` takes a step apart into its ops, waiting and overheads."
    if isa == "amx" and unit != "f32":
        return (
            f"The peak is that of the matrix tiles (amx), which products of fewer than {TILE_ROWS} "
            "rows do not use: vectors are as fast there, far below that peak. With more rows the "
            "scales hold them up: where weights have one for each block of 32, a tile of sums is "
            "good for one block only, then it is stored, scaled and added by the vector units. "
            + parts
        )
    return (
        "The roof counts operations and bytes alone: not the unpacking of weights, the scaling of "
        "sums block by block, attention's softmax, nor threads that wait for each other. " + parts
    )


def naive_intensity(program: Program, shape: StepShape) -> float:
    """Operations a byte of attention that writes its scores to memory and reads them back."""
    flops = moved = 0.0
    for instr in program.instrs:
        if instr.op == "attend":
            call = program.call(instr)
            work = TABLE["attend"].work(call, shape)
            pairs = work.flops / 4 / call.heads.head_dim  # of all heads
            flops, moved = flops + work.flops, moved + work.bytes + SCORE_BYTES * pairs
    return flops / moved if moved else 0.0
