"""A step comes back: choices are appended, full blocks published, its cost is learned.

Rows without a draft gain at most one token. Of a draft the choices are taken one after another, as
if each had had a step of its own, for as long as the guess at each place is what was chosen there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from math import inf

from octavo.core.batch import Batch, Row, RowResult, StepResult, Want
from octavo.core.drafter import Drafter
from octavo.core.request import (
    NO_DRAFT,
    Event,
    FinishReason,
    Sequence,
    State,
    TokenLogprob,
    Watcher,
)
from octavo.core.reserve import Reserve
from octavo.core.roster import Roster
from octavo.core.slo import pace_from
from octavo.core.steptime import StepFeatures, StepModel, Took
from octavo.errors import EngineError, InvalidRequest

# A NamedTuple without the detour over its own __new__: a step makes one for each row.
_new = tuple.__new__
_MISSING = RowResult(error="missing")


class Settler:
    """Takes the results of the steps that went out, in the same order. shapes: of those steps."""

    def __init__(
        self, roster: Roster, model: StepModel, drafter: Drafter, reserve: Reserve
    ) -> None:
        self.drafter = drafter
        self.blocks = roster.blocks
        self.shapes: deque[StepFeatures] = deque()
        self._roster = roster
        self._stats = roster.stats
        self._reserve = reserve
        self._model = model
        self._committed = 0
        self._finished = inf  # when the last step ended, if there was more to do

    def commit(self, batch: Batch, result: StepResult, now: float) -> list[Event]:
        """Take the oldest outstanding batch's result; report what each choice gained.

        Raises EngineError if the result is not of that batch.
        """
        rows = len(batch.rows)
        shape = self.begin(batch, rows, result, now)
        events = self._roster.take_news()
        live, results, size = self._roster.live, result.rows, self.blocks.block_size
        gained = num_drafted = 0
        for row in batch.rows:
            seq_id, start, _, _, wants = row
            seq, res = live[seq_id], results.get(seq_id, _MISSING)
            chosen, logprobs, _, error, embedding = res
            seq.num_steps += 1
            if wants is not seq.standing or error is not None or len(chosen) != 1:
                num_drafted += len(seq.draft)
                gained += self.settle(seq, row, result, events, now)
                continue
            # What most rows are: one token in, the next one out, and the stream goes on.
            seq.num_computed = new = start + 1
            if not new % size:
                self._roster.publish(seq, start, new)
            gained += 1
            request, tokens, token = seq.request, seq.tokens, chosen[0]
            last = seq.first_token is None or len(tokens) + 1 >= seq.max_len
            if last or token in request.stop_ids:
                events.append(self.take(seq, res, now))
                continue
            seq.due += seq.pace
            tokens.append(token)
            told = None if request.params.logprobs is None else logprobs
            event = (
                request.id, seq.choice, chosen, told, None, None, None, seq.num_cached,
                seq.num_preemptions, seq.num_drafted, seq.num_accepted, embedding,
            )  # fmt: skip
            events.append(_new(Event, event))
        self.count(shape, rows, gained, num_drafted, result.started, result.finished)
        return events

    def begin(self, batch: Batch, rows: int, result: StepResult, now: float) -> StepFeatures:
        """The oldest outstanding batch, of so many rows, has come back; its shape. Raises
        EngineError if the result is not of that batch."""
        self._committed += 1
        if not batch.step == result.step == self._committed:
            raise EngineError(f"step {result.step} came back, {self._committed} was due")
        shape = self.shapes.popleft()
        self.note(rows, shape, result.finished - result.started, now)
        return shape

    def note(self, rows: int, shape: StepFeatures, seconds: float, now: float) -> None:
        """The step in the journal, before its sequences look there."""
        self._stats.journal.stepped(rows, shape.tokens, seconds, now)

    def settle(
        self, seq: Sequence, row: Row, result: StepResult, events: list[Event], now: float
    ) -> int:
        """Take what came back of a row of any kind; how many tokens its sequence gained."""
        so_far = len(events)
        self._settle(seq, row, result.rows.get(seq.id), events, now)
        return sum([len(event.tokens) for event in events[so_far:]])

    def _settle(
        self, seq: Sequence, row: Row, res: RowResult | None, events: list[Event], now: float
    ) -> None:
        """Take the result of a row of any kind, whatever became of its sequence meanwhile."""
        wants, drafted, size = row.outputs, len(seq.draft), self.blocks.block_size
        old, new = seq.num_computed, row.start + len(row.tokens) - drafted
        seq.num_computed = new
        if seq.state is State.ENDED:
            if new == seq.num_scheduled:
                self._roster.retire(seq)
            return
        fault = _fault(wants, res, drafted)
        if fault is not None or res is None:
            if drafted:
                self._forgo(seq, old)
            else:
                events.append(self._roster.fail(seq, fault or "no result", now))
            return
        seq.scores.extend(res.scores)
        if new // size > old // size:
            self._roster.publish(seq, old, new)
        if drafted:
            self._verify(seq, res, events, now)
        elif res.tokens:
            events.append(self.take(seq, res, now))

    def count(
        self,
        shape: StepFeatures,
        rows: int,
        gained: int,
        drafted: int,
        started: float,
        finished: float,
    ) -> None:
        """Keep the totals; learn the step's time, and how long the executor stood before it.

        gained: tokens that its sequences did; drafted: guesses among those computed.
        """
        counters, seconds, num_tokens = self._stats.counters, finished - started, int(shape.tokens)
        counters.steps += 1
        counters.rows += rows
        counters.outputs += int(shape.sampled)
        counters.computed_tokens += num_tokens
        counters.output_tokens += gained
        self._learn(shape, started, finished)
        self._finished = finished if self._roster.running else inf
        self.drafter.timed(rows, num_tokens, drafted, seconds)

    def _learn(self, shape: StepFeatures, started: float, finished: float) -> None:
        """How long a step took, and how long the executor stood before it."""
        self._stats.counters.busy_seconds += finished - started
        self._model.observe(shape, finished - started)
        if started >= self._finished:
            self._model.waited(started - self._finished)

    def passed(self, steps: Collection[Took]) -> None:
        """Steps of decodes alone went out and came back one behind the other (`stretch`)."""
        gained = 0
        for shape, started, finished in steps:
            gained += int(shape.tokens)
            self._learn(shape, started, finished)
            self._finished = finished
        counters = self._stats.counters
        counters.steps += len(steps)
        counters.rows += gained
        counters.outputs += gained
        counters.computed_tokens += gained
        counters.output_tokens += gained

    def skip(self, steps: int) -> None:
        """So many steps have passed that brought no results."""
        self._committed += steps
        if not self._roster.running:
            self._finished = inf

    def _verify(self, seq: Sequence, res: RowResult, events: list[Event], now: float) -> None:
        """Take the choices of a row with a draft while what they rest on turns out right.

        The choice after a guess was made as if the guess were the token before, under the mask
        that is due then. KV beyond the last right guess is not counted: it is written again.
        """
        draft, seq.draft = seq.draft, NO_DRAFT
        seq.num_drafted += len(draft)
        accepted = seq.num_accepted
        for i, token in enumerate(res.tokens):
            seq.num_accepted = accepted + i
            events.append(self.take(seq, RowResult((token,), res.logprobs[i : i + 1]), now))
            if i == len(draft) or token != draft[i] or seq.state is State.ENDED:
                break
            old = seq.num_computed
            seq.num_computed = seq.num_scheduled = old + 1
            if (old + 1) % self.blocks.block_size == 0:
                self._roster.publish(seq, old, old + 1)
        if seq.state is not State.ENDED:
            self.blocks.trim(seq, seq.num_scheduled)
        self._stats.drafted(len(draft), i)
        self.drafter.learn(seq, len(draft), i)

    def _forgo(self, seq: Sequence, computed: int) -> None:
        """A row with a draft failed, perhaps for the draft's sake: compute it again without one,
        and guess no more for this sequence."""
        self._stats.drafted(len(seq.draft), 0)
        seq.num_drafted += len(seq.draft)
        seq.draft, seq.may_draft = NO_DRAFT, False
        seq.num_computed = seq.num_scheduled = computed
        self.blocks.trim(seq, computed)

    def take(self, seq: Sequence, res: RowResult, now: float) -> Event:
        """Append the chosen token and see whether the sequence ends with it."""
        chosen, logprobs, _, _, embedding = res
        request, tokens, token = seq.request, seq.tokens, chosen[0]
        finish = prompt_logprobs = None
        if token in request.stop_ids and len(tokens) >= seq.stop_from:
            finish = FinishReason.STOP
        elif seq.watcher is not None:
            try:
                kept, finish = _advance(seq.watcher, chosen)
            except Exception as error:
                return self._roster.fail(seq, blamed(error), now)
            if not kept:
                chosen = logprobs = ()
        if seq.first_token is None:
            prompt_logprobs = self._first(seq, now)
        seq.due += seq.pace
        if chosen:
            tokens.append(token)
            if finish is None and len(tokens) >= seq.max_len:
                finish = FinishReason.LENGTH
        if finish is not None:
            self._roster.end(seq, finish, now)
        event = (
            request.id,
            seq.choice,
            chosen,
            None if request.params.logprobs is None else logprobs,
            prompt_logprobs,
            finish,
            None,
            seq.num_cached,
            seq.num_preemptions,
            seq.num_drafted,
            seq.num_accepted,
            embedding,
        )
        return _new(Event, event)

    def _first(self, seq: Sequence, now: float) -> tuple[TokenLogprob | None, ...] | None:
        """A sequence has its first token: its stream begins here. Returns its prompt's scores."""
        request = seq.request
        seq.first_token = seq.due = now
        seq.record.first = self._stats.journal.mark()
        self._roster.compare(request, now)
        if request.slo:
            expected = self._reserve.output(request.tenant, seq.max_len - seq.num_prompt)
            seq.pace = pace_from(request, now, expected)
        return (None, *seq.scores) if seq.scored else None


def blamed(error: Exception) -> str:
    """What is said of a sequence whose watcher raised: what it refuses is its request's affair."""
    return str(error) if isinstance(error, InvalidRequest) else f"watcher: {error!r}"


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
