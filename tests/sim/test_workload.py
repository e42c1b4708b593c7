"""Traces read as their publishers mean them, and draws with the moments that were asked for."""

from __future__ import annotations

import gzip
import json
import re
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from octavo.benchmark.commands import LOAD, USUAL
from octavo.core.blocks import block_hashes
from octavo.errors import BadFile, InvalidRequest
from octavo.sim import recording, workload
from octavo.sim.cli import simulate
from octavo.sim.workload import Item, Sizes, Workload, named, read, servegen, synthetic

SAMPLE = Path(__file__).parents[2] / "bench/data/azure_conv_sample.csv.gz"


def test_the_committed_sample_is_what_its_readme_says() -> None:
    load = read(SAMPLE)
    assert len(load) == 2000
    assert load.items[0].at == 0.0
    assert not load.shares_prefixes
    assert load.rate == pytest.approx(2000 / load.seconds)


def test_azures_clock_and_its_zeros(tmp_path: Path) -> None:
    """Seven fractional digits; a request that was answered with nothing still had one step."""
    path = tmp_path / "a.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,0\n"
    )
    first, second = read(path).items
    assert (first.at, first.prompt, first.output) == (0.0, 374, 44)
    assert second.at == pytest.approx(4.314579, abs=1e-6)
    assert second.output == 1


def mooncake(path: Path, rows: list[tuple[int, int, int, list[int]]]) -> Workload:
    lines = [
        json.dumps({"timestamp": t, "input_length": p, "output_length": o, "hash_ids": ids})
        for t, p, o, ids in rows
    ]
    path.write_text("\n".join(lines))
    return read(path)


def test_equal_identities_are_equal_prefixes_and_nothing_else_is(tmp_path: Path) -> None:
    rows = [(0, 1100, 5, [3, 4, 5]), (500, 1400, 5, [3, 4, 6]), (900, 700, 9, [7, 4])]
    load = mooncake(tmp_path / "m.jsonl", rows)
    assert [item.at for item in load.items] == [0.0, 0.5, 0.9]
    first, second, third = (request for _, request in load.requests())
    assert first.prompt[:1024] == second.prompt[:1024]
    assert first.prompt[1024] != second.prompt[1024]
    hashes = [block_hashes(r.namespace, r.prompt, 32) for r in (first, second, third)]
    assert hashes[0][:32] == hashes[1][:32]
    assert not {*hashes[2]} & {*hashes[0]}  # block 4 hangs from another parent


def test_a_prompt_without_identity_is_nobodys_prefix() -> None:
    load = Workload("w", (Item("a", 0.0, 64, 1), Item("b", 1.0, 64, 1)))
    (_, a), (_, b) = load.requests()
    assert not {*block_hashes(a.namespace, a.prompt, 32)} & {
        *block_hashes(b.namespace, b.prompt, 32)
    }


