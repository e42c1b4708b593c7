"""A small engine on the audit executor, turned by hand: for tests of single laws."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

from octavo.core.batch import Batch
from octavo.core.drafter import Drafter
from octavo.core.engine import Engine
from octavo.core.executor import Capacity
from octavo.core.policy import Policy
from octavo.core.request import Event, Request, SamplingParams
from octavo.core.scheduler import Scheduler
from tests.core.audit import VOCAB, AuditExecutor

ROOMY = Capacity(
    num_blocks=512,
    block_size=4,
    max_tokens=64,
    max_rows=16,
    max_outputs=64,
    max_context=400,
    depth=1,
)


def ask(
    name: str, prompt: int | list[int], max_tokens: int | None = 4, **fields: object
) -> Request:
    """A request; an integer prompt is a length, its tokens drawn from the name."""
    if isinstance(prompt, int):
        rng = random.Random(name)
        prompt = [rng.randrange(VOCAB) for _ in range(prompt)]
    own = ("arrival", "seed", "stop_ids", "priority", "namespace", "watcher", "prediction")
    rest = {k: v for k, v in fields.items() if k not in own}
    params = SamplingParams(max_tokens=max_tokens, **rest)
    kept = {"arrival": 0.0, "seed": 7, **{k: v for k, v in fields.items() if k in own}}
    return Request(id=name, prompt=array("i", prompt), params=params, **kept)


class Machine:
    """An engine, its batches and its events; `turn` is one pump and one drain, then check()."""

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        prefix_caching: bool = True,
        max_waiting: int = 1024,
        drafter: Drafter | None = None,
        **capacity: int,
    ) -> None:
        self.capacity = replace(ROOMY, **capacity)
        self.scheduler = Scheduler(
            self.capacity,
            policy,
            prefix_caching=prefix_caching,
            max_waiting=max_waiting,
            drafter=drafter,
        )
        self.faults: dict[str, int] = {}
        self.executor = AuditExecutor(
            self.capacity,
            random.Random(0),
            lambda i: self.scheduler._live[i].request,
            self.faults,
        )
        self.engine = Engine(self.executor, self.scheduler)
        self.events: list[Event] = []
        self.now = 0.0

    @property
    def batches(self) -> list[Batch]:
        return self.executor.batches

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.engine.add(request)

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.engine.pump(self.now)
            self.scheduler.check()
            self.now += 1.0
            self.events += self.engine.drain(self.now)
            self.scheduler.check()

    def run(self) -> dict[tuple[str, int], list[int]]:
        """Turn until all is done; the tokens of each choice."""
        while self.engine.has_work:
            self.turn()
            assert self.now < 10_000, "no progress"
        tokens: dict[tuple[str, int], list[int]] = {}
        for event in self.events:
            tokens.setdefault((event.request_id, event.choice), []).extend(event.tokens)
        return tokens

    def ends(self) -> dict[tuple[str, int], Event]:
        """The last event of each choice that ended."""
        return {(e.request_id, e.choice): e for e in self.events if e.finish is not None}

    def rows(self) -> list[list[tuple[int, int]]]:
        """For each batch the (seq_id, tokens) of its rows, sorted."""
        return [sorted((r.seq_id, len(r.tokens)) for r in b.rows) for b in self.batches]
