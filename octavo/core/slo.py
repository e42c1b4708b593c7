"""Deadlines: which token is due when, how long a step may take, and who goes first.

A request's first token is due at arrival + ttft; token j after it at f + 0.97 tpot j, anchored at
the real first token f, because tpot is measured from there. Where only e2e is given the rest of it
is shared out over the expected output.

- A step may take 0.9 of the slack of the tightest stream (`SlackPace`); prefill gets a small share
  of the steps' time whatever the streams want, so nothing waits for ever. One that ends a prompt
  takes others besides only while they cost less than another step: its first token waits for them.
- Prefills go by least laxity: the latest time at which each must start (`Earliest`). One that
  cannot make it any more is relegated, not dropped: it is served from what the others leave and
  from a guaranteed share, shortest first with ageing, and promoted again should it become feasible.

Niyama/QoServe (arXiv 2503.22562) has the slack budget and the relegation; FairBatching and
SlidingServe the predicted step times.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from math import ceil, inf, log2

from octavo.core.policy import ALL, ByKey, House, Key, Loss, Offers, Order, Pace, Policy
from octavo.core.request import Request, Sequence, State
from octavo.core.steptime import StepFeatures

OWED = 1024.0  # most tokens that the relegated can be owed
GRAIN = 16  # tokens: chunks are multiples, but for the end of a prompt
BUCKET = 0.010  # seconds: deadlines closer than that are equal, and the longer cached prefix goes
STRICT = 0.97  # of tpot: the rest is for the last token's way out
SPEND = 0.9  # of the tightest stream's slack
MOST = 0.350  # seconds that a step may take when nobody is in a hurry
SAVEABLE = 32  # tokens in which a late stream must be able to catch up
SHARE = 0.05  # of time to prefill, of prefill to those whose promise is lost
DOUBLING = 2.0  # seconds of waiting that twice the work is worth, among those
TIER = 30.0  # seconds of waiting that a tier is worth, among those
CATCH_UP = 0.5  # of its pace: what a stream that was preempted may lose and make good
FINISHED = 10.0  # times what any step costs: how long one is made that ends a prompt
LEDGER = 0.050  # seconds: how finely the work that waits is summed


def first_due(request: Request, output_seconds: float) -> float:
    """When the first token is due; output_seconds: what the output will take after it."""
    slo = request.slo
    due = inf if slo.ttft is None else request.arrival + slo.ttft
    if slo.e2e is not None:
        due = min(due, request.arrival + max(slo.e2e - output_seconds, 0.1 * slo.e2e))
    return due


def pace_from(request: Request, now: float, expected: float) -> float:
    """Seconds between deadlines, once the first of about `expected` tokens is there at `now`."""
    slo = request.slo
    pace = inf if slo.tpot is None else STRICT * slo.tpot
    if slo.e2e is not None:
        left = request.arrival + slo.e2e - now
        pace = min(pace, max(STRICT * left / max(expected - 1.0, 1.0), 1e-4))
    return pace


class Earliest:
    """Those that can still make it, by when they are due; then those that cannot."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._hopeful = ByKey()
        self._relegated = ByKey()
        self._credit = 0.0  # tokens that the relegated are owed
        self._turn = 0
        self._ledger: dict[float, float] = {}  # seconds of work by when it is due; inf: if ever
        self._changes = 0  # of the ledger
        self._line: tuple[int, list[tuple[float, float]]] = (0, [])  # it in order, after so many
        self._total = 0.0  # of the ledger
        self._entries: dict[int, tuple[float, float]] = {}
        self._dated = 0  # of these, not at inf
        self._missed: set[int] = set()  # of those that wait, who had a deadline and lost it

    # ---- keys ----

    def _work(self, seq: Sequence) -> tuple[float, float, int]:
        """(when it is due, seconds of its work, tokens of its work)."""
        house = self._house
        count = house.left(seq)
        seconds = house.prefill_seconds(len(seq.tokens) - count, count)
        due = seq.due
        if seq.first_token is not None:  # preempted: it may fall behind by what it can catch up
            due += CATCH_UP * min(seq.pace, 1.0) * house.reserve.expected(seq)
        return due, seconds, count

    def _lost(self, due: float, seconds: float, now: float) -> bool:
        """Whether it cannot be there in time, or nobody asked when it is."""
        return due == inf or now + self._house.model.gamma * seconds > due

    def _hopeless_key(self, seq: Sequence, count: int) -> Key:
        request = seq.request
        aged = request.arrival + DOUBLING * log2(max(1, count)) + TIER * request.tier
        return aged, seq.arrival_index

    def push(self, seq: Sequence, now: float) -> None:
        due, seconds, count = self._work(seq)
        seq.late = self._lost(due, seconds, now)
        if seq.late:
            self._enter(seq, inf, seconds)
            if due < inf:
                self._missed.add(seq.id)
            self._relegated.push(self._hopeless_key(seq, count), seq)
        else:
            self._enter(seq, due, seconds)
            cached = len(seq.tokens) - count
            self._hopeful.push((int(due / BUCKET), -cached, seq.arrival_index), seq)

    def _head(self, now: float) -> tuple[float, Sequence] | None:
        """The hopeful one that is due first, and when; those that are lost by now move over."""
        while (head := self._hopeful.head()) is not None:
            _, seq = head
            due, seconds, _ = self._work(seq)
            if not self._lost(due, seconds, now):
                return due, seq
            self.push(seq, now)
        return None

    def _reconsider(self, now: float) -> None:
        """Look at one of the relegated, in turn: it may have become feasible."""
        size = len(self._relegated)
        if size:
            self._turn = (self._turn + 1) % size
            seq = self._relegated[self._turn]
            if seq is not None and not self._lost(*self._work(seq)[:2], now):
                self.push(seq, now)

    def met(self, tenant: str, now: float) -> None:
        pass

    # ---- the step ----

    def candidates(self, started: list[Sequence], now: float) -> Offers:
        self._reconsider(now)
        hopeful, late = self._sorted(started, now)
        head = self._head(now)
        open_ = True
        if self._credit >= GRAIN and (hopeful or head):
            favoured = late[0] if late else self._relegated_head()
            if favoured is not None:
                full = self._credit >= OWED
                yield favoured, ALL if full else int(self._credit)
                # The others' turn waits for one that does not fit only after it has waited long.
                open_ = favoured.state is not State.WAITING or not full
        for due, seq in [*hopeful, (inf, None)]:
            while open_ and head is not None and head[0] < due:
                yield head[1], ALL
                open_ = head[1].state is not State.WAITING
                head = self._head(now)
            if seq is not None:
                yield seq, ALL
        for seq in late:
            yield seq, ALL
        while open_ and (last := self._relegated_head()) is not None:
            yield last, ALL
            open_ = last.state is not State.WAITING

    def _sorted(
        self, started: list[Sequence], now: float
    ) -> tuple[list[tuple[float, Sequence]], list[Sequence]]:
        """Of what was started: (due, sequence) in order of what can make it, and the others."""
        hopeful, late = [], []
        for seq in started:
            due, seconds, count = self._work(seq)
            seq.late = self._lost(due, seconds, now)
            if seq.late:
                late.append((self._hopeless_key(seq, count), seq))
            else:
                hopeful.append((due, seq.id, seq))
        hopeful.sort()
        late.sort(key=lambda entry: entry[0])
        return [(due, seq) for due, _, seq in hopeful], [seq for _, seq in late]

    def _relegated_head(self) -> Sequence | None:
        head = self._relegated.head()
        return None if head is None else head[1]

    def only(self) -> Sequence | None:
        return None

    def served(self, seq: Sequence, start: int, tokens: int) -> None:
        self._strike(seq)
        if seq.late:
            self._credit = max(0.0, self._credit - tokens)
        else:
            self._credit = min(self._credit + SHARE * tokens, OWED)

    def decoded(self, seqs: Iterable[Sequence]) -> None:
        pass

    # ---- what waits, as seconds ----

    def _enter(self, seq: Sequence, due: float, seconds: float) -> None:
        self._strike(seq)
        bucket = _bucket(due)
        self._entries[seq.id] = (bucket, seconds)
        self._dated += bucket < inf
        self._ledger[bucket] = self._ledger.get(bucket, 0.0) + seconds
        self._total += seconds
        self._changes += 1

    def _strike(self, seq: Sequence) -> None:
        self._missed.discard(seq.id)
        entry = self._entries.pop(seq.id, None)
        if entry is not None:
            bucket, seconds = entry
            self._dated -= bucket < inf
            left = self._ledger[bucket] - seconds
            if left > 1e-9:
                self._ledger[bucket] = left
            else:
                del self._ledger[bucket]
            self._total = self._total - seconds if self._ledger else 0.0  # sums that round add up
            self._changes += 1

    def ahead(self, due: float, tenant: str, work: float) -> tuple[float, int]:
        if due == inf or not self._ledger:
            return self._total, self._dated
        last = _bucket(due)
        seconds = sum([s for bucket, s in self._ledger.copy().items() if bucket <= last])
        return seconds, self._dated

    def give_way(self, tenants: Collection[str], other: str) -> Collection[str]:
        return ()

    def backlog(self) -> list[tuple[float, float]]:
        # Most steps change nothing here. The door's thread asks, so what it keeps says of when it
        # is: a change meanwhile makes it old.
        changes, line = self._line
        if changes != self._changes:
            changes = self._changes
            line = sorted([(b * LEDGER, s) for b, s in self._ledger.copy().items()])
            self._line = changes, line
        return line.copy()

    @property
    def overdue(self) -> bool:
        return bool(self._missed)

    def tidy(self, num_waiting: int) -> None:
        self._hopeful.tidy(num_waiting)
        self._relegated.tidy(num_waiting)

    def ended(self, seq: Sequence) -> None:
        self._strike(seq)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._hopeful
        yield from self._relegated


