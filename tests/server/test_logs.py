"""One line a request, as text or JSON: ids, counts and times, nobody's text; off the event loop."""

from __future__ import annotations

import io
import json
import logging
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.server import logs
from octavo.server.auth import Keys
from octavo.server.traces import Trace
from tests.server.house import PATIENCE, House, chat, completion, inside, outside
from tests.server.test_deadlines import slow, timed
from tests.server.test_life import CHAT

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def lines(style: str, level: str, *asked: tuple[str, str, Any]) -> list[str]:
    out = io.StringIO()
    with logs.written(style, level, out):
        async with inside(House()) as client:
            for method, path, body in asked:
                await client.request(method, path, json=body)
    return out.getvalue().splitlines()


async def test_a_request_is_one_line_of_json() -> None:
    (line,) = await lines("json", "info", ("POST", CHAT, chat("a secret", max_tokens=3)))
    found = json.loads(line)
    assert found["event"] == "request"
    assert found["level"] == "info"
    assert (found["status"], found["outcome"], found["path"]) == (200, "length", CHAT)
    assert found["output_tokens"] == 3
    assert found["total_ms"] >= found["ttft_ms"] >= found["queue_ms"] >= 0
    assert found["completion"].startswith("chatcmpl-")
    assert "secret" not in line


async def test_text_of_a_request_is_in_no_line_even_where_it_is_refused() -> None:
    bad = (
        ("POST", CHAT, chat("a secret") | {"temperature": "secret"}),
        ("POST", CHAT, chat("raise secret") | {"secret": 1}),
        ("POST", CHAT, {"model": "fake", "messages": [{"role": "user", "content": "raise"}]}),
        ("POST", "/v1/completions", completion("secret", max_tokens=10**6)),
        ("POST", CHAT, chat("secret", logit_bias={"260": 100})),
    )
    for style in ("json", "text"):
        text = "\n".join(await lines(style, "info", *bad))
        assert "secret" not in text
        assert "context_length_exceeded" in text


async def told(style: str, house: House, *bodies: Any, **headers: str) -> str:
    """The line of the last request to a house, as JSON or text."""
    out = io.StringIO()
    with logs.written(style, "info", out):
        async with inside(house, **headers) as client:
            for body in bodies:
                await client.post(CHAT, json=body)
    return out.getvalue().splitlines()[-1]


@pytest.mark.parametrize("wish", [{"x-slo-ttft-ms": "9000"}, {"x-slo-e2e-ms": "50000"}])
async def test_a_refusal_says_who_asked_for_what_and_what_was_forecast(wish: dict) -> None:
    def house() -> House:
        made = slow(timed())
        made.scheduler.expected["others"] = (0.0, 60.0)  # let in, and not added yet
        return made

    found = json.loads(await told("json", house(), chat("a secret", max_tokens=30), **wish))
    assert (found["status"], found["outcome"]) == (503, "slo_unattainable")
    assert found["said"].startswith("the deadlines asked for (")
    assert found["forecast_ttft_ms"] > 900
    assert found["retry_after_ms"] >= 1000
    assert found["body_bytes"] > 50
    assert found["client"]
    asked = {name.removeprefix("x-slo-").replace("-", "_"): float(ms) for name, ms in wish.items()}
    assert found["slo"] == asked
    if "x-slo-e2e-ms" in wish:  # the second gate has its tokens
        assert (found["prompt_tokens"], found["max_tokens"]) == (26, 30)
    line = await told("text", house(), chat("a secret", max_tokens=30), **wish)
    tokens = "26 tokens, 30 more wanted" if "x-slo-e2e-ms" in wish else " bytes  "
    for word in (tokens, "forecast ttft ", "slo_unattainable: the deadlines", "again in "):
        assert word in line, line
    assert found["client"] in line
    assert "secret" not in line


async def test_no_line_has_a_name_of_ours_that_is_no_code() -> None:
    """What the client was given as the error's code is what the log calls it."""
    odd = [("POST", "/v1/files", None), ("PUT", CHAT, None), ("POST", CHAT, {"model": "fake"}),
           ("POST", CHAT, chat("raise") | {"temperature": 3}),
           ("POST", "/v1/completions", {"model": "no", "prompt": ""})]  # fmt: skip
    found = [json.loads(line) for line in await lines("json", "info", *odd)]
    assert [line["outcome"] for line in found] == [
        "not_offered", "method_not_allowed", "invalid_value", "invalid_value", "model_not_found",
    ]  # fmt: skip
    assert [line.get("param") for line in found[2:]] == ["messages", "temperature", "model"]


