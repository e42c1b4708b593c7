"""Guesses of the next tokens, for the model to check: speculation by prompt lookup (n-grams).

A drafter offers tokens for rows that are ready to go out; the scheduler appends them with one
sample `Want` each and at commit keeps those that equal what the sampler chose there. So a drafter
can make a stream faster or slower, and never different. Prompt lookup (Saxena 2023) finds an
earlier place in the sequence's own tokens, or in the text that its caller predicted, that agrees
with its end, and offers what followed there; what a grammar forces comes first.

How many tokens are offered is decided by what they cost and by how often such guesses held:

- The price of a draft, as a share of a step, is measured: what steps with drafts took, against
  plain steps of the same rows. On a CPU bound by memory the first few are cheap, and in a large
  batch none is. Until it is measured it is believed to be what FIXED says.
- A guess that rests on n equal tokens is as likely to hold as such guesses were lately, in this
  sequence and before. The step gets the draft with the most expected tokens a second.
- Whatever the guesses, every sequence has an account, in seconds. It gains SHARE of all time since
  its first step, and the time of a step for each accepted token of its own; it pays what every
  draft made steps longer by, its own or not, as measured. No step drafts more than its poorest
  sequence can pay. So a stream to which guesses bring nothing is slowed by SHARE of its time and
  START of a step, and by what one step's price was underestimated.
- Searching is not on the account; it takes a few us a sequence, less often where it leads nowhere.

Pure Python over token ids; no tensors, no clock: it is told what steps took.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from heapq import heapify, heappop, heappush
from typing import Protocol

from octavo.core.batch import Row
from octavo.core.ngrams import LONGEST, Trail
from octavo.core.request import NO_DRAFT, Sequence

SHARE = 0.01  # of its time that a stream may spend on guesses
START = 0.25  # steps that a stream may spend before it has earned any
CAP = 8.0  # steps that a stream may save up
MARGIN = 0.02  # of speed that a draft must promise
MAX_DRAFT = 15
PATIENCE = 4  # fruitless searches after which a sequence is searched less often
REST = 3  # steps without a search, at most

Offer = tuple[int, "array[int]"]


class Drafter(Protocol):
    """Offers drafts; told what became of them. It may write `Sequence.notes`, nothing else."""

    def drafts(self, rows: Seq[Row], live: Mapping[int, Sequence], room: int) -> Iterable[Offer]:
        """(number of the row, tokens that may follow its last one), for some of the step's rows.

        live: sequences by id. room: drafted tokens that fit into the step.
        """
        ...

    def learn(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """`accepted` of the tokens drafted for `seq` held. Comes before the step's `timed`."""
        ...

    def timed(self, rows: int, tokens: int, drafted: int, seconds: float) -> None:
        """A step of so many rows and tokens, so many of them drafted, took so long."""
        ...


class NoDrafter:
    """Never guesses."""

    def drafts(self, rows: Seq[Row], live: Mapping[int, Sequence], room: int) -> Iterable[Offer]:
        return ()

    def learn(self, seq: Sequence, drafted: int, accepted: int) -> None:
        pass

    def timed(self, rows: int, tokens: int, drafted: int, seconds: float) -> None:
        pass


