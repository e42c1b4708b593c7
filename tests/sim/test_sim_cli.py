"""The simulator's commands."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from octavo import cli
from octavo.core.policy import fcfs
from octavo.models import hub
from octavo.server.metrics import ENGINE
from octavo.sim.cli import model_config
from tests.sim.test_recording import disturbed, recorded

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


def test_every_simulated_request_can_be_written_down(tmp_path: Path) -> None:
    words = ("simulate", SAMPLE, "--head", "40", "-m", "llama-3.2-1b", "--slo-ttft", "500")
    rows = tmp_path / "rows.jsonl"
    made = json.loads(call(*words, "--requests-out", str(rows), "--json").stdout)[0]
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert len(found) == made["sent"] == 40
    assert sum(row["met"] for row in found) == made["good"]
    assert max(row["ttft_s"] for row in found) == made["ttft_s"]["most"]
    assert sum(row["output_tokens"] for row in found) == round(
        made["output_tokens_per_s"] * made["seconds"]
    )
    again = json.loads(call("simulate", str(rows), *words[4:], "--json").stdout)[0]
    assert again["ttft_s"] == made["ttft_s"]  # a log of one run is a trace again
    assert call(*words, "--requests-out", str(tmp_path / "no" / "x")).exit_code == 2


TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
HEAD = (
    '{"kind":"head","version":1,"policy":"fcfs","max_waiting":9,"prefix_caching":true,'
    '"capacity":{"rows":1},"prior":{},"drafter":"","learned":[]}\n'
)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.csv", "", "no trace that we know"),
        ("a.csv", TRACE, "no request in it"),
        ("a.csv", TRACE + "0,1\n", "line 2"),
        ("a.csv", TRACE + "nan,2,3\n", "line 2: no request can arrive at nan"),
        ("a.csv", TRACE + "inf,2,3\n", "line 2: no request can arrive at inf"),
        ("a.csv", TRACE + "0,-5,3\n", "line 2: -5 is no number of tokens"),
        ("a.csv", TRACE + "0," + "1" * 200_000 + ",3\n", "field larger"),
        (
            "a.csv.gz",
            gzip.compress(TRACE.encode() * 99, mtime=0)[:40],
            "a.csv.gz: Compressed file ended",
        ),
        ("a.csv.gz", b"garbage", "a.csv.gz"),
        ("a.csv", bytes(range(128, 255)), "a.csv"),
        ("a.jsonl", '{"timestamp":1,"input_length":1}\n', "line 1: no output_length"),
        ("a.jsonl", '{"timestamp":1,"input_length":1e999,"output_length":1}\n', "line 1"),
        ("a.jsonl", '{"a":1}\n[1]\n', "line 1: no arrival"),
        ("a.jsonl", '{"timestamp":1,"input_length":1,"output_length":1}\n[1]', "line 2: not an"),
        ("a.jsonl", '{"a":' + "[" * 100_000 + "\n", "line 1"),
        (
            "a.jsonl",
            '{"timestamp":1,"input_length":1,"output_length":1,"request_id":"x"}\n' * 2,
            "two requests are called 'x'",
        ),
        ("a.jsonl", '{"kind":"head","version":1}\n', "line 1: no capacity"),
        ("a.jsonl", '{"kind":"head","version":7}\n', "not a recording of version 1"),
        ("a.jsonl", HEAD, "holds what none can"),
        ("a.jsonl", HEAD + '{"kind":"add"}\n', "line 2: no arrival_s"),
    ],
)
def test_a_trace_that_is_none_is_named(tmp_path: Path, name, content, told) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for words in (("simulate",), ("plan", "-H", "h100", "--slo-ttft", "500")):
        shown = call(words[0], str(path), *words[1:], "-m", "llama-3.2-1b")
        assert shown.exit_code == 1, shown.exception
        assert told in shown.output
    if name == "a.jsonl":
        for words in ((str(path), "--check"), (SAMPLE, "--steps", str(path))):
            assert call("simulate", *words).exit_code == 1


@pytest.mark.parametrize(
    ("pool", "told"),
    [
        ("[]", "not a ServeGen pool"),
        ('{"clients":5}', "not a ServeGen pool"),
        ('{"clients":[{}]}', "no client"),
        (
            '{"clients":[{"client":1,"rate_windows":[[0,1,2,"Gamma",1,1]],"length_windows":{}}]}',
            "not a ServeGen pool",
        ),
    ],
)
def test_a_pool_of_clients_that_is_none_is_named(tmp_path: Path, pool, told) -> None:
    path = tmp_path / "pool.json"
    path.write_text(pool)
    shown = call("simulate", f"servegen:{path}")
    assert shown.exit_code == 1, shown.exception
    assert told in shown.output


@pytest.mark.parametrize(
    "words",
    [
        "rate=nan", "rate=0", "rate=1,seconds=0.001", "seconds=inf", "prompt=0", "prompt=nan",
        "output=1e999", "output=-5,spread=0", "spread=-1", "spread=nan", "seed=nan", "seed=1.5",
        "cv=1e300", "cv=-1", "cv=nan", "speed=1", "rate",
    ],
)  # fmt: skip
def test_a_drawn_trace_that_none_can_draw_is_one_line(words: str) -> None:
    shown = call("simulate", f"gamma:{words}")
    assert shown.exit_code == 1, shown.exception
    assert "Error" in shown.output


COUNTS = ("", "0", "-1", "0.5", "nan", "1e999", "garbage")


@pytest.mark.parametrize(
    ("command", "flag", "values"),
    [
        *(("simulate", flag, COUNTS) for flag in (
            "--tp", "--replicas", "--max-rows", "--max-batch-tokens", "--kv-tokens", "--head",
        )),
        *(("plan", flag, COUNTS) for flag in (
            "--tp", "--max-rows", "--max-batch-tokens", "--head", "--seeds",
        )),
        *(("roofline", flag, COUNTS) for flag in ("--tp", "--context", "--kv-bytes")),
        *((command, "--lengths", ("0", "-1", "nan", "inf")) for command in ("simulate", "plan")),
        *((command, "--rate", ("0", "-1", "nan", "inf")) for command in ("simulate", "plan")),
        *((command, "--weights", ("", "q9")) for command in ("simulate", "roofline")),
        *((command, "--hardware", ("", ",")) for command in ("simulate", "plan", "roofline")),
        *((command, "--policy", ("", "slo+", "best")) for command in ("simulate",)),
        ("simulate", "--noise", ("-1", "nan", "inf", "2")),
        ("simulate", "--slo-ttft", ("-1", "nan", "inf", "0")),
        ("simulate", "--window", ("5:1", "nan:nan", "1", "1:2:3")),
        ("simulate", "--operators", ("", "nowhere")),
        ("plan", "--target", ("0", "-1", "nan", "2")),
        ("roofline", "--price", ("h100", "h100=", "h100=nan", "h100=-1", "h100=inf", "l4=2", "=2")),
    ],
)  # fmt: skip
def test_a_value_that_is_none_is_refused(command: str, flag: str, values: tuple[str, ...]) -> None:
    what = ["llama-3.2-1b"] if command == "roofline" else [SAMPLE, "-m", "llama-3.2-1b"]
    objective = ["--slo-ttft", "500"] if command == "plan" else []
    for value in values:
        shown = call(command, *what, "-H", "h100", *objective, flag, value)
        assert isinstance(shown.exception, SystemExit), (value, shown.exception, shown.output)
        assert shown.exit_code in (1, 2)
        assert "Error" in shown.output


@pytest.mark.parametrize("content", ["", "[]", "5", "null", "{", "{}", '{"model_type":5}'])
def test_a_model_that_is_none_is_named(tmp_path: Path, content: str) -> None:
    for name in ("config.json", "model.gguf"):
        (tmp_path / name).write_text(content)
        shown = call("roofline", str(tmp_path / name))
        assert shown.exit_code == 1, shown.exception
        assert name in shown.output


def test_mistakes_are_one_line() -> None:
    for words, told in (
        (("simulate", "poisson:prompt=1e6,spread=0,seconds=9"), "no request to serve"),
        (("simulate", "nowhere.csv"), "nowhere.csv"),
        (("simulate", SAMPLE, "--policy", "best"), "no policy is called"),
        (("simulate", "foo:rate=1"), "poisson:, gamma:, servegen:"),
        (("simulate", SAMPLE, "-H", "h10"), "h100"),
        (("roofline", "llama-9"), "no model is called 'llama-9'; did you mean llama-"),
        (("roofline", "smolm2-135"), "did you mean smollm2-135m or"),
        (("roofline", "qwen2.5-codr-0.5b"), "did you mean qwen2.5-coder-0.5b or"),
        (("simulate", SAMPLE, "-m", "qwen3-8"), "did you mean qwen3-8b or"),
        (("plan", SAMPLE, "-m", "mistral7b", "--slo-ttft", "9"), "did you mean mistral-7b"),
        (("roofline", "nonsuch"), "Known: llama-2-7b"),
        (("simulate", SAMPLE, "-m", "llama-3.1-70b", "-H", "l4"), "leave no KV"),
    ):
        shown = call(*words)
        assert shown.exit_code == (2 if any(word.startswith("-") for word in words[2:-1]) else 1)
        assert told in shown.output
        assert "Traceback" not in shown.output


def test_a_model_that_is_served_has_a_roofline_once_it_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shown = call("roofline", "qwen2.5-coder-0.5b")
    assert shown.exit_code == 1
    assert "octavo pull qwen2.5-coder-0.5b" in shown.output


@pytest.mark.models
def test_a_model_that_was_pulled_has_the_shape_of_its_file() -> None:
    hub.resolve("qwen2.5-coder-0.5b")
    found, like = model_config("qwen2.5-coder-0.5b"), model_config("qwen2.5-0.5b")
    for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "vocab_size"):
        assert getattr(found, name) == getattr(like, name)


def test_what_is_simulated_is_said(tmp_path: Path) -> None:
    """A figure names its model and its machine; a recording's own are not taken unasked."""
    path = str(tmp_path / "run.jsonl")
    recorded(Path(path), fcfs())
    plain = ("simulate", SAMPLE, "--head", "20", "-m", "llama-3.2-1b")
    assert "llama-3.2-1b on 2 x h100, bf16 weights" in call(*plain, "--replicas", "2").stdout
    other = call("simulate", path, "-m", "llama-3.2-1b", "-H", "l4").stdout
    assert f"{path} was recorded on tiny" in " ".join(other.split())
    assert f"--steps {path}" in other
    own = call("simulate", path, "--steps", path).stdout
    assert f"the server of {path} (tiny)" in own
    assert "h100" not in own
    (made,) = json.loads(call("simulate", path, "--steps", path, "--json").stdout)
    assert made["simulated"]["model"] == made["simulated"]["recorded_model"] == "tiny"
    (made,) = json.loads(call(*plain, "--json").stdout)
    assert made["simulated"]["hardware"] == "h100"
    assert made["simulated"]["recorded_model"] is None


