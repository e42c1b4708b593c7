"""Iteration-level scheduling: which tokens of which sequences the next step computes.

There is one path. A row carries the tokens of a sequence that were not handed out yet: one while it
decodes, many while its prompt (or, after a preemption, everything again) is computed. Two counters,
`num_scheduled` (handed out) and `num_computed` (committed), carry everything in flight.

A step is filled in this order: sequences that need one token, then those that need more, then new
ones from the queue, all in the policy's order, until tokens, rows, outputs or blocks run out. When
blocks run out the last sequence in that order is preempted: its blocks go back to the pool and it
is computed again later. So the first in the order always proceeds, and every sequence ends.

What is left then is for guesses: a drafter may lengthen rows that end in a choice by tokens that
may come next, with a `Want` each. At commit the choices are taken one after another, as if each had
had a step of its own, for as long as the guess at each place is what was chosen there.

No tensors, no clock (`now` is given), no threads, no logging.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from heapq import heapify, heappop, heappush

from octavo.core.batch import Batch, Row, RowResult, SampleSpec, StepResult, Want
from octavo.core.blocks import BlockManager
from octavo.core.drafter import Drafter, NoDrafter
from octavo.core.executor import Capacity
from octavo.core.policy import Occupancy, Policy, fcfs
from octavo.core.request import (
    NO_DRAFT,
    BlockHash,
    Event,
    FinishReason,
    Request,
    Sequence,
    State,
    TokenLogprob,
    Watcher,
)
from octavo.core.stats import Stats
from octavo.errors import ContextOverflow, EngineError, InvalidRequest, Overloaded


class _Plan:
    """A step being filled: tokens for each sequence, and what is left of the budgets."""

    __slots__ = ("chunks", "outputs", "preempted", "rows", "tokens")

    def __init__(self, capacity: Capacity) -> None:
        self.chunks: dict[Sequence, tuple[int, int]] = {}  # tokens and outputs
        self.tokens = capacity.max_tokens
        self.rows = capacity.max_rows
        self.outputs = capacity.max_outputs
        self.preempted = False

    def put(self, seq: Sequence, tokens: int, outputs: int) -> None:
        self.chunks[seq] = (tokens, outputs)
        self.tokens -= tokens
        self.rows -= 1
        self.outputs -= outputs

    def drop(self, seq: Sequence) -> None:
        chunk = self.chunks.pop(seq, None)
        if chunk is not None:
            self.tokens += chunk[0]
            self.rows += 1
            self.outputs += chunk[1]


class Scheduler:
    """Owns all sequences and blocks; hands out batches, takes their results in the same order."""

    def __init__(
        self,
        capacity: Capacity,
        policy: Policy | None = None,
        *,
        max_waiting: int = 1024,
        prefix_caching: bool = True,
        drafter: Drafter | None = None,
    ) -> None:
        for name in ("num_blocks", "block_size", "max_tokens", "max_rows", "max_outputs", "depth"):
            if getattr(capacity, name) < 1:
                raise ValueError(f"Capacity.{name} must be at least 1")
        self.capacity = capacity
        self.policy = policy if policy is not None else fcfs()
        self.max_waiting = max_waiting
        self.blocks = BlockManager(
            capacity.num_blocks, capacity.block_size, prefix_caching=prefix_caching
        )
        self.drafter = drafter if drafter is not None else NoDrafter()
        self.stats = Stats()
        # The last token of a sequence is never computed, so it needs no slot.
        pool = capacity.num_blocks * capacity.block_size + 1
        self.max_len = min(capacity.max_context, pool)
        self.num_waiting = 0
        self._max_running = capacity.max_rows * capacity.depth
        self._waiting: list[tuple[tuple[float, int], Sequence]] = []  # a heap; ended ones linger
        self._held: dict[BlockHash, dict[int, Sequence]] = {}
        self._running: list[Sequence] = []  # in the policy's order
        self._live: dict[int, Sequence] = {}  # not ended, or ended and still in flight
        self._choices: dict[str, list[Sequence]] = {}  # not ended
        self._events: list[Event] = []
        self._next_id = 0
        self._seats = 0
        self._opened = 0
        self._step = 0
        self._committed = 0

    # ---- the door -------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue params.n sequences. Nothing is changed if it raises.

        Raises ContextOverflow for what can never fit, Overloaded when the queue is full, and
        InvalidRequest for an id in use or a watcher that cannot be built.
        """
        n = request.params.n
        try:
            if request.id in self._choices:
                raise InvalidRequest(f"request id {request.id!r} is in use", "request_id")
            max_len = self._fit(request)
            if self.num_waiting and self.num_waiting + n > self.max_waiting:
                waiting = f"{self.num_waiting} sequences wait already (max_waiting is "
                raise Overloaded(f"{waiting}{self.max_waiting})", self.retry_after())
            seqs = [self._sequence(request, choice, max_len) for choice in range(n)]
        except Exception:
            self.stats.counters.refused += 1
            raise
        self._next_id += n
        self._choices[request.id] = seqs
        for seq in seqs:
            self._live[seq.id] = seq
            self._queue(seq)
        self.stats.counters.requests += 1
        self.stats.counters.added += n

    def retry_after(self) -> float:
        """A guess at the seconds until a place in the queue is free: at least one."""
        return max(1.0, self.stats.seconds_per_end)

    def _fit(self, request: Request) -> int:
        """The length at which the request's sequences end; raises if that can never be held."""
        num_prompt, max_tokens = len(request.prompt), request.params.max_tokens
        need = num_prompt + (max_tokens or 1)
        if need > self.max_len:
            asked = f"{num_prompt} of the prompt + {max_tokens or 1} of output"
            holder = f"the context holds {self.capacity.max_context}"
            if self.max_len < self.capacity.max_context:
                holder = f"the KV pool holds {self.max_len}"
            param = "prompt" if num_prompt >= self.max_len else "max_tokens"
            raise ContextOverflow(f"{need} tokens needed ({asked}), but {holder}", param)
        return need if max_tokens is not None else self.max_len

    def _sequence(self, request: Request, choice: int, max_len: int) -> Sequence:
        seq_id = self._next_id + choice
        try:
            seq = Sequence(seq_id, request, choice, arrival_index=seq_id)
        except Exception as error:
            raise InvalidRequest(f"the watcher could not be built: {error}") from error
        seq.max_len = max_len
        seq.key = self.policy.key(seq)
        return seq

    def _queue(self, seq: Sequence) -> None:
        seq.state = State.WAITING
        self.num_waiting += 1
        heappush(self._waiting, (seq.key, seq))

    def abort(self, request_id: str, now: float) -> list[Event]:
        """End all choices of a request at once. What is in flight is dropped when it comes back."""
        events = [
            self._end(seq, FinishReason.ABORT, now)
            for seq in list(self._choices.get(request_id, ()))
        ]
        # Entries of ended sequences leave the heap when they surface; do not wait if they are many.
        if len(self._waiting) > 2 * self.num_waiting + 64:
            self._waiting = [w for w in self._waiting if w[1].state is State.WAITING]
            heapify(self._waiting)
        return events

    # ---- a step goes out ------------------------------------------------------------------------

    def schedule(self, now: float) -> Batch | None:
        """The next step's work, or None if nothing can be computed now."""
        plan = _Plan(self.capacity)
        longer = self._plan_single(plan)
        self._plan_longer(plan, longer)
        # Admitting right after a preemption would take the blocks that it was to free.
        if self.num_waiting and not plan.preempted:
            self._admit(plan, longer, now)
        return self._batch(plan, now) if plan.chunks else None

    def _plan_single(self, plan: _Plan) -> list[Sequence]:
        """Give running sequences that need one token theirs; return those that need more."""
        longer = []
        size = self.blocks.block_size
        # With several batches in flight each takes its share, or the others would have no rows.
        share = -(-len(self._running) // self.capacity.depth)
        room = min(plan.tokens, plan.rows, plan.outputs, share)
        # A preempted sequence stands behind the one it gives way to, so the loop is safe.
        for seq in self._running:
            start = seq.num_scheduled
            n = len(seq.tokens) - start
            if n > 1:
                longer.append(seq)
            elif n == 1 and len(plan.chunks) < room:
                if start == len(seq.block_table) * size and not self._make_room(seq, plan):
                    continue
                plan.chunks[seq] = (1, 1)
        used = len(plan.chunks)
        plan.tokens -= used
        plan.rows -= used
        plan.outputs -= used
        return longer

    def _plan_longer(self, plan: _Plan, longer: list[Sequence]) -> None:
        """Go on with sequences that were admitted and not computed up to their last token."""
        blocks = self.blocks
        for seq in longer:
            if seq.state is not State.RUNNING:  # preempted for another
                continue
            if not plan.tokens or not plan.rows:
                break
            start = seq.num_scheduled
            if not self._chunk(seq, start, plan.tokens, plan.outputs)[0]:
                continue
            slots = (len(seq.block_table) + blocks.num_available) * blocks.block_size - start
            if not slots:
                if not self._make_room(seq, plan):
                    continue
                slots = len(seq.block_table) * blocks.block_size - start
            n, outputs = self._chunk(seq, start, min(plan.tokens, slots), plan.outputs)
            self._grow(seq, start + n)
            plan.put(seq, n, outputs)

    def _chunk(self, seq: Sequence, start: int, tokens: int, outputs: int) -> tuple[int, int]:
        """How many tokens from `start` on fit into the budgets, and the outputs they want."""
        n = min(len(seq.tokens) - start, tokens)
        first = max(start, len(seq.scores))  # position i scores token i + 1
        scored = max(0, min(start + n, seq.num_prompt - 1) - first) if seq.scored else 0
        last = int(start + n == len(seq.tokens))
        if scored + last <= outputs:
            return n, scored + last
        if scored <= outputs:
            return n - 1, scored
        return first + outputs - start, outputs

    def _grow(self, seq: Sequence, num_tokens: int, shared: Seq[int] = ()) -> None:
        """Grow into blocks that are known to be there."""
        grown = self.blocks.grow(seq, num_tokens, shared)
        assert grown, "blocks were counted and are not there"

    def _make_room(self, seq: Sequence, plan: _Plan) -> bool:
        """Get one more block for `seq`, by preempting sequences behind it if need be."""
        num_tokens = len(seq.block_table) * self.blocks.block_size + 1
        while not self.blocks.grow(seq, num_tokens):
            victim = self._victim(seq)
            if victim is None:
                return False
            self._preempt(victim, plan)
        return True

    def _victim(self, seq: Sequence) -> Sequence | None:
        """The last in the policy's order that is behind `seq` and not in flight."""
        for other in reversed(self._running):
            if other is seq:
                return None
            if other.num_scheduled == other.num_computed and other.block_table:
                return other
        return None

    def _preempt(self, seq: Sequence, plan: _Plan) -> None:
        """Give its blocks back and queue it again; its place in the order is as before."""
        plan.drop(seq)
        plan.preempted = True
        self._running.remove(seq)
        self._seats -= 1
        self._release(seq)
        self.stats.counters.recomputed_tokens += seq.num_computed
        self.stats.counters.preemptions += 1
        seq.num_preemptions += 1
        seq.num_computed = seq.num_scheduled = 0
        self._queue(seq)

    # ---- admission ------------------------------------------------------------------------------

    def _admit(self, plan: _Plan, longer: list[Sequence], now: float) -> None:
        """Let waiting sequences join, strictly in order: what does not fit now bars the rest."""
        if not self._running:
            self._seats, self._opened = 0, self._next_id
        waiting, blocks = self._waiting, self.blocks
        # Blocks that admitted sequences still need for tokens they have already.
        owed = sum(
            blocks.blocks_for(len(s.tokens)) - len(s.block_table)
            for s in longer
            if s.state is State.RUNNING
        )
        while waiting and plan.tokens and plan.rows:
            seq = waiting[0][1]
            if seq.state is not State.WAITING:
                heappop(waiting)
                continue
            occupancy = Occupancy(len(self._running), self._max_running, self._seats, self._opened)
            if not self.policy.admits(seq, occupancy):
                break
            most = len(seq.scores) if seq.scored and len(seq.scores) < seq.num_prompt - 1 else None
            shared = blocks.lookup(seq, most)
            if self.policy.holds_twins and self._hold(seq, len(shared), most):
                continue
            start = len(shared) * blocks.block_size
            n, outputs = self._chunk(seq, start, plan.tokens, plan.outputs)
            need = blocks.blocks_for(len(seq.tokens)) - len(shared)
            # Headroom of half a block for each that runs, or the newcomer would soon be preempted.
            spare = blocks.num_available - blocks.num_idle(shared) - owed
            spare -= (len(self._running) + 1) // 2
            if not n or need > spare:
                break
            heappop(waiting)
            self._grow(seq, start + n, shared)
            owed += blocks.blocks_for(len(seq.tokens)) - len(seq.block_table)
            self._join(seq, start, now)
            plan.put(seq, n, outputs)

    def _hold(self, seq: Sequence, num_shared: int, most: int | None) -> bool:
        """Set a sequence aside whose next block another one is computing: it will then hit it."""
        hash_ = self.blocks.awaited(seq, num_shared, most)
        if hash_ is None:
            return False
        heappop(self._waiting)
        seq.state = State.HELD
        seq.awaits = hash_
        self._held.setdefault(hash_, {})[seq.id] = seq
        self.stats.counters.held += 1
        return True

    def _wake(self, hashes: Iterable[BlockHash]) -> None:
        """Queue again those that were held for blocks now published or given up."""
        for hash_ in hashes:
            for seq in self._held.pop(hash_, {}).values():
                self.num_waiting -= 1
                self._queue(seq)

    def _join(self, seq: Sequence, num_cached: int, now: float) -> None:
        """Make a sequence run, its first num_cached tokens being in its blocks already."""
        seq.state = State.RUNNING
        seq.num_computed = seq.num_scheduled = num_cached
        self.num_waiting -= 1
        self._seats += 1
        insort(self._running, seq, key=_key)
        self.blocks.claim(seq)
        counters = self.stats.counters
        if seq.first_scheduled is None:
            seq.first_scheduled = now
            seq.num_cached = num_cached
            counters.admitted += 1
            counters.prompt_tokens += seq.num_prompt
            counters.cached_tokens += num_cached
        else:
            counters.recomputed_tokens -= num_cached

    # ---- rows -----------------------------------------------------------------------------------

    def _batch(self, plan: _Plan, now: float) -> Batch | None:
        rows = []
        for seq, (n, _) in plan.chunks.items():
            start = seq.num_scheduled
            end = start + n
            try:
                wants = self._wants(seq, start, end)
            except Exception as error:  # a watcher's: it fails this sequence alone
                self._events.append(self._fail(seq, f"watcher: {error!r}", now))
                continue
            seq.num_scheduled = end
            rows.append(Row(seq.id, start, seq.tokens[start:end], seq.block_table, wants))
        if not rows:
            return None
        room = min(plan.tokens, plan.outputs)
        for i, draft in self.drafter.drafts(rows, self._live, room):
            longer = self._lengthen(rows[i], draft[:room])
            room -= len(longer.tokens) - len(rows[i].tokens)
            rows[i] = longer
        self._step += 1
        return Batch(self._step, tuple(rows))

    def _lengthen(self, row: Row, draft: array[int]) -> Row:
        """Let a row that ends in a choice go on with guesses, as far as there are blocks.

        The earlier tokens of the sequence must be committed: a commit settles one draft.
        """
        seq, wants = self._live[row.seq_id], row.outputs
        spec = wants[-1].sample if wants else None
        if spec is None or wants[-1].mask is not None or not seq.may_draft:
            return row
        if row.start != seq.num_computed or seq.draft:
            return row
        end = seq.num_scheduled
        slots = (len(seq.block_table) + self.blocks.num_available) * self.blocks.block_size - end
        draft = draft[: min(seq.max_len - end - 1, slots)]
        self._grow(seq, end + len(draft))
        seq.draft = draft
        more = [
            Want(len(row.tokens) - 1 + i, _after(spec, draft[:i], seq.stop_from))
            for i in range(1, len(draft) + 1)
        ]
        return Row(seq.id, row.start, row.tokens + draft, seq.block_table, (*wants, *more))

    def _wants(self, seq: Sequence, start: int, end: int) -> tuple[Want, ...]:
        last = end == len(seq.tokens)
        if not seq.scored:
            return (Want(end - start - 1, _sample(seq), None, 0, _mask(seq)),) if last else ()
        tokens, top = seq.tokens, seq.request.params.prompt_logprobs or 0
        first = max(start, len(seq.scores))
        wants = [
            Want(i - start, target=tokens[i + 1], top=top)
            for i in range(first, min(end, seq.num_prompt - 1))
        ]
        if last:
            wants.append(Want(end - start - 1, _sample(seq), None, 0, _mask(seq)))
        return tuple(wants)

    # ---- a step comes back ----------------------------------------------------------------------

    def commit(self, batch: Batch, result: StepResult, now: float) -> list[Event]:
        """Take the oldest outstanding batch's result; report what each choice gained.

        Raises EngineError if the result is not of that batch.
        """
        self._committed += 1
        if not batch.step == result.step == self._committed:
            raise EngineError(f"step {result.step} came back, {self._committed} was due")
        events, self._events = self._events, []
        live, results, size = self._live, result.rows, self.blocks.block_size
        num_tokens = num_outputs = num_drafted = 0
        for row in batch.rows:
            seq_id, start, tokens, _, wants = row
            seq, res = live[seq_id], results.get(seq_id)
            drafted = len(seq.draft)
            old, new = seq.num_computed, start + len(tokens) - drafted
            num_tokens += len(tokens)
            num_outputs += len(wants)
            num_drafted += drafted
            seq.num_computed = new
            seq.num_steps += 1
            if seq.state is State.ENDED:
                if new == seq.num_scheduled:
                    self._retire(seq)
                continue
            if seq.scored or res is None or res.error is not None or len(res.tokens) != len(wants):
                fault = _fault(wants, res, drafted)
                if fault is not None or res is None:
                    if drafted:
                        self._forgo(seq, old)
                    else:
                        events.append(self._fail(seq, fault or "no result", now))
                    continue
                seq.scores.extend(res.scores)
            if new // size > old // size:
                self._publish(seq, old, new)
            if drafted:
                self._verify(seq, res, events, now)
            elif res.tokens:
                events.append(self._take(seq, res, now))
        counters = self.stats.counters
        counters.steps += 1
        counters.rows += len(batch.rows)
        counters.outputs += num_outputs
        counters.computed_tokens += num_tokens
        seconds = result.finished - result.started
        counters.busy_seconds += seconds
        self.drafter.timed(len(batch.rows), num_tokens, num_drafted, seconds)
        return events

    def _publish(self, seq: Sequence, old: int, new: int) -> None:
        self.blocks.publish(seq, old, new)
        if self._held:
            size = self.blocks.block_size
            self._wake(seq.hashes[old // size : new // size])

    def _verify(self, seq: Sequence, res: RowResult, events: list[Event], now: float) -> None:
        """Take the choices of a row with a draft while what they rest on turns out right.

        The choice after a guess was made as if the guess were the token before, and as if nothing
        were masked. KV beyond the last right guess is not counted: it will be written again.
        """
        draft, seq.draft = seq.draft, NO_DRAFT
        seq.num_drafted += len(draft)
        accepted = seq.num_accepted
        for i, token in enumerate(res.tokens):
            seq.num_accepted = accepted + i
            events.append(self._take(seq, RowResult((token,), res.logprobs[i : i + 1]), now))
            if i == len(draft) or token != draft[i] or seq.state is State.ENDED or _masked(seq):
                break
            old = seq.num_computed
            seq.num_computed = seq.num_scheduled = old + 1
            if (old + 1) % self.blocks.block_size == 0:
                self._publish(seq, old, old + 1)
        if seq.state is not State.ENDED:
            self.blocks.trim(seq, seq.num_scheduled)
        self.stats.drafted(len(draft), i)
        self.drafter.learn(seq, len(draft), i)

    def _forgo(self, seq: Sequence, computed: int) -> None:
        """A row with a draft failed, perhaps for the draft's sake: compute it again without one,
        and guess no more for this sequence."""
        self.stats.drafted(len(seq.draft), 0)
        seq.num_drafted += len(seq.draft)
        seq.draft, seq.may_draft = NO_DRAFT, False
        seq.num_computed = seq.num_scheduled = computed
        self.blocks.trim(seq, computed)

    def _take(self, seq: Sequence, res: RowResult, now: float) -> Event:
        """Append the chosen token and see whether the sequence ends with it."""
        (token,) = res.tokens
        request = seq.request
        kept, finish = 1, None
        if token in request.stop_ids and len(seq.tokens) >= seq.stop_from:
            finish = FinishReason.STOP
        elif seq.watcher is not None:
            try:
                kept, finish = _advance(seq.watcher, res.tokens)
            except Exception as error:
                return self._fail(seq, f"watcher: {error!r}", now)
        prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        if seq.first_token is None:
            seq.first_token = now
            if seq.scored:
                prompt_logprobs = (None, *seq.scores)
        if kept:
            seq.tokens.append(token)
            self.stats.counters.output_tokens += 1
            if finish is None and len(seq.tokens) >= seq.max_len:
                finish = FinishReason.LENGTH
        if finish is not None:
            self._end(seq, finish, now)
        return Event(
            request.id,
            seq.choice,
            res.tokens if kept else (),
            None if request.params.logprobs is None else res.logprobs if kept else (),
            prompt_logprobs,
            finish,
            None,
            seq.num_cached,
            seq.num_preemptions,
            seq.num_drafted,
            seq.num_accepted,
        )

    # ---- ends -----------------------------------------------------------------------------------

    def _fail(self, seq: Sequence, error: str, now: float) -> Event:
        return self._end(seq, FinishReason.ERROR, now)._replace(error=error)

    def _end(self, seq: Sequence, reason: FinishReason, now: float) -> Event:
        """A sequence ends, wherever it is; its blocks wait for what is in flight."""
        request_id = seq.request.id
        choices = self._choices[request_id]
        choices.remove(seq)
        if not choices:
            del self._choices[request_id]
        if seq.state is State.RUNNING:
            self._running.remove(seq)
        else:
            self.num_waiting -= 1
            if seq.awaits is not None and seq.state is State.HELD:
                self._held[seq.awaits].pop(seq.id)
        seq.state = State.ENDED
        self.stats.ended(seq, reason, now)
        if not seq.in_flight:
            self._retire(seq)
        if not self._running:
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

    def _retire(self, seq: Sequence) -> None:
        self._release(seq)
        del self._live[seq.id]

    def _release(self, seq: Sequence) -> None:
        self.blocks.release(seq)
        if self._held:
            self._wake(seq.hashes)

    # ---- what it looks like ---------------------------------------------------------------------

    def take_events(self) -> list[Event]:
        """News that no commit will bring: sequences whose watcher failed while scheduling."""
        events, self._events = self._events, []
        return events

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether any sequence has not ended, or is in flight, or has news."""
        return bool(self._live) or bool(self._events)

    def check(self) -> None:
        """Law 3 over all sequences, and that the scheduler's own books agree. For tests."""
        live = list(self._live.values())
        self.blocks.check([s for s in live if s.block_table or s.state is State.RUNNING])
        running = [s for s in live if s.state is State.RUNNING]
        assert sorted(running, key=_key) == self._running, "running: not in order, or not all"
        held = [s for group in self._held.values() for s in group.values()]
        assert all(s.state is State.HELD for s in held)
        waiting = [s for s in live if s.state in (State.WAITING, State.HELD)]
        assert len(waiting) == self.num_waiting, "num_waiting"
        assert not any(s.block_table or s.in_flight for s in waiting), "waiting, yet holds"
        queued = [s for _, s in self._waiting if s.state is State.WAITING]
        assert sorted(map(id, queued + held)) == sorted(map(id, waiting)), "lost in the queue"
        assert all(s.in_flight for s in live if s.state is State.ENDED), "ended, never retired"

    def snapshot(self) -> dict[str, float]:
        """Counters and gauges by name."""
        blocks = self.blocks
        return {
            **self.stats.snapshot(),
            "running": len(self._running),
            "waiting": self.num_waiting,
            "evictions": blocks.num_evictions,
            "blocks": blocks.num_blocks,
            "blocks_held": blocks.num_held,
            "blocks_cached": blocks.num_cached,
        }


def _key(seq: Sequence) -> tuple[float, int]:
    return seq.key


def _sample(seq: Sequence) -> SampleSpec:
    """What choosing the sequence's next token needs."""
    request, position = seq.request, len(seq.tokens)
    history = seq.tokens[:] if seq.penalised else None
    suppress = seq.suppress if position < seq.stop_from else ()
    return SampleSpec(
        request.params, request.seed, seq.choice, position, history, seq.num_prompt, suppress
    )


def _mask(seq: Sequence) -> bytes | None:
    if seq.watcher is None:
        return None
    mask = seq.watcher.mask(seq.num_output)
    if mask is not None and not isinstance(mask, bytes):
        raise TypeError(f"mask returned {type(mask).__name__}, not bytes or None")
    return mask


def _masked(seq: Sequence) -> bool:
    """Whether the next choice is masked, or asking fails (then scheduling will fail it)."""
    try:
        return _mask(seq) is not None
    except Exception:
        return True


def _after(spec: SampleSpec, guesses: array[int], stop_from: int) -> SampleSpec:
    """What choosing the token after some guesses needs, from what choosing the first one does."""
    position = spec.position + len(guesses)
    return spec._replace(
        position=position,
        history=None if spec.history is None else spec.history + guesses,
        suppress=spec.suppress if position < stop_from else (),
    )


def _advance(watcher: Watcher, tokens: tuple[int, ...]) -> tuple[int, FinishReason | None]:
    """Tokens kept and why to stop; raises if the watcher breaks its contract."""
    kept, finish = watcher.advance(tokens)
    finish = None if finish is None else FinishReason(finish)
    if not 0 <= kept <= len(tokens) or (kept < len(tokens) and finish is None):
        raise ValueError(f"advance kept {kept} of {len(tokens)} tokens, finish {finish}")
    return kept, finish


def _fault(wants: tuple[Want, ...], res: RowResult | None, drafted: int) -> str | None:
    """Why a row's result cannot be used, if so."""
    if res is None:
        return "the executor returned no result for this row"
    if res.error is not None:
        return res.error
    sampled = 1 + drafted if wants and wants[-1].sample is not None else 0
    if len(res.tokens) != sampled or len(res.scores) != len(wants) - sampled:
        return f"{len(wants)} outputs wanted, {len(res.tokens)} tokens and {len(res.scores)} scores"
    return None
