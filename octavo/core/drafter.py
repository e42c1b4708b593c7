"""Guesses of the next tokens, for the model to check: speculation by prompt lookup (n-grams).

A drafter offers tokens for rows that are ready to go out; the scheduler appends them with one
sample `Want` each and at commit keeps those that equal what the sampler chose there. So a drafter
can make a stream faster or slower, and never different. Prompt lookup (Saxena 2023) finds the
latest earlier place in the sequence's own tokens that ends like it, and offers what followed.

How many tokens are offered is decided by what they cost and by how often such guesses held:

- The price of one more token in a step, as a share of the step, is learned from the steps' own
  times: on a CPU bound by memory the first few are cheap, and in a large batch none is.
- A sequence keeps how often guesses that rested on n equal tokens held, lately. A token is offered
  while its chance, times what a step yields, is worth its price.
- Whatever the guesses, every sequence in a step has an account, in steps. It gains SHARE a step and
  one for each accepted token of its own; it pays the price of every draft in its step, its own or
  not; and no step drafts more than its poorest sequence can pay. So a stream whose neighbours'
  drafts bring it nothing is slowed by SHARE and START steps at most, as far as the price is right.

Pure Python over token ids; no tensors, no clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from itertools import islice
from typing import Protocol

from octavo.core.batch import Row
from octavo.core.request import Sequence

SHARE = 0.01  # of its time that a stream may spend on guesses
START = 0.25  # steps that a stream may spend before it has earned any
CAP = 8.0  # steps that a stream may save up
INDEX_TOKENS = 2048  # most tokens of a sequence indexed in one step

Offer = tuple[int, "array[int]"]


class Drafter(Protocol):
    """Offers drafts; told what became of them. It may write `Sequence.notes`, nothing else."""

    def drafts(self, rows: Seq[Row], live: Mapping[int, Sequence], room: int) -> Iterable[Offer]:
        """(number of the row, tokens that may follow its last one), for some of the step's rows.

        live: sequences by id. room: drafted tokens that fit into the step.
        """
        ...

    def learn(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """`accepted` of the tokens drafted for `seq` held."""
        ...

    def timed(self, tokens: int, outputs: int, seconds: float) -> None:
        """A step of so many tokens and wanted outputs took so long."""
        ...


class NoDrafter:
    """Never guesses."""

    def drafts(self, rows: Seq[Row], live: Mapping[int, Sequence], room: int) -> Iterable[Offer]:
        return ()

    def learn(self, seq: Sequence, drafted: int, accepted: int) -> None:
        pass

    def timed(self, tokens: int, outputs: int, seconds: float) -> None:
        pass


class StepPrice:
    """What a token more costs, from the times of decode steps: a line through (tokens, seconds),
    old ones forgotten, leaning on a first belief while all steps have the same size.

    The belief: a step costs as much as FIXED tokens before its first.
    """

    FIXED = 4.0
    FORGET = 0.98
    LEAN = 2.0  # tokens squared: how much spread outweighs the belief

    __slots__ = ("_seen", "_spread", "_together", "seconds", "tokens")

    def __init__(self) -> None:
        self.tokens = 1.0  # means
        self.seconds = 0.0
        self._seen = self._spread = self._together = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """A step; one that took absurdly long (the machine was busy) counts as three."""
        if not self._seen:
            self._seen, self.tokens, self.seconds = 1.0, float(tokens), seconds
            return
        seconds = min(seconds, 3.0 * self.line(tokens))
        keep = self.FORGET
        self._seen = keep * self._seen + 1.0
        dx, dy = tokens - self.tokens, seconds - self.seconds
        self.tokens += dx / self._seen
        self.seconds += dy / self._seen
        self._spread = keep * self._spread + dx * (tokens - self.tokens)
        self._together = keep * self._together + dx * (seconds - self.seconds)

    @property
    def slope(self) -> float:
        """Seconds a token."""
        believed = self.seconds / (self.FIXED + self.tokens)
        slope = (self._together + self.LEAN * believed) / (self._spread + self.LEAN)
        return max(slope, 0.1 * believed)

    def line(self, tokens: int) -> float:
        """Seconds of a step of so many tokens, never less than a tenth of the mean."""
        return max(0.1 * self.seconds, self.seconds + self.slope * (tokens - self.tokens))

    def of_one(self, tokens: int) -> float:
        """A token more in a step of so many, as a share of that step."""
        if not self.seconds:
            return 1.0 / (self.FIXED + tokens)
        return self.slope / self.line(tokens)


class _Notes:
    """What prompt lookup knows of a sequence: where its n-grams last ended, its account, and how
    often guesses held that rested on n tokens (the chance that the next token is right)."""

    PRIOR = 2.0  # trials that the first belief counts as: n of n + 1 hold
    FADE = 0.92  # of old trials with each new one
    HOPE = 0.97  # of old failures with each chance let pass

    __slots__ = ("account", "failed", "found", "held", "indexed", "where")

    def __init__(self, max_ngram: int) -> None:
        self.account = START
        self.held = [0.0] * (max_ngram + 1)
        self.failed = [0.0] * (max_ngram + 1)
        self.where: dict[bytes, int] = {}  # int32 tokens: where they ended
        self.indexed = 0
        self.found = 0

    def chance(self, n: int) -> float:
        held = self.held[n] + self.PRIOR * n / (n + 1)
        return held / (self.held[n] + self.failed[n] + self.PRIOR)

    def trial(self, n: int, held: int, failed: int) -> None:
        self.held[n] = self.FADE * self.held[n] + held
        self.failed[n] = self.FADE * self.failed[n] + failed


class PromptLookup:
    """Drafts of at most max_draft tokens that rest on max_ngram down to min_ngram equal ones."""

    def __init__(self, max_ngram: int = 4, min_ngram: int = 2, max_draft: int = 15) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"1 <= min_ngram <= max_ngram, got {min_ngram} and {max_ngram}")
        if max_draft < 1:
            raise ValueError(f"max_draft must be at least 1, got {max_draft}")
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram
        self.max_draft = max_draft
        self.price = StepPrice()

    def drafts(self, rows: Seq[Row], live: Mapping[int, Sequence], room: int) -> Iterable[Offer]:
        price = self.price.of_one(len(rows))
        purse = CAP
        for row in rows:
            if len(row.outputs) != len(row.tokens):
                return ()  # prompts are read in this step: it is bound by arithmetic
            notes = self._notes(live[row.seq_id])
            notes.account = min(CAP, notes.account + SHARE)
            purse = min(purse, notes.account)
        room = min(room, int(purse / price))
        # Not even a guess that is sure to hold would pay.
        if room < 1 or price * len(rows) >= 1.0:
            return ()
        offers = self._worth(self._candidates(rows, live), price, len(rows), room)
        spent = price * sum(len(draft) for _, draft in offers)
        if spent:
            for row in rows:
                self._notes(live[row.seq_id]).account -= spent
        return offers

    def learn(self, seq: Sequence, drafted: int, accepted: int) -> None:
        notes = self._notes(seq)
        notes.account = min(CAP, notes.account + accepted)
        notes.trial(notes.found, accepted, int(accepted < drafted))

    def timed(self, tokens: int, outputs: int, seconds: float) -> None:
        if tokens == outputs:
            self.price.add(tokens, seconds)

    def lookup(self, seq: Sequence, most: int) -> tuple[int, array[int]]:
        """(n, the at most `most` tokens after the latest earlier place with the same last n ones);
        (0, none) if there is no such place. Where it runs into the end it goes on in a circle."""
        tokens, notes = seq.tokens, self._notes(seq)
        end = len(tokens)
        self._index(notes, tokens)
        for n in range(min(self.max_ngram, end - 1), self.min_ngram - 1, -1):
            at = notes.where.get(tokens[end - n :].tobytes())
            if at is not None:
                draft = tokens[at : at + most]
                while len(draft) < most:
                    draft.extend(draft[: most - len(draft)])
                return n, draft
        return 0, tokens[:0]

    def _index(self, notes: _Notes, tokens: array[int]) -> None:
        """Note the n-grams that have a next token and are not noted yet: later ones win.

        A long prompt takes several calls, or one step would be late (about 1 us a token).
        """
        where, first = notes.where, notes.indexed
        end = min(len(tokens), first + INDEX_TOKENS)
        for n in range(self.min_ngram, self.max_ngram + 1):
            begin = max(first, n)  # n-grams end at begin .. end - 1
            raw, size = tokens[begin - n : end].tobytes(), tokens.itemsize
            for at in range(begin, end):
                i = (at - begin) * size
                where[raw[i : i + n * size]] = at
        notes.indexed = end

    def _candidates(
        self, rows: Seq[Row], live: Mapping[int, Sequence]
    ) -> list[tuple[float, int, array[int]]]:
        """(chance a token, number of the row, tokens) of all rows that have any.

        The poorest comes first: until it has earned something, nobody can draft much.
        """
        found = []
        for i, row in enumerate(rows):
            seq, last = live[row.seq_id], row.outputs[-1]
            if not seq.may_draft or last.sample is None or last.mask is not None:
                continue
            n, draft = self.lookup(seq, self.max_draft)
            draft = _before(draft, seq.request.stop_ids)
            if draft:
                notes = self._notes(seq)
                notes.found = n
                notes.failed[n] *= notes.HOPE
                found.append((notes.account, notes.chance(n), i, draft))
        found.sort(key=lambda one: one[0])
        return [one[1:] for one in found]

    @staticmethod
    def _worth(
        candidates: Seq[tuple[float, int, array[int]]], price: float, rows: int, room: int
    ) -> list[Offer]:
        """Cut drafts where the step would yield fewer tokens a second with a token more, and to
        equal shares of the room."""
        offers, tokens, count = [], float(rows), 0
        share = -(-room // max(1, len(candidates)))
        for chance, i, draft in candidates:
            own, holds = 0, chance
            while own < min(len(draft), share) and count < room:
                if holds * (1.0 + price * count) <= price * tokens:
                    break
                tokens += holds
                holds *= chance
                own += 1
                count += 1
            if own:
                offers.append((i, draft[:own]))
        return offers

    def _notes(self, seq: Sequence) -> _Notes:
        notes = seq.notes
        if not isinstance(notes, _Notes):
            notes = seq.notes = _Notes(self.max_ngram)
        return notes


def _before(draft: array[int], stop_ids: frozenset[int]) -> array[int]:
    """What stands before the first stop id: nothing after it would be kept."""
    if stop_ids.isdisjoint(draft):
        return draft
    end = next(i for i, token in enumerate(draft) if token in stop_ids)
    return array("i", islice(draft, end))
