"""What the engine looks like at one moment: plain copies, for those who watch it.

`look` only reads, and it reads what the scheduler keeps to itself: it belongs to the same room.
It is called between two steps by whoever owns the engine, and costs a few microseconds for each
running sequence, whatever the pool's size and however many wait. No token is in a view.
"""

from __future__ import annotations

from array import array
from heapq import nsmallest
from itertools import islice
from typing import NamedTuple

from octavo.core.history import Wait
from octavo.core.request import BlockHash, Sequence, State
from octavo.core.scheduler import Scheduler

SHOWN = 24  # waiting sequences in a view
SCANNED = 256  # waiting sequences among which the first are sought


class Running(NamedTuple):
    """One running sequence. Times are on the driver's clock; a block table is never changed."""

    id: int
    request_id: str
    choice: int
    num_prompt: int
    num_cached: int
    num_computed: int
    num_tokens: int
    max_len: int
    num_preemptions: int
    num_drafted: int
    num_accepted: int
    arrival: float
    first_token: float | None
    late: bool
    block_table: array[int]


class Waiting(NamedTuple):
    """One sequence that waits, and why. detail: for TWIN the id of the sequence that computes the
    prefix they share (-1: it is gone); for BLOCKS how many blocks it needs; else its place."""

    id: int
    request_id: str
    choice: int
    num_tokens: int
    num_preemptions: int
    arrival: float
    why: Wait
    detail: int


class View(NamedTuple):
    """running: by rank. waiting: the first `SHOWN` by rank, of `num_waiting`. hash_of, parent_of:
    of each block that can be read, its name and its predecessor's."""

    now: float
    running: tuple[Running, ...]
    waiting: tuple[Waiting, ...]
    num_waiting: int
    hash_of: list[BlockHash | None]
    parent_of: list[BlockHash | None]


def look(scheduler: Scheduler, now: float) -> View:
    """The view between two steps."""
    blocks = scheduler.blocks
    return View(
        now,
        tuple([_running(seq) for seq in scheduler._running]),
        _waiting(scheduler),
        scheduler.num_waiting,
        blocks._hash_of[:],
        blocks._parent_of[:],
    )


def _running(seq: Sequence) -> Running:
    request = seq.request
    return Running(
        seq.id,
        request.id,
        seq.choice,
        seq.num_prompt,
        seq.num_cached,
        seq.num_computed,
        len(seq.tokens),
        seq.max_len,
        seq.num_preemptions,
        seq.num_drafted,
        seq.num_accepted,
        request.arrival,
        seq.first_token,
        seq.late,
        seq.block_table,
    )


def _waiting(scheduler: Scheduler) -> tuple[Waiting, ...]:
    if not scheduler.num_waiting:
        return ()
    held = (seq for group in scheduler._roster.held.values() for seq in group.values())
    some = [*islice(scheduler._order, SCANNED), *islice(held, SCANNED)]
    first = nsmallest(SHOWN, some, key=lambda seq: seq.key)
    return tuple([_wait(scheduler, seq, at) for at, seq in enumerate(first)])


def _wait(scheduler: Scheduler, seq: Sequence, at: int) -> Waiting:
    why, detail = _why(scheduler, seq, at)
    request = seq.request
    return Waiting(
        seq.id,
        request.id,
        seq.choice,
        len(seq.tokens),
        seq.num_preemptions,
        request.arrival,
        why,
        detail,
    )


def _why(scheduler: Scheduler, seq: Sequence, at: int) -> tuple[Wait, int]:
    """What stopped the queue in the latest step stopped all that wait, but those held apart."""
    blocks, why = scheduler.blocks, scheduler.stats.journal.why
    if seq.state is State.HELD:
        leader = None if seq.awaits is None else blocks.claimant(seq.awaits)
        return Wait.TWIN, -1 if leader is None else leader.id
    if why is Wait.BLOCKS:
        return why, blocks.blocks_for(len(seq.tokens)) - _num_known(scheduler, seq)
    return why, at


def _num_known(scheduler: Scheduler, seq: Sequence) -> int:
    """Blocks of its prefix that are cached, as far as it was hashed: looking hashes nothing."""
    index = scheduler.blocks._index
    return next((i for i, hash_ in enumerate(seq.hashes) if hash_ not in index), len(seq.hashes))