async def test_a_key_that_has_its_share_is_named_with_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("desk desk-key-0123456789abcdef tpm=200\n")
    house = House(keys=Keys.read(str(path)))
    given = {"authorization": "Bearer desk-key-0123456789abcdef"}
    more = chat("x", max_tokens=400)
    found = json.loads(await told("json", house, chat("y"), more, **given))
    assert (found["status"], found["outcome"], found["key"]) == (429, "rate_limit_exceeded", "desk")
    assert found["said"]
    assert found["max_tokens"] == 400


async def test_a_field_of_a_strangers_choice_is_in_no_line() -> None:
    line = await told("json", House(strict=True), chat("x") | {"secret": 1})
    assert json.loads(line)["outcome"] == "unsupported_parameter"
    assert "secret" not in line


async def test_probes_are_said_at_debug_alone() -> None:
    asked = [("GET", path, None) for path in ("/health", "/ready", "/metrics", "/v1/models")]
    assert await lines("text", "info", *asked) == []
    assert len(await lines("text", "debug", *asked)) == 4
    (lost,) = await lines("text", "info", ("GET", "/nowhere", None))
    assert "404" in lost
    assert "not_found" in lost


async def test_a_strangers_path_cannot_forge_a_line() -> None:
    evil = "/x%0a12:00:00 200  POST%1b[31m"
    (line,) = await lines("text", "info", ("GET", evil, None))
    assert "\\n12:00:00" in line
    assert "\x1b" not in line
    (line,) = await lines("json", "info", ("GET", evil, None))
    assert json.loads(line)["path"].startswith("/x\n12")


def test_malformed_http_is_said_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "SPARSE_SECONDS", 3600.0)  # all that comes here comes within it
    out = io.StringIO()
    with logs.written("json", "info", out), outside(House(port=0)) as house:
        host, port = house.url.removeprefix("http://").split(":")
        for _ in range(30):
            with socket.create_connection((host, int(port)), timeout=PATIENCE) as made:
                made.sendall(b"NONSENSE\r\n\r\n")
                assert made.recv(100).startswith(b"HTTP/1.1 400")
        assert httpx.post(house.url + CHAT, json=chat(max_tokens=1)).status_code == 200
    said = [json.loads(line) for line in out.getvalue().splitlines()]
    broken = [line for line in said if "Invalid HTTP" in line.get("message", "")]
    assert len(broken) == 1
    assert said[-1]["message"] == "stopping: nothing runs"


def test_what_was_kept_back_in_a_second_is_counted_in_the_next() -> None:
    front, said = logs.Sparse(), []
    for created in (5.0, 5.25, 5.75, 6.0, 6.5, 7.5):
        record = logging.makeLogRecord({"levelno": logging.WARNING, "msg": "odd"})
        record.created = created
        if front.filter(record):
            said.append((created, record.getMessage()))
    assert said == [(5.0, "odd"), (6.0, "odd (2 more like it)"), (7.5, "odd (1 more like it)")]


class Stuck(io.StringIO):
    """A terminal that somebody stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()

    def write(self, text: str) -> int:
        self.free.wait(PATIENCE)
        return super().write(text)


async def test_a_stuck_terminal_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MOST_QUEUED", 4)
    out = Stuck()
    with logs.written("text", "info", out):
        async with inside(House()) as client:
            for _ in range(12):
                assert (await client.post(CHAT, json=chat(max_tokens=1))).status_code == 200
        assert out.getvalue() == ""
        out.free.set()
        while not logging.getLogger().handlers[-1].queue.empty():  # type: ignore[attr-defined]
            pass
        logging.getLogger("octavo").info("done")
    text = out.getvalue()
    assert "lines of the log were lost" in text
    assert text.count("POST") <= 6


def test_what_is_not_known_is_left_out() -> None:
    found = logs.facts(Trace("id", "GET", "/x", 1.0, status=404, finished=1.5))
    assert found == {"id": "id", "method": "GET", "path": "/x", "status": 404, "total_ms": 500.0}
