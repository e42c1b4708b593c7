"""Iteration-level scheduling: which tokens of which sequences the next step computes.

There is one path. A row carries the tokens of a sequence that were not handed out yet: one while it
decodes, many while its prompt (or, after a preemption, everything again) is computed. Two counters,
`num_scheduled` (handed out) and `num_computed` (committed), carry everything in flight.

A step is filled in this order: sequences that need one token, then those that need more and new
ones from the queue, as the policy offers them, until tokens, rows, outputs, time or blocks run out.
When blocks run out the sequence that loses least (the policy says who) is preempted: its blocks go
back to the pool and it is computed again later, in its old place. The first by rank, which is fixed
and total, is never preempted and may take anybody's blocks, so it always proceeds, and every
sequence ends. After two preemptions a sequence is pinned: it gives way only to one of higher rank.

What is left then is for guesses: a drafter may lengthen rows that end in a choice by tokens that
may come next, with a `Want` each.

Here is what a step is filled with. What a result does is `settle`; where each sequence is, and what
a move from one place to another means, is `roster`.

No tensors, no clock (`now` is given), no threads, no logging.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Seq
from math import inf
from typing import NamedTuple

from octavo.core.batch import Batch, Row, SampleSpec, StepResult, Want
from octavo.core.blocks import BlockManager
from octavo.core.drafter import Drafter, NoDrafter
from octavo.core.executor import Capacity
from octavo.core.history import Wait
from octavo.core.policy import House, Occupancy, Policy, fcfs
from octavo.core.request import Event, FinishReason, Request, Sequence, State
from octavo.core.reserve import Reserve
from octavo.core.roster import Roster, most_shared, promised_pace
from octavo.core.settle import Settler, blamed
from octavo.core.slo import first_due, moving_at, pace_from
from octavo.core.stats import Stats
from octavo.core.steptime import StepFeatures, StepModel
from octavo.errors import ContextOverflow, InvalidRequest, Overloaded

PINNED = 2  # preemptions after which a sequence gives way only to higher ranks
GRAIN = 16  # tokens: chunks that time cuts are multiples
ANEW = 10.0  # seconds without work after which one is let in to see how fast steps are now
ONE = (1, 1)  # this very pair: a token of a sequence that needs one, and the next one wanted
# A NamedTuple without the detour over its own __new__: a step makes one for each row.
_new = tuple.__new__


class Plan:
    """A step being filled: tokens for each sequence, what is left of the budgets, its shape."""

    __slots__ = ("chunks", "now", "outputs", "preempted", "rows", "shape", "tokens")

    def __init__(self, capacity: Capacity, now: float) -> None:
        self.now = now
        self.shape = StepFeatures()
        self.chunks: dict[Sequence, tuple[int, int]] = {}  # tokens and outputs
        self.tokens = capacity.max_tokens
        self.rows = capacity.max_rows
        self.outputs = capacity.max_outputs
        self.preempted = False

    def put(self, seq: Sequence, tokens: int, outputs: int) -> None:
        self.chunks[seq] = (tokens, outputs)
        self.shape = self.shape.plus(seq.num_scheduled, tokens, outputs)
        self.tokens -= tokens
        self.rows -= 1
        self.outputs -= outputs

    def drop(self, seq: Sequence) -> None:
        chunk = self.chunks.pop(seq, None)
        if chunk is not None:
            self.tokens += chunk[0]
            self.rows += 1
            self.outputs += chunk[1]


class Load(NamedTuple):
    """What a scheduler has to do, at one moment. running, waiting: sequences. available: blocks
    that a sequence could get. start: when the step that runs is over, most likely. tightest:
    seconds a token that the most demanding stream was promised, those among them that will be one a
    step later; inf if none was. promised: the same of all whose prompts were started. Paces that
    cannot be had are not among them. due: when the first of the streams has the token due that the
    step after it brings, those that begin with the running one among them; at the soonest (they may
    have been promised different paces), inf without any. That is late where steps had little to do
    for a while."""

    running: int
    waiting: int
    available: int
    start: float
    tightest: float
    promised: float
    due: float


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
        model: StepModel | None = None,
    ) -> None:
        self.capacity = _roomy(capacity)
        self.policy = policy if policy is not None else fcfs()
        self.max_waiting = max_waiting
        self.blocks = BlockManager(
            capacity.num_blocks, capacity.block_size, prefix_caching=prefix_caching
        )
        self.model = model if model is not None else StepModel()
        self.reserve = Reserve()
        self.stats = Stats()
        # The last token of a sequence is never computed, so it needs no slot.
        pool = capacity.num_blocks * capacity.block_size + 1
        self.max_len = min(capacity.max_context, pool)
        self._max_running = capacity.max_rows * capacity.depth
        self.house = House(capacity, self.model, self._cached, self.reserve)
        self._order = self.policy.order(self.house)
        self._pace = self.policy.pace(self.house, self._order)
        self._roster = Roster(self.blocks, self._order, self.reserve, self.stats)
        self._settler = Settler(
            self._roster, self.model, drafter if drafter is not None else NoDrafter(), self.reserve
        )
        # The same objects: what every step reads.
        self._running, self._live = self._roster.running, self._roster.live
        self._shapes = self._settler.shapes
        self.margin = self._roster.margin
        self.expected: dict[str, tuple[float, float]] = {}  # admitted, and not added yet
        self.witness: Callable[[Batch, StepResult], None] = unwatched  # is shown every step
        self._reading: list[Sequence] = []  # of these, the latest step had more than a token
        self._next_id = 0
        self._owed = 0  # blocks that admitted sequences still need for tokens they have already
        self._step = 0
        self._aborts = 0
        self._mean_context = 0.0  # of what decodes
        self._busy_until = 0.0

    # ---- the door -------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue params.n sequences. Nothing is changed if it raises.

        Raises ContextOverflow for what can never fit, Overloaded when the queue is full, and
        InvalidRequest for an id in use or a watcher that cannot be built.
        """
        n = request.params.n
        self.expected.pop(request.id, None)
        try:
            if request.id in self._roster.choices:
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
        self._roster.enter(request, seqs)

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
        seq.key = self.policy.rank(seq)
        if request.slo:
            output = self.reserve.output(request.tenant, max_len - seq.num_prompt)
            seq.due = self._first_due(request, output)
            seq.pace = pace_from(request, request.arrival, output)
        return seq

    def first_due(self, request: Request) -> float:
        """When the first token of one that comes would be due; inf if it is due at no time."""
        if request.slo.e2e is None:
            return inf if request.slo.ttft is None else request.arrival + request.slo.ttft
        most = self.max_len - len(request.prompt)
        if request.params.max_tokens is not None:
            most = min(most, request.params.max_tokens)
        return self._first_due(request, self.reserve.output(request.tenant, most))

    def _first_due(self, request: Request, output: float) -> float:
        return first_due(request, output * self.decode_seconds(1))

    def _cached(self, seq: Sequence) -> int:
        """Tokens of it that the prefix cache has now."""
        return len(self.blocks.lookup(seq, most_shared(seq))) * self.blocks.block_size

    def abort(self, request_id: str, now: float) -> list[Event]:
        """End all choices of a request at once. What is in flight is dropped when it comes back.
        One that was admitted and never added is expected no more."""
        self.expected.pop(request_id, None)
        events = [
            self._roster.end(seq, FinishReason.ABORT, now) for seq in self.choices(request_id)
        ]
        # Entries of ended sequences leave the queue when they surface; not if they are very many.
        self._aborts += len(events)
        if self._aborts >= 64:
            self._aborts = 0
            self._order.tidy(self.num_waiting)
        return events

    # ---- a step goes out ------------------------------------------------------------------------

    def schedule(self, now: float) -> Batch | None:
        """The next step's work, or None if nothing can be computed now."""
        self._roster.fill(now)
        plan = Plan(self.capacity, now)
        longer = self._plan_single(plan)
        self._pace.open(plan.chunks, plan.shape, now)
        if still := self._pace.still(plan.shape, now):
            self._stand_still(plan, still)
        self._order.decoded(plan.chunks)
        if longer or self._roster.num_waiting:
            self._plan_longer(plan, longer)
        return self._batch(plan) if plan.chunks else None

    def _plan_single(self, plan: Plan) -> list[Sequence]:
        """Give running sequences that need one token theirs; return those that need more."""
        longer, chunks, size = [], plan.chunks, self.blocks.block_size
        # With several batches in flight each takes its share, or the others would have no rows.
        share = -(-len(self._running) // self.capacity.depth)
        room = min(plan.tokens, plan.rows, plan.outputs, share)
        context = 0
        for seq in self._running[: self.policy.moving(self._running)]:
            start = seq.num_scheduled
            n = len(seq.tokens) - start
            if n == 1:
                if len(chunks) >= room:
                    continue
                full = not start % size and start == len(seq.block_table) * size
                if full and not self._make_room(seq, plan):
                    continue
                chunks[seq] = ONE
                context += start
            elif n > 1:
                longer.append(seq)
        if plan.preempted:  # some may have had their token before they gave way
            context = sum(seq.num_scheduled for seq in chunks)
        used = len(chunks)
        plan.tokens = self.capacity.max_tokens - used
        plan.rows = self.capacity.max_rows - used
        plan.outputs = self.capacity.max_outputs - used
        plan.shape = StepFeatures(used, context + used, 0.0, used, used)
        self._mean_context = context / used if used else self._mean_context
        self._reading = longer
        return longer

    def _stand_still(self, plan: Plan, seqs: Iterable[Sequence]) -> None:
        """These have no token in this step after all."""
        for seq in seqs:
            plan.drop(seq)
            self.blocks.trim(seq, seq.num_scheduled)
        used, context = len(plan.chunks), sum([seq.num_scheduled for seq in plan.chunks])
        plan.shape = StepFeatures(used, context + used, 0.0, used, used)
        self._pace.open(plan.chunks, plan.shape, plan.now)

    def _plan_longer(self, plan: Plan, longer: list[Sequence]) -> None:
        """Go on with prompts, and let new sequences join, as the policy offers them."""
        if not self._running:
            self._roster.empty(self._next_id)
        longer = [seq for seq in longer if seq.state is State.RUNNING]
        self._owed = self._needed(longer)
        stopped = self.stats.journal.stopped
        if not plan.tokens or not plan.rows:
            stopped(Wait.TOKENS if plan.rows else Wait.ROWS)
            return
        offers = self._order.candidates(longer, plan.now)
        for seq, most in offers:
            if seq in plan.chunks:
                continue
            if seq.state is State.RUNNING:
                self._continue(seq, most, plan)
            # Admitting right after a preemption would take the blocks that it was to free.
            elif seq.state is State.WAITING and plan.preempted:
                stopped(Wait.PREEMPTION)
            elif seq.state is State.WAITING:
                self._admit(seq, most, plan)
            if not plan.tokens or not plan.rows:
                stopped(Wait.TOKENS if plan.rows else Wait.ROWS)
                break
        offers.close()

    def _needed(self, seqs: Iterable[Sequence]) -> int:
        """Blocks that they have not got for tokens they have already: these are theirs."""
        blocks_for = self.blocks.blocks_for
        return sum([blocks_for(len(seq.tokens)) - len(seq.block_table) for seq in seqs])

    def _continue(self, seq: Sequence, most: int, plan: Plan) -> None:
        """Compute more of a sequence that was admitted and is not computed to its last token."""
        blocks, start = self.blocks, seq.num_scheduled
        most = self._in_time(seq, start, most, plan)
        if not self._chunk(seq, start, most, plan.outputs)[0]:
            return
        slots = (len(seq.block_table) + blocks.num_available) * blocks.block_size - start
        if not slots:
            if not self._make_room(seq, plan):
                return
            slots = len(seq.block_table) * blocks.block_size - start
        n, outputs = self._chunk(seq, start, min(most, slots), plan.outputs)
        self._grow(seq, start + n)
        plan.put(seq, n, outputs)
        seq.record.chunk(plan.now, start, n)
        self._order.served(seq, start, n)

    def _in_time(self, seq: Sequence, start: int, most: int, plan: Plan) -> int:
        """How many tokens from `start` on there are budgets and time for."""
        rest = len(seq.tokens) - start
        n = min(rest, most, plan.tokens)
        n = min(n, self._pace.room(plan.shape, start, seq.request.tenant))
        return n if n == rest or n == plan.tokens else n - n % GRAIN

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

    def _make_room(self, seq: Sequence, plan: Plan) -> bool:
        """Get one more block for `seq`, by preempting others if need be."""
        while not self.blocks.add(seq):
            victim = self._victim(seq, plan.now)
            if victim is None:
                return False
            self._preempt(victim, plan)
        return True

    def _preempt(self, seq: Sequence, plan: Plan) -> None:
        plan.drop(seq)
        plan.preempted = True
        self._roster.preempt(seq, plan.now)

    def _victim(self, seq: Sequence, now: float) -> Sequence | None:
        """Who loses least of those that may be preempted for `seq`; None if that is `seq` itself.

        Never the first by rank, nor one in flight, nor a pinned one by a lower rank.
        """
        first, loss, house = self._running[0], self.policy.loss, self.house
        least, victim = loss(seq, now, house), seq
        for other in self._running:
            if other is seq or other is first or other.in_flight or not other.block_table:
                continue
            if other.num_preemptions >= PINNED and other.key < seq.key:
                continue
            lost = loss(other, now, house)
            if lost < least or (victim is seq is first):
                least, victim = lost, other
        return None if victim is seq else victim

    # ---- admission ------------------------------------------------------------------------------

    def _admit(self, seq: Sequence, most: int, plan: Plan) -> None:
        """Let a waiting sequence join, if there is room for it and time."""
        blocks, running = self.blocks, len(self._running)
        roster = self._roster
        occupancy = Occupancy(running, self._max_running, roster.seats, roster.opened)
        joins = self._joins(seq)
        if not joins or not self.policy.admits(seq, occupancy):
            full = running >= self._max_running
            grouped = not full and not self.policy.admits(seq, occupancy)
            self.stats.journal.stopped(Wait.ROWS if full else Wait.GROUP if grouped else Wait.TIME)
            if full and self._clear_way(seq, plan):
                self._admit(seq, most, plan)
            return
        limit = most_shared(seq)
        shared = blocks.lookup(seq, limit)
        if self.policy.holds_twins and roster.hold(seq, len(shared), limit):
            return
        start = len(shared) * blocks.block_size
        n, outputs = self._chunk(seq, start, self._in_time(seq, start, most, plan), plan.outputs)
        need = blocks.blocks_for(len(seq.tokens)) - len(shared)
        spare = blocks.num_available - blocks.num_idle(shared) - self._owed
        left = spare - need
        if not n or left < 0 or left < self.growth(left, seq.request.tenant):
            self.stats.journal.stopped(Wait.BLOCKS if n else Wait.TIME)
            if n and self._clear_way(seq, plan):
                self._admit(seq, most, plan)
            return
        self._grow(seq, start + n, shared)
        self._owed += blocks.blocks_for(len(seq.tokens)) - len(seq.block_table)
        roster.join(seq, start, plan.now)
        self._reading.append(seq)
        plan.put(seq, n, outputs)
        seq.record.chunk(plan.now, start, n)
        self._order.served(seq, start, n)

    def _joins(self, seq: Sequence) -> bool:
        """Whether paces bear one more. Who is due at no time waits for those too that were promised
        to ones that do not stream yet, itself among them: the door did not count it beside them
        (`Admission._queue`)."""
        moving, tenant = self.num_moving, seq.request.tenant
        if not seq.late or not self._running:
            return self._pace.joins(moving, tenant)
        reading = [one for one in self._reading if one.state is State.RUNNING]
        pace = min([*self._roster.paces, *map(promised_pace, reading)], default=inf)
        return self._pace.joins(moving, tenant, pace, reading)

    def _clear_way(self, seq: Sequence, plan: Plan) -> bool:
        """Preempt the last by rank for one that waits and finds no room, if the policy would."""
        last = self._running[-1] if self._running else seq
        if not self.policy.yields(last, seq) or last.in_flight or last.num_preemptions >= PINNED:
            return False
        self._preempt(last, plan)
        return True

    def growth(self, blocks: float, tenant: str) -> float:
        """Blocks to keep free for what the running sequences will write, beside one of a tenant's
        that joins and leaves so many: those of tenants that give way to its own get what is left.
        At most that, where there are enough."""
        size, reserve, running = self.blocks.block_size, self.reserve, self._running
        kept = reserve.most_growth(len(running), size)
        if blocks >= kept:
            return kept
        kept = reserve.growth(running, size)
        if blocks >= kept:
            return kept
        tenants = {other.request.tenant for other in running}
        behind = self._order.give_way(tenants, tenant)
        if not behind:
            return kept
        before = [other for other in running if other.request.tenant not in behind]
        return reserve.growth(before, size)

    # ---- rows -----------------------------------------------------------------------------------

    def _batch(self, plan: Plan) -> Batch | None:
        rows = self._rows(plan.chunks.items(), plan.now)
        if not rows:
            return None
        room = min(plan.tokens, plan.outputs, self._pace.spare(plan.shape))
        tokens = room
        for i, draft in self.drafter.drafts(rows, self._live, room):
            longer = self._lengthen(rows[i], draft[:room])
            room -= len(longer.tokens) - len(rows[i].tokens)
            rows[i] = longer
        self._step += 1
        batch = Batch(self._step, tuple(rows))
        as_planned = room == tokens and not plan.preempted and len(rows) == len(plan.chunks)
        self._sent(plan, plan.shape if as_planned else StepFeatures.of(batch))
        return batch

    def _rows(self, chunks: Iterable[tuple[Sequence, tuple[int, int]]], now: float) -> list[Row]:
        """Hand out these tokens. A sequence whose watcher raises fails, and has no row."""
        rows: list[Row] = []
        for seq, chunk in chunks:
            start, wants = seq.num_scheduled, seq.standing
            end = start + chunk[0]
            if wants is None or chunk is not ONE:
                try:
                    wants = self._wants(seq, start, end)
                except Exception as error:
                    self._roster.news.append(self._roster.fail(seq, blamed(error), now))
                    continue
            seq.num_scheduled = end
            row = (seq.id, start, seq.tokens[start:end], seq.block_table, wants)
            rows.append(_new(Row, row))
        return rows

    def _sent(self, plan: Plan, shape: StepFeatures) -> None:
        """A step went out in that shape."""
        self._pace.close(plan.shape)
        self._shapes.append(shape)
        self._busy_until = plan.now + self.model.gap + self.model.predict(shape)

    def _lengthen(self, row: Row, draft: array[int]) -> Row:
        """Let a row that ends in a choice go on with guesses, as far as there are blocks.

        The earlier tokens of the sequence must be committed: a commit settles one draft.
        """
        seq, wants = self._live[row.seq_id], row.outputs
        spec = wants[-1].sample if wants else None
        if spec is None or not seq.may_draft:
            return row
        if row.start != seq.num_computed or seq.draft:
            return row
        end = seq.num_scheduled
        slots = (len(seq.block_table) + self.blocks.num_available) * self.blocks.block_size - end
        draft = draft[: min(seq.max_len - end - 1, slots)]
        masks = _masks_ahead(seq, draft)
        draft = draft[: len(masks)]
        if not draft:
            return row
        self._grow(seq, end + len(draft))
        seq.draft, at = draft, len(row.tokens) - 1
        more = [
            Want(at + i, _after(spec, draft[:i], end + i >= seq.stop_from), mask=mask)
            for i, mask in enumerate(masks, 1)
        ]
        return Row(seq.id, row.start, row.tokens + draft, seq.block_table, (*wants, *more))

    def _wants(self, seq: Sequence, start: int, end: int) -> tuple[Want, ...]:
        """What a row wants: the next token if it ends in the last one, and scores where asked."""
        last = end == len(seq.tokens)
        if not seq.scored:
            if not last:
                return ()
            wants = (Want(end - start - 1, _sample(seq), None, 0, _mask(seq)),)
            free = seq.watcher is None and not seq.penalised and end >= seq.stop_from
            if free and end - start == 1:
                seq.standing = wants
            return wants
        tokens, top = seq.tokens, seq.request.params.prompt_logprobs or 0
        first = max(start, len(seq.scores))
        many = [
            Want(i - start, target=tokens[i + 1], top=top)
            for i in range(first, min(end, seq.num_prompt - 1))
        ]
        if last:
            many.append(Want(end - start - 1, _sample(seq), None, 0, _mask(seq)))
        return tuple(many)

    # ---- a step comes back ----------------------------------------------------------------------

    def commit(self, batch: Batch, result: StepResult, now: float) -> list[Event]:
        """Take the oldest outstanding batch's result; report what each choice gained.

        Raises EngineError if the result is not of that batch.
        """
        events = self._settler.commit(batch, result, now)
        self.witness(batch, result)
        return events

    def _skip(self, steps: int) -> None:
        """So many steps of decodes went out and came back otherwise (`stretch`)."""
        self._step += steps
        self._reading = []

    # ---- what it looks like ---------------------------------------------------------------------

    def take_events(self) -> list[Event]:
        """News that no commit will bring: sequences whose watcher failed while scheduling."""
        return self._roster.take_news()

    def choices(self, request_id: str) -> tuple[Sequence, ...]:
        """The sequences of a request that have not ended; to read, not to change."""
        return tuple(self._roster.choices.get(request_id, ()))

    @property
    def running(self) -> tuple[Sequence, ...]:
        """The sequences that run, by rank; to read, not to change."""
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """The sequences that wait, held ones among them, in no order; to read, not to change."""
        return (*self._order, *self._roster.set_aside)

    @property
    def drafter(self) -> Drafter:
        """What guesses tokens, and learns which of them held."""
        return self._settler.drafter

    @drafter.setter
    def drafter(self, drafter: Drafter) -> None:
        self._settler.drafter = drafter

    @property
    def num_waiting(self) -> int:
        return self._roster.num_waiting

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_moving(self) -> int:
        """Of those that run, how many get tokens now; prompts that are read are among them."""
        return self.policy.moving(self._running)

    @property
    def mean_context(self) -> float:
        """Of what decodes, a row."""
        return self._mean_context

    def rested(self, now: float, *, best: bool = False) -> bool:
        """A door is going to look. Where nothing runs the step model hears for how long; nothing
        else asks it then, so another thread may say so. best: try what it was at best, after a
        while; whether that is so now."""
        if self._running or self._shapes or self._roster.num_waiting or self.expected:
            return False
        rest = max(0.0, now - self.stats.journal.now)
        if best and rest < ANEW:
            return False
        self.model.rest(rest, best=best)
        return True

    def load(self, now: float) -> Load:
        """What the door looks at."""
        pace, running = self._pace, len(self._running)
        start = max(now, self._busy_until) if self._shapes else now
        tightest = promised = pace.tightest
        due = pace.soonest + tightest if running else inf
        if reading := [seq for seq in tuple(self._reading) if seq.state is State.RUNNING]:
            least = self.model.gamma * (self.model.gap + self.decode_seconds(1))
            for seq in reading:
                left = len(seq.tokens) - seq.num_scheduled
                if seq.pace < least:
                    continue
                promised = min(promised, seq.pace)
                # Until it streams, a prompt's pace holds up nobody, its own reading least of all.
                if left <= self.capacity.max_tokens:
                    tightest = min(tightest, seq.pace)
                if not left:
                    due = min(due, start + seq.pace)
        waiting = self._roster.num_waiting
        available = self.blocks.num_available
        if reading:
            available -= self._needed(reading)
        return _new(Load, (running, waiting, available, start, tightest, promised, due))

    def moving_at(self, pace: float, tenant: str) -> float:
        """The same in the mean of steps that last as long as a pace that is promised to a tenant:
        streams with slower ones stand still in between, but for those of tenants that it would have
        to wait for."""
        seqs = self._running[: self.num_moving]
        before = {
            name
            for name in {seq.request.tenant for seq in seqs}
            if self._order.give_way((tenant,), name)
        }
        waits = [seq for seq in seqs if seq.request.tenant not in before]
        return len(seqs) - len(waits) + moving_at(waits, pace)

    def decode_seconds(self, more: float = 0, rows: int = 0, context: int = 0) -> float:
        """Predicted seconds of a step in which all that run, and `more` like them, decode; so many
        `rows` of these with that much context, if that is more than the others have."""
        moving = self.policy.moving(self._running)
        total, mean = max(1, min(moving + more, self.capacity.max_rows)), self._mean_context
        beyond = min(rows, total) * max(0.0, context - mean)
        return self.model.decoding(total, total * mean + beyond)

    def turned_away(self, tenant: str, now: float) -> None:
        """The door refused one of a tenant's: it is there, and others are to leave it something."""
        self._order.met(tenant, now)

    def give_way(self, tenants: Collection[str], other: str) -> Collection[str]:
        """Those of the tenants whose prompts wait for another's, whenever either is due."""
        return self._order.give_way(tenants, other)

    def spared(self, tenant: str) -> int:
        """Rows of a step that one more of a tenant's must leave to others."""
        return self._pace.leaves(tenant)

    def backlog(self) -> list[tuple[float, float]] | None:
        """(deadline, seconds of prefill) of what has no first token yet, soonest first: what was
        started, what waits, and what the door let in and nobody has added yet. No deadline (inf)
        where it is lost. None where the policy has another order."""
        line = self._order.backlog()
        if line is not None and (self.expected or self._reading):
            line += [*self.expected.copy().values(), *self._started()]
            line.sort()
        return line

    def ahead(self, due: float, tenant: str, work: float = 0.0) -> tuple[float, int]:
        """Predicted seconds of prefill before a newcomer with that deadline and that much `work`:
        of the same, what the policy lets go first. What was started does in any case. And how many
        of those that wait may stream beside it."""
        seconds, rows = self._order.ahead(due, tenant, work)
        if self._roster.held:
            rows += len(self._roster.set_aside)
        if self.expected:
            seconds += sum([more for by, more in self.expected.copy().values() if by <= due])
        if self._reading:
            seconds += sum([more for _, more in self._started()])
        return seconds, rows

    def _started(self) -> list[tuple[float, float]]:
        """(deadline, seconds of prefill that is left) of each prompt that was started."""
        found, prefilling = [], self.model.prefilling
        for seq in tuple(self._reading):
            done = seq.num_scheduled
            count = len(seq.tokens) - done
            if count > 1 and seq.state is State.RUNNING:
                found.append((inf if seq.late else seq.due, prefilling(done, count)))
        return found

    @property
    def has_work(self) -> bool:
        """Whether any sequence has not ended, or is in flight, or has news."""
        return bool(self._live) or bool(self._roster.news)

    def check(self) -> None:
        """Law 3 over all sequences, and that the scheduler's own books agree. For tests."""
        self._roster.check()

    def snapshot(self) -> dict[str, float]:
        """Counters and gauges by name."""
        return self.totals() | self.factors()

    def factors(self) -> dict[str, float]:
        """Gauges that belong to this scheduler alone: of several of them no sum says anything."""
        return {
            **self.model.snapshot(),
            "kv_reserve": self.reserve.rho,
            "admission_margin": self.margin.factor,
        }

    def totals(self) -> dict[str, float]:
        """Counters, and gauges that count: those of several schedulers add up."""
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


def unwatched(batch: Batch, result: StepResult) -> None:
    """The witness of a scheduler that nobody watches."""


def _roomy(capacity: Capacity) -> Capacity:
    """Raises ValueError for one in which nothing could ever run."""
    for name in ("num_blocks", "block_size", "max_tokens", "max_rows", "max_outputs", "depth"):
        if getattr(capacity, name) < 1:
            raise ValueError(f"Capacity.{name} must be at least 1")
    return capacity


def _sample(seq: Sequence) -> SampleSpec:
    """What choosing the sequence's next token needs."""
    request = seq.request
    history = seq.tokens[:] if seq.penalised else None
    suppress = seq.suppress if len(seq.tokens) < seq.stop_from else ()
    return SampleSpec(request.params, request.seed, seq.choice, history, seq.num_prompt, suppress)


def _mask(seq: Sequence) -> bytes | None:
    if seq.watcher is None:
        return None
    return _checked(seq.watcher.mask(seq.num_output))


def _checked(mask: bytes | None) -> bytes | None:
    if mask is not None and not isinstance(mask, bytes):
        raise TypeError(f"mask returned {type(mask).__name__}, not bytes or None")
    return mask


def _masks_ahead(seq: Sequence, draft: array[int]) -> list[bytes | None]:
    """Masks after those of the guesses that may stand; none if asking fails (if the place is ever
    reached, asking for its mask fails again, and then the sequence)."""
    if seq.watcher is None:
        return [None] * len(draft)
    try:
        return [*map(_checked, seq.watcher.ahead(draft))][: len(draft)]
    except Exception:
        return []


def _after(spec: SampleSpec, guesses: array[int], may_stop: bool) -> SampleSpec:
    """What choosing the token after some guesses needs, from what choosing the first one does."""
    return spec._replace(
        history=None if spec.history is None else spec.history + guesses,
        suppress=() if may_stop else spec.suppress,
    )
