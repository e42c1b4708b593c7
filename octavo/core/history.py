"""What happened to each sequence: the answer to "why was my request slow".

Nothing is kept per token. A `Journal` keeps sums that only grow: seconds by what kept the queue
from moving, steps, rows, tokens, seconds of steps. A sequence's `Record` remembers their values at
the moments of its life, and the differences are its account. So a step costs two calls, whatever
its size, and a record is bounded, whatever the length of its text.

Times are seconds on the driver's clock. No text and no token is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from octavo.core.steptime import Took

MOST_CHUNKS = 64
MOST_PREEMPTIONS = 16
MOST_SLOW = 128  # slow steps that are remembered, of the house
SLOWEST = 3  # of these, in a record
SLOW = 2.0  # times as long as steps are of late
FOLLOW = 0.05


class Wait(StrEnum):
    """What a sequence waits for in the queue.

    TURN: the running step, and others that the policy puts first. ROWS: as many sequences run as
    a step may hold. TOKENS: the steps' tokens go to others. BLOCKS: the KV pool has too few free
    blocks for it and for what the running ones will write. TIME: streams that were promised theirs
    leave no time. GROUP: a static group is closed. PREEMPTION: somebody was preempted just now.
    TWIN: another sequence computes the prefix that both share.
    """

    TURN = "turn"
    ROWS = "rows"
    TOKENS = "tokens"
    BLOCKS = "blocks"
    TIME = "time"
    GROUP = "group"
    PREEMPTION = "preemption"
    TWIN = "twin"


class Cold(StrEnum):
    """Why no more of a prompt came from the prefix cache.

    ALL: all full blocks did (the last token is always computed). SHORT: it has no full block.
    NEW: nobody computed the next block before. EVICTED: its block was taken for another since.
    SCORED: what is to be scored must be computed. OFF: the prefix cache is off.
    """

    ALL = "all"
    SHORT = "short"
    NEW = "new"
    EVICTED = "evicted"
    SCORED = "scored"
    OFF = "off"


class Mark(NamedTuple):
    """A journal's sums at one moment `at`. clocks: seconds by `Wait`, in its order."""

    at: float
    clocks: tuple[float, ...]
    steps: int
    rows: int
    tokens: float
    seconds: float


class Slow(NamedTuple):
    """A step that came back at `at` and took much longer than steps did of late."""

    at: float
    seconds: float
    rows: int
    tokens: float


_ORDER = {why: i for i, why in enumerate(Wait)}
_BY_INDEX = tuple(Wait)


class Journal:
    """The sums. `why` is what stopped the queue in the latest step that was filled; `slow`: the
    latest steps that were slow."""

    __slots__ = (
        "_clocks",
        "_opened",
        "_usual",
        "now",
        "rows",
        "seconds",
        "slow",
        "steps",
        "tokens",
        "why",
    )

    def __init__(self) -> None:
        self._clocks = [0.0] * len(_ORDER)
        self._opened = 0.0
        self.now = 0.0
        self.why = Wait.TURN
        self.steps = 0
        self.rows = 0
        self.tokens = 0.0
        self.seconds = 0.0
        self.slow: deque[Slow] = deque(maxlen=MOST_SLOW)
        self._usual = 0.0

    def open(self, now: float) -> None:
        """A step is being filled: the time since the one before belongs to what stopped that."""
        self._clocks[_ORDER[self.why]] += now - self._opened
        self._opened = self.now = now
        self.why = Wait.TURN

    def stopped(self, why: Wait) -> None:
        """The queue stops in this step; the first reason stands, the first in line met it."""
        if self.why is Wait.TURN:
            self.why = why

    def stepped(self, rows: int, tokens: float, seconds: float, now: float) -> None:
        """A step came back."""
        self.now = now
        self.steps += 1
        self.rows += rows
        self.tokens += tokens
        self.seconds += seconds
        usual = self._usual
        if seconds > SLOW * usual > 0.0:
            self.slow.append(Slow(now, seconds, rows, tokens))
        self._usual = usual + FOLLOW * (seconds - usual) if usual else seconds

    def passed(self, steps: Iterable[Took], why: Wait | None) -> None:
        """Steps that were filled and came back one behind the other; `why`: what stopped the queue
        in each of them, if anything."""
        for shape, started, finished in steps:
            self.open(started)
            if why is not None:
                self.stopped(why)
            self.stepped(int(shape.decodes), shape.tokens, finished - started, finished)

    def slowest(self, since: float) -> list[Slow]:
        """The slowest steps that came back after `since`, the slowest first."""
        found = []
        for step in reversed(self.slow):
            if step.at <= since:
                break
            found.append(step)
        found.sort(key=lambda step: -step.seconds)
        return found[:SLOWEST]

    def mark(self) -> Mark:
        return Mark(self.now, tuple(self._clocks), self.steps, self.rows, self.tokens, self.seconds)


