"""The margin on forecasts follows what became of them."""

from __future__ import annotations

import random
from math import exp

import pytest

from octavo.core.margin import DOWN, EARLY, FIRST, MOST, UP, Margin


@pytest.mark.parametrize(("typical", "spread"), [(0.9, 0.05), (1.1, 0.02), (1.3, 0.1)])
def test_about_one_forecast_in_twenty_is_exceeded(typical: float, spread: float) -> None:
    rng, margin, exceeded = random.Random(1), Margin(), 0
    ratios = [typical * exp(rng.gauss(0.0, spread)) for _ in range(20_000)]
    for i, ratio in enumerate(ratios):
        exceeded += i >= 1000 and ratio > margin.factor
        margin.came(1.0, ratio, 1.5)
    assert margin.factor >= 1.0
    most = DOWN / (UP + DOWN)
    assert 0.04 < most < 0.06
    assert exceeded <= 1.2 * most * (len(ratios) - 1000)
    beyond = sum(ratio > margin.factor for ratio in ratios) / len(ratios)
    assert beyond < 2.0 * most
    if margin.factor > 1.05:  # and no wider than need be
        assert beyond > 0.2 * most


def test_forecasts_that_no_promise_hangs_on_do_not_count() -> None:
    margin = Margin()
    for _ in range(100):
        margin.came(0.1, 9.0, 10.0)
    assert margin.factor == FIRST
    for _ in range(1000):
        margin.came(6.0, 60.0, 10.0)
    assert margin.factor == MOST


def test_the_first_forecasts_that_are_exceeded_raise_it_most_and_later_ones_all_the_same() -> None:
    margin, steps = Margin(), list[float]()
    for _ in range(8):
        before = margin.factor
        margin.came(1.0, 9.0, 1.5)
        steps.append(margin.factor - before)
    assert steps[0] == pytest.approx(EARLY * UP)
    assert steps[1] == pytest.approx(0.5 * EARLY * UP)
    assert steps[5:] == pytest.approx([UP] * 3)
