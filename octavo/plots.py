"""The house style of plots. matplotlib is an optional extra, imported when a plot is drawn."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.errors import InvalidRequest, install

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
            f"plots need matplotlib, which is not installed: {install('plot')}",
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


class Labels:
    """Words beside dots, each where nothing else stands: all are known before the first is placed.

    The layout and the limits of the axes must be settled. Units inside are points of the page.
    """

    def __init__(self, axes: Any, size: float = 8.5) -> None:
        self._axes = axes
        self._size = size
        self._wanted: list[tuple[str, tuple[float, float], str, float]] = []
        self._strokes: list[tuple[float, float]] = []
        self._boxes: list[tuple[float, float, float, float]] = []
        self._sizes: dict[str, tuple[float, float]] = {}

    def put(self, text: str, at: tuple[float, float], colour: str, radius: float) -> None:
        """A label for the dot at `at` (in data) of so many points' radius."""
        self._wanted.append((text, at, colour, radius))

    def avoid(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """A line (in data) that no label shall stand on."""
        (x, y), (to_x, to_y) = self._points(start), self._points(end)
        steps = max(2, int(math.hypot(to_x - x, to_y - y) / 3))
        self._strokes += [
            (x + (to_x - x) * i / steps, y + (to_y - y) * i / steps) for i in range(steps + 1)
        ]

    def block(self, artist: Any) -> None:
        """What is drawn already (words, a legend), which no label shall stand on."""
        points = artist.get_window_extent().get_points() * 72 / self._axes.figure.dpi
        (left, low), (right, high) = points.tolist()
        self._boxes.append((left, low, right, high))

    def place(self) -> None:
        """Write them all, the largest first: it has the fewest places."""
        dots = [(*self._points(at), radius) for _, at, _, radius in self._wanted]
        for text, at, colour, radius in sorted(self._wanted, key=lambda one: -len(one[0])):
            x, y = self._points(at)
            spots = [
                (radius + ring, angle * math.pi / 8)
                for ring in (4.0, 12.0, 22.0, 34.0, 48.0, 66.0, 90.0, 120.0)
                for angle in (4, 12, 0, 8, 2, 6, 14, 10, 3, 5, 13, 11, 1, 7, 15, 9)
            ]
            boxes = [self._box(text, x, y, reach, angle) for reach, angle in spots]
            costs = [self._cost(box, dots) + 0.02 * i for i, box in enumerate(boxes)]
            best = min(range(len(boxes)), key=lambda i: costs[i])
            box = boxes[best]
            self._boxes.append(box)
            where = ((box[0] + box[2]) / 2 - x, (box[1] + box[3]) / 2 - y)
            far = spots[best][0] - radius > 14
            line = {"arrowstyle": "-", "color": colour, "lw": 0.7, "shrinkB": radius}
            self._axes.annotate(
                text, at, xytext=where, textcoords="offset points", ha="center", va="center",
                fontsize=self._size, color=colour, zorder=4, arrowprops=line if far else None,
            )  # fmt: skip

    def _points(self, at: tuple[float, float]) -> tuple[float, float]:
        x, y = self._axes.transData.transform(at) * 72 / self._axes.figure.dpi
        return float(x), float(y)

    def _box(
        self, text: str, x: float, y: float, reach: float, angle: float
    ) -> tuple[float, float, float, float]:
        """The box of a text whose nearest edge is `reach` away in that direction."""
        wide, high = self._half(text)
        x += math.cos(angle) * (reach + wide)
        y += math.sin(angle) * (reach + high)
        return x - wide, y - high, x + wide, y + high

    def _half(self, text: str) -> tuple[float, float]:
        """Half of a text's width and height as it will be written, with a little air."""
        if text not in self._sizes:
            drawn = self._axes.text(0, 0, text, fontsize=self._size)
            extent = drawn.get_window_extent()
            drawn.remove()
            scale = 72 / self._axes.figure.dpi / 2
            self._sizes[text] = extent.width * scale + 2, extent.height * scale + 1
        return self._sizes[text]

    def _cost(
        self,
        box: tuple[float, float, float, float],
        dots: Sequence[tuple[float, float, float]],
    ) -> float:
        """How much stands in the way of a label in that box."""
        left, low, right, high = box
        cost = 0.0
        for a, b, c, d in self._boxes:
            cost += 10.0 * (a < right and c > left and b < high and d > low)
        for x, y, radius in dots:
            dx = max(left - x, 0.0, x - right)
            dy = max(low - y, 0.0, y - high)
            cost += 6.0 * (math.hypot(dx, dy) < radius + 1)
        cost += sum(2.0 for x, y in self._strokes if left < x < right and low < y < high)
        edges = self._axes.get_window_extent().get_points() * 72 / self._axes.figure.dpi
        (least_x, least_y), (most_x, most_y) = edges.tolist()
        inside = left >= least_x and right <= most_x and low >= least_y and high <= most_y
        return cost + 20.0 * (not inside)


def save(drawing: Any, path: str | Path) -> None:
    """Write a figure; raises `InvalidRequest` for a kind of file that cannot be drawn."""
    import matplotlib.pyplot as plt

    try:
        drawing.savefig(path)
    except ValueError as error:
        raise InvalidRequest(f"{path}: {error}", "plot") from error
    finally:
        plt.close(drawing)
