"""A load run as a picture: distributions beside their objectives, and what happened when."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from octavo import plots
from octavo.benchmark.load import Outcome
from octavo.core.request import Slo

MET, MISSED, REFUSED = plots.COLOURS[0], plots.COLOURS[1], plots.COLOURS[6]
LEAST_MS = 0.01


def draw(report: dict[str, Any], found: Sequence[Outcome], slo: Slo, path: str | Path) -> None:
    """Above: how the latencies are distributed. Below: each request by when it was due, and what
    the server wrote. Raises `InvalidRequest` without matplotlib."""
    drawing, grid = plots.figure(2, 2, width=12, height=8.2)
    start = min(o.due for o in found)
    ttft = [t for o in found if (t := o.ttft) is not None]
    tpot = [t for o in found if (t := o.tpot) is not None]
    _shares(grid[0, 0], {"TTFT": ttft}, len(found), slo.ttft)
    grid[0, 0].set(title="Time to first token", ylabel="share of all sent")
    _shares(grid[0, 1], {"TPOT": tpot}, len(found), slo.tpot)
    gaps = [gap for o in found for gap in o.gaps]
    _shares(grid[0, 1], {"ITL (of all gaps)": gaps}, len(gaps), None)
    if tpot:
        grid[0, 1].set_xlim(left=max(LEAST_MS, 1e3 * min(tpot) / 5))
    grid[0, 1].set(title="Time per token", ylabel="share")
    _requests(grid[1, 0], found, slo, start)
    _work(grid[1, 1], found, start)
    drawing.suptitle(_title(report, slo), x=0.01, ha="left", fontweight="bold", fontsize=13)
    plots.save(drawing, path)


def _title(report: dict[str, Any], slo: Slo) -> str:
    offered = report["offered_per_s"]
    rate = f"{offered:.3g} req/s offered" if offered else report["arrivals"]
    if not slo:
        served = f"{report['requests_per_s']:.3g} req/s served"
        return f"{report['model']}: {rate}, {served}, {report['output_tokens_per_s']:.0f} tokens/s"
    said = f"{report['attainment']['all']:.0%} met their objectives"
    refused = f", {report['refused']} of {report['sent']} refused" if report["refused"] else ""
    refused += f", {report['bad_requests']} bad requests" if report["bad_requests"] else ""
    goodput = report["goodput_per_s"]
    return f"{report['model']}: {rate}, {said}{refused}; goodput {goodput:.3g} req/s"


def _shares(axes: Any, series: dict[str, Sequence[float]], total: int, limit: float | None) -> None:
    """Shares of `total` over milliseconds. Pieces that came together have no time between them:
    the axis begins where the figures do."""
    for name, values in series.items():
        if len(values):
            x = np.maximum(np.sort(np.asarray(values)) * 1e3, LEAST_MS)
            colour = plots.COLOURS[2] if name.startswith("ITL") else plots.COLOURS[0]
            axes.step([x[0], *x], np.arange(len(x) + 1) / total, where="post", lw=1.8,
                      color=colour, label=name)  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlabel("ms")
    axes.set_ylim(0, 1.03)
    plots.round_ticks(axes.xaxis)
    if limit is not None:
        axes.axvline(limit * 1e3, color=plots.INK, lw=1.1, ls=(0, (4, 3)), label="objective")
    axes.legend(loc="upper left", fontsize=9)


def _requests(axes: Any, found: Sequence[Outcome], slo: Slo, start: float) -> None:
    """TTFT by when a request was due; refusals and failures along the bottom."""
    groups = {
        "met": ([o for o in found if o.met(slo)], MET, "o"),
        "late": ([o for o in found if o.served and not o.met(slo)], MISSED, "^"),
    }
    for name, (own, colour, mark) in groups.items():
        points = [(o.due - start, o.ttft * 1e3) for o in own if o.ttft is not None]
        if points:
            label = (f"{name} its objectives" if name == "met" else name) if slo else "served"
            axes.plot(*zip(*points, strict=True), mark, color=colour, ms=4.5, alpha=0.8, mew=0,
                      label=f"{label} ({len(own)})")  # fmt: skip
    others = {"refused": [o for o in found if o.refused],
              "bad requests": [o for o in found if o.bad],
              "failed": [o for o in found if o.failed]}  # fmt: skip
    axes.set_yscale("log")
    for (name, own), mark in zip(others.items(), "|+x", strict=True):
        if own:
            axes.plot([o.due - start for o in own], [0.03] * len(own), mark, color=REFUSED, ms=8,
                      label=f"{name} ({len(own)})",
                      transform=axes.get_xaxis_transform())  # fmt: skip
    if slo.ttft is not None:
        axes.axhline(slo.ttft * 1e3, color=plots.INK, lw=1.1, ls=(0, (4, 3)))
    plots.round_ticks(axes.yaxis)
    low, high = axes.get_ylim()
    axes.set_ylim(low / 1.5, high * 4)
    axes.set(title="Each request", xlabel="seconds: when it was due", ylabel="TTFT, ms")
    axes.legend(loc="upper left", fontsize=9, ncols=2)


def _work(axes: Any, found: Sequence[Outcome], start: float) -> None:
    """Pieces written a second, and requests in the server."""
    times = np.array([at for o in found for at in o.times]) - start
    end = max(o.ended for o in found) - start
    bins = np.linspace(0.0, max(end, 1e-3), 61)
    width = bins[1] - bins[0]
    counts, _ = np.histogram(times, bins)
    axes.stairs(counts / width, bins, fill=True, color=plots.COLOURS[5], alpha=0.6,
                label="pieces of text a second")  # fmt: skip
    axes.set(title="What the server did", xlabel="seconds", ylabel="pieces a second")
    moves = sorted((at - start, n) for o in found for at, n in ((o.begun, 1), (o.ended, -1)))
    beside = axes.twinx()
    beside.step([at for at, _ in moves], np.cumsum([n for _, n in moves]), where="post",
                color=plots.COLOURS[1], lw=1.4, label="requests in it")  # fmt: skip
    beside.set_ylabel("requests in the server", color=plots.COLOURS[1])
    beside.grid(visible=False)
    top = beside.get_ylim()[1]
    beside.set_ylim(0, top * 1.25)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.25)
    handles = [*axes.get_legend_handles_labels()[0], *beside.get_legend_handles_labels()[0]]
    beside.legend(handles=handles, loc="upper right", fontsize=9, ncols=2)
