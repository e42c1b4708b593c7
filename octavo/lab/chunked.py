"""`octavo lab chunked`: what a long prompt does to the streams beside it, whole or in chunks.

Some streams write; long prompts arrive meanwhile. If a prompt goes into one step whole, every
stream stands still for as long as that takes; in chunks (Sarathi-Serve, Agrawal et al. 2024) a step
never holds more than so many tokens, and the prompt's own first token pays for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from octavo import plots
from octavo.assembly import Assembly
from octavo.errors import InvalidRequest
from octavo.lab import stage
from octavo.lab.finding import Finding, Sheet
from octavo.lab.stage import Clock, Setting, Trial, Visit, Watch
from octavo.neighbours import Neighbours, busy_note

LEAST_OUTPUT = 48  # tokens of a stream
ALONE = "alone"  # the streams without any prompt beside them: a run of each round, too


@dataclass(frozen=True, slots=True)
class Plan:
    """chunks: tokens of a step at most; the largest must hold a whole prompt. output: tokens that
    each stream writes; prompts: long ones that arrive meanwhile, evenly."""

    chunks: tuple[int, ...] = (64, 128, 256, 512, 2048)
    streams: int = 4
    output: int = 192
    prompt: int = 1536
    prompts: int = 3
    repeats: int = 3
    seed: int = 0
    seconds: float = stage.SECONDS  # all rounds together may take about so long

    def fitting(self, alone: float, whole: float) -> Plan:
        """With fewer prompts and shorter streams where there would be no time for all rounds: a
        median of small runs says more than one large run. alone, whole: seconds of the streams by
        themselves, and of a prompt."""
        round_s = len(self.chunks) * (alone + self.prompts * whole) + alone
        share = min(1.0, self.seconds / (self.repeats * round_s))
        prompts = max(1, round(self.prompts * share))
        output = min(self.output, max(LEAST_OUTPUT, int(self.output * share)))
        return replace(self, prompts=prompts, output=output)

    def __post_init__(self) -> None:
        need = self.prompt + self.streams
        if max(self.chunks) < need or len(self.chunks) < 2:
            raise InvalidRequest(
                f"--chunks needs two or more, one of at least {need}: a whole prompt, and a token "
                "of each stream",
                "chunks",
            )
        if min(self.chunks) <= self.streams:
            raise InvalidRequest(
                f"--chunks must be above {self.streams}, the streams' own tokens", "chunks"
            )


def measure(
    assembly: Assembly, plan: Plan, watch: Watch = lambda _: None, clock: Clock = Clock()
) -> dict[str, Any]:
    """Run the plan; plain values."""
    neighbours, vocab = Neighbours(), assembly.door.vocab_size
    stage.warm(assembly)
    streams = [Visit(0.0, 16, plan.output)] * plan.streams

    def run(name: str, visits: list[Visit]) -> Trial:
        engine = Setting(name, tokens=int(name)).engine(assembly.executor)
        return stage.play(engine, stage.requests(visits, vocab, f"chunked {plan.seed}"), clock)

    asked, names = plan, [str(n) for n in sorted(plan.chunks)]
    watch(f"{plan.streams} streams alone, then one prompt of {plan.prompt} tokens")
    alone = run(names[-1], streams)
    whole = run(names[-1], [Visit(0.0, plan.prompt, 2)]).seconds
    plan = plan.fitting(alone.seconds, whole)
    streams = [Visit(0.0, 16, plan.output)] * plan.streams
    # Far enough apart that one prompt is in before the next one comes, and before the streams end.
    space = 0.4 * alone.seconds * plan.output / asked.output / plan.prompts + whole
    long = [Visit((i + 0.2) * space, plan.prompt, 2) for i in range(plan.prompts)]
    visits = [*streams, *long]
    rounds = stage.Rounds(plan.repeats, plan.seconds, clock)

    def one(name: str, _: int) -> Trial:
        return run(names[-1], streams) if name == ALONE else run(name, visits)

    found = stage.in_turn([*names, ALONE], rounds, one, watch, _labelled)
    floors = [trial.gaps() for trial in found.pop(ALONE)]
    return {
        "model": assembly.name,
        "streams": plan.streams,
        "prompt": plan.prompt,
        "prompts": plan.prompts,
        "asked": _size(asked, asked.repeats),
        "had": _size(plan, len(found[names[0]])),
        "alone_itl_s": stage.middle(stage.quantile(gaps, 0.5) for gaps in floors),
        "alone_p99_s": stage.middle(stage.quantile(gaps, 0.99) for gaps in floors),
        "cells": [_cell(name, plan, trials) for name, trials in found.items()],
        "neighbours": neighbours.share(),
    }


def _labelled(name: str) -> str:
    return "streams alone" if name == ALONE else f"{name} tokens a step"


def _size(plan: Plan, rounds: int) -> dict[str, int]:
    return {"prompts a run": plan.prompts, "tokens a stream": plan.output, "rounds": rounds}


def _cell(name: str, plan: Plan, trials: list[Trial]) -> dict[str, Any]:
    """One size of step. times_s: when the first stream's tokens came, in the last run."""
    ids = [f"r{i}" for i in range(plan.streams)]
    long = [f"r{i}" for i in range(plan.streams, plan.streams + plan.prompts)]

    def itl(share: float) -> dict[str, float]:
        return stage.middle(stage.quantile(t.gaps(ids), share) for t in trials)

    def ttft(trial: Trial) -> float:
        return fmean(t.ttft or 0.0 for t in trial.timings if t.request_id in long)

    return {
        "tokens": int(name),
        "whole": int(name) >= plan.prompt + plan.streams,
        "itl_p50_s": itl(0.5),
        "itl_p99_s": itl(0.99),
        "itl_most_s": itl(1.0),
        "prompt_ttft_s": stage.middle(ttft(t) for t in trials),
        "seconds": stage.middle(t.seconds for t in trials),
        "times_s": trials[-1].tokens[ids[0]],
    }


