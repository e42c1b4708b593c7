"""The simulator's commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from octavo import cli

SAMPLE = str(Path(__file__).parents[2] / "bench/data/azure_conv_sample.csv.gz")


def call(*words: str) -> Result:
    return CliRunner().invoke(cli.cli, list(words))


@pytest.mark.parametrize("name", ["simulate", "roofline"])
def test_help_teaches(name: str) -> None:
    shown = call(name, "--help")
    assert shown.exit_code == 0
    assert f"octavo {name}" in shown.stdout.split("Examples:")[1]
    assert name in call("--help").stdout


def test_roofline_in_words_and_numbers(tmp_path: Path) -> None:
    picture = tmp_path / "roof.png"
    words = ("roofline", "llama-3.2-1b", "-H", "h100,l4", "--price", "l4=0.5")
    shown = call(*words, "--plot", str(picture), "--sources")
    assert shown.exit_code == 0, shown.output
    assert "AIConfigurator" in shown.stdout
    assert picture.read_bytes()[:4] == b"\x89PNG"
    made = json.loads(call(*words, "--json").stdout)["analyses"]
    assert made[1]["figures"]["price"] == {"value": 0.5, "source": "given by the caller"}
    assert made[0]["kv_bytes_per_token"] == 2 * 16 * 8 * 64 * 2
    assert "llama-3.1-8b" in call("roofline").stdout


def test_simulate_compares_and_reports(tmp_path: Path) -> None:
    words = ("simulate", SAMPLE, "--head", "60", "-m", "llama-3.2-1b", "--slo-ttft", "500")
    one = call(*words)
    assert one.exit_code == 0, one.output
    assert "attainment" in one.stdout
    both = call(*words, "--policy", "fcfs,priority", "--rate", "5,20", "--plot",
                str(tmp_path / "x.png"))  # fmt: skip
    assert both.stdout.count("priority") == 2
    made = json.loads(call(*words, "--json", "--replicas", "2").stdout)
    assert made[0]["sent"] == 60
    assert made[0]["attainment"] == 1.0


def test_mistakes_are_one_line() -> None:
    for words, told in (
        (("simulate", "nowhere.csv"), "nowhere.csv"),
        (("simulate", SAMPLE, "--policy", "best"), "no policy is called"),
        (("simulate", SAMPLE, "-H", "h10"), "h100"),
        (("roofline", "llama-9"), "no model whose shape"),
        (("simulate", SAMPLE, "-m", "llama-3.1-70b", "-H", "l4"), "leave no KV"),
    ):
        shown = call(*words)
        assert shown.exit_code == 1
        assert told in shown.output
        assert "Traceback" not in shown.output
