"""How much longer a first token may take than was forecast.

A step's errors even out over a queue; what a queue's forecast leaves out does not: streams that
grow while it waits, newcomers that go first, a machine that others use. So the margin is not
derived, it follows what became of the forecasts: each that was exceeded raises it, each that was
kept lowers it a little, and it settles where about one in twenty is exceeded. Only forecasts that
are near to what was promised count: the margin decides about no others. The first that are exceeded
raise it more, for what it begins with is a guess.
"""

from __future__ import annotations

UP, DOWN = 0.02, 0.001
FIRST = 1.1  # before any came true
MOST = 2.0
NEAR = 0.5  # of what was promised
EARLY = 5.0  # times as much: what the first that is exceeded raises it, the second half of that


class Margin:
    """factor: by what forecasts are multiplied before a promise is made. exceeded: how many were so
    far."""

    __slots__ = ("exceeded", "factor")

    def __init__(self, factor: float = FIRST, exceeded: int = 0) -> None:
        self.factor = factor
        self.exceeded = exceeded

    def came(self, forecast: float, took: float, promised: float) -> None:
        """A first token was promised within `promised` seconds, forecast after `forecast`, and took
        `took` (or was given up then)."""
        if forecast < NEAR * promised:
            return
        if took > self.factor * forecast:
            self.exceeded += 1
            self.factor = min(self.factor + UP * max(1.0, EARLY / self.exceeded), MOST)
        else:
            self.factor = max(self.factor - DOWN, 1.0)
