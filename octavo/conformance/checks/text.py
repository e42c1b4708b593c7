"""The text itself: whole characters, no control tokens, the same streamed and whole."""

from __future__ import annotations

import re

from octavo.conformance.book import check
from octavo.conformance.probe import LONG, SHORT, Probe, Unclear, first, need, short, text_of

CONTROL = re.compile(
    r"<\|[a-z_]+\|>|</s>|<s>|<eos>|<bos>|<end_of_turn>|<start_of_turn>|<\|eot_id\|>|\[/?INST\]"
)
EMOJI = "🙂🎉é🙂🎉é🙂🎉é🙂🎉é🙂🎉é🙂🎉é"


@check(
    "no-control-tokens",
    "Tokens that end a turn are no part of the content.",
    "OpenAI spec, message.content: the contents of the message",
)
def no_control_tokens(probe: Probe) -> str:
    for text in ("Say hi.", "What is 2 + 2? Answer with the number.", SHORT):
        answer = probe.chat(text, max_tokens=200)
        stream = probe.chat_stream(text, max_tokens=200)
        for content in (text_of(answer), stream.text()):
            found = CONTROL.search(content)
            need(found is None, f"{found and found[0]!r} in {short(content)!r}")
        if first(answer)["finish_reason"] == "stop":
            return f"ended with {text_of(answer)[-30:]!r}"
    raise Unclear("no answer ended by itself within 200 tokens")


@check(
    "no-broken-characters",
    "No U+FFFD in the middle of a stream: a character spread over tokens is sent when it is whole.",
    "Unicode, U+FFFD REPLACEMENT CHARACTER; vllm-mlx#109",
)
def no_broken_characters(probe: Probe) -> str:
    streams = [
        probe.completion_stream(EMOJI, max_tokens=40),
        probe.chat_stream(f"Repeat exactly this, and nothing else: {EMOJI}", max_tokens=60),
    ]
    texts = [stream.text() for stream in streams]
    for stream in streams:
        for piece in stream.pieces()[:-1]:
            need("�" not in piece, f"{stream.path}: a piece of text is {piece!r}")
    if not any(ord(character) > 0x7FF for text in texts for character in text):
        raise Unclear(f"the model wrote no character of three bytes or more: {short(texts)}")
    return short(texts, 80)


@check(
    "stream-equals-whole",
    "The pieces of a stream join to the text of the same request unstreamed.",
    "OpenAI spec, stream: the same answer, in parts; vllm#8627",
)
def stream_equals_whole(probe: Probe) -> str:
    for text in (LONG, f"Repeat: {EMOJI}"):
        whole = text_of(probe.chat(text, max_tokens=64))
        stream = probe.chat_stream(text, max_tokens=64).text()
        if stream != whole and text_of(probe.chat(text, max_tokens=64)) != whole:
            raise Unclear("the same greedy request gave two texts, unstreamed")
        need(stream == whole, f"streamed {short(stream)!r}, whole {short(whole)!r}")
    whole = text_of(probe.completion(max_tokens=24))
    stream = probe.completion_stream(max_tokens=24).text()
    need(stream == whole, f"completions: streamed {short(stream)!r}, whole {short(whole)!r}")
    return f"{len(whole)} characters"