class StepTimes:
    """What a plain decode step of the rows of the moment takes, and what drafts add to it.

    plain: seconds, the median of the last few; 0 while there was none since the rows changed, or
    none for long. Prices are kept by size (of the batch and of the draft, in powers of two) as
    factors on a belief: that a step costs as much as FIXED tokens before its first.
    """

    FIXED = 6.0
    RECENT = 5
    STALE = 64  # drafted steps in a row after which a plain one is due
    SLOWEST = 0.1  # weight of a sample when there were many

    __slots__ = ("_factors", "_recent", "_rows", "_since", "plain")

    def __init__(self) -> None:
        self.plain = 0.0
        self._rows = 0
        self._recent: list[float] = []
        self._since = 0
        self._factors: dict[tuple[int, int], tuple[float, float]] = {}  # factor, samples

    def renew(self) -> None:
        """The rows are others now: what their steps take is not known."""
        self._recent.clear()
        self.plain = 0.0

    def stands(self, rows: int) -> bool:
        """Whether `plain` is known for so many rows, and fresh."""
        return self.plain > 0.0 and rows == self._rows and self._since < self.STALE

    def price(self, rows: int, drafted: int) -> float:
        """What a draft adds to a step of so many rows, as a share of it."""
        return drafted / (self.FIXED + rows) * self._factor(rows, drafted)

    def _factor(self, rows: int, drafted: int) -> float:
        """That of the nearest size of which there is one, smaller ones first."""
        size, wanted = (rows - 1).bit_length(), drafted.bit_length()
        for near in (*range(wanted, 0, -1), *range(wanted + 1, 8)):
            known = self._factors.get((size, near))
            if known is not None:
                return known[0]
        return 1.0

    def add(self, rows: int, drafted: int, seconds: float) -> float:
        """A decode step; returns the seconds that its draft cost.

        A step that was held up by something else (a busy machine) must not count for more than one.
        """
        if drafted:
            self._since += 1
            if rows != self._rows or not self.plain:
                return 0.0
            believed = drafted / (self.FIXED + rows)
            extra = min(max(0.0, seconds / self.plain - 1.0), believed + 1.0)
            key = (rows - 1).bit_length(), drafted.bit_length()
            factor, samples = self._factors.get(key, (self._factor(rows, drafted), 1.0))
            weight = max(self.SLOWEST, 1.0 / (samples + 1.0))
            factor += weight * (extra / believed - factor)
            self._factors[key] = max(factor, 0.05), samples + 1.0
            return extra * self.plain
        if rows != self._rows:
            self.renew()
        self._rows, self._since = rows, 0
        recent = self._recent
        recent.append(seconds)
        del recent[: -self.RECENT]
        self.plain = sorted(recent)[len(recent) // 2]
        return 0.0


class Odds:
    """How often guesses held that rested on n tokens, lately; sorted by the magnitude of n.

    base: the odds of all sequences, from which one of its own starts.
    """

    FIRST = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9)  # believed at first, by n.bit_length()
    PRIOR = 2.0  # trials that a belief counts as
    HOPE = 0.97  # of old failures with each chance let pass

    __slots__ = ("_base", "_fade", "_failed", "_held")

    def __init__(self, base: Odds | None = None) -> None:
        self._base = base
        self._fade = 0.92 if base is not None else 0.99  # of old trials with each new one
        self._held = [0.0] * len(self.FIRST)
        self._failed = [0.0] * len(self.FIRST)

    def chance(self, n: int) -> float:
        """That the token after n equal ones is the next."""
        return self._chance(min(n, LONGEST).bit_length())

    def _chance(self, level: int) -> float:
        belief = self.FIRST[level] if self._base is None else self._base._chance(level)
        held = self._held[level] + self.PRIOR * belief
        return held / (self._held[level] + self._failed[level] + self.PRIOR)

    def tried(self, n: int, held: bool) -> None:
        level = min(n, LONGEST).bit_length()
        self._held[level] = self._fade * self._held[level] + held
        self._failed[level] = self._fade * self._failed[level] + (not held)
        if self._base is not None:
            self._base.tried(n, held)

    def passed(self, n: int) -> None:
        """A chance to guess was let pass: what failed may hold again."""
        self._failed[min(n, LONGEST).bit_length()] *= self.HOPE


