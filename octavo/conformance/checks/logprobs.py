"""Log-probabilities: their shapes, their places, their limits."""

from __future__ import annotations

from typing import Any

from octavo.conformance.book import check
from octavo.conformance.probe import (
    CHAT,
    COMPLETIONS,
    Probe,
    error_of,
    first,
    need,
    optional,
    short,
    text_of,
    usage_of,
)


def _chat(probe: Probe, **fields: Any) -> dict[str, Any]:
    body = probe.chat_body(logprobs=True, max_tokens=12, **fields)
    return optional("logprobs", probe.post(CHAT, body))


@check(
    "logprobs-shape",
    "choices[].logprobs.content: for each output token its token, logprob, bytes and top_logprobs; "
    "their bytes are those of the text.",
    "OpenAI spec, ChatCompletionTokenLogprob: required token, logprob, bytes, top_logprobs",
)
def shape(probe: Probe) -> str:
    answer = _chat(probe, top_logprobs=2)
    logged = first(answer)["logprobs"]["content"]
    need(logged, f"no content: {short(first(answer))}")
    for item in logged:
        missing = {"token", "logprob", "bytes", "top_logprobs"} - set(item)
        need(not missing, f"{short(item)} lacks {', '.join(sorted(missing))}")
        need(item["logprob"] <= 1e-4, f"a log-probability of {item['logprob']}")
        need(len(item["top_logprobs"]) <= 2, f"over 2 alternatives: {short(item)}")
    count = usage_of(answer)["completion_tokens"]
    need(len(logged) in (count, count - 1), f"{len(logged)} entries for {count} tokens")
    joined = b"".join(bytes(item["bytes"] or ()) for item in logged)
    text = text_of(answer).encode()
    need(text in joined or joined in text, f"bytes {short(joined)}, text {short(text)}")
    return f"{len(logged)} tokens, {short(joined, 50)}"


@check(
    "logprobs-limits",
    'top_logprobs is "an integer between 0 and 20"; "logprobs must be set to true if this '
    'parameter is used". What is not is an error.',
    "OpenAI spec, CreateChatCompletionRequest.top_logprobs",
)
def limits(probe: Probe) -> str:
    _chat(probe, top_logprobs=20)
    tried: dict[str, dict[str, Any]] = {
        "top_logprobs: 21": {"logprobs": True, "top_logprobs": 21},
        "top_logprobs: -1": {"logprobs": True, "top_logprobs": -1},
        "top_logprobs without logprobs": {"top_logprobs": 2},
    }
    for what, fields in tried.items():
        answer = probe.post(CHAT, probe.chat_body(max_tokens=2, **fields))
        need(answer.status == 400, f"{what}: {answer.status}: {short(answer.body)}")
        error_of(answer.json, answer.body)
    return "20 is taken; 21, -1 and without logprobs are refused"


@check(
    "logprobs-position",
    "top_logprobs belong to their own position: a greedy token is the first of its alternatives, "
    "whole and streamed.",
    "OpenAI spec: the most likely tokens at this token position; sglang#30188",
)
def position(probe: Probe) -> str:
    whole = first(_chat(probe, top_logprobs=3))["logprobs"]["content"]
    stream = probe.chat_stream(logprobs=True, top_logprobs=3, max_tokens=12)
    pieces = [(choice.get("logprobs") or {}).get("content") or [] for choice in stream.choices]
    streamed = [item for piece in pieces for item in piece]
    need(streamed, "a stream has no logprobs")
    for where, items in (("whole", whole), ("streamed", streamed)):
        for number, item in enumerate(items):
            best = max(item["top_logprobs"], key=lambda top: top["logprob"])
            same = best["token"] == item["token"] or best["logprob"] <= item["logprob"] + 1e-3
            need(same, f"{where}, token {number}: {item['token']!r}, best {best['token']!r}")
            own = [t["logprob"] for t in item["top_logprobs"] if t["token"] == item["token"]]
            near = not own or abs(own[0] - item["logprob"]) < 1e-3
            need(near, f"{where}, token {number}: {item['logprob']} and {own} for one token")
    tokens = [[item["token"] for item in items] for items in (whole, streamed)]
    need(tokens[0] == tokens[1], f"whole {short(tokens[0])}, streamed {short(tokens[1])}")
    return f"{len(whole)} tokens"


FIELDS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@check(
    "completions-logprobs",
    "logprobs of /v1/completions: tokens, token_logprobs, top_logprobs and text_offset, one a "
    "token; streamed too.",
    "OpenAI spec, CreateCompletionResponse.choices.logprobs",
)
def of_completions(probe: Probe) -> str:
    body = probe.completion_body(logprobs=2, max_tokens=8)
    answer = optional("logprobs of completions", probe.post(COMPLETIONS, body))
    logged = first(answer)["logprobs"]
    stream = probe.completion_stream(logprobs=2, max_tokens=8)
    parts = [c["logprobs"] for c in stream.choices if c.get("logprobs")]
    need(parts, "a stream has no logprobs")
    for where, found in (("whole", logged), ("streamed", parts[0])):
        lengths = {name: len(found[name]) for name in FIELDS if found.get(name) is not None}
        need(set(lengths) == set(FIELDS), f"{where}: only {short(list(found))}")
        need(len(set(lengths.values())) == 1, f"{where}: lengths {lengths}")
    offsets = logged["text_offset"]
    need(offsets == sorted(offsets), f"offsets {offsets}")
    joined = "".join(token for part in parts for token in part["tokens"])
    whole = "".join(logged["tokens"])
    need(joined == whole, f"streamed {joined!r}, whole {whole!r}")
    return f"{len(logged['tokens'])} tokens, offsets {offsets}"


@check(
    "echo-logprobs",
    "echo with logprobs: the prompt's tokens are scored too, the first with null; streamed too.",
    "OpenAI's API as it answers; lm-evaluation-harness rests on it",
    basis="practice",
)
def echoed(probe: Probe) -> str:
    body = probe.completion_body(logprobs=1, echo=True, max_tokens=2)
    logged = first(optional("echo with logprobs", probe.post(COMPLETIONS, body))).get("logprobs")
    need(logged, "no logprobs")
    assert logged is not None
    need("".join(logged["tokens"]).lstrip().startswith("The sea is"), short(logged["tokens"]))
    need(logged["token_logprobs"][0] is None, f"the first is {logged['token_logprobs'][0]}")
    scored = [value for value in logged["token_logprobs"][1:] if value is not None]
    need(len(scored) == len(logged["tokens"]) - 1, "prompt tokens without a log-probability")
    stream = probe.completion_stream(logprobs=1, echo=True, max_tokens=2)
    parts = [c["logprobs"] for c in stream.choices if c.get("logprobs")]
    streamed = [token for part in parts for token in part["tokens"]]
    need(streamed == logged["tokens"], f"streamed {short(streamed)}")
    return f"{len(logged['tokens'])} tokens"
