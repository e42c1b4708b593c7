"""How long answers become, where they stop, and what is said of it."""

from __future__ import annotations

from octavo.conformance.book import check
from octavo.conformance.probe import (
    CHAT,
    COMPLETIONS,
    LONG,
    Probe,
    Unclear,
    first,
    need,
    short,
    text_of,
    usage_of,
)
from octavo.conformance.wire import Answer, Stream

ENOUGH = 150  # pieces of text: beyond any default limit that was seen
OVERLONG = 300_000  # words: more than contexts hold, where nobody says how much


@check(
    "max-tokens",
    'max_completion_tokens is "an upper bound for the number of tokens that can be generated"; '
    "max_tokens is its deprecated name. Both are honoured.",
    "OpenAI spec, CreateChatCompletionRequest",
)
def max_tokens(probe: Probe) -> str:
    for name in ("max_completion_tokens", "max_tokens"):
        answer = probe.chat(LONG, **({"max_tokens": None} | {name: 7}))
        count = usage_of(answer)["completion_tokens"]
        need(count <= 7, f"{name}: 7 gave {count} tokens")
    stream = probe.chat_stream(LONG, max_tokens=7, stream_options={"include_usage": True})
    usage = next((c["usage"] for c in stream.chunks if c.get("usage")), None)
    need(usage is None or usage["completion_tokens"] <= 7, f"streamed: {usage}")
    return "both names, at most 7 tokens"


@check(
    "length-reason",
    'finish_reason is "length if the maximum number of tokens specified was reached".',
    "OpenAI spec, finish_reason",
)
def length_reason(probe: Probe) -> str:
    reasons = [
        first(probe.chat(LONG, max_tokens=5))["finish_reason"],
        first(probe.completion(max_tokens=5))["finish_reason"],
        probe.chat_stream(LONG, max_tokens=5).finish(),
        probe.completion_stream(max_tokens=5).finish(),
    ]
    need(set(reasons) == {"length"}, f"chat, completion, and the same streamed: {reasons}")
    return "length, four ways"


@check(
    "chat-unbounded",
    "A chat without a limit goes on until it is done or the context is full, not 16 or 128 tokens.",
    "OpenAI spec: max_completion_tokens has no default",
)
def chat_unbounded(probe: Probe) -> str:
    for text in (LONG, "Write a very long story about a lighthouse.", "List the numbers to 500."):
        body = probe.chat_body(text, max_tokens=None, stream=True)
        stream = probe.good_stream(CHAT, body, _far)
        if stream.cut:
            return f"over {len(stream.pieces())} pieces of text without an end"
        need(stream.finish() != "length", f"cut after {len(stream.pieces())} pieces of text")
    raise Unclear("the model was done early with every question")


@check(
    "completions-default-16",
    "max_tokens of /v1/completions: default 16.",
    "OpenAI spec, CreateCompletionRequest.max_tokens",
)
def default_16(probe: Probe) -> str:
    prompt = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,"
    answer = probe.completion(prompt, max_tokens=None)
    count, reason = usage_of(answer)["completion_tokens"], first(answer)["finish_reason"]
    if reason == "stop" and count < 16:
        raise Unclear(f"the model ended by itself after {count} tokens")
    need(count == 16 and reason == "length", f"{count} tokens, {reason!r}")
    return "16 tokens"


def _far(stream: Stream) -> bool:
    return len(stream.pieces()) > ENOUGH or len(stream.text()) > 8 * ENOUGH


def _overlong(probe: Probe, **fields: object) -> tuple[dict[str, object], str]:
    words = (probe.context or OVERLONG) * 5 // 4 + 500
    text = "word " * words
    return probe.chat_body(text, max_tokens=4, **fields), f"{words} words"


def _refused(answer: Answer | Stream, what: str) -> str:
    need(answer.status == 400, f"{what}: {answer.status}: {short(answer.body)}")
    error = Answer(answer.status, answer.headers, answer.body).json["error"]
    need(error["type"] == "invalid_request_error", f"type is {error['type']!r}")
    need(error["code"] == "context_length_exceeded", f"code is {error['code']!r}")
    return short(error["message"], 120)


@check(
    "overflow-400",
    "A prompt beyond the context: 400, invalid_request_error, context_length_exceeded.",
    "OpenAI's API as it answers; clients shorten their history on that code",
    basis="practice",
)
def overflow(probe: Probe) -> str:
    body, words = _overlong(probe)
    return _refused(probe.post(CHAT, body), words)


@check(
    "overflow-before-stream",
    "The same with stream: true: status 400, not an event stream.",
    "OpenAI's API as it answers; llama.cpp#14566",
    basis="practice",
)
def overflow_stream(probe: Probe) -> str:
    body, words = _overlong(probe, stream=True)
    stream = probe.wire.stream(CHAT, body)
    kind = stream.headers.get("content-type", "")
    need("event-stream" not in kind, f"{stream.status} as {kind}: {short(stream.body)}")
    return _refused(stream, words)


