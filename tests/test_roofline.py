"""`octavo bench kernels`, `step`, `scaling` and `octavo lab phases`: their arithmetic."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from octavo import cli, plots
from octavo.assembly import Assembly, Parts, put_together
from octavo.benchmark import kernels, picture, roofline, scaling, step
from octavo.benchmark.kernels import Case
from octavo.ceilings import hardware
from octavo.config import EngineConfig
from octavo.errors import InvalidRequest
from octavo.lab import phases
from octavo.ops.cost import cost
from octavo.ops.table import RowShape, StepShape
from tests.ops.configs import SMOLLM2
from tests.runtime import small
from tests.server.fakes import VOCAB, FakeTokenizer, fake_template
from tests.test_ceilings import BOX, program

SHAPES = [StepShape((RowShape(500, 1),) * 4), StepShape((RowShape(0, 300),))]


def as_it_was(ceilings):
    """Instead of measuring the memory again."""
    return ceilings


@pytest.fixture(scope="module")
def assembly() -> Assembly:
    """A small model with all the types of weights on two threads."""
    executor = small.executor(small.config(vocab_size=VOCAB), threads=2)
    checkpoint = small.SmallCheckpoint(executor.config)
    config = EngineConfig(model="small", threads=2, isa=executor.isa, act="int8", kv_dtype="bf16")
    made = put_together(
        Parts(config, "small", FakeTokenizer(), fake_template), executor, VOCAB, "small"
    )
    parts = {part for spec in executor.program.weights for part in spec.parts}
    types = {part: checkpoint.tensor(part).type for part in parts}
    return dataclasses.replace(made, program=executor.program.typed(types))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("act", ["mixed", "pairs", "int8", "fp32"])
def test_the_least_time_is_the_cost_model_s(shape, act):
    traced = program("Q4_1")
    asked = roofline.demands(traced, shape, BOX, act)
    whole = cost(traced, shape, hardware(BOX, traced, act))
    assert [d.least_s for d in asked] == pytest.approx([part.seconds for part in whole.ops])
    assert sum(d.bytes for d in asked) == whole.bytes


def test_a_dot_adds_up_the_layers_and_the_steps():
    traced = program("Q4_1")
    steps = [roofline.demands(traced, SHAPES[1], BOX, "pairs")] * 3
    seconds = [1e-3] * len(traced.instrs)
    found = {dot.op: dot for dot in roofline.dots(steps, seconds)}
    layers, hidden = SMOLLM2.num_layers, SMOLLM2.hidden_size
    down = found["down_residual"]
    # Pairs of bytes: two operations of the hardware for each of the model's. The last layer is
    # computed for the one wanted row alone.
    rows = (layers - 1) * 300 + 1
    assert down.operations == 3 * 2 * 2 * rows * hidden * SMOLLM2.intermediate_size
    assert down.seconds == pytest.approx(layers * 1e-3)
    assert down.bound == "int8"
    inner = SMOLLM2.intermediate_size
    many = 4 * 300 * hidden * inner / 800e9  # bound by int8; one row by memory
    one = (hidden * inner * 20 / 32 + 4 * (inner + 2 * hidden)) / 60e9
    assert down.fraction == pytest.approx(3 * ((layers - 1) * many + one) / down.seconds)
    assert found["norm_qkv"].as_dict(1.0)["share"] == pytest.approx(layers * 1e-3)


def test_naive_attention_moves_every_score_four_times():
    n, heads, dim = 300, SMOLLM2.num_heads, SMOLLM2.head_dim
    layers = SMOLLM2.num_layers - 1  # and one for the last row alone
    rows = layers * n + 1
    pairs = heads * (layers * n * (n + 1) // 2 + n)
    once = (layers + 1) * 2 * 2 * SMOLLM2.kv_size * n + 2 * 4 * heads * dim * rows
    got = roofline.naive_intensity(program("Q4_1"), SHAPES[1])
    assert got == pytest.approx(4 * dim * pairs / (once + 12 * pairs))


def test_every_case_is_measured_or_said_to_be_left_out(assembly):
    plan = kernels.Plan((1, 3), (64,), (16, 9000), seconds=0.0)
    report = kernels.measure(assembly, plan, BOX, again=as_it_was)
    assert [c["case"] for c in report["cases"]] == [
        "decode, batch 1, context 64", "decode, batch 3, context 64", "prefill, 16 tokens",
    ]  # fmt: skip
    assert "--max-batch-tokens" in report["left_out"][0]["why"]
    for case in report["cases"]:
        assert case["steps"] == kernels.LEAST_STEPS
        assert case["fraction"] == pytest.approx(case["least_s"] / case["seconds"])
        for op in case["ops"]:
            assert op["fraction"] == pytest.approx(op["least_s"] / op["seconds"])
            assert op["bytes_per_s"] * op["seconds"] == pytest.approx(op["bytes"])
    json.dumps(report)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (Case("decode", 17, 1, 10), "--max-rows"),
        (Case("prefill", 1, 257, 0), "--max-batch-tokens"),
        (Case("decode", 1, 1, 9999), "context"),
        (Case("decode", 16, 1, 2000), "--kv-memory"),
    ],
)
def test_what_does_not_fit_says_why(assembly, case, said):
    assert said in str(kernels.misfit(assembly, case))
    with pytest.raises(InvalidRequest, match="fits"):
        kernels.measure(assembly, kernels.Plan((999,), (1,), (9999,)), BOX)


def test_a_cliff_is_growth_beyond_the_model_s():
    def at(x, seconds, predicted_s):
        return {"at": x, "seconds": seconds, "predicted_s": predicted_s}

    points = [at(1, 1.0, 0.5), at(2, 1.2, 0.6), at(4, 2.7, 0.9), at(8, 4.0, 1.6)]
    assert scaling.cliffs(points) == [
        {"from": 2, "to": 4, "grew": pytest.approx(2.25), "should": pytest.approx(1.5)}
    ]


def test_scaling_is_measured_beside_the_cost_model(assembly, tmp_path):
    plan = scaling.Plan((1, 8), (64, 9999), (1, 2), mid=64, seconds=0.0)
    report = scaling.measure(assembly, plan, BOX, again=as_it_was)
    assert [p["at"] for p in report["sweeps"]["tokens"]] == [1, 8]
    assert report["left_out"] == [
        {"sweep": "context", "at": 9999, "why": "10000 tokens are beyond the context of 2048"}
    ]
    first = report["sweeps"]["batch"][0]
    machine = dataclasses.replace(hardware(BOX, assembly.program, "int8"), op_seconds=60e-9)
    whole = cost(assembly.program, StepShape((RowShape(64, 1),)), machine)
    assert first["predicted_s"] == pytest.approx(whole.seconds)
    assert first["fraction"] == pytest.approx(whole.seconds / first["seconds"])
    pytest.importorskip("matplotlib")
    scaling.draw(report, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").stat().st_size > 10_000
    json.dumps(report)


def test_phases_adds_up_whole_steps(assembly, tmp_path):
    plan = phases.Plan((8,), (1, 3, 999), context=64, seconds=0.0)
    values = phases.measure(assembly, plan, BOX, again=as_it_was)
    assert [(p["phase"], p["rows"]) for p in values["points"]] == [
        ("prefill", 8), ("decode", 1), ("decode", 3),
    ]  # fmt: skip
    shape = StepShape((RowShape(64, 1),) * 3)
    asked = roofline.demands(assembly.program, shape, BOX, "int8")
    last = values["points"][-1]
    assert last["bytes"] == sum(d.bytes for d in asked)
    assert last["least_s"] == sum(d.least_s for d in asked)
    assert last["intensity"] * last["bytes"] == pytest.approx(last["operations"])
    found = phases.finding(values)
    assert len(found.sheets[0].rows) == 3
    assert "ridge of this machine is at 13 operations a byte" in found.says[0]
    pytest.importorskip("matplotlib")
    found.draw(str(tmp_path / "phases.png"))
    assert (tmp_path / "phases.png").stat().st_size > 10_000


def a_point(phase, rows, memory_share, fraction):
    """A step of 1e9 bytes and as many operations as the share suggests, so near its roof."""
    intensity = 3.0 if memory_share > 0.5 else 40.0
    return {
        "phase": phase, "rows": rows, "bytes": 1e9, "operations": intensity * 1e9,
        "intensity": intensity, "unit": "int8", "memory_share": memory_share, "seconds": 0.1,
        "least_s": 0.1 * fraction, "fraction": fraction, "tokens_per_s": rows / 0.1,
        "roof": roofline.roof_of(memory_share), "bound": roofline.bound_by(memory_share, fraction),
    }  # fmt: skip


@pytest.mark.parametrize("isa", ["amx", "avx512", "portable"])
@pytest.mark.parametrize("memory_share", [1.0, 0.0])
@pytest.mark.parametrize("fraction", [0.06, 0.49, 0.5, 0.9, 1.1])
def test_what_is_said_of_a_phase_follows_from_what_was_measured(isa, memory_share, fraction):
    points = [a_point("prefill", 64, memory_share, fraction), a_point("decode", 1, 1.0, 0.8)]
    ceilings = dataclasses.asdict(dataclasses.replace(BOX, isa=isa))
    found = phases.finding({"model": "m", "context": 9, "ceilings": ceilings, "points": points})
    roof = "memory" if memory_share else "compute"
    row = dict(zip(phases.HEAD, found.sheets[0].rows[0], strict=True))
    assert (row["roof"], row["of roof"]) == (roof, f"{fraction:.0%}")
    assert row["bound by"] == (roof if fraction >= 0.5 else "neither")
    said = " ".join(found.says)
    prefill = said[said.index("A prefill of 64 tokens") :].partition(". ")[0]
    waits = {"memory": "waits for memory", "compute": "waits for arithmetic"}
    assert ("waits for neither" in prefill) == (fraction < 0.5)
    assert (waits[roof] in prefill) == (fraction >= 0.5)
    assert ("less than half of the roof" in said) == (fraction < 0.5)
    assert ("matrix tiles" in said) == (fraction < 0.5 and isa == "amx")
    assert ("Above 100 %" in said) == (fraction > 1.0)


def test_the_rows_that_tiles_begin_at_are_the_kernels_own():
    header = Path(roofline.__file__).parents[1] / "kernels" / "cpu" / "linear.h"
    assert f"LEAST_TILE_ROWS = {roofline.TILE_ROWS};" in header.read_text()


def test_the_parts_of_a_step_add_up_to_its_wall_time(assembly):
    report = step.measure(assembly, step.Plan(40, 6, (1, 3)), BOX, again=as_it_was)
    assert [(c["phase"], c["concurrency"]) for c in report["cases"]] == [
        ("prefill", 1), ("decode", 1), ("prefill", 3), ("decode", 3),
    ]  # fmt: skip
    for case in report["cases"]:
        assert step.total(case["parts"]) == pytest.approx(case["wall_s"])
        assert min(v for k, v in case["parts"].items() if k != "idle") >= 0
        prompt = 40 * case["concurrency"]
        # Each sequence decodes one token a step, after the first that its prefill gave.
        want = prompt if case["phase"] == "prefill" else 5 * case["concurrency"]
        assert case["tokens"] == want
    json.dumps(report)
    assert not assembly.engine.scheduler.has_work


def test_each_thread_s_time_is_accounted_for():
    executor = small.executor(threads=2)
    ids = small.tokens(1, 20)
    for _ in range(3):
        executor.submit(small.batch(small.row(0, 0, ids, [19], small.table(0))))
        executor.collect()
    spent = executor.spent()
    count = len(executor.program.instrs)
    assert spent.instructions[count:] == ("sample", "begin")
    assert spent.busy.shape == spent.wait.shape == (2, count + 2)
    assert spent.steps == 3
    assert (spent.busy >= 0).all()
    assert (spent.wait >= 0).all()
    for thread in range(2):
        assert (spent.busy + spent.wait)[thread].sum() <= spent.seconds
    by_op = dict(zip(spent.instructions, spent.barriers, strict=True))
    # One after the work of each; more where activations are prepared together first.
    assert by_op["embed"] == by_op["attend"] == by_op["sample"] == 3
    executor.reset_timing()
    assert executor.spent().steps == 0
    assert not executor.spent().busy.any()


def test_a_plot_is_drawn_or_says_what_is_missing(assembly, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    report = kernels.measure(
        assembly, kernels.Plan((1, 3), (64,), (16,), seconds=0.0), BOX, again=as_it_was
    )
    picture.roofline(report, tmp_path / "roof.png")
    assert (tmp_path / "roof.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InvalidRequest, match="nonsense"):
        picture.roofline(report, tmp_path / "roof.nonsense")
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InvalidRequest, match="pip install matplotlib"):
        picture.roofline(report, tmp_path / "other.png")


@pytest.mark.parametrize("which", ["kernels", "step", "scaling"])
def test_the_commands_print_tables_and_json(assembly, which, monkeypatch):
    monkeypatch.setattr("octavo.assembly.assemble", lambda *_, **__: assembly)
    monkeypatch.setattr("octavo.ceilings.measure_ceilings", lambda *_: BOX)
    words = {
        "kernels": ["--batch", "2", "--context", "40", "--tokens", "8", "--seconds", "0"],
        "step": ["--prompt", "20", "--output", "4", "--concurrency", "2"],
        "scaling": ["--tokens", "4", "--context", "40", "--batch", "1,2", "--seconds", "0"],
    }[which]
    shown = CliRunner().invoke(cli.cli, ["bench", which, *words])
    assert shown.exit_code == 0, shown.output
    ops = ("norm_qkv", "attend", "final_norm_head", "of roof")
    for word in ("of model", "cliff") if which == "scaling" else ops:
        assert word in shown.stdout
    listed = json.loads(CliRunner().invoke(cli.cli, ["bench", which, *words, "--json"]).stdout)
    assert {"ceilings", "model", "act", "threads"} <= set(listed)
