"""Errors: their envelope, their status, and that they are errors at all."""

from __future__ import annotations

from typing import Any

from octavo.conformance.book import check
from octavo.conformance.probe import (
    ABSENT,
    CHAT,
    COMPLETIONS,
    NotOffered,
    Probe,
    error_of,
    need,
    short,
)

BAD: tuple[tuple[str, Any], ...] = (
    ("temperature", "hot"),
    ("temperature", -1),
    ("temperature", 2.1),
    ("top_p", 2),
    ("top_p", -0.5),
    ("n", 0),
    ("n", "two"),
    ("max_tokens", -5),
    ("max_tokens", 1.5),
    ("presence_penalty", 9),
    ("frequency_penalty", -9),
    ("logit_bias", {"a": 1}),
    ("stop", [1]),
    ("stream", "maybe"),
    ("messages", "hello"),
    ("messages", []),
    ("messages", [{"role": "nobody", "content": "x"}]),
    ("messages", [{"content": "x"}]),
    ("seed", "lucky"),
)
HI = [{"role": "user", "content": "Hi."}]
# The same ranges at the other endpoints, where they are offered; Anthropic's temperature ends at 1.
ELSEWHERE: tuple[tuple[str, dict[str, Any], str, float], ...] = (
    (COMPLETIONS, {"prompt": "Hi.", "max_tokens": 2}, "temperature", 2.1),
    (COMPLETIONS, {"prompt": "Hi.", "max_tokens": 2}, "top_p", 2),
    (COMPLETIONS, {"prompt": "Hi.", "max_tokens": 2}, "presence_penalty", 9),
    (COMPLETIONS, {"prompt": "Hi.", "max_tokens": 2}, "frequency_penalty", -9),
    ("/v1/responses", {"input": "Hi.", "max_output_tokens": 16}, "temperature", 2.1),
    ("/v1/messages", {"messages": HI, "max_tokens": 2}, "temperature", 1.1),
)


@check(
    "error-envelope",
    '{"error": {"message", "type", "param", "code"}}: message and type are texts, param and code '
    "texts or null.",
    "OpenAI spec, Error: required type, message, param, code",
)
def envelope(probe: Probe) -> str:
    tried = {
        "no messages": probe.post(CHAT, {"model": probe.model}),
        "a bad temperature": probe.post(CHAT, probe.chat_body(temperature="hot")),
        "an unknown model": probe.post(CHAT, probe.chat_body(model="no-such-model-here")),
        "no JSON": probe.wire.ask("POST", CHAT, b"{"),
    }
    for what, answer in tried.items():
        need(400 <= answer.status < 500, f"{what}: {answer.status}: {short(answer.body)}")
        error = error_of(answer.json, answer.body)
        missing = {"message", "type", "param", "code"} - set(error)
        need(not missing, f"{what}: no {', '.join(sorted(missing))} in {short(error)}")
        texts = isinstance(error["message"], str) and isinstance(error["type"], str)
        need(texts and error["message"], f"{what}: {short(error)}")
        for name in ("param", "code"):
            ok = error[name] is None or isinstance(error[name], str)
            need(ok, f"{what}: {name} is {error[name]!r}, neither text nor null")
    return short(error, 120)


@check(
    "bad-values-refused",
    "A value of the wrong type or out of its range is a 400; never a 500, never taken.",
    "OpenAI spec, CreateChatCompletionRequest: types, minimum and maximum of each field",
)
def bad_values(probe: Probe) -> str:
    wrong = []
    for name, value in BAD:
        answer = probe.post(CHAT, probe.chat_body() | {"max_tokens": 2} | {name: value})
        if answer.status != 400:
            wrong.append(f"{name}: {value!r} -> {answer.status}")
    asked = len(BAD)
    for path, fields, name, value in ELSEWHERE:
        answer = probe.post(path, {"model": probe.model} | fields | {name: value})
        if answer.status in ABSENT:
            continue
        asked += 1
        if answer.status != 400:
            wrong.append(f"{path} {name}: {value!r} -> {answer.status}")
    probe.chat(max_tokens=2)  # and it still stands
    need(not wrong, "; ".join(wrong))
    return f"{asked} bad values are 400"


@check(
    "bad-values-named",
    "The error's param names the field that is wrong.",
    "OpenAI spec, Error.param; OpenAI's API as it answers",
    basis="practice",
)
def bad_named(probe: Probe) -> str:
    wrong = []
    for name, value in BAD:
        answer = probe.post(CHAT, probe.chat_body() | {"max_tokens": 2} | {name: value})
        if 400 <= answer.status < 500:
            param = error_of(answer.json, answer.body).get("param")
            if name not in str(param):
                wrong.append(f"{name}: {value!r} -> param {param!r}")
    need(not wrong, "; ".join(wrong))
    return "all named"


