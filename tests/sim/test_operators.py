"""Measured operators: interpolation on grids of their own, and the sum of a step."""

from __future__ import annotations

from array import array
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo.core.batch import Batch, Row, SampleSpec, Want
from octavo.core.request import SamplingParams
from octavo.errors import BadFile
from octavo.sim.operators import ONCE, PER_LAYER, Curve, Grid, Skew, read_operators


def test_a_curve_is_linear_between_and_beyond() -> None:
    curve = Curve({1: 1.0, 4: 4.0, 8: 6.0})
    assert [curve(x) for x in (0, 1, 2.5, 6, 8, 12)] == [1.0, 1.0, 2.5, 5.0, 6.0, 8.0]


def test_a_grid_is_exact_for_a_multilinear_function_on_ragged_slices() -> None:
    def truth(a: float, b: float) -> float:
        return 3 + 2 * a + 5 * b + 0.25 * a * b

    points = {(a, b): truth(a, b) for a, bs in ((16, (0, 8, 64)), (32, (0, 4, 16, 64)))
              for b in bs}  # fmt: skip
    grid = Grid(points)
    for a, b in ((16, 8), (20, 30), (32, 64), (27, 64), (48, 128)):
        assert grid(a, b) == pytest.approx(truth(a, b))


def test_zero_is_another_kernel_and_not_a_small_size() -> None:
    grid = Grid({(0,): 9.0, (16,): 1.0, (32,): 2.0})
    assert grid(0) == 9.0
    assert grid(3) == 1.0
    assert grid(24) == 1.5


def profile(folder: Path) -> Path:
    dense = ["layer,tokens,time_us"]
    dense += [f"{name},{t},{t}" for name in (*PER_LAYER, *ONCE) for t in (1, 100)]
    (folder / "p.dense.csv").write_text("\n".join(dense))
    (folder / "p.per_sequence.csv").write_text("layer,sequences,time_us\nlm_head,1,10\n")
    rows = ["prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"]
    for chunk in (0, 16, 32):
        for history in (0, 16, 64) if chunk else (0,):
            for decodes in (0, 1, 8):
                for context in (16, 64) if decodes else (0,):
                    rows.append(f"{chunk},{history},{decodes},{context},"
                                f"{chunk + history + decodes * context}")  # fmt: skip
    (folder / "p.attention.csv").write_text("\n".join(rows))
    return folder / "p"


def test_a_step_is_the_sum_of_its_operators(tmp_path: Path) -> None:
    table = read_operators(profile(tmp_path), layers=2)
    want = (Want(0, SampleSpec(SamplingParams(), 0, 0)),)
    rows = (
        Row(0, 31, array("i", [1]), array("i"), want),
        Row(1, 15, array("i", [1]), array("i"), want),
        Row(2, 16, array("i", [1] * 20), array("i"), ()),
    )
    products = 2 * (sum(PER_LAYER.values()) * 22) + len(ONCE) * 22
    attention = 2 * (20 + 16 + 2 * 24)  # two decodes at a mean context of 24
    assert table(Batch(1, rows)) == pytest.approx((products + attention + 10) * 1e-6)


def test_decodes_take_what_their_batch_takes_to_the_last_bit(tmp_path: Path) -> None:
    ends = [17, 40, 41, 300]
    want = (Want(0, SampleSpec(SamplingParams(), 0, 0)),)
    rows = (Row(i, e - 1, array("i", [1]), array("i"), want) for i, e in enumerate(ends))
    batch, steps = Batch(1, tuple(rows)), SimpleNamespace(ends=ends)
    for skew in (None, Skew({(0.0, inf, inf, inf, 0.0): 0.3})):
        table = read_operators(profile(tmp_path), 2, skew)
        assert table.decoding(steps) == table(batch)  # type: ignore[arg-type]


def test_contexts_that_differ_cost_what_was_measured_of_it(tmp_path: Path) -> None:
    prefix = profile(tmp_path)
    ends = [16, 16, 16, 40]
    want = (Want(0, SampleSpec(SamplingParams(), 0, 0)),)
    rows = tuple(Row(i, e - 1, array("i", [1]), array("i"), want) for i, e in enumerate(ends))
    plain = read_operators(prefix, 2)(Batch(1, rows))
    # The decodes' attention takes decodes x context microseconds in each of two layers.
    gap = 2 * 4 * (40 - sum(ends) / 4) * 1e-6
    (tmp_path / "p.skew_fit.csv").write_text(
        "pc,n_label,skew_rate_label,kv_big_label,kp_label,alpha,n_samples\n"
        "0,n<=4,sr<=40%,kvB<=1k,kp=0,0.25,9\n0,n<=4,sr>40%,kvB<=1k,kp=0,0.75,9\n"
        "0,n<=8,sr<=40%,kvB<=1k,kp=0,-0.5,9\n64,n<=4,sr<=40%,kvB<=1k,kp<=2k,0.9,9\n"
    )
    assert read_operators(prefix, 2)(Batch(1, rows)) == pytest.approx(plain + 0.25 * gap)


def test_skew_is_looked_up_by_bucket_and_by_decodes_for_each_multiprocessor() -> None:
    alphas = {
        (0.0, 4.0, 0.4, 1024.0, 0.0): 0.1, (0.0, 8.0, 0.4, 1024.0, 0.0): 0.2,
        (0.0, 4.0, inf, 1024.0, 0.0): 0.3, (32.0, 4.0, 0.4, 1024.0, 512.0): 0.4,
    }  # fmt: skip
    skew, wider = Skew(alphas), Skew(alphas, 1.5)
    few, many = [16, 16, 16, 40], [16] * 5 + [40]
    assert skew(0, 0, few, 22.0) == 0.1
    assert skew(0, 0, many, 20.0) == 0.2
    assert wider(0, 0, many, 20.0) == 0.1
    assert skew(0, 0, [16, 40, 40, 40], 34.0) == 0.3
    assert skew(20, 512, few, 22.0) == 0.4
    assert skew(20, 512, many, 20.0) == 0.0  # not measured
    assert skew(0, 0, [16] * 4, 16.0) == 0.0


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    prefix = profile(tmp_path)
    (tmp_path / "p.dense.csv").write_text("layer,tokens,time_us\nqkv_proj,1,2\n")
    with pytest.raises(BadFile, match="down_proj"):
        read_operators(prefix, 2)
    with pytest.raises(BadFile, match="absent"):
        read_operators(tmp_path / "absent", 2)
