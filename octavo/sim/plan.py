"""The cheapest fleet that meets the objectives for a trace, and how sure that is.

A fleet is good enough if the share of requests that meet all objectives reaches the target on the
trace itself and, with its lower confidence bound, over bootstrap samples of it with noise on the
durations. The least number of replicas of each kind is found by bisection (more never hurt), pairs
of kinds by walking along the edge that the cheapest so far leaves open. What simulations cost is
kept low by giving up on a fleet as soon as it can no longer reach the target.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

from octavo.core.request import Slo
from octavo.errors import InvalidRequest
from octavo.sim.fleet import Fleet, LeastTokens, Outcome, PredictedCost, Spec, prefill_rate, wanting
from octavo.sim.report import Report, met, report
from octavo.sim.workload import Workload

MOST = 512  # replicas of one kind
NOISE = 0.05

# Student's t, 95 % one-sided, by degrees of freedom; the last serves all beyond.
T95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)


class Group(NamedTuple):
    """So many replicas of one kind."""

    spec: Spec
    number: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A fleet that reaches the target. price: dollars an hour. shares: attainment on the trace,
    then on each bootstrap sample. sure: lower 95 % bound of the samples' mean."""

    groups: tuple[Group, ...]
    price: float
    shares: tuple[float, ...]
    sure: float
    report: Report

    @property
    def name(self) -> str:
        return " + ".join(f"{g.number} x {g.spec.name}" for g in self.groups)


@dataclass(slots=True)
class Plan:
    """candidates: cheapest first, the best of each kind and mixed ones. impossible: (kind, why).
    simulations: how many runs the answer took."""

    load: Workload
    slo: Slo
    target: float
    candidates: list[Candidate] = field(default_factory=list)
    impossible: list[tuple[str, str]] = field(default_factory=list)
    simulations: int = 0

    @property
    def best(self) -> Candidate | None:
        return self.candidates[0] if self.candidates else None