@check(
    "bad-json",
    "A body that is no JSON is a 400 with an envelope; the connection lives.",
    "OpenAI's API as it answers",
    basis="practice",
)
def bad_json(probe: Probe) -> str:
    for body in (b"", b"{", b"[1, 2]", b"\xff\xfe", b'{"model": "x", "messages": ' + b"[" * 5000):
        answer = probe.wire.ask("POST", CHAT, body)
        need(answer.status in (400, 422), f"{short(body, 30)}: {answer.status}")
        need(answer.status == 400, f"{short(body, 30)}: {answer.status}, not 400")
        error_of(answer.json, answer.body)
    return "five broken bodies, 400 each"


@check(
    "unknown-model",
    "A model that is not served: 404, code model_not_found.",
    "OpenAI's API as it answers",
    basis="practice",
)
def unknown_model(probe: Probe) -> str:
    for path, body in ((CHAT, probe.chat_body()), (COMPLETIONS, probe.completion_body())):
        answer = probe.post(path, body | {"model": "no-such-model-here", "max_tokens": 2})
        need(answer.status == 404, f"{path}: {answer.status}: {short(answer.body)}")
        error = error_of(answer.json, answer.body)
        need(error.get("code") == "model_not_found", f"{path}: code {error.get('code')!r}")
    answer = probe.wire.ask("GET", "/v1/models/no-such-model-here")
    need(answer.status == 404, f"/v1/models/...: {answer.status}")
    return "404 model_not_found"


@check(
    "unknown-path",
    "An endpoint that is not there is a 404, a wrong method a 405, both with an envelope.",
    "OpenAI's API as it answers; RFC 9110 15.5.5, 15.5.6",
    basis="practice",
)
def unknown_path(probe: Probe) -> str:
    answer = probe.wire.ask("POST", "/v1/no/such/endpoint", {})
    need(answer.status == 404, f"POST /v1/no/such/endpoint: {answer.status}")
    error_of(answer.json, answer.body)
    answer = probe.wire.ask("GET", CHAT)
    need(answer.status in (404, 405), f"GET {CHAT}: {answer.status}")
    error_of(answer.json, answer.body)
    return "404 and an envelope"


@check(
    "unknown-field-said",
    "A field that the server does not know is refused by name, or taken and named in a header of "
    "the answer: never silently without effect.",
    "vLLM drops them at debug level; users ask why their field does nothing",
    basis="practice",
)
def unknown_field(probe: Probe) -> str:
    name = "temprature"
    answer = probe.post(CHAT, probe.chat_body(max_tokens=2) | {name: 0.1})
    if answer.status == 400:
        error = error_of(answer.json, answer.body)
        need(name in str(error.get("param")), f"400 without its name in param: {short(error)}")
        return "refused by name"
    need(answer.status == 200, f"{answer.status}: {short(answer.body)}")
    said = [title for title, value in answer.headers.items() if name in value]
    need(said, f"{name!r} was taken, and no header says that it did nothing")
    return f"named in {said[0]}"


PATHS = (
    ("GET", "/v1/models"),
    ("POST", CHAT),
    ("POST", COMPLETIONS),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("GET", "/v1/files"),
    ("GET", "/v1/batches"),
    ("GET", "/metrics"),
    ("GET", "/load"),
    ("POST", "/tokenize"),
)


@check(
    "key-everywhere",
    "A missing or wrong key is a 401 on every path but probes.",
    "OpenAI spec, security: ApiKeyAuth; vLLM's docs/usage/security.md lists what it leaves open",
)
def key_everywhere(probe: Probe) -> str:
    wrong = {"Authorization": "Bearer wrong-key-wrong-key"}
    if probe.wire.key is None:
        answer = probe.wire.ask("GET", "/v1/models", headers=wrong)
        if answer.status == 401:
            raise NotOffered("this server wants a key: give --api-key-file")
        raise NotOffered("this server asks for no key")
    for headers in (wrong, {"Authorization": ""}):
        for method, path in PATHS:
            body: dict[str, Any] | None = {} if method == "POST" else None
            answer = probe.wire.ask(method, path, body, headers)
            need(answer.status in (401, 404), f"{method} {path}: {answer.status} with a wrong key")
    error_of(probe.wire.ask("POST", CHAT, {}, wrong).json, b"")
    return f"{len(PATHS)} paths"