# ---- what it shows ----

HEAD = ("tokens a step", "ITL P50 ms", "ITL P99 ms", "ITL max ms", "the prompts' TTFT ms",
        "all done, s")  # fmt: skip


def finding(values: dict[str, Any]) -> Finding:
    show = stage.shown
    rows = tuple(
        (
            _name(cell), show(cell["itl_p50_s"], 1e3, 1), show(cell["itl_p99_s"], 1e3),
            show(cell["itl_most_s"], 1e3), show(cell["prompt_ttft_s"], 1e3),
            show(cell["seconds"], 1, 2),
        )
        for cell in values["cells"]
    )  # fmt: skip
    many = "1 prompt" if values["prompts"] == 1 else f"{values['prompts']} prompts"
    title = (
        f"{values['model']}: {values['streams']} streams, and beside them {many} of "
        f"{values['prompt']} tokens; "
        f"{stage.spread(values['had']['rounds'])}"
    )
    says = (_says(values), *stage.shortened(values), *busy_note(values))
    return Finding(values, (Sheet(title, HEAD, rows),), says, lambda path: draw(values, path))


def _name(cell: dict[str, Any]) -> str:
    return "whole prompts" if cell["whole"] else str(cell["tokens"])


def _says(values: dict[str, Any]) -> str:
    first, last = values["cells"][0], values["cells"][-1]
    most, least = last["itl_most_s"]["median"], first["itl_most_s"]["median"]
    later = first["prompt_ttft_s"]["median"] / last["prompt_ttft_s"]["median"]
    slower = first["seconds"]["median"] / last["seconds"]["median"]
    everything = f"everything takes {slower:.2f} times as long: small steps read all weights often"
    if slower < 1.05:
        everything = (
            "everything together takes no longer: steps this small are bound by arithmetic on this "
            "machine already, and it is the same arithmetic"
        )
    wait = f"comes {later:.2f} times as late, for the streams' tokens go in between"
    if later < 1.05:
        wait = "comes no later in these runs"
    return (
        f"A prompt of {values['prompt']} tokens in one step holds every stream up for "
        f"{most * 1e3:.0f} ms; with {first['tokens']} tokens a step the longest pause is "
        f"{least * 1e3:.0f} ms, {most / least:.1f} times shorter. The prompt's own first token "
        f"{wait}; {everything}. {_floor(values)}"
    )


