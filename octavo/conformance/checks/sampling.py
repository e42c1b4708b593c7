"""Choices, seeds, and answers that do not depend on who else is there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from octavo.conformance.book import check
from octavo.conformance.probe import (
    CHAT,
    LONG,
    NotOffered,
    Probe,
    error_of,
    first,
    need,
    optional,
    short,
    text_of,
    usage_of,
)

CROWD = 6


def _beside(probe: Probe, body: dict[str, Any]) -> str:
    """The text of a request that shares the server with unseeded, warm strangers."""
    strangers = [
        probe.chat_body(f"Tell me about the number {number}.", temperature=1.0, max_tokens=64)
        for number in range(CROWD)
    ]
    with ThreadPoolExecutor(CROWD + 1) as pool:
        others = [pool.submit(probe.post, CHAT, stranger) for stranger in strangers]
        text = text_of(pool.submit(probe.good, CHAT, body).result())
        for other in others:
            other.result()
    return text


@check(
    "n-choices",
    'n: "how many chat completion choices to generate": each with its index and its own end; '
    "usage counts the tokens of all.",
    "OpenAI spec, CreateChatCompletionRequest.n: minimum 1, maximum 128",
)
def n_choices(probe: Probe) -> str:
    body = probe.chat_body(LONG, n=3, max_tokens=5, temperature=1.0, seed=3)
    answer = optional("n", probe.post(CHAT, body))
    indexes = [choice["index"] for choice in answer["choices"]]
    need(sorted(indexes) == [0, 1, 2], f"indexes {indexes}")
    count = usage_of(answer)["completion_tokens"]
    need(count == 15, f"3 choices of 5 tokens, completion_tokens {count}")
    stream = probe.chat_stream(LONG, n=2, max_tokens=5, temperature=1.0, seed=3)
    ends = {index: stream.finish(index) for index in (0, 1)}
    need(all(ends.values()), f"streamed, finish_reason by index: {ends}")
    return "3 choices; streamed 2"


@check(
    "n-limit",
    "n above what the server takes (at most 128) is a 400 before anything is computed.",
    "OpenAI spec, n: maximum 128; CVE-2026-34756",
)
def n_limit(probe: Probe) -> str:
    for n in (129, 100_000_000):
        answer = probe.post(CHAT, probe.chat_body(n=n, max_tokens=1))
        need(answer.status == 400, f"n: {n}: {answer.status}: {short(answer.body)}")
        error_of(answer.json, answer.body)
    return "129 and 100000000 are refused"


@check(
    "seed-repeats",
    '"Repeated requests with the same seed and parameters should return the same result", whoever '
    "shares the batch.",
    'OpenAI spec, CreateChatCompletionRequest.seed, which adds "not guaranteed"; vllm#51226',
    basis="practice",
)
def seed_repeats(probe: Probe) -> str:
    body = probe.chat_body(temperature=1.0, seed=1234, max_tokens=32)
    alone = text_of(probe.good(CHAT, body))
    again, beside = text_of(probe.good(CHAT, body)), _beside(probe, body)
    need(again == alone, f"again: {short(again)!r}, first {short(alone)!r}")
    need(beside == alone, f"beside {CROWD} others: {short(beside)!r}, alone {short(alone)!r}")
    other = [text_of(probe.good(CHAT, body | {"seed": seed})) for seed in (5, 6, 7)]
    need(set(other) != {alone}, "four seeds, one text")
    return repr(short(alone, 60))


@check(
    "greedy-repeats",
    "temperature 0: the same text alone, again and in company.",
    "vllm#5898; the specification promises determinism for nobody",
    basis="practice",
)
def greedy_repeats(probe: Probe) -> str:
    body = probe.chat_body(max_tokens=48)
    alone = text_of(probe.good(CHAT, body))
    again, beside = text_of(probe.good(CHAT, body)), _beside(probe, body)
    need(again == alone, f"again: {short(again)!r}, first {short(alone)!r}")
    need(beside == alone, f"beside {CROWD} others: {short(beside)!r}, alone {short(alone)!r}")
    return repr(short(alone, 60))


@check(
    "system-fingerprint",
    'system_fingerprint "represents the backend configuration that the model runs with": the same '
    "while that does not change.",
    "OpenAI spec, system_fingerprint",
)
def fingerprint(probe: Probe) -> str:
    found = {str(probe.chat(text, max_tokens=2).get("system_fingerprint")) for text in ("a", "b")}
    stream = probe.chat_stream(max_tokens=2)
    found |= {str(chunk.get("system_fingerprint")) for chunk in stream.chunks if chunk["choices"]}
    found.discard("None")
    if not found:
        raise NotOffered("no system_fingerprint")
    need(len(found) == 1, f"it changes: {short(found)}")
    return found.pop()


@check(
    "choices-differ",
    "n > 1 at temperature 1 with a seed gives choices of their own, not one text n times.",
    "OpenAI spec, n: how many choices to generate",
)
def choices_differ(probe: Probe) -> str:
    body = probe.chat_body(n=4, max_tokens=24, temperature=1.2, seed=11)
    answer = optional("n", probe.post(CHAT, body))
    first(answer)
    texts = {choice["message"]["content"] for choice in answer["choices"]}
    need(len(texts) > 1, f"four times {short(texts)}")
    return f"{len(texts)} texts of 4 choices"
