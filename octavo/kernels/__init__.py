"""Kernels. `_cpu` is the C++ extension; this module says what the machine offers it."""

from __future__ import annotations


def isas() -> tuple[str, ...]:
    """Instruction sets usable on this machine, best first; "portable" is always last."""
    import octavo.kernels._cpu as _cpu

    return tuple(_cpu.isas())
