"""The offline API: a model in this process, driven by whoever asks for its next token.

Nothing runs in the background. Several streams may be open at once, in one thread or more: each
step serves all of them, and its news waits for the stream that it belongs to.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import index
from typing import Any, overload

from octavo.assembly import Assembly, assemble, no_progress
from octavo.assembly import Progress as Progress
from octavo.config import DEFAULT_MODEL, EngineConfig
from octavo.core.request import Event, FinishReason, Request, SamplingParams, TokenLogprob
from octavo.errors import InvalidRequest
from octavo.text import OutputText

Prompt = str | Sequence[int]
Prompts = Prompt | Sequence[Prompt]
Message = dict[str, str]
Params = SamplingParams | Sequence[SamplingParams]

MAX_WAITING = 2**31
PATIENCE = 2.0  # seconds after which one who waits at a terminal is told how far it is


@dataclass(frozen=True, slots=True)
class Choice:
    """One continuation. error: why this one failed; the others did not.

    token_ids hold the token that stopped it, text does not. logprobs: one per token, if asked for.
    num_drafted, num_accepted: tokens guessed for it (speculation), and those of them that held.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None
    num_drafted: int = field(default=0, compare=False)
    num_accepted: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Completion:
    """What became of one prompt: `params.n` choices; text, token_ids ... are the first one's.

    num_cached: prompt tokens that the prefix cache had. prompt_logprobs: None for the first token.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    num_cached: int = 0

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.choices[0].logprobs


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to one choice of one prompt. finish_reason: set on the last piece.

    num_drafted, num_accepted: tokens guessed for the choice so far, and those of them that held.
    """

    prompt_index: int
    choice: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None
    num_drafted: int = field(default=0, compare=False)
    num_accepted: int = field(default=0, compare=False)


class _Writer:
    """Gathers the events of one choice."""

    def __init__(self, assembly: Assembly, request: Request) -> None:
        params = request.params
        stream = assembly.tokenizer.stream(continuation=True)
        self._text = OutputText(stream, params.stop, params.min_tokens)
        self._stop_ids = request.stop_ids
        self.texts: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] | None = [] if params.logprobs is not None else None
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.finish: FinishReason | None = None
        self.error: str | None = None
        self.num_cached = 0
        self.drafted = 0, 0

    def take(self, event: Event) -> str:
        """The text that the event adds."""
        shown: Sequence[int] = event.tokens
        if event.finish is FinishReason.STOP and shown and shown[-1] in self._stop_ids:
            shown = shown[:-1]
        text = self._text.push(shown) if shown else ""
        if event.finish is not None:
            text += self._text.finish()
        self.texts.append(text)
        self.tokens.extend(event.tokens)
        if self.logprobs is not None and event.logprobs is not None:
            self.logprobs.extend(event.logprobs)
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        self.num_cached = max(self.num_cached, event.num_cached)
        self.drafted = event.num_drafted, event.num_accepted
        self.finish, self.error = event.finish, event.error
        return text

    def choice(self) -> Choice:
        assert self.finish is not None
        logprobs = None if self.logprobs is None else tuple(self.logprobs)
        text, tokens = "".join(self.texts), tuple(self.tokens)
        return Choice(text, tokens, self.finish.value, logprobs, self.error, *self.drafted)


