"""In which order sequences are served, and when the door is open. Small values, pure functions.

A policy's key is fixed when a sequence arrives: the lower one is admitted first and preempted
last. Since every order is total and does not change with time, the first in it always proceeds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from octavo.core.request import Sequence


class Occupancy(NamedTuple):
    """What a policy may know when it admits: sequences running and the most that may; sequences
    admitted since none ran (`seats`), and the arrival index at which that was (`opened`)."""

    running: int
    limit: int
    seats: int
    opened: int


@dataclass(frozen=True, slots=True)
class Policy:
    """key: the order, lower first. admits: whether a sequence may join those that run.
    holds_twins: a sequence waits while another computes the prefix they share."""

    name: str
    key: Callable[[Sequence], tuple[float, int]]
    admits: Callable[[Sequence, Occupancy], bool]
    holds_twins: bool = True


def by_arrival(seq: Sequence) -> tuple[float, int]:
    """First come, first served."""
    return seq.request.arrival, seq.arrival_index


def while_rows_last(seq: Sequence, batch: Occupancy) -> bool:  # noqa: ARG001
    """Continuous batching: a sequence joins whenever there is a row for it."""
    return batch.running < batch.limit


def into_an_empty_batch(seq: Sequence, batch: Occupancy) -> bool:
    """Static batching: as many as may run, of those that waited when the batch was empty.

    The group is fixed then, also if its prompts take several steps to go in.
    """
    return seq.arrival_index < batch.opened and batch.seats < batch.limit


def fcfs() -> Policy:
    """First come, first served."""
    return Policy("fcfs", by_arrival, while_rows_last)


def priority(ageing: float = 30.0) -> Policy:
    """Lower `Request.priority` first; a level is worth `ageing` seconds of waiting.

    Ageing is linear, so all waiting sequences age alike and their order never changes: it is that
    of arrival + ageing * priority. Nothing starves: what arrives late enough goes behind.
    """
    if not ageing > 0:
        raise ValueError(f"ageing must be positive, got {ageing!r}")

    def key(seq: Sequence) -> tuple[float, int]:
        return seq.request.arrival + ageing * seq.request.priority, seq.arrival_index

    return Policy("priority", key, while_rows_last)


def static() -> Policy:
    """The field's baseline: a group is admitted into an empty batch and served until all ended."""
    return Policy("static", by_arrival, into_an_empty_batch, holds_twins=False)
