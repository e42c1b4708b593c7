"""Random workloads through the real scheduler on the audit executor, held against the oracle.

`run(seed)` raises if any law breaks; it is the whole property suite in one call, so that a planted
bug can be tried against it.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from octavo.core.batch import Row, SampleSpec
from octavo.core.drafter import Drafter, NoDrafter, Offer, PromptLookup
from octavo.core.engine import Engine
from octavo.core.executor import Capacity
from octavo.core.fair import fair
from octavo.core.offline import behind
from octavo.core.policy import Policy, fcfs, priority, sjf, static
from octavo.core.request import (
    EXPIRED,
    Event,
    FinishReason,
    Request,
    SamplingParams,
    Sequence,
    Slo,
    State,
    Tier,
    Watcher,
)
from octavo.core.scheduler import Scheduler
from octavo.core.slo import slo
from tests.core.audit import VOCAB, AuditExecutor, choose, prefix_hash
from tests.core.oracle import Outcome, expected

FULL = (1 << VOCAB) - 1


class PlantedWatcher:
    """Stops, masks or raises at a given output token."""

    def __init__(self, kind: str, at: int) -> None:
        self.kind, self.at, self.seen = kind, at, 0

    def advance(self, tokens: tuple[int, ...]) -> tuple[int, FinishReason | None]:
        self.seen += len(tokens)
        if self.seen <= self.at or self.kind in ("mask", "raise in mask"):
            return len(tokens), None
        if self.kind == "raise in advance":
            raise RuntimeError("planted")
        if self.kind == "stop and drop":
            return 0, FinishReason.STOP
        return len(tokens), FinishReason.TOOL_CALLS

    def mask(self, position: int) -> bytes | None:
        if self.kind == "raise in mask" and position >= self.at:
            raise RuntimeError("planted")
        if self.kind != "mask" or position % 2:
            return None
        return ((0b1011 << (position % 16)) & FULL).to_bytes(VOCAB // 8, "little")

    def ahead(self, draft: array[int]) -> list[bytes | None]:
        masks: list[bytes | None] = []
        for position, token in enumerate(draft, self.seen):
            mask = self.mask(position)
            if mask is not None and not mask[token // 8] >> (token % 8) & 1:
                break
            masks.append(self.mask(position + 1))
        return masks

    def forced(self) -> tuple[int, ...]:
        return ()


KINDS = ("stop and keep", "stop and drop", "mask", "raise in advance", "raise in mask")


def _watcher(rng: random.Random) -> Callable[[], Watcher] | None:
    if rng.random() < 0.75:
        return None
    kind, at = rng.choice(KINDS), rng.randrange(6)
    return lambda: PlantedWatcher(kind, at)


@dataclass
class Workload:
    """A machine, a policy, requests by the turn in which they come, and what goes wrong when."""

    capacity: Capacity
    policy: Policy
    prefix_caching: bool
    arrivals: list[tuple[int, Request]]
    aborts: dict[str, int]
    faults: dict[str, int]
    drafter: Drafter = field(default_factory=NoDrafter)


class PlantedDrafter:
    """Offers what the model is going to choose, often with a wrong token in between, for all rows,
    fit or not, and more than there is room for."""

    def __init__(self, rng: random.Random, eager: float = 0.7, wrong: float = 0.2) -> None:
        self.rng, self.eager, self.wrong = rng, eager, wrong

    def drafts(self, rows: list[Row], live: Mapping[int, Sequence], room: int) -> list[Offer]:
        most = self.rng.choice((1, 2, 5, 12))
        numbers = [i for i in range(len(rows)) if self.rng.random() < self.eager]
        return [(i, self.future(live[rows[i].seq_id], most)) for i in numbers]

    def future(self, seq: Sequence, most: int) -> array[int]:
        request, tokens = seq.request, list(seq.tokens)
        for _ in range(most):
            suppress = tuple(request.stop_ids) if len(tokens) < seq.stop_from else ()
            spec = SampleSpec(request.params, request.seed, seq.choice, suppress=suppress)
            mask = None
            if isinstance(seq.watcher, PlantedWatcher) and seq.watcher.kind == "mask":
                mask = seq.watcher.mask(len(tokens) - seq.num_prompt)
            prefix = prefix_hash(request.namespace, tokens)
            token = choose(prefix, spec, len(tokens), mask)
            wrong = self.rng.random() < self.wrong
            tokens.append(self.rng.randrange(VOCAB) if wrong else token)
        return array("i", tokens[len(seq.tokens) :])

    def learn(self, seq: Sequence, drafted: int, accepted: int) -> None:
        assert 0 <= accepted <= drafted

    def timed(self, rows: int, tokens: int, drafted: int, seconds: float) -> None:
        assert 0 < rows <= tokens - drafted <= tokens


def _drafter(seed: int) -> Drafter:
    rng = random.Random(f"drafter {seed}")
    kind = rng.choice(("none", "planted", "planted", "lookup"))
    if kind == "none":
        return NoDrafter()
    if kind == "lookup":
        return PromptLookup(rng.choice((1, 4, 15)))
    return PlantedDrafter(rng, rng.choice((0.3, 1.0)), rng.choice((0.0, 0.2, 0.5)))


def _prompt(rng: random.Random, bases: list[list[int]]) -> array[int]:
    base = rng.choice(bases)
    cut = rng.choice((0, len(base), len(base), rng.randrange(len(base) + 1)))
    tail = [rng.randrange(VOCAB) for _ in range(rng.choice((0, 1, 1, rng.randrange(1, 24))))]
    return array("i", (base[:cut] + tail) or [rng.randrange(VOCAB)])


def _params(rng: random.Random) -> SamplingParams:
    def maybe(chance: float, value: object, otherwise: object = None) -> object:
        return value if rng.random() < chance else otherwise

    return SamplingParams(
        max_tokens=maybe(0.93, rng.choice((1, 2, rng.randrange(1, 20), rng.randrange(8, 32)))),
        min_tokens=maybe(0.2, rng.randrange(4), 0),
        n=rng.choice((1, 1, 1, 1, 2, 3)),
        logprobs=maybe(0.2, rng.randrange(3)),
        prompt_logprobs=maybe(0.2, rng.randrange(3)),
        repetition_penalty=maybe(0.15, 1.5, 1.0),
        presence_penalty=maybe(0.1, 0.5, 0.0),
    )


def _slo(rng: random.Random) -> Slo:
    """Deadlines in turns: out of reach, tight, easy or none."""
    return Slo(
        ttft=rng.choice((None, 0.5, 6.0, 40.0)),
        tpot=rng.choice((None, 0.1, 1.5, 9.0)),
        e2e=rng.choice((None, None, None, 12.0, 90.0)),
    )


def _policy(rng: random.Random) -> Policy:
    return rng.choice(
        (
            fcfs(),
            fcfs(),
            priority(rng.choice((1.0, 20.0))),
            static(),
            sjf(rng.choice((0.5, 8.0))),
            fair({"b": 3.0}),
            slo(),
            fair(within=slo()),
            behind(rng.choice((fcfs(), sjf(), slo(), fair()))),
        )
    )


def _requests(rng: random.Random, *, crowded: bool) -> list[tuple[int, Request]]:
    bases = [
        [rng.randrange(VOCAB) for _ in range(rng.choice((1, 8, rng.randrange(1, 48))))]
        for _ in range(rng.randrange(1, 4))
    ]
    spread = rng.choice((1, 8)) if crowded else rng.choice((1, 30, 120))
    out = []
    for i in range(rng.randrange(3, 14) if crowded else rng.randrange(1, 8)):
        turn = rng.randrange(spread)
        stop_ids = frozenset(rng.sample(range(VOCAB), rng.choice((0, 0, 1, 2))))
        request = Request(
            id=f"r{i}",
            prompt=_prompt(rng, bases),
            params=_params(rng),
            arrival=float(turn),
            seed=rng.getrandbits(16),
            stop_ids=stop_ids,
            priority=rng.choice((0, 0, 1, -2)),
            namespace=rng.choice((b"", b"", b"tenant")),
            watcher=_watcher(rng),
            tenant=rng.choice("aab"),
            slo=_slo(rng),
            tier=rng.choice(list(Tier)),
        )
        out.append((turn, request))
    return out


def _capacity(rng: random.Random, arrivals: list[tuple[int, Request]], crowded: bool) -> Capacity:
    """Pools go down to the one sequence that needs most."""
    size = rng.choice((1, 1, 2, 3, 4, 5, 8, 16, 32, 64))
    need = max(len(r.prompt) + (r.params.max_tokens or 8) - 1 for _, r in arrivals)
    blocks = -(-need // size)
    if crowded:
        blocks += rng.choice((0, 1, 2, rng.randrange(3 * blocks)))
    else:
        blocks += rng.choice((0, 1, 2, rng.randrange(1, 60)))
    return Capacity(
        num_blocks=blocks,
        block_size=size,
        max_tokens=rng.choice((6, 16, 64, 512) if crowded else (1, 3, 16, 64, 512)),
        max_rows=rng.choice((4, 16, 64) if crowded else (1, 2, 4, 16)),
        max_outputs=rng.choice((4, 6, 64) if crowded else (1, 2, 8, 64)),
        max_context=max(need + 1, rng.choice((96, 130))),
        depth=rng.choice((1, 1, 2, 3)),
    )


def _squeeze(rng: random.Random) -> Workload:
    """Urgent long prompts come among sequences that decode and grow, in steps of few tokens: the
    first in the order must take blocks from sequences that were given a row just before."""
    decoders = rng.randrange(2, 5)

    def request(i: int, turn: int, num_prompt: int, max_tokens: int) -> tuple[int, Request]:
        prompt = array("i", [rng.randrange(VOCAB) for _ in range(num_prompt)])
        scored = 1 if turn == 1 else None
        params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=scored)
        urgent = -int(turn > 3)
        return turn, Request(f"r{i}", prompt, params, float(turn), i, priority=urgent)

    arrivals = [request(i, 0, rng.randrange(2, 6), 40) for i in range(decoders)]
    arrivals.append(request(decoders, 1, rng.randrange(20, 40), 4))
    arrivals += [request(decoders + i, 3 + i, rng.randrange(40, 60), 4) for i in (1, 2)]
    capacity = Capacity(
        num_blocks=rng.randrange(66, 80),
        block_size=1,
        max_tokens=decoders + rng.randrange(1, 4),
        max_rows=8,
        max_outputs=8,
        max_context=96,
        depth=rng.choice((1, 1, 2)),
    )
    return Workload(
        capacity, priority(100.0), True, arrivals, {}, {}, _drafter(rng.getrandbits(32))
    )


def draw(seed: int) -> Workload:
    """A random workload; every other one crowds a small pool, every eighth squeezes it."""
    rng, crowded = random.Random(seed), seed % 2 == 0
    if seed % 8 == 7:
        return _squeeze(rng)
    arrivals = _requests(rng, crowded=crowded)
    ids = [request.id for _, request in arrivals]
    return Workload(
        capacity=_capacity(rng, arrivals, crowded),
        policy=_policy(rng),
        prefix_caching=rng.random() < 0.9,
        arrivals=sorted(arrivals, key=lambda arrival: arrival[0]),
        aborts={i: rng.randrange(60) for i in ids if rng.random() < 0.12},
        faults={i: rng.randrange(60) for i in ids if rng.random() < 0.08},
        drafter=_drafter(seed),
    )


@dataclass
class Run:
    """A workload in progress."""

    work: Workload
    rng: random.Random
    outcomes: dict[tuple[str, int], Outcome] = field(default_factory=dict)
    expired: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        work = self.work
        self.scheduler = Scheduler(
            work.capacity,
            work.policy,
            prefix_caching=work.prefix_caching,
            drafter=work.drafter,
        )
        self.executor = AuditExecutor(
            work.capacity, self.rng, lambda i: self.scheduler._live[i].request, work.faults
        )
        self.engine = Engine(self.executor, self.scheduler)

    def note(self, events: list[Event]) -> None:
        for event in events:
            out = self.outcomes[event.request_id, event.choice]
            assert out.finish is None, "news of a choice that had ended"
            if event.error == EXPIRED:
                assert event.finish is FinishReason.ABORT
                self.expired.add(event.request_id)
            else:
                assert (event.error is not None) == (event.finish is FinishReason.ERROR)
            out.tokens.extend(event.tokens)
            out.logprobs.extend(event.logprobs or ())
            if event.prompt_logprobs is not None:
                assert out.prompt_logprobs is None, "prompt logprobs came twice"
                out.prompt_logprobs = event.prompt_logprobs
            out.finish = event.finish
            assert event.tokens or event.finish is not None, "an event without news"

    def turn(self, now: float) -> None:
        """Arrivals, aborts between any two calls, one pump and perhaps a drain; check all along."""
        engine, work = self.engine, self.work
        for due, request in work.arrivals:
            if due == now:
                for choice in range(request.params.n):
                    self.outcomes[request.id, choice] = Outcome()
                engine.add(request)
        self.abort_due(now)
        # Work that nobody waits for may have to make room for what came since.
        first = [s for s in self.scheduler.running[:1] if s.request.tier is not Tier.BATCH]
        submitted = engine.pump(now)
        assert all(s.state is not State.WAITING for s in first), "the first in order gave way"
        self.scheduler.check()
        self.abort_due(now + 0.5)
        idle = engine.has_work and not engine.num_outstanding
        if self.rng.random() < 0.7 or engine.num_outstanding == work.capacity.depth or idle:
            events = engine.drain(now + 0.5)
            self.note(events)
            self.scheduler.check()
            assert submitted or events or not idle, "work, and nothing moves"

    def abort_due(self, now: float) -> None:
        for request_id, turn in self.work.aborts.items():
            if turn + (int(request_id[1:]) % 2) / 2 == now:
                self.note(self.engine.abort(request_id, now))
                self.scheduler.check()

    def finish(self) -> None:
        last = max(turn for turn, _ in self.work.arrivals)
        tokens = sum(
            (len(r.prompt) + self.work.capacity.max_context) * r.params.n
            for _, r in self.work.arrivals
        )
        now = 0
        while now <= last or self.engine.has_work:
            self.turn(float(now))
            now += 1
            assert now < last + 500 + 8 * tokens, "no progress"
        blocks = self.scheduler.blocks
        assert blocks.num_available == blocks.num_blocks, "blocks leaked"
        assert not self.scheduler._roster.set_aside, "held for ever"
        assert not blocks._claims, "claims leaked"

    def verify(self) -> None:
        """Every choice gave what the oracle says; an aborted one a beginning of it."""
        for _, request in self.work.arrivals:
            fault = self.work.faults.get(request.id)
            for choice in range(request.params.n):
                want = expected(request, choice, self.scheduler.max_len, fault)
                got = self.outcomes[request.id, choice]
                if got.finish is FinishReason.ABORT:
                    gone = request.id in self.expired and not got.tokens
                    assert gone or request.id in self.work.aborts
                    assert got.tokens == want.tokens[: len(got.tokens)], "aborted: other tokens"
                else:
                    assert got == want, f"{request.id}/{choice}: {got} instead of {want}"


def run(seed: int) -> Scheduler:
    """One random workload from start to end; raises AssertionError if a law breaks."""
    work = Run(draw(seed), random.Random(seed + 1))
    work.finish()
    work.verify()
    return work.scheduler
