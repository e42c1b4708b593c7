"""`octavo lab`: what is counted agrees with closed forms, and the rivals compute the same."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from octavo import cli
from octavo.kernels import _cpu, isas
from octavo.lab import flash, misses
from octavo.ops.table import Heads
from tests.test_roofline import assembly  # noqa: F401

SMALL = flash.Plan(
    tokens=(64, 128),
    heads=Heads(4, 2, 32),
    threads=2,
    seconds=0.0,
    simulated=(64,),
    caches=(65536,),
    cache=65536,
)


def exact(q, k, v):
    """Causal attention in float64, of inputs rounded to bf16 as both rivals have them."""
    q, k, v = (_bf16(x).astype(np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(q.shape[2])
    scores = np.where(np.tri(len(q), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdims=True), v)


def _bf16(x):
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("naive", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_both_rivals_are_attention(isa, naive, threads):
    draw = np.random.default_rng(5)
    q, k, v = (draw.standard_normal((160, h, 64)).astype(np.float32) for h in (6, 2, 2))
    out, seconds, scratch = _cpu.time_attention(q, k, v, naive, threads, 0.0, isa)
    np.testing.assert_allclose(out, exact(q, k, v), atol=2e-2)
    assert seconds > 0
    if naive:  # scores in f32, weights in bf16, and each row's sum
        assert scratch == 160 * 160 * (4 + 2) + 160 * 4


@pytest.mark.parametrize("shapes", [((64, 3, 32), (64, 2, 32)), ((64, 2, 32), (32, 2, 32))])
def test_shapes_that_do_not_fit_are_refused(shapes):
    q, k = (np.zeros(shape, np.float32) for shape in shapes)
    with pytest.raises(ValueError, match="kv heads"):
        _cpu.time_attention(q, k, k, True)
    odd = np.zeros((33, 1, 32), np.float32)
    with pytest.raises(ValueError, match="multiples of 32"):
        _cpu.time_attention(odd, odd, odd, True)


def test_bytes_are_those_of_the_rule():
    heads, n = Heads(9, 3, 64), 1024
    once = n * 4 * 2 * 9 * 64 + n * 2 * 2 * 3 * 64  # q and out in f32, K and V in bf16
    assert flash.counted_bytes(heads, n) == once
    assert flash.compulsory_lines(n, 64) == n * 64 * 12 // 64
    assert flash.score_lines(n) == 12 * n * (n + 1) // 2 // 64


def test_what_cachegrind_wrote_is_read():
    lines = [
        "desc: I1 cache: 32768 B, 64 B, 8-way associative",
        "cmd: ./flash naive run 256 64",
        "events: Ir I1mr ILmr Dr D1mr DLmr Dw D1mw DLmw",
        "fl=file.c",
        "summary: 900 8 7 500 60 50 400 30 20",
    ]
    assert misses.parse(lines) == 70


def test_a_missing_tool_is_said_and_the_rest_goes_on(monkeypatch):
    monkeypatch.setattr(misses.shutil, "which", lambda _: None)
    values = flash.measure(SMALL)
    assert "apt-get install valgrind" in values["simulated"]["unavailable"]
    found = flash.finding(values)
    assert "valgrind is not installed" in " ".join(found.says)
    assert len(found.sheets) == 1


def test_the_finding_says_what_was_measured(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(misses, "require", lambda: None)
    monkeypatch.setattr(misses, "build", lambda folder: folder)
    each = {"naive": 6, "flash": 2}
    monkeypatch.setattr(misses, "count", lambda *about: each[about[1]] * about[2])
    found = flash.finding(flash.measure(SMALL))
    assert [row["tokens"] for row in found.values["native"]] == [64, 128]
    assert found.values["native"][0]["difference"] < 1e-2
    assert found.values["simulated"]["tokens"] == [
        {"tokens": 64, "cache": 65536, "naive": 384, "flash": 128}
    ]
    assert found.sheets[1].rows == (("64", "384", "128", "3.0x"),)
    found.draw(str(tmp_path / "flash.png"))
    assert (tmp_path / "flash.png").stat().st_size > 10_000
    json.dumps(found.values)


def test_the_command_prints_one_object(monkeypatch):
    monkeypatch.setattr(misses.shutil, "which", lambda _: None)
    shown = CliRunner().invoke(cli.cli, ["lab", "flash", "--tokens", "32,64", "--json"])
    assert shown.exit_code == 0, shown.output
    assert [row["tokens"] for row in json.loads(shown.stdout)["native"]] == [32, 64]
    wrong = CliRunner().invoke(cli.cli, ["lab", "flash", "--tokens", "100"])
    assert wrong.exit_code == 1
    assert "multiples of 32" in wrong.stderr


def test_the_driver_builds_from_the_kernels_own_sources(tmp_path):
    try:
        misses.compiler()
    except misses.Unavailable:
        pytest.skip("no compiler here")
    import subprocess

    driver = misses.build(tmp_path)
    sums = [
        subprocess.run([driver, kind, "run", "96", "32"], check=True, capture_output=True).stdout
        for kind in flash.KINDS
    ]
    assert abs(float(sums[0]) - float(sums[1])) < 0.5
    idle = subprocess.run([driver, "naive", "idle", "96", "32"], check=True, capture_output=True)
    assert float(idle.stdout) == 1
