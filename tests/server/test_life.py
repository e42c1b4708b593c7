"""On real sockets: clients that leave, a house that is full, slow or closing, the openai client."""

from __future__ import annotations

import io
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from octavo.config import ServerConfig
from octavo.errors import InvalidRequest
from octavo.server import logs
from octavo.server.serve import bind, rehearse
from tests.server.fakes import FakeExecutor
from tests.server.house import PATIENCE, House, chat, completion, events, outside, wait_for

CHAT = "/v1/chat/completions"
LONG = {"max_tokens": 1500, "ignore_eos": True}


def raw(house: House, body: dict[str, Any]) -> socket.socket:
    """A request on a socket of its own, to be left at will."""
    host, port = house.url.removeprefix("http://").split(":")
    made = socket.create_connection((host, int(port)), timeout=PATIENCE)
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    made.sendall(head.encode() + data)
    return made


def running(house: House) -> float:
    return house.engine.snapshot()["running"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_blocks(stream: bool) -> None:
    with outside(House(FakeExecutor(seconds=0.003), port=0)) as house:
        client = raw(house, chat(stream=stream, **LONG))
        assert wait_for(lambda: running(house) == 1)
        if stream:
            assert b"200 OK" in client.recv(1000)
        client.close()
        assert house.idle()
        assert wait_for(lambda: house.app.service.occupancy.live == 0)
        assert house.engine.snapshot()["aborted"] == 1
        assert house.engine.snapshot()["output_tokens"] < LONG["max_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_line_of_a_client_that_left_says_how_far_it_came(stream: bool) -> None:
    out = io.StringIO()
    with (
        logs.written("json", "info", out),
        outside(House(FakeExecutor(seconds=0.003), port=0)) as house,
    ):
        client = raw(house, chat(stream=stream, **LONG))
        assert wait_for(lambda: house.engine.snapshot()["output_tokens"] > 5)
        client.close()
        assert house.idle()
    line = json.loads(out.getvalue().splitlines()[0])
    assert (line["status"], line["outcome"]) == (200 if stream else 499, "abort")
    assert line["output_tokens"] > 1
    assert line["total_ms"] >= line["ttft_ms"] >= line["queue_ms"] >= 0
    assert line["tpot_ms"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_asks_twice_at_once_and_leaves_frees_its_blocks(stream: bool) -> None:
    with outside(House(FakeExecutor(seconds=0.003), port=0)) as house:
        client = raw(house, chat(stream=stream, **LONG))
        data = json.dumps(chat(stream=stream, **LONG)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        client.sendall(head.encode() + data)  # pipelined: it waits for the first to be answered
        assert wait_for(lambda: running(house) == 1)
        client.close()
        assert house.idle()
        assert wait_for(lambda: house.app.service.occupancy.live == 0)
        assert house.engine.snapshot()["aborted"] == 1


def test_a_client_that_does_not_read_is_dropped() -> None:
    with outside(House(port=0, keepalive=0.2, send_timeout=0.3)) as house:
        body = chat(stream=True, n=8, logprobs=True, top_logprobs=20, **LONG)
        with raw(house, body):
            assert wait_for(lambda: house.executor.steps > 0)
            assert wait_for(lambda: house.app.service.occupancy.live == 0)
            assert house.idle()
        page = httpx.get(house.url + "/metrics").text
        assert 'octavo_requests_total{finish="abort"} 1.0' in page


def test_a_queued_client_that_leaves_never_runs() -> None:
    executor = FakeExecutor(seconds=0.01, blocks=100)  # the pool holds one long request
    with outside(House(executor, port=0)) as house:
        first = raw(house, chat("x" * 600, stream=True, **LONG | {"max_tokens": 900}))
        assert wait_for(lambda: running(house) == 1)
        second = raw(house, chat("y" * 1400, stream=True, **LONG | {"max_tokens": 100}))
        assert wait_for(lambda: house.engine.snapshot()["waiting"] == 1)
        second.close()
        assert wait_for(lambda: house.engine.snapshot()["waiting"] == 0)
        assert running(house) == 1
        assert house.engine.snapshot()["admitted"] == 1
        first.close()
        assert house.idle()


def test_a_full_house_says_when_to_come_back() -> None:
    with outside(House(FakeExecutor(seconds=0.01), port=0, max_queue=2)) as house:
        clients = [raw(house, chat(stream=True, **LONG)) for _ in range(2)]
        assert wait_for(lambda: running(house) == 2)
        answer = httpx.post(house.url + CHAT, json=chat())
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "server_overloaded"
        assert 1 <= int(answer.headers["retry-after"]) <= 120
        assert httpx.get(house.url + "/health").status_code == 200
        for client in clients:
            client.close()
        assert house.idle()
        assert wait_for(lambda: house.app.service.occupancy.live == 0)
        assert httpx.post(house.url + CHAT, json=chat()).status_code == 200


def test_a_silent_stream_gets_comments_before_its_first_token() -> None:
    executor, now = FakeExecutor(), [100.0]
    executor.gate.clear()
    body = chat(stream=True, max_tokens=2)
    with (
        outside(House(executor, clock=lambda: now[0], port=0, keepalive=0.1)) as house,
        httpx.stream("POST", house.url + CHAT, json=body) as answer,
    ):
        assert wait_for(lambda: any(ticket.touched for ticket in list(house.driver.tickets)))
        parts = answer.iter_text()
        for _ in range(4):
            now[0] += 0.1
            assert next(parts) == ": keep-alive\n\n", "one each time"
        executor.gate.set()
        rest = "".join(parts)
        assert ": keep-alive" not in rest
        assert events(rest)[-1] == "[DONE]"


def test_draining_finishes_what_runs_and_takes_nothing_new() -> None:
    executor = FakeExecutor()
    executor.gate.clear()
    with outside(House(executor, port=0)) as house, ThreadPoolExecutor() as pool:
        body = chat(stream=True, max_tokens=150, ignore_eos=True)
        work = pool.submit(httpx.post, house.url + CHAT, json=body)
        assert wait_for(lambda: running(house) == 1)
        house.shutdown()
        assert wait_for(lambda: httpx.get(house.url + "/ready").status_code == 503)
        assert httpx.get(house.url + "/health").status_code == 200
        refused = httpx.post(house.url + CHAT, json=chat())
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        executor.gate.set()
        assert events(work.result().text)[-1] == "[DONE]"
        assert wait_for(lambda: not _open(house))


def _open(house: House) -> bool:
    try:
        httpx.get(house.url + "/health")
    except httpx.TransportError:
        return False
    return True


@pytest.mark.parametrize("twice", [False, True])
def test_what_does_not_end_in_time_is_ended_with_an_error(twice: bool) -> None:
    drain = 60.0 if twice else 0.2
    house = House(FakeExecutor(seconds=0.01), port=0, drain=drain)
    with outside(house), ThreadPoolExecutor() as pool:
        post = lambda stream: httpx.post(  # noqa: E731
            house.url + CHAT, json=chat(stream=stream, **LONG)
        )
        stream, plain = pool.submit(post, True), pool.submit(post, False)
        assert wait_for(lambda: running(house) == 2)
        house.shutdown()
        if twice:
            time.sleep(0.1)
            assert running(house) == 2
            house.shutdown()
        assert "shutting down" in events(stream.result().text)[-1]["error"]["message"]
        assert plain.result().status_code == 503
        assert int(plain.result().headers["retry-after"]) >= 1
        assert house.idle()


def test_a_taken_port_is_said_in_one_line() -> None:
    with outside(House(port=0)) as house:
        port = int(house.url.rsplit(":", 1)[1])
        with pytest.raises(InvalidRequest, match="cannot bind"):
            bind(ServerConfig(port=port)).listen()


def test_other_addresses_need_keys() -> None:
    with pytest.raises(InvalidRequest, match="api-key-file"):
        ServerConfig(host="0.0.0.0")


def test_keep_alive_connections_are_reused() -> None:
    with outside(House(port=0)) as house, httpx.Client(base_url=house.url) as client:
        for stream in (True, False, True, False):
            assert client.post(CHAT, json=chat(stream=stream)).status_code == 200


def test_the_openai_client_is_at_home() -> None:
    with outside(House(port=0)) as house:
        client = openai.OpenAI(base_url=house.url + "/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["fake"]
        ask = {
            "model": "fake",
            "messages": [{"role": "user", "content": "hello"}],
            "temperature": 0,
            "max_completion_tokens": 20,
        }
        whole = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details.cached_tokens == 0
        assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
        stream = client.chat.completions.create(
            **ask, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
        legacy = client.completions.create(
            model="fake", prompt=["a", "b"], max_tokens=4, logprobs=1
        )
        assert [c.index for c in legacy.choices] == [0, 1]
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(**ask, extra_body={"top_k": -1})
        assert bad.value.param == "top_k"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="x")
        answer = whole.choices[0].message.model_dump(exclude_none=True)
        again = ask | {"messages": [*ask["messages"], answer, {"role": "user", "content": "go on"}]}
        assert client.chat.completions.create(**again).choices[0].message.content


def test_a_crowd_of_streams_all_end_and_leave_nothing() -> None:
    with outside(House(FakeExecutor(blocks=200), port=0)) as house:
        results: list[str] = []

        def one(index: int) -> None:
            body = completion(f"crowd {index}", stream=True, max_tokens=30)
            answer = httpx.post(house.url + "/v1/completions", json=body)
            results.append(answer.text)

        threads = [threading.Thread(target=one, args=(i,)) for i in range(60)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 60
        assert all(events(text)[-1] == "[DONE]" for text in results)
        assert house.idle()
        house.scheduler.check()


def test_a_template_is_compiled_before_anybody_asks_and_one_that_refuses_stops_no_server() -> None:
    seen: list[list[dict[str, str]]] = []

    def template(messages: list[dict[str, str]]) -> list[int]:
        seen.append(messages)
        raise InvalidRequest("this template wants a system message", "messages")

    rehearse(template)
    rehearse(None)
    assert [message["role"] for messages in seen for message in messages] == ["user"]
