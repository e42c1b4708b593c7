"""The house style of plots. matplotlib is an optional extra, imported when a plot is drawn."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.errors import InvalidRequest

INK, FAINT, GRID = "#1c1c1c", "#6b6b6b", "#e3e3e3"
# Apart from each other for every kind of colour vision (Okabe and Ito), dark enough on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B8860B", "#56B4E9", "#444444")
STYLE: dict[str, Any] = {
    "figure.facecolor": "white", "axes.facecolor": "white", "savefig.facecolor": "white",
    "font.size": 10, "axes.titlesize": 12, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.edgecolor": FAINT, "axes.labelcolor": INK, "text.color": INK,
    "xtick.color": FAINT, "ytick.color": FAINT, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.8,
    "axes.axisbelow": True, "legend.frameon": False, "savefig.dpi": 144,
}  # fmt: skip


def require() -> None:
    """Raises `InvalidRequest` where there is no matplotlib: before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidRequest(
            "plots need matplotlib, which is not installed: pip install matplotlib (octavo[plot])",
            "plot",
        )


def figure(
    rows: int = 1, columns: int = 1, *, width: float = 10.0, height: float = 6.0
) -> tuple[Any, Any]:
    """A figure and its axes (one, or an array of them), without a window."""
    require()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    parameters: Any = plt.rcParams
    parameters.update(STYLE)
    drawing, axes = plt.subplots(rows, columns, figsize=(width, height), layout="constrained")
    return drawing, axes


def round_ticks(axis: Any) -> None:
    """1, 2, 5, 10 ... as plain numbers on a logarithmic axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(NullFormatter())


def whiskers(
    axes: Any, x: Sequence[float], figures: Sequence[Mapping[str, float]], scale: float = 1.0,
    **style: Any,
) -> None:  # fmt: skip
    """A line through medians, with bars from the least to the most of the repeats."""
    y = [f["median"] * scale for f in figures]
    below = [(f["median"] - f["least"]) * scale for f in figures]
    above = [(f["most"] - f["median"]) * scale for f in figures]
    axes.errorbar(x, y, yerr=(below, above), capsize=3, elinewidth=1.1, **style)


def headline(drawing: Any, text: str, beneath: str = "") -> None:
    """What the figure shows, over all of it; beneath it how it was made."""
    drawing.suptitle(text + ("\n" if beneath else ""), x=0.01, ha="left", fontweight="bold",
                     fontsize=13, linespacing=1.5)  # fmt: skip
    if beneath:
        drawing.text(0.01, 0.985 - 0.32 / drawing.get_figheight(), beneath, ha="left", va="top",
                     color=FAINT, fontsize=9)  # fmt: skip


def save(drawing: Any, path: str | Path) -> None:
    """Write a figure; raises `InvalidRequest` for a kind of file that cannot be drawn."""
    import matplotlib.pyplot as plt

    try:
        drawing.savefig(path)
    except ValueError as error:
        raise InvalidRequest(f"{path}: {error}", "plot") from error
    finally:
        plt.close(drawing)
