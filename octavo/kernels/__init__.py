"""Kernels. `_cpu` is the C++ extension; this module says what the machine offers it."""

from __future__ import annotations

from dataclasses import dataclass

PROBE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Peaks:
    """What `threads` threads of one instruction set reach: bytes/s from memory, operations/s."""

    isa: str
    threads: int
    read_bytes_per_s: float
    int8_ops_per_s: float
    bf16_ops_per_s: float
    f32_ops_per_s: float


def isas() -> tuple[str, ...]:
    """Instruction sets usable on this machine, best first; "portable" is always last."""
    import octavo.kernels._cpu as _cpu

    return tuple(_cpu.isas())


def probe(
    isa: str = "auto", threads: int | None = None, seconds: float = 2.0, nbytes: int = PROBE_BYTES
) -> Peaks:
    """Measure the machine for about `seconds`, with nbytes of memory."""
    import octavo.kernels._cpu as _cpu

    count = threads or _cpu.affinity_count()
    found = _cpu.probe(isa, count, seconds, nbytes)
    return Peaks(isas()[0] if isa == "auto" else isa, count, **found)
