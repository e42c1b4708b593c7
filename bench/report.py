"""What has been measured, as text, as values for machines, and as a picture.

A cell passes if Octavo's median is at least its gate times the best peer's median (batch8: the best
of llama.cpp on the same file), or at least 85 % of the ceiling that was computed from the peaks
measured right before (the median of the repeats' fractions).
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

CONTROL = "octavo"
GATES = {"single": 1.3, "batch8": 3.0, "prefill": 1.3, "chat": 1.5, "shared_prefix": 1.5}
FRACTION = 0.85
DISTURBED = 0.05
SAME_FILE = "llama.cpp filed"
UNITS = {"prefill": "prompt tok/s"}
Record = dict[str, object]


@dataclass
class Cell:
    """One model and cell: each engine's rates of all repeats, in order of time; Octavo's ceilings.

    busy: the largest share of the machine that others had before a turn. disturbed: the turns
    during which others had more than 5 %, as "engine #repeat share".
    """

    model: str
    cell: str
    requests: int
    rates: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    ceilings: list[float] = field(default_factory=list)
    builds: set[str] = field(default_factory=set)
    sittings: set[str] = field(default_factory=set)
    busy: float = 0.0
    disturbed: list[str] = field(default_factory=list)

    def median(self, engine: str) -> float:
        return statistics.median(self.rates[engine])

    @property
    def rivals(self) -> list[str]:
        """The peers that the gate is about."""
        peers = [engine for engine in self.rates if engine != CONTROL]
        return [e for e in peers if self.cell != "batch8" or e.startswith(SAME_FILE)]

    @property
    def best(self) -> str | None:
        return max(self.rivals, key=self.median, default=None)

    @property
    def ratio(self) -> float | None:
        if self.best is None or CONTROL not in self.rates:
            return None
        return self.median(CONTROL) / self.median(self.best)

    @property
    def fraction(self) -> float | None:
        if not self.ceilings or len(self.ceilings) != len(self.rates[CONTROL]):
            return None
        pairs = zip(self.rates[CONTROL], self.ceilings, strict=True)
        return statistics.median(rate / ceiling for rate, ceiling in pairs)

    @property
    def passes(self) -> list[str]:
        """By which of the two it passes: "ratio", "ceiling", both or neither."""
        by_ratio = self.ratio is not None and self.ratio >= GATES[self.cell]
        by_ceiling = self.fraction is not None and self.fraction >= FRACTION
        return ["ratio"] * by_ratio + ["ceiling"] * by_ceiling

    def values(self) -> dict[str, object]:
        engines = {
            engine: {"median": self.median(engine), "repeats": rates}
            for engine, rates in self.rates.items()
        }
        return {
            "model": self.model, "cell": self.cell, "requests": self.requests, "engines": engines,
            "best_peer": self.best, "ratio": self.ratio, "gate": GATES[self.cell],
            "ceilings": self.ceilings, "fraction": self.fraction, "passes_by": self.passes,
            "builds": sorted(self.builds), "others_busy": self.busy,
            "disturbed": self.disturbed,
        }  # fmt: skip


def load(path: Path) -> list[Record]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def cells_of(records: list[Record]) -> list[Cell]:
    """By model and cell, in order of the file. Runs of other lengths (--limit) stand apart."""
    found: dict[tuple[object, ...], Cell] = {}
    for r in records:
        key = r["model"], r["cell"], r["requests"]
        cell = found.setdefault(key, Cell(str(key[0]), str(key[1]), int(str(key[2]))))
        engine = str(r["engine"])
        cell.rates[engine].append(float(str(r["output_tok_s"])))
        cell.busy = max(cell.busy, float(str(r["others_busy"])))
        during = float(str(r.get("others_during", 0.0)))
        if during > DISTURBED:
            cell.disturbed.append(f"{engine} #{r['repeat']} {during:.0%}")
        cell.sittings.add(str(r["sitting"]))
        if engine == CONTROL:
            cell.builds.add(str(r.get("build", "?")))
            if r.get("ceiling_tok_s"):
                cell.ceilings.append(float(str(r["ceiling_tok_s"])))
    return list(found.values())


def text(cell: Cell) -> str:
    """A block of lines: verdict, then every engine with its median, spread and every repeat."""
    unit = UNITS.get(cell.cell, "tok/s")
    lines = [f"{cell.model}  {cell.cell}  ({unit}, {cell.requests} requests)  {verdict(cell)}"]
    for engine in sorted(cell.rates, key=cell.median, reverse=True):
        rates = cell.rates[engine]
        low, high, middle = min(rates), max(rates), cell.median(engine)
        repeats = " ".join(f"{rate:.1f}" for rate in rates)
        spread = f"{low:8.1f} ..{high:8.1f}  {(high - low) / middle:4.0%}"
        mark = "*" if engine == cell.best else " "
        lines.append(f"{mark} {engine:24s}{middle:9.1f}  {spread}   {repeats}")
    if cell.ceilings:
        ceilings = " ".join(f"{x:.1f}" for x in cell.ceilings)
        middle = statistics.median(cell.ceilings)
        lines.append(f"  {'(ceiling for octavo)':24s}{middle:9.1f}  {'':26s}   {ceilings}")
    if len(cell.builds) > 1:
        lines.append(f"  ! repeats of several builds: {', '.join(sorted(cell.builds))}")
    if cell.busy >= 0.05:
        lines.append(f"  ! others had up to {cell.busy:.0%} of the machine before a turn")
    if cell.disturbed:
        lines.append(f"  ! others had part of the machine during: {', '.join(cell.disturbed)}")
    return "\n".join(lines)


def verdict(cell: Cell) -> str:
    ratio = "no peer" if cell.ratio is None else f"{cell.ratio:.2f}x {cell.best}"
    part = "no ceiling" if cell.fraction is None else f"{cell.fraction:.0%} of the ceiling"
    passed = f"PASS by {' and '.join(cell.passes)}" if cell.passes else "FALLS SHORT"
    return f"{ratio}, {part}; gate {GATES[cell.cell]}x or {FRACTION:.0%}: {passed}"


def report(records: list[Record], as_json: bool) -> None:
    """Print the tables, or one JSON line."""
    cells = sorted(cells_of(records), key=lambda c: (c.model, list(GATES).index(c.cell)))
    if as_json:
        print(json.dumps([cell.values() for cell in cells]))
        return
    print("Medians of all repeats, min..max, (max-min)/median, every repeat. *: the best peer.\n")
    print("\n\n".join(text(cell) for cell in cells) or "nothing measured yet")


COLOURS = {
    "octavo": "#1b7f5c", "llama.cpp": "#d98c3f", "OpenVINO": "#5b7db8", "vLLM": "#a3618f",
}  # fmt: skip


def plot(records: list[Record], path: Path) -> None:
    """Bars of every engine's median, a panel for each model and cell; whiskers are min and max."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    latest = {(cell.model, cell.cell): cell for cell in cells_of(records)}
    models = list(dict.fromkeys(model for model, _ in latest))
    names = [name for name in GATES if any(cell == name for _, cell in latest)]
    size = (3.4 * len(models) + 0.6, 2.5 * len(names) + 0.8)
    figure, axes = plt.subplots(len(names), len(models), figsize=size, squeeze=False)
    for i, name in enumerate(names):
        for j, model in enumerate(models):
            axis = axes[i][j]
            if i == 0:
                axis.set_title(model, fontsize=11)
            if j == 0:
                axis.set_ylabel(f"{name}\n{UNITS.get(name, 'tok/s')}", fontsize=10)
            if (model, name) in latest:
                _panel(axis, latest[model, name])
            else:
                axis.set_axis_off()
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(handles, COLOURS, loc="upper center", ncols=len(COLOURS), frameon=False)
    note = "medians; whiskers: all repeats; dashed: the ceiling of Octavo's work on this machine"
    figure.text(0.5, 0.08 / size[1], note, ha="center", fontsize=8)
    figure.tight_layout(rect=(0, 0.25 / size[1], 1, 1 - 0.35 / size[1]))
    figure.savefig(path, dpi=110)


