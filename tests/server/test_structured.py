"""Structured output over HTTP: valid under the schema, streamed or not, and refused by name."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from octavo.errors import InvalidRequest
from octavo.grammar.trial import Trial
from tests.server.fakes import FakeExecutor
from tests.server.house import PATIENCE, House, chat, completion, events, inside, outside, wait_for

pytestmark = pytest.mark.anyio

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "sunny": {"type": "boolean"}},
    "required": ["city", "sunny"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def post(*bodies: dict[str, Any], path: str = "/v1/chat/completions", **house: Any) -> list[Any]:
    async def run() -> list[Any]:
        built = House(**house)
        async with inside(built) as client:
            answers = await asyncio.gather(*(client.post(path, json=body) for body in bodies))
        assert built.idle()
        return answers

    return asyncio.run(run())


def content(answer: Any, index: int = 0) -> str:
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][index]
    assert choice["finish_reason"] == "stop"
    return str(choice["message"]["content"])


def test_a_schema_holds_for_every_choice() -> None:
    body = chat(response_format=FORMAT, n=4, temperature=1, seed=3, max_tokens=300)
    (answer,) = post(body)
    texts = [content(answer, index) for index in range(4)]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) > 1


def test_a_stream_joins_to_the_whole_answer() -> None:
    body = chat(response_format=FORMAT, max_tokens=300)
    whole, stream = post(body, body | {"stream": True})
    pieces = [event["choices"][0] for event in events(stream.text)[:-1]]
    assert "".join(p["delta"].get("content", "") for p in pieces) == content(whole)
    assert pieces[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("asked", "check"),
    [
        ({"choice": ["left", "right"]}, lambda text: text in ("left", "right")),
        ({"regex": "[ab]{3}"}, lambda text: len(text) == 3 and set(text) <= {"a", "b"}),
        ({"json": SCHEMA}, lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None),
        ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
        ({"grammar": 'start: "x" "y"'}, lambda text: text == "xy"),
    ],
    ids=["choice", "regex", "json", "json_object", "grammar"],
)
def test_what_vllm_calls_structured_outputs(asked: dict[str, Any], check: Any) -> None:
    fields: dict[str, Any] = {"structured_outputs": asked, "max_tokens": 600}
    (answer,) = post(chat(**fields))
    assert check(content(answer))
    (answer,) = post(completion(**fields), path="/v1/completions")
    assert check(answer.json()["choices"][0]["text"])


def test_text_asks_for_nothing_and_a_cap_is_a_length() -> None:
    plain, asked = post(chat(), chat(response_format={"type": "text"}))
    assert plain.json()["choices"] == asked.json()["choices"]
    (cut,) = post(chat(response_format={"type": "json_object"}, max_tokens=1))
    assert cut.json()["choices"][0]["finish_reason"] == "length"


class Hurried(Trial):
    """Has no time for multiples of 999983, which take long, and all that others need."""

    def _ask(self, line: bytes) -> dict[str, Any] | None:
        self.seconds = 0.05 if b"999983" in line else PATIENCE
        return super()._ask(line)


HURRIED = Hurried()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
     "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}}},
     "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {
        "type": "integer", "multipleOf": 999983}}}}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
     "structured_outputs"),
    ({"response_format": {"type": "json_object"}, "min_tokens": 3}, "min_tokens"),
    ({"guided_json": {"type": "object"}}, "guided_json"),
    ({"grammar": "root ::= [a]"}, "grammar"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:70])
def test_what_cannot_be_kept_is_a_400_that_names_the_field(
    fields: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        (answer,) = post(chat(**fields, stream=stream), trial=HURRIED)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param


def test_neighbours_get_what_they_get_without_it() -> None:
    """Beside answers under grammars, beside one that its own fields make impossible, and beside
    schemas that do not compile in time, the others' texts are the same."""
    others = [chat(f"neighbour {i}", temperature=1, seed=i) for i in range(6)]
    alone = [answer.json()["choices"] for answer in post(*others)]
    impossible = chat(structured_outputs={"choice": ["a"]}, banned_token_ids=[97])
    slow = {"type": "integer", "multipleOf": 999983}
    slow = {"type": "json_schema", "json_schema": {"schema": slow}}
    bad = [chat(response_format=FORMAT), impossible, chat(response_format=slow)]
    answers = post(*bad, *others, executor=FakeExecutor(seconds=0.001), trial=HURRIED)
    assert [answer.json()["choices"] for answer in answers[3:]] == alone
    assert [answer.status_code for answer in answers[:3]] == [200, 400, 400]
    assert answers[1].json()["error"]["param"] == "structured_outputs"


