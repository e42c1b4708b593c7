"""LangChain, which knows nothing of us, at our door: chat, streams, tools, schemas, embeddings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from octavo.server.dialect import Dialect
from tests.server.house import House, outside
from tests.server.test_embeddings import vector
from tests.server.test_responses import said
from tests.server.test_tools import ROME, WEATHER
from tests.server.test_tools import house as tools_house

langchain = pytest.importorskip("langchain_openai")
messages = pytest.importorskip("langchain_core.messages")

from tests.server.fakes import FakeTokenizer  # noqa: E402

TURNS = [("system", "be brief"), ("human", "hello")]
PLAIN = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with outside(tools_house("", Dialect("hermes"), port=0)) as served:
        yield served


def model(house: House, **more: Any) -> Any:
    fields = {"model": "fake", "api_key": "none", "temperature": 0, "max_tokens": 40}
    return langchain.ChatOpenAI(base_url=house.url + "/v1", max_retries=0, **fields | more)


@pytest.mark.parametrize("responses", [False, True])
def test_an_answer_is_the_models_own_whole_and_streamed(house: House, responses: bool) -> None:
    chat = model(house, use_responses_api=responses)
    text, _, tokens = said(PLAIN)
    whole = chat.invoke(TURNS)
    assert whole.text == text
    assert whole.usage_metadata["output_tokens"] == tokens
    pieces = list(chat.stream(TURNS))
    assert len(pieces) > 3
    assert "".join(piece.text for piece in pieces) == text


@pytest.mark.parametrize("responses", [False, True])
def test_a_tool_is_called_and_its_answer_taken(responses: bool) -> None:
    with outside(tools_house(ROME, port=0)) as house:
        chat = model(house, use_responses_api=responses, max_tokens=400).bind_tools([TOOL])
        first = chat.invoke("hello")
        (call,) = first.tool_calls
        assert (call["name"], call["args"]) == ("weather", {"city": "Rome"})
        streamed = None
        for piece in chat.stream("hello"):
            streamed = piece if streamed is None else streamed + piece
        assert [c["args"] for c in streamed.tool_calls] == [{"city": "Rome"}]
        answer = messages.ToolMessage("sunny", tool_call_id=call["id"])
        second = chat.invoke([messages.HumanMessage("hello"), first, answer])
        assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]


@pytest.mark.parametrize("responses", [False, True])
def test_structured_output_is_valid(house: House, responses: bool) -> None:
    schema = WEATHER | {"title": "weather", "description": "of a city"}
    chat = model(house, use_responses_api=responses, max_tokens=400)
    found = chat.with_structured_output(schema, method="json_schema").invoke("hello")
    jsonschema.validate(json.loads(json.dumps(found)), WEATHER)


def test_texts_are_embedded(house: House) -> None:
    made = langchain.OpenAIEmbeddings(
        model="fake",
        base_url=house.url + "/v1",
        api_key="none",
        check_embedding_ctx_length=False,  # or it would cut texts with another model's tokenizer
    )
    texts = [f"text {i}" for i in range(5)]
    assert made.embed_documents(texts) == [vector(FakeTokenizer().encode(t)) for t in texts]
    assert made.embed_query("one") == vector(FakeTokenizer().encode("one"))
