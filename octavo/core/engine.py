"""The sans-IO machine that a driver turns: `pump` schedules and submits, `drain` collects, commits.

It never sleeps, reads a clock, starts a thread or logs. On the CPU a driver alternates the two
calls; with `capacity.depth` above 1, `pump` fills the pipeline before `drain` takes the oldest.
"""

from __future__ import annotations

from collections import deque

from octavo.core.batch import Batch
from octavo.core.executor import Executor
from octavo.core.request import Event, Request
from octavo.core.scheduler import Scheduler


class Engine:
    """One executor, one scheduler, and the batches in between."""

    def __init__(self, executor: Executor, scheduler: Scheduler) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self._outstanding: deque[Batch] = deque()
        self._depth = executor.capacity.depth

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest, ContextOverflow or Overloaded."""
        self.scheduler.add(request)

    def abort(self, request_id: str, now: float) -> list[Event]:
        """End a request at once, whatever state it is in; an unknown or ended one is no error."""
        return self.scheduler.abort(request_id, now)

    def pump(self, now: float) -> bool:
        """Submit batches while the executor takes more; say whether any was submitted."""
        submitted = False
        while len(self._outstanding) < self._depth:
            batch = self.scheduler.schedule(now)
            if batch is None:
                break
            self.executor.submit(batch)
            self._outstanding.append(batch)
            submitted = True
        return submitted

    def drain(self, now: float) -> list[Event]:
        """Wait for the oldest outstanding batch, commit it, and report what happened.

        With nothing outstanding it returns at once with what `pump` found (failed watchers).
        Raises EngineError if the executor lost everything.
        """
        if not self._outstanding:
            return self.scheduler.take_events()
        result = self.executor.collect()
        # `now` is from before the wait; what the step made did not exist until it finished.
        done = max(now, result.finished)
        return self.scheduler.commit(self._outstanding.popleft(), result, done)

    @property
    def num_outstanding(self) -> int:
        """Batches submitted and not collected."""
        return len(self._outstanding)

    @property
    def has_work(self) -> bool:
        """Whether pump and drain still have something to do."""
        return bool(self._outstanding) or self.scheduler.has_work

    def snapshot(self) -> dict[str, float]:
        """Counters and gauges by name, for metrics."""
        return self.scheduler.snapshot()
