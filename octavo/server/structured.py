"""`response_format` (OpenAI) and `structured_outputs` (vLLM): what an answer must be."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from octavo.core.request import StructuredOutputs
from octavo.errors import InvalidRequest

PARAM = "response_format"


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """strict: true and absent refuse what cannot be enforced; false ignores such keywords."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Structured(msgspec.Struct, forbid_unknown_fields=True):
    """Exactly one of these."""

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


def wanted(
    format: ResponseFormat | None, structured: Structured | None
) -> StructuredOutputs | None:
    """What the two fields ask for. Raises `InvalidRequest` naming the one that is wrong."""
    if structured is not None:
        if format is not None and format.type != "text":
            what = "response_format and structured_outputs: give one of them"
            raise InvalidRequest(what, "structured_outputs")
        choice = None if structured.choice is None else tuple(structured.choice)
        return StructuredOutputs(
            structured.json,
            bool(structured.json_object),
            structured.regex,
            choice,
            structured.grammar,
        )
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return StructuredOutputs(json_object=True, param=PARAM)
    given = format.json_schema
    if given is None:
        what = "response_format.json_schema is required with type json_schema"
        raise InvalidRequest(what, "response_format.json_schema")
    if given.schema is None:
        return StructuredOutputs(json_object=True, param=PARAM)
    return StructuredOutputs(json=given.schema, strict=given.strict is not False, param=PARAM)
