"""Whatever is wrong in a request, the refusal names the field, what it may be, and what came."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from octavo.core.request import SamplingParams
from octavo.errors import InvalidRequest
from octavo.server.embeddings import EmbeddingsBody
from octavo.server.messages import CountBody, MessagesBody
from octavo.server.protocol import ChatBody, CompletionBody
from octavo.server.responses import ResponsesBody
from octavo.server.tokens import DetokenizeBody, TokenizeBody
from tests.server.house import House, inside

BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountBody,
    "/v1/embeddings": EmbeddingsBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
SAID = [{"role": "user", "content": "hi"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "fake", "messages": SAID},
    "/v1/completions": {"model": "fake", "prompt": "hi"},
    "/v1/responses": {"model": "fake", "input": "hi"},
    "/v1/messages": {"model": "fake", "messages": SAID, "max_tokens": 3},
    "/v1/messages/count_tokens": {"model": "fake", "messages": SAID},
    "/v1/embeddings": {"model": "fake", "input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
}
TYPES = {"FunctionTool": {"type": "function", "name": "f"}, "Part": {"type": "text", "text": "x"},
         "InputPart": {"type": "text", "text": "x"}, "Block": {"type": "text", "text": "x"},
         "InputItem": {"role": "user"}, "Turn": {"role": "user", "content": "x"}}  # fmt: skip
BESIDE = {"output": {"type": "function_call_output", "call_id": "c"}}  # where it is looked at
ODD: tuple[Any, ...] = ("zzz-no-such", 98765.25, True, [[98765]])


def kinds(kind: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from kinds(one)
    else:
        yield kind


def takes(kind: inspect.Type, value: Any) -> bool:
    """Whether the value could be right, by its JSON type."""
    if isinstance(kind, inspect.LiteralType):
        return False
    names = {
        str: (inspect.StrType,),
        float: (inspect.FloatType,),
        bool: (inspect.BoolType,),
        list: (inspect.ListType,),
    }
    return isinstance(kind, names[type(value)])


def small(kind: inspect.Type) -> Any:
    """A value of a type, with as little in it as may be."""
    kind = next(one for one in kinds(kind) if not isinstance(one, inspect.NoneType))
    if isinstance(kind, inspect.StructType):
        made = {f.encode_name: small(f.type) for f in kind.fields if f.required}
        return made | TYPES.get(kind.cls.__name__, {})
    if isinstance(kind, inspect.LiteralType):
        return kind.values[0]
    plain = {inspect.StrType: "x", inspect.IntType: 1, inspect.FloatType: 1.0}
    return plain.get(type(kind), [] if isinstance(kind, inspect.ListType) else {})


def wrongs(kind: inspect.StructType) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """(fields of the struct, the path of one that is wrong, the wrong value), for each field of
    it and of what it holds."""
    for field in kind.fields:
        name, known = field.encode_name, list(kinds(field.type))
        odd = next(v for v in ODD if not any(takes(one, v) for one in known))
        yield {name: odd}, name, odd
        for one in known:
            inner, listed = one, isinstance(one, inspect.ListType)
            if isinstance(one, inspect.ListType):
                inner = next(iter(kinds(one.item_type)))
            if isinstance(inner, inspect.StructType) and inner.cls is not kind.cls:
                for fields, path, odd in wrongs(inner):
                    value = small(inner) | fields
                    at = f"{name}[0].{path}" if listed else f"{name}.{path}"
                    yield {name: [value] if listed else value} | BESIDE.get(name, {}), at, odd


@pytest.mark.parametrize("path", BODIES)
def test_a_field_of_the_wrong_kind_is_named_with_what_came(path: str) -> None:
    info = inspect.type_info(BODIES[path])
    assert isinstance(info, inspect.StructType)

    async def main() -> list[str]:
        bad = []
        async with inside(House()) as client:
            for fields, at, odd in wrongs(info):
                answer = await client.post(path, json=GOOD[path] | fields)
                error = answer.json().get("error", {})
                said = error.get("message", "")
                named = said.startswith(at) or f" {at}" in said or f"`{at}`" in said
                came = repr(odd) in said or json.dumps(odd) in said
                if answer.status_code not in (400, 404) or not named or not came:
                    bad.append(f"{at} = {odd!r}: {answer.status_code} {said or answer.text[:80]}")
        return bad[:9]

    assert asyncio.run(main()) == []


BEYOND: tuple[tuple[str, Any], ...] = (
    ("temperature", 987.5), ("temperature", -3), ("top_p", 987.5), ("top_p", -3), ("top_k", -3),
    ("min_p", 987.5), ("min_p", -3), ("typical_p", 987.5), ("typical_p", -3),
    ("repetition_penalty", -3), ("repetition_penalty", 987.5), ("presence_penalty", 987.5),
    ("frequency_penalty", -3), ("min_tokens", -3), ("n", 0), ("n", 987), ("seed", 2**70),
    ("max_tokens", 0), ("max_tokens", -3), ("max_tokens", 98765432100), ("top_logprobs", 987),
    ("max_completion_tokens", 0), ("max_completion_tokens", 98765432100),
    ("logit_bias", {"7": 987}), ("logit_bias", {"seven": 1}), ("logit_bias", {"98765": 1}),
    ("stop_token_ids", [1, 2, 3, 4, 5, 6, 7, 8, -987]), ("banned_token_ids", [98765]),
    ("allowed_token_ids", [2**33]), ("stop", ["a", "b", "c", "d", "e"]), ("stop", ""),
    ("service_tier", "urgent"), ("metadata", {"a" * 65: "b"}), ("metadata", {"a": "b" * 513}),
    ("metadata", {str(i): "b" for i in range(17)}), ("slo", {"ttft_ms": -3}),
    ("tool_choice", "required"), ("reasoning_effort", "low"), ("structured_outputs", {}),
    ("structured_outputs", {"regex": "a", "grammar": "b"}), ("stream_options", {}),
    ("structured_outputs", {"choice": []}),
)  # fmt: skip
SHOWN: dict[str, str] = {
    "logit_bias": "987 seven 98765", "stop_token_ids": "-987", "stop": "5 ''",
    "metadata": "65 513 17", "slo": "-3 --policy", "seed": str(2**70),
    "structured_outputs": "none grammar []", "stream_options": "null",
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BEYOND)
def test_a_value_out_of_bounds_is_named_with_the_bound(name: str, value: Any) -> None:
    async def main() -> Any:
        async with inside(House()) as client:
            path = "/v1/chat/completions"
            return await client.post(path, json=GOOD[path] | {"logprobs": True, name: value})

    answer = asyncio.run(main())
    assert answer.status_code == 400, answer.text
    said = answer.json()["error"]["message"]
    assert said.startswith(name), said
    given = SHOWN[name].split() if name in SHOWN else [repr(value).strip("[]")]
    assert any(word in said for word in given), said
    assert "()" not in said, "a caller of HTTP knows no tuples"
    assert "tuple" not in said
    bounds = ("[", "(", "at most", "at least", "one of", "needs", "character", "vocabulary", "no ")
    assert any(word in said for word in bounds), said


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ("/v1/chat/completions", "max_completion_tokens", 98765432100),
        ("/v1/responses", "max_output_tokens", 98765432100),
        ("/v1/messages", "max_tokens", 98765432100),
        ("/v1/messages", "stop_sequences", ["a", "b", "c", "d", "e"]),
        ("/v1/messages", "output_config", {"effort": "low"}),
        ("/v1/embeddings", "input", [98765]),
    ],
)
def test_a_field_is_called_as_its_own_api_calls_it(path: str, name: str, value: Any) -> None:
    async def main() -> Any:
        async with inside(House()) as client:
            return await client.post(path, json=GOOD[path] | {name: value})

    error = asyncio.run(main()).json()["error"]
    named = "thinking" if name == "output_config" else name
    assert error["param"] == named
    assert error["message"].startswith(named)


@pytest.mark.parametrize("path", BODIES)
def test_a_long_name_of_a_field_is_shortened(path: str) -> None:
    """Where it is not merely ignored: anywhere by a strict server, and in what is our own."""
    long, seen = "n" * 100_000, 0
    info = inspect.type_info(BODIES[path])
    assert isinstance(info, inspect.StructType)
    bodies: list[dict[str, Any]] = [{long: 1}]
    for field in info.fields:
        for one in kinds(field.type):
            if isinstance(one, inspect.StructType):
                bodies.append({field.encode_name: small(one) | {long: 1}})

    async def main() -> None:
        nonlocal seen
        for strict in (False, True):
            async with inside(House(strict=strict)) as client:
                for body in bodies:
                    answer = await client.post(path, json=GOOD[path] | body)
                    seen += "unknown field" in answer.text
                    assert len(answer.content) < 2000, (strict, list(body))

    asyncio.run(main())
    assert seen > 0


def test_a_long_value_is_shortened_and_a_long_list_shows_what_is_wrong_in_it() -> None:
    async def main() -> Any:
        async with inside(House()) as client:
            path = "/v1/chat/completions"
            return await client.post(path, json=GOOD[path] | {"top_p": "x" * 100_000})

    assert len(asyncio.run(main()).json()["error"]["message"]) < 120
    with pytest.raises(InvalidRequest, match=r"got -5$"):
        SamplingParams(banned_token_ids=(*range(100), -5))
    with pytest.raises(InvalidRequest, match=r"got \(7, 101\)$"):
        SamplingParams(logit_bias=(*((i, 1.0) for i in range(50)), (7, 101)))
