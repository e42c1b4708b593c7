"""In which order sequences are served, how long a step may take, and who gives way.

A `Policy` is a value: a name and the parts that a scheduler makes for itself from it. `rank` is
fixed when a sequence arrives and total: the running sequence that is first by it always proceeds,
whatever else the policy thinks, and that is why every load ends. Everything else may change with
time: an `Order` offers those that want many tokens one after another, a `Pace` says how many of
them the step has time for, and `loss` says who is preempted when blocks run out.

An order keeps heaps of keys that stand still. What changes with time is re-keyed when it surfaces,
so that a step never looks at more of the queue than it takes from it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf, log2
from typing import NamedTuple, Protocol

from octavo.core.executor import Capacity
from octavo.core.request import Sequence, State
from octavo.core.reserve import Reserve
from octavo.core.steptime import StepFeatures, StepModel

Rank = tuple[float, int]
Key = tuple[float, ...]
Loss = tuple[float, ...]

ALL = 2**31  # tokens: as many as there are
Offers = Generator[tuple[Sequence, int], None, None]


class Occupancy(NamedTuple):
    """What a policy may know when it admits: sequences running and the most that may; sequences
    admitted since none ran (`seats`), and the arrival index at which that was (`opened`)."""

    running: int
    limit: int
    seats: int
    opened: int


@dataclass(frozen=True, slots=True)
class House:
    """What the parts of a policy look at. cached: tokens of a sequence that the prefix cache has
    now. reserve: how much output to expect."""

    capacity: Capacity
    model: StepModel
    cached: Callable[[Sequence], int]
    reserve: Reserve

    def left(self, seq: Sequence) -> int:
        """Tokens of `seq` that must be computed before its next one."""
        done = seq.num_scheduled if seq.state is State.RUNNING else self.cached(seq)
        return len(seq.tokens) - done

    def prefill_seconds(self, start: int, count: int) -> float:
        """What so many tokens from `start` on add to steps that run anyway."""
        return self.model.prefilling(start, count)


class Order(Protocol):
    """The sequences that wait, and in which order those that want many tokens are served."""

    def push(self, seq: Sequence, now: float) -> None:
        """`seq` waits now."""
        ...

    def met(self, tenant: str, now: float) -> None:
        """A tenant asked for something, and was refused at the door. The door's thread says so."""
        ...

    def candidates(self, started: list[Sequence], now: float) -> Offers:
        """Running sequences that want more than one token (`started`) and waiting ones, each with
        the most tokens it may have now. A waiting one that still waits afterwards did not fit:
        no more waiting ones may follow it, or it would never get its turn."""
        ...

    def only(self) -> Sequence | None:
        """The waiting one that is offered first, and before which no other is as long as nobody
        comes or ends, whatever time passes; None if there is none or that may change."""
        ...

    def served(self, seq: Sequence, start: int, tokens: int) -> None:
        """A candidate was given so many tokens from `start` on."""
        ...

    def decoded(self, seqs: Iterable[Sequence]) -> None:
        """Each of these was given the one token that it wanted."""
        ...

    def ended(self, seq: Sequence) -> None:
        """It ended, wherever it was."""
        ...

    def ahead(self, due: float, tenant: str, work: float) -> tuple[float, int]:
        """Seconds of prefill that wait and would go before a newcomer with that deadline, or, for
        as long as it has `work` seconds to do, between its parts. And how many wait that can keep
        a deadline and may stream beside it: those that stand behind it for their tenant's sake join
        while that breaks no stream's pace, its own among them."""
        ...

    def give_way(self, tenants: Collection[str], other: str) -> Collection[str]:
        """Those of the tenants whose prompts wait for another's, whenever either is due."""
        ...

    def backlog(self) -> list[tuple[float, float]] | None:
        """(deadline, seconds of prefill) of what waits, soonest first, and what is lost at inf; a
        list of its own: by then so much has to be done, whoever goes first. None where nobody looks
        at deadlines."""
        ...

    @property
    def overdue(self) -> bool:
        """Whether something waits that had a deadline and cannot keep it any more: more was asked
        than there was time for."""
        ...

    def tidy(self, num_waiting: int) -> None:
        """Many were aborted: drop what does not wait any more, if it is most of what is kept."""
        ...

    def __iter__(self) -> Iterator[Sequence]:
        """Those that wait, in no order."""
        ...


