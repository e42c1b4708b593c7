"""Structured output."""

from __future__ import annotations

import json
import re
from typing import Any

from octavo.conformance.book import check
from octavo.conformance.probe import (
    CHAT,
    Probe,
    Unclear,
    error_of,
    first,
    need,
    optional,
    short,
    text_of,
)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASK = "Invent a person. Answer as JSON with name and age."


def _format(schema: Any) -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": {"name": "person", "strict": True, "schema": schema},
    }


def _person(probe: Probe, **fields: Any) -> dict[str, Any]:
    body = probe.chat_body(ASK, response_format=_format(PERSON), max_tokens=120, **fields)
    return optional("response_format json_schema", probe.post(CHAT, body))


@check(
    "json-schema",
    'json_schema with strict: the output "will match your supplied schema", or its finish_reason '
    "is length; whole and streamed.",
    "OpenAI spec, ResponseFormatJsonSchema; vllm#55313",
)
def json_schema(probe: Probe) -> str:
    answer = _person(probe)
    stream = probe.chat_stream(ASK, response_format=_format(PERSON), max_tokens=120)
    for reason, text in (
        (first(answer)["finish_reason"], text_of(answer)),
        (stream.finish(), stream.text()),
    ):
        need(not re.search(r"\s{64}", text), f"it writes white space: {short(text)!r}")
        if reason == "length":
            raise Unclear(f"cut by max_tokens: {short(text)}")
        value = json.loads(text)
        shaped = set(value) == {"name", "age"} and isinstance(value["name"], str)
        need(shaped and type(value["age"]) is int, f"it does not match: {text}")
    return short(text, 80)


@check(
    "json-object",
    'json_object "ensures the message the model generates is valid JSON".',
    "OpenAI spec, ResponseFormatJsonObject",
)
def json_object(probe: Probe) -> str:
    body = probe.chat_body(ASK, response_format={"type": "json_object"}, max_tokens=160)
    answer = optional("response_format json_object", probe.post(CHAT, body))
    text = text_of(answer)
    if first(answer)["finish_reason"] == "length":
        raise Unclear(f"cut by max_tokens: {short(text)}")
    need(isinstance(json.loads(text), dict), f"no object: {short(text)}")
    return short(text, 80)


@check(
    "bad-schema",
    "A schema that is none is a 400; the server stands.",
    "OpenAI's API as it answers; GHSA-85xf-c7hm-whqw",
    basis="practice",
)
def bad_schema(probe: Probe) -> str:
    _person(probe)
    for schema in (
        {"type": "objekt"},
        {"type": "object", "properties": 7},
        {"$ref": "#/nowhere"},
        {"type": "string", "pattern": "(["},
    ):
        answer = probe.post(CHAT, probe.chat_body(response_format=_format(schema), max_tokens=4))
        need(answer.status == 400, f"{schema}: {answer.status}: {short(answer.body)}")
        error_of(answer.json, answer.body)
    probe.chat(max_tokens=2)
    return "four bad schemas, 400 each"
