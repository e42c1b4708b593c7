"""Anthropic's Messages API on the wire: a message, or the events that build it; and its errors."""

from __future__ import annotations

from typing import Any

from octavo.core.request import FinishReason
from octavo.server.parsing import Called
from octavo.server.reply import Asked, Choice, Logged, Reply, encode

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
    """The one choice of a message."""

    ping = PING

    def __init__(self, asked: Asked, choices: int) -> None:
        self._head = asked.head

    def start(self, reply: Reply) -> bytes:
        message = self._message([], None, None, usage(reply))
        return _event("message_start", {"message": message})

    def open(self, choice: Choice) -> bytes:
        return _event("content_block_start", {"index": 0, "content_block": _block("")}) + PING

    def text(self, choice: Choice, text: str, logprobs: Any) -> bytes:
        return _DELTA + encode(text) + b"}}\n\n"

    def thought(self, choice: Choice, text: str) -> bytes:
        return b""  # nothing is parsed for this API yet

    def call(self, choice: Choice, called: Called) -> bytes:
        return b""

    def close(self, choice: Choice) -> bytes:
        return _event("content_block_stop", {"index": 0})

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
        content = [_block("".join(choice.parts))]
        return self._message(content, *_stopped(choice), usage(reply))

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


def _block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind} | fields) + b"\n\n"


_DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
    b'"delta":{"type":"text_delta","text":'
)


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
    if choice.text.stop is not None:
        return "stop_sequence", choice.text.stop
    return "end_turn", None
