"""Tool calls."""

from __future__ import annotations

import json
from typing import Any

from octavo.conformance.book import check
from octavo.conformance.probe import CHAT, Probe, Unclear, first, need, optional, short
from octavo.conformance.wire import Stream


def _function(name: str, about: str, field: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {field: {"type": "string", "maxLength": 24}},
        "required": [field],
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": about,
            "parameters": schema,
            "strict": True,
        },
    }


WEATHER = _function("weather", "The weather in a city.", "city")
ASK = "How is the weather in Paris?"
BOTH = "How is the weather in Paris, and how is it in Rome? Call weather for each of the two."


def offered(probe: Probe) -> dict[str, Any]:
    """A whole answer that calls a tool. Raises `NotOffered`, or `Unclear` if it calls none."""
    answer = optional("tools", probe.post(CHAT, _body(probe)))
    if not first(answer)["message"].get("tool_calls"):
        raise Unclear("no call was made where one was required (tool-choice-required)")
    return answer


def _body(probe: Probe, text: str = ASK, **fields: Any) -> dict[str, Any]:
    more = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 96}
    return probe.chat_body(text, **(more | fields))


def _stream(probe: Probe, text: str = ASK, **fields: Any) -> Stream:
    offered(probe)
    return probe.good_stream(CHAT, _body(probe, text, stream=True, **fields))


def _calls(stream: Stream) -> list[dict[str, Any]]:
    found = [call for c in stream.choices for call in c["delta"].get("tool_calls") or ()]
    need(found, f"no tool_calls in the stream: {short(stream.text())}")
    return found


@check(
    "tool-choice-required",
    'tool_choice: "required means the model must call one or more tools".',
    "OpenAI spec, ChatCompletionToolChoiceOption",
)
def choice_required(probe: Probe) -> str:
    message = first(optional("tools", probe.post(CHAT, _body(probe))))["message"]
    calls = message.get("tool_calls")
    need(calls, f"no tool_calls: {short(message)}")
    return short(calls)


@check(
    "tool-first-delta",
    'The first delta of a call has index, id, type "function" and function.name; the others index '
    "and function.arguments alone.",
    "OpenAI spec, ChatCompletionMessageToolCallChunk; as OpenAI streams it; sglang#5661",
)
def first_delta(probe: Probe) -> str:
    seen: set[int] = set()
    calls = _calls(_stream(probe))
    for call in calls:
        need(type(call.get("index")) is int, f"no index: {short(call)}")
        function = call.get("function") or {}
        if call["index"] in seen:
            extra = [name for name in ("id", "type") if call.get(name) is not None]
            need(not extra and not function.get("name"), f"a later delta: {short(call)}")
            continue
        seen.add(call["index"])
        whole = call.get("id") and call.get("type") == "function" and function.get("name")
        need(whole, f"the first delta: {short(call)}")
        need(isinstance(function.get("arguments", ""), str), f"arguments: {short(call)}")
    return f"{len(seen)} calls in {len(calls)} deltas"


@check(
    "tool-indexes",
    "The second call has index 1.",
    "OpenAI spec, ChatCompletionMessageToolCallChunk.index; lmdeploy#3412",
)
def indexes(probe: Probe) -> str:
    calls = _calls(_stream(probe, BOTH, parallel_tool_calls=True, max_tokens=160))
    ids = [call["id"] for call in calls if call.get("id")]
    if len(ids) < 2:
        raise Unclear("the model made one call where two were asked for")
    found = [call["index"] for call in calls if call.get("id")]
    need(found == list(range(len(ids))), f"indexes {found}")
    return f"indexes {found}"


@check(
    "tool-finish-reason",
    'finish_reason is "tool_calls if the model called a tool", whole and streamed.',
    "OpenAI spec, finish_reason; vllm#9209",
)
def finish(probe: Probe) -> str:
    whole = first(offered(probe))["finish_reason"]
    streamed = _stream(probe).finish()
    if "length" in (whole, streamed):
        raise Unclear("the call was cut by max_tokens")
    need(whole == streamed == "tool_calls", f"whole {whole!r}, streamed {streamed!r}")
    return "tool_calls both ways"


@check(
    "tool-arguments",
    "arguments are a text, of a strict function one that follows its schema; the pieces of a "
    "stream join to it; ids differ.",
    "OpenAI spec, ChatCompletionMessageToolCall.function.arguments: string; FunctionObject.strict",
)
def arguments(probe: Probe) -> str:
    answers = [first(offered(probe)) for _ in range(2)]
    calls = [call for choice in answers for call in choice["message"]["tool_calls"]]
    need(len({call["id"] for call in calls}) == len(calls), "two calls have the same id")
    texts = [call["function"]["arguments"] for call in calls]
    deltas = [call for call in _calls(_stream(probe)) if call["index"] == 0]
    texts.append("".join((call.get("function") or {}).get("arguments") or "" for call in deltas))
    for text in texts:
        need(isinstance(text, str), f"arguments are {type(text).__name__}: {short(text)}")
        try:
            value = json.loads(text)
        except ValueError:
            need(any(c["finish_reason"] == "length" for c in answers), f"no JSON: {text!r}")
            raise Unclear("the arguments were cut by max_tokens") from None
        need(set(value) == {"city"}, f"they do not fit the tool's schema: {text}")
    return short(texts[0])


@check(
    "tool-content-null",
    "content is null (not an empty text) when the message has only tool_calls.",
    "OpenAI spec, ChatCompletionResponseMessage.content: nullable",
    basis="practice",
)
def content_null(probe: Probe) -> str:
    message = first(offered(probe))["message"]
    need(message["content"] is None, f"content is {message['content']!r}")
    return "null"


@check(
    "tool-choice-none",
    '"none means the model will not call any tool and instead generates a message".',
    "OpenAI spec, ChatCompletionToolChoiceOption",
)
def choice_none(probe: Probe) -> str:
    optional("tools", probe.post(CHAT, _body(probe)))
    answer = probe.good(CHAT, _body(probe, tool_choice="none", max_tokens=32))
    choice = first(answer)
    need(not choice["message"].get("tool_calls"), f"it called: {short(choice['message'])}")
    need(choice["finish_reason"] in ("stop", "length"), f"finish {choice['finish_reason']!r}")
    return short(choice["message"]["content"], 60)
