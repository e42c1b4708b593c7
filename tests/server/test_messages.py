"""Anthropic's /v1/messages, as its official client sees it, and to the letter of its events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import jsonschema
import pytest

from octavo.server.dialect import Dialect
from tests.server.fakes import FakeExecutor, fake_template
from tests.server.house import House, inside, outside
from tests.server.test_responses import said, typed
from tests.server.test_tools import NOW, ROME, WEATHER
from tests.server.test_tools import house as tools_house

URL = "/v1/messages"


@pytest.fixture(scope="module")
def client() -> Iterator[anthropic.Anthropic]:
    with (
        outside(House(port=0)) as house,
        anthropic.Anthropic(base_url=house.url, api_key="none", max_retries=0) as made,
    ):
        yield made


def ask(body: Any, house: House | None = None, path: str = URL, **headers: str) -> httpx.Response:
    async def main() -> httpx.Response:
        async with inside(house or House()) as client:
            return await client.post(path, json=body, headers=headers)

    return asyncio.run(main())


def body(text: Any = "hello", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "fake", "messages": messages, "temperature": 0, "max_tokens": 40} | fields


def asked(**fields: Any) -> dict[str, Any]:
    """For the client, which knows no temperature (any more)."""
    made = body(**fields)
    return made | {"extra_body": {"temperature": made.pop("temperature")}}


def test_a_message_says_what_chat_says(client: anthropic.Anthropic) -> None:
    made = client.messages.create(**asked(system="be brief"))
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    text, finish, tokens = said(turns)
    assert made.content[0].text == text
    assert made.stop_reason == ("end_turn" if finish == "stop" else "max_tokens")
    assert made.usage.output_tokens == tokens
    assert made.usage.input_tokens == len(fake_template(turns))
    assert made.usage.cache_read_input_tokens == 0
    assert (made.role, made.type, made.model) == ("assistant", "message", "fake")


def test_cached_tokens_are_counted_apart() -> None:
    async def main() -> list[dict[str, int]]:
        async with inside(House()) as client:
            answers = [await client.post(URL, json=body("hello " * 30)) for _ in range(2)]
            return [answer.json()["usage"] for answer in answers]

    first, second = asyncio.run(main())
    assert second["cache_read_input_tokens"] > 0
    total = second["input_tokens"] + second["cache_read_input_tokens"]
    assert total == first["input_tokens"]
    assert first["cache_read_input_tokens"] == 0


def test_blocks_of_text_are_joined_and_earlier_thoughts_left_out(
    client: anthropic.Anthropic,
) -> None:
    turns = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one two"},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "four"},
    ]
    cached = {"cache_control": {"type": "ephemeral"}}
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": t} for t in ("one ", "two")]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "three"},
            ],
        },
        {"role": "user", "content": [{"type": "text", "text": "four"} | cached]},
    ]
    system: Any = [{"type": "text", "text": "be brief"} | cached]
    made = client.messages.create(**asked() | {"messages": messages, "system": system})
    assert made.content[0].text == said(turns)[0]


def test_a_stream_builds_the_same_message(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**asked())
    with client.messages.stream(**asked()) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(pieces) > 3
    assert "".join(pieces) == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_events_come_in_the_documented_order() -> None:
    answer = ask(body(stream=True))
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = typed(answer.text)
    kinds = [kind for kind, _ in events]
    deltas = kinds.count("content_block_delta")
    assert deltas > 3
    assert kinds == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert all(data["type"] == kind for kind, data in events)
    start = events[0][1]["message"]
    assert start["content"] == []
    assert start["stop_reason"] is None
    assert start["usage"]["output_tokens"] == 0
    assert start["usage"]["input_tokens"] == events[-2][1]["usage"]["input_tokens"]
    assert events[-2][1]["delta"]["stop_reason"] in ("end_turn", "max_tokens")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_is_named_and_not_shown(stream: bool) -> None:
    text = ask(body()).json()["content"][0]["text"]
    stop = text[4:7]
    answer = ask(body(stop_sequences=["never said", stop], stream=stream))
    if stream:
        events = typed(answer.text)
        delta = events[-2][1]["delta"]
        shown = "".join(d["delta"]["text"] for k, d in events if k == "content_block_delta")
    else:
        delta = answer.json()
        shown = delta["content"][0]["text"]
    assert (delta["stop_reason"], delta["stop_sequence"]) == ("stop_sequence", stop)
    assert shown == text[: text.index(stop)]


def test_tokens_are_counted_as_they_are_used(client: anthropic.Anthropic) -> None:
    prompt = {k: v for k, v in body(system="s").items() if k in ("model", "messages", "system")}
    counted = client.messages.count_tokens(**prompt)
    assert counted.input_tokens == client.messages.create(**asked(system="s")).usage.input_tokens


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**6}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
    ({"stop_sequences": ["a", "b", "c", "d", "e"]}, "stop_sequences"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 1.1}, "temperature"),
    ({"top_k": -1}, "top_k"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"metadata": {"user_id": 5}}, "metadata.user_id"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_field_is_named_in_anthropics_shape(
    fields: dict[str, Any], param: str, stream: bool
) -> None:
    answer = ask(body(stream=stream) | fields)
    assert answer.status_code == 400, answer.text
    said = answer.json()
    assert said["type"] == "error"
    assert said["error"]["type"] == "invalid_request_error"
    assert said["error"]["param"] == param


def test_errors_have_the_clients_own_classes(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("ann ann-0123456789abcdef\n")
    with outside(House(port=0, api_key_file=str(file))) as house:
        good = anthropic.Anthropic(base_url=house.url, api_key="ann-0123456789abcdef")
        with pytest.raises(anthropic.NotFoundError):
            good.messages.create(**asked(model="other"))
        with pytest.raises(anthropic.BadRequestError):
            good.messages.create(**asked(max_tokens=0))
        assert good.messages.create(**asked()).content
        stranger = anthropic.Anthropic(base_url=house.url, api_key="wrong-0123456789abcdef")
        with pytest.raises(anthropic.AuthenticationError) as refused:
            stranger.messages.create(**asked())
        assert refused.value.body["error"]["type"] == "authentication_error"


def test_a_full_house_is_overloaded_and_says_when_to_return() -> None:
    house = House(max_queue=1)
    house.app.service.occupancy.enter()
    answer = ask(body(), house)
    assert answer.status_code == 529
    assert answer.json()["error"]["type"] == "overloaded_error"
    assert int(answer.headers["retry-after"]) >= 1


def test_a_stream_that_fails_says_so_in_its_last_event() -> None:
    bad = ask(body(stream=True, logit_bias={"260": 100}), House(FakeExecutor()))
    kind, data = typed(bad.text)[-1]
    assert (kind, data["type"]) == ("error", "error")
    assert data["error"]["type"] == "api_error"


TOOLS = [
    {"name": "weather", "description": "of a city", "input_schema": WEATHER},
    {"name": "now", "input_schema": {"type": "object"}},
]


def with_client(built: House, work: Any) -> Any:
    with (
        outside(built) as served,
        anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client,
    ):
        return work(client)


def test_thoughts_text_and_calls_are_blocks_streamed_and_whole_alike() -> None:
    script = f"<think>\nhm, Rome\n</think>\n\nI look.\n{ROME}\n{NOW}"
    built = tools_house(script, Dialect("hermes", thinks=True), port=0)

    def work(client: anthropic.Anthropic) -> tuple[Any, Any]:
        wanted = asked(tools=TOOLS, max_tokens=400)
        with client.messages.stream(**wanted) as stream:
            return client.messages.create(**wanted), stream.get_final_message()

    for made in with_client(built, work):
        assert [block.type for block in made.content] == [
            "thinking",
            "text",
            "tool_use",
            "tool_use",
        ]
        assert made.stop_reason == "tool_use"
        assert made.content[0].thinking == "hm, Rome"
        assert made.content[1].text == "I look."
        assert [block.name for block in made.content[2:]] == ["weather", "now"]
        assert [block.input for block in made.content[2:]] == [{"city": "Rome"}, {}]
        assert made.content[2].id != made.content[3].id


def test_what_tools_answered_goes_back_in() -> None:
    def work(client: anthropic.Anthropic) -> None:
        first = client.messages.create(**asked(tools=TOOLS, max_tokens=400))
        (call,) = [block for block in first.content if block.type == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
        turns: list[Any] = [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": [block.model_dump() for block in first.content]},
            {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
        ]
        second = client.messages.create(**asked(tools=TOOLS) | {"messages": turns})
        assert second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0) > (
            first.usage.input_tokens
        )

    with_client(tools_house(ROME, port=0), work)


def test_a_call_may_be_forced_and_a_schema_held_to() -> None:
    def work(client: anthropic.Anthropic) -> None:
        for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
            forced = client.messages.create(
                **asked(tools=TOOLS[:1], tool_choice=choice, max_tokens=400)
            )
            assert forced.stop_reason == "tool_use"
            jsonschema.validate(forced.content[0].input, WEATHER)
        form = {"format": {"type": "json_schema", "schema": WEATHER}}
        held = client.messages.create(**asked(output_config=form, max_tokens=400))
        jsonschema.validate(json.loads(held.content[0].text), WEATHER)
        with pytest.raises(anthropic.BadRequestError) as bad:
            client.messages.create(**asked(tools=[{"name": "a b", "input_schema": {}}]))
        assert bad.value.body["error"]["param"] == "tools[0].name"

    with_client(tools_house(port=0), work)


def test_thinking_is_switched_where_the_model_can_and_its_budget_is_said_to_be_unheard() -> None:
    thinker = Dialect("hermes", thinks=True, switch="enable_thinking")
    wish = {"type": "enabled", "budget_tokens": 1024}
    answer = ask(body(thinking=wish), tools_house("so</think>yes", thinker))
    assert [block["type"] for block in answer.json()["content"]] == ["thinking", "text"]
    assert answer.headers["x-octavo-ignored"] == "thinking.budget_tokens"
    refused = ask(body(thinking=wish))
    assert refused.json()["error"]["param"] == "thinking"
    assert ask(body(thinking={"type": "disabled"})).status_code == 200
