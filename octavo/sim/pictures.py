"""The simulator's plots, in the house style. matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from octavo import plots
from octavo.sim.fleet import Outcome, Run
from octavo.sim.hardware import PEAK
from octavo.sim.report import Report
from octavo.sim.roofline import FP8, PREFILL, Analysis

DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)))


def strokes() -> Iterator[dict[str, Any]]:
    """A colour and a dash for each line, all different as long as they last."""
    yield from ({"color": c, "ls": d} for d, c in product(DASHES, plots.COLOURS))


def plain_log(axis: Any) -> None:
    """A logarithmic axis with numbers that people write."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    low, high = axis.get_view_interval()
    steps = (1.0, 2.0, 5.0) if high < 300 * max(low, 1e-12) else (1.0,)
    axis.set_major_locator(LogLocator(10, steps, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(FuncFormatter(lambda *_: ""))


def draw_runs(runs: Sequence[tuple[Run, Report]], path: str | Path) -> None:
    """Distributions of TTFT and TPOT with their objectives, and requests in the system over time,
    for one run or several."""
    figure, grid = plots.figure(1, 3, width=13, height=4.2)
    for stroke, (run, one) in zip(strokes(), runs, strict=False):
        for axes, name in zip(grid, ("ttft", "tpot"), strict=False):
            values = sorted(v for o in run.outcomes if (v := getattr(o, name)) is not None)
            if values:
                share = np.arange(1, len(values) + 1) / len(run.outcomes)
                axes.plot(np.array(values) * 1e3, share, lw=1.6, label=one.name, **stroke)
        grid[2].plot(*_inside(run.outcomes), lw=1.3, label=one.name, **stroke)
    slo = runs[0][1].slo
    titles = ("Time to first token", "Time per output token")
    for axes, title, limit in zip(grid, titles, (slo.ttft, slo.tpot), strict=False):
        axes.set(title=title, xlabel="ms", ylabel="share of all sent", xscale="log", ylim=(0, 1.03))
        plain_log(axes.xaxis)
        if limit is not None:
            axes.axvline(limit * 1e3, color=plots.INK, lw=0.9, ls=(0, (4, 3)), label="objective")
    grid[2].set(title="Requests in the system", xlabel="seconds", ylabel="requests")
    grid[2].set_ylim(bottom=0)
    if len(runs) > 1 or slo.tpot is not None or slo.ttft is not None:
        figure.legend(*_legend(grid), loc="outside lower center", ncols=6, fontsize=8)
    plots.save(figure, path)


def _legend(grid: Iterable[Any]) -> tuple[list[Any], list[str]]:
    found: dict[str, Any] = {}
    for axes in grid:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)


def _inside(outcomes: Iterable[Outcome]) -> tuple[list[float], list[int]]:
    """How many requests had arrived and not ended, over time."""
    moves = sorted(
        move
        for o in outcomes
        if o.finished is not None
        for move in ((o.item.at, 1), (o.finished, -1))
    )
    times, counts, now = [], [], 0
    for at, step in moves:
        now += step
        times.append(at)
        counts.append(now)
    return times, counts


def draw_roofs(analyses: Sequence[Analysis], title: str, path: str | Path) -> None:
    """Left: the roofs, with prefill and decode steps on them. Right: decode speed by batch, up to
    what fits."""
    figure, (left, right) = plots.figure(1, 2, width=13, height=5.4)
    x = np.logspace(-0.5, 3.5, 200)
    for stroke, one in zip(strokes(), analyses, strict=False):
        p = one.placement
        hw = p.device.roofline(PEAK, fp8=p.weights == FP8 and p.device.fp8 is not None)
        roof = np.minimum(x * hw.bytes_per_s, hw.flops_per_s) * p.tp / 1e12
        left.plot(x, roof, lw=1.6, label=p.name, **stroke)
        spot = {"color": stroke["color"], "ls": "none"}
        if one.decodes:
            spots = [(d.intensity, d.flops / 1e12) for d in one.decodes]
            left.plot(*zip(*spots, strict=True), marker="o", ms=4, mfc="white", mew=1.3, **spot)
            pace = [(d.batch, d.tokens_per_s) for d in one.decodes]
            right.plot(*zip(*pace, strict=True), marker="o", ms=3.5, lw=1.5, **stroke)
        if one.fits:
            left.plot(one.prefill_intensity, one.prefill_flops / 1e12, marker="s", ms=6, **spot)
    left.set(title=title, xlabel="operations a byte", ylabel="TFLOP/s", xscale="log", yscale="log")
    context = analyses[0].context
    right.set(
        title=f"Decode at {context} tokens of context", xlabel="sequences at once",
        ylabel="tokens a second", xscale="log", yscale="log",
    )  # fmt: skip
    for axes in (left, right):
        plain_log(axes.xaxis)
        plain_log(axes.yaxis)
    grey = {"color": plots.FAINT, "ls": "none"}
    left.plot([], [], marker="o", mfc="white", label="decode, 1 sequence to what fits", **grey)
    left.plot([], [], marker="s", label=f"prefill of {PREFILL} tokens", **grey)
    figure.legend(*_legend([left]), loc="outside lower center", ncols=6, fontsize=8)
    plots.save(figure, path)
