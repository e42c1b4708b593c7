"""Virtual time: closed forms, determinism, and that it is the engine's own scheduler that runs."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from octavo.core.batch import Batch, Row, SampleSpec, Want
from octavo.core.executor import Capacity
from octavo.core.policy import fcfs
from octavo.core.request import SamplingParams, Slo
from octavo.core.slo import slo
from octavo.core.steptime import Coefficients
from octavo.errors import EngineError
from octavo.sim.executor import Fitted, SimulatedExecutor
from octavo.sim.fleet import (
    Fleet,
    LeastTokens,
    PredictedCost,
    RoundRobin,
    Run,
    Spec,
    prefill_rate,
    wanting,
)
from octavo.sim.report import Spread, compare_table, facts, report, times_table
from octavo.sim.workload import Item, Sizes, Workload, synthetic

CAPACITY = Capacity(4096, 32, 512, 64, 512, 8192)
STEP = Fitted(Coefficients(fixed=0.010, token=0.0001, decode=0.0))


def spec(**more: object) -> Spec:
    fields = {"name": "r", "capacity": CAPACITY, "seconds": STEP, "policy": fcfs} | more
    return Spec(**fields)  # type: ignore[arg-type]


def run(load: Workload, *specs: Spec, **more: object) -> Run:
    return Fleet(specs or (spec(),), prefix_caching=False, **more).run(load)  # type: ignore[arg-type]


def test_one_request_takes_its_steps_and_nothing_else() -> None:
    """300 tokens in one step, then one token a step: times are sums of the model's."""
    (done,) = run(Workload("w", (Item("a", 1.0, 300, 11),))).outcomes
    assert done.ttft == pytest.approx(0.010 + 0.030)
    assert done.tpot == pytest.approx(0.0101)
    assert done.e2e == pytest.approx(0.040 + 10 * 0.0101)
    assert done.num_output == 11


def test_a_long_prompt_is_chunked_by_the_capacity() -> None:
    (done,) = run(Workload("w", (Item("a", 0.0, 1200, 1),))).outcomes
    assert done.ttft == pytest.approx(3 * 0.010 + 0.120)
    assert done.tpot is None


def test_an_arrival_waits_for_the_running_step() -> None:
    load = Workload("w", (Item("a", 0.0, 300, 1), Item("b", 0.001, 100, 1)))
    first, second = run(load).outcomes
    assert first.finished == pytest.approx(0.040)
    assert second.finished == pytest.approx(0.040 + 0.020)


def test_the_same_seed_is_the_same_run_and_noise_is_only_noise() -> None:
    load = synthetic(8.0, 60.0, Sizes(400, 0.8), Sizes(40, 0.5), seed=5)
    quiet = run(load)
    noisy, again = (run(load, spec(noise=0.05), seed=3) for _ in range(2))
    other = run(load, spec(noise=0.05), seed=4)
    assert noisy.outcomes == again.outcomes
    assert noisy.outcomes != other.outcomes
    means = [np.mean([o.e2e for o in r.outcomes]) for r in (quiet, noisy)]
    assert means[1] == pytest.approx(means[0], rel=0.05)


def test_every_request_ends_and_every_token_is_counted_once() -> None:
    load = synthetic(30.0, 20.0, Sizes(300, 1.0, 2000), Sizes(30, 1.0, 200), cv=3.0, seed=6)
    small = Capacity(80, 32, 256, 16, 256, 2560)
    done = run(load, spec(capacity=small))
    assert [o.num_output for o in done.outcomes] == [i.output for i in load.items]
    assert done.counters["preemptions"] > 0
    tokens = sum(i.prompt + i.output - 1 for i in load.items)
    recomputed = done.counters["recomputed_tokens"]
    assert done.counters["computed_tokens"] == tokens + recomputed
    assert len(done.gaps) == sum(i.output - 1 for i in load.items)
    assert done.seconds >= done.busy[0]


def test_shared_prefixes_are_computed_once() -> None:
    items = tuple(Item(f"r{i}", i * 1.0, 1030, 2, blocks=(1, 2, 9 + i)) for i in range(4))
    done = Fleet([spec()]).run(Workload("w", items))
    assert [o.num_cached for o in done.outcomes] == [0, 1024, 1024, 1024]
    assert report(done).hit_rate == pytest.approx(3 * 1024 / (4 * 1030))


