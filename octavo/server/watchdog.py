"""The watchdog: a step that does not come back is reported, with the state of the house.

A thread looks at when a step last finished. If that is longer ago than `stall` seconds while there
is work, it logs once what runs and waits, the pool, and the stacks of all threads; when steps
finish again, that too. `/ready` says no meanwhile. A hang that holds the interpreter would hold
this thread as well: so it keeps winding up `faulthandler`'s timer, which needs no interpreter and
writes the stacks to stderr.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Protocol

from octavo.core.request import Sequence
from octavo.server.driver import Driver

log = logging.getLogger("octavo.watchdog")

MOST_SHOWN = 32
LOOKS = 8  # for each `stall` seconds
LEAST_PAUSE, MOST_PAUSE = 0.02, 5.0


class House(Protocol):
    """What is told of a house that stands still; `Scheduler` is one. Read, perhaps in mid-change:
    nothing is written any more, or the watchdog would have no reason to ask."""

    @property
    def running(self) -> tuple[Sequence, ...]: ...
    @property
    def waiting(self) -> tuple[Sequence, ...]: ...
    def snapshot(self) -> dict[str, float]: ...


class Watchdog:
    """Looks after one driver. `look` is what the thread does; `stop` ends it."""

    def __init__(
        self, driver: Driver, house: House, stall: float, clock: Callable[[], float] | None = None
    ) -> None:
        self.driver = driver
        self.house = house
        self.stall = stall
        self.stalled_since: float | None = None
        self._clock = clock if clock is not None else driver.clock
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="octavo-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(5.0)
        faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        pause = min(max(self.stall / LOOKS, LEAST_PAUSE), MOST_PAUSE)
        while not self._over.wait(pause):
            self._wind_up(pause)
            try:
                self.look()
            except Exception:
                log.exception("the watchdog failed")

    def _wind_up(self, pause: float) -> None:
        if sys.__stderr__ is not None:
            with contextlib.suppress(Exception):  # one without a file: nobody would read it
                faulthandler.dump_traceback_later(self.stall + pause, file=sys.__stderr__)

    def look(self) -> None:
        """Report a stall that began, or that is over."""
        now = self._clock()
        stalled = self.driver.stalled(self.stall, now)
        if stalled and self.stalled_since is None:
            self.stalled_since = self.driver.progress
            log.error("%s", self._report(now - self.driver.progress))
        elif not stalled and self.stalled_since is not None:
            seconds, self.stalled_since = now - self.stalled_since, None
            log.warning("steps finish again, after %.1f s without one", seconds)

    def _report(self, seconds: float) -> str:
        """What is known: counts, sequences by their ids and numbers, stacks. No text."""
        counted = self.house.snapshot()
        numbers = ", ".join(
            f"{counted.get(name, 0):.0f} {what}"
            for name, what in (
                ("running", "running"),
                ("waiting", "waiting"),
                ("blocks_held", "blocks held"),
                ("blocks_cached", "cached"),
                ("blocks", "in all"),
                ("steps", "steps so far"),
            )
        )
        lines = [f"no step finished for {seconds:.1f} s (--stall {self.stall:g}): {numbers}"]
        for what, seqs in (("running", self.house.running), ("waiting", self.house.waiting)):
            lines += [f"  {what}: {_line(seq)}" for seq in seqs[:MOST_SHOWN]]
            if len(seqs) > MOST_SHOWN:
                lines.append(f"  {what}: and {len(seqs) - MOST_SHOWN} more")
        return "\n".join([*lines, *stacks()])


def _line(seq: Sequence) -> str:
    return (
        f"{seq.request.id}/{seq.choice} {seq.num_prompt} + {seq.num_output} tokens, "
        f"{seq.num_computed} computed, {seq.num_scheduled} handed out, "
        f"{len(seq.block_table)} blocks, preempted {seq.num_preemptions}x"
    )


def stacks() -> list[str]:
    """The stacks of all Python threads, innermost frame last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    out = []
    for ident, frame in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        out.append(f"  thread {names.get(ident, ident)}:")
        out += [
            f"    {part.filename}:{part.lineno} in {part.name}"
            for part in traceback.extract_stack(frame, limit=None)[-20:]
        ]
    return out