class Pace(Protocol):
    """How long a step may take."""

    def open(self, decodes: Collection[Sequence], step: StepFeatures, now: float) -> None:
        """A step begins with these decodes, whose shape is `step`."""
        ...

    def still(self, step: StepFeatures, now: float) -> Collection[Sequence]:
        """Those of the decodes that stand still in the step that was opened, for others' sake; it
        is opened again without them."""
        ...

    @property
    def tightest(self) -> float:
        """Seconds a token that the most demanding of the streams was promised; inf if none was."""
        ...

    @property
    def soonest(self) -> float:
        """When the first of the streams had its token due, as the latest step was opened; inf
        without any."""
        ...

    def joins(
        self, running: int, tenant: str, pace: float = inf, reading: Collection[Sequence] = ()
    ) -> bool:
        """Whether one more, of a tenant, may join so many, of which some are `reading` their
        prompts, without breaking what those were promised that stream, nor `pace`, the tightest
        that was to those that do not yet."""
        ...

    def leaves(self, tenant: str) -> int:
        """Rows that a tenant with what it has in the house must leave to others' streams."""
        ...

    def room(self, step: StepFeatures, start: int, tenant: str) -> int:
        """How many tokens of a tenant's, from `start` on, a step of that shape has time for."""
        ...

    def spare(self, step: StepFeatures) -> int:
        """How many tokens a step of that shape has time for that nobody waits for: guesses."""
        ...

    def close(self, step: StepFeatures) -> None:
        """The step goes out in that shape, and some guesses perhaps."""
        ...

    def alone(self, step: StepFeatures) -> None:
        """A step of decodes goes out to which nothing could be added: opened, not asked, closed."""
        ...