def test_routers_spread_and_the_predicting_one_knows_who_is_slow() -> None:
    load = synthetic(10.0, 60.0, Sizes(500), Sizes(20), seed=7)
    slow = spec(name="slow", seconds=Fitted(Coefficients(0.03, 0.0005)))
    shares = {}
    for router in (RoundRobin(), LeastTokens(), PredictedCost(prefill_rate)):
        done = run(load, spec(), slow, router=router)
        shares[type(router)] = sum(o.replica == 1 for o in done.outcomes) / len(load)
    assert shares[RoundRobin] == pytest.approx(0.5, abs=0.01)
    assert shares[PredictedCost] < shares[LeastTokens] < 0.5


def test_a_full_queue_refuses_and_a_refusal_is_never_good() -> None:
    load = Workload("w", tuple(Item(f"r{i}", 0.001 * i, 500, 5) for i in range(200)))
    done = run(load, spec(max_waiting=8))
    one = report(done, Slo(ttft=1000.0))
    assert one.refused > 50
    assert one.good == one.sent - one.refused
    assert one.attainment == one.good / 200
    assert one.kept == 1.0


def test_the_definitions_are_the_fields() -> None:
    load = Workload("w", tuple(Item(f"r{i}", float(i), 90, n) for i, n in enumerate((1, 5, 9))))
    done = run(load)
    one = report(done, Slo(ttft=0.02, tpot=0.0102))
    ttfts = [o.ttft for o in done.outcomes]
    assert one.ttft.mean == pytest.approx(np.mean(ttfts))
    assert one.ttft.p90 == pytest.approx(np.percentile(ttfts, 90))
    assert one.tpot.number == 2  # one token has no TPOT, and is good all the same
    assert one.good == 3
    assert one.goodput == pytest.approx(3 / done.seconds)
    assert one.itl.number == 4 + 8
    late = report(done, Slo(ttft=0.001))
    assert late.attainment == 0.0
    assert report(done, warmup=0.5).sent == 2
    assert Spread.of([]).as_dict()["p50"] is None
    assert len(compare_table([one, late])[1]) == 2
    assert times_table(one)[1][0][0] == "TTFT"
    assert dict(facts(one))["goodput"].endswith("req/s")


def test_the_executor_answers_every_kind_of_want() -> None:
    executor = SimulatedExecutor(CAPACITY, STEP)
    spec_ = SampleSpec(SamplingParams(logprobs=1), 0, 0)
    wants = (Want(0, target=7), Want(1, target=8), Want(2, spec_))
    row = Row(3, 0, array("i", [1, 2, 3]), array("i", [0]), wants)
    executor.now = 2.0
    executor.submit(Batch(1, (row,)))
    assert executor.ready_at() == pytest.approx(2.0 + 0.0103)
    with pytest.raises(EngineError):
        executor.submit(Batch(2, (row,)))
    result = executor.collect()
    assert [s.token for s in result.rows[3].scores] == [7, 8]
    assert len(result.rows[3].tokens) == len(result.rows[3].logprobs) == 1
    with pytest.raises(EngineError):
        executor.collect()


def test_deadlines_are_worth_more_than_order_of_arrival_under_overload() -> None:
    """Twice what it can carry: with deadlines and admission the server does what it still can, and
    what it lets in it serves in time."""
    load = synthetic(16.0, 40.0, Sizes(600, 0.8, 4000), Sizes(60, 0.6, 400), seed=11)
    wants = Slo(ttft=1.0, tpot=0.05)
    reports = {}
    for name, policy, admits in (("fcfs", fcfs, False), ("slo", slo, False), ("gate", slo, True)):
        fleet = Fleet([spec(policy=policy, admits=admits)], prefix_caching=False)
        reports[name] = report(fleet.run(load, wanting(wants)), wants, name)
    assert reports["gate"].goodput > 1.5 * reports["fcfs"].goodput
    assert reports["slo"].goodput > reports["fcfs"].goodput
    assert reports["gate"].refused > 0
    assert reports["gate"].kept > 0.8
