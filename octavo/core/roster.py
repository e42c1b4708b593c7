"""Where each sequence is: waiting, held, running, ended; and the moves between.

A move touches everything that has to agree at once: the sequence's state, the lists it is in, its
blocks, its record and the counters. Who is moved when is decided elsewhere (`scheduler`, `settle`);
here is only what a move means. `check` states the invariant.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable
from heapq import heappop, heappush
from math import inf

from octavo.core.blocks import BlockManager
from octavo.core.margin import Margin
from octavo.core.policy import Order
from octavo.core.request import (
    EXPIRED,
    BlockHash,
    Event,
    FinishReason,
    Request,
    Sequence,
    State,
)
from octavo.core.reserve import Reserve
from octavo.core.stats import Stats

_BY_ITSELF = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS)


class Roster:
    """All sequences of a scheduler, and the blocks they hold.

    running: by rank. live: by id, not ended, or ended and still in flight. choices: by request id,
    not ended. held: by the block that another computes. order: those that wait, but the held.
    news: events that no commit will bring. seats, opened: sequences admitted since none ran, and
    the arrival index at which that was. now: when the latest step was filled.
    """

    def __init__(self, blocks: BlockManager, order: Order, reserve: Reserve, stats: Stats) -> None:
        self.blocks = blocks
        self.order = order
        self.stats = stats
        self.margin = Margin()
        self.running: list[Sequence] = []
        self.live: dict[int, Sequence] = {}
        self.choices: dict[str, list[Sequence]] = {}
        self.held: dict[BlockHash, dict[int, Sequence]] = {}
        self.news: list[Event] = []
        self.num_waiting = 0
        self.paces: Counter[float] = Counter()  # that were promised to those that wait
        self.seats = 0
        self.opened = 0
        self.now = 0.0
        self._reserve = reserve
        self._expiries: list[tuple[float, int, Sequence]] = []  # a heap; ended ones linger

    # ---- in -------------------------------------------------------------------------------------

    def enter(self, request: Request, seqs: list[Sequence]) -> None:
        """The choices of a request are in the house, and wait."""
        self.choices[request.id] = seqs
        for seq in seqs:
            self.live[seq.id] = seq
            self.queue(seq)
            if request.slo.e2e is not None:
                heappush(self._expiries, (request.arrival + request.slo.e2e, seq.id, seq))
        self.stats.counters.requests += 1
        self.stats.counters.added += len(seqs)

    def fill(self, now: float) -> None:
        """A step is being filled."""
        self.now = now
        self.stats.journal.open(now)
        if self._expiries and self._expiries[0][0] <= now:
            self._expire(now)

    @property
    def next_expiry(self) -> float:
        """When the first of those that were not started is due to be given up, at the soonest."""
        return self._expiries[0][0] if self._expiries else inf

    def empty(self, next_id: int) -> None:
        """None runs: whoever arrived before `next_id` may be of the next group."""
        self.seats, self.opened = 0, next_id

    def queue(self, seq: Sequence) -> None:
        """It waits, newly or again."""
        seq.state = State.WAITING
        seq.record.queue(self.stats.journal)
        self._waits(seq, 1)
        self.order.push(seq, max(self.now, seq.request.arrival))

    def _waits(self, seq: Sequence, more: int) -> None:
        """It is one more of those that wait, or one less."""
        self.num_waiting += more
        pace = promised_pace(seq)
        if pace < inf:
            self.paces[pace] += more
            if not self.paces[pace]:
                del self.paces[pace]

    def hold(self, seq: Sequence, num_shared: int, most: int | None) -> bool:
        """Set a sequence aside whose next block another one is computing: it will then hit it."""
        hash_ = self.blocks.awaited(seq, num_shared, most)
        if hash_ is None:
            return False
        seq.state = State.HELD
        seq.awaits = hash_
        seq.record.hold(self.stats.journal)
        leader = self.blocks.claimant(hash_)
        if leader is not None and leader.first_token is None:
            leader.due = min(leader.due, seq.due)  # it works for both now
        self.held.setdefault(hash_, {})[seq.id] = seq
        self.stats.counters.held += 1
        return True

    def wake(self, hashes: Iterable[BlockHash]) -> None:
        """Queue again those that were held for blocks now published or given up."""
        for hash_ in hashes:
            for seq in self.held.pop(hash_, {}).values():
                self._waits(seq, -1)
                self.queue(seq)

    def join(self, seq: Sequence, num_cached: int, now: float) -> None:
        """Make a sequence run, its first num_cached tokens being in its blocks already."""
        seq.state = State.RUNNING
        seq.num_computed = seq.num_scheduled = num_cached
        self._waits(seq, -1)
        self.seats += 1
        insort(self.running, seq, key=_key)
        self.blocks.claim(seq)
        seq.record.join(self.stats.journal)
        counters = self.stats.counters
        if seq.first_scheduled is None:
            seq.first_scheduled = now
            seq.num_cached = num_cached
            seq.record.cold = self.blocks.cold(seq, num_cached, most_shared(seq))
            counters.admitted += 1
            counters.prompt_tokens += seq.num_prompt
            counters.cached_tokens += num_cached
        else:
            counters.recomputed_tokens -= num_cached

    def preempt(self, seq: Sequence, now: float) -> None:
        """Give its blocks back and queue it again; its rank is as before."""
        self.running.remove(seq)
        self.seats -= 1
        self.release(seq)
        self._reserve.preempted()
        self.stats.counters.recomputed_tokens += seq.num_computed
        self.stats.counters.preemptions += 1
        seq.record.preempted(now, seq.num_computed)
        seq.num_preemptions += 1
        seq.num_computed = seq.num_scheduled = 0
        self.queue(seq)

    def publish(self, seq: Sequence, old: int, new: int) -> None:
        """Its blocks that filled when num_computed went from `old` to `new` can be read."""
        self.blocks.publish(seq, old, new)
        if self.held:
            size = self.blocks.block_size
            self.wake(seq.hashes[old // size : new // size])

    # ---- out ------------------------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        """End what should be over by `now` and was never started: nobody waits for it any more."""
        expiries = self._expiries
        while expiries and expiries[0][0] <= now:
            seq = heappop(expiries)[2]
            if seq.state in (State.WAITING, State.HELD) and seq.first_scheduled is None:
                self.stats.counters.expired += 1
                self.compare(seq.request, now)
                event = self.end(seq, FinishReason.ABORT, now)
                self.news.append(event._replace(error=EXPIRED))

    def compare(self, request: Request, now: float) -> None:
        """Tell the margin what became of the forecast of a first token."""
        promised, forecast = request.slo.ttft, request.predicted
        if promised is not None and forecast is not None:
            self.margin.came(forecast.ttft, now - request.arrival, promised)

    def fail(self, seq: Sequence, error: str, now: float) -> Event:
        """It ends by its own fault."""
        return self.end(seq, FinishReason.ERROR, now)._replace(error=error)

    def end(self, seq: Sequence, reason: FinishReason, now: float) -> Event:
        """A sequence ends, wherever it is; its blocks wait for what is in flight."""
        request_id = seq.request.id
        choices = self.choices[request_id]
        choices.remove(seq)
        if not choices:
            del self.choices[request_id]
        if seq.state is State.RUNNING:
            self.running.remove(seq)
        else:
            self._waits(seq, -1)
            if seq.awaits is not None and seq.state is State.HELD:
                self.held[seq.awaits].pop(seq.id)
        seq.state = State.ENDED
        seq.standing = None  # what comes back of it is dropped
        self.order.ended(seq)
        if reason in _BY_ITSELF:
            self._reserve.ended(seq)
        self.stats.ended(seq, reason, now)
        if not seq.in_flight:
            self.retire(seq)
        if not self.running:
            self.stats.emptied()
        return Event(
            request_id,
            seq.choice,
            finish=reason,
            num_cached=seq.num_cached,
            num_preemptions=seq.num_preemptions,
            num_drafted=seq.num_drafted,
            num_accepted=seq.num_accepted,
        )

    def retire(self, seq: Sequence) -> None:
        """It ended, and nothing of it is in flight any more."""
        self.release(seq)
        del self.live[seq.id]

    def release(self, seq: Sequence) -> None:
        """Its blocks are anybody's; what waited for them waits no more."""
        self.blocks.release(seq)
        if self.held:
            self.wake(seq.hashes)

    # ---- what it looks like ---------------------------------------------------------------------

    def take_news(self) -> list[Event]:
        """The news since the last call."""
        news, self.news = self.news, []
        return news

    @property
    def set_aside(self) -> list[Sequence]:
        """The held."""
        return [seq for group in self.held.values() for seq in group.values()]

    def check(self) -> None:
        """Law 3 over all sequences, and that the books agree. For tests."""
        live = list(self.live.values())
        self.blocks.check([s for s in live if s.block_table or s.state is State.RUNNING])
        running = [s for s in live if s.state is State.RUNNING]
        assert sorted(running, key=_key) == self.running, "running: not by rank, or not all"
        held = self.set_aside
        assert all(s.state is State.HELD for s in held)
        waiting = [s for s in live if s.state in (State.WAITING, State.HELD)]
        assert len(waiting) == self.num_waiting, "num_waiting"
        assert not any(s.block_table or s.in_flight for s in waiting), "waiting, yet holds"
        paces = Counter([pace for s in waiting if (pace := promised_pace(s)) < inf])
        assert paces == self.paces, "paces of those that wait"
        queued = list(self.order)
        assert sorted(map(id, queued + held)) == sorted(map(id, waiting)), "lost in the queue"
        assert all(s.in_flight for s in live if s.state is State.ENDED), "ended, never retired"


def most_shared(seq: Sequence) -> int | None:
    """The most tokens that may come from the cache: what is to be scored must be computed."""
    scored = seq.scored and len(seq.scores) < seq.num_prompt - 1
    return len(seq.scores) if scored else None


def promised_pace(seq: Sequence) -> float:
    """The pace that the door promised it; inf if none."""
    return inf if seq.request.predicted is None else seq.pace


def _key(seq: Sequence) -> tuple[float, int]:
    return seq.key
