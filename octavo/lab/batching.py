"""`octavo lab batching`: what it is worth that a request may join a batch that is under way.

One engine, three ways to fill its steps: one request after another; static batching (a group is
admitted into an empty batch, and the next when its last member has ended); continuous batching
(Orca, Yu et al. 2022: who comes joins at the next step, who ends leaves). The same requests arrive
at rates that are multiples of what one after another can serve on this machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from statistics import fmean
from typing import Any

from octavo import plots
from octavo.assembly import Assembly
from octavo.benchmark.offline import roofs
from octavo.ceilings import Ceilings
from octavo.core.policy import static
from octavo.lab import stage
from octavo.lab.finding import Finding, Sheet
from octavo.lab.stage import Clock, Setting, Trial, Watch
from octavo.llm import LLM
from octavo.neighbours import Neighbours, busy_note
from octavo.sim.workload import Sizes

NAMES = {"none": "one at a time", "static": "static", "continuous": "continuous"}
PROBES = 4  # requests that say how fast one after another is
LEAST = 8  # requests of a run, however slow the machine is


@dataclass(frozen=True, slots=True)
class Plan:
    """rates: multiples of the requests a second that are served one after another. rows: of a
    batch. seconds: about how long it may take; where the machine is too slow for that, runs have
    fewer requests."""

    rates: tuple[float, ...] = (0.7, 1.5, 3.0, 6.0)
    requests: int = 28
    rows: int = 8
    repeats: int = 3
    seconds: float = 115.0
    prompt: Sizes = field(default_factory=lambda: Sizes(48, 0.6, 192))
    output: Sizes = field(default_factory=lambda: Sizes(24, 0.8, 96))
    seed: int = 0

    def count(self, alone: float) -> int:
        """Requests of a run, if one alone takes so many seconds."""
        # One at a time ends at the rate of arrivals or of serving, the others up to twice as fast.
        each = sum(max(1 / f, 1.0) + 2 * max(1 / f, 0.5) for f in self.rates) * alone
        return min(self.requests, max(LEAST, int(self.seconds / (self.repeats * each))))

    def settings(self) -> dict[str, Setting]:
        return {
            "none": Setting("none", rows=1),
            "static": Setting("static", static, self.rows),
            "continuous": Setting("continuous", rows=self.rows),
        }


def measure(
    assembly: Assembly,
    plan: Plan,
    ceilings: Ceilings,
    watch: Watch = lambda _: None,
    clock: Clock = Clock(),
) -> dict[str, Any]:
    """Run the plan; plain values."""
    neighbours, vocab = Neighbours(), assembly.door.vocab_size
    stage.warm(assembly)
    settings = plan.settings()

    def run(name: str, rate: float, count: int, seed: str) -> Trial:
        visits = stage.drawn(seed, count, rate, plan.prompt, plan.output)
        wanted = stage.requests(visits, vocab, seed)
        return stage.play(settings[name].engine(assembly.executor), wanted, clock)

    alone = run("none", inf, PROBES, f"probe {plan.seed}").seconds / PROBES
    count = plan.count(alone)

    def at(factor: float) -> list[dict[str, Any]]:
        """The same requests in the same rhythm: only the gaps are longer or shorter."""
        rate = factor / alone

        def once(name: str, _: int) -> Trial:
            return run(name, rate, count, f"batching {plan.seed}")

        def told(what: str) -> None:
            watch(f"{rate:.1f} req/s: {what}")

        found = stage.in_turn(list(settings), stage.Rounds(plan.repeats), once, told)
        return [_cell(name, factor, rate, trials) for name, trials in found.items()]

    cells = [cell for factor in plan.rates for cell in at(factor)]
    prompt, output = _means(plan, count)
    prefill, decode = roofs(LLM.over(assembly), (round(prompt), round(output), plan.rows), ceilings)
    return {
        "model": assembly.name,
        "requests": count,
        "asked_requests": plan.requests,
        "rounds": plan.repeats,
        "rows": plan.rows,
        "mean_prompt": prompt,
        "mean_output": output,
        "alone_s": alone,
        "ceiling_tokens_per_s": output / (prompt / prefill + output / decode),
        "cells": cells,
        "neighbours": neighbours.share(),
    }


def _means(plan: Plan, count: int) -> tuple[float, float]:
    """Tokens of a prompt and of an output, of the requests that were really drawn."""
    visits = stage.drawn(f"batching {plan.seed}", count, 1.0, plan.prompt, plan.output)
    return fmean(v.prompt for v in visits), max(2.0, fmean(v.output for v in visits))


def _cell(name: str, factor: float, rate: float, trials: list[Trial]) -> dict[str, Any]:
    """One way at one rate. normalised: E2E / output tokens, averaged over requests (Orca)."""
    middle = stage.middle
    return {
        "batching": name,
        "times_alone": factor,
        "offered_per_s": rate,
        "output_tokens_per_s": middle(t.tokens_per_s for t in trials),
        "requests_per_s": middle(len(t.timings) / t.seconds for t in trials),
        "ttft_p50_s": middle(stage.quantile(t.ttfts, 0.5) for t in trials),
        "e2e_p50_s": middle(stage.quantile(t.e2es, 0.5) for t in trials),
        "e2e_p90_s": middle(stage.quantile(t.e2es, 0.9) for t in trials),
        "normalised_s": middle(
            fmean((x.finished - x.queued) / x.num_output for x in t.timings) for t in trials
        ),
        "rows_a_step": middle(t.counters["rows"] / t.counters["steps"] for t in trials),
    }


# ---- what it shows ----

HEAD = ("batching", "offered req/s", "tokens/s", "TTFT P50 ms", "E2E P50 ms", "E2E P90 ms",
        "ms a token", "rows a step")  # fmt: skip


def finding(values: dict[str, Any]) -> Finding:
    rows = tuple(_row(cell) for cell in values["cells"])
    title = (
        f"{values['model']}: {values['requests']} requests a run, {values['mean_prompt']:.0f} "
        f"prompt and {values['mean_output']:.0f} output tokens on average, {values['rows']} rows; "
        f"{stage.spread(values['rounds'])}"
    )
    says = (_says(values), *_fewer(values), *busy_note(values))
    return Finding(values, (Sheet(title, HEAD, rows),), says, lambda path: draw(values, path))


def _row(cell: dict[str, Any]) -> tuple[str, ...]:
    show = stage.shown
    return (
        NAMES[cell["batching"]],
        f"{cell['offered_per_s']:.1f}",
        show(cell["output_tokens_per_s"]),
        show(cell["ttft_p50_s"], 1e3),
        show(cell["e2e_p50_s"], 1e3),
        show(cell["e2e_p90_s"], 1e3),
        show(cell["normalised_s"], 1e3, 1),
        show(cell["rows_a_step"], 1, 1),
    )


def _top(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The cells of the highest rate."""
    most = max(cell["times_alone"] for cell in values["cells"])
    return {c["batching"]: c for c in values["cells"] if c["times_alone"] == most}