class _Notes:
    """What prompt lookup knows of a sequence. saved: its account, but for what all have in common
    (`PromptLookup._common`). found: on how many tokens its draft rests. fruitless: searches that
    led to no draft, in a row; rest: steps until the next one."""

    __slots__ = ("found", "fruitless", "odds", "rest", "saved", "trail")

    def __init__(self, seq: Sequence, odds: Odds, common: float) -> None:
        self.trail = Trail(_lead(seq))
        self.odds = Odds(odds)
        self.saved = -common
        self.found = 0
        self.fruitless = 0
        self.rest = 0

    def tire(self) -> None:
        """A search led to no draft."""
        self.fruitless += 1
        self.rest = min(REST, self.fruitless // PATIENCE)


class PromptLookup:
    """Drafts of at most max_draft tokens for a sequence."""

    def __init__(self, max_draft: int = MAX_DRAFT) -> None:
        if max_draft < 1:
            raise ValueError(f"max_draft must be at least 1, got {max_draft}")
        self.max_draft = max_draft
        self.times = StepTimes()
        self._odds = Odds()
        self._common = 0.0  # SHARE of all steps' seconds, less those that drafts cost

    def drafts(self, rows: Seq[Row], live: Mapping[int, Sequence], room: int) -> Iterable[Offer]:
        times, common, count = self.times, self._common, len(rows)
        most = CAP * times.plain
        purse, reading = most, False
        for row in rows:
            notes = live[row.seq_id].notes
            if not isinstance(notes, _Notes):
                notes = self._notes(live[row.seq_id])
            account = notes.saved + common
            if account < purse:
                purse = account
            elif account > most > 0.0:
                notes.saved = most - common
            reading = reading or len(row.outputs) != len(row.tokens)
        # A step that reads prompts is bound by arithmetic: there a draft costs like any token.
        if reading or not times.stands(count):
            return ()
        purse += START * times.plain
        # Not even a guess that is sure to hold would pay, or there is nothing to pay it with.
        price = times.price(count, 1)
        if price * count >= 1.0 or price * times.plain > purse:
            return ()
        return self._best(self._candidates(rows, live), count, purse / times.plain, room)

    def learn(self, seq: Sequence, drafted: int, accepted: int) -> None:
        notes = self._notes(seq)
        notes.saved += accepted * self.times.plain
        for i in range(min(accepted + 1, drafted)):
            notes.odds.tried(notes.found + i, i < accepted)

    def timed(self, rows: int, tokens: int, drafted: int, seconds: float) -> None:
        self._common += SHARE * seconds
        if tokens == rows + drafted:
            self._common -= self.times.add(rows, drafted, seconds)

    def lookup(self, seq: Sequence, most: int) -> tuple[int, array[int]]:
        """(n, at most `most` tokens that followed where the last n tokens stood before); (0, none)
        if they did not."""
        trail = self._notes(seq).trail
        trail.extend(seq.tokens)
        n, place = trail.search()
        return n, trail.following(place, most) if n else seq.tokens[:0]

    def _candidates(
        self, rows: Seq[Row], live: Mapping[int, Sequence]
    ) -> list[tuple[int, array[int], _Notes]]:
        """(number of the row, tokens, notes) of all rows that have any."""
        found = []
        for i, row in enumerate(rows):
            seq, last = live[row.seq_id], row.outputs[-1]
            if not seq.may_draft or last.sample is None:
                continue
            notes = self._notes(seq)
            forced = _forced(seq)[: self.max_draft]
            if forced:
                notes.found = LONGEST
                found.append((i, forced, notes))
                continue
            if notes.rest:
                notes.rest -= 1
                continue
            n, draft = self.lookup(seq, self.max_draft)
            draft = _before(draft, seq.request.stop_ids)
            if draft:
                notes.found = n
                found.append((i, draft, notes))
            else:
                notes.tire()
        return found

    def _best(
        self,
        found: Seq[tuple[int, array[int], _Notes]],
        rows: int,
        purse: float,
        room: int,
    ) -> list[Offer]:
        """The drafts with the most expected tokens a second, token by token in order of chance.

        purse: steps that they may cost together. Of guesses about as likely the poorest sequence's
        comes first: until it has earned something, nobody can draft much.
        """
        heap = []
        for k, (_, _, notes) in enumerate(found):
            chance = notes.odds.chance(notes.found)
            heap.append((-round(chance, 1), notes.saved, k, chance))
        heapify(heap)
        own, order = [0] * len(found), list[int]()
        tokens, cost, price = float(rows), 0.0, self.times.price
        best, rate = 0, tokens
        # The price may have steps, so look a little beyond where speed first falls.
        while heap and len(order) < min(room, best + 4):
            _, saved, k, chance = heappop(heap)
            cost = max(cost, price(rows, len(order) + 1))
            if cost > purse:
                break
            order.append(k)
            tokens += chance
            if tokens > rate * (1.0 + cost):
                best, rate = len(order), tokens / (1.0 + cost)
            own[k] += 1
            _, draft, notes = found[k]
            if own[k] < len(draft):
                chance *= notes.odds.chance(notes.found + own[k])
                heappush(heap, (-round(chance, 1), saved, k, chance))
        own = [0] * len(found)
        for k in order[:best] if rate > rows * (1.0 + MARGIN) else ():
            own[k] += 1
        offers = []
        for (i, draft, notes), length in zip(found, own, strict=True):
            if length:
                notes.fruitless = 0
                offers.append((i, draft[:length]))
            else:
                notes.odds.passed(notes.found)
                notes.tire()
        return offers

    def _notes(self, seq: Sequence) -> _Notes:
        notes = seq.notes
        if not isinstance(notes, _Notes):
            notes = seq.notes = _Notes(seq, self._odds, self._common)
            self.times.renew()
        return notes


def _forced(seq: Sequence) -> array[int]:
    """What a grammar leaves no choice about."""
    if seq.watcher is None:
        return NO_DRAFT
    try:
        return array("i", seq.watcher.forced())
    except Exception:
        return NO_DRAFT


def _lead(seq: Sequence) -> array[int]:
    """What the caller predicted, as if it had once followed the prompt's end."""
    request = seq.request
    return request.prompt[-LONGEST:] + request.prediction if request.prediction else array("i")


def _before(draft: array[int], stop_ids: frozenset[int]) -> array[int]:
    """What stands before the first stop id: nothing after it would be kept."""
    if stop_ids.isdisjoint(draft):
        return draft
    end = next(i for i, token in enumerate(draft) if token in stop_ids)
    return draft[:end]
