"""The command line: help that teaches, one-line errors, output that machines read."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import shlex
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from octavo import cli
from octavo.assembly import Assembly
from octavo.config import (
    ONE_ANSWER,
    ONE_AT_A_TIME,
    RANKING,
    SCHEDULING,
    EngineConfig,
    ServerConfig,
    TalkConfig,
    parse_bytes,
    show_bytes,
)
from octavo.core.request import SamplingParams
from octavo.errors import EXTRAS, InvalidRequest
from octavo.terminal import Knob
from tests.server.fakes import FakeTokenizer, expected, expected_text, fake_template
from tests.test_llm import fake_assembly


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[EngineConfig]:
    """Every model is the fake one; the configurations asked for are kept."""
    asked: list[EngineConfig] = []

    def assemble(config: EngineConfig, **_: Any) -> Assembly:
        asked.append(config)
        return fake_assembly()

    monkeypatch.setattr("octavo.assembly.assemble", assemble)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return asked


def call(*words: str, typed: str | None = None) -> Result:
    return CliRunner().invoke(cli.cli, list(words), input=typed)


def test_help_teaches() -> None:
    for words in (
        [],
        ["run"],
        ["chat"],
        ["serve"],
        ["pull"],
        ["bench"],
        ["doctor"],
        ["bench", "offline"],
        ["bench", "kernels"],
        ["bench", "step"],
        ["bench", "scaling"],
        ["lab"],
        ["lab", "flash"],
    ):
        result = call(*words, "--help")
        assert result.exit_code == 0
        assert "Examples:" in result.stdout
        assert f"octavo {' '.join(words)}".strip() in result.stdout


def test_every_field_is_a_flag_with_help() -> None:
    text = " ".join(call("serve", "--help").stdout.split())
    for config in (EngineConfig, ServerConfig):
        for field in dataclasses.fields(config):
            assert f"--{field.name.replace('_', '-')}" in text
            assert field.metadata["help"].split()[0] in text
    assert "-m, --model" in text
    assert "[default: 16MiB]" in text
    assert "half of the memory that is free" in text


def headings(text: str) -> dict[str, list[str]]:
    """The flags of a help, by the heading they stand under."""
    found: dict[str, list[str]] = {}
    heading = ""
    for line in text.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            heading = line[:-1]
        elif (flag := re.match(r" +(?:-\w, )?(--[\w-]+)", line)) and heading:
            found.setdefault(heading, []).append(flag[1])
    return found


def test_the_own_options_come_first_and_each_stands_once_under_its_heading() -> None:
    for words in (["serve"], ["run"], ["chat"], ["bench", "step"], ["lab", "kv"]):
        found = headings(call(*words, "--help").stdout)
        assert next(iter(found)) == "Options"
        assert "--help" in found["Options"]
        assert "--model" in found["Model and machine"]
        assert "--policy" in found.get("Steps", ()) or words != ["serve"]
        flags = [flag for under in found.values() for flag in under]
        assert len(flags) == len(set(flags))
    assert "--temperature" in headings(call("run", "--help").stdout)["Answer"]
    assert "--max-queue" in headings(call("serve", "--help").stdout)["Queue and deadlines"]


def _takes(name: str) -> set[str]:
    """The fields of `EngineConfig` that a command takes."""
    command = dict(_commands(cli.cli))[name]
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    return fields & {str(one.name) for one in command.params if isinstance(one, Knob)}


# What of the engine each command has no use for: it would change nothing there.
NO_USE = {
    "serve": (),
    "chat": ONE_AT_A_TIME,
    "run": ONE_ANSWER,
    **dict.fromkeys(("bench offline", "bench step"), (*RANKING, "chat_template")),
    **dict.fromkeys(
        ("bench kernels", "bench scaling", "lab phases", "lab batching", "lab paging",
         "lab prefix", "lab scheduling"),
        (*SCHEDULING, "chat_template"),
    ),
    "lab chunked": (*SCHEDULING, "chat_template", "max_batch_tokens"),
    "lab kv": (*SCHEDULING, "chat_template", "max_batch_tokens", "max_rows"),
}  # fmt: skip


def test_commands_take_what_of_the_engine_can_change_what_they_do_and_refuse_the_rest() -> None:
    fields = {field.name: field for field in dataclasses.fields(EngineConfig)}
    loading = {name for name, _ in _commands(cli.cli) if _takes(name)}
    assert loading == set(NO_USE)
    for name, unused in NO_USE.items():
        assert _takes(name) == set(fields) - set(unused), name
        given = ("hello",) if name == "run" else ()
        for field in unused:
            flag = "--" + field.replace("_", "-")
            shown = call(*name.split(), *given, flag, str(fields[field].default))
            assert shown.exit_code == 2, shown.output
            assert "No such option" in shown.output
            assert flag in shown.output


def test_what_drowns_no_options_of_their_own_is_named_in_the_help_all_the_same() -> None:
    for name in NO_USE:
        text = call(*name.split(), "--help").stdout
        for field in _takes(name):
            assert re.search(rf"--{field.replace('_', '-')}\b", text), (name, field)
        own, _, shared = text.partition("Model and machine:")
        assert "Options:" in own
        if name.split()[0] in ("lab", "bench"):
            assert len(shared.partition("Examples:")[0].splitlines()) < 16, name


def test_no_command_is_listed_with_half_a_sentence() -> None:
    for words in ([], ["bench"], ["lab"]):
        listed = call(*words, "--help").stdout.partition("Commands:")[2].partition("Examples:")[0]
        assert listed
        assert "..." not in listed


def test_flags_reach_the_configuration(fake: list[EngineConfig]) -> None:
    flags = ["--kv-memory", "1.5GiB", "--threads", "3", "--no-prefix-caching", "--act", "fp32"]
    assert call("chat", "-m", "x.gguf", *flags, typed="/exit\n").exit_code == 0
    want = EngineConfig(
        model="x.gguf", kv_memory=1610612736, threads=3, prefix_caching=False, act="fp32"
    )
    assert fake == [want]


@pytest.mark.usefixtures("fake")
def test_run_streams_the_answer_under_the_template() -> None:
    result = call("run", "hello", "there", "-t", "0", "--max-tokens", "40")
    prompt = fake_template([{"role": "user", "content": "hello there"}])
    params = SamplingParams(temperature=0, max_tokens=40)
    assert result.stdout == expected_text(expected(prompt, params))[0] + "\n"
    assert "tok/s" in result.stderr


@pytest.mark.usefixtures("fake")
def test_run_raw_and_from_standard_input() -> None:
    result = call("run", "--raw", "-q", "-t", "0", "--max-tokens", "9", "-", typed="piped")
    params = SamplingParams(temperature=0, max_tokens=9)
    tokens = expected(FakeTokenizer().encode("piped"), params)
    assert result.stdout == expected_text(tokens)[0] + "\n"
    assert result.stderr == ""


@pytest.mark.usefixtures("fake")
def test_a_long_text_gets_the_room_that_is_left_and_only_a_number_that_was_named_is_refused() -> (
    None
):
    long = "x" * 1900  # of a context of 2048
    result = call("run", "--raw", "-t", "0", "-", typed=long)
    params = SamplingParams(temperature=0, max_tokens=2048 - 1901)
    tokens = expected(FakeTokenizer().encode(long), params)
    assert result.exit_code == 0, result.output
    assert result.stdout == expected_text(tokens)[0] + "\n"
    asked = call("run", "--raw", "--max-tokens", "1024", "-", typed=long)
    assert asked.exit_code == 1
    assert "max_tokens 1024 do not fit the context of 2048 tokens" in asked.stderr
    beyond = call("run", "--raw", "-", typed="x" * 2048)
    assert beyond.exit_code == 1
    assert "prompt's 2049 tokens" in beyond.stderr
    talk = call("chat", "-t", "0", typed=f"{'y' * 1900}\n/stats\n")
    assert "do not fit" not in talk.stderr
    assert "tok/s" in talk.stderr


@pytest.mark.usefixtures("fake")
def test_an_answer_that_fills_the_context_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTokenizer, "eos_ids", frozenset())
    assert "ended by the end of the context" in call("run", "--raw", "-", typed="x" * 2000).stderr
    assert "ended by --max-tokens" in call("run", "--max-tokens", "3", "hi").stderr


@pytest.mark.usefixtures("fake")
def test_run_json_is_one_object() -> None:
    result = call("run", "--json", "-s", "be brief", "--seed", "4", "hello", "--stop", "t")
    got = json.loads(result.stdout)
    assert got["finish_reason"] in ("stop", "length")
    assert got["model"] == "fake"
    assert {"text", "prompt_tokens", "completion_tokens", "ttft_s", "tokens_per_s"} <= set(got)


@pytest.mark.usefixtures("fake")
def test_chat_remembers_and_obeys() -> None:
    lines = ["hello", "/stats", "/history", "/undo", "/history", "/system a pirate", "/history",
             "/nonsense", "/help", "/exit", "never said"]  # fmt: skip
    result = call("chat", "-t", "0", "--max-tokens", "5", typed="\n".join(lines) + "\n")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("user: hello") == 1
    assert "system: a pirate" in result.stdout
    assert "tok/s" in result.stderr
    assert "no such command: /nonsense" in result.stderr
    assert "never said" not in result.stdout


@pytest.mark.usefixtures("fake")
def test_chat_ends_with_the_input() -> None:
    assert call("chat", typed="").exit_code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "--host", "0.0.0.0"], "--api-key-file"),
        (["serve", "--port", "99999"], "--port"),
        (["serve", "--api-key-file", "/nonexistent/keys"], "API keys"),
        (["run", "hi", "--temperature", "-1"], "temperature"),
        (["run", "hi", "--kv-memory", "lots"], "1GiB"),
        (["serve", "--max-rows", "0"], "--max-rows"),
        (["run"], "PROMPT"),
        (["bench", "offline", "--concurrency", "0"], "1,4,16"),
        (["pull", "no-such-model"], "no-such-model"),
        (["run", "hi", "-s", "x" * 5000], "2048"),
    ],
)
@pytest.mark.usefixtures("fake")
def test_errors_are_one_line_that_helps(words: list[str], said: str) -> None:
    result = call(*words)
    assert result.exit_code in (1, 2)
    assert "Traceback" not in result.output
    errors = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1
    assert said in result.stderr


@pytest.mark.usefixtures("fake")
def test_pull_lists_models_for_people_and_machines() -> None:
    assert "smollm2-135m" in call("pull").stdout
    listed = json.loads(call("pull", "--json").stdout)
    assert {"name", "bytes", "licence", "path"} <= set(listed[0])


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[" in CliRunner().invoke(cli.cli, ["pull"], color=True).stdout
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in CliRunner().invoke(cli.cli, ["pull"], color=True).stdout


@pytest.mark.parametrize(
    ("text", "count"),
    [("1GiB", 2**30), ("512 MiB", 2**29), ("1.5g", 1_500_000_000), ("7", 7), ("2k", 2000),
     ("1gb", 10**9), ("1 Ki", 1024)],
)  # fmt: skip
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1XB", "1.2.3G", "i"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_bytes(text)


def test_sizes_are_shown_in_words() -> None:
    assert show_bytes(2**30) == "1.00 GiB"
    assert show_bytes(10) == "10 B"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run hi --stop ''", "--stop must be texts of a character or more, got ''"),
        ("run hi --stop a --stop ''", "--stop must be texts of a character or more, got ''"),
        ("run hi --temperature 2.5", "--temperature must be a number in [0, 2], got 2.5"),
        ("run hi --temperature nan", "--temperature must be a number in [0, 2], got nan"),
        ("chat --top-p 0", "--top-p must be a number in (0, 1], got 0.0"),
        ("chat --min-p 2", "--min-p must be a number in [0, 1], got 2.0"),
        ("run hi --top-k -1", "--top-k must be an integer in [0, 2147483647], got -1"),
        ("run hi --max-tokens 0", "--max-tokens must be an integer in [1, 2147483647], got 0"),
        ("run hi --repetition-penalty 0", "--repetition-penalty must be a number in [0.01, 100]"),
        ("serve --policy slo --slo ttft=-1", "--slo ttft=-1: ttft must be a number of seconds"),
        ("serve --port 0 --batch-dir /proc/foo", "--batch-dir /proc/foo cannot be used"),
    ],
)
def test_what_is_wrong_with_a_flag_is_said_with_its_name_before_anything_is_loaded(
    words: str, said: str, fake: list[EngineConfig]
) -> None:
    shown = call(*shlex.split(words))
    assert isinstance(shown.exception, SystemExit), shown.exception
    assert said in " ".join(shown.stderr.split())
    assert not fake or "batch-dir" in words


WRONG = (
    "serve --port abc", "serve --port 99999", "serve --policy foo", "serve --isa neon",
    "serve --host 0.0.0.0", "serve --api-key-file /nowhere", "serve --max-n 0", "serve --slo x",
    "serve --policy slo --slo x", "serve --config /nowhere", "serve --tls-cert /nowhere",
    "serve --port 0 --batch-dir /proc/foo", "serve --cors-origin *", "run hi --isa neon",
    "run hi --temperature 9", "run hi --kv-memory lots", "run hi --max-rows 0", "run", "run --foo",
    "chat --seed x", "lab flash --isa neon", "doctor --seconds 0", "foo",
    "bench offline --concurrency 0", "bench serve http://127.0.0.1:1 --concurrency 0",
    "conformance", "conformance http://127.0.0.1:1 --only foo",
    "conformance http://127.0.0.1:1 --api-key-file /nowhere",
    "simulate poisson:rate=1,seconds=5 --policy foo", "simulate poisson:rate=1,seconds=5 -m foo",
    "simulate poisson:rate=1,seconds=5 -H foo", "roofline llama-3.2-1b --tp 0",
)  # fmt: skip
FAILED = (
    "conformance http://127.0.0.1:1", "bench serve http://127.0.0.1:1", "pull no-such-model",
    "serve --port 0 -m /nowhere.gguf", "run hi -m /nowhere.gguf", "chat -m /nowhere.gguf",
    "simulate /nowhere.csv", "simulate poisson:rate=1,seconds=0.001",
)  # fmt: skip


@pytest.mark.parametrize(
    ("words", "code"), [*((words, 2) for words in WRONG), *((words, 1) for words in FAILED)]
)
def test_a_wrong_command_line_is_exit_code_2_and_what_fails_is_1(
    words: str, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if "batch-dir" in words:  # which is looked at once the model is there
        monkeypatch.setattr("octavo.cli._assemble", lambda *_, **__: fake_assembly())
    shown = call(*words.split())
    assert isinstance(shown.exception, SystemExit), shown.exception
    assert shown.exit_code == code, shown.output
    errors = [line for line in shown.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1
    assert not shown.stdout


def test_a_port_that_is_taken_is_no_mistake_in_the_command_line() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        shown = call("serve", "--port", str(other.getsockname()[1]))
    assert shown.exit_code == 1
    assert "cannot bind" in shown.stderr


def test_configurations_refuse_nonsense() -> None:
    for make in (
        lambda: EngineConfig(max_rows=0),
        lambda: EngineConfig(policy="lifo"),  # type: ignore[arg-type]
        lambda: EngineConfig(threads=0),
        lambda: ServerConfig(port=-1),
        lambda: ServerConfig(keepalive=0),
        lambda: ServerConfig(host="0.0.0.0"),
    ):
        with pytest.raises(InvalidRequest):
            make()
    assert TalkConfig().temperature < 1


@pytest.mark.parametrize(
    "flag", ["--kv-memory", "--threads", "--max-context", "--max-rows", "--max-batch-tokens"]
)
@pytest.mark.parametrize("value", ["0", "99999999999", "9" * 30, "9" * 5000])
def test_sizes_out_of_reach_are_refused_in_one_line(flag: str, value: str) -> None:
    """Nothing is loaded for them, and no integer of the kernels overflows."""
    if (flag, value) == ("--kv-memory", "99999999999"):
        pytest.skip("93 GiB is a size")
    for command in (["run", "hi"], ["serve"], ["chat"], ["bench", "offline"]):
        result = call(*command, flag, value)
        assert result.exit_code in (1, 2)
        assert isinstance(result.exception, SystemExit)
        assert flag in result.stderr


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "1e9"])
def test_doctor_refuses_a_time_that_is_none(seconds: str) -> None:
    result = call("doctor", "--seconds", seconds)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--seconds" in result.stderr


@pytest.mark.usefixtures("fake")
def test_a_prompt_without_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTokenizer, "encode", lambda *_, **__: [])
    result = call("run", "--raw", "x")
    assert result.exit_code == 1
    assert "no tokens" in result.stderr


@pytest.mark.parametrize("words", [[""], ["  \n"], ["-"], ["", "-"], ["--raw", ""]])
def test_an_empty_prompt_is_refused_before_anything_is_loaded(
    words: list[str], fake: list[EngineConfig]
) -> None:
    result = call("run", *words, typed="")
    assert result.exit_code == 1
    assert "the prompt is empty" in result.stderr
    assert not fake


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["severe"], "did you mean serve"),
        (["simulation"], "did you mean simulate"),
        (["xyzzy"], "there are bench, chat"),
        (["bench", "steps"], "did you mean step"),
        (["lab", "chunks"], "did you mean chunked"),
    ],
)
def test_a_command_that_is_none_is_told_the_nearest(words: list[str], said: str) -> None:
    result = call(*words)
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "--config", "nowhere.toml"],
        ["serve", "--api-key-file", "nowhere.txt"],
        ["serve", "--api-key-file", "/"],
        ["pull", "smollm2-135m", "--file", "nowhere"],
        ["conformance", "http://127.0.0.1:1", "--api-key-file", "nowhere.txt"],
        ["simulate", "nowhere.jsonl"],
        ["simulate", "nowhere.jsonl", "--check"],
        ["roofline", "nowhere.json"],
    ],
)
def test_a_file_that_is_not_there_is_named_in_plain_words(words: list[str]) -> None:
    result = call(*words)
    assert result.exit_code in (1, 2)
    assert words[-1].lstrip("-") in result.stderr or words[1] in result.stderr
    assert "Errno" not in result.stderr


def test_an_instruction_set_that_is_not_here_is_told_which_are() -> None:
    result = call("lab", "flash", "--isa", "sse")
    assert result.exit_code == 2
    assert "portable" in result.stderr


@pytest.mark.usefixtures("fake")
def test_a_file_is_in_the_same_units_everywhere() -> None:
    assert "94 MiB" in call("--help").stdout
    assert "93.81 MiB" in call("pull").stdout


@pytest.mark.usefixtures("fake")
def test_bytes_that_are_no_text_are_refused() -> None:
    result = call("run", "a\udcffb")
    assert result.exit_code == 1
    assert "not valid UTF-8" in result.stderr


@pytest.mark.parametrize(
    ("end", "code"), [(">&-", 0), ("2>&-", 0), ("<&-", 0), ("<&- >&- 2>&-", 0), (">/dev/full", 1)]
)
def test_closed_and_full_streams_are_no_traceback(end: str, code: int) -> None:
    command = f"{shlex.quote(sys.executable)} -m octavo.cli pull --json {end}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_an_interrupt_is_one_word_and_its_own_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("octavo.cli._assemble", interrupted)
    done = CliRunner().invoke(cli.cli, ["serve", "--port", "0"])
    assert done.exit_code == 130
    assert done.output.strip() == "Interrupted."


# ---- a file of flags -----------------------------------------------------------------------------


def served_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, *flags: str
) -> tuple[Result, dict[str, Any]]:
    """What `octavo serve --config` would start with."""
    seen: dict[str, Any] = {}
    real = cli.take

    def spy(cls: Any, given: dict[str, Any]) -> Any:
        made = real(cls, given)
        seen.update(dataclasses.asdict(made))
        if cls is ServerConfig:
            raise InvalidRequest("far enough")
        return made

    monkeypatch.setattr(cli, "take", spy)
    path = tmp_path / "octavo.toml"
    path.write_text(text)
    return CliRunner().invoke(cli.cli, ["serve", "--config", str(path), *flags]), seen


def test_a_file_of_flags_is_the_flags_and_the_command_line_wins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = """
        model = "qwen2.5-coder-0.5b"
        port = 9000
        max-queue = 7
        max_body = "2MiB"
        keepalive = 3
        prefix-caching = false
        cors-origin = ["https://a.example", "https://b.example"]
    """
    result, seen = served_with(monkeypatch, tmp_path, text, "--port", "9001")
    assert "far enough" in result.output
    assert (seen["model"], seen["port"], seen["max_queue"]) == ("qwen2.5-coder-0.5b", 9001, 7)
    assert (seen["max_body"], seen["keepalive"], seen["prefix_caching"]) == (2 * 2**20, 3.0, False)
    assert seen["cors_origin"] == ("https://a.example", "https://b.example")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-que = 7", "'max-que'; did you mean max-queue?"),
        ("port = 'x", "octavo.toml"),
        ("port = 8.5", "port must be a whole number"),
        ("port = true", "port must be a whole number"),
        ("prefix-caching = 1", "prefix-caching must be true or false"),
        ("[server]\nport = 1", "unknown setting 'server'"),
        ("config = 'more.toml'", "unknown setting 'config'"),
        ("port = 1\n'port ' = 2", "unknown setting 'port '"),
        ("max-queue = 1\nmax_queue = 2", "given twice"),
        ("policy = 'best'", "best"),
        ("max-queue = 0", "--max-queue must be at least 1"),
    ],
)
def test_what_is_wrong_in_a_file_of_flags_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, said: str
) -> None:
    result, _ = served_with(monkeypatch, tmp_path, text)
    assert result.exit_code != 0
    assert said in " ".join(result.output.split()).replace("│", "")


def test_the_file_that_is_shipped_is_one_that_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shipped = Path(__file__).resolve().parents[1] / "deploy" / "octavo.toml"
    result, seen = served_with(monkeypatch, tmp_path, shipped.read_text())
    assert "far enough" in result.output
    assert seen["log_format"] == "json"


def test_the_image_starts_what_there_is(tmp_path: Path) -> None:
    """No Docker is needed to see that its files are there and its flags are flags."""
    root = Path(__file__).resolve().parents[1]
    text = (root / "deploy" / "Dockerfile").read_text()
    hidden = (root / ".dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (?!--from)(.*)", text, re.M):
        for source in line.split()[:-1]:
            assert (root / source).exists(), source
            assert source not in hidden
    for needed in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "octavo"):
        assert (root / needed).exists()
        assert needed not in hidden
    words = json.loads(re.findall(r"^ENTRYPOINT (.*)", text, re.M)[0])
    keys = tmp_path / "keys"
    keys.write_text("image image-key-0123456789abcdef\n")
    given = [str(keys) if word == "/keys" else word for word in words[2:]]
    ctx = cli.serve.make_context("serve", given)
    assert (ctx.params["host"], ctx.params["api_key_file"]) == ("0.0.0.0", str(keys))
    assert words[1] == "serve"
    ServerConfig(host=ctx.params["host"], api_key_file=ctx.params["api_key_file"])


def test_the_keys_that_are_shipped_are_read() -> None:
    from octavo.server.auth import Keys

    keys = Keys.read(str(Path(__file__).resolve().parents[1] / "deploy" / "keys.example"))
    found = keys.find("Bearer replace-me-0123456789abcdef")
    assert found is not None
    assert (found.rpm, found.tpm, found.concurrent, found.admin) == (120, 60000, 8, False)
    assert keys.any_admin


@pytest.mark.parametrize(("mode", "told"), [(0o600, False), (0o400, False), (0o640, True),
                                            (0o604, True), (0o620, True)])  # fmt: skip
def test_keys_that_others_may_read_are_warned_of_once(
    mode: int, told: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def served(*_: Any) -> None: ...

    monkeypatch.setattr("octavo.cli._assemble", lambda *_, **__: fake_assembly())
    monkeypatch.setattr("octavo.server.serve.serve", served)
    (keys := tmp_path / "keys").write_text("one one-key-of-sixteen-letters\n")
    keys.chmod(mode)
    shown = call("serve", "--port", "0", "--api-key-file", str(keys))
    assert shown.exit_code == 0, shown.output
    assert shown.stderr.count("warning") == told
    assert ("chmod 600" in shown.stderr) == told


# ---- files ----

MISSING = "/nowhere/at/all"
# Of a command with a file to read or to write: what else it must be given.
READS = {
    "run --file": ("hello",),
    "chat --file": (),
    "run --chat-template": ("hello",),
    "chat --chat-template": (),
    "serve --chat-template": (),
    "serve --file": (),
    "serve --api-key-file": (),
    "serve --tls-cert": ("--tls-key", MISSING + ".key"),
    "serve --tls-key": ("--tls-cert", __file__),
    "serve --config": (),
    "pull --file": ("smollm2-135m",),
    "bench offline --file": (),
    "bench serve --load": ("http://127.0.0.1:1",),
    "bench serve --api-key-file": ("http://127.0.0.1:1",),
    "conformance --api-key-file": ("http://127.0.0.1:1",),
    "simulate --steps": ("poisson:rate=1,seconds=5",),
    "simulate --operators": ("poisson:rate=1,seconds=5",),
    "simulate --model": ("poisson:rate=1,seconds=5",),
}
WRITES = {
    "serve --record": (),
    "serve --step-log": (),
    "bench kernels --plot": (),
    "bench step --plot": (),
    "bench scaling --plot": (),
    "bench serve --plot": ("http://127.0.0.1:1",),
    "bench serve --requests-out": ("http://127.0.0.1:1",),
    "conformance --junit": ("http://127.0.0.1:1",),
    "lab flash --plot": (),
    "lab phases --plot": (),
    "lab batching --plot": (),
    "lab paging --plot": (),
    "lab prefix --plot": (),
    "lab chunked --plot": (),
    "lab scheduling --plot": (),
    "lab kv --plot": (),
    "roofline --plot": ("llama-3.2-1b",),
    "simulate --plot": ("poisson:rate=1,seconds=5",),
    "simulate --requests-out": ("poisson:rate=1,seconds=5",),
}


def _commands(group: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(group, click.Group):
        for name in group.list_commands(click.Context(group)):
            found = group.get_command(click.Context(group), name)
            assert found is not None
            yield from _commands(found, (*words, name))
    elif isinstance(group, cli._Elsewhere):
        module = importlib.import_module(group.module)
        yield " ".join(words), vars(module)[str(group.name)]
    else:
        yield " ".join(words), group


def test_every_flag_that_takes_a_file_is_in_the_lists_below() -> None:
    for name, command in _commands(cli.cli):
        for one in command.params:
            if isinstance(one.type, (click.Path, click.File)):
                flag = max(one.opts, key=len)
                assert f"{name} {flag}" in READS | WRITES, f"{name} {flag}"


@pytest.mark.parametrize("flag", [*READS, *WRITES])
def test_a_file_that_is_not_there_is_named_before_any_work(
    flag: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("it went to work")

    monkeypatch.setattr("octavo.lab.flash.measure", never, raising=False)
    monkeypatch.setattr("octavo.models.hub.pull", never)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name, _, option = flag.rpartition(" ")
    path = f"{MISSING}.png" if option == "--plot" else MISSING
    shown = call(*name.split(), *(READS | WRITES)[flag], option, path)
    assert shown.exit_code in (1, 2), shown.output
    assert path in " ".join(shown.output.split())
    assert not isinstance(shown.exception, AssertionError)


@pytest.mark.parametrize("flag", WRITES)
def test_no_name_is_no_files_name(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("it went to work")

    monkeypatch.setattr("octavo.lab.flash.measure", never, raising=False)
    monkeypatch.setattr("octavo.models.hub.pull", never)
    name, _, option = flag.rpartition(" ")
    shown = call(*name.split(), *WRITES[flag], option, "")
    assert shown.exit_code == 2, shown.output
    assert option in shown.output


@pytest.mark.parametrize("name", ["a" * 300, "nowhere"])
@pytest.mark.parametrize("flag", WRITES)
def test_a_file_that_cannot_be_made_is_named_before_any_work(
    flag: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("it went to work")

    monkeypatch.setattr("octavo.lab.flash.measure", never, raising=False)
    monkeypatch.setattr("octavo.models.hub.pull", never)
    (tmp_path / "nowhere.png").symlink_to(tmp_path / "absent" / "file")
    path = str(tmp_path / f"{name}.png")
    command, _, option = flag.rpartition(" ")
    shown = call(*command.split(), *WRITES[flag], option, path)
    assert shown.exit_code == 2, shown.output
    assert "cannot be written" in shown.output


def _pairs() -> Iterator[tuple[str, str, str]]:
    """(command, a file that it writes, another that it reads or writes), each pair once."""
    files = [*READS, *WRITES]
    for flag in WRITES:
        command, _, option = flag.rpartition(" ")
        for other in files:
            same, _, beside = other.rpartition(" ")
            if same == command and (other in READS or files.index(other) > files.index(flag)):
                yield command, option, beside


@pytest.mark.parametrize(("command", "option", "beside"), list(_pairs()))
def test_no_output_is_written_over_another_file_of_the_same_command(
    command: str, option: str, beside: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("it went to work")

    monkeypatch.setattr("octavo.models.hub.pull", never)
    path = tmp_path / "one.png"
    for path, there in ((tmp_path / "new.png", False), (tmp_path / "there.png", True)):
        if there or f"{command} {beside}" in READS:
            path.write_text("# kept")
        (link := tmp_path / f"to-{path.name}").symlink_to(path)
        words = [*WRITES[f"{command} {option}"], option, str(path)]
        for same in (f"{path.parent}/./{path.name}", str(link)):
            shown = call(*command.split(), *words, beside, same)
            assert shown.exit_code == 2, shown.output
            assert " too" in shown.output
            assert not path.exists() or path.read_text() == "# kept"


@pytest.mark.parametrize("flag", WRITES)
def test_a_dash_is_no_file(flag: str) -> None:
    name, _, option = flag.rpartition(" ")
    shown = call(*name.split(), *WRITES[flag], option, "-")
    assert shown.exit_code == 2, shown.output
    assert "/dev/stdout" in shown.output


@pytest.mark.parametrize("why", ["no model", "no socket"])
def test_a_server_that_cannot_start_makes_no_recording(
    why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record, log = tmp_path / "run.jsonl", tmp_path / "steps.jsonl"

    def assemble(*_: Any, **__: Any) -> Assembly:
        if why == "no model":
            raise InvalidRequest("it is not there", "model")
        return fake_assembly()

    async def nobody(*_: Any, **__: Any) -> None:
        raise InvalidRequest("cannot listen", "port")

    monkeypatch.setattr("octavo.cli._assemble", assemble)
    monkeypatch.setattr("octavo.server.serve.serve", nobody)
    words = ("--port", "0", "--record", str(record), "--step-log", str(log))
    shown = call("serve", *words)
    assert shown.exit_code != 0, shown.output
    assert not any(tmp_path.iterdir())


LOGS = {"serve --record", "serve --step-log"}  # of a run that nobody can have again


@pytest.mark.parametrize("flag", WRITES)
def test_what_a_run_left_behind_is_not_lost_to_the_next_one(
    flag: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name, _, option = flag.rpartition(" ")
    command = dict(_commands(cli.cli))[name]
    (param,) = [one for one in command.params if option in one.opts]
    assert param.type.log == (flag in LOGS)
    if flag in LOGS:
        monkeypatch.setattr("octavo.cli._serve", lambda *_: None)
        (path := tmp_path / "run.jsonl").write_text("earlier\n")
        (link := tmp_path / "link.jsonl").symlink_to(path)
        for given in (path, link):
            shown = call(*name.split(), option, str(given))
            assert shown.exit_code == 2
            said = " ".join(shown.stderr.split())
            assert f"{given} is there already, with 8 B" in said
            assert option in said
        assert path.read_text() == "earlier\n"
        (empty := tmp_path / "empty").touch()  # as mktemp makes them
        for given in (empty, tmp_path / "new", Path("/dev/null")):
            assert call(*name.split(), option, str(given)).exit_code == 0


def test_a_recording_that_another_server_has_begun_meanwhile_is_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    one, other = cli._Recording(str(path)), cli._Recording(str(path))
    one.write("one\n")
    one.begin()
    one.close()
    with pytest.raises(InvalidRequest, match=r"run\.jsonl"):
        other.begin()
    other.close()
    assert path.read_text() == "one\n"


def test_a_recording_begins_when_the_server_serves_with_what_was_there_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"

    async def served(*parts: Any) -> None:
        parts[-1]()  # `ready`

    monkeypatch.setattr("octavo.cli._assemble", lambda *_, **__: fake_assembly())
    monkeypatch.setattr("octavo.server.serve.serve", served)
    shown = call("serve", "--port", "0", "--record", str(path))
    assert shown.exit_code == 0, shown.output
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == ["head"]


def test_a_recording_ends_where_the_disk_is_full_and_the_server_does_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recording = cli._Recording("/dev/full")
    recording.write("x" * 100_000)
    recording.begin()
    for _ in range(3):
        recording.write("y" * 100_000)
    recording.close()
    assert [one.getMessage() for one in caplog.records] == [
        "/dev/full ends here: No space left on device"
    ]


def test_nothing_is_written_over_what_is_read_or_written_besides(tmp_path: Path) -> None:
    trace, other, new = tmp_path / "t.jsonl", tmp_path / "u.jsonl", tmp_path / "new.png"
    row = '{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 2}\n'
    trace.write_text(row)
    other.hardlink_to(trace)
    for words in (
        (trace, "--requests-out", trace),
        (trace, "--requests-out", other),
        ("poisson:rate=1,seconds=5", "--steps", trace, "--requests-out", other),
        (trace, "--requests-out", new, "--plot", tmp_path / "." / "new.png"),
    ):
        shown = call("simulate", *map(str, words))
        assert shown.exit_code == 2, shown.output
        assert " too" in shown.output
    assert trace.read_text() == row
    assert not new.exists()
    hardware = ("-m", "llama-3.1-8b", "-H", "h100")
    shown = call("simulate", str(trace), *hardware, "--requests-out", str(new))
    assert shown.exit_code == 0, shown.output
    assert new.exists()


@pytest.mark.parametrize("wrong", ["0", "-1", "nan", "soon", "1e12"])
@pytest.mark.parametrize(
    "words", ["bench serve http://127.0.0.1:1", "simulate poisson:rate=1", "plan poisson:rate=1"]
)
def test_a_deadline_is_refused_in_the_unit_it_is_given_in(words: str, wrong: str) -> None:
    shown = call(*words.split(), "--slo-ttft", wrong)
    assert shown.exit_code == 2
    assert "milliseconds" in shown.output
    assert "in seconds" not in shown.output


def test_a_policy_that_is_none_is_answered_with_all_that_may_be_said() -> None:
    shown = call("simulate", "poisson:rate=1,seconds=5", "--policy", "foo")
    assert "fair-slo" in shown.output
    assert "+admission" in shown.output


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("run hello --raw --system x", "--system"),
        ("run hello --raw --chat-template x", "--chat-template"),
        ("lab kv --chat-template x", "--chat-template"),
        ("bench offline --chat-template x", "--chat-template"),
        ("pull --file x", "--file"),
        ("bench serve http://127.0.0.1:1 --concurrency 2 --rate 3", "--rate"),
    ],
)
def test_no_flag_is_ignored(words: str, flag: str, fake: list[EngineConfig]) -> None:
    shown = call(*words.split())
    assert shown.exit_code == 2
    assert flag in shown.output
    assert not fake  # no model was loaded for it


def test_what_optional_parts_need_is_named_by_packages_that_can_be_installed() -> None:
    """Octavo is on no index: `pip install octavo[...]` would fail."""
    root = Path(cli.__file__).parents[1]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for extra, packages in EXTRAS.items():
        assert tuple(re.split(r"[<>=]", one)[0] for one in extras[extra]) == packages
    for path in (root / "octavo").rglob("*.py"):
        assert "octavo[" not in path.read_text(), path


@pytest.mark.parametrize("command", ["serve", "run hello", "lab flash", "bench offline"])
def test_more_threads_than_processors_is_said_with_their_number(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise InvalidRequest("that will do")

    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr("octavo.lab.flash.measure", never)
    monkeypatch.setattr("octavo.assembly.assemble", never)
    monkeypatch.setattr("octavo.server.serve.bind", lambda _: None)
    for threads, said in (("500", True), ("4", True), ("3", False)):
        shown = " ".join(call(*command.split(), "--threads", threads).stderr.split())
        assert ("may use 3 processors" in shown) == said, shown
        assert (f"--threads {threads}" in shown) == said
