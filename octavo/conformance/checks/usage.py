"""What is counted."""

from __future__ import annotations

import secrets

from octavo.conformance.book import check
from octavo.conformance.probe import Probe, Unclear, need, usage_of

WITH_USAGE = {"include_usage": True}


@check(
    "usage-adds-up",
    "total_tokens = prompt_tokens + completion_tokens, and the same request counts the same.",
    "OpenAI spec, CompletionUsage",
)
def adds_up(probe: Probe) -> str:
    counts = []
    for _ in range(2):
        usage = usage_of(probe.chat(max_tokens=6))
        total = usage["prompt_tokens"] + usage["completion_tokens"]
        need(usage["total_tokens"] == total, f"{usage}")
        counts.append(usage["prompt_tokens"])
    need(counts[0] == counts[1], f"prompt_tokens {counts}: those from the cache count too")
    need(counts[0] > 0, "no prompt tokens")
    return f"{usage['prompt_tokens']} + {usage['completion_tokens']}"


@check(
    "cached-tokens",
    "usage.prompt_tokens_details.cached_tokens is always there, 0 included, whole and streamed; "
    "cached tokens are part of prompt_tokens.",
    "OpenAI spec, CompletionUsage.prompt_tokens_details (optional there); vllm#44377",
    basis="practice",
)
def cached(probe: Probe) -> str:
    mark = secrets.token_hex(8)
    text = f"Remember the code {mark}. " + "The sea is wide and blue. " * 24
    told = []
    for turn in range(3):
        if turn < 2:
            usage = usage_of(probe.chat(text, max_tokens=2))
        else:
            stream = probe.chat_stream(text, max_tokens=2, stream_options=WITH_USAGE)
            usage = next(c["usage"] for c in stream.chunks if c.get("usage"))
        details = usage.get("prompt_tokens_details")
        count = details.get("cached_tokens") if isinstance(details, dict) else None
        need(type(count) is int, f"request {turn + 1}: prompt_tokens_details is {details}")
        assert isinstance(count, int)
        need(0 <= count <= usage["prompt_tokens"], f"{count} of {usage['prompt_tokens']}")
        told.append((count, usage["prompt_tokens"]))
    need(len({prompt for _, prompt in told}) == 1, f"(cached, prompt): {told}")
    need(told[1][0] == told[2][0], f"whole {told[1][0]}, streamed {told[2][0]} cached")
    return f"(cached, prompt): {told}"


@check(
    "reasoning-tokens",
    "usage.completion_tokens_details.reasoning_tokens counts what was thought, within "
    "completion_tokens.",
    "OpenAI spec, CompletionUsage.completion_tokens_details (optional there)",
    basis="practice",
)
def reasoning(probe: Probe) -> str:
    usage = usage_of(probe.chat(max_tokens=16))
    details = usage.get("completion_tokens_details")
    need(isinstance(details, dict), f"completion_tokens_details is {details}")
    assert isinstance(details, dict)
    count = details.get("reasoning_tokens")
    need(type(count) is int, f"reasoning_tokens is {count!r}")
    assert isinstance(count, int)
    need(0 <= count <= usage["completion_tokens"], f"{count} of {usage['completion_tokens']}")
    return f"{count} of {usage['completion_tokens']}"


@check(
    "stop-token-counted-once",
    "completion_tokens of a stream and of the whole answer are equal.",
    "OpenAI spec, CompletionUsage.completion_tokens",
)
def same_count(probe: Probe) -> str:
    whole = usage_of(probe.chat("Say hi.", max_tokens=40))["completion_tokens"]
    stream = probe.chat_stream("Say hi.", max_tokens=40, stream_options=WITH_USAGE)
    usage = next((c["usage"] for c in stream.chunks if c.get("usage")), None)
    if usage is None:
        raise Unclear("no usage in a stream")
    need(usage["completion_tokens"] == whole, f"{usage['completion_tokens']} streamed, {whole}")
    return f"{whole} both ways"
