"""`octavo lab` on a real engine: what is counted is exact, whatever the times are."""

from __future__ import annotations

import json

import pytest

from octavo import neighbours
from octavo.core.batch import Batch, RowResult, StepResult
from octavo.core.executor import Capacity
from octavo.core.request import Slo
from octavo.errors import InvalidRequest
from octavo.lab import batching, chunked, kv, paging, prefix, scheduling, stage
from octavo.lab.finding import Finding
from octavo.lab.stage import Clock, Setting, Visit
from octavo.sim.workload import Sizes
from tests.test_ceilings import BOX
from tests.test_roofline import assembly  # noqa: F401


class Machine:
    """Steps of known length in a time of their own: an executor and a clock."""

    def __init__(self, step: float = 0.01, a_token: float = 0.001) -> None:
        self.capacity = Capacity(64, 32, 256, 16, 256, 2048)
        self.now = 100.0
        self._step, self._token = step, a_token
        self._batch: Batch | None = None
        self.clock = Clock(lambda: self.now, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def submit(self, batch: Batch) -> None:
        self._batch = batch

    def collect(self) -> StepResult:
        batch, self._batch = self._batch, None
        assert batch is not None
        started = self.now
        self.now += self._step + self._token * batch.num_tokens
        rows = {row.seq_id: RowResult((1,) * len(row.outputs)) for row in batch.rows}
        return StepResult(batch.step, rows, started, self.now)

    def ready_at(self) -> float | None:
        return None


def play(machine: Machine, setting: Setting, visits: list[Visit], **more) -> stage.Trial:
    engine = setting.engine(machine)
    return stage.play(engine, stage.requests(visits, 300, "t"), machine.clock, **more)


def test_times_count_from_when_a_request_was_due() -> None:
    machine = Machine(step=0.01, a_token=0.001)
    trial = play(machine, Setting("one", rows=1), [Visit(0.0, 40, 3), Visit(0.02, 20, 2)])
    # 50 ms of prefill and two decodes of 11 ms; then 30 ms and 11 ms, which began to wait at 20.
    assert trial.tokens["r0"] == pytest.approx([0.05, 0.061, 0.072])
    assert trial.tokens["r1"] == pytest.approx([0.102, 0.113])
    assert trial.ttfts == pytest.approx([0.05, 0.082])
    assert trial.gaps(["r0"]) == pytest.approx([0.011, 0.011])
    assert trial.seconds == pytest.approx(0.113)
    assert trial.tokens_per_s == pytest.approx(5 / 0.113)


def test_nobody_comes_before_it_is_due() -> None:
    machine = Machine()
    trial = play(machine, Setting("late"), [Visit(0.0, 4, 2), Visit(5.0, 4, 2)])
    assert trial.ttfts == pytest.approx([0.014, 0.014])
    assert trial.seconds == pytest.approx(5.0 + 0.014 + 0.011)


def test_a_gate_sends_away() -> None:
    machine = Machine()
    trial = play(
        machine, Setting("gate"), [Visit(0.0, 4, 2)] * 3,
        gate=lambda request, _: request if request.id == "r1" else None,
    )  # fmt: skip
    assert list(trial.tokens) == ["r1"]


def test_runs_go_in_turn_and_who_begins_rotates() -> None:
    seen: list[str] = []
    rounds = stage.Rounds(3)
    found = stage.in_turn("abc", rounds, lambda name, n: seen.append(name) or n, lambda _: None)
    assert "".join(seen) == "abcbcacab"
    assert found == {"a": [0, 1, 2], "b": [0, 1, 2], "c": [0, 1, 2]}


@pytest.mark.parametrize(("round_s", "rounds"), [(10.0, 3), (30.0, 2), (50.0, 1), (500.0, 1)])
def test_rounds_end_in_time_and_the_first_is_always_played(round_s: float, rounds: int) -> None:
    machine, told = Machine(), list[str]()
    found = stage.in_turn(
        "ab",
        stage.Rounds(3, 80.0, machine.clock),
        lambda *_: machine._sleep(round_s / 2),
        told.append,
        "way {}".format,
    )
    assert {len(runs) for runs in found.values()} == {rounds}
    assert told[0] == "way a, round 1 of 3"
    values = {"asked": {"rounds": 3}, "had": {"rounds": rounds}}
    assert bool(stage.shortened(values)) == (rounds < 3)


def test_a_slow_machine_has_a_smaller_experiment() -> None:
    plan = chunked.Plan()
    assert plan.fitting(1.0, 0.5) == plan
    fitted = plan.fitting(4.0, 3.0)  # all rounds have time, each is smaller
    assert fitted.prompts == 1
    assert 5 * (4.0 * fitted.output / plan.output + fitted.prompts * 3.0) < plan.seconds / 3
    slow = plan.fitting(40.0, 20.0)  # 500 s a round
    assert (slow.prompts, slow.output) == (1, chunked.LEAST_OUTPUT)
    assert len(slow.chunks) * (40.0 * slow.output / plan.output + slow.prompts * 20.0) < 151
    pages = paging.Plan()
    assert pages.count(0.1) == pages.requests
    assert pages.count(2.0) == 13
    assert pages.count(50.0) == paging.LEAST


def rows_of(**attained: float) -> dict:
    """Values of `scheduling` in which everything is the same but the attainment."""
    spread = dict.fromkeys(("median", "least", "most"), 0.5)
    same = {"goodput_per_s": spread, "fairness": spread, "ttft_p50_s": spread, "ttft_p99_s": spread,
            "output_tokens_per_s": spread, "by_tenant": {}, "refused": 0.0}  # fmt: skip
    return {
        "conclusive": True, "measured_load": 1.25, "requests": 8, "asked_requests": 8,
        "rounds": [], "asked_rounds": 0,
        "policies": {
            name.replace("_", "+"): same | {"attainment": spread | {"median": value}}
            for name, value in attained.items()
        },
    }  # fmt: skip


def test_the_conclusion_is_what_the_rows_show() -> None:
    says = scheduling._says(rows_of(fcfs=0.5, priority=1.0, sjf=1.0, slo=1.0, slo_admission=0.98))
    assert "priority, sjf and slo serve 100% in time, fcfs serves 50% in time" in says
    assert "all policies stand at 0.50" in says  # ties are no winners
    assert "slo+admission refused nobody" in says
    assert "give up" not in says
    assert "waiting longer" not in says
    assert "more was kept" in says
    says = scheduling._says(rows_of(fcfs=0.4, slo=0.7))
    assert "slo serves 70% in time, fcfs serves 40% in time" in says
    assert "refused" not in says
    assert "more was kept" not in says
    says = scheduling._says(rows_of(fcfs=0.9, slo=0.9))
    assert "all policies serve 90% in time" in says


def test_a_setting_stays_within_the_engine() -> None:
    with pytest.raises(InvalidRequest, match="max_rows 17"):
        Setting("wide", rows=17).engine(Machine())


def test_the_same_seed_draws_the_same_rhythm_at_every_rate() -> None:
    slow, fast = (stage.drawn("s", 9, rate, Sizes(30, 0.5), Sizes(9, 0.5)) for rate in (1.0, 4.0))
    assert [v.at for v in slow] == pytest.approx([4 * v.at for v in fast])
    assert [(v.prompt, v.output) for v in slow] == [(v.prompt, v.output) for v in fast]


def test_jain() -> None:
    assert scheduling.jain([0.5, 0.5, 0.5]) == pytest.approx(1.0)
    assert scheduling.jain([1.0, 0.0, 0.0]) == pytest.approx(1 / 3)
    assert scheduling.jain([0.0, 0.0]) == 0.0


def test_others_share_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = iter([(100.0, 1000.0, 50.0), (160.0, 1100.0, 80.0)])
    monkeypatch.setattr(neighbours.Neighbours, "_read", staticmethod(lambda: next(reads)))
    assert neighbours.Neighbours().share() == pytest.approx((60 - 30) / 100)
    assert neighbours.busy_note({"neighbours": 0.3})
    assert not neighbours.busy_note({"neighbours": 0.05})
    assert not neighbours.busy_note({"neighbours": None})


# ---- each experiment, small, on the small real engine ----


@pytest.fixture(scope="module")
def findings(assembly) -> dict[str, Finding]:  # noqa: F811
    few = Sizes(6, 0.0)
    made = {
        "batching": batching.finding(batching.measure(
            assembly, batching.Plan((1.0, 50.0), 4, 3, 1, 99.0, Sizes(12, 0.5, 40), few), BOX)),
        "paging": paging.finding(paging.measure(
            assembly, paging.Plan(256, 128, 6, 1, Sizes(20, 0.5, 60), few))),
        "prefix": prefix.finding(prefix.measure(
            assembly, prefix.Plan(64, 8, 3, 4, 1, 2, 64, 6, 2, (8, 16), ("fcfs", "slo")))),
        "chunked": chunked.finding(chunked.measure(
            assembly, chunked.Plan((16, 256), 2, 12, 200, 2, 1))),
        "scheduling": scheduling.finding(scheduling.measure(
            assembly, scheduling.Plan(("fcfs", "slo+admission"), requests=8, repeats=1))),
        "kv": kv.finding(kv.measure(assembly, kv.Plan(50, 20, 32, 10))),
    }  # fmt: skip
    return made


NAMES = ("batching", "paging", "prefix", "chunked", "scheduling", "kv")


@pytest.mark.parametrize("name", NAMES)
def test_a_finding_has_values_a_table_and_words(findings, name) -> None:
    found = findings[name]
    json.dumps(found.values)
    assert found.says
    assert "neighbours" in found.values  # a busy machine is told
    assert all(len(row) == len(sheet.head) for sheet in found.sheets for row in sheet.rows)
    assert all(sheet.rows for sheet in found.sheets)
    assert "ceiling" in " ".join(found.says) or "floor" in " ".join(found.says) or name == "kv"


@pytest.mark.parametrize("name", NAMES)
def test_a_finding_can_be_drawn(findings, name, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    findings[name].draw(str(tmp_path / "it.png"))
    assert (tmp_path / "it.png").stat().st_size > 20_000


def test_one_at_a_time_has_one_row(findings) -> None:
    cells = findings["batching"].values["cells"]
    assert {c["rows_a_step"]["median"] for c in cells if c["batching"] == "none"} == {1.0}
    most = max(c["rows_a_step"]["median"] for c in cells if c["batching"] == "continuous")
    assert 1.0 < most <= 3.0


def test_a_slow_machine_has_fewer_requests_and_says_so(findings) -> None:
    plan = batching.Plan((1.0,), requests=50, repeats=2, seconds=60.0)
    assert plan.count(0.01) == 50
    assert plan.count(0.5) == 20  # two repeats of three runs of 20 x 0.5 s
    assert plan.count(100.0) == batching.LEAST
    values = findings["batching"].values | {"asked_requests": 9}
    assert "not 9" in " ".join(batching.finding(values).says)


def test_a_load_that_was_no_overload_decides_nothing(findings) -> None:
    values = findings["scheduling"].values
    assert scheduling.least_load(1.3) == pytest.approx(1.15)
    assert scheduling.least_load(0.8) == 0.0
    assert [r["offered_per_s"] / r["capacity_per_s"] for r in values["rounds"]] == [
        pytest.approx(values["load"])
    ]
    lost = values["rounds"][0] | {"load": 0.9, "counts": False}
    none = values | {"conclusive": False, "measured_load": 0.9, "rounds": [lost]}
    assert "INCONCLUSIVE" in " ".join(scheduling.finding(none).says)
    assert "0.90 times came" in " ".join(scheduling.finding(none).says)
    kept = lost | {"load": 1.3, "counts": True}
    some = values | {"conclusive": True, "rounds": [lost, kept], "asked_requests": 9}
    said = " ".join(scheduling.finding(some).says)
    assert "1 of 2 rounds are left out" in said
    assert "8 requests, not 9" in said


def test_requests_come_within_the_time_that_the_load_says() -> None:
    plan = scheduling.Plan()
    slos = {t.name: Slo(1.0) for t in plan.tenants}
    visits = scheduling._visits(plan, 40, slos)
    assert visits[-1].at == pytest.approx(1.0)
    assert [v.at for v in visits] == sorted(v.at for v in visits)
    assert plan.count(13.0) == 49  # 80 s are 21 runs
    assert plan.count(1.0) == scheduling.LEAST
    assert plan.count(1000.0) == plan.requests


def test_reservations_are_what_they_say(findings) -> None:
    values = findings["paging"].values
    ways = values["ways"]
    assert ways["context"]["most_at_once"] == 2  # 256 tokens of pool, 128 of context each
    for name, one in ways.items():
        held = [step[2] for step in one["steps"]]
        assert max(held) <= values["pool"], name
        assert all(done <= reserved for _, _, reserved, done in one["steps"])
    for _, n, held, done in ways["blocks"]["steps"]:
        assert held - done < 32 * n + (n == 0)
    assert max(ways["blocks"]["waste"], ways["exact"]["waste"]) < ways["context"]["waste"]


def test_a_shared_prompt_is_computed_once(findings) -> None:
    burst = findings["prefix"].values["burst"]
    each, n = 64 + 8, 4
    assert burst["off"]["cached_tokens"] == 0
    assert burst["off"]["computed_tokens"] == n * (each + 3 - 1)
    assert burst["on"]["cached_tokens"] == (n - 1) * 64
    assert burst["on"]["computed_tokens"] == n * (each + 3 - 1) - (n - 1) * 64
    hits = findings["prefix"].values["hits"]
    assert hits["ceiling"] == pytest.approx(4 * 64 / (6 * 72))
    assert all(rate <= hits["ceiling"] + 1e-9 for rates in hits["rates"].values() for rate in rates)
    assert hits["rates"]["fcfs"][-1] == pytest.approx(hits["ceiling"])


def test_a_cache_is_followed_to_the_byte(findings) -> None:
    values = findings["kv"].values
    steps, token = values["steps"], values["token_bytes"]
    assert token == 2 * 2 * 64 * 2 * 3  # K and V, 2 heads of 64, bf16, 3 layers
    assert [(s["from"], s["to"]) for s in steps[:3]] == [(0, 32), (32, 50), (50, 51)]
    assert all(s["written_bytes"] == token * (s["to"] - s["from"]) for s in steps)
    first = [s for s in steps if s["turn"] == 1]
    assert first[-1]["to"] == 50 + 20 - 1  # the last token is never computed
    assert all(s["blocks"] == -(-s["to"] // 32) for s in steps)
    # The second turn begins behind the first's full blocks.
    second = next(s for s in steps if s["turn"] == 2)
    assert second["from"] == values["second_cached"] == 64


def test_a_plan_that_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="--pool"):
        paging.Plan(100, 200)
    with pytest.raises(InvalidRequest, match="whole prompt"):
        chunked.Plan((64, 128))
    with pytest.raises(InvalidRequest, match="above 4"):
        chunked.Plan((4, 2048))