def _floor(values: dict[str, Any]) -> str:
    """What no chunk can better, if nobody disturbed it while it was measured."""
    alone = values["alone_itl_s"]["median"]
    beside = min(cell["itl_p50_s"]["median"] for cell in values["cells"])
    said = f"The floor is the streams alone: {alone * 1e3:.1f} ms a token (P50)"
    if alone > 1.1 * beside:
        return f"{said}, disturbed: it was {beside * 1e3:.1f} ms in a run with prompts."
    return f"{said}, which no chunk can better."


# ---- the picture ----


def draw(values: dict[str, Any], path: str) -> None:
    """Left: when one stream's tokens came, a row for each size of step. Right: the trade."""
    cells = values["cells"]
    drawing, (left, middle, right) = plots.figure(1, 3, width=13.5, height=4.8)
    for place, cell in enumerate(cells):
        _draw_stream(left, place, cell)
    left.set_yticks(range(len(cells)), [_name(cell) for cell in cells])
    left.set(title="One stream: each tick a token", xlabel="seconds", ylabel="tokens a step")
    left.grid(visible=False)
    x = range(len(cells))
    names = ["whole" if cell["whole"] else str(cell["tokens"]) for cell in cells]
    plots.whiskers(middle, x, [c["itl_most_s"] for c in cells], 1e3, color=plots.COLOURS[1],
                   marker="^", lw=1.6, label="longest")  # fmt: skip
    plots.whiskers(middle, x, [c["itl_p99_s"] for c in cells], 1e3, color=plots.COLOURS[0],
                   marker="o", lw=1.6, label="P99")  # fmt: skip
    plots.whiskers(middle, x, [c["itl_p50_s"] for c in cells], 1e3, color=plots.COLOURS[2],
                   marker="s", lw=1.6, label="P50")  # fmt: skip
    middle.axhline(values["alone_itl_s"]["median"] * 1e3, color=plots.INK, lw=1.1, ls=(0, (4, 3)),
                   label="P50, streams alone")  # fmt: skip
    middle.set_yscale("log")
    plots.round_ticks(middle.yaxis)
    middle.set(title="Between two tokens (ITL)", ylabel="ms")
    middle.legend(loc="upper left", fontsize=9)
    low, high = middle.get_ylim()
    middle.set_ylim(low, high * 3)
    plots.whiskers(right, x, [c["prompt_ttft_s"] for c in cells], 1e3, color=plots.COLOURS[0],
                   marker="o", lw=1.6)  # fmt: skip
    right.set_ylim(bottom=0)
    right.set(title="TTFT of the long prompts", ylabel="ms")
    for axes in (middle, right):
        axes.set_xticks(list(x), names)
        axes.set_xlabel("tokens a step")
    shorter = cells[-1]["itl_most_s"]["median"] / cells[0]["itl_most_s"]["median"]
    plots.headline(
        drawing,
        f"Chunked prefill: pauses beside a long prompt are {shorter:.0f} times shorter",
        f"{values['model']}, {values['streams']} streams, prompts of {values['prompt']} tokens; "
        f"{stage.bars(values['had']['rounds'])}",
    )
    plots.save(drawing, path)


def _draw_stream(axes: Any, place: int, cell: dict[str, Any]) -> None:
    """A row of ticks; what is longer than five usual gaps is shaded."""
    times = cell["times_s"]
    usual = cell["itl_p50_s"]["median"]
    axes.vlines(times, place - 0.3, place + 0.3, color=plots.COLOURS[0], lw=0.6)
    for before, after in pairwise(times):
        if after - before > 5 * usual:
            axes.barh(place, after - before, left=before, height=0.6, color="#f3c9a8", lw=0)
