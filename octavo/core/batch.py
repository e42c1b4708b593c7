"""All that crosses to the part with tensors (`Batch`) and all that comes back (`StepResult`).

There is no prefill and no decode here: a row carries the tokens it has not computed yet, one or
many. A batch is a pack of sequences, ragged, never padded.

What is made once for each row is a NamedTuple: as immutable as a frozen dataclass, and built in a
third of the time (0.2 against 0.6 us for five fields), which a decode step of 64 rows feels.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

from octavo.core.request import SamplingParams, TokenLogprob


class SampleSpec(NamedTuple):
    """What choosing a token needs besides its place; a function of the request's own state only.

    Randomness is keyed by (seed, choice, position), position = index in the sequence of the token
    being chosen (`Row.start + Want.position + 1`); never by row or call order. history: the tokens
    before it, given only when a penalty is on (num_prompt of them are prompt). suppress: ids that
    may not be chosen here (stop ids before min_tokens). Most sequences have one for all their life.
    """

    params: SamplingParams
    seed: int
    choice: int
    history: array[int] | None = None
    num_prompt: int = 0
    suppress: tuple[int, ...] = ()


class Want(NamedTuple):
    """One output wanted of a row, at `position` counted from the row's first token.

    sample given: choose the next token there. target given: score that token id (prompt logprobs),
    with `top` alternatives. mask: bit i (little-endian) allows token i.
    """

    position: int
    sample: SampleSpec | None = None
    target: int | None = None
    top: int = 0
    mask: bytes | None = None


class Row(NamedTuple):
    """Tokens of one sequence to compute now; the first stands at absolute position `start`.

    block_table covers start + len(tokens) positions. outputs are in rising order of position.
    """

    seq_id: int
    start: int
    tokens: array[int]
    block_table: array[int]
    outputs: tuple[Want, ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work. Rows are unordered by contract: an executor may run them in any order."""

    step: int
    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


class RowResult(NamedTuple):
    """tokens: one per sample Want, in order. logprobs: of those tokens, where asked for.
    scores: one per target Want, in order. error: this row failed; the others did not. embedding:
    the model's last hidden state, normed, float32, where the sampled token's params ask for it."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    scores: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    embedding: bytes | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """rows: by seq_id, one for each row of the batch. Times in seconds on the driver's clock."""

    step: int
    rows: dict[int, RowResult]
    started: float = 0.0
    finished: float = 0.0
