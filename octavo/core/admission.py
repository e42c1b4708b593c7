"""Who is let in: a request's deadlines are kept, or refused at the door.

Two gates. `enter` is before anything was parsed: it counts the request at once, by its bytes, and
refuses only by caps, or where even a fully cached prompt would be too late. `judge` is after
tokenising: it predicts the times to the first token and between tokens, and admits, degrades if the
client allows it, or refuses with the prediction and when to come back; or for good, if an idle
server could not do it either. Either gate keeps a place for whom it sends away for now (`kept`).

The prediction is a closed form over what the scheduler keeps anyway: the rest of the running step,
then the prefill that goes first (by the policy's order), in steps as long as the streams' slack and
beside the streams that there are meanwhile, then the wait for a row and for blocks, if those are
short. It is decided with a factor on top, of what steps (`gamma`) and forecasts (`margin`) turned
out to exceed, so that promises are kept.

`enter` and `judge` only read the scheduler's numbers and write their own, so a door in another
thread may call them while a step is being planned. (While there is none, they tell the step model
how long it has rested.) No clock: they are told `now`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf, isinf
from typing import NamedTuple

from octavo.core.kept import LATEST, Kept, Wanted
from octavo.core.request import NO_SLO, Forecast, Request, Slo, Tier
from octavo.core.scheduler import Load, Scheduler
from octavo.core.slo import FINISHED, MOST, SPEND, STRICT
from octavo.core.steptime import GAMMA, StepFeatures, StepModel
from octavo.errors import Overloaded, TenantLimit, TooTight, Unattainable

FIRST_RATE = 0.25  # tokens a byte of a body, before any was seen
FOLLOW = 0.05
ROUNDS = 3  # how long one waits decides how many decode meanwhile, and that how long it waits
NO_PLACE = (
    "when a prompt this long is in time beside the streams that run is not foretold: the time to "
    "come again is a guess"
)
SHORT = 0.2  # share of those that are refused anyway from which long prompts leave time to others
LEAST_SHARE = 0.05  # of the steps' time that prefill has in any case

# A NamedTuple without the detour over its own __new__: between two steps the caches are cold, and
# each function more that a decision comes by is fetched from memory.
_new = tuple.__new__

_Need = tuple[int, int]  # tokens of a prompt that must be computed, behind so many that are cached


@dataclass(frozen=True, slots=True)
class Limits:
    """Caps on what is in the house; None is no cap. queued_tokens: of prompts that have no first
    token yet; queued_seconds: the same, as predicted time of prefill. tenant_tokens: of one tenant,
    from the door to the end. weights: shares of tenants (1 if not named), for telling who is over
    its own."""

    queued_tokens: int | None = None
    tenant_tokens: int | None = None
    queued_seconds: float | None = None
    weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Ticket:
    """One request in the house, counted from its first byte. key: what its body is known by."""

    tenant: str
    num_bytes: int
    tokens: float
    key: int | None = None
    queued: bool = True


class _Newcomer(NamedTuple):
    """What is to be computed for one at the door: tokens, seconds, and when that is due."""

    tenant: str
    tokens: int
    work: float
    due: float


class _Queue(NamedTuple):
    """Seconds of prefill that go before a newcomer, those with its own, and what is behind it; at
    the pace of now. sooner: the share of those that wait who go before it; beside: of those that
    may stream beside it: they are due at some time, and do not stand behind it for their tenant's
    sake. The others join while they break no stream's pace, and else wait."""

    work: float = 0.0
    behind: float = 0.0
    sooner: float = 1.0
    beside: float = 1.0


class _House(NamedTuple):
    """What every forecast of one moment reads. moving: rows that get tokens. length: of steps that
    the streams bear; slack: what the next one may take; whole: prefill of a step that is nothing
    else; ending: how long one is made that ends a prompt. life: seconds in which half of the
    streams end. setback: of a step's length, what each that joins takes off the slack."""

    now: float
    load: Load
    moving: float
    length: float
    slack: float
    whole: float
    ending: float
    life: float
    setback: float


