"""The one seam between the scheduler and whatever does the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from octavo.core.batch import Batch, StepResult


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an executor can hold and do; read once by the scheduler.

    num_blocks blocks of block_size tokens; at most max_tokens tokens, max_rows rows and max_outputs
    wanted positions a step; max_context tokens a sequence; depth batches outstanding at once.
    """

    num_blocks: int
    block_size: int
    max_tokens: int
    max_rows: int
    max_outputs: int
    max_context: int
    depth: int = 1


class Executor(Protocol):
    """Runs batches, oldest first. Holds KV and weights; holds no request state."""

    @property
    def capacity(self) -> Capacity: ...

    def submit(self, batch: Batch) -> None:
        """Hand over a batch; at most `capacity.depth` may be outstanding."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest batch and return its result. Raises EngineError if all is lost."""
        ...

    def ready_at(self) -> float | None:
        """When the oldest outstanding batch will be done; None where only waiting can tell."""
        ...
