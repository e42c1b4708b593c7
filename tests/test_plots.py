"""The house style of plots: words stand where nothing else does."""

from __future__ import annotations

import random

import pytest

from octavo import plots

pytest.importorskip("matplotlib")


@pytest.mark.parametrize("seed", range(4))
def test_labels_stand_on_no_other_label_dot_or_line(seed: int) -> None:
    draw = random.Random(seed)
    drawing, axes = plots.figure(width=10, height=7)
    axes.set_xlim(0, 10)
    axes.set_ylim(0, 10)
    drawing.canvas.draw()
    labels = plots.Labels(axes)
    dots = [(draw.uniform(1, 9), draw.uniform(1, 9)) for _ in range(18)]
    for number, at in enumerate(dots):
        axes.plot(*at, "o", ms=8)
        labels.put(f"word {number}", at, plots.INK, 4)
    line = (0.0, 5.0), (10.0, 5.0)
    axes.plot(*zip(*line, strict=True))
    labels.avoid(*line)
    labels.place()
    drawing.canvas.draw()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 18
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i])
        for at in dots:
            x, y = axes.transData.transform(at)
            assert not (box.x0 < x < box.x1 and box.y0 < y < box.y1)
        height = axes.transData.transform((0, 5))[1]
        assert not box.y0 < height < box.y1
        inside = axes.get_window_extent()
        assert inside.x0 <= box.x0
        assert box.x1 <= inside.x1
