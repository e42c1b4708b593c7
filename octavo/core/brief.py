"""Steps in brief: what nobody looks at in a step is not made.

Most rows of most steps carry one token and want the next one, for as long as their sequence lives.
A driver that computes nothing (the simulator) knows what is chosen there, so it needs neither the
row nor its result: `InBrief` plans as any scheduler does and then says which sequences these are.
All other rows are spelt out. What is left behind is bit for bit what `Scheduler` leaves.

Like a stretch it writes what the scheduler keeps to itself: it belongs to the same room.
"""

from __future__ import annotations

from typing import Any

from octavo.core.batch import Batch, Row, RowResult, StepResult
from octavo.core.drafter import NoDrafter
from octavo.core.request import Event, Sequence
from octavo.core.scheduler import ONE, Plan, Scheduler
from octavo.core.steptime import StepFeatures


class Brief(Batch):
    """A batch whose rows are made when they are asked for, which must be before it comes back.

    seqs: of its rows, in their order. spelt: those rows that are more than one token of a stream,
    by sequence id. shape: of the step.
    """

    __slots__ = ("seqs", "shape", "spelt")

    seqs: list[Sequence]
    spelt: dict[int, Row]
    shape: StepFeatures

    def __init__(self, step: int, seqs: list[Sequence], spelt: dict[int, Row]) -> None:
        for name, value in (("step", step), ("seqs", seqs), ("spelt", spelt)):
            object.__setattr__(self, name, value)

    def shaped(self, shape: StepFeatures | None) -> None:
        """As planned in that shape, or else as its rows say."""
        object.__setattr__(self, "shape", StepFeatures.of(self) if shape is None else shape)

    @property
    def rows(self) -> tuple[Row, ...]:  # type: ignore[override]
        return tuple([self.spelt.get(seq.id) or _row(seq) for seq in self.seqs])

    @property
    def ends(self) -> list[int]:
        """For each row that is not spelt out, the positions that it sees."""
        return [seq.num_scheduled for seq in self.seqs if seq.id not in self.spelt]


def _row(seq: Sequence) -> Row:
    start, end = seq.num_computed, seq.num_scheduled
    return Row(seq.id, start, seq.tokens[start:end], seq.block_table, seq.standing or ())


class InBrief(Scheduler):
    """A scheduler for who always chooses `token`. tells: whether each token of a stream is an
    event; if not, only first and last ones are, and what rows that are spelt out bring."""

    def __init__(self, *args: Any, token: int, tells: bool = True, **more: Any) -> None:
        super().__init__(*args, **more)
        self._chosen = RowResult((token,))
        self._tells = tells

    def _batch(self, plan: Plan) -> Batch | None:
        if not isinstance(self.drafter, NoDrafter):
            return super()._batch(plan)
        seqs: list[Sequence] = []
        others = []
        for seq, chunk in plan.chunks.items():
            seqs.append(seq)
            if chunk is ONE and seq.standing is not None:
                seq.num_scheduled += 1
            else:
                others.append((seq, chunk))
        spelt = {row.seq_id: row for row in self._rows(others, plan.now)}
        as_planned = len(spelt) == len(others)
        if not as_planned:  # some failed
            lost = {seq.id for seq, _ in others} - spelt.keys()
            seqs = [seq for seq in seqs if seq.id not in lost]
        if not seqs:
            return None
        self._step += 1
        batch = Brief(self._step, seqs, spelt)
        batch.shaped(plan.shape if as_planned and not plan.preempted else None)
        self._sent(plan, batch.shape)
        return batch

    def commit(self, batch: Batch, result: StepResult, now: float) -> list[Event]:
        """As any scheduler's; `result` has rows for what is spelt out."""
        if not isinstance(batch, Brief):
            return super().commit(batch, result, now)
        settler, roster, size = self._settler, self._roster, self.blocks.block_size
        seqs, spelt, chosen = batch.seqs, batch.spelt, self._chosen
        (token,), told = chosen.tokens, self._tells
        shape = settler.begin(batch, len(seqs), result, now)
        events = roster.take_news()
        gained = 0
        for seq in seqs:
            seq.num_steps += 1
            row = spelt.get(seq.id)
            if row is not None or seq.standing is None:
                gained += settler.settle(seq, row or _row(seq), result, events, now)
                continue
            seq.num_computed = new = seq.num_computed + 1
            if not new % size:
                roster.publish(seq, new - 1, new)
            gained += 1
            # Its first row was spelt out, so it has a first token, and this one does not stop it.
            if len(seq.tokens) + 1 >= seq.max_len:
                events.append(settler.take(seq, chosen, now))
                continue
            seq.due += seq.pace
            seq.tokens.append(token)
            if told:
                events.append(Event(seq.request.id, seq.choice, chosen.tokens))
        settler.count(shape, len(seqs), gained, 0, result.started, result.finished)
        self.witness(batch, result)
        return events