def test_it_is_said_how_well_the_recorded_steps_are_foretold(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorded(path, fcfs())
    words = ("simulate", SAMPLE, "--head", "20", "--lengths", "0.1", "--steps", str(path))
    good = call(*words)
    assert "foretold from the others within" in " ".join(good.stdout.split())
    assert "warning" not in good.output
    disturbed(path, 60, 1.0)
    bad = call(*words)
    assert "3 took over 3 times" in " ".join(bad.stdout.split())
    assert "too hopeful" in " ".join(bad.stderr.split())
    made = call(*words, "--json")
    assert "too hopeful" in " ".join(made.stderr.split())
    about = json.loads(made.stdout)[0]["simulated"]["step_model"]
    assert about["far"] == 3
    assert 0.3 < about["far_share"] < 0.8


def test_nothing_is_attained_where_nothing_was_asked() -> None:
    words = ("simulate", SAMPLE, "--head", "20", "-m", "llama-3.2-1b", "--policy", "fcfs,slo")
    shown = call(*words).stdout
    assert "%" not in shown
    assert "--slo-ttft" in shown
    assert {one["attainment"] for one in json.loads(call(*words, "--json").stdout)} == {None}
    assert shown.count("100.0%") < call(*words, "--slo-ttft", "9000").stdout.count("100.0%")


@pytest.mark.parametrize("flags", [(), ("--check",), ("--steps", ""), ("--check", "--json")])
def test_a_recording_in_which_nothing_happened_is_an_error(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    path = tmp_path / "run.jsonl"
    recorded(path, fcfs())
    path.write_text(path.read_text().splitlines()[0] + "\n")
    words = [str(path) if word == "" else word for word in flags]
    shown = call("simulate", SAMPLE if "--steps" in flags else str(path), *words)
    assert shown.exit_code == 1
    assert ("no step in it" if "--steps" in flags else "no request in it") in shown.output


def test_whatever_reads_a_trace_reads_it_packed(tmp_path: Path) -> None:
    plain = tmp_path / "run.jsonl"
    recorded(plain, fcfs())
    packed = tmp_path / "run.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    for words in (
        ("{}", "--json"), ("{}", "--check"), ("{}", "--steps", "{}", "--json"),
        (SAMPLE, "--head", "20", "--steps", "{}", "--json"),
    ):  # fmt: skip
        shown = [
            call("simulate", *(w.format(path) for w in words)).output for path in (packed, plain)
        ]
        made = [text.replace(".gz", "") for text in shown]
        if "--json" in words:
            made = [[one | {"speedup": None} for one in json.loads(text)] for text in made]
        assert made[0] == made[1], words
    packed.write_bytes(packed.read_bytes()[:300])
    for words in ((str(packed), "--check"), (SAMPLE, "--steps", str(packed))):
        shown = call("simulate", *words)
        assert (shown.exit_code, str(packed) in shown.output) == (1, True)


def test_a_fleet_sums_what_adds_up_and_nothing_else() -> None:
    words = ("simulate", SAMPLE, "--head", "40", "-m", "llama-3.2-1b", "--policy", "slo", "--json")
    (one,), (three,) = (
        json.loads(call(*words, *more).stdout) for more in ((), ("--replicas", "3"))
    )
    assert one["counters"]["requests"] == three["counters"]["requests"] == 40
    assert three["counters"]["blocks"] == 3 * one["counters"]["blocks"]
    assert not one["gauges"].keys() & one["counters"].keys()
    assert {len(values) for values in one["gauges"].values()} == {1}
    assert {len(values) for values in three["gauges"].values()} == {3}
    # Whatever is a factor, a share or an error is a gauge: a sum of it over replicas says nothing.
    factors = {row.key for row in ENGINE if row.name.endswith(("ratio", "drifting", "seconds"))}
    assert factors - {"busy_seconds"} <= one["gauges"].keys()
    assert max(three["gauges"]["kv_reserve"]) <= 1.0


def test_the_title_says_what_holds_for_all_runs_and_each_row_its_own() -> None:
    words = ("simulate", SAMPLE, "--head", "20", "-m", "llama-3.2-1b")
    assert "x the rate)" in call(*words, "--rate", "2").stdout
    several = call(*words, "--rate", "2,4").stdout
    assert "20 requests (first 20)" in several
    assert "the rate" not in several
    assert "fcfs at 2/s" in several
    assert "fcfs at 4/s" in several


@pytest.mark.parametrize(
    ("words", "ignored"),
    [
        *((("{}", "--steps", "{}"), flag) for flag in (
            "--hardware l4", "--model llama-3.2-1b", "--tp 2", "--weights fp8", "--max-rows 4",
            "--max-batch-tokens 512", "--kv-tokens 4096", "--operators x",
        )),
        *((("{}", "--check"), flag) for flag in (
            "--hardware l4", "--rate 3", "--policy slo", "--replicas 2", "--steps {}",
            "--requests-out x.jsonl", "--plot x.png", "--slo-ttft 100", "--seed 1",
        )),
    ],
)  # fmt: skip
def test_no_flag_is_ignored(tmp_path: Path, words: tuple[str, ...], ignored: str) -> None:
    path = tmp_path / "run.jsonl"
    recorded(path, fcfs())
    given = [word.format(path) for word in (*words, *ignored.split())]
    shown = call("simulate", *given)
    assert shown.exit_code == 2, shown.output
    assert f"leave out {ignored.split()[0]}" in shown.output


def test_a_list_of_all_models_takes_no_flag() -> None:
    shown = call("roofline", "-H", "h100", "--tp", "2")
    assert shown.exit_code == 2
    assert "leave out --hardware, --tp" in shown.output
