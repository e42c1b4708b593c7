"""OpenAI's Responses API on the wire: one object, or numbered events that build it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.core.request import FinishReason
from octavo.server.parsing import Called
from octavo.server.reply import Asked, Choice, Logged, Reply, encode
from octavo.server.shapes import PING, logprob_entries


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
        self._item = "msg_" + asked.head.id.removeprefix("resp_")
        self._parts: list[str] = []
        self._logprobs: list[Any] = []
        place = {"item_id": self._item, "output_index": 0, "content_index": 0}
        kind = "response.output_text.delta"
        head = encode({"type": kind} | place)[:-1] + b',"delta":'
        self._delta = b"event: " + kind.encode() + b"\ndata: " + head
        self._place = place

    def start(self, reply: Reply) -> bytes:
        body = {"response": self._response("in_progress", [], None)}
        return self._event("response.created", body) + self._event("response.in_progress", body)

    def open(self, choice: Choice) -> bytes:
        item = self._message("in_progress", [])
        part = self._place | {"part": self._text("", [])}
        added = {"output_index": 0, "item": item}
        return self._event("response.output_item.added", added) + self._event(
            "response.content_part.added", part
        )

    def text(self, choice: Choice, text: str, logprobs: Any) -> bytes:
        self._parts.append(text)
        number, self._number = self._number, self._number + 1
        shown = b"[]"
        if logprobs:
            self._logprobs += logprobs
            shown = encode(logprobs)
        end = b',"logprobs":%b,"sequence_number":%d}\n\n' % (shown, number)
        return self._delta + encode(text) + end

    def thought(self, choice: Choice, text: str) -> bytes:
        return b""  # nothing is parsed for this API yet

    def call(self, choice: Choice, called: Called) -> bytes:
        return b""

    def close(self, choice: Choice) -> bytes:
        text = self._text("".join(self._parts), self._logprobs)
        said = {"text": text["text"], "logprobs": text["logprobs"]}
        item = self._message(_status(choice), [text])
        return (
            self._event("response.output_text.done", self._place | said)
            + self._event("response.content_part.done", self._place | {"part": text})
            + self._event("response.output_item.done", {"output_index": 0, "item": item})
        )

    def last(self, reply: Reply) -> bytes:
        choice = reply.choices[0]
        text = self._text("".join(self._parts), self._logprobs)
        response = self._finished(reply, [self._message(_status(choice), [text])])
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
        logprobs = self.logprobs(choice.logged) if choice.offsets is not None else []
        text = self._text("".join(choice.parts), logprobs)
        return self._finished(reply, [self._message(_status(choice), [text])])

    def _finished(self, reply: Reply, output: list[Any]) -> dict[str, Any]:
        response = self._response(_status(reply.choices[0]), output, reply)
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
            "output": output,
            "usage": None if reply is None else usage(reply),
        } | self._fields

    def _message(self, status: str, content: list[Any]) -> dict[str, Any]:
        kind = {"id": self._item, "type": "message", "status": status, "role": "assistant"}
        return kind | {"content": content}

    def _text(self, text: str, logprobs: list[Any]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

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
