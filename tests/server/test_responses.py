"""/v1/responses, as the official client sees it, and to the letter of its events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from octavo.core.request import NO_WAY, Event, FinishReason, SamplingParams
from octavo.errors import InvalidRequest
from octavo.server.dialect import Dialect
from octavo.server.reply import Asked, Head, Reply
from octavo.server.responses_shape import ResponsesShape
from octavo.server.responses_store import Kept, Shelf
from tests.server.fakes import FakeExecutor, FakeTokenizer, expected, expected_text, fake_template
from tests.server.house import House, chat, inside, outside
from tests.server.test_tools import NOW, ROME, WEATHER
from tests.server.test_tools import house as tools_house

URL = "/v1/responses"


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with outside(House(port=0)) as served:
        yield served


@pytest.fixture(scope="module")
def client(house: House) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=house.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(method: str, path: str, body: Any = None, house: House | None = None) -> httpx.Response:
    async def main() -> httpx.Response:
        async with inside(house or House()) as client:
            return await client.request(method, path, json=body)

    return asyncio.run(main())


def body(text: Any = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "input": text, "temperature": 0, "max_output_tokens": 40} | fields


def said(messages: list[dict[str, str]], most: int = 40) -> tuple[str, str, int]:
    """What the model says, by the oracle."""
    params = SamplingParams(temperature=0.0, max_tokens=most)
    return expected_text(expected(fake_template(messages), params))


def typed(text: str) -> list[tuple[str, dict[str, Any]]]:
    """(event, data) of an SSE body."""
    found = []
    for block in text.strip().split("\n\n"):
        event, data = block.split("\n")
        found.append((event.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_a_response_says_what_chat_says(client: openai.OpenAI) -> None:
    made = client.responses.create(**body(instructions="be brief"))
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    text, finish, tokens = said(turns)
    assert made.output_text == text
    assert made.status == ("completed" if finish == "stop" else "incomplete")
    assert made.usage is not None
    assert made.usage.output_tokens == tokens
    assert made.usage.input_tokens == len(fake_template(turns))
    assert made.usage.total_tokens == made.usage.input_tokens + tokens
    assert made.output[0].role == "assistant"
    assert (made.instructions, made.temperature, made.top_p) == ("be brief", 0.0, 1.0)
    assert made.id.startswith("resp_")


def test_a_cut_answer_is_incomplete_and_says_why(client: openai.OpenAI) -> None:
    made = client.responses.create(**body(max_output_tokens=2))
    assert made.status == "incomplete"
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.output[0].status == "incomplete"
    assert made.usage is not None
    assert made.usage.output_tokens == 2


def test_items_of_every_form_are_the_same_messages(client: openai.OpenAI) -> None:
    turns = [
        {"role": "user", "content": "one two"},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "four"},
    ]
    parts: list[Any] = [
        {"type": "input_text", "text": "one "},
        {"type": "input_text", "text": "two"},
    ]
    answer = {
        "type": "message",
        "id": "msg_1",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "three", "annotations": []}],
    }
    thought = {"type": "reasoning", "id": "rs_1", "summary": []}
    items: list[Any] = [{"role": "user", "content": parts}, thought, answer, turns[2]]
    assert client.responses.create(**body(items)).output_text == said(turns)[0]
    assert client.responses.create(**body(turns)).output_text == said(turns)[0]


def test_a_stream_builds_the_very_response_that_is_kept(client: openai.OpenAI) -> None:
    whole = client.responses.create(**body(), store=False)
    with client.responses.stream(**body()) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == [*range(len(events))]
    deltas = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert deltas == whole.output_text == final.output_text
    assert final.usage == whole.usage or final.usage is not None
    kept = client.responses.retrieve(final.id)
    assert kept.output_text == deltas
    assert kept.status == whole.status


def test_events_come_in_the_documented_order_and_name_their_places() -> None:
    answer = ask("POST", URL, body(stream=True))
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = typed(answer.text)
    kinds = [kind for kind, _ in events]
    deltas = kinds.count("response.output_text.delta")
    ended = events[-1][1]["response"]["status"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{ended}",
    ]
    assert deltas > 3
    assert all(data["type"] == kind for kind, data in events)
    item = events[2][1]["item"]["id"]
    for kind, data in events[3:-2]:
        assert (data["item_id"], data["output_index"], data["content_index"]) == (item, 0, 0), kind
    text = "".join(data["delta"] for kind, data in events if kind.endswith("text.delta"))
    last = events[-1][1]["response"]
    assert events[-4][1]["text"] == text == last["output"][0]["content"][0]["text"]
    assert events[-2][1]["item"] == last["output"][0]
    assert events[0][1]["response"]["status"] == "in_progress"
    assert events[0][1]["response"]["usage"] is None
    assert {k: v for k, v in last.items() if k not in ("id", "created_at", "output")} == {
        k: v
        for k, v in ask("POST", URL, body()).json().items()
        if k not in ("id", "created_at", "output")
    }


def test_logprobs_come_when_they_are_included(client: openai.OpenAI) -> None:
    wanted = body(include=["message.output_text.logprobs"], top_logprobs=2)
    made = client.responses.create(**wanted)
    entries = made.output[0].content[0].logprobs
    assert made.usage is not None
    assert len(entries) == made.usage.output_tokens
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    streamed = typed(ask("POST", URL, wanted | {"stream": True}).text)
    pieces = [e for kind, data in streamed if kind.endswith("delta") for e in data["logprobs"]]
    assert [piece["token"] for piece in pieces] == [entry.token for entry in entries]


def test_a_conversation_is_continued_from_what_was_kept(client: openai.OpenAI) -> None:
    first = client.responses.create(**body("one", instructions="not carried over"))
    second = client.responses.create(**body("two", previous_response_id=first.id))
    turns = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "two"},
    ]
    assert second.output_text == said(turns)[0]
    assert second.previous_response_id == first.id
    client.responses.delete(first.id)
    third = client.responses.create(**body("three", previous_response_id=second.id))
    turns += [
        {"role": "assistant", "content": second.output_text},
        {"role": "user", "content": "three"},
    ]
    assert third.output_text == said(turns)[0]


def test_what_is_not_kept_cannot_be_continued_or_shown(client: openai.OpenAI) -> None:
    loose = client.responses.create(**body(store=False))
    gone = client.responses.create(**body())
    client.responses.delete(gone.id)
    for id in (loose.id, gone.id, "resp_never"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(id)
        with pytest.raises(openai.NotFoundError):
            client.responses.delete(id)
        with pytest.raises(openai.BadRequestError) as bad:
            client.responses.create(**body(previous_response_id=id))
        assert bad.value.code == "previous_response_not_found"
        assert bad.value.param == "previous_response_id"


def test_a_key_sees_its_own_responses_alone(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("ann ann-0123456789abcdef\nbob bob-0123456789abcdef\n")

    async def main() -> None:
        house = House(api_key_file=str(file))
        async with inside(house) as client:
            ann = {"authorization": "Bearer ann-0123456789abcdef"}
            bob = {"authorization": "Bearer bob-0123456789abcdef"}
            made = await client.post(URL, json=body(), headers=ann)
            place = f"{URL}/{made.json()['id']}"
            assert (await client.get(place, headers=bob)).status_code == 404
            assert (await client.delete(place, headers=bob)).status_code == 404
            follow = body(previous_response_id=made.json()["id"])
            assert (await client.post(URL, json=follow, headers=bob)).status_code == 400
            assert (await client.post(URL, json=follow, headers=ann)).status_code == 200
            assert (await client.get(place, headers=ann)).json() == made.json()
            assert (await client.get(place)).status_code == 401

    asyncio.run(main())


def test_the_shelf_holds_so_many_and_so_much_and_drops_the_least_asked_for() -> None:
    shelf = Shelf(3, most_bytes=100)
    for name in "abc":
        shelf.put("me", name, Kept(b"", (), 10))
    assert shelf.find("me", "a") is not None
    shelf.put("me", "d", Kept(b"", (), 10))
    assert [name for name in "abcd" if shelf.find("me", name)] == ["a", "c", "d"]
    shelf.put("other", "x", Kept(b"", (), 90))
    shelf.put("me", "big", Kept(b"", (), 85))
    assert [name for name in ("a", "c", "d", "big") if shelf.find("me", name)] == ["d", "big"]
    shelf.put("me", "huge", Kept(b"", (), 101))
    assert not any(shelf.find("me", name) for name in ("d", "big", "huge"))
    assert shelf.find("other", "x") is not None


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": 3}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
    ),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"include": ["everything"]}, "include"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"truncation": "auto"}, "truncation"),
    ({"background": True}, "background"),
    ({"conversation": "c"}, "conversation"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
    ({"text": {"verbosity": "high"}}, "text.verbosity"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"metadata": {"a": "b" * 513}}, "metadata"),
    ({"model": "other"}, "model"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_field_is_named_as_this_api_calls_it(
    fields: dict[str, Any], param: str, stream: bool
) -> None:
    answer = ask("POST", URL, body(stream=stream) | fields)
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    assert answer.json()["error"]["param"] == param


def test_without_a_shelf_nothing_is_stored_and_nobody_is_told_it_is() -> None:
    made = ask("POST", URL, body(), House(max_stored=0)).json()
    assert made["store"] is False
    refused = ask("POST", URL, body(store=True), House(max_stored=0))
    assert refused.json()["error"]["param"] == "store"


def test_a_stream_that_fails_says_so_in_its_last_event() -> None:
    house = House(FakeExecutor())
    bad = ask("POST", URL, body(stream=True, logit_bias={"260": 100}), house)
    kind, data = typed(bad.text)[-1]
    assert kind == "response.failed"
    assert data["response"]["status"] == "failed"
    assert data["response"]["error"]["message"]
    assert data["response"]["usage"] is None


def test_chat_and_responses_share_prefix_and_sampling() -> None:
    async def main() -> tuple[Any, Any]:
        async with inside(House(tokenizer=FakeTokenizer())) as client:
            fields = {"temperature": 1.0, "seed": 5, "top_k": 7, "stop_token_ids": [3]}
            one = await client.post("/v1/chat/completions", json=chat("hi" * 40, **fields))
            two = await client.post(URL, json=body("hi" * 40, **fields))
            return one.json(), two.json()

    one, two = asyncio.run(main())
    text = two["output"][0]["content"][0]["text"]
    assert text == one["choices"][0]["message"]["content"]
    assert two["usage"]["input_tokens_details"]["cached_tokens"] > 0


FUNCTIONS = [
    {"type": "function", "name": "weather", "description": "of a city", "parameters": WEATHER},
    {"type": "function", "name": "now"},
]


def with_client(built: House, work: Any) -> Any:
    with (
        outside(built) as served,
        openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        return work(client)


def test_thoughts_text_and_calls_are_items_streamed_and_whole_alike() -> None:
    script = f"<think>\nhm, Rome\n</think>\n\nI look.\n{ROME}\n{NOW}"
    built = tools_house(script, Dialect("hermes", thinks=True), port=0)

    def work(client: openai.OpenAI) -> tuple[Any, Any, list[Any]]:
        asked = body(tools=FUNCTIONS, max_output_tokens=400)
        whole = client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            events = list(stream)
            return whole, stream.get_final_response(), events

    whole, final, events = with_client(built, work)
    for made in (whole, final):
        assert [item.type for item in made.output] == [
            "reasoning",
            "message",
            "function_call",
            "function_call",
        ]
        assert made.status == "completed"
        assert made.output[0].content[0].text == "hm, Rome"
        assert made.output_text == "I look."
        calls = made.output[2:]
        assert [call.name for call in calls] == ["weather", "now"]
        assert json.loads(calls[0].arguments) == {"city": "Rome"}
        assert len({call.call_id for call in calls}) == 2
        assert len({item.id for item in made.output}) == 4
        assert made.usage.output_tokens_details.reasoning_tokens > 0
    assert [event.sequence_number for event in events] == [*range(len(events))]
    arguments = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(arguments) == "".join(call.arguments for call in final.output[2:])
    thoughts = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
    assert "".join(thoughts) == "hm, Rome"
    added = [e.output_index for e in events if e.type == "response.output_item.added"]
    assert added == [e.output_index for e in events if e.type == "response.output_item.done"]
    assert added == [0, 1, 2, 3]


def test_what_tools_answered_goes_back_in() -> None:
    built = tools_house(ROME, port=0)

    def work(client: openai.OpenAI) -> None:
        first = client.responses.create(**body(tools=FUNCTIONS, max_output_tokens=400))
        (call,) = [item for item in first.output if item.type == "function_call"]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        follow = body([result], previous_response_id=first.id, tools=FUNCTIONS)
        by_id = client.responses.create(**follow)
        items = [{"role": "user", "content": "hello"}, call.model_dump(), result]
        by_items = client.responses.create(**body(items, tools=FUNCTIONS))
        assert by_id.usage is not None
        assert by_items.usage is not None
        assert by_id.usage.input_tokens == by_items.usage.input_tokens
        assert by_id.usage.input_tokens > first.usage.input_tokens

    with_client(built, work)


def test_a_call_may_be_forced_and_a_schema_held_to() -> None:
    def work(client: openai.OpenAI) -> None:
        one = {"type": "function", "name": "weather"}
        forced = client.responses.create(
            **body(tools=FUNCTIONS, tool_choice=one, max_output_tokens=400)
        )
        (call,) = [item for item in forced.output if item.type == "function_call"]
        jsonschema.validate(json.loads(call.arguments), WEATHER)
        form = {"type": "json_schema", "name": "w", "schema": WEATHER, "strict": True}
        held = client.responses.create(**body(max_output_tokens=400) | {"text": {"format": form}})
        jsonschema.validate(json.loads(held.output_text), WEATHER)
        with pytest.raises(openai.BadRequestError) as bad:
            client.responses.create(**body(tools=[{"type": "function", "name": "a b"}]))
        assert bad.value.param == "tools[0].name"

    with_client(tools_house(port=0), work)


def test_what_came_with_a_fault_is_sent_before_it() -> None:
    door = House().app.service.served.door
    request = door.request("r", [97], SamplingParams(max_tokens=9), arrival=0.0)
    asked = Asked(Head("id", 0, "fake", "fp"), FakeTokenizer(), stream=True)
    reply = Reply(asked, lambda asked, _: ResponsesShape(asked, {}, lambda _: None), [request])
    sent = reply.start()
    fault = Event("r", 0, finish=FinishReason.ERROR, error=NO_WAY + "no token is allowed")
    with pytest.raises(InvalidRequest) as caught:
        reply.feed([(0, Event("r", 0, (98,))), (0, fault)])
    events = [data for _, data in typed((sent + reply.failure(caught.value)).decode())]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert [e["delta"] for e in events if "delta" in e] == ["b"]
    assert events[-1]["type"] == "response.failed"
