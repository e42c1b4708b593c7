"""The machine between turns: whether others leave it alone, and how long we waited for that."""

from __future__ import annotations

import time

IDLE = 0.05
PATIENCE = 20.0


def _ticks() -> tuple[int, int]:
    """(all, idle) clock ticks of all cores since boot; time stolen by the host counts as taken."""
    with open("/proc/stat") as f:
        fields = [int(x) for x in f.readline().split()[1:9]]
    return sum(fields), fields[3] + fields[4]


def busy(seconds: float = 0.5) -> float:
    """Share of the machine that was taken during the next `seconds` (1.0: all of it)."""
    total, idle = _ticks()
    time.sleep(seconds)
    total2, idle2 = _ticks()
    return 1.0 - (idle2 - idle) / max(1, total2 - total)


def wait_idle(most: float = PATIENCE) -> tuple[float, float]:
    """Wait until less than 5 % of the machine is taken, at most `most` seconds.

    Returns the share that was taken last, and the seconds waited.
    """
    begun = time.monotonic()
    while True:
        taken, waited = busy(), time.monotonic() - begun
        if taken < IDLE or waited >= most:
            return taken, waited
