"""Fairness between tenants: virtual token counters (VTC, Sheng et al., OSDI 2024).

Each tenant has a counter of the service it got: prompt tokens computed for it (what the prefix
cache had costs nothing), and output tokens, which count double, over its weight. Next is always the
tenant with the least. A tenant that had nothing waiting is lifted to where the others are by now
(`entrance`), less a credit: who asks little and seldom has a burst served at once while others
flood, instead of at half the speed, and nobody saves up more than that. Two tenants that both
always have work waiting never get further apart than by
2 max(the longest prompt, 2 tokens for each token that a batch can hold), and the credit. One that
always has, among however many that were never here before, gets its part among those.

Which of a tenant's requests goes is up to another order, so `fair` goes with `slo`. Then paces are
shared out too: one tenant's streams never take all that paces bear (`spared`), nor does one that
asks for more than there is time for hold up another's prompts by the slack of its streams
(`FairPace`), nor fill all the time to a deadline at the door (`ahead`). And what the door promised
goes first, as it is due, among tenants that got about as little as the least (`_by_promise`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from heapq import heapify, heappop, heappush
from math import inf

from octavo.core.entrance import CREDIT, Entrance
from octavo.core.policy import ALL, House, Offers, Order, Pace, Policy, fcfs
from octavo.core.request import Sequence, State
from octavo.core.steptime import StepFeatures

PROMPT, OUTPUT = 1.0, 2.0  # what a token counts
FAR = CREDIT / 2.0  # tokens: less than that is nobody far ahead of anybody
EQUAL = 0.625 * CREDIT  # tokens: tenants within that got about as much as each other
SPARE = 8  # one row in so many is kept for other tenants, while there are any
BURST = 1.5  # times its part of the time that one who asks seldom may take, as it goes first
AGAIN = 2.0  # one that asked T ago asks again within T / AGAIN, as far as can be told
MEMORY = 60.0  # seconds after which a tenant that asked for nothing is not waited for
MAX_COUNTERS = 4096


class Fair:
    """An order for each tenant that has something waiting, and the turn of the tenants.

    A heap keeps the turn, that of equals as they came; counters only grow, so an entry that
    surfaces is brought up to date then.
    """

    def __init__(
        self, inner: Callable[[House], Order], house: House, weights: Mapping[str, float]
    ) -> None:
        self.counters: dict[str, float] = {}
        self._inner = inner
        self._house = house
        self._weights = weights
        self._orders: dict[str, Order] = {}
        self._entrance = Entrance(self.counters, weights)
        self._turn: list[tuple[float, int, str]] = []
        self._turns = 0
        self._seated: dict[str, set[int]] = {}
        self._promised: dict[str, set[int]] = {}  # of what waits, by tenant
        self._latest: tuple[tuple[str, float], tuple[str, float]] | None = None
        self._now = 0.0

    # ---- who waits ----

    def push(self, seq: Sequence, now: float) -> None:
        tenant, self._now = seq.request.tenant, now
        if seq.num_output:  # preempted: all but its latest token was charged
            seq.charged = len(seq.tokens) - 1
        _discard(self._seated, seq)
        self.met(tenant, now)
        order = self._orders.get(tenant)
        if order is None:
            counter = self._entrance.enter(tenant, self._orders)
            self._forget()
            self.counters[tenant] = counter
            order = self._orders[tenant] = self._inner(self._house)
            self._queue(counter, tenant)
        self._entrance.wait(tenant, seq.id)
        order.push(seq, now)
        if _is_promised(seq):
            self._promised.setdefault(tenant, set()).add(seq.id)

    def _queue(self, counter: float, tenant: str) -> None:
        self._turns += 1
        heappush(self._turn, (counter, self._turns, tenant))

    def met(self, tenant: str, now: float) -> None:
        """It asks. One pair is put in the place of another: two threads may both do so."""
        latest = self._latest
        if latest is None:
            self._latest = ((tenant, now), ("", -MEMORY - 1.0))
        elif latest[0][0] == tenant:
            self._latest = ((tenant, now), latest[1])
        else:
            self._latest = ((tenant, now), latest[0])

    def _forget(self) -> None:
        """Of too many that ask for nothing, those who got least are strangers again."""
        counters = self.counters
        if len(counters) >= MAX_COUNTERS:
            middle = sorted(counters.values())[MAX_COUNTERS // 2]
            for tenant, counter in list(counters.items()):
                idle = tenant not in self._entrance and tenant not in self._orders
                if idle and counter <= middle:
                    del counters[tenant]

    def _first(self) -> str | None:
        """The tenant with the least counter among those with something waiting."""
        turn, counters = self._turn, self.counters
        while turn:
            counter, _, tenant = turn[0]
            if tenant not in self._orders:
                heappop(turn)
            elif counter < counters[tenant]:
                heappop(turn)
                self._queue(counters[tenant], tenant)
            else:
                return tenant
        return None

    # ---- the step ----

    def candidates(self, started: list[Sequence], now: float) -> Offers:
        self._now = now
        mine: dict[str, list[Sequence]] = {}
        for seq in started:
            mine.setdefault(seq.request.tenant, []).append(seq)
        offers = _Looked(lambda tenant: self._offers(tenant, mine.get(tenant, []), now))
        # Tenants with started sequences that were not offered yet; not a set: whose turn it
        # is among equals must not depend on how strings hash.
        going = dict.fromkeys(mine)
        promised = [seq.request.tenant for seq in started if _is_promised(seq)]
        if promised or self._promised:
            least = self._next_turn(going, open_=True)
            far = EQUAL + (0.0 if least is None else self._counter(least))
            tenants = dict.fromkeys([*promised, *self._promised])
            yield from self._by_promise([t for t in tenants if self._counter(t) <= far], offers)
        open_ = True
        aside: list[tuple[float, int, str]] = []
        try:
            while (tenant := self._next_turn(going, open_)) is not None:
                offer = offers.take(tenant)
                if offer is None:
                    going.pop(tenant, None)
                    self._exhausted(tenant, aside)
                    continue
                seq, most = offer
                if seq.state is not State.WAITING:
                    yield offer
                elif open_ and self._may_sit(tenant):
                    yield offer
                    # If it did not fit, others must not either.
                    open_ = seq.state is not State.WAITING or most < ALL
        finally:
            for entry in aside:
                heappush(self._turn, entry)

    def _by_promise(self, tenants: Iterable[str], offers: _Looked) -> Offers:
        """Prompts that were promised a time and can be there by then, as they are due, of tenants
        that are about equal: so the door judged that they can (`ahead`), and by turns some could
        not. Once one may not sit down it is for the turns to say whether another may: a row may be
        left that is kept for others than its tenant."""
        line: list[tuple[float, int, str]] = []
        for tenant in tenants:
            offers.line_up(tenant, line)
        while line:
            _, _, tenant = heappop(line)
            offer = offers.look(tenant)
            assert offer is not None
            seq, _ = offer
            if seq.state is State.WAITING and not self._may_sit(tenant):
                continue
            yield offer
            if seq.state is State.WAITING:
                return
            offers.take(tenant)
            offers.line_up(tenant, line)

    def _next_turn(self, going: Collection[str], open_: bool) -> str | None:
        tenant = self._first() if open_ else None
        if going:
            other = min(going, key=self._counter)
            if tenant is None or self._counter(other) <= self.counters[tenant]:
                return other
        return tenant

    def _offers(self, tenant: str, started: list[Sequence], now: float) -> Offers:
        order = self._orders.get(tenant)
        if order is None:
            return ((seq, ALL) for seq in started)
        return order.candidates(started, now)

    def _exhausted(self, tenant: str, aside: list[tuple[float, int, str]]) -> None:
        """A tenant offers no more in this step: it has nothing waiting, or may not sit down."""
        order = self._orders.get(tenant)
        if order is None:
            return
        if next(iter(order), None) is None:
            self._emptied(tenant)
        elif self._turn and self._turn[0][2] == tenant:
            aside.append(heappop(self._turn))

    def _emptied(self, tenant: str) -> None:
        del self._orders[tenant]
        self._entrance.emptied(tenant)

    def _may_sit(self, tenant: str) -> bool:
        """Whether there is a row for one more of this tenant: a few are kept for others."""
        limit = self._house.capacity.max_rows * self._house.capacity.depth
        spare = max(1, limit // SPARE) if limit > 1 and self._beside(tenant) else 0
        return len(self._seated.get(tenant, ())) < limit - spare

    def spared(self, tenant: str, waiting: bool = False) -> int:
        """Rows that a tenant with as many as it has, with those that wait or without them, must
        leave to others: at least one, for paces that bear few would be borne by one tenant's."""
        rows = self._entrance.size(tenant) if waiting else len(self._seated.get(tenant, ()))
        return -(-rows // (SPARE - 1)) if self._beside(tenant) else 0

    def _beside(self, tenant: str) -> bool:
        """Whether another tenant asked for something of late."""
        return self._other(tenant) is not None

    def _other(self, tenant: str) -> tuple[str, float] | None:
        """The latest other tenant that asked for something of late, and when."""
        latest = self._latest
        if latest is None:
            return None
        other = latest[1] if latest[0][0] == tenant else latest[0]
        return other if self._now - other[1] <= MEMORY else None

    # ---- what it cost ----

    def _counter(self, tenant: str) -> float:
        return self.counters.get(tenant, 0.0)

    def _charge(self, tenant: str, cost: float) -> None:
        weight = self._weights.get(tenant, 1.0)
        self.counters[tenant] = self.counters.get(tenant, 0.0) + cost / weight

    def only(self) -> Sequence | None:
        return None

    def served(self, seq: Sequence, start: int, tokens: int) -> None:
        tenant, end = seq.request.tenant, start + tokens
        self._seated.setdefault(tenant, set()).add(seq.id)
        _discard(self._promised, seq)
        order = self._orders.get(tenant)
        if order is not None:
            order.served(seq, start, tokens)
        # What a preemption makes necessary again is not the tenant's fault.
        begin = max(start, seq.charged)
        if end > begin:
            prompt = max(0, min(end, seq.num_prompt) - begin)
            self._charge(tenant, PROMPT * prompt + OUTPUT * (end - begin - prompt))
            seq.charged = end

    def decoded(self, seqs: Iterable[Sequence]) -> None:
        tenants = Counter([seq.request.tenant for seq in seqs])
        for tenant, count in tenants.items():
            self._charge(tenant, OUTPUT * count)

    def ended(self, seq: Sequence) -> None:
        tenant = seq.request.tenant
        _discard(self._seated, seq)
        _discard(self._promised, seq)
        self._entrance.leave(tenant, seq.id)
        order = self._orders.get(tenant)
        if order is not None:
            order.ended(seq)
            # Not when its turn comes, for while all rows are taken none does: names that came and
            # left would pile up, and the door count with work of theirs.
            if self._entrance.size(tenant) == len(self._seated.get(tenant, ())):
                self._emptied(tenant)

    # ---- the queue ----

    def ahead(self, due: float, tenant: str, work: float) -> tuple[float, int]:
        """What the tenant has waiting itself, and as much for each other one that has something
        waiting, by their weights: turns are shared for as long as that takes. A tenant that got
        less so far catches up first, this one too. Of those that are not far ahead of it what is
        due sooner goes first all the same. And what it leaves to one that may come."""
        orders, weights, counters = dict(self._orders), self._weights, self.counters
        own = orders.pop(tenant, None)
        mine, rows = (0.0, 0) if own is None else own.ahead(due, tenant, work)
        seconds = work + mine
        here = own is not None
        counter = self._counter(tenant) if here else self._entrance.place(tenant, orders)
        least = mine + self._left(tenant, counter, seconds, due)
        if not orders:
            return least, rows
        token = self._house.model.per_token
        share = seconds / weights.get(tenant, 1.0)
        seconds -= work
        dated = mine
        equal = counter + EQUAL
        for other, order in orders.items():
            weight, got = weights.get(other, 1.0), counters.get(other, 0.0)
            if got <= equal:
                sooner, many = order.ahead(due, other, 0.0)
                dated += sooner
                rows += many
            part = weight * ((counter - got) * token + share)
            if part > 0.0:  # else it is so far ahead that it waits for all of that
                seconds += min(part, order.ahead(inf, other, 0.0)[0])
        return max(seconds, least, dated), rows

    def _standing(self, tenant: str) -> float:
        """Its counter, or the one with which it would come now. Only looks."""
        if tenant in self._orders:
            return self._counter(tenant)
        return self._entrance.place(tenant, dict(self._orders))

    def _left(self, tenant: str, counter: float, seconds: float, due: float) -> float:
        """What a tenant that wants so much computed, and has something in the house already, leaves
        to another that is not far ahead and may come before it is due, to have its part of the
        time first: the less likely the longer that one has asked for nothing."""
        latest = self._other(tenant)
        if latest is None or tenant not in self._entrance or due == inf:
            return 0.0
        other, seen = latest
        if self._counter(other) > counter + EQUAL:
            return 0.0
        chance = min(1.0, AGAIN * (due - self._now) / max(self._now - seen, 1e-6))
        weights = self._weights
        part = min(1.0, weights.get(other, 1.0) / weights.get(tenant, 1.0))
        return max(0.0, BURST * chance * part * seconds)

    def give_way(self, tenants: Collection[str], other: str) -> Collection[str]:
        """Those that got so much more than the other that their prompts wait for that one's."""
        far = self._standing(other) + EQUAL
        return {one for one in tenants if one != other and self._counter(one) > far}

    def backlog(self) -> list[tuple[float, float]]:
        """Of all tenants: whoever goes first, by then so much has to be done."""
        found: list[tuple[float, float]] = []
        for order in list(self._orders.values()):
            found += order.backlog() or ()
        found.sort()
        return found

    @property
    def overdue(self) -> bool:
        return any(order.overdue for order in self._orders.values())

    def overdrawn(self) -> list[tuple[float, str]]:
        """(counter, name) of the tenants that run and asked for more than there is time for."""
        orders = self._orders
        return [
            (self._counter(tenant), tenant)
            for tenant in self._seated
            if tenant in orders and orders[tenant].overdue
        ]

    def tidy(self, num_waiting: int) -> None:
        for order in self._orders.values():
            order.tidy(num_waiting)
        if len(self._turn) > 2 * len(self._orders) + 64:
            latest = {entry[2]: entry for entry in sorted(self._turn) if entry[2] in self._orders}
            self._turn = list(latest.values())
            heapify(self._turn)

    def __iter__(self) -> Iterator[Sequence]:
        for order in self._orders.values():
            yield from order


def _discard(ids: dict[str, set[int]], seq: Sequence) -> None:
    """Take a sequence out of those of its tenant; no tenant stays that has none."""
    own = ids.get(seq.request.tenant)
    if own is not None:
        own.discard(seq.id)
        if not own:
            del ids[seq.request.tenant]


def _is_promised(seq: Sequence) -> bool:
    """Whether the door told it when its first token is there, and it still can be."""
    return seq.request.predicted is not None and not seq.late and seq.due < inf


class _Looked:
    """What tenants offer in one step. The next offer of one may be looked at before it is taken;
    the one after that is not made before."""

    def __init__(self, make: Callable[[str], Offers]) -> None:
        self._make = make
        self._made: dict[str, Offers] = {}
        self._next: dict[str, tuple[Sequence, int] | None] = {}

    def look(self, tenant: str) -> tuple[Sequence, int] | None:
        if tenant not in self._next:
            if tenant not in self._made:
                self._made[tenant] = self._make(tenant)
            self._next[tenant] = next(self._made[tenant], None)
        return self._next[tenant]

    def take(self, tenant: str) -> tuple[Sequence, int] | None:
        offer = self.look(tenant)
        del self._next[tenant]
        return offer

    def line_up(self, tenant: str, line: list[tuple[float, int, str]]) -> None:
        """Put the tenant's next offer into a heap by deadline, if that was promised."""
        offer = self.look(tenant)
        if offer is not None and _is_promised(offer[0]):
            heappush(line, (offer[0].due, offer[0].id, tenant))


class FairPace:
    """The pace that another policy has, as far as streams are within their tenant's share.

    A tenant that asked for more than there is time for, and is far ahead of another, has no claim
    to steps that keep to its streams' slack while a prompt of that other one waits: those few are
    not looked at then, and the prompt is computed as if they were not there. Nothing is overdue
    where a door refused in time what could not be kept, so what it promised is kept.
    """

    def __init__(self, pace: Callable[[House, Order], Pace], house: House, order: Fair) -> None:
        self._order = order
        self._all = pace(house, order)
        self._within = pace(house, order)  # looks at streams of tenants that are within their share
        self._overdrawn: list[tuple[float, str]] | None = None  # not asked yet in this step
        self._opened: tuple[Collection[Sequence], StepFeatures, float] = ((), StepFeatures(), 0.0)
        self._ignored: list[str] = []  # tenants at whose streams `_within` did not look

    @property
    def tightest(self) -> float:
        return self._all.tightest

    @property
    def soonest(self) -> float:
        return self._all.soonest

    def open(self, decodes: Collection[Sequence], step: StepFeatures, now: float) -> None:
        self._all.open(decodes, step, now)
        self._overdrawn = None
        self._opened, self._ignored = (decodes, step, now), []

    def still(self, step: StepFeatures, now: float) -> Collection[Sequence]:
        return self._all.still(step, now)

    def joins(
        self, running: int, tenant: str, pace: float = inf, reading: Collection[Sequence] = ()
    ) -> bool:
        return self._all.joins(running + self._order.spared(tenant), tenant, pace, reading)

    def leaves(self, tenant: str) -> int:
        return self._order.spared(tenant, waiting=True)

    def room(self, step: StepFeatures, start: int, tenant: str) -> int:
        count = self._all.room(step, start, tenant)
        counter = self._order.counters.get(tenant)
        if counter is None:
            return count
        if self._overdrawn is None:
            self._overdrawn = self._order.overdrawn()
        ignored = [name for other, name in self._overdrawn if other > counter + FAR]
        if not ignored:
            return count
        if ignored != self._ignored:
            decodes, shape, now = self._opened
            within = [seq for seq in decodes if seq.request.tenant not in ignored]
            self._within.open(within, shape, now)
            self._ignored = ignored
        return max(count, self._within.room(step, start, tenant))

    def spare(self, step: StepFeatures) -> int:
        return self._all.spare(step)

    def close(self, step: StepFeatures) -> None:
        self._all.close(step)

    def alone(self, step: StepFeatures) -> None:
        self._all.alone(step)


def fair(weights: Mapping[str, float] | None = None, within: Policy | None = None) -> Policy:
    """The tenant that got least, by its weight, goes first; among its requests those of the policy
    `within` (fcfs), whose pace and victims hold for all. `weights` is read, never copied: what is
    changed in it, from any thread, holds for what is computed from then on."""
    inner = fcfs() if within is None else within
    given = {} if weights is None else weights
    if any(not weight > 0 for weight in given.values()):
        raise ValueError("the weights of tenants must be positive")

    def order(house: House) -> Order:
        return Fair(inner.order, house, given)

    def pace(house: House, order: Order) -> Pace:
        assert isinstance(order, Fair)
        return FairPace(inner.pace, house, order)

    name = "fair" if within is None else f"fair-{inner.name}"
    own = pace if inner.timed else inner.pace
    return replace(inner, name=name, order=order, pace=own, by_deadline=False)
