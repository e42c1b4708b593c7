"""What is refused, how it is said, and that it concerns nobody else."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.exceptions import HTTPException

from octavo.core.request import FinishReason
from octavo.errors import EngineError, InvalidRequest, Overloaded
from octavo.server.auth import Keys
from octavo.server.exchange import Bodies
from tests.server.fakes import BOOM, CHOKES, FakeExecutor
from tests.server.house import House, chat, completion, events, inside

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def ask(path: str, body: Any, house: House | None = None, **headers: str) -> httpx.Response:
    async def main() -> httpx.Response:
        async with inside(house or House()) as client:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await client.post(path, content=data, headers=headers)

    return asyncio.run(main())


def error_of(answer: httpx.Response) -> dict[str, Any]:
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] is None or isinstance(body["error"]["code"], str)
    return body["error"]


BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
        "messages[0].tool_calls[0].function",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"typical_p": 0}, "typical_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"seed": 2**70}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"100000": 1}}, "logit_bias"),
    ({"stop_token_ids": [99999]}, "stop_token_ids"),
    ({"banned_token_ids": [-1]}, "banned_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [1], "banned_token_ids": [1]}, "banned_token_ids"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": "yes"}, "stream"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"functions": [{}]}, "functions"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"store": "yes"}, "store"),
    ({"metadata": {"a": 5}}, "metadata"),
    ({"metadata": {"a": "b" * 513}}, "metadata"),
    ({"metadata": {"a" * 65: "b"}}, "metadata"),
    ({"metadata": {str(i): "b" for i in range(17)}}, "metadata"),
    ({"prompt_cache_retention": "7d"}, "prompt_cache_retention"),
    ({"verbosity": "low"}, "verbosity"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"service_tier": "urgent"}, "service_tier"),
    ({"slo": {"foo": 1}}, "slo.foo"),
    ({"priority": 1}, "priority"),
    ({"user": 5}, "user"),
    ({"best_of": 2}, "best_of"),
]

WORDS: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "usr", "content": "x"}]}, "system, developer, user, assistant, tool"),
    ({"response_format": {"type": "jsn"}}, "text, json_object, json_schema"),
    ({"reasoning_effort": "huge"}, "low, medium, high"),
    ({"service_tier": "fast"}, "priority, default, flex"),
    ({"stop": "x", "messages": [{"role": "usr", "content": "x"}]}, "got 'usr'"),
]


PLACES = [
    (CHAT, chat("x"), 2),
    (COMPLETIONS, completion("x"), 2),
    ("/v1/responses", {"model": "fake", "input": "x", "max_output_tokens": 3}, 2),
    ("/v1/messages", {"model": "fake", "messages": chat("x")["messages"], "max_tokens": 3}, 1),
]


@pytest.mark.parametrize(("path", "body", "most"), PLACES)
def test_a_temperature_may_be_what_the_api_says_and_no_more(
    path: str, body: dict[str, Any], most: int
) -> None:
    """OpenAI's reference: between 0 and 2; Anthropic's: from 0 to 1."""
    for good in (0, most, float(most)):
        assert ask(path, body | {"temperature": good}).status_code == 200
    for bad, words in ((most + 0.01, f"at most {most}"), (9, f"at most {most}"), (-1, "at least")):
        answer = ask(path, body | {"temperature": bad})
        assert answer.status_code == 400
        assert f"temperature must be {words}" in answer.json()["error"]["message"]


WRONG = ("usr", "jsn", "huge", "fast")


@pytest.mark.parametrize(("fields", "words"), WORDS)
def test_where_certain_words_may_stand_they_are_listed(fields: dict[str, Any], words: str) -> None:
    answer = ask(CHAT, chat("hi") | fields)
    assert answer.status_code == 400
    said = error_of(answer)["message"]
    assert all(word in said for word in words.split(", "))
    assert any(f"got {mark}{wrong}" in said for mark in ("", "'") for wrong in WRONG)


EMPTY: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": []}),
    (COMPLETIONS, {"prompt": []}),
    (COMPLETIONS, {"prompt": [[]]}),
    ("/v1/embeddings", {"input": []}),
    ("/v1/embeddings", {"input": [[]]}),
    ("/v1/responses", {"input": []}),
    ("/v1/messages", {"messages": [], "max_tokens": 5}),
]


@pytest.mark.parametrize(("path", "fields"), EMPTY)
def test_what_is_empty_is_said_to_be_empty(path: str, fields: dict[str, Any]) -> None:
    answer = ask(path, {"model": "fake"} | fields)
    assert answer.status_code == 400, answer.text
    said = answer.json()["error"]["message"]
    assert any(word in said for word in ("empty", "no tokens", "at least 1", "at least one")), said


def test_a_model_without_tools_names_those_that_have_them() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    answer = ask(CHAT, chat("hi") | {"tools": [tool]})
    assert "qwen2.5-coder-0.5b" in error_of(answer)["message"]


def test_a_path_that_is_none_tells_where_to_look() -> None:
    answer = ask("/v1", {})
    assert answer.status_code == 404
    assert "/v1/models" in error_of(answer)["message"]


BAD_COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "prompt"),
    ({"echo": True, "logprobs": 1, "n": 2}, "n"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [["a"]]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": [999999]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [2**40]}, "prompt"),
    ({"prompt": [2**80]}, "prompt"),
    ({"prompt": ["x"] * 65}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"max_completion_tokens": 3}, "max_completion_tokens"),
    ({"messages": []}, "messages"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHAT)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_chat_field_is_named(fields: dict[str, Any], param: str, stream: bool) -> None:
    body = chat(stream=stream) if param != "stream_options" else chat()
    answer = ask(CHAT, body | fields)
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETION)
def test_bad_completion_field_is_named(fields: dict[str, Any], param: str) -> None:
    answer = ask(COMPLETIONS, completion() | fields)
    assert answer.status_code == 400, answer.text
    got = error_of(answer)["param"]
    assert got is not None
    assert got.split("[")[0] == param


UNKNOWN: list[tuple[dict[str, Any], str, str]] = [
    ({"foo": 1}, "foo", "foo"),
    ({"foo": {"deep": [1]}, "bar": None}, "foo", "foo, bar"),
    (
        {"messages": [{"role": "user", "content": "x", "foo": 1}] * 2},
        "messages[0].foo",
        "messages[].foo",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache": 1}]}]},
        "messages[0].content[0].cache",
        "messages[].content[].cache",
    ),
    ({"a b\r\nset-cookie: x": 1}, "a b\r\nset-cookie: x", "a?b??set-cookie??x"),
    (
        {f"f{i}": i for i in range(40)},
        "f0",
        ", ".join(f"f{i}" for i in range(16)) + ", ...",
    ),
]


@pytest.mark.parametrize(("fields", "param", "named"), UNKNOWN)
def test_an_unknown_field_is_named_in_a_header_or_refused_if_strict(
    fields: dict[str, Any], param: str, named: str
) -> None:
    plain = ask(CHAT, chat())
    assert "x-octavo-ignored" not in plain.headers
    for stream in (False, True):
        answer = ask(CHAT, chat(stream=stream) | fields)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-octavo-ignored"] == named
        refused = ask(CHAT, chat(stream=stream) | fields, House(strict=True))
        assert refused.status_code == 400
        assert error_of(refused)["param"] == param


def test_what_is_wrong_beside_an_unknown_field_is_still_named() -> None:
    for bad, param in (({"top_p": 3}, "top_p"), ({"top_k": "x"}, "top_k"), ({"n": 0}, "n")):
        assert error_of(ask(CHAT, {"foo": 1} | chat() | bad))["param"] == param
        assert error_of(ask(CHAT, chat() | bad | {"foo": 1}))["param"] == param
    assert ask(CHAT, b'{"foo": 1, ' + b'"a":' * 5).status_code == 400
    assert ask(CHAT, b'{"foo": ' + b"[" * 100_000).status_code == 400


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"3",
        b"\xff",
        b'{"model": "\\ud800"}',
        b"[" * 100_000,
        b'{"model":"fake","messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"model":"fake","temperature":1e999,"messages":[{"role":"user","content":"x"}]}',
        b'{"model":"fake","temperature":NaN,"messages":[{"role":"user","content":"x"}]}',
    ],
)
def test_what_is_no_request_is_400(body: bytes) -> None:
    assert ask(CHAT, body).status_code == 400
    assert ask(COMPLETIONS, body).status_code == 400


def test_missing_fields_are_named() -> None:
    assert error_of(ask(CHAT, {"model": "fake"}))["param"] == "messages"
    assert error_of(ask(COMPLETIONS, {"model": "fake"}))["param"] == "prompt"
    assert error_of(ask(CHAT, {"messages": []}))["param"] == "model"


def test_harmless_values_of_refused_fields_pass() -> None:
    fields = {
        "store": False,
        "metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "safety_identifier": "me",
        "response_format": {"type": "text"},
        "tools": None,
        "user": "me",
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "n": None,
        "stop": None,
        "messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "ann"},
            {"role": "assistant", "content": None, "refusal": None, "tool_calls": None},
            {"role": "user", "content": "b"},
        ],
    }
    assert ask(CHAT, chat() | fields).status_code == 200


BESIDE: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"store": True}),
    (COMPLETIONS, {"store": True}),
    (CHAT, {"prompt_cache_retention": "24h"}),
    ("/v1/responses", {"prompt_cache_retention": "24h"}),
]


@pytest.mark.parametrize(("path", "fields"), BESIDE)
def test_what_is_asked_for_beside_the_answer_is_named_and_changes_nothing(
    path: str, fields: dict[str, Any]
) -> None:
    """To keep a copy, or the cache for longer: the answer is bit for bit the same without."""
    good = chat("x")["messages"] if path == CHAT else "x"
    name = {CHAT: "messages", COMPLETIONS: "prompt"}.get(path, "input")
    body = {"model": "fake", name: good, "seed": 5}
    plain, asked = ask(path, body), ask(path, body | fields)
    assert asked.status_code == 200, asked.text
    assert asked.headers["x-octavo-ignored"] == next(iter(fields))
    written = ("choices", "output")
    assert [plain.json().get(k) for k in written[:1]] == [asked.json().get(k) for k in written[:1]]
    refused = ask(path, body | fields, House(strict=True))
    assert refused.status_code == 400
    assert error_of(refused)["param"] == next(iter(fields))


ALWAYS_SENT: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"verbosity": "medium", "function_call": "none", "top_logprobs": 0}),
    (CHAT, {"function_call": "auto", "functions": [], "tool_choice": "auto", "tools": []}),
    ("/v1/responses", {"background": False, "max_tool_calls": 5, "reasoning": {"summary": "auto"}}),
    ("/v1/responses", {"include": ["web_search_call.action.sources", "file_search_call.results"]}),
    ("/v1/messages", {"mcp_servers": [], "service_tier": "auto", "max_tokens": 3}),
]


@pytest.mark.parametrize(("path", "fields"), ALWAYS_SENT)
def test_what_asks_for_what_happens_anyway_passes_even_if_strict(
    path: str, fields: dict[str, Any]
) -> None:
    good = {"input": "x"} if path == "/v1/responses" else {"messages": chat("x")["messages"]}
    answer = ask(path, {"model": "fake"} | good | fields, House(strict=True))
    assert answer.status_code == 200, answer.text
    assert "x-octavo-ignored" not in answer.headers


TIERED = (CHAT, COMPLETIONS, "/v1/embeddings", "/v1/responses")


@pytest.mark.parametrize("path", TIERED)
@pytest.mark.parametrize("tier", ["auto", "default", "flex", "priority", "scale"])
def test_a_tier_is_a_wish_and_the_answer_says_which_one_it_was(path: str, tier: str) -> None:
    """OpenAI's reference: `service_tier` of the response is the mode actually used, and may differ
    from the one that was asked for."""
    names = {CHAT: "messages", COMPLETIONS: "prompt"}
    body = {"model": "fake", names.get(path, "input"): "x" if path != CHAT else chat()["messages"]}
    answer = ask(path, body | {"service_tier": tier})
    assert answer.status_code == 200, answer.text
    assert answer.json()["service_tier"] == "default"
    if path != "/v1/responses":  # whose responses always say so
        assert "service_tier" not in ask(path, body).json()
    if path in (CHAT, COMPLETIONS):
        streamed = ask(path, body | {"service_tier": tier, "stream": True}).text
        chunks = [line for line in streamed.splitlines() if line.startswith("data: {")]
        assert chunks
        assert all('"service_tier":"default"' in line for line in chunks)


def test_unknown_model_is_404() -> None:
    for path, body in ((CHAT, chat(model="gpt-9")), (COMPLETIONS, completion(model="gpt-9"))):
        answer = ask(path, body)
        assert answer.status_code == 404
        assert error_of(answer)["code"] == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, chat("x" * 3000), "messages"),
        (CHAT, chat(max_tokens=3000), "max_tokens"),
        (
            CHAT,
            chat() | {"max_tokens": None, "max_completion_tokens": 3000},
            "max_completion_tokens",
        ),
        (COMPLETIONS, completion("x" * 3000), "prompt"),
        (COMPLETIONS, completion(["x", "x" * 3000]), "prompt"),
    ],
)
def test_overflow_is_400_before_any_byte(
    stream: bool, path: str, body: dict[str, Any], param: str
) -> None:
    answer = ask(path, body | {"stream": stream})
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    error = error_of(answer)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "2048" in error["message"]


def test_a_model_without_a_template_says_so() -> None:
    answer = ask(CHAT, chat(), House(template=None))
    assert answer.status_code == 400
    assert "chat template" in error_of(answer)["message"]


def test_bodies_on_their_way_have_a_limit_together() -> None:
    """Clients that send most of a body and wait cannot fill the memory; nor do they keep places."""

    async def main() -> None:
        bodies = Bodies(100, 250)
        wait = asyncio.Event()

        async def slow() -> bytes | None:
            parts = iter([b"x" * 60, b"y" * 40])

            async def receive() -> Any:
                part = next(parts)
                if part[:1] == b"y":
                    await wait.wait()
                    return {"type": "http.request", "body": part, "more_body": False}
                return {"type": "http.request", "body": part, "more_body": True}

            return await bodies.read({"headers": []}, receive)

        async def whole(size: int) -> bytes | None:
            async def receive() -> Any:
                return {"type": "http.request", "body": b"z" * size, "more_body": False}

            return await bodies.read({"headers": []}, receive)

        tasks = [asyncio.create_task(slow()) for _ in range(4)]
        await asyncio.sleep(0)
        assert bodies.held == 240
        with pytest.raises(Overloaded):
            await whole(11)
        with pytest.raises(HTTPException):
            await whole(101)
        assert await whole(10) == b"z" * 10
        tasks[0].cancel()
        tasks[1].cancel()
        await asyncio.sleep(0)
        assert bodies.held == 120
        wait.set()
        assert await tasks[2] == await tasks[3] == b"x" * 60 + b"y" * 40
        assert bodies.held == 0

    asyncio.run(main())


def test_a_body_beyond_the_cap_is_413() -> None:
    house = House(max_body=1000)
    assert ask(CHAT, chat("x" * 2000), house).status_code == 413


def test_request_id_comes_back_and_is_not_ours_to_use() -> None:
    answer = ask(CHAT, chat(), **{"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert "mine-1" not in answer.text
    assert ask(CHAT, chat(foo=1), **{"x-request-id": "mine-2"}).headers["x-request-id"] == "mine-2"
    odd = ask(CHAT, chat(), **{"x-request-id": "x" * 200}).headers["x-request-id"]
    assert odd != "x" * 200


def test_small_endpoints() -> None:
    async def main() -> None:
        async with inside(House()) as client:
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "fake"
            assert (await client.get("/v1/models/fake")).json()["object"] == "model"
            assert (await client.get("/v1/models/a/b")).status_code == 404
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/ready")).status_code == 200
            assert (await client.get("/version")).json() == {"version": "0.0"}
            assert (await client.get("/nothing")).status_code == 404
            assert (await client.get(CHAT)).status_code == 405
            await client.post(CHAT, json=chat())
            await client.post(CHAT, json=chat(stream=True))
            page = (await client.get("/metrics")).text
            assert 'octavo_http_requests_total{path="/v1/chat/completions",status="200"} 2' in page
            assert "octavo_time_to_first_token_seconds_count 2" in page
            assert "octavo_request_duration_seconds_count 2" in page
            assert "octavo_queue_time_seconds_count 2" in page
            assert 'path="/v1/models/{id}"' in page
            assert "octavo_kv_blocks 512" in page
            assert "octavo_generation_tokens_total" in page

    asyncio.run(main())


# ---- keys ----------------------------------------------------------------------------------------


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text("# ours\nann aaaaaaaaaaaaaaaa1\n\nbbbbbbbbbbbbbbbb2  # the other\n")
    return str(path)


def test_keys_are_asked_for_everywhere_but_at_the_probes(key_file: str) -> None:
    async def main() -> None:
        async with inside(House(api_key_file=key_file)) as client:
            for path in ("/v1/models", "/v1/models/x", "/metrics", "/version", "/nothing"):
                for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": "x"}):
                    answer = await client.get(path, headers=given)
                    assert answer.status_code == 401
                    assert error_of(answer)["code"] == "invalid_api_key"
            assert (await client.post(CHAT, json=chat())).status_code == 401
            for path in ("/health", "/ready"):
                assert (await client.get(path)).status_code == 200
            for key in ("aaaaaaaaaaaaaaaa1", "bbbbbbbbbbbbbbbb2"):
                given = {"authorization": f"Bearer {key}"}
                assert (await client.get("/v1/models", headers=given)).status_code == 200

    asyncio.run(main())


def test_each_key_has_its_own_prefix_cache(key_file: str) -> None:
    async def main() -> list[int]:
        seen = []
        async with inside(House(api_key_file=key_file)) as client:
            for key in ("aaaaaaaaaaaaaaaa1", "aaaaaaaaaaaaaaaa1", "bbbbbbbbbbbbbbbb2"):
                given = {"authorization": f"Bearer {key}"}
                answer = await client.post(CHAT, json=chat("x" * 100), headers=given)
                seen.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        return seen

    first, again, other = asyncio.run(main())
    assert first == other == 0
    assert again > 0


@pytest.mark.parametrize("text", ["", "# nothing\n", "short\n", "a b cccccccccccccccccccc\n"])
def test_a_bad_key_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(InvalidRequest):
        Keys.read(str(path))
    with pytest.raises(InvalidRequest):
        Keys.read(str(tmp_path / "missing"))


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        ("http://evil.example", "127.0.0.1:8000", 403),
        ("http://evil.example:8000", "evil.example:8000", 403),
        ("null", "127.0.0.1:8000", 403),
        ("http://[", "[", 403),
        ("http://127.0.0.1:8000", "127.0.0.1:8000", 200),
        ("http://localhost:8000", "localhost:8000", 200),
    ],
)
def test_pages_of_other_sites_are_kept_out(origin: str, host: str, status: int) -> None:
    assert ask(CHAT, chat(), origin=origin, host=host).status_code == status


# ---- blast radius --------------------------------------------------------------------------------


class BadWatcher:
    """Raises at its third token."""

    def __init__(self, text: Any) -> None:
        self.count = 0

    def advance(self, tokens: Any) -> tuple[int, FinishReason | None]:
        self.count += len(tokens)
        if self.count >= 3:
            raise RuntimeError("the watcher failed")
        return len(tokens), None

    def mask(self, position: int) -> bytes | None:
        return None

    def ahead(self, draft: Any) -> list[None]:
        return [None] * len(draft)

    def forced(self) -> tuple[int, ...]:
        return ()


def neighbours_are_unmoved(bad: dict[str, Any], path: str, status: int) -> None:
    """Eight requests beside `bad` get what they get without it; the server goes on."""
    texts = [f"neighbour {i}" for i in range(8)]

    async def run(with_bad: bool) -> list[str]:
        house = House(FakeExecutor(seconds=0.001))
        async with inside(house) as client:
            jobs = [client.post(CHAT, json=chat(text)) for text in texts]
            if with_bad:
                jobs += [
                    client.post(path, json=bad),
                    client.post(path, json=bad | {"stream": True}),
                ]
            answers = await asyncio.gather(*jobs)
            for answer in answers[8:9]:
                assert answer.status_code == status, answer.text
                error_of(answer)
            for answer in answers[9:]:
                if answer.status_code == 200:
                    last = events(answer.text)[-1]
                    assert "error" in last
                    assert "[DONE]" not in answer.text
            assert (await client.get("/health")).status_code == 200
        assert house.idle()
        house.scheduler.check()
        return [a.json()["choices"][0]["message"]["content"] for a in answers[:8]]

    assert asyncio.run(run(True)) == asyncio.run(run(False))


def test_a_watcher_that_raises_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.door.StopWatcher", BadWatcher)
    neighbours_are_unmoved(chat("bad", stop="x", ignore_eos=True), CHAT, 500)


@pytest.mark.parametrize("stream", [False, True])
def test_one_choice_that_fails_ends_its_siblings(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    made: list[BadWatcher] = []

    def watcher(text: Any) -> Any:
        made.append(BadWatcher(text))
        made[-1].count = 0 if len(made) == 1 else -(10**6)
        return made[-1]

    monkeypatch.setattr("octavo.door.StopWatcher", watcher)
    house = House(FakeExecutor(seconds=0.002))

    async def main() -> None:
        async with inside(house) as client:
            body = chat(n=4, stop="x", max_tokens=1500, ignore_eos=True, stream=stream)
            answer = await client.post(CHAT, json=body)
            assert answer.status_code == (200 if stream else 500)
            assert house.idle()
            counted = house.engine.snapshot()
            assert counted["aborted"] == 3
            assert counted["output_tokens"] < 1500, "not to their ends"

    asyncio.run(main())


def test_a_tokenizer_that_raises_fails_alone() -> None:
    bad = completion("bad", logit_bias={str(BOOM): 100})
    neighbours_are_unmoved(bad, COMPLETIONS, 500)


def test_a_template_that_raises_fails_alone() -> None:
    neighbours_are_unmoved(chat("raise"), CHAT, 500)


def test_a_row_that_fails_in_the_executor_fails_alone() -> None:
    bad = chat("bad", allowed_token_ids=[CHOKES])
    neighbours_are_unmoved(bad, CHAT, 500)


def test_a_lost_engine_tells_everybody_and_health_says_no() -> None:
    async def main() -> None:
        house = House(FakeExecutor(seconds=0.005))
        async with inside(house) as client:
            long, tickets = {"max_tokens": 1500, "ignore_eos": True}, house.driver.tickets
            plain = asyncio.create_task(client.post(CHAT, json=chat("a", **long)))
            stream = asyncio.create_task(client.post(CHAT, json=chat("b", stream=True, **long)))
            while not (len(tickets) == 2 and any(ticket.touched for ticket in tickets)):
                await asyncio.sleep(0.001)
            house.executor.fail = EngineError("the device is gone")
            answer = await plain
            assert answer.status_code == 500
            assert "the device is gone" in error_of(answer)["message"]
            assert "the device is gone" in events((await stream).text)[-1]["error"]["message"]
            assert (await client.get("/health")).status_code == 503
            assert (await client.get("/ready")).status_code == 503
            assert (await client.post(CHAT, json=chat())).status_code == 500

    asyncio.run(main())


PACKED = gzip.compress(json.dumps(chat()).encode())


@pytest.mark.parametrize(
    "path",
    [
        CHAT,
        COMPLETIONS,
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
        "/tokenize",
        "/v1/files",
    ],
)
@pytest.mark.parametrize("encoding", ["gzip", "br", "gzip, identity", "zstd"])
def test_a_body_that_would_have_to_be_unpacked_is_refused_in_plain_words(
    path: str, encoding: str
) -> None:
    refused = ask(path, PACKED, **{"content-encoding": encoding})
    assert refused.status_code == 415
    error = refused.json()["error"]
    assert error["code"] == "content_encoding_not_supported"
    assert f"content-encoding {encoding!r}" in error["message"]
    assert refused.headers["accept-encoding"] == "identity"


def test_an_encoding_that_is_none_is_fine() -> None:
    assert ask(CHAT, chat(), **{"content-encoding": "Identity"}).status_code == 200


def test_a_slash_at_the_end_of_a_path_means_nothing(tmp_path: Path) -> None:
    """Not to who may enter either."""
    keys = tmp_path / "keys"
    keys.write_text("one one-key-of-sixteen-letters\nop op-key-of-sixteen-letters admin\n")

    async def main() -> None:
        async with inside(House()) as client:
            for path in ("/metrics", "/v1/models", "/v1/models/fake", "/health", "/ready", "/load",
                         "/version", "/docs", "/openapi.json"):  # fmt: skip
                plain, slashed = await client.get(path), await client.get(path + "/")
                assert (plain.status_code, slashed.status_code) == (200, 200), path
                assert slashed.headers["content-type"] == plain.headers["content-type"]
            assert (await client.post(CHAT + "/", json=chat())).status_code == 200
            assert (await client.get("/nowhere/")).status_code == 404
        async with inside(House(api_key_file=str(keys))) as client:
            one = {"authorization": "Bearer one-key-of-sixteen-letters"}
            assert (await client.get("/metrics/", headers=one)).status_code == 403
            assert (await client.get("/v1/models/")).status_code == 401
            assert (await client.get("/health/")).status_code == 200

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"best_of": 3}, "best_of must be 1 in this version, got 3"),
        ({"echo": True}, "echo must be false in this version, got true"),
        ({"function_call": "f"}, "function_call must be 'none' or 'auto' in this version, got 'f'"),
        ({"audio": {}}, "audio is not supported by this version, got {}"),
    ],
)
def test_a_field_that_may_have_one_value_alone_is_told_which(
    fields: dict[str, Any], said: str
) -> None:
    assert error_of(ask(CHAT, chat(**fields)))["message"] == said
