"""Events of one HTTP request become its answer: SSE bytes as they come, or one JSON object.

Knows no sockets. A stream's pieces are built from bytes prepared once per choice; only the text
itself is encoded per step. One call of `feed` gives what one write should carry.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from octavo.core.request import EXPIRED, Event, FinishReason, Request, TokenLogprob
from octavo.errors import EngineError, Unattainable
from octavo.text import OutputText, Tokenizer

encode = msgspec.json.encode

DONE = b"data: [DONE]\n\n"
PING = b": keep-alive\n\n"
LOWEST = -9999.0  # JSON has no -inf


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk of an answer repeats."""

    id: str
    created: int
    model: str
    fingerprint: str
    include_usage: bool = False


class Shape(Protocol):
    """The JSON of one endpoint."""

    def open(self, index: int, /) -> bytes: ...
    def text(self, index: int, text: str, logprobs: Any, /) -> bytes: ...
    def close(self, index: int, finish: str, /) -> bytes: ...
    def logprobs(self, items: list[Logged], /) -> Any: ...
    def choice(self, index: int, text: str, logprobs: Any, finish: str, /) -> dict[str, Any]: ...
    @property
    def kind(self) -> str: ...
    @property
    def chunk_kind(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Logged:
    """One token's logprob; offset: characters of the choice's text before it."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    offset: int


def _frame(head: Head, kind: str) -> tuple[bytes, bytes]:
    """What stands before a choice's index, and after the choice."""
    fields = {
        "id": head.id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
    }
    before = b"data: " + encode(fields)[:-1] + b',"choices":[{"index":'
    return before, b"}]" + (b',"usage":null' if head.include_usage else b"") + b"}\n\n"


class ChatShape:
    """chat.completion and its chunks."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, head: Head, tokenizer: Tokenizer, choices: int) -> None:
        self._tokenizer = tokenizer
        before, self._end = _frame(head, self.chunk_kind)
        self._deltas = [before + b'%d,"delta":{' % index for index in range(choices)]
        self._texts = [delta + b'"content":' for delta in self._deltas]
        self._plain = b'},"logprobs":null,"finish_reason":null' + self._end

    def open(self, index: int) -> bytes:
        return self._deltas[index] + b'"role":"assistant","content":""' + self._plain

    def text(self, index: int, text: str, logprobs: Any) -> bytes:
        if logprobs is None:
            return self._texts[index] + encode(text) + self._plain
        middle = b'},"logprobs":' + encode(logprobs) + b',"finish_reason":null'
        return self._texts[index] + encode(text) + middle + self._end

    def close(self, index: int, finish: str) -> bytes:
        end = b'},"logprobs":null,"finish_reason":' + encode(finish) + self._end
        return self._deltas[index] + end

    def logprobs(self, items: list[Logged]) -> dict[str, Any]:
        content = [
            self._entry(item.token, item.logprob)
            | {"top_logprobs": [self._entry(*alternative) for alternative in item.top]}
            for item in items
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token)
        return {
            "token": raw.decode("utf-8", "replace"),
            "logprob": None if logprob is None else max(logprob, LOWEST),
            "bytes": list(raw),
        }

    def choice(self, index: int, text: str, logprobs: Any, finish: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}


class CompletionShape:
    """text_completion; its chunks look the same."""

    kind = chunk_kind = "text_completion"

    def __init__(self, head: Head, tokenizer: Tokenizer, choices: int) -> None:
        self._tokenizer = tokenizer
        before, self._end = _frame(head, self.chunk_kind)
        self._texts = [before + b'%d,"text":' % index for index in range(choices)]
        self._plain = b',"logprobs":null,"finish_reason":null' + self._end

    def open(self, index: int) -> bytes:
        return b""

    def text(self, index: int, text: str, logprobs: Any) -> bytes:
        if logprobs is None:
            return self._texts[index] + encode(text) + self._plain
        middle = b',"logprobs":' + encode(logprobs) + b',"finish_reason":null'
        return self._texts[index] + encode(text) + middle + self._end

    def close(self, index: int, finish: str) -> bytes:
        end = b'"","logprobs":null,"finish_reason":' + encode(finish) + self._end
        return self._texts[index] + end

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

    def choice(self, index: int, text: str, logprobs: Any, finish: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


class Choice:
    """One choice: its text so far and what is not sent yet."""

    __slots__ = (
        "echo",
        "finish",
        "index",
        "logged",
        "num_accepted",
        "num_cached",
        "num_drafted",
        "num_tokens",
        "offset",
        "offsets",
        "opened",
        "parts",
        "request",
        "text",
    )

    def __init__(self, index: int, request: Request, asked: Asked) -> None:
        params, tokenizer = request.params, asked.tokenizer
        self.index = index
        self.request = request
        stream = tokenizer.stream(asked.skip_special, continuation=True)
        self.text = OutputText(stream, params.stop, params.min_tokens)
        # Offsets count characters token by token, stop strings or not.
        wants_logprobs = params.logprobs is not None
        self.offsets = tokenizer.stream(asked.skip_special) if wants_logprobs else None
        self.offset = 0
        self.echo: str | None = None
        self.opened = False
        self.finish: FinishReason | None = None
        self.num_tokens = 0
        self.num_cached = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self.parts: list[str] = []
        self.logged: list[Logged] = []

    def take(self, event: Event) -> str:
        """The event's text; logprobs gather in `logged`."""
        if event.error == EXPIRED:
            raise Unattainable(EXPIRED, 1.0)
        if event.error is not None or event.finish in (FinishReason.ERROR, FinishReason.ABORT):
            raise EngineError(event.error or "the request was aborted")
        self.num_cached = max(self.num_cached, event.num_cached)
        self.num_drafted, self.num_accepted = event.num_drafted, event.num_accepted
        shown = self._echo(event) if self.echo is not None else ""
        tokens: Sequence[int] = event.tokens
        self.num_tokens += len(tokens)
        if event.logprobs is not None and self.offsets is not None:
            self._log(event.logprobs)
        self.finish = event.finish
        if event.finish is FinishReason.STOP and tokens and tokens[-1] in self.request.stop_ids:
            tokens = tokens[:-1]  # the token that stops is not part of the text
        shown += self.text.push(tokens) if tokens else ""
        return shown + self.text.finish() if event.finish is not None else shown

    def _echo(self, event: Event) -> str:
        """The prompt's text, once, and its logprobs."""
        assert self.echo is not None
        echo, self.echo = self.echo, None
        if event.prompt_logprobs is not None and self.offsets is not None:
            for token, item in zip(self.request.prompt, event.prompt_logprobs, strict=True):
                logprob, top = (None, ()) if item is None else (item.logprob, item.top)
                self.logged.append(Logged(token, logprob, top, self.offset))
                self.offset += len(self.offsets.push((token,)))
            # Offsets of the answer count from the prompt as it is shown.
            self.offset = len(echo)
        return echo

    def _log(self, items: Iterable[TokenLogprob]) -> None:
        assert self.offsets is not None
        for item in items:
            self.logged.append(Logged(item.token, item.logprob, item.top, self.offset))
            self.offset += len(self.offsets.push((item.token,)))


@dataclass(frozen=True, slots=True)
class Asked:
    """How the answer is wanted. echo: per request, the prompt's text, or nothing."""

    head: Head
    tokenizer: Tokenizer
    stream: bool = False
    skip_special: bool = True
    echo: tuple[str, ...] = ()


class Reply:
    """The answer to one HTTP request; `open_choices` counts those that have not ended."""

    def __init__(
        self,
        asked: Asked,
        shape: type[ChatShape] | type[CompletionShape],
        requests: Sequence[Request],
    ) -> None:
        self.asked = asked
        self.requests = requests
        self.choices: list[Choice] = []
        for number, request in enumerate(requests):
            for _ in range(request.params.n):
                choice = Choice(len(self.choices), request, asked)
                choice.echo = asked.echo[number] if asked.echo else None
                self.choices.append(choice)
        self.open_choices = len(self.choices)
        self._shape: Shape = shape(asked.head, asked.tokenizer, len(self.choices))

    def feed(self, news: Iterable[tuple[int, Event]]) -> bytes:
        """Take events; return the bytes to send now (none if the answer is not streamed).

        Raises `EngineError` if a choice failed or was aborted.
        """
        out = []
        for index, event in news:
            choice = self.choices[index]
            text = choice.take(event)
            if event.finish is not None:
                self.open_choices -= 1
            if self.asked.stream:
                out.append(self._pieces(choice, text))
            elif text:
                choice.parts.append(text)
        if self.asked.stream and self.open_choices == 0:
            out.append(self._last())
        return b"".join(out)

    def _pieces(self, choice: Choice, text: str) -> bytes:
        shape, index = self._shape, choice.index
        out = b""
        if not choice.opened:
            choice.opened = True
            out = shape.open(index)
        # Logprobs wait for text to go with, so that no chunk is empty without need.
        if text or (choice.logged and choice.finish is not None):
            logprobs = None
            if choice.logged:
                logprobs, choice.logged = shape.logprobs(choice.logged), []
            out += shape.text(index, text, logprobs)
        if choice.finish is not None:
            out += shape.close(index, choice.finish.value)
        return out

    def _last(self) -> bytes:
        if not self.asked.head.include_usage:
            return DONE
        return b"data: " + encode(self._object(self._shape.chunk_kind, [])) + b"\n\n" + DONE

    def whole(self) -> bytes:
        """The answer as one JSON object, when all choices have ended."""
        shape = self._shape
        choices = []
        for choice in self.choices:
            logprobs = shape.logprobs(choice.logged) if choice.offsets is not None else None
            assert choice.finish is not None
            text = "".join(choice.parts)
            choices.append(shape.choice(choice.index, text, logprobs, choice.finish.value))
        return encode(self._object(shape.kind, choices))

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = self.asked.head
        return {
            "id": head.id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
            "choices": choices,
            "usage": self.usage(),
        }

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_cached(self) -> int:
        """Prompt tokens found in the cache, counted once per prompt (by its first choice)."""
        count, index = 0, 0
        for request in self.requests:
            count += self.choices[index].num_cached
            index += request.params.n
        return count

    def usage(self) -> dict[str, Any]:
        """Token counts. Prediction tokens: guesses of the engine, from the caller's prediction or
        from the text itself, that held or did not; completion_tokens count what was kept alone."""
        prompt, output = self.num_prompt_tokens, self.num_tokens
        drafted = sum(choice.num_drafted for choice in self.choices)
        accepted = sum(choice.num_accepted for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }
