"""What a check may ask of the server under test, and the four ways in which it may end.

A check returns its evidence, or raises: `Failed` (the behaviour is not there), `NotOffered` (the
server does not have the endpoint or refuses the feature as a whole), `Unclear` (this model or this
server gave nothing to judge by).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

from octavo.conformance.wire import Answer, Stream, Wire

ABSENT = (404, 405, 501)
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
SHORT = "Write one sentence about the sea."
LONG = "Count from 1 to 100 in words, one per line: one, two, three, and so on."
RUNNING = re.compile(
    rb"^(?:octavo_requests_(?:running|waiting)|vllm:num_requests_(?:running|waiting)"
    rb"|sglang:num_(?:running|queue)_reqs|llamacpp:requests_(?:processing|deferred)"
    rb"|lmdeploy:num_requests_(?:running|waiting))(?:\{[^}]*\})? ([0-9.e+-]+)\s*$",
    re.M,
)


class Failed(Exception):
    """The behaviour is not there; the text is the evidence."""


class NotOffered(Exception):
    """The server does not have what is tested."""


class Unclear(Exception):
    """Nothing to judge by."""


def need(ok: object, evidence: str) -> None:
    if not ok:
        raise Failed(evidence)


def short(value: object, most: int = 200) -> str:
    """A value, short enough for a report."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"


@dataclass(frozen=True)
class Settings:
    """quiet: seconds after which a silent stream must have been given a comment. freed: seconds in
    which a request that was left must be gone. flood: requests sent at once to fill the server.
    wait: seconds that a batch may take."""

    quiet: float = 15.0
    freed: float = 2.0
    flood: int = 400
    wait: float = 120.0


class Probe:
    """The server under test."""

    def __init__(self, wire: Wire, model: str, settings: Settings = Settings()) -> None:
        self.wire = wire
        self.model = model
        self.settings = settings
        self.made: list[str] = []  # paths of what checks left in the server

    def tidy(self) -> None:
        """Delete what was made, as far as the server lets one."""
        while self.made:
            with contextlib.suppress(OSError, http.client.HTTPException):
                self.wire.ask("DELETE", self.made.pop())

    # ---- bodies ----

    def chat_body(self, text: str = SHORT, **fields: Any) -> dict[str, Any]:
        """A greedy chat of at most 48 tokens; a field that is None is left out."""
        messages = [{"role": "user", "content": text}]
        body = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": 48}
        return {name: value for name, value in (body | fields).items() if value is not None}

    def completion_body(self, prompt: Any = "The sea is", **fields: Any) -> dict[str, Any]:
        body = {"model": self.model, "prompt": prompt, "temperature": 0, "max_tokens": 32}
        return {name: value for name, value in (body | fields).items() if value is not None}

    # ---- asking ----

    def chat(self, text: str = SHORT, **fields: Any) -> dict[str, Any]:
        return self.good(CHAT, self.chat_body(text, **fields))

    def completion(self, prompt: Any = "The sea is", **fields: Any) -> dict[str, Any]:
        return self.good(COMPLETIONS, self.completion_body(prompt, **fields))

    def chat_stream(self, text: str = SHORT, **fields: Any) -> Stream:
        return self.good_stream(CHAT, self.chat_body(text, stream=True, **fields))

    def completion_stream(self, prompt: Any = "The sea is", **fields: Any) -> Stream:
        return self.good_stream(COMPLETIONS, self.completion_body(prompt, stream=True, **fields))

    def good(self, path: str, body: Any, headers: dict[str, str] | None = None) -> dict[str, Any]:
        """The JSON of a request that must be served."""
        answer = self.wire.ask("POST", path, body, headers)
        _served(path, answer.status, answer.body)
        need(isinstance(answer.json, dict), f"{path} answered {short(answer.body)}")
        found: dict[str, Any] = answer.json
        return found

    def good_stream(
        self,
        path: str,
        body: Any,
        until: Callable[[Stream], bool] = lambda _: False,
        headers: dict[str, str] | None = None,
    ) -> Stream:
        stream = self.wire.stream(path, body, until, headers)
        _served(path, stream.status, stream.body)
        return stream

    def post(self, path: str, body: Any) -> Answer:
        return self.wire.ask("POST", path, body)

    def refused(self, path: str, body: Any, status: tuple[int, ...] = (400,)) -> dict[str, Any]:
        """The error object of a request that must be refused."""
        answer = self.wire.ask("POST", path, body)
        if answer.status in ABSENT and 404 not in status:
            raise NotOffered(f"{path}: {answer.status}")
        wanted = " or ".join(map(str, status))
        shown = f"wanted {wanted}, got {answer.status}: {short(answer.body)}"
        need(answer.status in status, shown)
        return error_of(answer.json, answer.body)

    # ---- what is known of it ----

    @cached_property
    def context(self) -> int | None:
        """Tokens of its context, where /v1/models or /props tells."""
        found = self.wire.ask("GET", "/v1/models").json or {}
        for model in found.get("data") or ():
            if model.get("id") == self.model:
                meta = model.get("meta") or {}
                told = model.get("max_model_len") or meta.get("n_ctx") or meta.get("n_ctx_train")
                if isinstance(told, int):
                    return told
        return None

    def occupancy(self) -> float:
        """Requests running and waiting, by the server's own gauges."""
        answer = self.wire.ask("GET", "/metrics")
        found = RUNNING.findall(answer.body) if answer.status == 200 else []
        if not found:
            raise Unclear("no gauge of running requests at /metrics")
        return sum(map(float, found))

    def until(self, ok: Callable[[], bool], seconds: float) -> bool:
        """Wait until it is so; false if it is not in time."""
        end = time.monotonic() + seconds
        while not ok():
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True


def _served(path: str, status: int, body: bytes) -> None:
    if status in ABSENT:
        raise NotOffered(f"{path}: {status}")
    need(status == 200, f"{path} answered {status}: {short(body)}")


def error_of(value: Any, body: bytes) -> dict[str, Any]:
    """The error object of an envelope, which must be one."""
    error = value.get("error") if isinstance(value, dict) else None
    need(isinstance(error, dict), f'no {{"error": {{...}}}}: {short(body)}')
    assert isinstance(error, dict)
    return error


def optional(feature: str, answer: Answer) -> dict[str, Any]:
    """The answer to a request for a feature that a server may refuse as a whole."""
    if answer.status in (400, 404, 405, 415, 422, 501):
        refuse(f"{feature}: {answer.status}: {short(said(answer))}")
    need(answer.status == 200, f"{feature}: {answer.status}: {short(answer.body)}")
    need(isinstance(answer.json, dict), f"{feature}: no JSON object: {short(answer.body)}")
    found: dict[str, Any] = answer.json
    return found


def said(answer: Answer) -> object:
    """The error's message, or the body where there is none."""
    error = answer.json.get("error") if isinstance(answer.json, dict) else None
    return error.get("message", error) if isinstance(error, dict) else answer.body


def refuse(why: str) -> NoReturn:
    raise NotOffered(why)


def first(answer: dict[str, Any]) -> dict[str, Any]:
    """The first choice."""
    choices = answer.get("choices")
    need(isinstance(choices, list) and choices, f"no choices: {short(json.dumps(answer))}")
    assert choices
    choice: dict[str, Any] = choices[0]
    return choice


def text_of(answer: dict[str, Any]) -> str:
    """The first choice's text, of chat or of completions."""
    choice = first(answer)
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("message") or {}).get("content") or "")


def usage_of(answer: dict[str, Any]) -> dict[str, Any]:
    usage = answer.get("usage")
    need(isinstance(usage, dict), f"no usage: {short(json.dumps(answer))}")
    assert isinstance(usage, dict)
    return usage
