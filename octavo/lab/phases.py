"""`octavo lab phases`: does prefill wait for arithmetic, decode for memory, and does a batch move
the line?

Whole steps of a real model on the roofline: prefill of growing chunks, and decode of growing
batches. Intensity is operations for each byte that must be moved; below the ridge (peak over
bandwidth) memory is a step's roof and another row in it is nearly free, above it arithmetic is.
A step is bound by its roof only where it comes near it, which is for the measurement to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from octavo import plots
from octavo.assembly import Assembly
from octavo.benchmark.kernels import Again, Case, Watch, misfit, step_shape, time_under
from octavo.benchmark.roofline import ABOVE, bound_by, demands, roof_of, why_below
from octavo.ceilings import Ceilings, reread
from octavo.lab.finding import Finding, Sheet
from octavo.neighbours import Neighbours, busy_note


@dataclass(frozen=True, slots=True)
class Plan:
    """Tokens of a prefill, sequences of a decode step with `context` cached tokens each."""

    tokens: tuple[int, ...] = (4, 16, 64, 256, 512)
    batch: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    context: int = 512
    seconds: float = 1.0

    def cases(self) -> tuple[Case, ...]:
        prefill = [Case("prefill", 1, n, 0) for n in self.tokens]
        return (*prefill, *(Case("decode", n, 1, self.context) for n in self.batch))


def measure(
    assembly: Assembly,
    plan: Plan,
    ceilings: Ceilings,
    watch: Watch = lambda _: None,
    again: Again = reread,
) -> dict[str, Any]:
    """Each case that fits the engine, as plain values."""
    neighbours, points, best = Neighbours(), [], 0.0
    for case in plan.cases():
        if misfit(assembly, case) is None:
            watch(case.name)
            timed, roof = time_under(assembly, case, plan.seconds, ceilings, again)
            points.append(_point(assembly, case, timed.seconds, roof))
            best = max(best, roof.all.dram)
    return {
        "model": assembly.name,
        "context": plan.context,
        "ceilings": replace(ceilings, all=replace(ceilings.all, dram=best)).as_dict(),
        "points": points,
        "neighbours": neighbours.share(),
    }


def _point(assembly: Assembly, case: Case, seconds: float, ceilings: Ceilings) -> dict[str, Any]:
    shape = step_shape(assembly, case.rows)
    asked = demands(assembly.program, shape, ceilings, assembly.config.act)
    moved, done = sum(d.bytes for d in asked), sum(d.operations for d in asked)
    least = sum(d.least_s for d in asked)
    waits = sum(d.least_s for d in asked if d.bound == "memory")
    tokens = case.batch * case.tokens
    return {
        "phase": case.phase,
        "rows": tokens,
        "bytes": moved,
        "operations": done,
        "intensity": done / moved,
        "unit": max(asked, key=lambda d: d.operations).unit,
        "memory_share": waits / least,
        "seconds": seconds,
        "least_s": least,
        "fraction": least / seconds,
        "roof": roof_of(waits / least),
        "bound": bound_by(waits / least, least / seconds),
        "tokens_per_s": tokens / seconds,
    }


# ---- what it shows ----

HEAD = ("step", "op/byte", "roof", "of roof", "bound by", "ms", "tokens/s", "Gop/s", "GB/s")


def finding(values: dict[str, Any]) -> Finding:
    rows = tuple(_row(point) for point in values["points"])
    title = f"{values['model']}: whole steps, decode after {values['context']} tokens"
    sheet = Sheet(title, HEAD, rows)
    says = (*_says(values), *busy_note(values))
    return Finding(values, (sheet,), says, lambda path: draw(values, path))


def _row(p: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{p['phase']} {p['rows']}",
        f"{p['intensity']:.1f}",
        p["roof"],
        f"{p['fraction']:.0%}",
        p["bound"],
        f"{p['seconds'] * 1e3:.2f}",
        f"{p['tokens_per_s']:.0f}",
        f"{p['operations'] / p['seconds'] / 1e9:.0f}",
        f"{p['bytes'] / p['seconds'] / 1e9:.1f}",
    )


def _says(values: dict[str, Any]) -> tuple[str, ...]:
    rates, points = values["ceilings"]["all"], values["points"]
    decode = [p for p in points if p["phase"] == "decode"]
    prefill = [p for p in points if p["phase"] == "prefill"]
    unit = _unit(points)
    text = [
        f"The ridge of this machine is at {rates[unit] / rates['dram']:.0f} operations a byte "
        f"({unit} peak over memory bandwidth): left of it memory is a step's roof, right of it "
        "arithmetic."
    ]
    text += [_stands(one, rates) for one in (*decode[:1], *prefill[-1:])]
    if len(decode) > 1:
        one, many = decode[0], decode[-1]
        text.append(
            f"{many['rows']} sequences decoded together take "
            f"{many['seconds'] / one['seconds']:.1f} times as long as one and give "
            f"{many['tokens_per_s'] / one['tokens_per_s']:.1f} times the tokens: weights are read "
            "once for all of them, but each sequence's attention reads a cache of its own."
        )
    notes = []
    if any(p["bound"] == "neither" for p in points):
        why = why_below(values["ceilings"]["isa"], unit)
        notes.append(f"bound by neither: less than half of the roof. {why}")
    if any(p["fraction"] > 1.0 for p in points):
        notes.append(f"of roof: least time / time. {ABOVE}")
    return (" ".join(text), *notes)


def _unit(points: Sequence[dict[str, Any]]) -> str:
    """Whose peak the roof is: the unit of the step with most operations."""
    return str(max(points, key=lambda p: p["operations"])["unit"]) if points else "int8"


def _stands(p: dict[str, Any], rates: dict[str, float]) -> str:
    """Where one step stands under the roof, and whether it waits for that."""
    what = "One stream's decode" if p["phase"] == "decode" else f"A prefill of {p['rows']} tokens"
    what = what if p["rows"] == 1 or p["phase"] != "decode" else f"Decode of {p['rows']} streams"
    moved, done = p["bytes"] / p["seconds"] / 1e9, p["operations"] / p["seconds"] / 1e9
    of = {
        "memory": f"memory's {rates['dram'] / 1e9:.0f} GB/s, and it moves {moved:.0f}",
        "compute": f"the {p['unit']} peak of {rates[p['unit']] / 1e9:.0f} Gop/s, and it does "
        f"{done:.0f}",
    }[p["roof"]]
    ends = {
        "memory": "it waits for memory",
        "compute": "it waits for arithmetic",
        "neither": "it waits for neither memory nor arithmetic",
    }[p["bound"]]
    return (
        f"{what} does {p['intensity']:.1f} operations for each byte: its roof is {of}, "
        f"{p['fraction']:.0%} of the roof, so {ends}."
    )


# ---- the picture ----


def draw(values: dict[str, Any], path: str) -> None:
    drawing, axes = plots.figure(width=10, height=6.2)
    rates, points = values["ceilings"]["all"], values["points"]
    low, high = min(p["intensity"] for p in points) / 2, max(p["intensity"] for p in points) * 2
    least = min(p["operations"] / p["seconds"] for p in points) / 1e9
    unit = _unit(points)
    ridge, top = rates[unit] / rates["dram"], rates[unit] / 1e9
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, max(high, 2 * ridge))
    axes.set_ylim(least / 2, top * 2)
    plots.headline(
        drawing,
        _title(values),
        f"{values['model']}, decode after {values['context']} tokens; whole steps under the roof",
    )
    drawing.canvas.draw()  # settles the layout, which labels go by
    labels = plots.Labels(axes, 9)
    roof = [(low, low * rates["dram"] / 1e9), (ridge, top), (max(high, 2 * ridge), top)]
    axes.plot(*zip(*roof, strict=True), color=plots.INK, lw=1.5)
    axes.axvline(ridge, color=plots.FAINT, ls=":", lw=1.2)
    labels.avoid((ridge, least / 2), (ridge, top * 2))
    for phase, colour in (("decode", plots.COLOURS[0]), ("prefill", plots.COLOURS[1])):
        own = [p for p in points if p["phase"] == phase]
        at = [(p["intensity"], p["operations"] / p["seconds"] / 1e9) for p in own]
        name = "sequences decoding together" if phase == "decode" else "tokens of a prefill"
        axes.plot(*zip(*at, strict=True), "o-", color=colour, lw=1.4, ms=8, label=name)
        for before, after in pairwise(at):
            labels.avoid(before, after)
        for p, spot in zip(own, at, strict=True):
            labels.put(str(p["rows"]), spot, colour, 4)
    labels.place()
    _roof_words(axes, rates, unit)
    plots.round_ticks(axes.xaxis)
    plots.round_ticks(axes.yaxis)
    axes.set(xlabel="operations for each byte that must be moved", ylabel="Gop/s")
    axes.legend(loc="lower right")
    plots.save(drawing, path)


def _roof_words(axes: Any, rates: dict[str, float], unit: str) -> None:
    """Whose roof is on either side of the ridge."""
    ridge = rates[unit] / rates["dram"]
    sides = (
        (f"memory, {rates['dram'] / 1e9:.0f} GB/s", "right", -8),
        (f"{unit} products, {rates[unit] / 1e9:.0f} Gop/s", "left", 8),
    )
    for text, align, dx in sides:
        axes.annotate(text, (ridge, rates[unit] / 1e9), xytext=(dx, 8), ha=align, fontsize=9.5,
                      textcoords="offset points")  # fmt: skip


def _title(values: dict[str, Any]) -> str:
    """The finding in a line, as far as there are steps to compare."""
    decode = [p for p in values["points"] if p["phase"] == "decode"]
    if len(decode) < 2:
        return "Where whole steps stand under the roof"
    one, many = decode[0], decode[-1]
    times = many["tokens_per_s"] / one["tokens_per_s"]
    return f"{many['rows']} sequences decoded together give {times:.1f} times the tokens of one"
