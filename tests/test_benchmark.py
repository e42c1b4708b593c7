"""`octavo bench` and `octavo doctor`: the figures add up, and what is wrong is said."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from octavo import doctor
from octavo.benchmark import commands, offline
from octavo.benchmark.offline import Plan
from octavo.ceilings import Ceilings, Rates
from octavo.cli import cli
from octavo.config import EngineConfig
from octavo.errors import FetchError, InvalidRequest
from octavo.llm import LLM
from octavo.models.config import ModelConfig, Rope
from octavo.ops.trace import trace
from tests.server.fakes import FakeExecutor
from tests.test_llm import fake_assembly

RATES = Rates(dram=1e9, l3=4e9, l2=8e9, int8=1e12, bf16=1e12, f32=1e12)
CEILINGS = Ceilings("portable", 1, RATES, RATES, 1e-7)
TINY = ModelConfig(
    architecture="llama",
    vocab_size=269,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    max_context=2048,
    norm_eps=1e-5,
    ropes=(Rope(10000.0),),
    rope_index=(0, 0),
    windows=(None, None),
    attn_scale=0.25,
    tied_head=True,
)


def tiny_llm(executor: FakeExecutor) -> LLM:
    made = fake_assembly(executor)
    config = dataclasses.replace(made.config, kv_dtype="bf16")
    return LLM.over(dataclasses.replace(made, program=trace(TINY), config=config))


def test_a_bench_reports_every_cell_beside_its_roof() -> None:
    executor = FakeExecutor(seconds=0.002)
    report = offline.measure(tiny_llm(executor), Plan((40, 300), 5, (1, 3), 2), CEILINGS)
    cells = report["cells"]
    shapes = [(c["prompt"], c["concurrency"]) for c in cells]
    assert shapes == [(40, 1), (40, 3), (300, 1), (300, 3)]
    for cell in cells:
        for phase in ("prefill", "decode"):
            speed, roof = cell[f"{phase}_tokens_per_s"], cell[f"{phase}_roof_tokens_per_s"]
            assert cell[f"{phase}_share"] == pytest.approx(speed / roof)
        # Each step takes two milliseconds, and each request writes one token in a step.
        assert 1 / cell["tpot_s"] < 500
        assert cell["decode_tokens_per_s"] < 500 * cell["concurrency"]
        assert cell["ttft_s"] >= 0.002
    json.dumps(report)


def test_the_decode_roof_of_one_stream_is_bandwidth_over_bytes() -> None:
    llm = tiny_llm(FakeExecutor())
    _, decode = offline.roofs(llm, (64, 2, 1), CEILINGS)
    weights = sum(spec.nbytes for spec in trace(TINY).weights)
    assert decode == pytest.approx(1e9 / weights, rel=0.35)
    _, many = offline.roofs(llm, (64, 2, 16), CEILINGS)
    assert many > 4 * decode


def test_the_prefill_roof_counts_each_chunk() -> None:
    llm = tiny_llm(FakeExecutor())
    rates = dataclasses.replace(RATES, bf16=1e6, f32=1e6)
    slow = dataclasses.replace(CEILINGS, all=rates)
    one, _ = offline.roofs(llm, (300, 2, 1), slow)
    four, _ = offline.roofs(llm, (300, 2, 4), slow)
    assert one == pytest.approx(four, rel=0.05)


def test_a_plan_that_measures_nothing_is_refused() -> None:
    for bad in ({"output": 1}, {"repeat": 0}):
        with pytest.raises(InvalidRequest):
            Plan(**bad)  # type: ignore[arg-type]


def test_the_doctor_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "_ceilings", lambda *_: CEILINGS)
    monkeypatch.setattr(doctor, "cpu_quota", lambda: 0.5)
    report = doctor.examine("smollm2-135m")
    assert any("control group" in line for line in report.wrong)
    assert ("smollm2-135m", "not here yet: octavo pull smollm2-135m") in report.sections[-1][1]
    assert json.loads(json.dumps(report.as_dict()))["ok"] is False


def test_a_model_that_is_none_is_named_before_the_machine_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("it was measured")

    monkeypatch.setattr(doctor, "_ceilings", never)
    unknown = doctor.examine("no-such-model")
    assert len(unknown.wrong) == 1
    assert "no-such-model" in unknown.wrong[0]
    assert not unknown.sections
    assert json.loads(json.dumps(unknown.as_dict()))["ok"] is False


def test_looking_for_a_model_fetches_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert doctor.find("smollm2-135m") is None
    assert doctor.find("some/repository") is None
    assert doctor.find(str(tmp_path)) == tmp_path
    with pytest.raises(FetchError):
        doctor.find("no-such-model")
    assert not list(tmp_path.iterdir())


def test_what_the_system_says_can_be_read() -> None:
    total, free = doctor.memory()
    assert 0 < free <= total
    assert doctor.huge_pages()
    assert doctor.cpu_quota() is None or doctor.cpu_quota() > 0


@pytest.mark.parametrize("name", ["offline", "step"])
def test_what_stands_beside_a_ceiling_guesses_nothing_unless_it_is_told_to(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ceiling is of a step for every token: with guesses a figure may pass it."""
    seen: list[str] = []

    def loaded(config: EngineConfig, _: bool) -> Any:
        seen.append(config.speculation)
        raise InvalidRequest("enough")

    monkeypatch.setattr("octavo.benchmark.commands.loaded", loaded)
    monkeypatch.setattr("octavo.benchmark.instrument.loaded", loaded)
    for more in ([], ["--speculation", "auto"]):
        CliRunner().invoke(cli, ["bench", name, *more])
    assert seen == ["off", "auto"]


def test_a_bench_says_what_others_used_of_the_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    commands._neighbours({"neighbours": 0.41})
    assert "Others used 41%" in capsys.readouterr().out
    commands._neighbours({"neighbours": 0.01})
    assert not capsys.readouterr().out
