"""`octavo lab scheduling`: who goes first, on one workload that is more than the engine can serve.

Three tenants: two chat (short prompts, tight deadlines), one sends documents (long prompts, loose
deadlines, most of the work). Everybody's deadlines are multiples of the time that one request takes
alone on this machine. Attainment: requests that met TTFT and TPOT, of all sent; a refused one met
nothing. Fairness: Jain's index of the tenants' attainments, 1 where all fare alike and 1/n where
one has everything.

What the engine can serve is measured anew before every round, by the same requests all at once, and
the round's load is a multiple of the most that was seen so far. What the load was in truth shows in
the round itself: all policies but those that refuse do the same work, and how long it took, over
the time in which the requests came, is the load. A round that was no overload does not count; if
none was, the run is inconclusive and says so.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from octavo import plots
from octavo.assembly import Assembly
from octavo.core.admission import Admission
from octavo.core.policies import POLICIES
from octavo.core.request import Request, Slo
from octavo.errors import Unattainable
from octavo.lab import stage
from octavo.lab.finding import Finding, Sheet
from octavo.lab.stage import Clock, Setting, Trial, Visit, Watch
from octavo.neighbours import Neighbours, busy_note

ADMISSION = "+admission"


@dataclass(frozen=True, slots=True)
class Tenant:
    """weight: its share of the requests. slack: how loose its TTFT is, beside a chat's."""

    name: str
    weight: int
    prompt: int
    output: int
    priority: int = 0
    slack: float = 1.0


