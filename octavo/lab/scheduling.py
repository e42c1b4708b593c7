"""`octavo lab scheduling`: who goes first, on one workload that is more than the engine can serve.

Three tenants: two chat (short prompts, tight deadlines), one sends documents (long prompts, loose
deadlines, most of the work). Everybody's deadlines are multiples of the time that one request takes
alone on this machine. Attainment: requests that met TTFT and TPOT, of all sent; a refused one met
nothing. Fairness: Jain's index of the tenants' attainments, 1 where all fare alike and 1/n where
one has everything.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
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
    not size their steps by deadlines: those that do may use all that the engine takes."""

    policies: tuple[str, ...] = ("fcfs", "priority", "sjf", "fair", "slo", "slo+admission")
    load: float = 1.3
    requests: int = 50
    ttft: float = 20.0
    tpot: float = 20.0
    chunk: int = 64
    repeats: int = 3
    tenants: tuple[Tenant, ...] = TENANTS
    seed: int = 0


def measure(
    assembly: Assembly, plan: Plan, watch: Watch = lambda _: None, clock: Clock = Clock()
) -> dict[str, Any]:
    """Run the plan; plain values."""
    neighbours, vocab = stage.Neighbours(), assembly.door.vocab_size
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

    watch("what one request takes alone")
    base, chat = _alone(assembly, plan, clock)
    slos = {t.name: Slo(plan.ttft * t.slack * base, plan.tpot * chat) for t in plan.tenants}
    visits = _visits(plan, slos)
    burst = stage.requests([v._replace(at=0.0, slo=Slo()) for v in visits], vocab, "scheduling")
    watch("what the engine can serve")
    rate = plan.load * plan.requests / run("fcfs", burst)[0].seconds
    # A server has served before: what predicts the steps has seen this kind of load.
    model = models[-1]()
    models.append(lambda: model)
    run("slo", burst)
    models.append(lambda: copy.deepcopy(model))
    wanted = stage.requests([v._replace(at=v.at / rate) for v in visits], vocab, "scheduling")
    found = stage.in_turn(plan.policies, plan.repeats, lambda p, _: run(p, wanted), watch)
    owners = {request.id: request.tenant for request in wanted}
    return {
        "model": assembly.name,
        "requests": plan.requests,
        "load": plan.load,
        "chunk": plan.chunk,
        "offered_per_s": rate,
        "tenants": [dataclasses.asdict(t) for t in plan.tenants],
        "slo": {n: {"ttft_s": s.ttft, "tpot_s": s.tpot} for n, s in slos.items()},
        "policies": {p: _fared(runs, owners, plan) for p, runs in found.items()},
        "neighbours": neighbours.share(),
    }


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


def _visits(plan: Plan, slos: dict[str, Slo]) -> list[Visit]:
    """Arrivals at one a second; whose they are is drawn by weight."""
    draw, now, made = random.Random(f"scheduling {plan.seed}"), 0.0, []
    weights = [t.weight for t in plan.tenants]
    for _ in range(plan.requests):
        now += draw.expovariate(1.0)
        (t,) = draw.choices(plan.tenants, weights)
        made.append(Visit(now, t.prompt, t.output, t.name, t.priority, slos[t.name]))
    return made


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
        "attainment": middle(sum(t.met for t in trial.timings) / plan.requests for trial in trials),
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
        f"{values['load']:.2g} times what the engine can serve; medians (least–most)"
    )
    says = (_objectives(values), _says(values), *stage.busy_note(values))
    return Finding(values, (Sheet(title, head, rows),), says, lambda path: draw(values, path))


def _objectives(values: dict[str, Any]) -> str:
    each = ", ".join(f"{name} {slo['ttft_s'] * 1e3:.0f} ms" for name, slo in values["slo"].items())
    tpot = next(iter(values["slo"].values()))["tpot_s"]
    return (
        f"Deadlines: first token within {each}; then {tpot * 1e3:.1f} ms a token. Policies that do "
        f"not look at deadlines have steps of at most {values['chunk']} tokens; slo sizes its own."
    )


def _says(values: dict[str, Any]) -> str:
    found = {p: one["attainment"]["median"] for p, one in values["policies"].items()}
    fair = {p: one["fairness"]["median"] for p, one in values["policies"].items()}
    best, fairest = max(found, key=lambda p: found[p]), max(fair, key=lambda p: fair[p])
    worst = min(found, key=lambda p: found[p])
    ceiling = min(1.0, 1.0 / values["load"])
    return (
        f"Of the same requests {best} serves {found[best]:.0%} in time, {worst} "
        f"{found[worst]:.0%}. The fairest is {fairest} (Jain {fair[fairest]:.2f}). No order makes "
        "the engine faster: it only chooses who waits, so those that look at deadlines give up "
        "the requests that are lost anyway, and admission says so at the door. The ceiling in the "
        f"long run is {ceiling:.0%}, what the engine can serve; a run as short as this one ends "
        "before its backlog has outgrown the looser deadlines, so more can be kept."
    )


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
    found = {p: one["attainment"]["median"] for p, one in policies.items()}
    best = max(found, key=lambda p: found[p])
    first = next(iter(found))
    plots.headline(
        drawing,
        f"{best} serves {found[best]:.0%} of the same requests in time, {first} {found[first]:.0%}",
        f"{values['model']}, {values['load']:.2g} times the load that the engine can serve; "
        "medians, bars from the least to the most",
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
