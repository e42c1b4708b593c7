"""Views of the engine as JSON: what has changed since the frame before, and all of it for a start.

Arrays rather than objects, for they come ten times a second; `web/src/wire.ts` names their places.
Only ids, lengths, states and times: no token and no text is in a frame.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec

from octavo.core.batch import Batch, StepResult
from octavo.core.request import BlockHash
from octavo.core.stats import Counters, Timing
from octavo.core.steptime import Observation
from octavo.core.view import Running, View, Waiting

VERSION = 1
ENDED = 512  # sequences whose times are remembered
PIECE = 256  # blocks that are compared at once
ROOT, UNREADABLE = -1, -2  # of a block: it begins a prefix; it holds none
COUNTED = (
    "steps output_tokens computed_tokens recomputed_tokens prompt_tokens cached_tokens requests "
    "refused preemptions drafted_tokens accepted_tokens added aborted failed busy_seconds"
).split()

Floor = Callable[[Observation], float]  # the least seconds that a step could take


class Step(NamedTuple):
    """A step that came back. seen: its shape and what had been predicted, if it took any time."""

    batch: Batch
    result: StepResult
    seen: Observation | None


class Frames:
    """What watchers know so far; turns views and steps into frames."""

    def __init__(self, about: dict[str, Any], num_blocks: int) -> None:
        self.floor: Floor | None = None
        self._about = about
        self._ended: deque[list[Any]] = deque(maxlen=ENDED)
        self._news: list[list[Any]] = []
        self._tables: dict[int, array[int]] = {}
        self._names: list[BlockHash | None] = [None] * num_blocks
        self._block_of: dict[BlockHash | None, int] = {}
        self._parents = [UNREADABLE] * num_blocks
        self._rows: list[int] = []
        self._last: dict[str, Any] = {}

    def ended(self, timing: Timing) -> None:
        """A sequence ended; called whether or not anybody watches."""
        line = [
            round(timing.finished, 4),
            _round(timing.ttft),
            _round(timing.tpot),
            timing.num_prompt,
            timing.num_output,
            timing.num_cached,
            timing.finish.value,
        ]
        self._ended.append(line)
        self._news.append(line)
        del self._news[:-ENDED]

    def hello(self) -> bytes:
        """All that is known: what a newcomer, or one that fell behind, is sent first."""
        tables = [[seq_id, table.tolist()] for seq_id, table in self._tables.items()]
        whole = {
            "kind": "hello",
            "version": VERSION,
            **self._about,
            "ended": list(self._ended),
            "tables": tables,
            "parents": [
                [block, parent]
                for block, parent in enumerate(self._parents)
                if parent != UNREADABLE
            ],
        }
        return _event(whole | self._last)

    def frame(self, view: View, steps: Iterable[Step], counters: Counters) -> bytes:
        """What has changed, for everybody who has had all frames before."""
        rows = [_running(seq) for seq in view.running]
        queue = [_waiting(seq, view.now) for seq in view.waiting]
        self._last = {
            "now": round(view.now, 4),
            "rows": rows,
            "waiting": view.num_waiting,
            "queue": queue,
            "counters": {name: getattr(counters, name) for name in COUNTED},
            "floored": self.floor is not None,
        }
        news, self._news = self._news, []
        changed = {
            "kind": "frame",
            "steps": [self._step(step) for step in steps],
            "tables": self._changed_tables(view.running),
            "parents": self._changed_parents(view),
            "ended": news,
        }
        return _event(changed | self._last)

    def _step(self, step: Step) -> list[Any]:
        """[step, started, seconds, predicted, least, rows]; rows: id and tokens of each, tokens
        negative if all but one are guesses; 0 if they are those of the step before."""
        rows: list[int] = []
        for seq_id, _, tokens, _, wants in step.batch.rows:
            count = len(tokens)
            rows.append(seq_id)
            rows.append(-count if count > 1 and len(wants) == count else count)
        same = rows == self._rows
        self._rows = rows
        result, seen = step.result, step.seen
        return [
            step.batch.step,
            round(result.started, 4),
            round(result.finished - result.started, 6),
            None if seen is None else round(seen.predicted, 6),
            None if seen is None or self.floor is None else round(self.floor(seen), 6),
            0 if same else rows,
        ]

    def _changed_tables(self, running: Iterable[Running]) -> list[list[Any]]:
        """Block tables are replaced when they change, so looking at which they are is enough."""
        before, now = self._tables, {seq.id: seq.block_table for seq in running}
        self._tables = now
        return [
            [seq_id, table.tolist()]
            for seq_id, table in now.items()
            if before.get(seq_id) is not table
        ]

    def _changed_parents(self, view: View) -> list[list[int]]:
        """For each block that gained or lost its place in the prefix tree, its predecessor."""
        before, now, block_of, parents = self._names, view.hash_of, self._block_of, self._parents
        changed = _differences(before, now)
        if not changed:
            return []
        self._names = now
        lost = {block for block in changed if before[block] is not None}
        for block in lost:
            block_of.pop(before[block], None)
        for block in changed:
            if now[block] is not None:
                block_of[now[block]] = block
        if lost:  # what followed them stands alone now
            orphans = [b for b, p in enumerate(parents) if p in lost and now[b] is not None]
            changed = sorted({*changed, *orphans})
        news = []
        for block in changed:
            parent = UNREADABLE
            if now[block] is not None:
                above = view.parent_of[block]
                parent = ROOT if above is None else block_of.get(above, ROOT)
            if parent != parents[block]:
                parents[block] = parent
                news.append([block, parent])
        return news


def _differences(before: list[BlockHash | None], now: list[BlockHash | None]) -> list[int]:
    """Where two lists differ. By pieces first: comparing two of them is one call into C."""
    found = []
    for start in range(0, len(now), PIECE):
        old, new = before[start : start + PIECE], now[start : start + PIECE]
        if old != new:
            pairs = enumerate(zip(old, new, strict=True), start)
            found += [block for block, (was, is_) in pairs if was != is_]
    return found


def _running(seq: Running) -> list[Any]:
    return [
        seq.id,
        seq.request_id[-8:],
        seq.choice,
        seq.num_prompt,
        seq.num_cached,
        seq.num_computed,
        seq.num_tokens,
        seq.max_len,
        seq.num_preemptions,
        seq.num_drafted,
        seq.num_accepted,
        round(seq.arrival, 4),
        _round(seq.first_token),
        int(seq.late),
    ]


def _waiting(seq: Waiting, now: float) -> list[Any]:
    return [
        seq.id,
        seq.request_id[-8:],
        seq.choice,
        seq.num_tokens,
        seq.num_preemptions,
        round(max(0.0, now - seq.arrival), 3),
        seq.why.value,
        seq.detail,
    ]


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
