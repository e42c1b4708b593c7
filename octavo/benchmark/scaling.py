"""`octavo bench scaling`: the time of a step against its tokens, its context and its batch.

Beside each measured time stands the cost model's: the roofline of every op on the ceilings just
measured, and a barrier for each op. A cliff is where the time grows a third faster from one point
to the next than the model's does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from octavo import plots
from octavo.assembly import Assembly
from octavo.benchmark.kernels import Again, Case, Watch, misfit, step_shape, time_case, time_under
from octavo.ceilings import Ceilings, hardware, reread
from octavo.errors import InvalidRequest
from octavo.ops.cost import cost

CLIFF = 4 / 3


@dataclass(frozen=True, slots=True)
class Plan:
    """Three sweeps: prefill of so many tokens at once, one sequence's decode after so long a
    context, and decode of so many sequences with `mid` tokens of context each."""

    tokens: tuple[int, ...]
    context: tuple[int, ...]
    batch: tuple[int, ...]
    mid: int = 512
    seconds: float = 0.3

    def sweeps(self) -> dict[str, tuple[tuple[int, Case], ...]]:
        return {
            "tokens": tuple((n, Case("prefill", 1, n, 0)) for n in self.tokens),
            "context": tuple((n, Case("decode", 1, 1, n)) for n in self.context),
            "batch": tuple((n, Case("decode", n, 1, self.mid)) for n in self.batch),
        }


TITLES = {
    "tokens": "tokens of one prefill",
    "context": "context of one stream's decode",
    "batch": "sequences that decode together",
}


def measure(
    assembly: Assembly,
    plan: Plan,
    ceilings: Ceilings,
    watch: Watch = lambda _: None,
    again: Again = reread,
) -> dict[str, Any]:
    """Run the sweeps, as far as they fit the engine; the report as plain values."""
    sweeps: dict[str, list[dict[str, Any]]] = {}
    left_out: list[dict[str, Any]] = []
    for name, cases in plan.sweeps().items():
        sweeps[name] = []
        for x, case in cases:
            if why := misfit(assembly, case):
                left_out.append({"sweep": name, "at": x, "why": why})
                continue
            watch(case.name)
            timed, roof = time_under(assembly, case, plan.seconds, ceilings, again)
            sweeps[name].append(point(x, timed.seconds, predicted(assembly, case, roof), case))
        _settle(assembly, plan, dict(cases), sweeps[name])
    if not any(sweeps.values()):
        raise InvalidRequest("nothing fits: " + "; ".join(str(part["why"]) for part in left_out))
    return {
        "model": assembly.name,
        "threads": ceilings.threads,
        "isa": ceilings.isa,
        "act": assembly.config.act,
        "ceilings": ceilings.as_dict(),
        "mid_context": plan.mid,
        "sweeps": sweeps,
        "cliffs": {name: cliffs(points) for name, points in sweeps.items()},
        "left_out": left_out,
    }


def _settle(
    assembly: Assembly, plan: Plan, cases: dict[int, Case], points: list[dict[str, Any]]
) -> None:
    """Measure the top of each cliff once more: only what is there twice is no neighbour's doing."""
    for cliff in cliffs(points):
        index = next(i for i, p in enumerate(points) if p["at"] == cliff["to"])
        case, before = cases[cliff["to"]], points[index]
        seconds = min(before["seconds"], time_case(assembly, case, plan.seconds).seconds)
        points[index] = point(cliff["to"], seconds, before["predicted_s"], case)


def predicted(assembly: Assembly, case: Case, ceilings: Ceilings) -> float:
    """Seconds of a step by the cost model."""
    machine = dataclasses.replace(
        hardware(ceilings, assembly.program, assembly.config.act), op_seconds=ceilings.barrier_s
    )
    return cost(assembly.program, step_shape(assembly, case.rows), machine).seconds


def point(x: int, seconds: float, least: float, case: Case) -> dict[str, Any]:
    return {
        "at": x,
        "seconds": seconds,
        "predicted_s": least,
        "fraction": least / seconds,
        "tokens_per_s": case.batch * case.tokens / seconds,
    }


def cliffs(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where the time grows faster than the prediction, by a third or more, from point to point."""
    found = []
    for before, after in pairwise(points):
        grew = after["seconds"] / before["seconds"]
        should = after["predicted_s"] / before["predicted_s"]
        if grew > CLIFF * should:
            found.append({"from": before["at"], "to": after["at"], "grew": grew, "should": should})
    return found


def draw(report: dict[str, Any], path: str | Path) -> None:
    """One panel a sweep: dots measured, a line predicted, cliffs ringed."""
    shown = [(name, points) for name, points in report["sweeps"].items() if points]
    drawing, axes = plots.figure(1, len(shown), width=4.6 * len(shown), height=4.8)
    panels = axes if len(shown) > 1 else [axes]
    for panel, (name, points) in zip(panels, shown, strict=True):
        x, seconds = [p["at"] for p in points], [p["seconds"] * 1e3 for p in points]
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.plot(x, [p["predicted_s"] * 1e3 for p in points], "--", color=plots.FAINT, lw=1.6,
                   label="cost model at the measured ceilings")  # fmt: skip
        panel.plot(x, seconds, "o-", color=plots.COLOURS[0], lw=1.4, ms=5, label="measured")
        at = [c["to"] for c in report["cliffs"][name]]
        ringed = [s for n, s in zip(x, seconds, strict=True) if n in at]
        if ringed:
            panel.plot(at, ringed, "o", mfc="none", mec=plots.COLOURS[1], ms=13, mew=1.8,
                       label="grows a third faster than the model")  # fmt: skip
        ticks = [n for n in x if n & (n - 1) == 0 or n == x[-1]]
        panel.set_xticks(ticks, [_count(n) for n in ticks], fontsize=8.5)
        panel.minorticks_off()
        plots.round_ticks(panel.yaxis)
        panel.set(xlabel=TITLES[name], title=_panel_title(name, report["mid_context"]))
        least = min(p["predicted_s"] for p in points) * 1e3
        panel.set_ylim(min(least, min(seconds)) / 2, max(seconds) * 2)
    panels[0].set_ylabel("ms a step")
    panels[0].legend(loc="upper left", fontsize=9)
    drawing.suptitle(
        f"{report['model']}: the time of a step ({report['threads']} threads, {report['isa']}, "
        f"{report['act']} activations)",
        x=0.01, ha="left", fontweight="bold", fontsize=13,
    )  # fmt: skip
    plots.save(drawing, path)


def _panel_title(name: str, mid: int) -> str:
    return {"tokens": "prefill", "context": "one stream", "batch": f"batch, context {mid}"}[name]


def _count(n: int) -> str:
    return f"{round(n / 1024)}k" if n >= 1024 else str(n)
