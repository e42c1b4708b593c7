"""`octavo serve` with real SmolLM2, as a user starts it: the printed curl line, the openai client,
many at once, a client that leaves, SIGTERM."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.house import PATIENCE, wait_for

QUESTION = [{"role": "user", "content": "Write one sentence about the sea."}]


@dataclass
class Server:
    """A running `octavo serve`: its process, address and what it said."""

    process: subprocess.Popen[str]
    url: str
    said: str

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=120)

    def gauge(self, name: str) -> float:
        page = httpx.get(self.url + "/metrics").text
        return float(re.search(rf"^octavo_{name} (\S+)$", page, re.M)[1])  # type: ignore[index]

    def wait_until_idle(self) -> bool:
        names = ("requests_running", "requests_waiting", "kv_blocks_held")
        return wait_for(lambda: not any(self.gauge(name) for name in names))


def start(log: Path, *flags: str) -> Server:
    words = [sys.executable, "-m", "octavo.cli", "serve", "--port", "0", "--kv-memory", "64MiB"]
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*words, *flags], stdout=subprocess.PIPE, stderr=errors, text=True
        )
    assert process.stdout is not None
    said = ""
    while "curl" not in said:
        line = process.stdout.readline()
        assert line, log.read_text()
        said += line
    url = re.search(r"http://[\d.:]+", said)
    assert url is not None
    return Server(process, url[0], said)


@pytest.fixture(scope="module")
def server(
    smollm2_path: Path,  # noqa: ARG001
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    running = start(tmp_path_factory.mktemp("serve") / "log")
    yield running
    running.process.terminate()
    assert running.process.wait(PATIENCE) == 0


def ask(server: Server, text: str, **fields: Any) -> Any:
    fields = {"model": "smollm2-135m", "temperature": 0, "max_tokens": 24} | fields
    messages = [{"role": "user", "content": text}]
    return server.client.chat.completions.create(messages=messages, **fields)


def test_the_printed_curl_line_works(server: Server) -> None:
    line = next(line for line in server.said.splitlines() if "curl " in line)
    words = shlex.split(line)
    body = json.loads(words[words.index("-d") + 1])
    assert body["temperature"] < 1  # OpenAI's default lets so small a model go on and on
    assert body["max_tokens"] <= 200
    answer = httpx.post(words[1], json=body, timeout=120)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"]


def test_a_stream_joins_to_the_plain_answer_and_logprobs_to_both(server: Server) -> None:
    plain = ask(server, "Write one sentence about the sea.", logprobs=True, top_logprobs=3)
    text = plain.choices[0].message.content
    assert len(text) > 20
    chunks = list(
        ask(
            server,
            "Write one sentence about the sea.",
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    items = plain.choices[0].logprobs.content
    assert len(items) == plain.usage.completion_tokens
    for item in items:
        # Greedy: the chosen token is the most likely one.
        assert item.top_logprobs[0].token == item.token
        assert item.logprob == item.top_logprobs[0].logprob <= 0
        tops = [top.logprob for top in item.top_logprobs]
        assert tops == sorted(tops, reverse=True)


def test_a_stop_string_cuts_the_text(server: Server) -> None:
    whole = ask(server, "Count from one to ten.", max_tokens=40).choices[0].message.content
    stop = whole[8:12]
    cut = ask(server, "Count from one to ten.", max_tokens=40, stop=[stop]).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.message.content == whole[: whole.index(stop)]


def test_many_at_once_get_what_they_get_alone(server: Server) -> None:
    texts = [f"Tell me about the number {i}." for i in range(12)]
    alone = [ask(server, text).choices[0].message.content for text in texts[:4]]
    with ThreadPoolExecutor(12) as pool:
        crowd = list(pool.map(lambda text: ask(server, text, seed=1), texts))
    assert [answer.choices[0].message.content for answer in crowd[:4]] == alone
    sampled = [ask(server, "Hello", temperature=1, seed=9) for _ in range(2)]
    assert sampled[0].choices[0].message.content == sampled[1].choices[0].message.content


def test_a_second_question_finds_the_first_in_the_cache(server: Server) -> None:
    story = "A story about a ship. " * 12
    first = ask(server, story + "Who sails?", max_tokens=2)
    second = ask(server, story + "Who waits?", max_tokens=2)
    assert first.usage.prompt_tokens_details.cached_tokens < 32
    assert second.usage.prompt_tokens_details.cached_tokens >= 32


def test_echo_scores_the_prompt(server: Server) -> None:
    text = "The capital of France is Paris"
    answer = server.client.completions.create(
        model="smollm2-135m", prompt=text, echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    choice = answer.choices[0]
    assert choice.text.startswith(text)
    logprobs = choice.logprobs
    paris = logprobs.tokens.index(" Paris")
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[paris] > -2
    assert text[logprobs.text_offset[paris] :] == " Paris"


def test_a_client_that_leaves_frees_its_blocks(server: Server) -> None:
    assert server.wait_until_idle()
    before = server.gauge("generation_tokens_total")
    stream = ask(server, "Tell me a long story.", stream=True, max_tokens=1500)
    next(iter(stream))
    stream.close()
    assert server.wait_until_idle()
    assert server.gauge("generation_tokens_total") - before < 1500, "not to its end"


def test_sigterm_lets_a_stream_end(smollm2_path: Path, tmp_path: Path) -> None:  # noqa: ARG001
    own = start(
        tmp_path / "log", "--max-rows", "4", "--served-model-name", "tiny", "--drain", "300"
    )
    stream = iter(ask(own, "Tell me a story.", model="tiny", stream=True, max_tokens=60))
    chunks = [next(stream)]
    own.process.send_signal(signal.SIGTERM)
    chunks += list(stream)
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    assert own.process.wait(PATIENCE) == 0


def test_run_answers_and_reports(smollm2_path: Path) -> None:
    words = [sys.executable, "-m", "octavo.cli", "run", "-t", "0", "--max-tokens", "16"]
    environment = os.environ | {"NO_COLOR": "1"}
    text = "Say hello."
    done = subprocess.run(
        [*words, "--json", "-m", str(smollm2_path), text],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    report = json.loads(done.stdout)
    plain = subprocess.run(
        [*words, "-q", text], capture_output=True, text=True, check=True, env=environment
    )
    assert plain.stdout == report["text"] + "\n"
    assert report["completion_tokens"] <= 16
    assert plain.stderr == ""


@pytest.mark.usefixtures("smollm2_path")
def test_for_machines_all_that_is_said_is_json_from_the_first_line_to_the_last(
    tmp_path: Path,
) -> None:
    words = [sys.executable, "-m", "octavo.cli", "serve", "--port", "0", "--kv-memory", "64MiB"]
    log = tmp_path / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*words, "--log-format", "json"], stdout=subprocess.PIPE, stderr=errors, text=True
        )
    assert wait_for(lambda: '"serving"' in log.read_text())
    process.terminate()
    said, _ = process.communicate(timeout=PATIENCE)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert said == ""
    assert [lines[0]["event"], lines[-1]["event"]] == ["serving", "stopped"]
    assert lines[0]["model"] == "smollm2-135m"
    assert re.fullmatch(r"http://127.0.0.1:\d+", lines[0]["url"])
    assert "kv pool" in " ".join(lines[0]["facts"]).lower()
    assert (lines[-1]["requests"], lines[-1]["output_tokens"]) == (0, 0)
