"""The compiled roofline against the cost model itself, shapes against published sizes."""

from __future__ import annotations

import json
import math
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.batch import Batch, Row, SampleSpec, Want
from octavo.core.request import SamplingParams
from octavo.errors import InvalidRequest
from octavo.models.config import ModelConfig
from octavo.models.decoder import weight_specs
from octavo.ops.cost import cost
from octavo.ops.table import RowShape, StepShape
from octavo.sim import cli
from octavo.sim.executor import Roofline
from octavo.sim.hardware import DEVICES, device, measured
from octavo.sim.roofline import analyse, as_dict, machine_table, place, shard, stored_as

SHAPES = json.loads((Path(cli.__file__).with_name("shapes.json")).read_text())
ROW = st.tuples(st.integers(0, 3000), st.integers(1, 700), st.integers(0, 1))


def config(name: str) -> ModelConfig:
    return cli.model_config(name)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_as_many_parameters_as_their_authors_published(name: str) -> None:
    assert sum(spec.size for spec in weight_specs(config(name))) == SHAPES[name]["parameters"]
    assert SHAPES[name]["source"].startswith("huggingface.co/")


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma-3-270m", "qwen3-0.6b"])
@settings(derandomize=True, max_examples=20, deadline=None)
@given(rows=st.lists(ROW, min_size=1, max_size=6))
def test_the_compiled_roofline_is_the_cost_of_the_program(
    name: str, rows: list[tuple[int, int, int]]
) -> None:
    placed = place(config(name), device("h100"))
    truth = cost(
        placed.program, StepShape(tuple(RowShape(*row) for row in rows)), placed.hardware
    ).seconds
    assert Roofline(placed.program, placed.hardware).seconds(rows) == pytest.approx(truth, rel=1e-9)


def test_a_batch_costs_what_its_rows_cost() -> None:
    placed = place(config("smollm2-135m"), device("zen4"))
    batch = Batch(1, (Row(0, 7, array("i", [1, 2, 3]), array("i", [0]), ()),))
    assert placed.durations()(batch) == placed.durations().seconds([(7, 3, 0)])


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-3-270m"])
def test_decodes_take_what_their_batch_takes_to_the_last_bit(name: str) -> None:
    """Also where windows end before the contexts do."""
    durations = place(config(name), device("l4")).durations()
    ends = [3, 511, 512, 513, 700, 2048]
    want = Want(0, SampleSpec(SamplingParams(), 0, 0))
    rows = (Row(i, e - 1, array("i", [1]), array("i", [0]), (want,)) for i, e in enumerate(ends))
    steps: Any = SimpleNamespace(ends=ends)
    assert durations.decoding(steps) == durations(Batch(1, tuple(rows)))


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [("llama-3.1-8b", 131072), ("llama-2-7b", 524288), ("llama-3.1-70b", 327680),
     ("qwen2.5-7b", 57344), ("smollm2-135m", 23040)],
)  # fmt: skip
def test_kv_bytes_of_a_token_are_the_known_ones(name: str, nbytes: int) -> None:
    """2 x layers x KV heads x head size x 2 bytes, as the models' cards and papers state them."""
    assert place(config(name), device("h100")).kv_bytes_per_token == nbytes


def test_tensor_parallelism_splits_what_it_can_and_says_what_it_cannot() -> None:
    whole = config("llama-3.1-70b")
    one, eight = (place(whole, device("h100"), tp=n) for n in (1, 8))
    assert eight.weight_bytes == pytest.approx(one.weight_bytes / 8, rel=2e-3)
    assert eight.kv_bytes_per_token == one.kv_bytes_per_token // 8
    assert one.kv_tokens == 0
    assert eight.kv_tokens > 500_000
    assert shard(whole, 16).num_kv_heads == 1  # replicated
    with pytest.raises(InvalidRequest, match="does not split by 3"):
        shard(whole, 3)


def test_decode_reads_the_weights_once_however_many_sequences() -> None:
    """A step of one is the bytes of weights and cache at the bandwidth, and overheads."""
    placed = place(config("llama-3.1-8b"), device("h100"))
    one = analyse(placed, 1024).decodes[0]
    hardware = placed.hardware
    embedding = 128256 * 4096 * 2  # gathered by row, not read
    least = (placed.weight_bytes - embedding + 1024 * 131072) / hardware.bytes_per_s
    overhead = hardware.step_seconds + len(placed.program.instrs) * hardware.op_seconds
    assert one.seconds == pytest.approx(least + overhead, rel=0.01)
    assert one.bound == "memory"


def test_the_wall_is_where_products_take_as_long_as_weights() -> None:
    """For bf16 a batch of B does 2 B operations for each 2 bytes: the wall is near the ridge."""
    placed = place(config("llama-3.1-8b"), device("a100"))
    ridge = placed.hardware.flops_per_s / placed.hardware.bytes_per_s
    wall = analyse(placed, 1024).wall
    assert wall is not None
    assert ridge <= wall <= 1.2 * ridge  # activations move too


def test_smaller_weights_move_the_wall_and_the_memory() -> None:
    shape = config("llama-3.1-8b")
    bf16, q4 = (place(shape, device("l4"), weights=w) for w in ("bf16", "q4_0"))
    assert q4.weight_bytes == pytest.approx(bf16.weight_bytes * 18 / 64, rel=1e-3)
    assert q4.kv_tokens > bf16.kv_tokens
    with pytest.raises(InvalidRequest, match="known are"):
        stored_as(bf16.program, "q3_x")


def test_every_figure_has_a_source_and_names_are_forgiving() -> None:
    for one in DEVICES.values():
        for name in ("bf16", "fp8", "bandwidth", "memory", "link", "price"):
            figure = getattr(one, name)
            assert figure is None or (figure.value > 0 and len(figure.source) > 5), (one, name)
    assert device("4090") is device("RTX_4090")
    with pytest.raises(InvalidRequest, match="h100"):
        device("h10")
    here = measured(1e12, 4e10, 8e9)
    assert here.ridge == 25
    assert here.priced(0.1).price is not None


def test_a_model_of_somebodys_own(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPES["qwen3-0.6b"]["config"]))
    assert config(str(path)) == config(str(tmp_path)) == config("qwen3-0.6b")
    with pytest.raises(InvalidRequest, match=r"llama-3\.1-8b"):
        config("lama-3.1-8b")


def test_a_step_without_outputs_reads_no_head() -> None:
    durations = place(config("smollm2-135m"), device("h100")).durations()
    assert durations.seconds([(0, 8, 0)]) < durations.seconds([(0, 8, 1)])
    assert math.isfinite(durations.seconds([(0, 1, 1)]))


@pytest.mark.parametrize("name", ["llama-3.1-70b", "llama-3.1-8b"])
@pytest.mark.parametrize("card", ["l4", "h100"])
def test_a_model_that_does_not_fit_is_given_no_speed(name: str, card: str) -> None:
    one = analyse(place(config(name), device(card)), 4096)
    (row,) = machine_table([one])[1]
    said = as_dict(one)
    fits = name == "llama-3.1-8b"
    assert one.fits is fits is bool(one.decodes)
    assert (said["prefill_tokens_per_s"] is not None, said["most_sequences"] > 0) == (fits, fits)
    assert row[-2:] != ["-", "does not fit"] if fits else row[-2:] == ["-", "does not fit"]