TENANTS = (
    Tenant("ann", 2, 32, 24),
    Tenant("ben", 1, 32, 24),
    Tenant("documents", 2, 256, 24, priority=1, slack=4.0),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """load: arrivals, in multiples of what the engine can serve. ttft, tpot: deadlines, in
    multiples of what a chat takes alone. chunk: tokens of a step at most, for the policies that do
    not size their steps by deadlines: those that do may use all that the engine takes. seconds: all
    rounds together may take about so long; on a slow machine there are fewer requests then."""

    policies: tuple[str, ...] = ("fcfs", "priority", "sjf", "fair", "slo", "slo+admission")
    load: float = 1.3
    requests: int = 50
    ttft: float = 10.0
    tpot: float = 20.0
    chunk: int = 64
    repeats: int = 3
    tenants: tuple[Tenant, ...] = TENANTS
    seed: int = 0
    seconds: float = 80.0

    def count(self, per_s: float) -> int:
        """Requests of a run on an engine that serves so many a second."""
        runs = self.repeats * (len(self.policies) + 1)
        return min(self.requests, max(LEAST, int(per_s * self.seconds / runs)))


LEAST = 24  # requests of a run


@dataclass(frozen=True, slots=True)
class Round:
    """Every policy once. capacity: requests a second, as measured before; span: seconds in which
    the requests came; tail: that the last of them takes alone; runs: what became of all, and how
    many were refused."""

    capacity: float
    span: float
    tail: float
    runs: dict[str, tuple[Trial, int]]

    @property
    def load(self) -> float:
        """As it was: the time that the work took over the time in which it came."""
        whole = [t.seconds for p, (t, _) in self.runs.items() if not p.endswith(ADMISSION)]
        took = median(whole or [t.seconds for t, _ in self.runs.values()])
        return (took - self.tail) / self.span


def measure(
    assembly: Assembly, plan: Plan, watch: Watch = lambda _: None, clock: Clock = Clock()
) -> dict[str, Any]:
    """Run the plan; plain values."""
    neighbours, vocab = Neighbours(), assembly.door.vocab_size
    stage.warm(assembly)
    models = [stage.learned(assembly, clock)]

    def run(policy: str, wanted: Sequence[Request]) -> tuple[Trial, int]:
        made = POLICIES[policy.removesuffix(ADMISSION)]
        chunk = None if made().timed else plan.chunk
        setting = Setting(policy, made, tokens=chunk, model=models[-1])
        engine = setting.engine(assembly.executor)
        gate = _Gate(Admission(engine.scheduler)) if policy.endswith(ADMISSION) else None
        if gate is None:
            return stage.play(engine, wanted, clock), 0
        return stage.play(engine, wanted, clock, gate=gate), gate.refused

    def at_once(count: int) -> list[Request]:
        burst = [v._replace(at=0.0, slo=Slo()) for v in _visits(plan, count, slos)]
        return stage.requests(burst, vocab, "scheduling")

    watch("what one request takes alone")
    base, chat = _alone(assembly, plan, clock)
    tail = base + (plan.tenants[0].output - 1) * chat
    slos = {t.name: Slo(plan.ttft * t.slack * base, plan.tpot * chat) for t in plan.tenants}
    watch("what the engine can serve")
    few = min(LEAST, plan.requests)
    fastest = few / (run("fcfs", at_once(few))[0].seconds - tail)
    count = plan.count(fastest)
    # A server has served before: what predicts the steps has seen this kind of load.
    model = models[-1]()
    models.append(lambda: model)
    run("slo", at_once(count))
    models.append(lambda: copy.deepcopy(model))
    rounds, visits, started = list[Round](), _visits(plan, count, slos), clock.now()
    for number in range(plan.repeats):
        if stage.too_long(clock.now() - started, number, plan.seconds):
            break
        of = f"round {number + 1} of {plan.repeats}"
        watch(f"what it can serve now, {of}")
        fastest = max(fastest, count / (run("fcfs", at_once(count))[0].seconds - tail))
        span = count / (plan.load * fastest)
        wanted = stage.requests([v._replace(at=v.at * span) for v in visits], vocab, "scheduling")
        k, runs = number % len(plan.policies), {}
        for policy in (*plan.policies[k:], *plan.policies[:k]):
            watch(f"{policy}, {of}")
            runs[policy] = run(policy, wanted)
        rounds.append(Round(fastest, span, tail, {p: runs[p] for p in plan.policies}))
        fastest = max(fastest, count / (rounds[-1].load * span))
    owners = {f"r{number}": visit.tenant for number, visit in enumerate(visits)}
    return _values(assembly.name, plan, rounds, owners, slos) | {"neighbours": neighbours.share()}


def _values(
    model: str, plan: Plan, rounds: list[Round], owners: dict[str, str], slos: dict[str, Slo]
) -> dict[str, Any]:
    """Of the rounds that were overloads, or of all where none was."""
    least = least_load(plan.load)
    counted = [one for one in rounds if one.load >= least]
    shown = counted or rounds
    return {
        "model": model,
        "requests": len(owners),
        "asked_requests": plan.requests,
        "asked_rounds": plan.repeats,
        "load": plan.load,
        "least_load": least,
        "conclusive": bool(counted),
        "rounds": [
            {"capacity_per_s": r.capacity, "offered_per_s": len(owners) / r.span, "load": r.load,
             "counts": r.load >= least}
            for r in rounds
        ],
        "chunk": plan.chunk,
        "offered_per_s": median(len(owners) / one.span for one in shown),
        "measured_load": median(one.load for one in shown),
        "tenants": [dataclasses.asdict(t) for t in plan.tenants],
        "slo": {n: {"ttft_s": s.ttft, "tpot_s": s.tpot} for n, s in slos.items()},
        "policies": {
            p: _fared([one.runs[p] for one in shown], owners, plan) for p in plan.policies
        },
    }  # fmt: skip


def _counted(values: dict[str, Any]) -> int:
    """Rounds that are shown: those that were an overload, or all where none was."""
    return sum(one["counts"] for one in values["rounds"]) or len(values["rounds"])


def least_load(asked: float) -> float:
    """What the load must have been for a round to count: half of the overload that was asked."""
    return 1.0 + (asked - 1.0) / 2 if asked > 1.0 else 0.0


class _Gate:
    """Admission before the scheduler, as the server has it; counts whom it sends away."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.refused = 0

    def __call__(self, request: Request, now: float) -> Request | None:
        try:
            return self._admission.judge(request, now)
        except Unattainable:
            self.refused += 1
            return None


def _alone(assembly: Assembly, plan: Plan, clock: Clock) -> tuple[float, float]:
    """(TTFT, TPOT) of one chat with nobody beside it, the median of a few."""
    first = plan.tenants[0]
    trials = []
    for number in range(5):
        visit = [Visit(0.0, first.prompt, first.output)]
        wanted = stage.requests(visit, assembly.door.vocab_size, f"alone {number}")
        engine = Setting("alone").engine(assembly.executor)
        trials.append(stage.play(engine, wanted, clock).timings[0])
    ttft = stage.quantile([t.ttft or 0.0 for t in trials], 0.5)
    return ttft, stage.quantile([t.tpot or 0.0 for t in trials], 0.5)


def _visits(plan: Plan, count: int, slos: dict[str, Slo]) -> list[Visit]:
    """Arrivals within one second, as random as they are but for that; whose they are is drawn by
    weight."""
    draw, now, made = random.Random(f"scheduling {plan.seed}"), 0.0, []
    weights = [t.weight for t in plan.tenants]
    for _ in range(count):
        now += draw.expovariate(1.0)
        (t,) = draw.choices(plan.tenants, weights)
        made.append(Visit(now, t.prompt, t.output, t.name, t.priority, slos[t.name]))
    return [visit._replace(at=visit.at / now) for visit in made]


def _fared(runs: list[tuple[Trial, int]], owners: dict[str, str], plan: Plan) -> dict[str, Any]:
    """How one policy's requests fared."""
    names = [t.name for t in plan.tenants]
    sent = {name: max(1, sum(owner == name for owner in owners.values())) for name in names}
    good = [
        {n: sum(t.met for t in trial.timings if t.tenant == n) / sent[n] for n in names}
        for trial, _ in runs
    ]
    middle, trials = stage.middle, [trial for trial, _ in runs]
    return {
        "attainment": middle(sum(t.met for t in trial.timings) / len(owners) for trial in trials),
        "goodput_per_s": middle(sum(t.met for t in t_.timings) / t_.seconds for t_ in trials),
        "by_tenant": {n: middle(share[n] for share in good) for n in names},
        "fairness": middle(jain(list(share.values())) for share in good),
        "refused": fmean(refused for _, refused in runs),
        "ttft_p50_s": middle(stage.quantile(t.ttfts, 0.5) for t in trials),
        "ttft_p99_s": middle(stage.quantile(t.ttfts, 0.99) for t in trials),
        "output_tokens_per_s": middle(t.tokens_per_s for t in trials),
        "chat_ttfts_s": sorted(
            t.ttft for trial in trials for t in trial.timings
            if t.ttft is not None and t.tenant in names[:2]
        ),
        "chats": len(trials) * sum(sent[n] for n in names[:2]),
    }  # fmt: skip


def jain(shares: Sequence[float]) -> float:
    """Jain's fairness index (Jain et al. 1984): (sum x)^2 / (n sum x^2); 0 where nobody has any."""
    squares = sum(x * x for x in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 0.0


# ---- what it shows ----


def finding(values: dict[str, Any]) -> Finding:
    names = [t["name"] for t in values["tenants"]]
    head = ("policy", "attained %", *(f"{n} %" for n in names), "fairness", "goodput req/s",
            "refused", "TTFT P50 ms", "TTFT P99 ms", "tokens/s")  # fmt: skip
    show = stage.shown
    rows = tuple(
        (
            policy, show(one["attainment"], 100),
            *(f"{one['by_tenant'][n]['median'] * 100:.0f}" for n in names),
            f"{one['fairness']['median']:.2f}", show(one["goodput_per_s"], 1, 1),
            f"{one['refused']:.0f}", f"{one['ttft_p50_s']['median'] * 1e3:.0f}",
            f"{one['ttft_p99_s']['median'] * 1e3:.0f}",
            f"{one['output_tokens_per_s']['median']:.0f}",
        )
        for policy, one in values["policies"].items()
    )  # fmt: skip
    title = (
        f"{values['model']}: {values['requests']} requests at {values['offered_per_s']:.1f}/s, "
        f"{values['measured_load']:.2f} times what the engine could serve; "
        f"{stage.spread(_counted(values))}"
    )
    says = (_objectives(values), _says(values), *busy_note(values))
    return Finding(values, (Sheet(title, head, rows),), says, lambda path: draw(values, path))


def _objectives(values: dict[str, Any]) -> str:
    each = ", ".join(f"{name} {slo['ttft_s'] * 1e3:.0f} ms" for name, slo in values["slo"].items())
    tpot = next(iter(values["slo"].values()))["tpot_s"]
    return (
        f"Deadlines: first token within {each}; then {tpot * 1e3:.1f} ms a token. Policies that do "
        f"not look at deadlines have steps of at most {values['chunk']} tokens; slo sizes its own."
    )


def _says(values: dict[str, Any]) -> str:
    """What the rows show, and no more: figures that are shown alike are alike."""
    if not values["conclusive"]:
        return _inconclusive(values)
    rows = values["policies"]
    found = {p: f"{one['attainment']['median']:.0%}" for p, one in rows.items()}
    fair = {p: f"{one['fairness']['median']:.2f}" for p, one in rows.items()}
    parts = [
        _ranked(found, "Of the same requests", "serve", "{} in time"),
        _ranked(fair, "By Jain's index of fairness", "stand at", "{}"),
        _turned_away(values),
        _later(values),
        _written(values),
        _ceiling(values),
    ]
    return " ".join(part for part in parts if part) + _left_out(values)


def _ranked(found: dict[str, str], lead: str, verb: str, unit: str) -> str:
    """Who has most and who least of a figure, ties by name."""
    by_figure: dict[str, list[str]] = {}
    for policy, figure in found.items():
        by_figure.setdefault(figure, []).append(policy)
    order = sorted(by_figure, key=lambda figure: float(figure.rstrip("%")), reverse=True)
    if len(order) == 1:
        return f"{lead} all policies {verb} {unit.format(order[0])}: no order is better there."
    said = []
    for figure in (order[0], order[-1]):
        names = by_figure[figure]
        word, _, rest = verb.partition(" ")
        word += "s" * (len(names) == 1)
        said.append(f"{listed(names)} {word} {rest}{' ' if rest else ''}{unit.format(figure)}")
    return f"{lead} {said[0]}, {said[1]}."


def listed(names: Sequence[str]) -> str:
    """a, b and c."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _turned_away(values: dict[str, Any]) -> str:
    """What admission did, where there was any."""
    said = []
    for policy, one in values["policies"].items():
        if policy.endswith(ADMISSION):
            count = f"{one['refused']:.0f} of {values['requests']}"
            said.append(f"{policy} refused {count if one['refused'] >= 0.5 else 'nobody'}")
    return f"{listed(said)}." if said else ""


def _later(values: dict[str, Any]) -> str:
    """Who keeps more in time than the first policy, and lets some wait longer than it for that."""
    (first, base), *others = values["policies"].items()
    more = [
        f"{policy} {one['ttft_p99_s']['median'] * 1e3:.0f} ms"
        for policy, one in others
        if one["attainment"]["median"] > base["attainment"]["median"]
        and one["ttft_p99_s"]["median"] > 1.1 * base["ttft_p99_s"]["median"]
    ]
    if not more:
        return ""
    wait = f"{base['ttft_p99_s']['median'] * 1e3:.0f} ms"
    return (
        f"More in time than {first}, the last waiting longer for it (P99 of TTFT, {first} {wait}): "
        f"{listed(more)}."
    )


def _written(values: dict[str, Any]) -> str:
    """Whether an order made the engine faster; those that refuse have other work."""
    rates = [
        one["output_tokens_per_s"]["median"]
        for policy, one in values["policies"].items()
        if not policy.endswith(ADMISSION)
    ]
    if len(rates) < 2:
        return ""
    span = f"{min(rates):.0f} to {max(rates):.0f} tokens a second"
    if max(rates) < 1.1 * min(rates):
        return f"All that serve everybody write {span}: an order chooses who waits, no more."
    return f"Those that serve everybody write {span}."


def _ceiling(values: dict[str, Any]) -> str:
    ceiling = min(1.0, 1.0 / values["measured_load"])
    best = max(one["attainment"]["median"] for one in values["policies"].values())
    text = f"The ceiling in the long run is {ceiling:.0%}, what the engine can serve"
    if best <= ceiling:
        return f"{text}."
    return (
        f"{text}; more was kept because a run as short as this one ends before its backlog has "
        "outgrown the looser deadlines."
    )


def _inconclusive(values: dict[str, Any]) -> str:
    loads = ", ".join(f"{one['load']:.2f}" for one in values["rounds"])
    speeds = ", ".join(f"{one['capacity_per_s']:.1f}" for one in values["rounds"])
    return (
        f"INCONCLUSIVE: {values['load']:.2g} times what the engine can serve was to come, and "
        f"{loads} times came, by rounds; below {values['least_load']:.2f} nobody has to choose, "
        f"and what the policies did differently shows little. Measured before the rounds: {speeds} "
        "requests a second. The engine became faster meanwhile, so others were at work when it was "
        "measured; run it again on a quieter machine, or with a larger --load. The ceiling of "
        "what can be kept is all."
    )


def _left_out(values: dict[str, Any]) -> str:
    """What is not what was asked for."""
    rounds, text = values["rounds"], ""
    out = [one["load"] for one in rounds if not one["counts"]]
    if out:
        loads = ", ".join(f"{load:.2f}" for load in out)
        text += (
            f" {len(out)} of {len(rounds)} rounds are left out: the load turned out {loads} times "
            "what could be served, the machine having become faster meanwhile."
        )
    if values["requests"] < values["asked_requests"]:
        text += f" A run has {values['requests']} requests, not {values['asked_requests']}, so as "
        text += "to end in time."
    if len(rounds) < values["asked_rounds"]:
        text += f" For want of time there are {len(rounds)} rounds, not {values['asked_rounds']}."
    return text


# ---- the picture ----


def draw(values: dict[str, Any], path: str) -> None:
    policies, names = values["policies"], [t["name"] for t in values["tenants"]]
    drawing, (left, right) = plots.figure(1, 2, width=13, height=5.2)
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        places = [i + (number - (len(names) - 1) / 2) * width for i in range(len(policies))]
        shares = [one["by_tenant"][name] for one in policies.values()]
        left.bar(places, [100 * s["median"] for s in shares], width * 0.92,
                 color=plots.COLOURS[number], label=name)  # fmt: skip
        plots.whiskers(left, places, shares, 100.0, color=plots.INK, ls="none")
    for place, one in enumerate(policies.values()):
        whole = 100 * one["attainment"]["median"]
        left.hlines(whole, place - 0.45, place + 0.45, color=plots.INK, lw=2,
                    label="all" if place == 0 else None)  # fmt: skip
    left.set_xticks(range(len(policies)), [p.replace("+", "+\n") for p in policies])
    left.set_ylim(0, 125)
    left.set_yticks(range(0, 101, 20))
    left.set(title="Requests in time, by tenant", ylabel="% of those sent")
    left.grid(visible=False, axis="x")
    left.legend(loc="upper center", ncols=len(names) + 1, fontsize=9)
    _draw_ttfts(right, values)
    found = {p: f"{one['attainment']['median']:.0%}" for p, one in policies.items()}
    head = _ranked(found, "Of the same requests", "serve", "{} in time").rstrip(".")
    if not values["conclusive"]:
        head = f"Inconclusive: the load was {values['measured_load']:.2f} times what can be served"
    plots.headline(
        drawing,
        head,
        f"{values['model']}, {values['measured_load']:.2f} times the load that the engine could "
        f"serve; {stage.bars(_counted(values))}",
    )
    plots.save(drawing, path)


def _draw_ttfts(axes: Any, values: dict[str, Any]) -> None:
    """How long the chats waited; those never served are missing above."""
    for (policy, one), colour in zip(values["policies"].items(), plots.COLOURS, strict=False):
        times = np.array(one["chat_ttfts_s"]) * 1e3
        if len(times):
            share = 100 * np.arange(len(times) + 1) / max(1, one["chats"])
            axes.step([times[0], *times], share, where="post", lw=1.7, color=colour,
                      label=policy)  # fmt: skip
    limit = next(iter(values["slo"].values()))["ttft_s"]
    axes.axvline(limit * 1e3, color=plots.INK, lw=1.2, ls=(0, (4, 3)), label="deadline")
    axes.set_xscale("log")
    plots.round_ticks(axes.xaxis)
    axes.set_ylim(0, 103)
    axes.set(title="Time to first token of the chats", xlabel="ms", ylabel="% of those sent")
    axes.legend(loc="upper left", fontsize=9)
