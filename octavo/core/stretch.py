"""Steps that are all alike: whoever runs takes one token, and there is nothing to decide.

Most steps of a load that a server can bear are such, and what each of them leaves behind is known
beforehand but for when it ends. A driver that has nothing to compute (the simulator) takes them by
a `Stretch`: a few sums a step, and each sequence once at the end. What is left behind is bit for
bit what `schedule` and `commit` leave, step by step: the same tokens, blocks, counters, journal and
step model. What cannot be foreseen is no stretch: a prompt, a draft, a watcher, a preemption,
somebody in line who might join. Ends by length can.

Like a view it reads and writes what the scheduler keeps to itself: it belongs to the same room.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from octavo.core.drafter import NoDrafter
from octavo.core.history import Wait
from octavo.core.policy import Occupancy, to_nobody
from octavo.core.request import FinishReason, Sequence
from octavo.core.scheduler import Scheduler, unwatched
from octavo.core.steptime import StepFeatures, Took


class _Bar(NamedTuple):
    """Why nobody in line can join while nobody ends. need: blocks for the first of them, if it is
    for want of blocks; floor: how many must be free beside these at the beginning of a stretch;
    fade: by how much that falls with each step, at most."""

    why: Wait
    need: int = 0
    floor: float = inf
    fade: float = 0.0

    def holds(self, available: int, taken: int) -> bool:
        """Whether that is so still, after so many steps."""
        return available - self.need < max(0.0, self.floor - self.fade * taken)


class Stretch:
    """The coming steps of a scheduler, as long as they are alike: `foresee` says whether they are.

    seqs: who runs, by rank. most: steps until the next of them ends, that one included; 0 when the
    stretch is over. Take steps in order, then `close` once, before anything else is asked of the
    scheduler.
    """

    def __init__(
        self, scheduler: Scheduler, seqs: list[Sequence], token: int, bar: _Bar | None
    ) -> None:
        self.seqs = seqs
        self._scheduler = scheduler
        self._roster = scheduler._roster
        self._blocks = scheduler.blocks
        self._token = token
        self._bar = bar
        self._taken = 0
        self._untold: list[Took] = []  # of these, what journal, counters and step model miss
        self._expiry = self._roster.next_expiry  # nobody comes, so it stays
        self._shape: StepFeatures | None = None
        # With a slower one beside it, it may need others to stand still (`Pace.still`).
        paces = {seq.pace for seq in seqs} if scheduler.policy.timed else set()
        self._tightest = min(paces) if len(paces) > 1 else inf
        self._starts = [seq.num_scheduled for seq in seqs]
        self._lasts = [seq.max_len - len(seq.tokens) for seq in seqs]  # steps that each has left
        self._size = size = scheduler.blocks.block_size
        # By the step, modulo a block's size, that begins a block of theirs.
        self._fills: dict[int, list[Sequence]] = {}
        for seq, start in zip(seqs, self._starts, strict=True):
            self._fills.setdefault(-start % size, []).append(seq)
        self._measure()

    def _measure(self) -> None:
        """Of those that are left: how many, what they see in all, and when the next one ends."""
        self._shape = None
        self._rows = len(self.seqs)
        self._context = sum(self._starts) + self._rows
        self.most = min(self._lasts, default=self._taken) - self._taken

    @property
    def shape(self) -> StepFeatures:
        """Of the next step."""
        shape = self._shape
        if shape is None:
            rows = self._rows
            context = self._context + self._taken * rows
            shape = self._shape = StepFeatures(rows, context, 0.0, rows, rows)
        return shape

    @property
    def ends(self) -> list[int]:
        """For each row of the next step, the positions that it sees."""
        further = 1 + self._taken
        return [start + further for start in self._starts]

    def step(self, started: float, finished: float) -> bool:
        """Take the next step, which is filled and begun at `started`. False, and nothing is done,
        if it is not like the others: a deadline in the queue has passed, or blocks run out, or the
        first in line might have enough of them."""
        blocks, bar = self._blocks, self._bar
        fill = self._fills.get(self._taken % self._size, ())
        left = blocks.num_available - len(fill)
        if left < 0 or self._expiry <= started:
            return False
        if bar is not None and not bar.holds(left, self._taken):
            return False
        if self._tightest < inf:
            self._tell()  # what the model learned from the steps before decides
            if self._tightest < self._longest(self.shape):
                return False
        for seq in fill:
            blocks.add(seq)
        self._untold.append((self.shape, started, finished))
        self._taken += 1
        self._shape = None
        self.most -= 1
        if blocks.prefix_caching:
            for seq in self._fills.get(self._taken % self._size, ()):
                self._publish(seq)
        if not self.most:
            self._end(finished)
        return True

    def _longest(self, shape: StepFeatures) -> float:
        """Seconds of a step, as the pace reckons."""
        model = self._scheduler.model
        return model.gamma * (model.predict(shape) + model.gap)

    def _publish(self, seq: Sequence) -> None:
        """Its last block is full: the tokens in it are due now."""
        new = len(seq.block_table) * self._size
        seq.tokens.extend([self._token] * (new - len(seq.tokens)))
        self._roster.publish(seq, new - 1, new)

    def _end(self, now: float) -> None:
        """Some have all their tokens; the stretch goes on with the others, if nobody may join."""
        self._tell()
        size, left, starts, lasts = self._size, [], [], []
        for seq, start, last in zip(self.seqs, self._starts, self._lasts, strict=True):
            if last > self._taken:
                left.append(seq)
                starts.append(start)
                lasts.append(last)
            else:
                self._fills[-start % size].remove(seq)
                self._bring(seq, start)
                self._roster.end(seq, FinishReason.LENGTH, now)
        self.seqs, self._starts, self._lasts = left, starts, lasts
        self._measure()
        if left and self._roster.num_waiting:
            self._bar = _barred(self._scheduler)
            self.most = self.most if self._bar is not None else 0

    def _tell(self) -> None:
        """Whoever keeps sums of steps is told of those since the last time: before somebody ends,
        or the step model is asked, nobody reads them."""
        steps, self._untold = self._untold, []
        if not steps:
            return
        scheduler, roster, rows = self._scheduler, self._roster, self._rows
        shape, roster.now, _ = steps[-1]
        roster.stats.journal.passed(steps, None if self._bar is None else self._bar.why)
        for _ in steps:
            scheduler._order.decoded(self.seqs)
        # Each step would overwrite what the one before it left there, as the model was before it.
        scheduler._settler.passed(steps[:-1])
        scheduler._pace.alone(shape)
        scheduler._mean_context = (shape.decode_context - rows) / rows
        scheduler._settler.passed(steps[-1:])

    def _bring(self, seq: Sequence, start: int) -> None:
        """A sequence to where the latest step left it."""
        taken, due, pace = self._taken, seq.due, seq.pace
        seq.num_steps += taken
        seq.num_computed = seq.num_scheduled = end = start + taken
        seq.tokens.extend([self._token] * (end + 1 - len(seq.tokens)))
        if pace != inf or due != inf:
            for _ in range(taken):  # not by a product: that would be another float
                due += pace
            seq.due = due

    def close(self) -> None:
        """All sequences are where the latest step left them."""
        if not self._taken:
            return
        self._tell()
        for seq, start in zip(self.seqs, self._starts, strict=True):
            self._bring(seq, start)
        self._scheduler._skip(self._taken)
        self._scheduler._settler.skip(self._taken)


def foresee(scheduler: Scheduler, token: int) -> Stretch | None:
    """The coming steps, if they are alike, given that whatever is chosen in them is `token`.

    Nothing may be outstanding. None if anything may have to be decided in the very next step.
    """
    roster = scheduler._roster
    seqs, capacity = roster.running, scheduler.capacity
    rows = len(seqs)
    room = min(capacity.max_rows, capacity.max_tokens, capacity.max_outputs)
    if not 0 < rows <= room or capacity.depth > 1 or roster.news or roster.held:
        return None
    if not isinstance(scheduler.drafter, NoDrafter) or scheduler.witness is not unwatched:
        return None
    if not _plain(seqs[-1], token):  # most often it is the latest whose prompt is being read
        return None
    bar = _barred(scheduler) if roster.num_waiting else None
    if roster.num_waiting and not (bar and bar.holds(scheduler.blocks.num_available, 0)):
        return None
    if scheduler.policy.moving(seqs) < rows or not all(_plain(seq, token) for seq in seqs):
        return None
    return Stretch(scheduler, list(seqs), token, bar)


def _plain(seq: Sequence, token: int) -> bool:
    """Whether it takes one token a step, and only its length will end it."""
    length, request = len(seq.tokens), seq.request
    if length - seq.num_scheduled != 1 or seq.num_computed != seq.num_scheduled or seq.draft:
        return False
    free = seq.watcher is None and not seq.penalised and not seq.scored
    # It has a first token: what that brings is not for a stretch.
    begun = seq.first_token is not None and length >= seq.stop_from
    return free and begun and token not in request.stop_ids and request.params.logprobs is None


def _barred(scheduler: Scheduler) -> _Bar | None:
    """Why nobody of those in line can join as long as nobody ends; None if somebody might, or if
    that is for time to say."""
    roster, capacity, policy = scheduler._roster, scheduler.capacity, scheduler.policy
    rows = len(roster.running)
    if rows == capacity.max_rows or rows == capacity.max_tokens:
        return _Bar(Wait.ROWS if rows == capacity.max_rows else Wait.TOKENS)
    first = roster.order.only()
    moves = policy.timed or policy.yields is not to_nobody or scheduler.blocks.prefix_caching
    if first is None or moves or rows == capacity.max_outputs:
        return None
    if not policy.admits(first, Occupancy(rows, capacity.max_rows, roster.seats, roster.opened)):
        return _Bar(Wait.GROUP)
    reserve, size = scheduler.reserve, scheduler.blocks.block_size
    need, most = scheduler.blocks.blocks_for(len(first.tokens)), reserve.most_growth(rows, size)
    if scheduler.blocks.num_available - need >= most:
        return None
    # With each step all that run have a token less to write; a little more, for the sums round.
    kept = reserve.growth(roster.running, size) - 1e-6
    return _Bar(Wait.BLOCKS, need, min(kept, most), reserve.rho * rows / size)