class LLM:
    """A model, loaded. `knobs` are the fields of `EngineConfig`, such as kv_memory or threads.

        llm = LLM("smollm2-135m", threads=2)
        llm.generate(["The sea is", "Once"], SamplingParams(max_tokens=20))

    Raises `ModelError` if the model cannot be had, `EngineError` if it cannot be run.
    """

    def __init__(
        self, model: str = DEFAULT_MODEL, *, progress: Progress | None = None, **knobs: Any
    ) -> None:
        config = EngineConfig(model=model, **knobs)
        with _loading(progress) as told:
            self._use(assemble(config, max_waiting=MAX_WAITING, progress=told))

    @classmethod
    def over(cls, assembly: Assembly) -> LLM:
        """An LLM on an engine that is already there."""
        llm = cls.__new__(cls)
        llm._use(assembly)
        return llm

    def _use(self, assembly: Assembly) -> None:
        self.assembly = assembly
        self.config = assembly.config
        self.tokenizer = assembly.tokenizer
        self._engine = assembly.engine
        self._lock = threading.RLock()
        self._ids = count()
        self._inboxes: dict[str, deque[Event]] = {}
        self._left: list[str] = []  # requests whose reader has gone, to abort after the step
        self._stepping = False

    def generate(
        self,
        prompts: Prompts,
        params: Params | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Completion]:
        """One `Completion` per prompt, in order. A prompt is a text or its token ids.

        params: one for all, or one each. Without `max_tokens` a text goes on to a stop token, or
        to the end of the context, as OpenAI's chat does: what nobody asked to cut is not cut, and
        `finish_reason` is "length" for what ran out of room. A small model may go on for thousands
        of tokens, so name a `max_tokens` where that is too many. progress: a bar on stderr with the
        tokens so far and the most that there may be; None shows it on a terminal, at once for
        several prompts, for one after two seconds. Raises `InvalidRequest` before anything runs.
        """
        texts, requests = self._requests(prompts, params)
        return self._complete(texts, requests, progress)

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        progress: bool | None = None,
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        params: Params | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Completion]: ...

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params | None = None,
        *,
        progress: bool | None = None,
    ) -> Completion | list[Completion]:
        """Answer a conversation: a `Completion`, or a list of them for a list of conversations."""
        if not isinstance(messages, list | tuple):
            raise InvalidRequest("messages must be a list of messages", "messages")
        many = bool(messages) and not isinstance(messages[0], Mapping)
        talks: Any = messages if many else [messages]
        prompts = [self.chat_ids(talk) for talk in talks]
        done = self.generate(prompts, params, progress=progress)
        return done if many else done[0]

    def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a conversation under the model's chat template."""
        if self.assembly.template is None:
            raise InvalidRequest("this model has no chat template; use generate()", "messages")
        if not isinstance(messages, list | tuple):
            raise InvalidRequest("messages must be a list of messages", "messages")
        plain: Any = [dict(m) if isinstance(m, Mapping) else m for m in messages]
        return self.assembly.template(plain)

    def stream(self, prompts: Prompts, params: Params | None = None) -> Iterator[Piece]:
        """Pieces of all prompts as they come; closing the iterator ends the requests."""
        _, requests = self._requests(prompts, params)
        writers = self._writers(requests)
        numbers = {request.id: number for number, request in enumerate(requests)}
        for event in self._events(requests):
            text = writers[event.request_id, event.choice].take(event)
            yield Piece(
                numbers[event.request_id],
                event.choice,
                text,
                event.tokens,
                None if event.finish is None else event.finish.value,
                event.logprobs,
                event.error,
                event.num_drafted,
                event.num_accepted,
            )

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None
    ) -> Iterator[Piece]:
        """The answer to one conversation, piece by piece."""
        return self.stream(self.chat_ids(messages), params)

    # ---- inside ----

    def _requests(
        self, prompts: Prompts, params: Params | None
    ) -> tuple[list[str | None], list[Request]]:
        listed = _listed(prompts)
        params = SamplingParams() if params is None else params
        if isinstance(params, SamplingParams):
            each = [params] * len(listed)
        else:
            each = list(params) if isinstance(params, Iterable) else [params]
        if not all(isinstance(own, SamplingParams) for own in each):
            raise InvalidRequest("params must be SamplingParams, or one each", "params")
        if len(each) != len(listed):
            raise InvalidRequest(f"{len(listed)} prompts, but {len(each)} params", "params")
        now = time.monotonic()
        texts, requests = [], []
        for prompt, own in zip(listed, each, strict=True):
            text = prompt if isinstance(prompt, str) else None
            ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            id = f"llm-{next(self._ids)}"
            requests.append(self.assembly.door.request(id, ids, own, arrival=now))
            texts.append(text)
        return texts, requests

    def _most(self, request: Request) -> int:
        """Tokens that a choice of it may have."""
        room = self.assembly.door.room - len(request.prompt)
        most = request.params.max_tokens
        return room if most is None else most

    def _writers(self, requests: Sequence[Request]) -> dict[tuple[str, int], _Writer]:
        return {
            (request.id, choice): _Writer(self.assembly, request)
            for request in requests
            for choice in range(request.params.n)
        }

    def _complete(
        self, texts: Sequence[str | None], requests: Sequence[Request], progress: bool | None
    ) -> list[Completion]:
        writers = self._writers(requests)
        most = sum(request.params.n * self._most(request) for request in requests)
        with _bar(len(writers), most, progress) as tick:
            for event in self._events(requests):
                writers[event.request_id, event.choice].take(event)
                tick(len(event.tokens), event.finish is not None)
        made = []
        for text, request in zip(texts, requests, strict=True):
            own = [writers[request.id, choice] for choice in range(request.params.n)]
            choices = tuple(writer.choice() for writer in own)
            first = own[0]
            made.append(
                Completion(
                    text, tuple(request.prompt), choices, first.prompt_logprobs, first.num_cached
                )
            )
        return made

    def _events(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Run until all choices of `requests` have ended. Ends them if the caller stops early."""
        open_choices = {request.id: request.params.n for request in requests}
        mine: deque[Event] = deque()
        try:
            with self._lock:
                for request in requests:
                    self._inboxes[request.id] = mine
                    self._engine.add(request)
            while open_choices:
                if not mine:
                    self._step(mine)
                while mine:
                    event = mine.popleft()
                    if event.finish is not None:
                        open_choices[event.request_id] -= 1
                        if not open_choices[event.request_id]:
                            del open_choices[event.request_id]
                    yield event
        finally:
            self._end(requests, open_choices)

    def _step(self, mine: deque[Event]) -> None:
        """One step of the engine, unless another thread has just brought news for `mine`."""
        with _uninterrupted(), self._lock:
            if mine:
                return
            self._stepping = True
            try:
                self._engine.pump(time.monotonic())
                events = self._engine.drain(time.monotonic())
            finally:
                self._stepping = False
            for event in events:
                inbox = self._inboxes.get(event.request_id)
                if inbox is not None:
                    inbox.append(event)
            self._abort_left()

    def _end(self, requests: Sequence[Request], open_choices: dict[str, int]) -> None:
        with _uninterrupted(), self._lock:
            for request in requests:
                self._inboxes.pop(request.id, None)
            self._left.extend(open_choices)
            # The garbage collector may end an iterator in the middle of this thread's step.
            if not self._stepping:
                self._abort_left()

    def _abort_left(self) -> None:
        while self._left:
            self._engine.abort(self._left.pop(), time.monotonic())


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the body has ended: the engine must not stop between two of its books.

    Signals reach the main thread alone; where the program has a handler of its own, that rules.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    came = []
    signal.signal(signal.SIGINT, lambda *_: came.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if came:
            raise KeyboardInterrupt


def _listed(prompts: Prompts) -> list[Prompt]:
    """One prompt or many, as a list."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        kind = type(prompts).__name__
        raise InvalidRequest(f"a prompt is a text or token ids, not {kind}", "prompt")
    listed: list[Any] = list(prompts)
    return [listed] if listed and _is_integer(listed[0]) else listed


def _is_integer(value: Any) -> bool:
    """Python's integers, and numpy's."""
    try:
        index(value)
    except TypeError:
        return False
    return True


class _Tick:
    """Counts for the bar."""

    def __init__(self, advance: Any) -> None:
        self._advance = advance
        self.tokens = 0

    def __call__(self, tokens: int, ended: bool) -> None:
        self.tokens += tokens
        if self._advance is not None:
            self._advance(self.tokens, ended)


@contextlib.contextmanager
def _bar(total: int, most: int, wanted: bool | None) -> Iterator[_Tick]:
    """A progress bar over `total` choices of at most so many tokens in all, or nothing. Nobody
    asked for one where `wanted` is None: it is for terminals, and for what takes long."""
    if not (wanted or (wanted is None and sys.stderr.isatty())):
        yield _Tick(None)
        return
    start, bar = time.monotonic(), _Bar(total, most, transient=wanted is None)
    if wanted or total > 1:
        bar.show()

    def advance(tokens: int, ended: bool) -> None:
        seconds = time.monotonic() - start
        if seconds > PATIENCE:
            bar.show()
        bar.advance(tokens, ended, seconds)

    try:
        yield _Tick(advance)
    finally:
        bar.close()


class _Bar:
    """On stderr, once it is shown."""

    def __init__(self, total: int, most: int, *, transient: bool) -> None:
        self._total = total
        self._most = most
        self._transient = transient
        self._bar: Any = None
        self._task: Any = None
        self._ended = 0

    def show(self) -> None:
        if self._bar is not None:
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}"),
        )
        console = Console(stderr=True)
        self._bar = Progress(*columns, console=console, transient=self._transient)
        self._task = self._bar.add_task("", total=self._total, said="")
        self._bar.start()

    def advance(self, tokens: int, ended: bool, seconds: float) -> None:
        self._ended += ended
        if self._bar is not None:
            rate = f"{tokens / max(seconds, 1e-9):.0f} tok/s"
            said = f"{tokens:,} of at most {self._most:,} tokens, {rate}"
            self._bar.update(self._task, completed=self._ended, said=said)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


@contextlib.contextmanager
def _loading(progress: Progress | None) -> Iterator[Progress]:
    """The caller's callback, or bars on a terminal, or silence."""
    if progress is not None:
        yield progress
    elif sys.stderr.isatty():
        with loading_bar() as told:
            yield told
    else:
        yield no_progress


@contextlib.contextmanager
def loading_bar() -> Iterator[Progress]:
    """Bars on stderr for fetching and loading; nothing is shown of what is done at once."""
    if not sys.stderr.isatty():  # rich would write an empty line at the end
        yield lambda *_: None
        return
    shown: dict[str, Any] = {}
    bar: Any = None
    start = time.monotonic()

    def told(what: str, done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            if time.monotonic() - start < 0.5 or done >= total > 0:
                return
            bar = _bytes_bar()
            bar.start()
        if what not in shown:
            shown[what] = bar.add_task(what, total=total or None)
        bar.update(shown[what], completed=done, total=total or None)

    try:
        yield told
    finally:
        if bar is not None:
            bar.stop()


def _bytes_bar() -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)
