"""Events of one HTTP request become its answer: SSE bytes as they come, or one JSON object.

Knows no sockets and no wire format: those are `Shape`s (`shapes.py`, and beside their endpoints).
One call of `feed` gives what one write should carry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from octavo.core.request import EXPIRED, NO_WAY, Event, FinishReason, Request, TokenLogprob
from octavo.errors import EngineError, InvalidRequest, Unattainable
from octavo.server.parsing import Called, Delta, Parser, Said, Thought
from octavo.server.problems import envelope
from octavo.text import OutputText, Tokenizer

encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk of an answer repeats; include_usage: a stream ends with the usage. tier: the
    service tier that it is served at, where the request named one."""

    id: str
    created: int
    model: str
    fingerprint: str
    include_usage: bool = False
    tier: str | None = None


@dataclass(frozen=True, slots=True)
class Logged:
    """One token's logprob; offset: characters of the choice's text before it."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    offset: int


@dataclass(slots=True)
class Call:
    """A tool call of an answer; arguments: pieces of its JSON text."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class Choice:
    """One choice: its text so far and what is not sent yet. calls: all of its tool calls so far;
    num_thought: tokens of its reasoning."""

    __slots__ = (
        "calls",
        "echo",
        "embedding",
        "finish",
        "index",
        "logged",
        "num_accepted",
        "num_cached",
        "num_drafted",
        "num_thought",
        "num_tokens",
        "offset",
        "offsets",
        "opened",
        "parser",
        "parts",
        "request",
        "text",
        "thoughts",
        "unsure",
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
        self.parser = None if asked.parser is None else asked.parser()
        self.num_thought = self.unsure = 0
        self.embedding: bytes | None = None
        self.parts: list[str] = []
        self.thoughts: list[str] = []
        self.calls: list[Call] = []
        self.logged: list[Logged] = []

    def take(self, event: Event) -> Sequence[Delta]:
        """What the event's text says; logprobs gather in `logged`."""
        text = self._text_of(event)
        if self.parser is None:
            return (Said(text),) if text else ()
        deltas = self._parsed(self.parser, text, len(event.tokens))
        for delta in deltas:
            if isinstance(delta, Called):
                if delta.id is not None and delta.name is not None:
                    self.calls.append(Call(delta.id, delta.name))
                self.calls[delta.number].arguments.append(delta.arguments)
        if self.finish is FinishReason.STOP and self.calls:
            self.finish = FinishReason.TOOL_CALLS
        return deltas

    def _parsed(self, parser: Parser, text: str, tokens: int) -> list[Delta]:
        before = parser.thinking
        deltas = [*parser.push(text)] if text else []
        if before or parser.thinking:
            self.num_thought += self.unsure + tokens
            self.unsure = 0
        else:
            self.unsure = self.unsure + tokens if parser.thinking is None else 0
        return deltas if self.finish is None else [*deltas, *parser.finish()]

    def keep(self, deltas: Iterable[Delta]) -> None:
        """Of an answer that is not streamed."""
        for delta in deltas:
            if isinstance(delta, Said):
                self.parts.append(delta.text)
            elif isinstance(delta, Thought):
                self.thoughts.append(delta.text)

    def _text_of(self, event: Event) -> str:
        if event.error == EXPIRED:
            raise Unattainable(EXPIRED, 1.0)
        if event.error is not None and event.error.startswith(NO_WAY):
            held = self.request.params.structured_outputs
            raise InvalidRequest(event.error, None if held is None else held.param)
        if event.error is not None or event.finish in (FinishReason.ERROR, FinishReason.ABORT):
            raise EngineError(event.error or "the request was aborted")
        self.num_cached = max(self.num_cached, event.num_cached)
        self.num_drafted, self.num_accepted = event.num_drafted, event.num_accepted
        self.embedding = event.embedding
        shown = self._echo(event) if self.echo is not None else ""
        tokens: Sequence[int] = event.tokens
        # With an embedding a token is chosen too, and counts for nothing: nobody wants it.
        embeds = self.request.params.embed
        self.num_tokens += 0 if embeds else len(tokens)
        if event.logprobs is not None and self.offsets is not None:
            self._log(event.logprobs)
        self.finish = FinishReason.STOP if embeds and event.finish is not None else event.finish
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
    """How the answer is wanted. echo: per request, the prompt's text, or nothing. parser: makes
    what finds thoughts and calls in a choice's text; None: it is all content."""

    head: Head
    tokenizer: Tokenizer
    stream: bool = False
    skip_special: bool = True
    echo: tuple[str, ...] = ()
    parser: Callable[[], Parser] | None = None


class Shape(Protocol):
    """The wire format of one endpoint: what each moment of an answer looks like.

    Bytes are what a stream carries, whole events; a shape may say nothing at a moment. It is made
    for one answer and may keep what it needs of it.
    """

    @property
    def ping(self) -> bytes:
        """What a silent stream carries."""
        ...

    def start(self, reply: Reply, /) -> bytes:
        """The engine has taken the request."""
        ...

    def open(self, choice: Choice, /) -> bytes:
        """A choice has its first news."""
        ...

    def text(self, choice: Choice, text: str, logprobs: Any, /) -> bytes: ...

    def thought(self, choice: Choice, text: str, /) -> bytes:
        """A piece of reasoning."""
        ...

    def call(self, choice: Choice, called: Called, /) -> bytes:
        """A tool call begins, or a piece of its arguments."""
        ...

    def close(self, choice: Choice, /) -> bytes:
        """A choice has ended: its `finish` is set."""
        ...

    def last(self, reply: Reply, /) -> bytes:
        """All choices have ended."""
        ...

    def failure(self, status: int, body: dict[str, Any], /) -> bytes:
        """The answer ends in an error, when its head is out."""
        ...

    def logprobs(self, items: list[Logged], /) -> Any: ...

    def whole(self, reply: Reply, /) -> Any:
        """The answer as one JSON value, when all choices have ended; nothing of it was streamed."""
        ...


ShapeMaker = Callable[["Asked", int], Shape]  # int: choices


class Reply:
    """The answer to one HTTP request; `open_choices` counts those that have not ended."""

    def __init__(self, asked: Asked, shape: ShapeMaker, requests: Sequence[Request]) -> None:
        self.asked = asked
        self.requests = requests
        self.choices: list[Choice] = []
        for number, request in enumerate(requests):
            for _ in range(request.params.n):
                choice = Choice(len(self.choices), request, asked)
                choice.echo = asked.echo[number] if asked.echo else None
                self.choices.append(choice)
        self.open_choices = len(self.choices)
        self.shape = shape(asked, len(self.choices))
        self._unsent: list[bytes] = []  # made by a `feed` that raised: its events are numbered

    def start(self) -> bytes:
        """What a stream begins with, when the engine has taken the request."""
        return self.shape.start(self)

    def feed(self, news: Iterable[tuple[int, Event]]) -> bytes:
        """Take events; return the bytes to send now (none if the answer is not streamed).

        Raises `EngineError` if a choice failed or was aborted.
        """
        out = self._unsent
        for index, event in news:
            choice = self.choices[index]
            deltas = choice.take(event)
            if event.finish is not None:
                self.open_choices -= 1
            if self.asked.stream:
                out.append(self._pieces(choice, deltas))
            else:
                choice.keep(deltas)
        if self.asked.stream and self.open_choices == 0:
            out.append(self.shape.last(self))
        self._unsent = []
        return b"".join(out)

    def _pieces(self, choice: Choice, deltas: Iterable[Delta]) -> bytes:
        shape = self.shape
        out = b""
        if not choice.opened:
            choice.opened = True
            out = shape.open(choice)
        for delta in deltas:
            if isinstance(delta, Said):
                out += self._text(choice, delta.text)
            elif isinstance(delta, Thought):
                out += shape.thought(choice, delta.text)
            else:
                out += shape.call(choice, delta)
        if choice.finish is not None:
            # Logprobs wait for text to go with, so that no chunk is empty without need.
            if choice.logged:
                out += self._text(choice, "")
            out += shape.close(choice)
        return out

    def _text(self, choice: Choice, text: str) -> bytes:
        logprobs = None
        if choice.logged:
            logprobs, choice.logged = self.shape.logprobs(choice.logged), []
        return self.shape.text(choice, text, logprobs)

    def failure(self, error: Exception) -> bytes:
        """The last event of a stream that fails when its status is out."""
        return b"".join(self._unsent) + self.shape.failure(*envelope(error))

    def whole(self) -> bytes:
        """The answer as one JSON object, when all choices have ended."""
        return encode(self.shape.whole(self))

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
                "reasoning_tokens": sum(choice.num_thought for choice in self.choices),
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }
