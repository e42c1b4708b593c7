"""A model that says what it is told, a byte a token, in real time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from octavo.core.batch import Row, RowResult, StepResult
from octavo.core.request import TokenLogprob
from tests.server.fakes import EOS, FakeExecutor


class Actor(FakeExecutor):
    """Each sequence gets the next of `lines`, and the last one again. `seconds`: of a step."""

    def __init__(self, lines: Sequence[str], seconds: float = 0.004) -> None:
        super().__init__(seconds=seconds)
        self.lines = [line.encode() for line in lines]
        self._parts: dict[int, tuple[bytes, int]] = {}  # what it says, and from where on

    def collect(self) -> StepResult:
        started = time.monotonic()
        result = super().collect()
        return replace(result, started=started, finished=time.monotonic())

    def _row(self, row: Row) -> RowResult:
        found = super()._row(row)
        places = [row.start + want.position for want in row.outputs if want.sample is not None]
        if not places:
            return found
        if row.seq_id not in self._parts:
            line = self.lines[min(len(self._parts), len(self.lines) - 1)]
            self._parts[row.seq_id] = (line, places[0])
        line, begin = self._parts[row.seq_id]
        tokens = [line[at - begin] if at - begin < len(line) else EOS for at in places]
        logprobs = tuple(
            TokenLogprob(token, -0.1, ((token, -0.1), (ord("z"), -3.0))[: 2 * bool(one.top)])
            for token, one in zip(tokens, found.logprobs, strict=False)
        )
        return RowResult(tuple(tokens), logprobs, found.scores)
