"""The machine between turns and during them: whether others leave it alone."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

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


class Others:
    """What processes other than an engine's and ours take while it has its turn.

    group: the engine's process group; None if it is a child that has ended when it is asked.
    """

    def __init__(self, group: int | None) -> None:
        self.group = group
        self.begun = self._now()

    def _now(self) -> tuple[int, float]:
        total, idle = _ticks()
        own = self._group_seconds()
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
            used = resource.getrusage(who)
            own += used.ru_utime + used.ru_stime
        return total, (total - idle) - own * os.sysconf("SC_CLK_TCK")

    def _group_seconds(self) -> float:
        """User and system time of the group's processes so far."""
        ticks = 0
        for file in Path("/proc").glob("[0-9]*/stat") if self.group is not None else ():
            try:
                fields = file.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == self.group:
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def share(self) -> float:
        """Of the machine, since this was made (1.0: all of it)."""
        total, taken = self._now()
        return max(0.0, (taken - self.begun[1]) / max(1, total - self.begun[0]))