def test_a_coarse_clock_is_spread_over_its_tick(tmp_path: Path) -> None:
    rows = [(3000 * (i // 10), 600, 5, [i, 1000 + i]) for i in range(200)]
    load = mooncake(tmp_path / "m.jsonl", rows)
    assert len({item.at for item in load.items}) == 200
    assert max(b.at - a.at for a, b in pairwise(load.items)) < 3.0


def test_gamma_gaps_have_the_rate_and_the_variation_that_were_asked_for() -> None:
    for cv in (0.0, 0.5, 1.0, 3.0):
        load = synthetic(20.0, 2000.0, Sizes(100), Sizes(10), cv=cv, seed=1)
        gaps = [b.at - a.at for a, b in pairwise(load.items)]
        assert load.rate == pytest.approx(20.0, rel=0.1)
        assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, abs=0.15)


def test_sizes_keep_their_mean_and_their_cap() -> None:
    load = synthetic(50.0, 400.0, Sizes(1000, 0.8), Sizes(50, 0.0), seed=2)
    assert statistics.mean(i.prompt for i in load.items) == pytest.approx(1000, rel=0.05)
    assert {i.output for i in load.items} == {50}
    assert max(i.prompt for i in synthetic(9, 99, Sizes(1000, 2.0, 1500), Sizes(1)).items) <= 1500


def test_scaling_stretches_time_and_length_and_says_so() -> None:
    load = read(SAMPLE)
    fast = load.at_rate(10.0)
    assert fast.rate == pytest.approx(10.0)
    assert [i.prompt for i in fast.items] == [i.prompt for i in load.items]
    short = load.lengths(0.125)
    assert short.block_tokens == 64
    assert short.items[0].prompt == max(1, round(load.items[0].prompt / 8))
    assert load.window(10.0, 20.0).seconds < 10.0
    assert len(load.head(5).fitting(1).items) == 0
    assert "rate" in fast.changes[0]
    with pytest.raises(InvalidRequest, match="positive"):
        load.faster(0.0)


def test_resampling_keeps_size_and_rate_and_depends_on_the_seed() -> None:
    load = read(SAMPLE)
    one, same, two = load.resampled(1), load.resampled(1), load.resampled(2)
    assert one.items == same.items != two.items
    assert len(one) == len(load)
    assert one.rate == pytest.approx(load.rate, rel=0.25)


def test_a_pool_of_clients_becomes_tenants(tmp_path: Path) -> None:
    grid = list(range(101))
    lengths = {"0": {n: {"mean": 50, "q101": grid} for n in ("input_tokens", "output_tokens")}}
    windows = [[start, 2.0, 1.0, "Gamma", 1.0, 0.5] for start in range(0, 3000, 600)]
    slow = [[start, 0.5, 1.4, "Weibull", 0.7, 1.0] for start in range(0, 3000, 600)]
    pool = {"clients": [
        {"client": 1, "rate_windows": windows, "length_windows": lengths},
        {"client": 2, "rate_windows": slow, "length_windows": lengths},
    ]}  # fmt: skip
    path = tmp_path / "pool.json.gz"
    path.write_bytes(gzip.compress(json.dumps(pool).encode()))
    load = servegen(path, 300.0, 2400.0, seed=3)
    count = {t: sum(i.tenant == t for i in load.items) for t in ("client-1", "client-2")}
    assert count["client-1"] == pytest.approx(4800, rel=0.1)
    assert count["client-2"] == pytest.approx(1200, rel=0.2)
    assert all(1 <= i.prompt <= 100 for i in load.items)
    assert load == servegen(path, 300.0, 2400.0, seed=3)


def test_what_is_no_trace_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(BadFile, match="no trace that we know"):
        read(path)
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n1.0,5,x\n")
    with pytest.raises(BadFile, match="line 2"):
        read(path)
    path.write_text('{"timestamp": 1}\n')
    with pytest.raises(BadFile, match="line 1"):
        read(path)
    for name in ("request_id", "tenant"):  # half a pair of surrogates is no text
        row = f'{{"{name}": "\\ud800", "arrival_s": 0, "prompt_tokens": 5, "output_tokens": 1}}\n'
        path.write_text(row)
        with pytest.raises(BadFile, match="line 1"):
            read(path)
    with pytest.raises(BadFile):
        read(tmp_path / "absent.csv")
    with pytest.raises(InvalidRequest, match="none of"):
        named("poisson:speed=3")


def test_named_workloads() -> None:
    load = named("gamma:rate=5,cv=2,seconds=60,prompt=100,output=10,spread=0", seed=4)
    assert {i.prompt for i in load.items} == {100}
    assert named(str(SAMPLE)) == read(SAMPLE)
    with pytest.raises(InvalidRequest, match="gamma:"):
        named("poisson:cv=2")


@pytest.mark.parametrize("name", ["rate", "seconds", "prompt", "output", "spread"])
def test_what_a_drawn_load_leaves_out_is_as_the_help_shows_it(name: str) -> None:
    """The default of `bench serve --load`, the words of `octavo simulate --help`."""
    shown = re.search(r"poisson:rate=\S+\d", str(simulate.help))
    assert shown is not None
    cases: tuple[tuple[str, dict[str, float]], ...] = ((LOAD, USUAL), (shown[0], {}))
    for whole, usual in cases:
        kept = [word for word in whole.partition(":")[2].split(",") if not word.startswith(name)]
        assert len(kept) == 4
        load = named("poisson:" + ",".join(kept), seed=3, usual=usual)
        assert load.items == named(whole, seed=3).items


def test_a_packed_line_without_end_is_read_as_far_as_a_line_may_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload, "MOST_LINE", 1000)
    path = tmp_path / "bomb.jsonl.gz"
    row = '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": []}\n'
    for text in ("x" * 10**7, row + "x" * 10**7):
        path.write_bytes(gzip.compress(text.encode()))
        with pytest.raises(BadFile, match=r"bomb.jsonl.gz: a line has more than 1000 characters"):
            workload.read(path)
    assert not recording.is_recording(path)
    path.write_bytes(gzip.compress(b"x" * 10**7))
    with pytest.raises(BadFile, match="more than 1000"):
        recording.open_recording(path)
    path.write_bytes(gzip.compress((row * 100).encode()))
    assert len(workload.read(path)) == 100