class ByKey:
    """Waiting sequences in a heap by a key of their own; an entry counts while its stamp is the
    latest of a sequence that waits, others go when they surface."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, Sequence]] = []

    def push(self, key: Key, seq: Sequence) -> None:
        seq.stamp += 1
        heappush(self._heap, (key, seq.stamp, seq))

    def head(self) -> tuple[Key, Sequence] | None:
        """The first that waits, and its key."""
        heap = self._heap
        while heap:
            key, stamp, seq = heap[0]
            if seq.state is State.WAITING and seq.stamp == stamp:
                return key, seq
            heappop(heap)
        return None

    def tidy(self, num_waiting: int) -> None:
        if len(self._heap) > 2 * num_waiting + 64:
            self._heap = [e for e in self._heap if _counts(e)]
            heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __getitem__(self, place: int) -> Sequence | None:
        """The sequence of an entry, if the entry counts: for looking at some in turn."""
        entry = self._heap[place]
        return entry[2] if _counts(entry) else None

    def __iter__(self) -> Iterator[Sequence]:
        return (entry[2] for entry in self._heap if _counts(entry))


def _counts(entry: tuple[Key, int, Sequence]) -> bool:
    _, stamp, seq = entry
    return seq.state is State.WAITING and seq.stamp == stamp


class Standing:
    """An order by a key that is fixed while a sequence waits (and a partial prefill's is too)."""

    def __init__(self, key: Callable[[Sequence], Key], house: House) -> None:
        self._key = key
        self._house = house
        self._waiting = ByKey()

    def push(self, seq: Sequence, now: float) -> None:
        self._waiting.push(self._key(seq), seq)

    def met(self, tenant: str, now: float) -> None:
        pass

    def candidates(self, started: list[Sequence], now: float) -> Offers:
        waiting, key = self._waiting, self._key
        head = waiting.head()
        for seq in sorted(started, key=key) if len(started) > 1 else started:
            while head is not None and head[0] < key(seq):
                yield head[1], ALL
                head = None if head[1].state is State.WAITING else waiting.head()
            yield seq, ALL
        while head is not None:
            yield head[1], ALL
            if head[1].state is State.WAITING:
                return
            head = waiting.head()

    def only(self) -> Sequence | None:
        head = self._waiting.head()
        return None if head is None else head[1]

    def served(self, seq: Sequence, start: int, tokens: int) -> None:
        pass

    def decoded(self, seqs: Iterable[Sequence]) -> None:
        pass

    def ended(self, seq: Sequence) -> None:
        pass

    def ahead(self, due: float, tenant: str, work: float) -> tuple[float, int]:
        """All that waits: the newcomer is the last."""
        each = [self._house.prefill_seconds(0, len(seq.tokens)) for seq in self._waiting]
        return sum(each), len(each)

    def give_way(self, tenants: Collection[str], other: str) -> Collection[str]:
        return ()

    def backlog(self) -> None:
        return None

    @property
    def overdue(self) -> bool:
        return False

    def tidy(self, num_waiting: int) -> None:
        self._waiting.tidy(num_waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)


class Unhurried:
    """A step may take as long as its tokens take."""

    tightest = soonest = inf

    def joins(
        self, running: int, tenant: str, pace: float = inf, reading: Collection[Sequence] = ()
    ) -> bool:
        return True

    def leaves(self, tenant: str) -> int:
        return 0

    def open(self, decodes: Collection[Sequence], step: StepFeatures, now: float) -> None:
        pass

    def still(self, step: StepFeatures, now: float) -> Collection[Sequence]:
        return ()

    def room(self, step: StepFeatures, start: int, tenant: str) -> int:
        return ALL

    def spare(self, step: StepFeatures) -> int:
        return ALL

    def close(self, step: StepFeatures) -> None:
        pass

    def alone(self, step: StepFeatures) -> None:
        pass


def by_arrival(seq: Sequence) -> Rank:
    """First come, first served."""
    return seq.request.arrival, seq.arrival_index


def while_rows_last(seq: Sequence, batch: Occupancy) -> bool:  # noqa: ARG001
    """Continuous batching: a sequence joins whenever there is a row for it."""
    return batch.running < batch.limit


def into_an_empty_batch(seq: Sequence, batch: Occupancy) -> bool:
    """Static batching: as many as may run, of those that waited when the batch was empty.

    The group is fixed then, also if its prompts take several steps to go in.
    """
    return seq.arrival_index < batch.opened and batch.seats < batch.limit


def the_last(seq: Sequence, now: float, house: House) -> Loss:  # noqa: ARG001
    """Who came last by rank loses least."""
    return -seq.key[0], -seq.key[1]


def to_nobody(seq: Sequence, other: Sequence) -> bool:  # noqa: ARG001
    """What runs, runs."""
    return False


def by_rank(house: House) -> Order:
    """Served as they rank."""
    return Standing(lambda seq: seq.key, house)


def unhurried(house: House, order: Order) -> Pace:  # noqa: ARG001
    return Unhurried()


@dataclass(frozen=True, slots=True)
class Policy:
    """rank: who goes before whom when nothing else counts; never changes. admits: whether a
    sequence may join those that run. loss: the one with the least is preempted first.
    holds_twins: a sequence waits while another computes the prefix they share. timed: whether
    predicted times matter, so that the model should know the machine before the first request.
    by_deadline: whether what waits and can make its deadline goes by that, and nothing else counts.
    moving: how many of those that run, by rank, may go on in a step; the others stand still.
    yields: whether one that runs is preempted for one that waits and finds no room.
    """

    name: str
    rank: Callable[[Sequence], Rank] = by_arrival
    admits: Callable[[Sequence, Occupancy], bool] = while_rows_last
    order: Callable[[House], Order] = by_rank
    pace: Callable[[House, Order], Pace] = unhurried
    loss: Callable[[Sequence, float, House], Loss] = the_last
    holds_twins: bool = True
    timed: bool = False
    by_deadline: bool = False
    moving: Callable[[list[Sequence]], int] = len
    yields: Callable[[Sequence, Sequence], bool] = to_nobody


def fcfs() -> Policy:
    """First come, first served."""
    return Policy("fcfs")


def priority(ageing: float = 30.0) -> Policy:
    """Lower `Request.priority` first; a level is worth `ageing` seconds of waiting.

    Ageing is linear, so all waiting sequences age alike and their order never changes: it is that
    of arrival + ageing * priority. Nothing starves: what arrives late enough goes behind.
    """
    if not ageing > 0:
        raise ValueError(f"ageing must be positive, got {ageing!r}")

    def rank(seq: Sequence) -> Rank:
        return seq.request.arrival + ageing * seq.request.priority, seq.arrival_index

    return Policy("priority", rank)


def sjf(doubling: float = 2.0) -> Policy:
    """Shortest prefill first, by what the prefix cache lacks; twice the work is worth `doubling`
    seconds of waiting.

    The key 2^(age / doubling) / work of PREFLOW, in logarithms: all age alike, so the order stands
    still, and a prompt goes at the latest before those that come `doubling` log2(its work) later.
    The length of the output is not used: nobody knows it.
    """
    if not doubling > 0:
        raise ValueError(f"doubling must be positive, got {doubling!r}")

    def order(house: House) -> Order:
        def key(seq: Sequence) -> Key:
            work = max(1, house.left(seq))
            return seq.request.arrival + doubling * log2(work), seq.arrival_index

        return Standing(key, house)

    return Policy("sjf", order=order)


def static() -> Policy:
    """The field's baseline: a group is admitted into an empty batch and served until all ended."""
    return Policy("static", admits=into_an_empty_batch, holds_twins=False)