def _gain(values: dict[str, Any], key: str, over: str) -> float:
    top = _top(values)
    return float(top["continuous"][key]["median"] / top[over][key]["median"])


def _fewer(values: dict[str, Any]) -> tuple[str, ...]:
    """That runs were cut short, if they were."""
    if values["requests"] == values["asked_requests"]:
        return ()
    return (
        f"Runs have {values['requests']} requests, not {values['asked_requests']}: one alone took "
        f"{values['alone_s']:.2f} s here, and all of it would have taken more than two minutes.",
    )


def _says(values: dict[str, Any]) -> str:
    top, ceiling = _top(values), values["ceiling_tokens_per_s"]
    best = top["continuous"]["output_tokens_per_s"]["median"]
    share = _gain(values, "normalised_s", "static")
    why = "nobody waits for a group to end, and a row that ends is filled at the next step"
    if share >= 1.0:
        why = "no gain shows in these runs: look at the spread, and at who else used the machine"
    return (
        f"At {top['none']['offered_per_s']:.1f} requests a second continuous batching writes "
        f"{_gain(values, 'output_tokens_per_s', 'none'):.1f} times the tokens of one at a time and "
        f"{_gain(values, 'output_tokens_per_s', 'static'):.2f} times those of static batching, and "
        f"a request waits {share:.0%} as long for each of its tokens as under static: {why}. "
        "Where requests are rare the three are alike. "
        f"The ceiling is {values['rows']} rows that are always full: {ceiling:.0f} tokens/s by "
        f"this machine's memory and arithmetic, of which {best / ceiling:.0%} were reached."
    )


# ---- the picture ----


def draw(values: dict[str, Any], path: str) -> None:
    drawing, (left, right) = plots.figure(1, 2, width=12, height=5.4)
    for number, (name, label) in enumerate(NAMES.items()):
        cells = [c for c in values["cells"] if c["batching"] == name]
        x = [c["offered_per_s"] for c in cells]
        style: dict[str, Any] = {
            "color": plots.COLOURS[number],
            "marker": "o",
            "ms": 5,
            "lw": 1.8,
            "label": label,
        }
        plots.whiskers(left, x, [c["output_tokens_per_s"] for c in cells], **style)
        plots.whiskers(right, x, [c["normalised_s"] for c in cells], 1e3, **style)
    ceiling = values["ceiling_tokens_per_s"]
    left.axhline(ceiling, color=plots.INK, lw=1.2, ls=(0, (4, 3)))
    left.annotate(f"ceiling: {values['rows']} rows always full", (0, ceiling), xytext=(6, 5),
                  xycoords=("axes fraction", "data"), textcoords="offset points",
                  fontsize=9)  # fmt: skip
    left.set_ylim(0, ceiling * 1.12)
    left.set(title="Throughput", ylabel="output tokens a second")
    right.set_yscale("log")
    right.set(title="Latency", ylabel="ms from arrival to end, for each output token")
    plots.round_ticks(right.yaxis)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        x = sorted({c["offered_per_s"] for c in values["cells"]})
        axes.set_xticks(x, [f"{n:.1f}" for n in x])
        axes.minorticks_off()
        axes.set_xlabel("requests that arrive a second")
    handles, labels = left.get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=3)
    gain = _gain(values, "output_tokens_per_s", "none")
    plots.headline(
        drawing,
        f"Under load, continuous batching writes {gain:.1f} times the tokens of one at a time",
        f"{values['model']}; {stage.bars(values['rounds'])}",
    )
    plots.save(drawing, path)
