"""`octavo conformance` at the terminal: exit codes, JSON, JUnit, and what it says if it cannot."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from octavo.cli import cli
from tests.conformance.fake import KEY, Fake

GOOD, BAD = "stream-done-once", "echo"


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = tmp_path / "key"
    path.write_text(f"# whose it is\nme {KEY} tier=flex\n")
    return str(path)


def called(*words: str) -> Result:
    return CliRunner().invoke(cli, ["conformance", *words])


def test_a_run_without_failures_ends_well(key: str) -> None:
    with Fake().standing() as fake:
        result = called(fake.url, "--api-key-file", key, "--only", GOOD, "--only", BAD)
    assert result.exit_code == 0, result.output
    assert "2 of 2 pass" in result.output


def test_a_failure_is_shown_with_its_words_and_ends_badly(key: str) -> None:
    with Fake(BAD).standing() as fake:
        result = called(fake.url + "/v1/", "--api-key-file", key, "--only", GOOD, "--only", BAD)
    assert result.exit_code == 1
    assert "does not begin with the prompt" in result.output
    assert "CreateCompletionRequest.echo" in result.output


def test_json_holds_the_verdicts(key: str) -> None:
    with Fake(BAD).standing() as fake:
        result = called(fake.url, "--api-key-file", key, "--json", "--only", "answers")
    report = json.loads(result.stdout)
    verdicts = {check["name"]: check["verdict"] for check in report["checks"]}
    assert verdicts.pop(BAD) == "fail"
    assert set(verdicts.values()) == {"pass"}
    assert report["counts"]["fail"] == 1
    assert report["model"] == "fake"


def test_junit_holds_a_case_for_each_check(key: str, tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    with Fake(BAD).standing() as fake:
        called(fake.url, "--api-key-file", key, "--junit", str(path), "--only", GOOD, "--only", BAD)
    suite = ElementTree.parse(path).getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    failed = suite.find(f"testcase[@name='{BAD}']/failure")
    assert failed is not None
    assert failed.get("type") == "spec"


def test_heavy_checks_are_asked_for(key: str) -> None:
    with Fake().standing() as fake:
        result = called(fake.url, "--api-key-file", key, "--json", "--only", "lifecycle")
    names = {check["name"] for check in json.loads(result.stdout)["checks"]}
    assert names == {"disconnect-stream", "disconnect-whole"}


def test_a_server_that_is_not_there_is_an_error() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        result = called(f"http://127.0.0.1:{free.getsockname()[1]}")
    assert result.exit_code == 1
    assert "Error: http" in result.stderr
    assert "cannot be reached" in result.stderr


def test_a_word_that_is_no_check_is_named() -> None:
    result = called("http://127.0.0.1:1", "--only", "nonsense")
    assert result.exit_code == 2
    assert "nonsense" in result.output


def test_the_list_says_what_each_check_demands_and_who_says_so() -> None:
    result = called("--list", "--json")
    for check in json.loads(result.stdout):
        assert check["words"]
        assert check["source"]
        assert check["basis"] in ("spec", "practice")


def test_where_nobody_listens_it_is_said_how_somebody_would() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        for words in (["conformance"], ["bench", "serve"]):
            result = CliRunner().invoke(cli, [*words, f"http://127.0.0.1:{port}"])
            assert f"nobody listens there; `octavo serve --port {port}`" in result.output
            assert "Errno" not in result.output
