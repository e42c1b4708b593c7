"""What the scheduler counts: totals since the start, and the times of each request that ended.

Plain numbers, written by the scheduler alone and read by anybody at any moment. Times are seconds
on the driver's clock. Nothing here is a rate or an average: those are for the reader to form.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from octavo.core.history import Journal, Record
from octavo.core.request import NO_SLO, FinishReason, Forecast, Sequence, Slo, Tier

MAX_UNREAD_TIMINGS = 8192


class Timing(NamedTuple):
    """One choice of a request, from its arrival to its end. Times that never came are None.

    queued: Request.arrival. num_cached: prompt tokens that came from the prefix cache when it was
    first admitted. num_steps: steps that carried a row of it. predicted: when it was admitted.
    record: what it waited for, its chunks and company.
    """

    request_id: str
    choice: int
    finish: FinishReason
    queued: float
    first_scheduled: float | None
    first_token: float | None
    finished: float
    num_prompt: int
    num_output: int
    num_cached: int
    num_preemptions: int
    num_steps: int
    tenant: str = ""
    tier: Tier = Tier.DEFAULT
    slo: Slo = NO_SLO
    predicted: Forecast | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    record: Record | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.queued

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first; None if there is none."""
        if self.first_token is None or self.num_output < 2:
            return None
        return (self.finished - self.first_token) / (self.num_output - 1)

    @property
    def met(self) -> bool:
        """Whether all that was asked of time was kept: what goodput counts."""
        slo, ttft, tpot = self.slo, self.ttft, self.tpot
        if ttft is None or self.finish in (FinishReason.ABORT, FinishReason.ERROR):
            return False
        return (
            (slo.ttft is None or ttft <= slo.ttft)
            and (slo.tpot is None or tpot is None or tpot <= slo.tpot)
            and (slo.e2e is None or self.finished - self.queued <= slo.e2e)
        )


@dataclass(slots=True)
class Counters:
    """Totals since the start. Sequences are counted, not requests, but for `requests` and
    `refused`. expired: those of the aborted whose deadline passed while they waited.
    Requests that never came to the scheduler: capped, by the door's caps; unattainable, for their
    deadlines could not be met. degraded: requests let in without their deadlines instead.

    computed_tokens: handed to the executor and committed (prompt, recomputed and generated ones,
    and guesses); recomputed_tokens: those of them that a preemption made necessary again.
    prompt_tokens: of admitted sequences; cached_tokens: those of them that the prefix cache had.
    output_tokens: kept ones. drafts: rows that carried guesses; drafted_tokens: guesses computed;
    accepted_tokens: those of them that held, each a step saved. padding_tokens: what padding would
    have added, had the sequences between two moments without any been one padded batch: every
    prompt as long as the longest, every output too. That is what a group costs under `static`;
    under other policies it says nothing.
    """

    steps: int = 0
    rows: int = 0
    outputs: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    requests: int = 0
    refused: int = 0
    capped: int = 0
    unattainable: int = 0
    degraded: int = 0
    added: int = 0
    admitted: int = 0
    held: int = 0
    preemptions: int = 0
    stopped: int = 0
    length: int = 0
    tool_calls: int = 0
    aborted: int = 0
    expired: int = 0
    failed: int = 0
    padding_tokens: int = 0
    busy_seconds: float = 0.0


_COUNTER_OF = {
    FinishReason.STOP: "stopped",
    FinishReason.LENGTH: "length",
    FinishReason.TOOL_CALLS: "tool_calls",
    FinishReason.ABORT: "aborted",
    FinishReason.ERROR: "failed",
}


@dataclass(slots=True)
class _Group:
    """Sizes of the sequences that ended since the running set was last empty."""

    size: int = 0
    prompt: int = 0
    output: int = 0
    longest_prompt: int = 0
    longest_output: int = 0

    @property
    def padding(self) -> int:
        box = self.size * (self.longest_prompt + self.longest_output)
        return box - self.prompt - self.output


@dataclass(slots=True)
class Stats:
    """Counters, and the timings of sequences that ended and were not yet taken.

    accepted_at: how often the first, second, ... token of a draft held. journal: the sums from
    which each sequence's `record` is made.
    """

    counters: Counters = field(default_factory=Counters)
    timings: deque[Timing] = field(default_factory=lambda: deque(maxlen=MAX_UNREAD_TIMINGS))
    accepted_at: list[int] = field(default_factory=list)
    journal: Journal = field(default_factory=Journal)
    seconds_per_end: float = 1.0
    _last_end: float | None = None
    _group: _Group = field(default_factory=_Group)

    def ended(self, seq: Sequence, reason: FinishReason, now: float) -> None:
        """A sequence ended; called once for each."""
        counters, name = self.counters, _COUNTER_OF[reason]
        setattr(counters, name, getattr(counters, name) + 1)
        num_output = seq.num_output
        seq.record.end(self.journal, now)
        self.timings.append(
            Timing(
                seq.request.id,
                seq.choice,
                reason,
                seq.request.arrival,
                seq.first_scheduled,
                seq.first_token,
                now,
                seq.num_prompt,
                num_output,
                seq.num_cached,
                seq.num_preemptions,
                seq.num_steps,
                seq.request.tenant,
                seq.request.tier,
                seq.request.slo,
                seq.request.predicted,
                seq.num_drafted,
                seq.num_accepted,
                seq.record,
            )
        )
        if self._last_end is not None:
            gap = max(0.0, now - self._last_end)
            self.seconds_per_end += 0.1 * (gap - self.seconds_per_end)
        self._last_end = now
        if seq.first_scheduled is not None:
            group = self._group
            group.size += 1
            group.prompt += seq.num_prompt
            group.output += num_output
            group.longest_prompt = max(group.longest_prompt, seq.num_prompt)
            group.longest_output = max(group.longest_output, num_output)

    def drafted(self, length: int, accepted: int) -> None:
        """A draft of so many tokens was computed, and so many of them held."""
        counters, places = self.counters, self.accepted_at
        counters.drafts += 1
        counters.drafted_tokens += length
        counters.accepted_tokens += accepted
        places.extend([0] * (length - len(places)))
        for i in range(accepted):
            places[i] += 1

    def emptied(self) -> None:
        """No sequence runs any more."""
        self.counters.padding_tokens += self._group.padding
        self._group = _Group()

    def take_timings(self) -> list[Timing]:
        """The timings since the last call; the oldest are lost if it comes too rarely."""
        taken = []
        while self.timings:
            taken.append(self.timings.popleft())
        return taken

    def snapshot(self) -> dict[str, float]:
        """The counters by name; those by place in a draft as accepted_at_1, accepted_at_2, ..."""
        places = {f"accepted_at_{i}": count for i, count in enumerate(self.accepted_at, 1)}
        return asdict(self.counters) | places
