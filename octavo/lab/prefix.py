"""`octavo lab prefix`: what it is worth that prompts which begin alike share their KV blocks.

A burst of requests with one system prompt, with the prefix cache and without; then several system
prompts in a pool that cannot keep all of them, under several policies: what counts there is who
runs next to whom, and how much the pool holds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Any

from octavo import plots
from octavo.assembly import Assembly
from octavo.core.policies import POLICIES
from octavo.core.request import Request, Slo
from octavo.lab import stage
from octavo.lab.finding import Finding, Sheet
from octavo.lab.stage import Clock, Setting, Trial, Visit, Watch
from octavo.neighbours import Neighbours, busy_note

KINDS = {"off": "without the prefix cache", "on": "with it"}


@dataclass(frozen=True, slots=True)
class Plan:
    """system: tokens of the system prompt; own: of each request after it. groups: how many system
    prompts (of `group_system` tokens) share a pool; pools: its blocks."""

    system: int = 512
    own: int = 32
    output: int = 16
    requests: int = 16
    repeats: int = 3
    groups: int = 6
    group_system: int = 160
    visits: int = 36
    rows: int = 4
    pools: tuple[int, ...] = (16, 24, 32, 48)
    policies: tuple[str, ...] = ("fcfs", "sjf", "slo")
    seed: int = 0
    seconds: float = stage.SECONDS / 2  # of the burst's rounds


def measure(
    assembly: Assembly, plan: Plan, watch: Watch = lambda _: None, clock: Clock = Clock()
) -> dict[str, Any]:
    """Run the plan; plain values."""
    neighbours = Neighbours()
    stage.warm(assembly)
    burst = _burst(assembly, plan, watch, clock)
    return {
        "model": assembly.name,
        "system": plan.system,
        "own": plan.own,
        "requests": plan.requests,
        "burst": burst,
        "asked": {"rounds": plan.repeats},
        "had": {"rounds": burst["on"].pop("rounds")},
        "groups": plan.groups,
        "group_system": plan.group_system,
        "visits": plan.visits,
        "rows": plan.rows,
        "block_size": assembly.executor.capacity.block_size,
        "hits": _hits(assembly, plan, watch, clock),
        "neighbours": neighbours.share(),
    }


def _burst(assembly: Assembly, plan: Plan, watch: Watch, clock: Clock) -> dict[str, Any]:
    """One system prompt, all requests at once, with the cache and without."""
    vocab = assembly.door.vocab_size
    shared = tuple(stage.numbers(f"system {plan.seed}", plan.system, vocab))
    visit = Visit(0.0, plan.system + plan.own, plan.output, shared=shared)
    wanted = stage.requests([visit] * plan.requests, vocab, f"prefix {plan.seed}")

    def run(kind: str, _: int) -> Trial:
        engine = Setting(kind, prefix_caching=kind == "on").engine(assembly.executor)
        return stage.play(engine, wanted, clock)

    rounds = stage.Rounds(plan.repeats, plan.seconds, clock)
    found = stage.in_turn(list(KINDS), rounds, run, watch, lambda kind: f"cache {kind}")
    return {
        kind: {
            "ttfts_s": [median(at) for at in zip(*(sorted(t.ttfts) for t in trials), strict=True)],
            "ttft_p50_s": stage.middle(stage.quantile(t.ttfts, 0.5) for t in trials),
            "ttft_last_s": stage.middle(max(t.ttfts) for t in trials),
            "rounds": len(trials),
            "seconds": stage.middle(t.seconds for t in trials),
            "output_tokens_per_s": stage.middle(t.tokens_per_s for t in trials),
            "computed_tokens": trials[0].counters["computed_tokens"],
            "cached_tokens": trials[0].counters["cached_tokens"],
            "prompt_tokens": trials[0].counters["prompt_tokens"],
        }
        for kind, trials in found.items()
    }


def _hits(assembly: Assembly, plan: Plan, watch: Watch, clock: Clock) -> dict[str, Any]:
    """Hit rates of each policy with each pool; the ceiling is a pool that forgets nothing."""
    vocab, learned = assembly.door.vocab_size, stage.learned(assembly, clock)
    alone = _group_requests(plan, vocab, inf)[:1]
    trial = stage.play(Setting("alone", rows=1).engine(assembly.executor), alone, clock)
    rate = 2.0 / trial.seconds  # twice what could be served if nothing were shared
    wanted = _group_requests(plan, vocab, rate)
    rates: dict[str, list[float]] = {}
    for policy in plan.policies:
        rates[policy] = []
        for blocks in plan.pools:
            watch(f"{policy}, {blocks} blocks")
            setting = Setting(policy, POLICIES[policy], plan.rows, None, blocks, True, learned)
            counters = stage.play(setting.engine(assembly.executor), wanted, clock).counters
            # Per request, not per admission: what a preempted one finds again is no sharing.
            rates[policy].append(counters["cached_tokens"] / counters["prompt_tokens"])
    return {"pools": list(plan.pools), "rates": rates, "ceiling": _ceiling(plan, assembly)}


def _group_requests(plan: Plan, vocab: int, rate: float) -> list[Request]:
    """Requests of several system prompts in random order, with a deadline that none can miss."""
    draw, now = random.Random(f"groups {plan.seed}"), 0.0
    systems = [
        tuple(stage.numbers(f"system {plan.seed} {g}", plan.group_system, vocab))
        for g in range(plan.groups)
    ]
    visits = []
    for number in range(plan.visits):
        now += draw.expovariate(1.0) / rate
        shared = systems[number % plan.groups if number < plan.groups else draw.randrange(
            plan.groups)]  # fmt: skip
        visits.append(Visit(now, plan.group_system + plan.own, 4, slo=Slo(ttft=60.0),
                            shared=shared))  # fmt: skip
    return stage.requests(visits, vocab, f"groups {plan.seed}")


def _ceiling(plan: Plan, assembly: Assembly) -> float:
    """Every request but the first of each group finds its system prompt's full blocks."""
    size = assembly.executor.capacity.block_size
    found = plan.group_system // size * size
    whole = plan.visits * (plan.group_system + plan.own)
    return (plan.visits - plan.groups) * found / whole