class _Steps(NamedTuple):
    """Steps under a load, in the mean while a newcomer waits. coming: rows that wait, and the
    newcomer's. ahead: from the next one's start until it is computed. first, prefill: seconds of
    prefill in the next one and in each after it; ending: in one that ends a prompt, at most;
    besides: what a step takes beside them."""

    load: Load
    coming: int
    ahead: float
    first: float
    prefill: float
    ending: float
    besides: float

    def least(self, work: float) -> float:
        """From the next one's start until so many seconds of prefill are done that are part of
        more, so that all steps are full."""
        return work + max(0.0, work - self.first) / self.prefill * self.besides


class Verdict(NamedTuple):
    """Of the requests of a body: why they cannot be let in, if so, and the forecasts up to the one
    that cannot; with what they need of prefill, and the house as it was. crowded: there would be
    time for it, but others will come who need less of it."""

    requests: Sequence[Request]
    needs: list[_Need]
    forecasts: list[Forecast]
    house: _House
    why: str | None = None
    crowded: bool = False


class Admission:
    """The gates of one scheduler."""

    def __init__(self, scheduler: Scheduler, limits: Limits | None = None) -> None:
        self.limits = limits if limits is not None else Limits()
        self.tokens_per_byte = FIRST_RATE
        self.queued_tokens = 0.0
        self.by_tenant: dict[str, float] = {}
        self.kept = Kept()
        self._scheduler = scheduler
        self._usual = 0.0  # seconds of prefill of one that could be let in, of late
        self._shortage = 0.0  # share of those with a deadline that there was no time for, of late

    @property
    def scheduler(self) -> Scheduler:
        """Whose numbers it reads; to read, not to change."""
        return self._scheduler

    @property
    def model(self) -> StepModel:
        """What predicts the steps."""
        return self._scheduler.model

    # ---- the first gate -------------------------------------------------------------------------

    def enter(
        self, tenant: str, num_bytes: int, slo: Slo, now: float, key: int | None = None
    ) -> Ticket:
        """Count a request of so many bytes. Raises Overloaded, TenantLimit, Unattainable or
        TooTight, and then counts nothing. key: what the body is known by when it comes again: who
        is refused for its deadlines here has a place too, for about as much as its bytes may be.
        What it asked for is part of it: a place is for one deadline, and a tighter one is another.
        A place lets nobody past this gate: what fails here would at the second."""
        # More than one prompt can have is never computed: while such a body is parsed, to be
        # refused, it must not count as minutes of work and keep all others out.
        tokens = min(num_bytes * self.tokens_per_byte, self._scheduler.max_len)
        limits, own = self.limits, self.by_tenant.get(tenant, 0.0)
        most = limits.queued_tokens
        # Alone a request may pass the cap, or it could never be served.
        if most is not None and self.queued_tokens and self.queued_tokens + tokens > most:
            text = f"about {self.queued_tokens:.0f} prompt tokens wait already (the cap is {most})"
            raise self._capped(Overloaded(text, self._scheduler.retry_after()))
        most_seconds = limits.queued_seconds
        if most_seconds is not None and self.queued_tokens:
            seconds = (self.queued_tokens + tokens) * self._scheduler.model.per_token
            if seconds > most_seconds:
                text = f"about {seconds:.0f} s of prompts wait (the cap is {most_seconds:g} s)"
                raise self._capped(Overloaded(text, seconds - most_seconds))
        most = limits.tenant_tokens
        if most is not None and own and own + tokens > most:
            text = f"about {own:.0f} tokens of yours are being served (the cap is {most})"
            raise self._capped(TenantLimit(text, self._scheduler.retry_after()))
        if slo.ttft is not None and not slo.degrade and self._scheduler.policy.timed:
            self._in_reach(tenant, tokens, slo, now, key)
        self.by_tenant[tenant] = own + tokens
        self.queued_tokens += tokens
        return Ticket(tenant, num_bytes, tokens, key)

    def _in_reach(self, tenant: str, tokens: float, slo: Slo, now: float, key: int | None) -> None:
        """Raises Unattainable or TooTight where even a cached prompt would come too late."""
        ttft = slo.ttft or 0.0
        self._scheduler.rested(now)
        house, soonest = self._soonest(tenant, ttft, now)
        late = self._scheduler.model.gamma * soonest > ttft
        if late and self._scheduler.rested(now, best=True):
            house, soonest = self._soonest(tenant, ttft, now)
            late = self._scheduler.model.gamma * soonest > ttft
        if not late:
            return
        why, alone = "even a cached prompt would come too late", self._alone([(1, 0)])
        if alone > ttft:
            raise self._never(slo, why, Forecast(alone, 0.0))
        if tenant:  # where there are no keys it is the body that names one
            self._scheduler.turned_away(tenant, now)
        refusal = self._refusal(slo, tenant, Forecast(soonest, 0.0), why)
        if key is not None:
            wanted = Wanted(tenant, self._work(int(tokens), 0), ttft)
            self._come_back(refusal, key, wanted, house)
        raise refusal

    def _soonest(self, tenant: str, ttft: float, now: float) -> tuple[_House, float]:
        """The house, and when a cached prompt of a tenant would have its first token."""
        line, house = self._scheduler.backlog(), self._house(now, tenant)
        newcomer = _Newcomer(tenant, 1, self._work(1, 0), now + ttft)
        return house, self._ttft(newcomer, self._steps(house, self._queue(newcomer, line))) - now

    def first_token(self, ticket: Ticket) -> None:
        """Its prompt waits no more."""
        self._unqueue(ticket)

    def _unqueue(self, ticket: Ticket) -> None:
        if ticket.queued:
            ticket.queued = False
            self.queued_tokens = max(0.0, self.queued_tokens - ticket.tokens)

    def leave(self, ticket: Ticket) -> None:
        """It is over, however it ended. Once for each ticket."""
        self._unqueue(ticket)
        left = self.by_tenant.get(ticket.tenant, 0.0) - ticket.tokens
        if left > 1e-6:
            self.by_tenant[ticket.tenant] = left
        else:
            self.by_tenant.pop(ticket.tenant, None)

    def learn(self, ticket: Ticket, num_tokens: int) -> None:
        """The bytes of a ticket were so many tokens: correct it, and the rate."""
        change = num_tokens - ticket.tokens
        ticket.tokens = float(num_tokens)
        self.queued_tokens += change
        own = self.by_tenant.get(ticket.tenant, 0.0)
        self.by_tenant[ticket.tenant] = own + change
        rate = num_tokens / max(1, ticket.num_bytes)
        self.tokens_per_byte += FOLLOW * (rate - self.tokens_per_byte)

    # ---- the second gate ------------------------------------------------------------------------

    def judge(self, request: Request, now: float, key: int | None = None) -> Request:
        """The request as it is admitted: with a forecast, perhaps degraded (then it has no SLO and
        the flex tier). Raises Unattainable, or TooTight if it could not be kept in an empty house
        either. Hand it to the scheduler next: it is counted already. key: what it is known by when
        it comes again, as the first gate had it; by default its tenant and its prompt.
        """
        return self.judge_all((request,), now, key)[0]

    def judge_all(
        self, requests: Sequence[Request], now: float, key: int | None = None
    ) -> list[Request]:
        """The same for the requests of one body, which want the same of time: all of them are
        admitted, or all degraded, or none. They come back together, so they have one place."""
        if not self._scheduler.policy.timed:
            return list(requests)
        return self.answer(self.weigh(requests, now, key), key)

    def weigh(self, requests: Sequence[Request], now: float, key: int | None = None) -> Verdict:
        """What `judge_all` decides, under a timed policy; who is let in is counted."""
        placed = bool(self.kept) and self.kept.take(_known(requests, key), now)
        self._scheduler.rested(now)
        verdict = self._weigh(requests, now, placed)
        if verdict.why is not None and self._scheduler.rested(now, best=True):
            return self._weigh(requests, now, placed)
        return verdict

    def _weigh(self, requests: Sequence[Request], now: float, placed: bool) -> Verdict:
        house = self._house(now, requests[0].tenant)
        needs = [self._needs(request) for request in requests]
        forecasts: list[Forecast] = []
        for i, (request, need) in enumerate(zip(requests, needs, strict=True)):
            forecast, why, crowded = self._weighed(request, need, house, placed)
            forecasts.append(forecast)
            if why is not None:
                for one in requests[:i]:
                    self.forget(one)
                return Verdict(requests, needs, forecasts, house, why, crowded)
        return Verdict(requests, needs, forecasts, house)

    def answer(self, verdict: Verdict, key: int | None = None) -> list[Request]:
        """What is said of it: the requests as they are admitted or degraded. Raises Unattainable or
        TooTight, and keeps a place for whom it sends away. Once for each verdict."""
        requests, needs, forecasts, house, why, crowded = verdict
        if why is None:
            return [one.forecast(own) for one, own in zip(requests, forecasts, strict=True)]
        forecast, at = forecasts[-1], len(forecasts) - 1
        request = requests[at]
        never = self._impossible([request], [needs[at]])
        if never is None and not crowded:
            self._short(request, 1.0)
        if request.slo.degrade:
            self._scheduler.stats.counters.degraded += len(requests)
            return [_degraded(one, forecast) for one in requests]
        if len(requests) > 1:
            never = self._impossible(requests, needs)
        if never is not None:
            raise self._never(request.slo, *never)
        self._scheduler.turned_away(request.tenant, house.now)
        refusal = self._refusal(request.slo, request.tenant, forecast, why)
        if request.slo.ttft is not None:
            work = sum([self._work(*need) for need in needs])
            wanted = Wanted(request.tenant, work, request.slo.ttft)
            self._come_back(refusal, _known(requests, key), wanted, house)
        raise refusal

    def forget(self, request: Request) -> None:
        """An admitted request will not be added after all."""
        self._scheduler.expected.pop(request.id, None)

    def _weighed(
        self, request: Request, need: _Need, house: _House, placed: bool
    ) -> tuple[Forecast, str | None, bool]:
        """The forecast of a request, why it cannot be let in, and whether that is for others who
        will come; if it can, it is counted. placed: it has come back to a place that was kept."""
        slo, line = request.slo, self._scheduler.backlog()
        due = self._scheduler.first_due(request)
        work = self._scheduler.model.prefilling(need[1], need[0])
        newcomer = _new(_Newcomer, (request.tenant, need[0], work, due))
        queue = self._queue(newcomer, line)
        rows = request.params.n + self._scheduler.spared(request.tenant)
        steps = self._steps(house, queue, rows)
        ttft = self._ttft(newcomer, steps) - request.arrival
        tpot = self._scheduler.decode_seconds(steps.coming, rows, len(request.prompt))
        forecast = _new(Forecast, (ttft, self._scheduler.model.gap + tpot))
        if not slo:
            return forecast, None, False
        why = self._broken(request, forecast, steps, rows)
        if why is None:
            places = self._places(request.tenant, house.now) if self.kept and not placed else []
            if places or line:
                why = self._squeezed(newcomer, steps, line or [], places)
        if why is not None:
            return forecast, why, False
        self._short(request, 0.0)
        if slo.ttft is not None and self._scheduler.policy.by_deadline and not placed:
            why = self._crowding(work, steps, forecast.ttft, slo.ttft)
        if why is None:
            self._scheduler.expected[request.id] = (due, work)
        return forecast, why, why is not None

    def _short(self, request: Request, refused: float) -> None:
        """There was time for one with a deadline (0) or not (1). What this server could never keep
        is not counted: it tells nothing of how much time there is."""
        if request.slo.ttft is not None and self._scheduler.policy.by_deadline:
            self._shortage += FOLLOW * (refused - self._shortage)

    def _broken(self, request: Request, forecast: Forecast, steps: _Steps, rows: int) -> str | None:
        """Which promise cannot be kept, if any."""
        load, wanted = steps.load, request.slo.tpot
        tpot = moving = self._scheduler.model.gamma * forecast.tpot
        pace = min(load.promised, inf if wanted is None else STRICT * wanted)
        if tpot > pace:
            tpot = min(tpot, self._at_pace(request, pace, steps.coming, rows))
        own = self._broken_by(request, self._factor * forecast.ttft, tpot, moving)
        if own is not None:
            return own
        # What was promised to others is kept too, as far as it is being kept at all.
        if load.promised < tpot:
            promised = load.promised * 1e3
            return f"streams that were promised {promised:.1f} ms a token would break"
        return None

    def _at_pace(self, request: Request, pace: float, coming: int, rows: int) -> float:
        """The length of a step, with its margin, in which the streams that have a slower pace have
        a token only as often as that asks for."""
        scheduler = self._scheduler
        more = scheduler.moving_at(pace, request.tenant) - scheduler.num_moving + coming
        seconds = scheduler.decode_seconds(more, rows, len(request.prompt))
        return scheduler.model.gamma * (scheduler.model.gap + seconds)

    def _crowding(self, work: float, steps: _Steps, ttft: float, within: float) -> str | None:
        """Whether in a shortage it takes the time of several that would come before it is due. By
        as much as it is longer than what is usual it leaves time to them: the fewest are late if,
        of those that cannot all be in time, the longest is given up (Moore 1968), and what was
        promised cannot be given up later. The more are refused anyway the surer it is that they
        come. Where nobody waits it may have all of its time, and of prompts that are all alike none
        is refused for its length.
        """
        self._usual += (FOLLOW if self._usual else 1.0) * (work - self._usual)
        stretch = 1.0 + steps.besides / steps.prefill
        longer = (work - self._usual) * stretch * min(1.0, self._shortage / SHORT)
        leaves = max(0.0, min(longer, ttft - work * stretch))
        if self._factor * (ttft + leaves) <= within:
            return None
        return "it is long, and several shorter ones would be refused for it"

    @property
    def _factor(self) -> float:
        """By which a first token's forecast is multiplied before it is promised."""
        return max(self._scheduler.model.gamma, self._scheduler.margin.factor)

    def _broken_by(self, request: Request, ttft: float, tpot: float, moving: float) -> str | None:
        """Which of the request's own promises such times, which have their margin, would break.
        moving: the time of a token where it never stands still for one with a tighter pace."""
        slo = request.slo
        if slo.ttft is not None and ttft > slo.ttft:
            return f"the first token might take {ttft * 1e3:.0f} ms"
        if slo.tpot is not None and tpot > STRICT * slo.tpot:
            return f"a token might take {tpot * 1e3:.1f} ms"
        if slo.e2e is not None:
            most = request.params.max_tokens or self._scheduler.max_len
            output = self._scheduler.reserve.output(request.tenant, most)
            seconds = ttft + moving * max(0.0, output - 1.0)
            if seconds > slo.e2e:
                return f"about {output:.0f} tokens of output might take {seconds:.1f} s"
        return None

    def _work(self, count: int, cached: int) -> float:
        """Seconds that so many tokens behind `cached` ones add to steps."""
        return self._scheduler.model.prefilling(cached, count)

    def _queue(self, newcomer: _Newcomer, line: list[tuple[float, float]] | None) -> _Queue:
        """Its place: behind those of the `line` that are due sooner; where not all goes by
        deadlines it is the policy that knows."""
        tenant, _, work, due = newcomer
        before = total = lost = 0.0
        for when, seconds in line or ():
            total += seconds
            if when <= due:
                before += seconds
            if when == inf:
                lost += seconds
        sooner = before / total if total > 0.0 else 1.0
        # Where they are known and have no work that counts, they wait for whoever comes.
        beside = 1.0 if line is None else 1.0 - lost / total if total > 0.0 else 0.0
        if line is None or not self._scheduler.policy.by_deadline:
            before, rows = self._scheduler.ahead(due, tenant, work)
            sooner = beside = rows / max(1, self._scheduler.num_waiting)
        return _new(_Queue, (before + work, max(0.0, total - before), sooner, beside))

    def _ttft(self, newcomer: _Newcomer, steps: _Steps) -> float:
        """When all of it is computed."""
        tenant, tokens, work, _ = newcomer
        ahead = steps.ahead
        # Rows and blocks come free while others are computed.
        load, capacity = steps.load, self._scheduler.capacity
        rows = load.running + steps.coming - capacity.max_rows
        left = load.available - (tokens // capacity.block_size + 1)
        lack = self._scheduler.growth(left, tenant) - left if load.running else 0.0
        if (rows > 0 or lack > 0) and load.running:
            wait = self._wait_for_room(rows, lack, steps)
            ahead = max(ahead, wait + work + ceil(work / steps.prefill) * steps.besides)
        return steps.load.start + ahead

    def _house(self, now: float, tenant: str) -> _House:
        """What there is to know before a newcomer is looked at."""
        scheduler = self._scheduler
        model, load = scheduler.model, scheduler.load(now)
        gamma, length = model.gamma, min(load.tightest, MOST)
        output = scheduler.reserve.output("", scheduler.max_len)
        moving: float = scheduler.num_moving
        if load.tightest < inf and model.decoding(moving, moving * scheduler.mean_context) > length:
            moving = scheduler.moving_at(length, tenant)
        house = (
            now,
            load,
            moving,
            length,
            min(SPEND * (load.due - load.start), MOST) / gamma,
            model.prefilling(0, scheduler.capacity.max_tokens),
            FINISHED * model.per_step / gamma,
            length * max(1.0, output),
            0.0 if load.tightest == inf else gamma / SPEND - 1.0,
        )
        return _new(_House, house)

    def _steps(self, house: _House, queue: _Queue, rows: int = 1) -> _Steps:
        """Steps under load until a `queue` is computed, of which `rows` are the last. Streams get
        their tokens when they are due and no sooner, so steps last as long as the tightest was
        promised, in the mean.

        Those that go before it join one after another, and streams end: after their outputs' mean
        a half of them, which is between lengths that are all the same and such as have no memory.
        Whoever joins is ahead of no deadline yet, so the steps after that are short (`setback`).
        """
        scheduler, expected = self._scheduler, len(self._scheduler.expected)
        model, most = scheduler.model, scheduler.capacity.max_rows
        _, load, moving, length, slack, whole, ending, life, setback = house
        work, behind, sooner, beside = queue
        gap, context = model.gap, scheduler.mean_context
        coming = ceil(beside * load.waiting - 1e-9) + expected + rows
        joining = sooner * (load.waiting + expected)
        streams, setback = moving + 0.5 * joining, joining * length * setback
        least, ahead = LEAST_SHARE * length, 0.0
        # By comparisons, for six rounds of `min` and `max` are much of what a refusal takes.
        for _ in range(ROUNDS):
            pace = model.lasting(ahead)
            left = streams / (1.0 + 0.5 * ahead / life)
            left = left if left < most else most
            base = gap + pace * model.decoding(left, left * context, prompts=True)
            prefill = length - base
            prefill = prefill if prefill > least else least
            prefill = prefill if prefill < whole else whole
            # The next step may take all by which the streams are ahead of their deadlines.
            first = slack - base
            first = first if first > prefill else prefill
            # Until all is done; what is behind goes on in the last step, as far as that has time.
            before, steps, full, begin = pace * work + setback, 1, first, 0.0
            if before > first:
                steps += ceil((before - first) / prefill)
                full += (steps - 1) * prefill
                begin = full - prefill
            last = begin + (ending - base)
            full = full if full < last else last
            full = full if full > before else before
            done = before + pace * behind
            ahead = (done if done < full else full) + steps * base - setback
        return _new(_Steps, (load, coming, ahead, first, prefill, ending - base, base))

    def _squeezed(
        self,
        newcomer: _Newcomer,
        steps: _Steps,
        line: list[tuple[float, float]],
        places: list[tuple[float, float, float]],
    ) -> str | None:
        """Whether one that has no first token yet, and is due later, would lose its promise to the
        newcomer: the processor demand of earliest-deadline-first, summed up to each deadline. Or
        one for whom a place is kept: that one is not there yet, so its place can still be won back.
        Who comes back to its own was counted when the others were given theirs.

        A place is for a forecast that leaves a margin (`by`), in the order of when it will be due.
        """
        _, _, work, due = newcomer
        if not places and line[-1][0] <= due:
            return None
        all_of_them = [(when, seconds, when, False) for when, seconds in line]
        if places:
            all_of_them = sorted([*all_of_them, *((*place, True) for place in places)])
        before, start = 0.0, steps.load.start
        for when, seconds, by, kept in all_of_them:
            before += seconds
            if when <= due or start + steps.least(before + work) <= by:
                continue
            if kept:
                return "places are kept for others, who were told to come back"
            if start + steps.least(before) <= by:
                return "others that wait, and were promised theirs, would come too late"
        return None

    def _places(self, tenant: str, now: float) -> list[tuple[float, float, float]]:
        """The places that hold off a newcomer of that tenant: one kept for a tenant that would give
        way to it could not be taken by it either."""
        give_way = self._scheduler.give_way
        return self.kept.backlog(now, lambda holders: give_way(holders, tenant))

    def _wait_for_room(self, rows: int, blocks: float, steps: _Steps) -> float:
        """Seconds until so many rows and blocks come free, that are wanted and not there: the
        running sequences end one after another."""
        scheduler, running = self._scheduler, steps.load.running
        ends = max(rows, blocks / max(1.0, scheduler.blocks.num_held / running))
        output = scheduler.reserve.output("", scheduler.max_len)
        # Where all began at once ends are rarer than lengths say.
        each = max(max(1.0, output) * steps.besides / running, scheduler.stats.seconds_per_end)
        return ends * each

    # ---- refusals -------------------------------------------------------------------------------

    def _come_back(self, refusal: Unattainable, key: int, wanted: Wanted, house: _House) -> None:
        """Keep a place for one that is refused, and tell it when that is."""
        # The margin twice: what is forecast when it comes may exceed what is forecast of that now,
        # as what it takes may exceed what is forecast then.
        within, steps = wanted.ttft / self._factor**2, self._steps(house, _Queue())
        alone = wanted.seconds + ceil(wanted.seconds / steps.prefill) * steps.besides
        if alone > within and key not in self.kept:
            # Beside the streams of now it would be late, were it the only one that waits: there is
            # no place that others could leave it. While some have places there is no lull in sight:
            # told to come when those would be over, fewer of the long ones were let in (64 and 69
            # of 90, not 70 and 82, in virtual time) and they asked more often, for others come.
            refusal.args = (f"{refusal}; {NO_PLACE}",)
            if self.kept:
                refusal.retry_after = max(refusal.retry_after, float(LATEST))
            return
        refusal.retry_after = self.kept.keep(key, wanted, within, refusal.retry_after, house.now)
        refusal.kept = key in self.kept

    def _needs(self, request: Request) -> _Need:
        """Tokens of its prompt that must be computed, behind so many that are cached."""
        cached = self._scheduler.blocks.num_cached_tokens(request.namespace, request.prompt)
        return len(request.prompt) - cached, cached

    # Who is refused for good must not be let in a moment later: the machine is taken at its best,
    # and with the least margin that promises ever have.

    def _impossible(
        self, requests: Sequence[Request], needs: Sequence[_Need]
    ) -> tuple[str, Forecast] | None:
        """Why the requests of a body would be too late on an idle server too, and how late."""
        alone = Forecast(self._alone(needs), self._stream(requests))
        why = self._broken_by(requests[0], *alone, alone.tpot)
        return None if why is None else (why, alone)

    def _alone(self, needs: Sequence[_Need]) -> float:
        """Seconds within which prompts that need so much could be promised on an idle server."""
        scheduler = self._scheduler
        return GAMMA[0] * scheduler.model.best_prefill(needs, scheduler.capacity.max_tokens)

    def _stream(self, requests: Sequence[Request]) -> float:
        """Seconds a token that they could be promised where nothing else decodes."""
        scheduler = self._scheduler
        rows = sum([request.params.n for request in requests])
        context = max([len(request.prompt) for request in requests])
        rows = min(rows, scheduler.capacity.max_rows)
        return GAMMA[0] * scheduler.model.best(StepFeatures(rows, rows * context, 0, rows, rows))

    def _refusal(self, slo: Slo, tenant: str, forecast: Forecast, why: str) -> Unattainable:
        late = 0.0 if slo.ttft is None else forecast.ttft - slo.ttft
        wait = max(1.0, float(ceil(late)), self._scheduler.retry_after())
        self._scheduler.stats.counters.unattainable += 1
        return Unattainable(
            f"the deadlines asked for ({_asked(slo)}) cannot be met now: {why}",
            wait,
            ttft=forecast.ttft,
            tpot=forecast.tpot or None,
            queue_seconds=self._scheduler.ahead(inf, tenant)[0],
            own=self._over_share(tenant),
        )

    def _never(self, slo: Slo, why: str, alone: Forecast) -> TooTight:
        """The refusal of what would be too late on an idle server too: there is no coming back."""
        self._scheduler.stats.counters.unattainable += 1
        text = f"the deadlines asked for ({_asked(slo)}) cannot be met by this server"
        return TooTight(
            f"{text} even when it is idle: {why}", ttft=alone.ttft, tpot=alone.tpot or None
        )

    def _over_share(self, tenant: str) -> bool:
        """Whether this tenant has more in the house than its part of it."""
        weights, others = self.limits.weights, list(self.by_tenant.items())
        if len(others) < 2:
            return False
        own = self.by_tenant.get(tenant, 0.0)
        total = sum([tokens for _, tokens in others])
        parts = sum([weights.get(name, 1.0) for name, _ in others])
        if isinf(total):
            return False
        return own > total * weights.get(tenant, 1.0) / parts

    def _capped(self, error: Overloaded) -> Overloaded:
        self._scheduler.stats.counters.capped += 1
        return error


def _asked(slo: Slo) -> str:
    """The deadlines in words."""
    wanted = (("ttft", slo.ttft), ("tpot", slo.tpot), ("e2e", slo.e2e))
    return ", ".join(f"{name} {value * 1e3:g} ms" for name, value in wanted if value is not None)


def _known(requests: Sequence[Request], key: int | None) -> int:
    """What the requests of a body are known by when they come again."""
    return known_by(*requests) if key is None else key


def known_by(*requests: Request) -> int:
    """What requests are known by when they come again, where nobody saw the body."""
    return hash(
        tuple(
            (one.tenant, one.namespace, one.prompt.tobytes(), one.slo.deadlines) for one in requests
        )
    )


def _degraded(request: Request, forecast: Forecast) -> Request:
    """The same without promises."""
    return replace(request, predicted=forecast, slo=NO_SLO, tier=Tier.FLEX)
