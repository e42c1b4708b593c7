"""How a stream is framed: chunks, their order, and its end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from math import ceil

from octavo.conformance.book import check
from octavo.conformance.probe import (
    CHAT,
    LONG,
    Failed,
    Probe,
    Unclear,
    need,
    short,
    usage_of,
)
from octavo.conformance.wire import Stream

CHUNK = "OpenAI spec, CreateChatCompletionStreamResponse"


@check(
    "sse-lines",
    'Content type text/event-stream; "data-only server-sent events": each a data line of one JSON '
    "value in UTF-8, then an empty line.",
    "OpenAI spec, stream; WHATWG HTML, server-sent events",
)
def sse_lines(probe: Probe) -> str:
    stream = probe.chat_stream()
    kind = stream.headers.get("content-type", "")
    need(kind.startswith("text/event-stream"), f"content-type is {kind!r}")
    try:
        text = stream.body.decode()
    except UnicodeDecodeError as error:
        raise Failed(f"the stream is no UTF-8: {error}") from None
    text = text.replace("\r\n", "\n")
    need(text.endswith("\n\n"), f"the last event has no empty line: {text[-60:]!r}")
    for block in text.strip("\n").split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        ok = len(lines) <= 1 and all(line.startswith("data:") for line in lines)
        need(ok, f"not a data line and an empty line: {block!r}")
    broken = len(stream.data) - len(stream.chunks) - stream.done
    need(not broken, f"{broken} events are neither a JSON object nor [DONE]")
    return f"{len(stream.chunks)} chunks"


@check(
    "stream-chunks-alike",
    'Each chunk: object "chat.completion.chunk", "Each chunk has the same ID", "Each chunk has the '
    'same timestamp".',
    CHUNK,
)
def chunks_alike(probe: Probe) -> str:
    chunks = probe.chat_stream().chunks
    need(chunks, "no chunks")
    for name in ("id", "created", "model"):
        values = {str(chunk.get(name)) for chunk in chunks}
        need(len(values) == 1 and values != {"None"}, f"{name} changes: {short(values)}")
    kinds = {chunk.get("object") for chunk in chunks}
    need(kinds == {"chat.completion.chunk"}, f"object is {short(kinds)}")
    return f"{len(chunks)} chunks of {chunks[0]['id']}"


@check(
    "stream-role-first",
    'The first delta of a choice carries role "assistant", later ones no other.',
    f"{CHUNK}, delta.role; as OpenAI streams it",
)
def role_first(probe: Probe) -> str:
    deltas = [choice["delta"] for choice in probe.chat_stream().choices]
    need(deltas and deltas[0].get("role") == "assistant", f"first delta: {short(deltas[:1])}")
    again = [delta for delta in deltas[1:] if delta.get("role") is not None]
    need(not again, f"{len(again)} later deltas have a role: {short(again[:1])}")
    return f"{len(deltas)} deltas"


@check(
    "stream-finish-reason",
    "finish_reason is there in every choice of a chunk, null in all but the last, which says why.",
    f"{CHUNK}, required: delta, finish_reason, index",
)
def finish_reason(probe: Probe) -> str:
    for stream in (probe.chat_stream(), probe.completion_stream()):
        need(stream.choices, f"{stream.path}: no choices")
        missing = [choice for choice in stream.choices if "finish_reason" not in choice]
        need(not missing, f"{stream.path}: no finish_reason in {short(missing[:1])}")
        reasons = [choice["finish_reason"] for choice in stream.choices]
        early = [reason for reason in reasons[:-1] if reason is not None]
        need(not early, f"{stream.path}: {early[:1]} before the end")
        need(reasons[-1] in ("stop", "length"), f"{stream.path}: it ends with {reasons[-1]!r}")
    return f"null, and at last {reasons[-1]!r}"


@check(
    "stream-done-once",
    'The stream is "terminated by a data: [DONE] message": one, and nothing after it.',
    "OpenAI spec, CreateCompletionRequest.stream",
)
def done_once(probe: Probe) -> str:
    for stream in (probe.chat_stream(), probe.completion_stream()):
        need(stream.done == 1, f"{stream.path}: {stream.done} times [DONE]")
        need(stream.data[-1] == "[DONE]", f"{stream.path}: after [DONE] {short(stream.data[-1])}")
        need(stream.clean, f"{stream.path}: the connection broke")
    return "one [DONE] at the end"


@check(
    "stream-usage-chunk",
    'include_usage: "an additional chunk will be streamed before the data: [DONE] message"; its '
    "choices are an empty array, and all other chunks have usage: null.",
    "OpenAI spec, ChatCompletionStreamOptions.include_usage",
)
def usage_chunk(probe: Probe) -> str:
    wanted = {"include_usage": True}
    whole = usage_of(probe.chat())
    for stream in (
        probe.chat_stream(stream_options=wanted),
        probe.completion_stream(stream_options=wanted),
    ):
        last = stream.chunks[-1]
        need(last.get("choices") == [], f"{stream.path}: the last chunk is {short(last)}")
        need(isinstance(last.get("usage"), dict), f"{stream.path}: no usage in {short(last)}")
        other = [c for c in stream.chunks[:-1] if "usage" not in c or c["usage"] is not None]
        need(not other, f"{stream.path}: {len(other)} other chunks lack usage: null")
        if stream.path == CHAT:
            counts = {name: last["usage"].get(name) for name in ("prompt_tokens", "total_tokens")}
            expected = {name: whole[name] for name in counts}
            need(counts == expected, f"usage {counts}, unstreamed {expected}")
    return f"usage {short(last['usage'], 100)}"


@check(
    "stream-no-usage-unasked",
    'usage is "only present when you set stream_options": no extra chunk without choices.',
    f"{CHUNK}, usage",
)
def no_usage_unasked(probe: Probe) -> str:
    chunks = probe.chat_stream().chunks
    given = [chunk for chunk in chunks if chunk.get("usage") or not chunk.get("choices")]
    need(not given, f"unasked: {short(given[:1])}")
    return f"none in {len(chunks)} chunks"


@check(
    "stream-ends-honestly",
    "Whatever happens after the status 200, a stream ends with [DONE] or with an error event: "
    'never silently, never with a made-up "stop".',
    "OpenAI spec, ErrorEvent; seen from outside, of all streams of this run",
)
def ends_honestly(probe: Probe) -> str:
    bodies = [
        probe.chat_body(LONG, max_tokens=64, stream=True, n=None, stop=stop, temperature=heat)
        for stop, heat in ((None, 0), ("seven", 0), (["\n\n\n", "zzz"], 1), (None, 1.5))
    ]
    with ThreadPoolExecutor(len(bodies)) as pool:
        list(pool.map(lambda body: probe.wire.stream(CHAT, body), bodies))
    seen = [s for s in probe.wire.seen if not s.cut and s.path.endswith("completions")]
    for stream in seen:
        ended = stream.clean and (stream.done or stream.failed)
        need(ended, f"{stream.path} ended with {short(stream.body[-120:])}")
        if stream.done and not stream.failed:
            need(stream.finish(), f"{stream.path}: [DONE] without a finish_reason")
    return f"{len(seen)} streams"


def _silences(stream: Stream) -> tuple[float, float]:
    """The longest time without data, and the longest without any byte."""
    data = [0.0, *(event.at for event in stream.events() if event.kind == "data")]
    any_ = [0.0, *(at for at, _ in stream.parts)]
    return (
        max((b - a for a, b in pairwise(data)), default=0.0),
        max((b - a for a, b in pairwise(any_)), default=0.0),
    )


@check(
    "stream-keepalive",
    "A stream that waits (queued, prefilling) gets a comment line at least every 15 seconds, the "
    "first before its prefill ends: proxies and clients cut silent connections.",
    "WHATWG HTML 9.2.7: authors can include a comment line every 15 seconds or so",
    basis="practice",
    heavy=True,
)
def keepalive(probe: Probe) -> str:
    quiet = probe.settings.quiet
    words = min((probe.context or 2048) // 3, 1200)

    def body(number: int) -> dict[str, object]:
        text = f"Story {number}. " + f"once{number} upon " * (words // 2)
        return probe.chat_body(text, max_tokens=2, stream=True)

    alone = probe.good_stream(CHAT, body(0))
    first = max(alone.parts[0][0], 1e-3)
    count = min(128, max(4, ceil(2.0 * quiet / first)))
    with ThreadPoolExecutor(count) as pool:
        streams = list(
            pool.map(lambda number: probe.wire.stream(CHAT, body(number)), range(1, count + 1))
        )
    waits = [_silences(stream) for stream in streams if stream.status == 200 and stream.parts]
    longest = max((data for data, _ in waits), default=0.0)
    if longest < quiet:
        raise Unclear(f"{count} long prompts at once kept none waiting {quiet:g} s: {longest:.1f}")
    silent = max(any_ for data, any_ in waits if data >= quiet)
    need(silent <= quiet, f"{silent:.1f} s without a byte, of {longest:.1f} s without data")
    return f"{longest:.1f} s without data, at most {silent:.1f} s of them without a byte"