@check(
    "overflow-with-output",
    "Prompt + max_tokens beyond the context: refused with the numbers, or cut by a rule; no crash.",
    "OpenAI's API as it answers; vllm#33418",
    basis="practice",
)
def overflow_output(probe: Probe) -> str:
    body = probe.chat_body("Say hi.", max_tokens=10_000_000, stream=True)
    stream = probe.wire.stream(CHAT, body, lambda stream: len(stream.pieces()) > 2)
    if stream.status == 200:
        return "taken: cut where the context ends"
    need(stream.status == 400, f"{stream.status}: {short(stream.body)}")
    text = Answer(400, {}, stream.body).json["error"]["message"]
    need(any(c.isdigit() for c in text), f"no numbers in {text!r}")
    return short(text, 120)


@check(
    "no-silent-truncation",
    "A prompt is never shortened silently: tokens counted grow with what was sent, and what does "
    "not fit is an error.",
    "OpenAI spec, usage.prompt_tokens: number of tokens in the prompt; ollama#17427",
)
def no_truncation(probe: Probe) -> str:
    top = min((probe.context or 2048) // 2, 1600)
    sizes = (top // 4, top // 2, top)
    counts = [usage_of(probe.chat("word " * size, max_tokens=1))["prompt_tokens"] for size in sizes]
    low, high = counts[1] - counts[0], counts[2] - counts[1]
    need(abs(high - 2 * low) <= 0.1 * high + 2, f"{sizes} words gave {counts} tokens")
    body, words = _overlong(probe)
    status = probe.post(CHAT, body).status
    need(status != 200, f"{words} were answered with 200")
    return f"{sizes} words: {counts} tokens; {words}: {status}"


@check(
    "stop-strings",
    '"Up to 4 sequences where the API will stop generating. The returned text will not contain the '
    'stop sequence." A string or an array; five are an error.',
    "OpenAI spec, StopConfiguration",
)
def stop_strings(probe: Probe) -> str:
    whole = text_of(probe.chat(LONG, max_tokens=60))
    stop = _middle(whole)
    for given in (stop, [stop], ["@@@@", "####", stop, "%%%%"]):
        answer = probe.chat(LONG, max_tokens=60, stop=given)
        text, reason = text_of(answer), first(answer)["finish_reason"]
        need(stop not in text, f"stop {stop!r} is in {short(text)}")
        if whole.startswith(text):
            need(reason == "stop", f"stopped by {given!r}, finish_reason {reason!r}")
    for path in (CHAT, COMPLETIONS):
        body = probe.chat_body if path == CHAT else probe.completion_body
        five = probe.post(path, body(stop=["a1", "b2", "c3", "d4", "e5"]))
        need(five.status == 400, f"{path}: five stops: {five.status}: {short(five.body)}")
    return f"stopped before {stop!r}; five are refused"


def _middle(text: str) -> str:
    """A few characters of the middle that did not occur before."""
    for start in range(len(text) // 3, len(text) - 12):
        stop = text[start : start + 9]
        if stop.strip() == stop and text.index(stop) == start and "\n" not in stop:
            return stop
    raise Unclear(f"nothing to stop at in {short(text)!r}")


@check(
    "stop-not-streamed",
    "Nothing of a stop sequence is streamed, also if it is spread over several tokens.",
    "OpenAI spec, StopConfiguration; vllm#3574, sglang#11462",
)
def stop_not_streamed(probe: Probe) -> str:
    whole = probe.chat_stream(LONG, max_tokens=60).text()
    stop = _middle(whole)
    before = whole[: whole.index(stop)]
    text = probe.chat_stream(LONG, max_tokens=60, stop=[stop]).text()
    if not (whole.startswith(text) or text.startswith(before)):
        raise Unclear("the same greedy request gave another text")
    need(text == before, f"stop {stop!r}: {text[-30:]!r} at the end, wanted {before[-30:]!r}")
    return f"{text[-20:]!r}, and nothing of {stop!r}"


@check(
    "stop-holds-little",
    "A stop sequence that does not come holds nothing up: only a suffix that may be its beginning "
    "is kept back.",
    "vllm#13087: chunks came empty for as long as the stop sequence",
    basis="practice",
)
def stop_holds_little(probe: Probe) -> str:
    plain = probe.chat_stream(LONG, max_tokens=40).pieces()
    if len(plain) < 8:
        raise Unclear(f"only {len(plain)} pieces of text to compare")
    stop = "@#" * 200
    held = probe.chat_stream(LONG, max_tokens=40, stop=[stop]).pieces()
    need(
        len(held) * 2 >= len(plain),
        f"{len(plain)} pieces of text without a stop of {len(stop)} characters, {len(held)} with",
    )
    return f"{len(held)} pieces of text, {len(plain)} without the stop"
