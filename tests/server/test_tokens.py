"""/tokenize, /detokenize and /load."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.server.fakes import BOS, VOCAB, FakeTokenizer, fake_template
from tests.server.house import House, inside


def ask(path: str, body: Any, house: House | None = None) -> tuple[int, dict[str, Any]]:
    async def main() -> tuple[int, dict[str, Any]]:
        async with inside(house or House()) as client:
            answer = await client.post(path, json=body)
            return answer.status_code, answer.json()

    return asyncio.run(main())


def test_text_becomes_the_tokens_that_completions_would_read_and_comes_back() -> None:
    status, found = ask("/tokenize", {"model": "fake", "prompt": "hé", "return_token_strs": True})
    ids = FakeTokenizer().encode("hé")
    assert status == 200
    assert found["tokens"] == ids
    assert (found["count"], found["max_model_len"]) == (len(ids), 2048)
    assert found["token_strs"] == ["<s>", "h", "\ufffd", "\ufffd"]
    assert ask("/detokenize", {"tokens": ids}) == (200, {"prompt": "<s>hé"})
    _, bare = ask("/tokenize", {"prompt": "hé", "add_special_tokens": False})
    assert bare["tokens"] == ids[1:]
    assert bare["token_strs"] is None


def test_messages_become_what_chat_would_read() -> None:
    messages = [{"role": "user", "content": "hello"}]
    _, found = ask("/tokenize", {"messages": messages})
    assert found["tokens"] == fake_template(messages)
    assert found["tokens"][0] == BOS


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/tokenize", {"prompt": "x", "chat_template": "{{x}}"}, "chat_template"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
def test_what_cannot_be_done_is_named(path: str, body: Any, param: str) -> None:
    status, found = ask(path, body)
    assert status == 400
    assert found["error"]["param"] == param


def test_an_unknown_field_is_named_here_too() -> None:
    async def main() -> None:
        async with inside(House()) as client:
            answer = await client.post("/tokenize", json={"prompt": "x", "foo": 1})
            assert answer.headers["x-octavo-ignored"] == "foo"
        async with inside(House(strict=True)) as client:
            answer = await client.post("/tokenize", json={"prompt": "x", "foo": 1})
            assert answer.json()["error"]["param"] == "foo"

    asyncio.run(main())


def test_a_full_house_counts_no_tokens_either() -> None:
    house = House(max_queue=1)
    house.app.service.occupancy.enter()
    assert ask("/tokenize", {"prompt": "x"}, house)[0] == 503


def test_load_tells_of_what_runs_and_of_an_empty_house_after_it() -> None:
    async def main() -> tuple[dict[str, Any], dict[str, Any]]:
        house = House()
        house.executor.gate.clear()
        async with inside(house) as client:
            body = {"model": "fake", "prompt": "x", "max_tokens": 60, "ignore_eos": True}
            work = asyncio.create_task(client.post("/v1/completions", json=body))
            busy = {"sequences_running": 0}
            while not busy["sequences_running"]:
                busy = (await client.get("/load")).json()
                await asyncio.sleep(0.01)
            house.executor.gate.set()
            await work
            await asyncio.to_thread(house.idle)
            return busy, (await client.get("/load")).json()

    busy, idle = asyncio.run(main())
    assert busy["server_load"] == busy["requests"] == 1
    assert busy["kv_blocks_held"] > 0
    assert 0 < busy["kv_usage"] < 1
    assert idle["requests"] == idle["sequences_running"] == idle["kv_blocks_held"] == 0