# ---- what it shows ----


def finding(values: dict[str, Any]) -> Finding:
    sheets = (_burst_sheet(values), _hits_sheet(values))
    says = (
        _says_burst(values),
        _says_hits(values),
        *stage.shortened(values),
        *busy_note(values),
    )
    return Finding(values, sheets, says, lambda path: draw(values, path))


def _burst_sheet(values: dict[str, Any]) -> Sheet:
    head = ("prefix cache", "computed tokens", "from the cache", "TTFT P50 ms", "last TTFT ms",
            "all done, s")  # fmt: skip
    rows = tuple(
        (
            kind, f"{one['computed_tokens']:.0f}",
            f"{one['cached_tokens'] / one['prompt_tokens']:.1%}",
            stage.shown(one["ttft_p50_s"], 1e3), stage.shown(one["ttft_last_s"], 1e3),
            stage.shown(one["seconds"], 1, 2),
        )
        for kind, one in values["burst"].items()
    )  # fmt: skip
    title = (
        f"{values['model']}: a burst of {values['requests']} requests, a system prompt of "
        f"{values['system']} tokens and {values['own']} of their own; "
        f"{stage.spread(values['had']['rounds'])}"
    )
    return Sheet(title, head, rows)


def _hits_sheet(values: dict[str, Any]) -> Sheet:
    hits, size = values["hits"], values["block_size"]
    rows = [(policy, *(f"{rate:.1%}" for rate in rates)) for policy, rates in hits["rates"].items()]
    rows.append(("ceiling", *(f"{hits['ceiling']:.1%}" for _ in hits["pools"])))
    title = (
        f"Hit rate: {values['visits']} requests of {values['groups']} system prompts "
        f"({values['group_system']} tokens each, {values['group_system'] // size} blocks), "
        f"{values['rows']} at once, over the pool's blocks"
    )
    return Sheet(title, ("policy", *(f"{n} blocks" for n in hits["pools"])), tuple(rows))


def _gains(values: dict[str, Any]) -> tuple[float, float]:
    """(without / with) of the median TTFT and of computed tokens."""
    off, on = values["burst"]["off"], values["burst"]["on"]
    return (
        off["ttft_p50_s"]["median"] / on["ttft_p50_s"]["median"],
        off["computed_tokens"] / on["computed_tokens"],
    )


