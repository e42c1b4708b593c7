"""Anthropic's Messages API on the wire: a message, or the events that build it; and its errors."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.core.request import FinishReason
from octavo.server.parsing import Called
from octavo.server.reply import Asked, Call, Choice, Logged, Reply, encode

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
OVERLOADED = 529
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(status: int, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """OpenAI's status and envelope as Anthropic's. What else it says, it says still."""
    error = body["error"]
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    rest = {name: value for name, value in error.items() if name not in ("message", "type")}
    said = {"type": kind, "message": error["message"]} | rest
    return OVERLOADED if status == 503 else status, {"type": "error", "error": said}


class MessagesShape:
    """The one choice of a message: blocks of thinking, text and calls."""

    ping = PING

    def __init__(self, asked: Asked, choices: int) -> None:
        self._head = asked.head
        self._kind = ""  # of the block that is open
        self._index = -1
        self._delta = b""

    def start(self, reply: Reply) -> bytes:
        message = self._message([], None, None, usage(reply))
        return _event("message_start", {"message": message}) + PING

    def open(self, choice: Choice) -> bytes:
        return b""

    def text(self, choice: Choice, text: str, logprobs: Any) -> bytes:
        out = b"" if self._kind == "text" else self._begin(_text(""), "text_delta", "text")
        return out + self._delta + encode(text) + b"}}\n\n"

    def thought(self, choice: Choice, text: str) -> bytes:
        out = b""
        if self._kind != "thinking":
            out = self._begin(_thinking(""), "thinking_delta", "thinking")
        return out + self._delta + encode(text) + b"}}\n\n"

    def call(self, choice: Choice, called: Called) -> bytes:
        out = b""
        if called.id is not None:
            block = {"type": "tool_use", "id": called.id, "name": called.name}
            out = self._begin(block | {"input": {}}, "input_json_delta", "partial_json")
        if called.arguments:
            out += self._delta + encode(called.arguments) + b"}}\n\n"
        return out

    def close(self, choice: Choice) -> bytes:
        out = self._begin(_text(""), "text_delta", "text") if self._index < 0 else b""
        return out + self._end()

    def last(self, reply: Reply) -> bytes:
        reason, stop = _stopped(reply.choices[0])
        delta = {"stop_reason": reason, "stop_sequence": stop}
        ended = _event("message_delta", {"delta": delta, "usage": usage(reply)})
        return ended + _event("message_stop", {})

    def failure(self, status: int, body: dict[str, Any]) -> bytes:
        return b"event: error\ndata: " + encode(anthropic_error(status, body)[1]) + b"\n\n"

    def logprobs(self, items: list[Logged]) -> None:
        return None

    def whole(self, reply: Reply) -> dict[str, Any]:
        choice = reply.choices[0]
        content = [_thinking("".join(choice.thoughts))] if choice.thoughts else []
        if choice.parts or not (choice.calls or choice.thoughts):
            content.append(_text("".join(choice.parts)))
        content += map(_tool_use, choice.calls)
        return self._message(content, *_stopped(choice), usage(reply))

    def _begin(self, block: dict[str, Any], delta: str, field: str) -> bytes:
        """End the block that is open; begin one whose deltas have that type and field."""
        out = self._end()
        self._index += 1
        self._kind = block["type"]
        head = {"type": "content_block_delta", "index": self._index}
        body = encode(head)[:-1] + b',"delta":{"type":' + encode(delta) + b"," + encode(field)
        self._delta = b"event: content_block_delta\ndata: " + body + b":"
        began = {"index": self._index, "content_block": block}
        return out + _event("content_block_start", began)

    def _end(self) -> bytes:
        if not self._kind:
            return b""
        self._kind = ""
        return _event("content_block_stop", {"index": self._index})

    def _message(
        self, content: list[Any], reason: str | None, stop: str | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _thinking(text: str) -> dict[str, Any]:
    """A thought; nothing is signed here."""
    return {"type": "thinking", "thinking": text, "signature": ""}


def _tool_use(call: Call) -> dict[str, Any]:
    """A call. Arguments that were cut off (max_tokens says so then) are no object yet: {}."""
    try:
        given = msgspec.json.decode("".join(call.arguments))
    except msgspec.DecodeError:
        given = {}
    given = given if isinstance(given, dict) else {}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind} | fields) + b"\n\n"


def usage(reply: Reply) -> dict[str, Any]:
    """Token counts as Anthropic counts them: input_tokens are those that no cache had."""
    cached = reply.num_cached
    return {
        "input_tokens": reply.num_prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": reply.num_tokens,
    }


def _stopped(choice: Choice) -> tuple[str, str | None]:
    """(stop_reason, the stop sequence that came)."""
    if choice.finish is FinishReason.LENGTH:
        return "max_tokens", None
    if choice.finish is FinishReason.TOOL_CALLS:
        return "tool_use", None
    if choice.text.stop is not None:
        return "stop_sequence", choice.text.stop
    return "end_turn", None
