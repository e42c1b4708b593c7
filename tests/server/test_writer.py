"""Streams on a socket, where most steps are written past ASGI: nothing of them changes by it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from octavo.server.reply import Reply
from octavo.server.wire import Writer
from tests.server.fakes import FakeExecutor
from tests.server.house import PATIENCE, House, chat, completion, inside, outside
from tests.server.test_life import CHAT

ASKED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, chat("one", stream=True)),
    (CHAT, chat("two", stream=True, n=3, temperature=1, seed=7)),
    (CHAT, chat("three", stream=True, logprobs=True, top_logprobs=2)),
    (CHAT, chat("four", stream=True, stop=["e", "🙂"], stream_options={"include_usage": True})),
    ("/v1/completions", completion(["five", "six"], stream=True, echo=True, logprobs=1)),
    ("/v1/completions", completion("seven", stream=True, max_tokens=1)),
    ("/v1/responses", {"model": "fake", "input": "eight", "stream": True, "temperature": 0}),
    ("/v1/messages", {"model": "fake", "max_tokens": 40, "stream": True, "temperature": 0,
                      "messages": [{"role": "user", "content": "nine"}]}),
]  # fmt: skip
MADE_UP = ("id", "created", "created_at", "completed_at", "item_id", "obfuscation")


def plain(value: Any) -> Any:
    """Without what differs from one request to the next."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if k not in MADE_UP}
    return [plain(item) for item in value] if isinstance(value, list) else value


def said(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [plain(json.loads(line)) if line != "[DONE]" else line for line in lines]


async def through_asgi() -> list[str]:
    async with inside(House()) as client:
        return [(await client.post(path, json=body)).text for path, body in ASKED]


def test_a_stream_is_the_same_on_a_socket_as_through_asgi(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    write = Writer.write
    monkeypatch.setattr(Writer, "write", lambda *a: (written.append(a[1]), write(*a))[1])
    slow = asyncio.run(through_asgi())
    assert not written
    house = House(FakeExecutor(seconds=0.003), port=0)
    with outside(house), httpx.Client(base_url=house.url) as client:
        for (path, body), other in zip(ASKED, slow, strict=True):
            before = len(written)
            assert said(client.post(path, json=body).text) == said(other)
            if body.get("max_tokens") == 1:
                assert len(written) == before, "the first token and the end go through ASGI"
    assert len(written) > 50


def test_a_step_of_several_choices_is_one_write() -> None:
    with outside(House(FakeExecutor(seconds=0.01), port=0)) as house:
        body = completion("x", stream=True, n=3, ignore_eos=True, max_tokens=30)
        with httpx.stream("POST", house.url + "/v1/completions", json=body) as answer:
            pieces = [*answer.iter_raw()]
    each = [[c["choices"][0]["index"] for c in said(p.decode()) if c != "[DONE]"] for p in pieces]
    whole = [indices for indices in each if sorted(indices) == [0, 1, 2]]
    assert len(whole) > 15, each  # text is held back where it ends within a character


def test_a_fault_in_mid_stream_is_told_and_harms_no_neighbour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feed, broken = Reply.feed, threading.Event()

    def failing(reply: Reply, news: Any) -> bytes:
        if reply.num_tokens > 20 and reply.requests[0].params.max_tokens == 61:
            broken.set()
            raise RuntimeError("planted")
        return feed(reply, news)

    monkeypatch.setattr(Reply, "feed", failing)
    with outside(House(FakeExecutor(seconds=0.002), port=0)) as house:
        body = completion("fine", stream=True, max_tokens=60, ignore_eos=True)
        alone = httpx.post(house.url + "/v1/completions", json=body).text
        with ThreadPoolExecutor() as pool:
            post = lambda body: httpx.post(house.url + "/v1/completions", json=body).text  # noqa: E731
            beside = pool.submit(post, body)
            fails = pool.submit(post, body | {"max_tokens": 61})
        assert broken.is_set()
        told = said(fails.result())
        assert told[-1]["error"]["code"] == "internal_error"
        assert len(told) > 10
        assert told[:-1] == said(alone)[: len(told) - 1]
        assert said(beside.result()) == said(alone)
        assert house.idle()


def test_requests_that_come_before_the_last_answer_is_over_are_answered_in_turn() -> None:
    with outside(House(FakeExecutor(seconds=0.002), port=0)) as house:
        bodies = [
            completion(f"p{i}", stream=True, max_tokens=12, ignore_eos=True) for i in range(3)
        ]
        message = b""
        for body in bodies:
            data = json.dumps(body).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
            message += head % len(data) + data
        host, port = house.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as made:
            made.sendall(message)
            got = b""
            while got.count(b"data: [DONE]") < 3:
                part = made.recv(65536)
                assert part, got
                got += part
        with httpx.Client(base_url=house.url) as client:
            alone = [client.post("/v1/completions", json=body).text for body in bodies]
    for answer, other in zip(got.split(b"HTTP/1.1 200 OK")[1:], alone, strict=True):
        assert said(answer.decode()) == said(other)