class Planner:
    """seeds: bootstrap samples for the final check. told: called with what is being tried."""

    def __init__(
        self,
        load: Workload,
        slo: Slo,
        *,
        target: float = 0.9,
        seeds: int = 8,
        told: Callable[[str], None] = lambda _: None,
    ) -> None:
        if not 0 < target <= 1:
            raise InvalidRequest(f"the target must be in (0, 1], got {target!r}", "target")
        if not slo:
            raise InvalidRequest("a plan needs an objective: --slo-ttft, --slo-tpot", "slo")
        if seeds < 2:
            raise InvalidRequest("confidence needs at least 2 seeds", "seeds")
        self.result = Plan(load, slo, target)
        self._samples = [load.resampled(seed) for seed in range(1, seeds + 1)]
        self._told = told
        self._known: dict[tuple[Group, ...], Report] = {}

    def plan(self, specs: Sequence[Spec], *, mixed: bool = True) -> Plan:
        """Try every kind alone, then pairs of the affordable ones. Specs need prices."""
        for spec in specs:
            if spec.price is None:
                raise InvalidRequest(f"{spec.name} has no price: give --price", "price")
        alone = [c for spec in specs if (c := self._alone(spec)) is not None]
        self.result.candidates.extend(alone)
        if mixed:
            best: dict[str, Candidate] = {}
            for c in sorted(alone, key=lambda c: (c.price, -c.sure)):
                best.setdefault(c.groups[0].spec.kind, c)
            for one, two in combinations(best.values(), 2):
                self._pairs(one, two)
        self.result.candidates.sort(key=lambda c: (c.price, -c.sure))
        return self.result

    # ---- one kind ----

    def _alone(self, spec: Spec) -> Candidate | None:
        low, high = 0, 1
        while not self._enough((Group(spec, high),)):
            low, high = high, high * 2
            if high > MOST or self._never(spec):
                why = "an idle replica misses the objectives" if high <= MOST else f"{MOST} miss"
                self.result.impossible.append((spec.name, why))
                return None
        while high - low > 1:
            middle = (low + high) // 2
            if self._enough((Group(spec, middle),)):
                high = middle
            else:
                low = middle
        for count in range(high, min(2 * high + 4, MOST)):
            found = self._check((Group(spec, count),))
            if found is not None:
                return found
        self.result.impossible.append((spec.name, f"{2 * high + 4} are not sure to be enough"))
        return None

    def _never(self, spec: Spec) -> bool:
        """Whether requests that are alone on a replica miss the target already."""
        items = [i._replace(at=1e5 * k) for k, i in enumerate(self.result.load.items[:64])]
        alone = Workload("alone", tuple(items), self.result.load.block_tokens)
        return self._attained(alone, (Group(spec, 1),), 0).attainment < self.result.target

    # ---- two kinds ----

    def _pairs(self, one: Candidate, two: Candidate) -> None:
        """Keep mixes that are cheaper than anything so far: fewer of the one, some of the other."""
        (a,), (b,) = one.groups, two.groups
        assert a.spec.price is not None
        assert b.spec.price is not None
        for count in range(a.number - 1, 0, -1):
            cheapest = min(c.price for c in self.result.candidates)
            most = math.ceil((cheapest - count * a.spec.price) / b.spec.price) - 1
            if most < 1 or not self._enough((Group(a.spec, count), Group(b.spec, most))):
                continue
            low, high = 0, most
            while high - low > 1:
                middle = (low + high) // 2
                if self._enough((Group(a.spec, count), Group(b.spec, middle))):
                    high = middle
                else:
                    low = middle
            for number in range(high, most + 1):  # enough on the trace may not be sure on samples
                found = self._check((Group(a.spec, count), Group(b.spec, number)))
                if found is not None:
                    self.result.candidates.append(found)
                    break

    # ---- simulating ----

    def _enough(self, groups: tuple[Group, ...]) -> bool:
        if groups not in self._known:
            self._known[groups] = self._attained(self.result.load, groups, 0)
        return self._known[groups].attainment >= self.result.target

    def _check(self, groups: tuple[Group, ...]) -> Candidate | None:
        """The candidate, if the samples too reach the target with confidence."""
        if not self._enough(groups):
            return None
        shares = [
            self._attained(sample, groups, seed).attainment
            for seed, sample in enumerate(self._samples, 1)
        ]
        n = len(shares)
        t = T95[min(n - 2, len(T95) - 1)]
        sure = statistics.mean(shares) - t * statistics.stdev(shares) / math.sqrt(n)
        if sure < self.result.target:
            return None
        one = self._known[groups]
        price = sum(g.number * (g.spec.price or 0.0) for g in groups)
        return Candidate(groups, price, (one.attainment, *shares), sure, one)

    def _attained(self, load: Workload, groups: tuple[Group, ...], seed: int) -> Report:
        """A run that gives up once the target is out of reach."""
        slo = self.result.slo
        room = int((1.0 - self.result.target) * len(load))
        missed = 0

        def hopeless(outcome: Outcome) -> bool:
            nonlocal missed
            missed += not met(slo, outcome)
            return missed > room

        named = " + ".join(f"{g.number} x {g.spec.name}" for g in groups)
        self._told(named)
        self.result.simulations += 1
        noise = NOISE if seed else 0.0
        specs = [g.spec._replace(noise=noise) for g in groups for _ in range(g.number)]
        router = LeastTokens() if len(groups) == 1 else PredictedCost(prefill_rate)
        fleet = Fleet(
            specs, router, seed=seed, prefix_caching=load.shares_prefixes, keep_gaps=False
        )
        return report(fleet.run(load, wanting(slo), hopeless=hopeless), slo, named)


def table(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """(head, rows): a fleet a row, cheapest first."""
    head = ["fleet", "$/h", "attained", "sure of", "TTFT P99 ms", "TPOT P99 ms", "busy",
            "$/M tok"]  # fmt: skip
    rows = []
    for c in plan.candidates:
        one = c.report
        cost = one.dollars_per_million
        rows.append([
            c.name, f"{c.price:.2f}", f"{c.shares[0]:.1%}", f"{c.sure:.1%}",
            f"{one.ttft.p99 * 1e3:.0f}", f"{one.tpot.p99 * 1e3:.1f}", f"{one.utilisation:.0%}",
            "-" if cost is None else f"{cost:.2f}",
        ])  # fmt: skip
    return head, rows
