"""/v1/embeddings as the official client sees it; the vectors are the fake model's states."""

from __future__ import annotations

import asyncio
import base64
import logging
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest

from octavo.server import logs
from tests.server.fakes import FakeExecutor, FakeTokenizer, _hash, fake_state
from tests.server.house import House, completion, inside, outside

URL = "/v1/embeddings"


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        outside(House(port=0)) as house,
        openai.OpenAI(base_url=house.url + "/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def ask(body: Any, house: House | None = None) -> httpx.Response:
    async def main() -> httpx.Response:
        async with inside(house or House()) as client:
            return await client.post(URL, json={"model": "fake"} | body)

    return asyncio.run(main())


def vector(ids: Sequence[int]) -> list[float]:
    """The state after the last token, at unit length, as float32."""
    state = 0
    for token in ids:
        state = _hash(state, token)
    raw = struct.unpack("<8f", fake_state(state))
    length = math.hypot(*raw)
    return [*struct.unpack("<8f", struct.pack("<8f", *[x / length for x in raw]))]


@pytest.mark.parametrize("form", ["float", "base64", None])
def test_each_text_has_the_vector_of_its_own_last_state(client: openai.OpenAI, form: Any) -> None:
    texts = ["one", "two words", "drei"]
    more = {} if form is None else {"encoding_format": form}
    made = client.embeddings.create(model="fake", input=texts, **more)
    ids = [FakeTokenizer().encode(text) for text in texts]
    vectors = [item.embedding for item in made.data]
    if form == "base64":
        vectors = [[*struct.unpack("<8f", base64.b64decode(item))] for item in vectors]
    assert vectors == [vector(each) for each in ids]
    assert [item.index for item in made.data] == [0, 1, 2]
    assert made.usage.prompt_tokens == made.usage.total_tokens == sum(map(len, ids))


def test_token_ids_are_embedded_as_they_are(client: openai.OpenAI) -> None:
    ids = FakeTokenizer().encode("hello")
    plain = client.embeddings.create(model="fake", input="hello").data[0].embedding
    assert client.embeddings.create(model="fake", input=ids).data[0].embedding == plain
    both = client.embeddings.create(model="fake", input=[ids, ids[:-1]]).data
    assert [item.embedding for item in both] == [plain, vector(ids[:-1])]


def test_the_answer_says_how_it_was_pooled() -> None:
    assert "last token" in ask({"input": "x"}).json()["pooling"]


def test_long_texts_small_steps_neighbours_and_a_full_cache_change_nothing() -> None:
    texts = ["ab" * 300, "ab" * 300 + "c", "x", "y" * 17]

    async def main() -> None:
        async with inside(House(FakeExecutor(blocks=120))) as client:
            busy = [
                client.post("/v1/completions", json=completion("z" * 99, ignore_eos=True, seed=i))
                for i in range(6)
            ]
            asked = [
                client.post(URL, json={"model": "fake", "input": [*texts, *texts]})
                for _ in range(3)
            ]
            answers = await asyncio.gather(*asked, *busy)
            for answer in answers[:3]:
                got = [item["embedding"] for item in answer.json()["data"]]
                assert got == [vector(FakeTokenizer().encode(t)) for t in texts] * 2

    asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [[1], "a"]}, "input"),
        ({"input": [10**6]}, "input"),
        ({"input": "x" * 3000}, "input"),
        ({"input": ["x"] * 5}, "input"),
        ({"input": "x", "dimensions": 4}, "dimensions"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "priority": 1}, "priority"),
        ({"input": "x", "model": "other"}, "model"),
    ],
)
def test_what_cannot_be_embedded_is_named(body: dict[str, Any], param: str) -> None:
    answer = ask(body, House(max_inputs=4))
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    assert answer.json()["error"]["param"] == param


def test_the_models_own_dimensions_may_be_asked_for() -> None:
    assert len(ask({"input": "x", "dimensions": 8}).json()["data"][0]["embedding"]) == 8


def test_of_texts_that_are_embedded_nothing_is_written_in_the_log_either() -> None:
    house, seen = House(), []

    async def main() -> None:
        house.app.over.append(seen.append)
        async with inside(house) as client:
            body = {"model": "fake", "input": ["hello", "world"]}
            assert (await client.post("/v1/embeddings", json=body)).status_code == 200

    asyncio.run(main())
    (trace,) = seen
    found = logs.facts(trace)
    assert found["prompt_tokens"] == trace.num_prompt > 0
    assert found["outcome"] == "stop"
    assert "output_tokens" not in found
    assert "max_tokens" not in found
    line = logs.Lines(False).format(logging.makeLogRecord({"trace": trace}))
    assert f" {trace.num_prompt} tokens " in line
    assert "length" not in line
