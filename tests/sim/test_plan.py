"""The planner against trying every fleet."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from octavo import cli
from octavo.core.executor import Capacity
from octavo.core.policy import fcfs
from octavo.core.request import Slo
from octavo.core.steptime import Coefficients
from octavo.errors import InvalidRequest
from octavo.sim.executor import Fitted
from octavo.sim.fleet import Spec
from octavo.sim.plan import Group, Planner, table
from octavo.sim.workload import Sizes, synthetic

SAMPLE = str(Path(__file__).parents[2] / "bench/data/azure_conv_sample.csv.gz")
CAPACITY = Capacity(2048, 32, 512, 16, 512, 8192)
SLO = Slo(ttft=0.5, tpot=0.04)


def spec(name: str, fixed: float, token: float, price: float | None) -> Spec:
    seconds = Fitted(Coefficients(fixed=fixed, token=token))
    return Spec(name, CAPACITY, seconds, fcfs, price=price, kind=name)


FAST, SLOW = spec("fast", 0.01, 0.0002, 5.0), spec("slow", 0.02, 0.0006, 1.5)
LOAD = synthetic(9.0, 30.0, Sizes(300, 0.5), Sizes(12, 0.5), seed=9)


@pytest.mark.parametrize("seeds", [3, 8])
def test_the_plan_is_the_cheapest_of_all_fleets_that_are_enough(seeds: int) -> None:
    planner = Planner(LOAD, SLO, target=0.9, seeds=seeds)
    best = planner.plan([FAST, SLOW]).best
    assert best is not None
    judge = Planner(LOAD, SLO, target=0.9, seeds=seeds)
    prices = []
    for fast, slow in itertools.product(range(4), range(9)):
        groups = tuple(g for g in (Group(FAST, fast), Group(SLOW, slow)) if g.number)
        if groups and judge._check(groups) is not None:
            prices.append(fast * 5.0 + slow * 1.5)
    assert best.price == min(prices)
    assert best.sure >= 0.9
    assert best.shares[0] >= 0.9
    assert best.report.attainment == best.shares[0]
    assert table(planner.result)[1][0][0] == best.name


def test_what_can_never_do_is_said_and_not_tried_for_ever() -> None:
    planner = Planner(LOAD, Slo(ttft=0.001), target=0.9)
    found = planner.plan([FAST])
    assert found.best is None
    assert found.impossible == [("fast", "an idle replica misses the objectives")]
    assert found.simulations < 5


def test_a_plan_needs_prices_objectives_and_seeds() -> None:
    with pytest.raises(InvalidRequest, match="no price"):
        Planner(LOAD, SLO).plan([spec("free", 0.01, 0.0002, None)])
    for more in ({"target": 0.0}, {"seeds": 1}):
        with pytest.raises(InvalidRequest):
            Planner(LOAD, SLO, **more)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="objective"):
        Planner(LOAD, Slo())


def test_the_command_prints_fleets_and_reasons() -> None:
    words = ["plan", SAMPLE, "-m", "llama-3.2-1b", "-H", "l4,h100,mi300x", "--head", "80",
             "--slo-ttft", "1000", "--max-batch-tokens", "512", "--seeds", "2"]  # fmt: skip
    shown = CliRunner().invoke(cli.cli, words)
    assert shown.exit_code == 0, shown.output
    assert "1 x l4" in shown.stdout
    assert "mi300x: no price is known" in shown.stdout
    made = json.loads(CliRunner().invoke(cli.cli, [*words, "--json"]).stdout)
    assert made["fleets"][0]["dollars_per_hour"] == 0.44
    assert len(made["fleets"][0]["attainment"]) == 3