def _says_burst(values: dict[str, Any]) -> str:
    ttft, computed = _gains(values)
    on, n = values["burst"]["on"], values["requests"]
    size = values["block_size"]
    full = (n - 1) * (values["system"] // size * size) / (n * (values["system"] + values["own"]))
    hit = on["cached_tokens"] / on["prompt_tokens"]
    return (
        f"With the cache the median first token comes {ttft:.1f} times sooner and {computed:.1f} "
        "times fewer tokens are computed: the first request computes the system prompt, the others "
        f"wait for its blocks and go on from there. {hit:.1%} of prompt tokens came from the "
        f"cache; the ceiling is {full:.1%}, all but the first request's and the last, unfilled "
        "block."
    )


def _says_hits(values: dict[str, Any]) -> str:
    hits = values["hits"]
    small, large = hits["pools"][0], hits["pools"][-1]
    by = {policy: rates[0] for policy, rates in hits["rates"].items()}
    best, worst = max(by, key=lambda p: by[p]), min(by, key=lambda p: by[p])
    top = max(rates[-1] for rates in hits["rates"].values())
    apart = by[best] - by[worst]
    order = f"{best} hits {by[best]:.0%}, {worst} {by[worst]:.0%}"
    if apart < 0.02:
        order = f"all policies hit {by[worst]:.0%} to {by[best]:.0%}"
    return (
        f"In a pool too small for all system prompts ({small} blocks) {order}; with {large} blocks "
        f"the best reaches {top:.0%} of the {hits['ceiling']:.0%} possible. Room decides more than "
        "order here: a policy only chooses among those that wait, fcfs does not look at the cache "
        "at all, sjf and slo look at it when a request arrives."
    )


# ---- the picture ----


def draw(values: dict[str, Any], path: str) -> None:
    drawing, (left, middle, right) = plots.figure(1, 3, width=13, height=4.8)
    colours = {"off": plots.COLOURS[1], "on": plots.COLOURS[0]}
    for kind, one in values["burst"].items():
        times = [t * 1e3 for t in one["ttfts_s"]]
        left.plot(range(1, len(times) + 1), times, "o-", ms=4, lw=1.5, color=colours[kind],
                  label=KINDS[kind])  # fmt: skip
    left.set(title="Time to first token", xlabel="requests of the burst, in order of it",
             ylabel="ms")  # fmt: skip
    left.set_ylim(bottom=0)
    left.xaxis.get_major_locator().set_params(integer=True)
    left.legend(loc="upper left", fontsize=9)
    bars = [one["computed_tokens"] for one in values["burst"].values()]
    names = ["without" if kind == "off" else "with" for kind in values["burst"]]
    middle.bar(names, bars, width=0.55, color=[colours[k] for k in values["burst"]])
    for place, height in enumerate(bars):
        middle.annotate(f"{height:,.0f}", (place, height), xytext=(0, 4), ha="center",
                        textcoords="offset points")  # fmt: skip
    middle.set(title="Tokens computed", ylabel="tokens", ylim=(0, 1.1 * max(bars)))
    middle.grid(visible=False, axis="x")
    _draw_hits(right, values["hits"])
    ttft, computed = _gains(values)
    plots.headline(
        drawing,
        f"A shared system prompt: {computed:.1f} times fewer tokens computed, the first token "
        f"{ttft:.1f} times sooner",
        f"{values['model']}, {values['requests']} requests with {values['system']} shared tokens; "
        f"right: {values['groups']} system prompts in one pool",
    )
    plots.save(drawing, path)


def _draw_hits(axes: Any, hits: dict[str, Any]) -> None:
    marks = zip("osD^v", plots.COLOURS[2:], strict=False)
    for (policy, rates), (mark, colour) in zip(hits["rates"].items(), marks, strict=False):
        axes.plot(hits["pools"], [100 * r for r in rates], mark + "-", color=colour, ms=6, lw=1.5,
                  mfc="white", mew=1.6, label=policy)  # fmt: skip
    axes.axhline(100 * hits["ceiling"], color=plots.INK, lw=1.2, ls=(0, (4, 3)))
    axes.annotate("a pool that forgets nothing", (0.02, 100 * hits["ceiling"]), xytext=(0, 4),
                  xycoords=("axes fraction", "data"), textcoords="offset points",
                  fontsize=9)  # fmt: skip
    axes.set_ylim(0, 112 * hits["ceiling"])
    axes.set_xticks(hits["pools"])
    axes.set(title="Hit rate by policy", xlabel="blocks in the pool", ylabel="% of prompt tokens")
    axes.legend(loc="lower right", fontsize=9)
