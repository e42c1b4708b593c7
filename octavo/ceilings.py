"""What this machine can do at most, measured in about a second: the roof beside every speed.

Each figure is the best of many short rounds of all threads at once, so that a busy neighbour does
not lower it: memory is read through huge pages with software prefetch, operations are the widest
products of the instruction set in registers. `hardware()` turns them into the cost model's machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from octavo.ops.cost import Hardware
from octavo.ops.program import Program

MIB = 1 << 20
DRAM_BYTES = 256 * MIB
ROUND_BYTES = 8 * MIB  # of each thread: long against a barrier, short against a time slice
AHEAD = 4096  # prefetch distance for memory; the caches are read without
PASSES = 3
# In their order in RowTable::peak.
UNITS = ("int8", "bf16", "f32")
OPS = frozenset({"norm_qkv", "out_residual", "norm_gate_up_act", "down_residual",
                 "final_norm_head"})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second read from memory and the caches (0: there is no such cache), and operations
    a second (a multiply-add is two) of int8 and bf16 products and of f32 fma."""

    dram: float
    l3: float
    l2: float
    int8: float
    bf16: float
    f32: float

    def ops(self, unit: str) -> float:
        return float(getattr(self, unit))


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates of one thread alone and of `threads` together; seconds of a barrier of all of them."""

    isa: str
    threads: int
    one: Rates
    all: Rates
    barrier_s: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_ceilings(
    threads: int | None = None,
    isa: str = "auto",
    seconds: float = 1.0,
    nbytes: int | None = None,
) -> Ceilings:
    """Measure for about `seconds`. threads: None takes every processor this process may use.

    nbytes: read memory in whole passes over so much, so that what stays of it in the last cache
    counts, as it does for a model of this size; None keeps to memory alone.
    """
    from octavo.kernels import _cpu, isas

    count = threads or _cpu.affinity_count()
    l2, l3 = cache_bytes(2), cache_bytes(3)
    big = nbytes or max(DRAM_BYTES, 4 * l3)

    def read(n: int, share: int, ahead: int, part: float) -> float:
        chunk = share if nbytes and share == nbytes // n else ROUND_BYTES
        return _cpu.probe_read(n, share, chunk, ahead, part * seconds / PASSES, isa)

    def rates(n: int, part: float) -> Rates:
        best = [0.0] * 6
        # Passes with the other figures in between: what disturbs one lasts longer than a pass.
        for _ in range(PASSES):
            found = [
                read(n, big // n, AHEAD, part),
                read(n, l3 // 2 // n, 0, 0.08) if l3 else 0.0,
                read(n, l2 // 2, 0, 0.06) if l2 else 0.0,
                *(
                    _cpu.probe_ops(n, kind, 0.06 * seconds / PASSES, isa)
                    for kind in range(len(UNITS))
                ),
            ]
            best = [max(pair) for pair in zip(best, found, strict=True)]
        return Rates(*best)

    everyone = rates(count, 0.3)
    one = rates(1, 0.1) if count > 1 else everyone
    barrier = min(_cpu.probe_barrier(count, 0.01 * seconds) for _ in range(PASSES))
    return Ceilings(isas()[0] if isa == "auto" else isa, count, one, everyone, barrier)


def reread(ceilings: Ceilings, seconds: float = 0.1) -> Ceilings:
    """The same with the memory's bandwidth of all threads measured again: on a shared machine it
    changes from second to second, while the processor's peaks do not."""
    from octavo.kernels import _cpu

    share = max(DRAM_BYTES, 4 * cache_bytes(3)) // ceilings.threads
    found = _cpu.probe_read(ceilings.threads, share, ROUND_BYTES, AHEAD, seconds, ceilings.isa)
    return replace(ceilings, all=replace(ceilings.all, dram=found))


def cache_bytes(level: int) -> int:
    """Bytes of the first core's data cache of a level; 0 if the system does not say."""
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            size = (folder / "size").read_text().strip()
            kind = (folder / "type").read_text().strip()
            if kind != "Instruction" and int((folder / "level").read_text()) == level:
                unit = {"K": 1 << 10, "M": MIB}.get(size[-1], 1)
                return int(size.rstrip("KM")) * unit
        except (OSError, ValueError):
            continue
    return 0


def unit_of(program: Program, index: int, act: str) -> tuple[str, int]:
    """Which unit the products of an instruction need, and how many operations each of the model's
    takes: two where activations are pairs of bytes. (The few wide ones of "mixed" are not counted.)
    act: the engine's activation format, resolved.
    """
    from octavo.runtime.cpu import HEAD, wide_ops

    instr = program.instrs[index]
    if act == "fp32":
        return "f32", 1
    kinds = {
        kind
        for spec in program.call(instr).weights
        if spec is not None and spec.kind != "vector"
        for kind in spec.types
    }
    if instr.op == "attend" or act == "bf16":
        return "bf16", 1
    if any(kind.startswith("Q") for kind in kinds):
        exact = act == "mixed" and instr.op == HEAD and HEAD in wide_ops(program)
        wide = act == "pairs" or exact
        return "int8", 2 if wide else 1
    return ("bf16" if kinds <= {"BF16"} else "f32"), 1


def units(program: Program, act: str) -> Mapping[str, tuple[str, float]]:
    """`unit_of` for each op of a program, by name: the slowest unit of its layers, and the mean
    of their operations."""
    order = ("int8", "bf16", "f32")
    found: dict[str, list[tuple[str, int]]] = {}
    for index, instr in enumerate(program.instrs):
        found.setdefault(instr.op, []).append(unit_of(program, index, act))
    return {
        op: (max((unit for unit, _ in own), key=order.index), sum(n for _, n in own) / len(own))
        for op, own in found.items()
    }


def hardware(ceilings: Ceilings, program: Program, act: str) -> Hardware:
    """The machine as the roofline sees it when it runs `program` (typed) with `act` activations.

    An op's rate is its unit's peak, halved where the model has pairs of bytes.
    """
    rates = {
        op: ceilings.all.ops(unit) / times for op, (unit, times) in units(program, act).items()
    }
    fastest = max((rates[op] for op in rates.keys() & OPS), default=ceilings.all.f32)
    return Hardware(
        "this machine",
        bytes_per_s=ceilings.all.dram,
        flops_per_s=fastest,
        attend_flops_per_s=rates.get("attend", ceilings.all.bf16),
        op_flops_per_s=rates,
    )
