"""The side-by-side bench: its verdicts follow from the records, its ceilings from the peaks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.ops.cost import Hardware, cost
from octavo.ops.table import RowShape, StepShape
from octavo.ops.trace import trace
from tests.test_benchmark import TINY

BENCH = Path(__file__).parent.parent / "bench"
MODULES = ("ceilings", "client", "compare", "engines", "installs", "machine", "peers", "report",
           "workloads")  # fmt: skip


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The scripts as they see each other: siblings by bare name."""
    pytest.importorskip("aiohttp")
    monkeypatch.syspath_prepend(str(BENCH))
    import compare

    yield compare
    for name in MODULES:
        sys.modules.pop(name, None)


def record(engine: str, rate: float, repeat: int, **more: Any) -> dict[str, Any]:
    base = {"model": "m", "cell": "single", "engine": engine, "output_tok_s": rate}
    base |= {"repeat": repeat, "requests": 1, "sitting": "1-1", "others_busy": 0.0, "turn_s": 3.0}
    return base | more


def test_a_cell_passes_by_the_ratio_or_by_the_ceiling(bench: Any) -> None:
    def passes(ours: float, theirs: float, ceiling: float) -> list[str]:
        records = [record("octavo", ours, 0, ceiling_tok_s=ceiling), record("a", theirs, 0)]
        (cell,) = bench.reporting.cells_of(records)
        return list(cell.passes)

    assert passes(130, 100, 1000) == ["ratio"]
    assert passes(129, 100, 151) == ["ceiling"]
    assert passes(130, 100, 152) == ["ratio", "ceiling"]
    assert passes(129, 100, 153) == []


def test_medians_are_of_all_repeats_and_the_best_peer_is_of_any_format(bench: Any) -> None:
    records = [record("octavo", rate, i) for i, rate in enumerate((300, 100, 200))]
    records += [record("a", rate, i) for i, rate in enumerate((90, 80, 70))]
    records += [record("b", rate, i) for i, rate in enumerate((10, 85, 100))]
    (cell,) = bench.reporting.cells_of(records)
    assert (cell.best, cell.ratio) == ("b", 200 / 85)
    assert cell.values()["engines"]["octavo"]["repeats"] == [300, 100, 200]
    assert "300.0 100.0 200.0" in bench.reporting.text(cell)


def test_batch8_is_held_against_the_same_file_only(bench: Any) -> None:
    rates = {"octavo": 100, "llama.cpp Q4_0": 90, "llama.cpp filed": 20,
             "llama.cpp filed repack 0": 25}  # fmt: skip
    records = [record(engine, rate, 0, cell="batch8") for engine, rate in rates.items()]
    (cell,) = bench.reporting.cells_of(records)
    assert (cell.best, cell.ratio) == ("llama.cpp filed repack 0", 4.0)


def test_a_turn_that_others_disturbed_is_named(bench: Any) -> None:
    records = [record("octavo", 1, 0, others_during=0.01), record("a", 1, 0, others_during=0.4)]
    (cell,) = bench.reporting.cells_of(records)
    assert cell.disturbed == ["a #0 40%"]
    assert "a #0 40%" in bench.reporting.text(cell)


def test_what_is_there_is_not_measured_again_and_runs_of_other_lengths_do_not_count(
    bench: Any,
) -> None:
    records = [record("octavo", 1, 0), record("a", 1, 0), record("a", 1, 1)]
    records += [record("octavo", 1, 2, requests=9)]
    assert bench.done(records, "m", "single", 1) == {0}
    assert bench.expected(records[:2], "m", "single", 1) == 6.0
    assert bench.expected(records, "m", "chat", 64) == 0.0


FREE = {"read_bytes_per_s": 1e30, "int8_ops_per_s": 1e30, "bf16_ops_per_s": 1e30}


@pytest.mark.usefixtures("bench")
def test_one_stream_is_bound_by_the_bytes_of_a_step() -> None:
    from ceilings import Ceilings
    from workloads import Job

    program = trace(TINY)
    jobs = [Job(list(range(16)), 129)]
    rate = Ceilings(program, 512).rate("single", jobs, 1, FREE | {"read_bytes_per_s": 1e9})
    step = cost(program, StepShape((RowShape(16 + 64, 1, 1),)), Hardware("", 1, 1, 1))
    assert rate == pytest.approx(1e9 / step.bytes)


@pytest.mark.usefixtures("bench")
def test_a_prefix_that_all_share_is_read_once() -> None:
    from ceilings import Ceilings
    from workloads import Job

    ceilings = Ceilings(trace(TINY), 512)
    shared = [Job([*range(256), 300 + i], 2) for i in range(4)]
    apart = [Job([300 + i, *range(256)], 2) for i in range(4)]
    peaks = FREE | {"int8_ops_per_s": 1e9}
    few, many = (ceilings.rate("chat", jobs, 4, peaks) for jobs in (shared, apart))
    assert few > 3 * many


@pytest.mark.usefixtures("bench")
def test_a_prompt_longer_than_a_step_is_read_in_several() -> None:
    from ceilings import Ceilings

    ceilings = Ceilings(trace(TINY), 512)
    peaks = FREE | {"read_bytes_per_s": 1e9}
    whole = ceilings.prefill([(0, 513)], peaks)
    steps = ([RowShape(0, 512, 0)], [RowShape(512, 1, 1)])
    assert whole == pytest.approx(sum(ceilings.seconds(rows, peaks) for rows in steps))
