"""`octavo lab phases`: prefill waits for arithmetic, decode for memory, and a batch moves the line.

Whole steps of a real model on the roofline: prefill of growing chunks, and decode of growing
batches. Intensity is operations for each byte that must be moved; below the ridge (peak over
bandwidth) a step is bound by memory and another row in it is nearly free, above it by arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from octavo import plots
from octavo.assembly import Assembly
from octavo.benchmark.kernels import Again, Case, Watch, misfit, step_shape, time_under
from octavo.benchmark.roofline import demands
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
        "memory_share": waits / least,
        "seconds": seconds,
        "least_s": least,
        "fraction": least / seconds,
        "tokens_per_s": tokens / seconds,
    }


# ---- what it shows ----

HEAD = ("step", "op/byte", "bound by memory", "ms", "ms a token", "tokens/s", "Gop/s", "GB/s",
        "of roof")  # fmt: skip


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
        f"{p['memory_share']:.0%}",
        f"{p['seconds'] * 1e3:.2f}",
        f"{p['seconds'] / p['rows'] * 1e3:.3f}",
        f"{p['tokens_per_s']:.0f}",
        f"{p['operations'] / p['seconds'] / 1e9:.0f}",
        f"{p['bytes'] / p['seconds'] / 1e9:.1f}",
        f"{p['fraction']:.0%}",
    )


def _says(values: dict[str, Any]) -> tuple[str, ...]:
    rates = values["ceilings"]["all"]
    ridge = rates["int8"] / rates["dram"]
    decode = [p for p in values["points"] if p["phase"] == "decode"]
    prefill = [p for p in values["points"] if p["phase"] == "prefill"]
    text = [
        f"The ridge of this machine is at {ridge:.0f} operations a byte (int8 peak over memory "
        "bandwidth)."
    ]
    if decode and prefill:
        one, big = decode[0], prefill[-1]
        text.append(
            f"One stream's decode does {one['intensity']:.1f} operations for each byte: it waits "
            f"for memory, {one['bytes'] / one['seconds'] / 1e9:.0f} GB/s of "
            f"{rates['dram'] / 1e9:.0f}. A prefill of {big['rows']} tokens reads the same weights "
            f"once for all of them: {big['intensity']:.0f} operations a byte, and "
            f"{big['operations'] / big['seconds'] / 1e9:.0f} Gop/s."
        )
    if len(decode) > 1:
        one, many = decode[0], decode[-1]
        text.append(
            f"A batch is how decode climbs: {many['rows']} sequences take "
            f"{many['seconds'] / one['seconds']:.1f} times as long as one and give "
            f"{many['tokens_per_s'] / one['tokens_per_s']:.1f} times the tokens. Attention does "
            "not climb with them: each sequence reads a cache of its own."
        )
    return (" ".join(text),)


# ---- the picture ----


def draw(values: dict[str, Any], path: str) -> None:
    drawing, axes = plots.figure(width=10, height=6.2)
    rates, points = values["ceilings"]["all"], values["points"]
    low, high = min(p["intensity"] for p in points) / 2, max(p["intensity"] for p in points) * 2
    least = min(p["operations"] / p["seconds"] for p in points) / 1e9
    ridge, top = rates["int8"] / rates["dram"], rates["int8"] / 1e9
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
    _roof_words(axes, rates, ridge)
    plots.round_ticks(axes.xaxis)
    plots.round_ticks(axes.yaxis)
    axes.set(xlabel="operations for each byte that must be moved", ylabel="Gop/s")
    axes.legend(loc="lower right")
    plots.save(drawing, path)


def _roof_words(axes: Any, rates: dict[str, float], ridge: float) -> None:
    """What bounds on either side of the ridge."""
    sides = (
        (f"memory, {rates['dram'] / 1e9:.0f} GB/s", "right", -8),
        (f"int8 products, {rates['int8'] / 1e9:.0f} Gop/s", "left", 8),
    )
    for text, align, dx in sides:
        axes.annotate(text, (ridge, rates["int8"] / 1e9), xytext=(dx, 8), ha=align, fontsize=9.5,
                      textcoords="offset points")  # fmt: skip


def _title(values: dict[str, Any]) -> str:
    """The finding in a line, as far as there are steps to compare."""
    decode = [p for p in values["points"] if p["phase"] == "decode"]
    if len(decode) < 2:
        return "Where whole steps stand under the roof"
    one, many = decode[0], decode[-1]
    times = many["tokens_per_s"] / one["tokens_per_s"]
    return f"{many['rows']} sequences decoded together give {times:.1f} times the tokens of one"
