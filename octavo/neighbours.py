"""Who else uses this machine while something is measured: said beside every figure it concerns."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BUSY = 0.1  # share of the machine that others may use before it is said


class Neighbours:
    """How much of the machine others used meanwhile: a share of all processors; None if the system
    does not say. Time that a hypervisor took for itself counts as others'."""

    def __init__(self) -> None:
        self._before = self._read()

    def share(self) -> float | None:
        before, after = self._before, self._read()
        if before is None or after is None:
            return None
        busy, whole, own = (b - a for a, b in zip(before, after, strict=True))
        return min(1.0, max(0.0, (busy - own) / whole)) if whole > 0 else None

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        """Busy and all seconds of all processors, and this process's own."""
        try:
            words = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
            ticks = [float(word) for word in words]
        except (OSError, ValueError, IndexError):
            return None
        second = 100.0  # of USER_HZ, which Linux shows to everybody
        idle = ticks[3] + ticks[4]
        return (sum(ticks) - idle) / second, sum(ticks) / second, time.process_time()


def busy_note(values: Mapping[str, Any]) -> tuple[str, ...]:
    """A paragraph where others used much of the machine."""
    share = values.get("neighbours")
    if share is None or share < BUSY:
        return ()
    return (
        f"Others used {share:.0%} of this machine's processors meanwhile: times are longer and "
        "spread wider than on an idle one.",
    )
