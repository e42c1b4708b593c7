"""The roofline as a picture: where each op of prefill and of decode sits, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo import plots

SHORT = {
    "norm_qkv": "qkv", "attend": "attend", "out_residual": "out", "norm_gate_up_act": "gate·up",
    "down_residual": "down", "final_norm_head": "head",
}  # fmt: skip
LEAST_SHARE = 0.004


def roofline(report: dict[str, Any], path: str | Path) -> None:
    """Draw the cases of a `kernels` or `step` report: the first and the last decode, and the last
    prefill. Raises `InvalidRequest` without matplotlib."""
    drawing, axes = plots.figure(width=11, height=7)
    shown = chosen(report["cases"])
    points = [
        (op["intensity"], op["operations_per_s"])
        for case in shown for op in case["ops"] if _worth(op)
    ]  # fmt: skip
    rates = report["ceilings"]["all"]
    low = min(x for x, _ in points) / 6
    high = max([x for x, _ in points] + [rates["int8"] / rates["dram"]]) * 4
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(min(y for _, y in points) / 1e9 / 3, rates["int8"] / 1e9 * 2.2)
    drawing.canvas.draw()  # settles the layout, which labels go by
    labels = plots.Labels(axes)
    _roofs(axes, rates, low, high, labels)
    for colour, case in zip(plots.COLOURS, shown, strict=False):
        _dots(axes, case, colour, labels)
        _naive(axes, case, colour, rates, labels)
    legend = axes.legend(loc="lower right", fontsize=9.5)
    for handle in legend.legend_handles:
        handle.set_sizes([70])
    labels.block(legend)
    labels.place()
    plots.round_ticks(axes.yaxis)
    plots.round_ticks(axes.xaxis)
    axes.set_xlabel("operations for each byte that must be moved")
    axes.set_ylabel("Gop/s")
    axes.set_title(f"{report['model']}: where prefill and decode sit", pad=22)
    axes.text(
        0, 1.012,
        f"{report['threads']} threads, {report['isa']}, {report['act']} activations; a dot is an "
        "op of all layers, its size the share of the step's time",
        transform=axes.transAxes, color=plots.FAINT, fontsize=9,
    )  # fmt: skip
    plots.save(drawing, path)


def chosen(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is drawn of many cases."""
    decode = [case for case in cases if case["phase"] == "decode"]
    prefill = [case for case in cases if case["phase"] == "prefill"]
    first_last = [decode[0], *([decode[-1]] if len(decode) > 1 else [])] if decode else []
    return [*first_last, *prefill[-1:]]


def title(case: dict[str, Any]) -> str:
    """What a case is called, whichever bench it is from."""
    return str(case.get("case") or f"{case['phase']}, {case.get('concurrency')} at once")


def _worth(op: dict[str, Any]) -> bool:
    return bool(op["operations"] and op["seconds"] and op["share"] >= LEAST_SHARE)


def _roofs(
    axes: Any, rates: dict[str, float], low: float, high: float, labels: plots.Labels
) -> None:
    peaks = (("int8", "int8 products"), ("bf16", "bf16 products"))
    top = rates["int8"]
    for key, name, style in (("dram", "memory", "-"), ("l3", "L3 cache", "--")):
        if rates[key]:
            knee = top / rates[key]
            ends = (low, low * rates[key] / 1e9), (knee, top / 1e9)
            axes.plot(*zip(*ends, strict=True), style, color=plots.INK, lw=1.4, zorder=1)
            x = 1.1 * max(low, axes.get_ylim()[0] * 1e9 / rates[key])
            axes.text(
                x, x * rates[key] / 1e9 * 1.1, f"{name} {rates[key] / 1e9:.0f} GB/s", fontsize=9,
                rotation=math.degrees(math.atan2(rates[key] / 1e9, 1.0)), rotation_mode="anchor",
                transform_rotates_text=True,
            )  # fmt: skip
            labels.avoid(*ends)
            above = 1.0, 1.3  # its words stand over it
            labels.avoid(*((x, y * up) for (x, y), up in zip(ends, above, strict=True)))
    fastest = max(rates["dram"], rates["l3"])
    for (key, name), style in zip(peaks, ("-", "--"), strict=True):
        start = rates[key] / (rates["dram"] if key == "int8" and not rates["l3"] else fastest)
        height = rates[key] / 1e9
        axes.plot([start, high], [height] * 2, style, color=plots.INK, lw=1.4, zorder=1)
        words = axes.annotate(
            f"{name} {height:.0f} Gop/s", (high, height), xytext=(-4, 5),
            textcoords="offset points", ha="right", fontsize=9, color=plots.INK,
        )  # fmt: skip
        labels.avoid((start, height), (high, height))
        labels.block(words)


def _dots(axes: Any, case: dict[str, Any], colour: str, labels: plots.Labels) -> None:
    first = True
    for op in filter(_worth, case["ops"]):
        size = 30 + 1500 * op["share"]
        at = (op["intensity"], op["operations_per_s"] / 1e9)
        axes.scatter(*at, s=size, color=colour, alpha=0.75, lw=0, zorder=3,
                     label=title(case) if first else None)  # fmt: skip
        first = False
        labels.put(SHORT.get(op["op"], op["op"]), at, colour, size**0.5 / 2)


def _naive(
    axes: Any, case: dict[str, Any], colour: str, rates: dict[str, float], labels: plots.Labels
) -> None:
    """Where a prefill's attention would stand at best if it wrote its scores to memory."""
    flash = next((op for op in case["ops"] if op["op"] == "attend"), None)
    if case["phase"] != "prefill" or flash is None or not _worth(flash):
        return
    intensity = case["naive_attention_intensity"]
    at = intensity, min(intensity * rates["dram"], rates["bf16"]) / 1e9
    size = max(30 + 1500 * flash["share"], 90)
    end = flash["intensity"], flash["operations_per_s"] / 1e9
    axes.scatter(*at, s=size, facecolors="white", edgecolors=colour, lw=1.6, zorder=3)
    labels.put("naive attention at best:\nits scores go to memory and back", at, colour,
               size**0.5 / 2)  # fmt: skip
    axes.annotate(
        "", end, xytext=at, zorder=2,
        arrowprops={"arrowstyle": "->", "color": colour, "lw": 1.1, "ls": ":",
                    "shrinkA": 8, "shrinkB": 8},
    )  # fmt: skip
    labels.avoid(at, end)
