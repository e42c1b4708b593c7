"""OpenAI's Responses API on the wire: one object, or numbered events that build it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from octavo.core.request import FinishReason
from octavo.server.parsing import Called
from octavo.server.reply import Asked, Choice, Logged, Reply, encode
from octavo.server.shapes import PING, logprob_entries

_NAMES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_DELTAS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}


@dataclass(slots=True)
class Item:
    """One item of the output while it grows. head: what a delta of it begins with; call: id and
    name of a function call."""

    kind: str
    id: str
    index: int
    call: tuple[str, str] | None = None
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    head: bytes = b""

    def place(self) -> dict[str, Any]:
        """Where it is, in the words of an event."""
        found: dict[str, Any] = {"item_id": self.id, "output_index": self.index}
        return found if self.call is not None else found | {"content_index": 0}

    def part(self) -> dict[str, Any]:
        """Its content so far."""
        text = "".join(self.pieces)
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": self.logprobs,
        }

    def shown(self, status: str, *, empty: bool = False) -> dict[str, Any]:
        """As it stands in the output; empty: as it is announced."""
        made: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        if self.call is not None:
            call_id, name = self.call
            return made | {"call_id": call_id, "name": name, "arguments": "".join(self.pieces)}
        content = [] if empty else [self.part()]
        if self.kind == "reasoning":
            return made | {"summary": [], "content": content}
        return made | {"role": "assistant", "content": content}


class ResponsesShape:
    """The one choice of a response. fields: what the object says of its request; done: takes the
    finished object."""

    ping = PING

    def __init__(
        self, asked: Asked, fields: dict[str, Any], done: Callable[[dict[str, Any]], None]
    ) -> None:
        self._asked = asked
        self._fields = fields
        self._done = done
        self._number = 0
        self._items: list[Item] = []
        self._open: Item | None = None

    def start(self, reply: Reply) -> bytes:
        body = {"response": self._response("in_progress", [], None)}
        return self._event("response.created", body) + self._event("response.in_progress", body)

    def open(self, choice: Choice) -> bytes:
        return b""

    def text(self, choice: Choice, text: str, logprobs: Any) -> bytes:
        out, item = self._in("message")
        shown = b"[]"
        if logprobs:
            item.logprobs += logprobs
            shown = encode(logprobs)
        return out + self._delta(item, text, b',"logprobs":' + shown)

    def thought(self, choice: Choice, text: str) -> bytes:
        out, item = self._in("reasoning")
        return out + self._delta(item, text)

    def call(self, choice: Choice, called: Called) -> bytes:
        if called.id is not None and called.name is not None:
            out = self._close("completed") + self._begin("function_call", (called.id, called.name))
        else:
            out = b""
        assert self._open is not None
        return out + self._delta(self._open, called.arguments) if called.arguments else out

    def close(self, choice: Choice) -> bytes:
        out = b"" if self._items else self._begin("message")
        return out + self._close(_status(choice))

    def last(self, reply: Reply) -> bytes:
        response = self._finished(reply)
        return self._event(f"response.{response['status']}", {"response": response})

    def failure(self, status: int, body: dict[str, Any]) -> bytes:
        error = body["error"]
        response = self._response("failed", [], None)
        response["error"] = {"code": error["code"] or error["type"], "message": error["message"]}
        return self._event("response.failed", {"response": response})

    def logprobs(self, items: list[Logged]) -> list[dict[str, Any]]:
        return logprob_entries(self._asked.tokenizer, items)

    def whole(self, reply: Reply) -> dict[str, Any]:
        choice = reply.choices[0]
        if choice.thoughts:
            self._item("reasoning").pieces += choice.thoughts
        if choice.parts or not (choice.calls or choice.thoughts):
            message = self._item("message")
            message.pieces += choice.parts
            if choice.offsets is not None:
                message.logprobs += self.logprobs(choice.logged)
        for call in choice.calls:
            self._item("function_call", (call.id, call.name)).pieces += call.arguments
        return self._finished(reply)

    # ---- items ----

    def _item(self, kind: str, call: tuple[str, str] | None = None) -> Item:
        index = len(self._items)
        own = self._asked.head.id.removeprefix("resp_")
        item = Item(kind, f"{_NAMES[kind]}_{own}{index:02d}", index, call)
        self._items.append(item)
        return item

    def _in(self, kind: str) -> tuple[bytes, Item]:
        """The open item, if it is of that kind; or else the events that end it and begin one."""
        if self._open is not None and self._open.kind == kind:
            return b"", self._open
        out = self._close("completed") + self._begin(kind)
        assert self._open is not None
        return out, self._open

    def _begin(self, kind: str, call: tuple[str, str] | None = None) -> bytes:
        self._open = item = self._item(kind, call)
        name = f"{_DELTAS[kind]}.delta"
        head = encode({"type": name} | item.place())[:-1] + b',"delta":'
        item.head = b"event: " + name.encode() + b"\ndata: " + head
        shown = item.shown("in_progress", empty=True)
        out = self._event("response.output_item.added", {"output_index": item.index, "item": shown})
        if call is None:
            out += self._event("response.content_part.added", item.place() | {"part": item.part()})
        return out

    def _delta(self, item: Item, text: str, more: bytes = b"") -> bytes:
        item.pieces.append(text)
        number, self._number = self._number, self._number + 1
        return item.head + encode(text) + more + b',"sequence_number":%d}\n\n' % number

    def _close(self, status: str) -> bytes:
        """The events that end the open item."""
        item, self._open = self._open, None
        if item is None:
            return b""
        place, name = item.place(), f"{_DELTAS[item.kind]}.done"
        if item.call is not None:
            said = {"name": item.call[1], "arguments": "".join(item.pieces)}
            out = self._event(name, place | said)
        else:
            part = item.part()
            said = {key: part[key] for key in ("text", "logprobs") if key in part}
            out = self._event(name, place | said)
            out += self._event("response.content_part.done", place | {"part": part})
        ended = {"output_index": item.index, "item": item.shown(status)}
        return out + self._event("response.output_item.done", ended)

    # ---- the whole ----

    def _finished(self, reply: Reply) -> dict[str, Any]:
        status = _status(reply.choices[0])
        output = [item.shown("completed") for item in self._items]
        output[-1]["status"] = status
        response = self._response(status, output, reply)
        self._done(response)
        return response

    def _response(self, status: str, output: list[Any], reply: Reply | None) -> dict[str, Any]:
        head = self._asked.head
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": head.id,
            "object": "response",
            "created_at": head.created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "model": head.model,
            "service_tier": head.tier or "default",
            "output": output,
            "usage": None if reply is None else usage(reply),
        } | self._fields

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        body = encode({"type": kind, "sequence_number": number} | fields)
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"


def usage(reply: Reply) -> dict[str, Any]:
    """Token counts, as this API names them."""
    prompt, output = reply.num_prompt_tokens, reply.num_tokens
    details = reply.usage()["completion_tokens_details"]
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": reply.num_cached, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": details["reasoning_tokens"]},
        "total_tokens": prompt + output,
    }


def _status(choice: Choice) -> str:
    return "incomplete" if choice.finish is FinishReason.LENGTH else "completed"
