"""The audit executor: no arithmetic, total suspicion.

A KV slot stores the hash of the whole prefix that ends in it and the token itself. Before a row is
run every slot it may read is walked and its hash recomputed; rows run in random order; outputs are
functions of the prefix hash, so one foreign or stale slot anywhere changes every later token. Slots
of guesses that failed are marked: reading one before it is written again is an error.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable

from octavo.core.batch import Batch, Row, RowResult, SampleSpec, StepResult
from octavo.core.executor import Capacity
from octavo.core.request import Request, TokenLogprob

VOCAB = 24


def root(namespace: bytes) -> int:
    """The hash before the first token; weights differ between namespaces, so KV does."""
    return hash((7919, *namespace))


def prefix_hash(namespace: bytes, tokens: array[int] | list[int]) -> int:
    value = root(namespace)
    for token in tokens:
        value = hash((value, token))
    return value


def choose(prefix: int, spec: SampleSpec, position: int, mask: bytes | None) -> int:
    """The next token: a function of the prefix and the key of the position, among those allowed."""
    allowed = [t for t in range(VOCAB) if t not in spec.suppress]
    if mask is not None:
        allowed = [t for t in allowed if mask[t // 8] >> (t % 8) & 1]
    return allowed[hash((prefix, spec.seed, spec.choice, position)) % len(allowed)]


def score(prefix: int, target: int, top: int) -> TokenLogprob:
    best = tuple((t, -float(hash((prefix, t)) % 997)) for t in range(top))
    return TokenLogprob(target, -float(hash((prefix, target)) % 997), best)


class AuditExecutor:
    """faults: request id -> position; a row that reaches that far reports an error."""

    def __init__(
        self,
        capacity: Capacity,
        rng: random.Random,
        request_of: Callable[[int], Request],
        faults: dict[str, int] | None = None,
    ) -> None:
        self._capacity = capacity
        self._rng = rng
        self._request_of = request_of
        self._faults = {} if faults is None else faults
        self._slots: dict[int, tuple[int, int]] = {}
        self._outstanding: deque[tuple[Batch, dict[int, Request]]] = deque()
        self.batches: list[Batch] = []

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    def ready_at(self) -> float | None:
        return None

    def submit(self, batch: Batch) -> None:
        capacity = self._capacity
        assert len(self._outstanding) < capacity.depth, "too many batches outstanding"
        assert 0 < len(batch.rows) <= capacity.max_rows, "row budget"
        assert batch.num_tokens <= capacity.max_tokens, "token budget"
        assert sum(len(row.outputs) for row in batch.rows) <= capacity.max_outputs, "outputs"
        assert len({row.seq_id for row in batch.rows}) == len(batch.rows), "two rows of a sequence"
        for row in batch.rows:
            self._inspect(row)
        self._conflicts(batch)
        self._outstanding.append(
            (batch, {r.seq_id: self._request_of(r.seq_id) for r in batch.rows})
        )
        self.batches.append(batch)

    def _inspect(self, row: Row) -> None:
        capacity = self._capacity
        assert len(row.tokens) > 0, "an empty row"
        end = row.start + len(row.tokens)
        assert end <= capacity.max_context, "beyond the context"
        assert len(row.block_table) == -(-end // capacity.block_size), "blocks do not just cover"
        assert all(0 <= block < capacity.num_blocks for block in row.block_table), "no such block"
        assert len(set(row.block_table)) == len(row.block_table), "a block twice in a table"
        positions = [want.position for want in row.outputs]
        assert positions == sorted(set(positions)), "outputs out of order"
        assert all(0 <= p < len(row.tokens) for p in positions), "output outside the row"
        for want in row.outputs:
            assert (want.sample is None) != (want.target is None), "neither sample nor target"

    def _conflicts(self, batch: Batch) -> None:
        """No slot that a row writes may be in reach of another sequence's row in flight."""
        rows = [row for other, _ in self._outstanding for row in other.rows] + list(batch.rows)
        reach: dict[int, set[int]] = {}
        for row in rows:
            for slot in self._span(row, 0, row.start + len(row.tokens)):
                reach.setdefault(slot, set()).add(row.seq_id)
        for row in rows:
            for slot in self._span(row, row.start, row.start + len(row.tokens)):
                assert reach[slot] == {row.seq_id}, "a slot is written while another row reads it"

    def _span(self, row: Row, start: int, end: int) -> list[int]:
        size = self._capacity.block_size
        return [row.block_table[i // size] * size + i % size for i in range(start, end)]

    def collect(self) -> StepResult:
        batch, requests = self._outstanding.popleft()
        rows = list(batch.rows)
        self._rng.shuffle(rows)
        results = {row.seq_id: self._run(row, requests[row.seq_id]) for row in rows}
        # A machine whose steps take what their shape says, and now and then much longer.
        seconds = 1e-3 * (20 + batch.num_tokens + len(rows)) * self._rng.choice((1, 1, 1, 1, 8))
        return StepResult(batch.step, results, 0.0, seconds)

    def _run(self, row: Row, request: Request) -> RowResult:
        value = root(request.namespace)
        end = row.start + len(row.tokens)
        slots = self._span(row, 0, end)
        if end > self._faults.get(request.id, end):
            for slot in slots[row.start :]:
                self._slots[slot] = (0, -1)
            return RowResult(error="planted")
        for slot in slots[: row.start]:
            stored = self._slots.get(slot)
            assert stored is not None, "a slot is read that was never written"
            assert stored != REJECTED, "a slot of a guess that failed is read"
            assert hash((value, stored[1])) == stored[0], "a slot holds another prefix"
            value = stored[0]
        after = []
        for slot, token in zip(slots[row.start :], row.tokens, strict=True):
            value = hash((value, token))
            self._slots[slot] = (value, token)
            after.append(value)
        answer = _answer(row, after, request.namespace)
        for slot in slots[row.start + _right(row, answer.tokens) :]:
            self._slots[slot] = REJECTED
        return answer


REJECTED = (0, -2)


def _right(row: Row, chosen: tuple[int, ...]) -> int:
    """How many of a row's tokens are right: those up to its first choice, then as many as were
    chosen at the place before them."""
    firsts = [want.position + 1 for want in row.outputs if want.sample is not None]
    for place, token in zip(firsts, chosen, strict=True):
        if place < len(row.tokens) and row.tokens[place] != token:
            return place
    return len(row.tokens)


def _answer(row: Row, after: list[int], namespace: bytes) -> RowResult:
    tokens, logprobs, scores = [], [], []
    for want in row.outputs:
        prefix = after[want.position]
        if want.target is not None:
            scores.append(score(prefix, want.target, want.top))
            continue
        spec = want.sample
        assert spec is not None
        if spec.history is not None:
            assert prefix_hash(namespace, spec.history) == prefix, "not the tokens before it"
        tokens.append(choose(prefix, spec, row.start + want.position + 1, want.mask))
        if spec.params.logprobs is not None:
            logprobs.append(score(prefix, tokens[-1], spec.params.logprobs))
    return RowResult(tuple(tokens), tuple(logprobs), tuple(scores))
