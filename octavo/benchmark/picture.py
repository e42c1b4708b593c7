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
    _roofs(axes, rates, low, high)
    drawing.canvas.draw()  # settles the layout, which labels go by
    labels = _Labels()
    for case in shown:
        for op in filter(_worth, case["ops"]):
            labels.occupy(axes, (op["intensity"], op["operations_per_s"] / 1e9))
    for colour, case in zip(plots.COLOURS, shown, strict=False):
        _dots(axes, case, colour, rates, labels)
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
    for handle in axes.legend(loc="lower right", fontsize=9.5).legend_handles:
        handle.set_sizes([70])
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


def _roofs(axes: Any, rates: dict[str, float], low: float, high: float) -> None:
    peaks = (("int8", "int8 products"), ("bf16", "bf16 products"))
    top = rates["int8"]
    for key, name, style in (("dram", "memory", "-"), ("l3", "L3 cache", "--")):
        if rates[key]:
            knee = top / rates[key]
            axes.plot([low, knee], [low * rates[key] / 1e9, top / 1e9], style, color=plots.INK,
                      lw=1.4, zorder=1)  # fmt: skip
            x = 1.1 * max(low, axes.get_ylim()[0] * 1e9 / rates[key])
            axes.text(
                x, x * rates[key] / 1e9 * 1.1, f"{name} {rates[key] / 1e9:.0f} GB/s", fontsize=9,
                rotation=math.degrees(math.atan2(rates[key] / 1e9, 1.0)), rotation_mode="anchor",
                transform_rotates_text=True,
            )  # fmt: skip
    fastest = max(rates["dram"], rates["l3"])
    for (key, name), style in zip(peaks, ("-", "--"), strict=True):
        start = rates[key] / (rates["dram"] if key == "int8" and not rates["l3"] else fastest)
        axes.plot([start, high], [rates[key] / 1e9] * 2, style, color=plots.INK, lw=1.4, zorder=1)
        axes.annotate(
            f"{name} {rates[key] / 1e9:.0f} Gop/s", (high, rates[key] / 1e9), xytext=(-4, 5),
            textcoords="offset points", ha="right", fontsize=9, color=plots.INK,
        )  # fmt: skip


class _Labels:
    """Places words near their points, each where no earlier one stands."""

    def __init__(self) -> None:
        self._taken: list[tuple[float, float]] = []
        self._dots: list[tuple[float, float]] = []

    def occupy(self, axes: Any, at: tuple[float, float]) -> None:
        """A dot's place: words elsewhere."""
        x, y = axes.transData.transform(at) * 72 / axes.figure.dpi
        self._dots.append((x, y))

    def put(
        self, axes: Any, text: str, at: tuple[float, float], colour: str, radius: float
    ) -> None:
        x, y = axes.transData.transform(at) * 72 / axes.figure.dpi  # in points
        reach = radius + 7
        for dx, dy in ((0, reach), (reach + 8, -3), (0, -reach - 6), (-reach - 22, -3),
                       (reach, reach), (-reach - 12, reach), (0, 2 * reach + 8),
                       (0, -2 * reach - 12)):  # fmt: skip
            spot = (x + dx, y + dy)
            apart = all(abs(spot[0] - a) > 40 or abs(spot[1] - b) > 11 for a, b in self._taken)
            clear = all(abs(spot[0] - a) > 26 or abs(spot[1] - b) > 9 for a, b in self._dots)
            if apart and clear:
                break
        self._taken.append(spot)
        axes.annotate(text, at, xytext=(dx, dy), textcoords="offset points", ha="center",
                      va="center", fontsize=8.5, color=colour, zorder=4)  # fmt: skip


def _dots(
    axes: Any, case: dict[str, Any], colour: str, rates: dict[str, float], labels: _Labels
) -> None:
    first = True
    for op in filter(_worth, case["ops"]):
        size = 30 + 1500 * op["share"]
        at = (op["intensity"], op["operations_per_s"] / 1e9)
        axes.scatter(*at, s=size, color=colour, alpha=0.75, lw=0, zorder=3,
                     label=title(case) if first else None)  # fmt: skip
        first = False
        labels.put(axes, SHORT.get(op["op"], op["op"]), at, colour, size**0.5 / 2)
    flash = next((op for op in case["ops"] if op["op"] == "attend"), None)
    if case["phase"] == "prefill" and flash and _worth(flash):
        _naive(axes, case["naive_attention_intensity"], flash, colour, rates)


def _naive(
    axes: Any, intensity: float, flash: dict[str, Any], colour: str, rates: dict[str, float]
) -> None:
    """Where attention would stand at best if it wrote its scores to memory."""
    at = intensity, min(intensity * rates["dram"], rates["bf16"]) / 1e9
    size = 30 + 1500 * flash["share"]
    axes.scatter(*at, s=max(size, 90), facecolors="white", edgecolors=colour, lw=1.6, zorder=3)
    axes.annotate(
        "naive attention at best:\nits scores go to memory and back", at, xytext=(-10, -10),
        textcoords="offset points", ha="right", va="top", fontsize=8.5, color=colour,
        bbox={"fc": "white", "ec": "none", "alpha": 0.85, "pad": 1.5},
    )  # fmt: skip
    axes.annotate(
        "", (flash["intensity"], flash["operations_per_s"] / 1e9), xytext=at,
        arrowprops={"arrowstyle": "->", "color": colour, "lw": 1.1, "ls": ":",
                    "shrinkA": 8, "shrinkB": 8}, zorder=2,
    )  # fmt: skip