def _panel(axis, cell: Cell) -> None:
    engines = sorted(cell.rates, key=lambda e: (e != CONTROL, -cell.median(e)))
    for x, engine in enumerate(engines):
        middle, rates = cell.median(engine), cell.rates[engine]
        colour = next((c for part, c in COLOURS.items() if engine.startswith(part)), "grey")
        error = [[middle - min(rates)], [max(rates) - middle]]
        axis.bar(x, middle, 0.72, color=colour, yerr=error, ecolor="#444444", capsize=2)
        axis.text(x, max(rates), f" {middle:.0f}", ha="center", va="bottom", fontsize=7.5)
    if cell.ceilings:
        axis.axhline(statistics.median(cell.ceilings), color="#1b7f5c", ls="--", lw=1)
    labels = [engine.removeprefix("llama.cpp ").replace(" ", "\n", 1) for engine in engines]
    axis.set_xticks(range(len(engines)), labels, fontsize=6.5)
    axis.margins(y=0.14)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(axis="y", labelsize=8)
    parts = [] if cell.ratio is None else [f"{cell.ratio:.2f}x"]
    parts += [] if cell.fraction is None else [f"{cell.fraction:.0%} of ceiling"]
    axis.text(0.98, 0.97, ", ".join(parts), transform=axis.transAxes, ha="right", va="top",
              fontsize=8, color="#1b7f5c" if cell.passes else "#b03030")  # fmt: skip