def test_who_left_in_the_queue_of_grammars_holds_no_place() -> None:
    house, free = House(port=0), threading.Event()
    data = json.dumps(chat(response_format=FORMAT)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    service = house.app.service
    with outside(house):
        for _ in range(2):  # its threads
            service.compilers.submit(free.wait)
        sockets = [
            socket.create_connection(("127.0.0.1", int(house.url.rpartition(":")[2])))
            for _ in range(3)
        ]
        try:
            for one in sockets:
                one.sendall(head.encode() + data)
            assert wait_for(lambda: service.occupancy.live == 3)
            for one in sockets:
                one.close()
            assert wait_for(lambda: service.occupancy.live == 0)
        finally:
            free.set()
        assert httpx.post(house.url + "/v1/chat/completions", content=data).status_code == 200


SLOW = {"type": "integer", "multipleOf": 999983}


@contextlib.contextmanager
def held(house: House) -> Iterator[list[str]]:
    """No grammar that has 999983 in it is compiled before the end; whose turn came, in order."""
    free, begun = threading.Event(), []
    real = house.grammars.find

    def find(key: Any) -> Any:
        if "999983" in key[1]:
            begun.append(key[1])
            free.wait(PATIENCE)
            return InvalidRequest("it is slow")
        return real(key)

    house.grammars.find = find  # type: ignore[method-assign]
    try:
        yield begun
    finally:
        free.set()


def slowly(number: int = 0) -> dict[str, Any]:
    schema = SLOW | {"title": str(number)}
    return chat(response_format={"type": "json_schema", "json_schema": {"schema": schema}})


async def test_what_needs_no_compiler_never_waits_for_one(tmp_path: Path) -> None:
    """Bodies that name tools or a format, but need no grammar, or one that is compiled already;
    and of a tenant one grammar at a time, so that another one's is compiled meanwhile."""
    keys = tmp_path / "keys"
    keys.write_text("ann key-of-ann-0123456789\nbob key-of-bob-0123456789")
    ann, bob = ({"authorization": f"Bearer key-of-{n}-0123456789"} for n in ("ann", "bob"))
    house, path = House(api_key_file=str(keys)), "/v1/chat/completions"
    async with inside(house) as by:
        known = await by.post(path, json=chat(response_format=FORMAT), headers=ann)
        with held(house) as begun:
            waiting = [
                asyncio.create_task(by.post(path, json=slowly(i), headers=ann)) for i in range(6)
            ]
            while not begun:
                await asyncio.sleep(0.001)
            again = await by.post(path, json=chat(response_format=FORMAT), headers=ann)
            assert again.json()["choices"] == known.json()["choices"]
            for body in (
                chat(response_format={"type": "text"}),
                chat('"tools" "format"', tools=[]),
                chat("x" * 8000, max_tokens=1, response_format={"type": "text"}),
            ):
                assert (await by.post(path, json=body, headers=ann)).status_code in (200, 400)
            new = chat(structured_outputs={"choice": ["new", "newer"]})
            answer = await by.post(path, json=new, headers=bob)
            assert answer.json()["choices"][0]["message"]["content"] in ("new", "newer")
            assert len(begun) == 1, "one at a time of one tenant"
        for answer in await asyncio.gather(*waiting):
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "response_format"
            assert "it is slow" in answer.json()["error"]["message"]
        assert len(begun) == 6
        assert house.idle()


async def test_who_leaves_does_not_give_the_turn_to_another_grammar_of_its_own() -> None:
    house = House()
    async with inside(house):
        compiling, key = house.app.service.compiling, ("json", json.dumps(SLOW), True)
        with held(house) as begun:
            for _ in range(3):
                one = asyncio.create_task(compiling._compiled(key, "ann"))
                while not begun:
                    await asyncio.sleep(0.001)
                await asyncio.sleep(0.01)
                one.cancel()
            assert len(begun) == 1
        assert isinstance(await compiling._compiled(key, "ann"), InvalidRequest)
        assert len(begun) == 2
        del one  # its traceback has the turn
        await asyncio.sleep(0.01)
        gc.collect()
        assert not compiling._turns, "nothing is kept of who has no grammar in the works"


async def test_the_time_that_a_request_may_take_counts_its_grammar() -> None:
    house, path = House(), "/v1/chat/completions"
    async with inside(house) as by:
        with held(house) as begun:
            given = {"x-octavo-timeout-ms": "60000"}
            asking = asyncio.create_task(by.post(path, json=slowly(), headers=given))
            while not begun:
                await asyncio.sleep(0.001)
            house.later(60.0)
            late = await asking
            assert late.status_code == 504
            assert late.json()["error"]["code"] == "request_timeout"
            assert house.app.service.occupancy.live == 0
        assert house.idle()


BRACE = {"banned_token_ids": [ord("{")], "temperature": 0}
FAILS_LATER = (
    (
        "/v1/chat/completions",
        chat(response_format={"type": "json_object"}, **BRACE),
        "response_format",
    ),
    (
        "/v1/chat/completions",
        chat(structured_outputs={"json_object": True}, **BRACE),
        "structured_outputs",
    ),
    (
        "/v1/responses",
        {"model": "fake", "input": "x", "text": {"format": {"type": "json_object"}}, **BRACE},
        "text.format",
    ),
)


@pytest.mark.parametrize(("path", "body", "param"), FAILS_LATER, ids=range(len(FAILS_LATER)))
def test_a_grammar_that_finds_no_way_is_called_what_the_caller_calls_it(
    path: str, body: dict[str, Any], param: str
) -> None:
    (answer,) = post(body, path=path)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
