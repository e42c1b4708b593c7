"""OpenAI's chat and completions on the wire.

A stream's pieces are built from bytes prepared once per choice; only the text itself is encoded per
step.
"""

from __future__ import annotations

from typing import Any

from octavo.server.parsing import Called
from octavo.server.reply import Asked, Call, Choice, Head, Logged, Reply, encode
from octavo.text import Tokenizer

DONE = b"data: [DONE]\n\n"
PING = b": keep-alive\n\n"
LOWEST = -9999.0  # JSON has no -inf


def _fields(head: Head, kind: str) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "id": head.id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
    }
    return fields if head.tier is None else fields | {"service_tier": head.tier}


def _frame(head: Head, kind: str) -> tuple[bytes, bytes]:
    """What stands before a choice's index, and after the choice."""
    fields = _fields(head, kind)
    before = b"data: " + encode(fields)[:-1] + b',"choices":[{"index":'
    return before, b"}]" + (b',"usage":null' if head.include_usage else b"") + b"}\n\n"


def _object(reply: Reply, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return _fields(reply.asked.head, kind) | {"choices": choices, "usage": reply.usage()}


def _last(reply: Reply, kind: str) -> bytes:
    if not reply.asked.head.include_usage:
        return DONE
    return b"data: " + encode(_object(reply, kind, [])) + b"\n\n" + DONE


def logprob_entries(tokenizer: Tokenizer, items: list[Logged]) -> list[dict[str, Any]]:
    """Tokens with their log-probabilities and alternatives, as chat and responses write them."""

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token)
        return {
            "token": raw.decode("utf-8", "replace"),
            "logprob": None if logprob is None else max(logprob, LOWEST),
            "bytes": list(raw),
        }

    return [
        entry(item.token, item.logprob) | {"top_logprobs": [entry(*pair) for pair in item.top]}
        for item in items
    ]


class ChatShape:
    """chat.completion and its chunks."""

    ping = PING
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, asked: Asked, choices: int) -> None:
        self._tokenizer = asked.tokenizer
        before, self._end = _frame(asked.head, self.chunk_kind)
        self._deltas = [before + b'%d,"delta":{' % index for index in range(choices)]
        self._texts = [delta + b'"content":' for delta in self._deltas]
        self._plain = b'},"logprobs":null,"finish_reason":null' + self._end

    def start(self, reply: Reply) -> bytes:
        return b""

    def open(self, choice: Choice) -> bytes:
        return self._deltas[choice.index] + b'"role":"assistant","content":""' + self._plain

    def text(self, choice: Choice, text: str, logprobs: Any) -> bytes:
        if logprobs is None:
            return self._texts[choice.index] + encode(text) + self._plain
        middle = b'},"logprobs":' + encode(logprobs) + b',"finish_reason":null'
        return self._texts[choice.index] + encode(text) + middle + self._end

    def thought(self, choice: Choice, text: str) -> bytes:
        """Under both names that clients know."""
        said = encode(text)
        named = b'"reasoning_content":' + said + b',"reasoning":' + said
        return self._deltas[choice.index] + named + self._plain

    def call(self, choice: Choice, called: Called) -> bytes:
        delta: dict[str, Any] = {"index": called.number}
        if called.id is not None:
            delta |= {"id": called.id, "type": "function"}
        function = {"name": called.name} if called.name is not None else {}
        delta["function"] = function | {"arguments": called.arguments}
        return self._deltas[choice.index] + b'"tool_calls":' + encode([delta]) + self._plain

    def close(self, choice: Choice) -> bytes:
        end = b'},"logprobs":null,"finish_reason":' + encode(choice.finish) + self._end
        return self._deltas[choice.index] + end

    def last(self, reply: Reply) -> bytes:
        return _last(reply, self.chunk_kind)

    def failure(self, status: int, body: dict[str, Any]) -> bytes:
        return b"data: " + encode(body) + b"\n\n"

    def logprobs(self, items: list[Logged]) -> dict[str, Any]:
        return {"content": logprob_entries(self._tokenizer, items), "refusal": None}

    def whole(self, reply: Reply) -> dict[str, Any]:
        return _object(reply, self.kind, [self._choice(choice) for choice in reply.choices])

    def _choice(self, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.parts)
        content = None if choice.calls and not text else text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.thoughts:
            message["reasoning_content"] = message["reasoning"] = "".join(choice.thoughts)
        if choice.calls:
            message["tool_calls"] = [*map(_call, choice.calls)]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self.logprobs(choice.logged) if choice.offsets is not None else None,
            "finish_reason": choice.finish,
        }


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": "".join(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


class CompletionShape:
    """text_completion; its chunks look the same."""

    ping = PING
    kind = chunk_kind = "text_completion"

    def __init__(self, asked: Asked, choices: int) -> None:
        self._tokenizer = asked.tokenizer
        before, self._end = _frame(asked.head, self.chunk_kind)
        self._texts = [before + b'%d,"text":' % index for index in range(choices)]
        self._plain = b',"logprobs":null,"finish_reason":null' + self._end

    def start(self, reply: Reply) -> bytes:
        return b""

    def open(self, choice: Choice) -> bytes:
        return b""

    def text(self, choice: Choice, text: str, logprobs: Any) -> bytes:
        if logprobs is None:
            return self._texts[choice.index] + encode(text) + self._plain
        middle = b',"logprobs":' + encode(logprobs) + b',"finish_reason":null'
        return self._texts[choice.index] + encode(text) + middle + self._end

    def thought(self, choice: Choice, text: str) -> bytes:
        return b""  # a completion is all text: nothing is parsed

    def call(self, choice: Choice, called: Called) -> bytes:
        return b""

    def close(self, choice: Choice) -> bytes:
        end = b'"","logprobs":null,"finish_reason":' + encode(choice.finish) + self._end
        return self._texts[choice.index] + end

    def last(self, reply: Reply) -> bytes:
        return _last(reply, self.chunk_kind)

    def failure(self, status: int, body: dict[str, Any]) -> bytes:
        return b"data: " + encode(body) + b"\n\n"

    def logprobs(self, items: list[Logged]) -> dict[str, Any]:
        return {
            "tokens": [self._name(item.token) for item in items],
            "token_logprobs": [
                None if item.logprob is None else max(item.logprob, LOWEST) for item in items
            ],
            "top_logprobs": [self._top(item) for item in items],
            "text_offset": [item.offset for item in items],
        }

    def _top(self, item: Logged) -> dict[str, float] | None:
        if item.logprob is None:
            return None
        pairs = (*item.top, (item.token, item.logprob))
        return {self._name(token): max(logprob, LOWEST) for token, logprob in pairs}

    def _name(self, token: int) -> str:
        """The token's text; bytes that are no UTF-8 by themselves the way OpenAI writes them."""
        raw = self._tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def whole(self, reply: Reply) -> dict[str, Any]:
        return _object(reply, self.kind, [self._choice(choice) for choice in reply.choices])

    def _choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": "".join(choice.parts),
            "logprobs": self.logprobs(choice.logged) if choice.offsets is not None else None,
            "finish_reason": choice.finish,
        }