def _bucket(due: float) -> float:
    return due if due == inf else due // LEDGER


def moving_at(streams: Collection[Sequence], pace: float) -> float:
    """Rows in the mean of steps that last as long as a pace, where a stream with a slower one
    stands still in between (`SlackPace`)."""
    return sum([min(1.0, pace / min(seq.pace, MOST)) for seq in streams])


class SlackPace:
    """A step may take most of the tightest stream's slack.

    tightest: seconds a token of the stream that wants most, among those that can be had at all.
    """

    def __init__(self, house: House) -> None:
        self._house = house
        self.tightest = self.soonest = inf
        self._budget = MOST
        self._decode = 0.0  # what the decodes take anyway
        self._allowed = MOST  # without the credit
        self._credit = 0.0  # seconds that prefill is owed
        self._owed = inf  # the most that it can be
        self._granted = False
        self._asked = False
        self._opened: Collection[Sequence] = ()
        self._uneven = False  # some of the decodes have to stand still now and then
        self._still: dict[Sequence, float] = {}  # who stands still, and since when
        self._resting = (inf, 0.0)  # a pace, and rows that do at it in the mean, in this step

    def open(self, decodes: Collection[Sequence], step: StepFeatures, now: float) -> None:
        self._granted = self._asked = self._uneven = False
        self._opened, self._resting = decodes, (inf, 0.0)
        self.tightest = self.soonest = slack = inf
        decode = 0.0
        if decodes:
            decode = self._seconds(step)
            paces, dues = [seq.pace for seq in decodes], [seq.due for seq in decodes]
            self.tightest, self.soonest = min(paces), min(dues)
            slack = self.soonest - now
            if self.tightest < decode:
                self._uneven = self._had_unevenly(step)
                if not self._uneven:
                    self.tightest = min([pace for pace in paces if pace >= decode], default=inf)
            if slack < decode:
                # Some are late. Those that cannot catch up any more are not waited for.
                soon, each = now + SAVEABLE * decode, zip(paces, dues, strict=True)
                within = [due for pace, due in each if due + SAVEABLE * pace > soon]
                slack = min(within, default=inf) - now
        self._decode = decode
        self._allowed = max(min(SPEND * slack, MOST), decode)
        self._budget = min(max(self._allowed, decode + self._credit), max(MOST, decode))

    def _had_unevenly(self, step: StepFeatures) -> bool:
        """Whether the tightest pace, which the door promised, is too tight for all that decode but
        not where those with slower ones stand still in between."""
        pace, decodes = self.tightest, self._opened
        rows = moving_at(decodes, pace)
        if rows == len(decodes):
            return False
        promised = any(seq.pace == pace and seq.request.predicted is not None for seq in decodes)
        context = rows * step.decode_context / step.decodes
        shape = StepFeatures(rows, context, 0.0, rows, rows)
        return promised and self._seconds(shape) <= pace

    def still(self, step: StepFeatures, now: float) -> Collection[Sequence]:
        """Of those that were promised a slower pace than the tightest, or none, as many have a
        token in a step as their paces ask for in the mean, those that are due first; or all, as
        long as that makes nobody late who can catch up."""
        since, self._still = self._still, {}
        if not self._uneven:
            return ()
        pace, over = self.tightest, now + self._decode
        soon = over - SAVEABLE * pace
        if not any(seq.pace == pace and soon < seq.due < over for seq in self._opened):
            return ()
        slower = [seq for seq in self._opened if min(seq.pace, MOST) > pace]
        many = ceil(moving_at(slower, pace))
        slower.sort(key=lambda seq: min(seq.due, since.get(seq, now) + MOST))
        self._still = {seq: since.get(seq, now) for seq in slower[many:]}
        return self._still

    def _seconds(self, step: StepFeatures) -> float:
        """Of a step, and of the pause before it, as far as nine in ten keep to it."""
        model = self._house.model
        return model.gamma * (model.predict(step) + model.gap)

    def joins(
        self, running: int, tenant: str, pace: float = inf, reading: Collection[Sequence] = ()
    ) -> bool:
        """Whether the streams can bear one more beside so many that run; and that pace does, of
        ones to come, if it bears the others once those that read their prompts stream."""
        if self.tightest < inf and not self._bears(running + 1, self.tightest, ()):
            return False
        if pace >= self.tightest or not self._bears(running, pace, reading):
            return True
        return self._bears(running + 1, pace, reading)

    def _bears(self, running: int, pace: float, reading: Collection[Sequence]) -> bool:
        """Whether steps of so many rows keep to a pace, with slower streams standing still."""
        rows = float(running)
        if self._seconds(StepFeatures(rows, 0.0, 0.0, rows, rows)) <= pace:
            return True
        known, resting = self._resting
        if known != pace:
            streams = {*self._opened, *self._still, *reading}
            resting = len(streams) - moving_at(streams, pace)
            self._resting = pace, resting
        rows -= resting
        return self._seconds(StepFeatures(rows, 0.0, 0.0, rows, rows)) <= pace

    def leaves(self, tenant: str) -> int:
        return 0

    def room(self, step: StepFeatures, start: int, tenant: str) -> int:
        self._asked = True
        model, budget = self._house.model, self._budget
        if step.sampled > step.decodes:  # a prompt ends here
            budget = min(budget, FINISHED * model.per_step)
        count = int(model.most_tokens(step, start, budget / model.gamma - model.gap))
        # Once a step, if prefill is owed it or nothing else moves: the least there is.
        if count < GRAIN and not self._granted and (not step.tokens or self._credit >= self._owed):
            self._granted = True
            return GRAIN
        return count

    def spare(self, step: StepFeatures) -> int:
        model = self._house.model
        return int(model.most_tokens(step, 0, self._allowed / model.gamma - model.gap))

    def close(self, step: StepFeatures) -> None:
        self._owe()
        if self._asked:  # nobody is owed what nobody wanted
            had = max(0.0, self._seconds(step) - self._decode)
            self._credit = min(max(0.0, self._credit + SHARE * self._decode - had), self._owed)

    def _owe(self) -> None:
        """Two chunks of the least size, or half of what the decodes take."""
        model = self._house.model
        self._owed = model.gamma * model.prefilling(0, 2 * GRAIN) + 0.5 * self._decode

    def alone(self, step: StepFeatures) -> None:
        self._asked, self._still = False, {}  # none stands still there
        self._decode = self._allowed = self._seconds(step)
        self._owe()


def least_missed(seq: Sequence, now: float, house: House) -> Loss:
    """Who loses least: a lower tier, then one whose promise is lost, then most slack, then what is
    soonest computed again."""
    slack = seq.due - now
    kept = 0.0 if slack < 0.0 or seq.due == inf else 1.0
    again = house.prefill_seconds(0, len(seq.tokens))
    return -float(seq.request.tier), kept, -round(min(slack, 1e6), 1), again, -seq.key[0]


def slo() -> Policy:
    """Deadlines first: least laxity, steps as long as the streams' slack."""

    def order(house: House) -> Order:
        return Earliest(house)

    def pace(house: House, order: Order) -> Pace:  # noqa: ARG001
        return SlackPace(house)

    return Policy("slo", order=order, pace=pace, loss=least_missed, timed=True, by_deadline=True)