class Chunk(NamedTuple):
    """Tokens start .. start + tokens - 1 of a prompt, or of what a preemption lost, were handed to
    a step filled at `at`."""

    at: float
    start: int
    tokens: int


class Preemption(NamedTuple):
    """At `at` its blocks were taken: `lost` tokens had to be computed again."""

    at: float
    lost: int


class Record:
    """One sequence's history. waits: seconds in the queue by reason, all stays together.

    joined, first, ended: the journal at its first admission, first token and end. chunks,
    preemptions: the first few; num_chunks counts them all. cold: why no more was cached. slow: the
    slowest steps since its first admission.
    """

    __slots__ = (
        "_began",
        "_held",
        "_queued",
        "chunks",
        "cold",
        "ended",
        "first",
        "joined",
        "num_chunks",
        "preemptions",
        "slow",
        "waits",
    )

    def __init__(self, arrival: float) -> None:
        self.waits: dict[Wait, float] = {}
        self.chunks: list[Chunk] = []
        self.num_chunks = 0
        self.preemptions: list[Preemption] = []
        self.cold = Cold.NEW
        self.joined: Mark | None = None
        self.first: Mark | None = None
        self.ended: Mark | None = None
        self.slow: list[Slow] = []
        self._began: float | None = arrival
        self._held = False
        self._queued: Mark | None = None

    def queue(self, journal: Journal) -> None:
        """It is in the queue: newly, again, or because its twin is done."""
        if self._held:
            self._leave(journal.now, None)
        self._began = journal.now if self._queued is not None else self._began
        self._queued = journal.mark()

    def hold(self, journal: Journal) -> None:
        """It is set aside until its twin has computed what both share."""
        self._leave(journal.now, journal)
        self._began, self._held = journal.now, True

    def join(self, journal: Journal) -> None:
        """It leaves the queue and runs."""
        self._leave(journal.now, journal)
        if self.joined is None:
            self.joined = journal.mark()

    def chunk(self, at: float, start: int, count: int) -> None:
        self.num_chunks += 1
        if len(self.chunks) < MOST_CHUNKS:
            self.chunks.append(Chunk(at, start, count))

    def preempted(self, at: float, lost: int) -> None:
        if len(self.preemptions) < MOST_PREEMPTIONS:
            self.preemptions.append(Preemption(at, lost))

    def end(self, journal: Journal, now: float) -> None:
        """It ended, perhaps while it waited."""
        self._leave(now, None if self._held else journal)
        self.ended = journal.mark()
        if self.joined is not None:
            self.slow = journal.slowest(self.joined.at)

    def waited(self, journal: Journal, now: float) -> dict[Wait, float]:
        """`waits` up to now, of one that may still wait; changes nothing."""
        found = dict(self.waits)
        for why, seconds in self._stay(now, None if self._held else journal).items():
            found[why] = found.get(why, 0.0) + seconds
        return found

    def _leave(self, now: float, journal: Journal | None) -> None:
        for why, seconds in self._stay(now, journal).items():
            self.waits[why] = self.waits.get(why, 0.0) + seconds
        self._began, self._held = None, False

    def _stay(self, now: float, journal: Journal | None) -> dict[Wait, float]:
        """Seconds of the stay that ends now; without a journal all of them are its twin's.

        Clocks move once a step, so a stay that began in mid-step is charged at most its length.
        """
        if self._began is None:
            return {}
        left = max(0.0, now - self._began)
        if journal is None:
            return {Wait.TWIN: left}
        found, before = {}, self._queued
        if before is not None:
            clocks = zip(_BY_INDEX[1:], before.clocks[1:], journal.mark().clocks[1:], strict=True)
            for why, old, new in clocks:
                seconds = min(left, new - old)
                if seconds > 0.0:
                    found[why] = seconds
                    left -= seconds
        return found | {Wait.TURN: left}
