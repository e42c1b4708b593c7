"""What a model writes, taken apart as it comes: thoughts, tool calls, and what is said.

A parser hears text in pieces of any size and answers with deltas; the same text gives the same
deltas joined, however it was cut. Nothing is lost: what looks like a call and is none is said.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from octavo.text import overlap

OPEN_THOUGHT, END_THOUGHT = "<think>", "</think>"
OPEN_CALL, END_CALL = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
SPACE = " \t\r\n"


class Said(NamedTuple):
    """Content."""

    text: str


class Thought(NamedTuple):
    """Reasoning."""

    text: str


class Called(NamedTuple):
    """Of a call of the answer: first its id and name, without arguments; then pieces of these."""

    number: int
    arguments: str
    id: str | None = None
    name: str | None = None


Delta = Said | Thought | Called


class Parser(Protocol):
    @property
    def thinking(self) -> bool | None:
        """Whether what comes next is reasoning; None: what came may yet turn out to begin it."""
        ...

    def push(self, text: str, /) -> Sequence[Delta]: ...
    def finish(self) -> Sequence[Delta]: ...


class Plain:
    """All is said."""

    thinking = False

    def push(self, text: str) -> Sequence[Delta]:
        return (Said(text),) if text else ()

    def finish(self) -> Sequence[Delta]:
        return ()


class Thinking:
    """What stands between the tags is thought, at the beginning alone; the rest is for `then`.

    opened: the prompt has opened the thought already. White space around thoughts is dropped.
    """

    def __init__(self, then: Parser, *, opened: bool) -> None:
        self._then = then
        self._held = ""
        self._state = "thought" if opened else "start"
        self._began = False  # whether any of the thought, or of what follows it, was passed on

    @property
    def thinking(self) -> bool | None:
        return None if self._state == "start" else self._state == "thought"

    def push(self, text: str) -> Sequence[Delta]:
        if self._state == "then":
            return self._then.push(text)
        text, self._held = self._held + text, ""
        if self._state == "start":
            shown = text.lstrip(SPACE)
            if shown.startswith(OPEN_THOUGHT):
                self._state, text = "thought", shown[len(OPEN_THOUGHT) :]
            elif OPEN_THOUGHT.startswith(shown):
                self._held = text
                return ()
            else:
                self._state = "then"
                return self._then.push(text)
        if self._state == "thought":
            return self._thought(text)
        return self._after(text)

    def _thought(self, text: str) -> Sequence[Delta]:
        if not self._began:
            text = text.lstrip(SPACE)
        end = text.find(END_THOUGHT)
        if end < 0:
            keep = overlap(text, END_THOUGHT)
            shown = text[: len(text) - keep].rstrip(SPACE)
            self._held = text[len(shown) :]
            self._began = self._began or bool(shown)
            return (Thought(shown),) if shown else ()
        shown = text[:end].rstrip(SPACE)
        self._state, self._began = "after", False
        made: list[Delta] = [Thought(shown)] if shown else []
        return [*made, *self._after(text[end + len(END_THOUGHT) :])]

    def _after(self, text: str) -> Sequence[Delta]:
        text = text.lstrip(SPACE)
        if not text:
            return ()
        self._state = "then"
        return self._then.push(text)

    def finish(self) -> Sequence[Delta]:
        held, self._held = self._held, ""
        if self._state == "thought":
            held = held.rstrip(SPACE)
            return (Thought(held),) if held else ()
        return [*(self._then.push(held) if held else ()), *self._then.finish()]


class CallReader:
    """Reads one JSON object, {"name": ..., "arguments" or "parameters": {...}}, as its text comes.

    done: the object has ended; failed: it cannot go on so. ready: it is a call of one of `names`
    for sure, whatever follows. raw: all that was read; rest: text after the end or the failure.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self.name: str | None = None
        self.done = False
        self.failed = False
        self.raw = ""
        self.rest = ""
        self._names = names
        self._at = 0  # read so far
        self._state = "open"
        self._key = ""
        self._start = 0  # of the string or value being read
        self._depth = 0
        self._quoted = False
        self._escaped = False
        self._scalar = False
        self._arguments: tuple[int, int | None] | None = None
        self._sent = 0

    @property
    def ready(self) -> bool:
        return self.name is not None and (self.done or self._arguments is not None)

    def push(self, text: str) -> str:
        """More text; returns the arguments' text that can be passed on."""
        self.raw += text
        while self._at < len(self.raw) and not (self.done or self.failed):
            if not self._step(self.raw[self._at]):
                self.failed = True
            else:
                self._at += 1
        if self.done or self.failed:
            self.raw, self.rest = self.raw[: self._at], self.raw[self._at :]
        return self._new()

    def _new(self) -> str:
        if not self.ready:
            return ""
        if self._arguments is None:
            return "{}"
        start, end = self._arguments
        whole = self.raw[start : self._at if end is None else end]
        whole = "{}" if whole == "null" else whole
        new, self._sent = whole[self._sent :], len(whole)
        return new

    def _step(self, c: str) -> bool:
        if self._state in ("key", "value"):
            return self._key_character(c) if self._state == "key" else self._value_character(c)
        if c in SPACE:
            return True
        if self._state == "open":
            self._state = "first"
            return c == "{"
        if self._state in ("first", "next"):
            if c == '"':
                self._state, self._start = "key", self._at
            return self._end() if c == "}" else c == '"'
        if self._state == "colon":
            self._state = "before"
            return c == ":"
        if self._state == "before":
            return self._begin_value(c)
        self._state = "next"
        return self._end() if c == "}" else c == ","

    def _key_character(self, c: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif c == "\\":
            self._escaped = True
        elif c == '"':
            key = _loaded(self.raw[self._start : self._at + 1])
            self._key, self._state = key if isinstance(key, str) else "", "colon"
        return True

    def _begin_value(self, c: str) -> bool:
        self._state, self._start = "value", self._at
        self._depth = int(c in "{[")
        self._quoted, self._escaped = c == '"', False
        self._scalar = c not in '{["'
        if self._key in ("arguments", "parameters"):
            if c not in "{n" or self._arguments is not None:
                return False
            if c == "{":  # what is not an object may yet turn out to be null
                self._arguments = self._at, None
        return c not in ",}]:"

    def _value_character(self, c: str) -> bool:
        if self._quoted:
            if self._escaped:
                self._escaped = False
            elif c == "\\":
                self._escaped = True
            elif c == '"':
                self._quoted = False
                if not self._depth:
                    return self._end_value(self._at + 1)
            return True
        if self._scalar:
            if c in SPACE or c in ",}":
                if not self._end_value(self._at):
                    return False
                return self._step(c)
            return True
        if c == '"':
            self._quoted = True
        self._depth += (c in "{[") - (c in "}]")
        return bool(self._depth) or self._end_value(self._at + 1)

    def _end_value(self, end: int) -> bool:
        """A value has ended; False if there cannot be such a one."""
        self._state = "comma"
        value = self.raw[self._start : end]
        if self._key == "name":
            name = _loaded(value)
            if self.name is not None or not isinstance(name, str) or name not in self._names:
                return False
            self.name = name
        elif self._key in ("arguments", "parameters"):
            if value[0] == "n" and value != "null":
                return False
            self._arguments = self._start, end
        return True

    def _end(self) -> bool:
        self.done = self.name is not None
        return self.done


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


class _Calls:
    """What parsers of calls share: numbers and ids."""

    thinking = False

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._count = 0
        self._reader: CallReader | None = None
        self._named = False

    def _read(self, text: str) -> list[Delta]:
        """Let the reader have more; deltas of its call."""
        assert self._reader is not None
        arguments = self._reader.push(text)
        made: list[Delta] = []
        if not self._reader.ready:
            return made
        if not self._named:
            self._named = True
            made.append(Called(self._count, "", new_id(), self._reader.name))
        if arguments:
            made.append(Called(self._count, arguments))
        return made

    def _begin(self) -> None:
        self._reader, self._named = CallReader(self._names), False

    def _close(self) -> None:
        self._reader = None
        self._count += self._named


class HermesCalls(_Calls):
    """<tool_call>{"name": ..., "arguments": ...}</tool_call>, anywhere: Hermes, Qwen 2.5 and 3.

    White space before a call is dropped; so is what little may be missing or too much at its end.
    """

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(names)
        self._held = ""
        self._opened = ""  # the tag before the call, with the white space before it
        self._ending = False

    def push(self, text: str) -> Sequence[Delta]:
        made: list[Delta] = []
        while text:
            if self._reader is not None:
                made += self._read(text)
                text = self._judged(made)
            elif self._ending:
                text = self._ended(text, made)
            else:
                text = self._spoken(text, made)
        return made

    def _spoken(self, text: str, made: list[Delta]) -> str:
        """Say what is no call; returns the text that is left when one begins."""
        text, self._held = self._held + text, ""
        at = text.find(OPEN_CALL)
        if at >= 0:
            shown = text[:at].rstrip(SPACE)
            self._say(shown, made)
            self._opened = text[len(shown) : at] + OPEN_CALL
            self._begin()
            return text[at + len(OPEN_CALL) :]
        keep = overlap(text, OPEN_CALL)
        shown = text[: len(text) - keep].rstrip(SPACE)
        self._held = text[len(shown) :]
        self._say(shown, made)
        return ""

    def _say(self, text: str, made: list[Delta]) -> None:
        if text:
            made.append(Said(text))

    def _judged(self, made: list[Delta]) -> str:
        """After reading: whether the call goes on, has ended or was none; text that is left."""
        reader = self._reader
        assert reader is not None
        if not (reader.done or reader.failed):
            return ""
        rest = reader.rest
        if reader.failed and not self._named:
            made.append(Said(self._opened + reader.raw))
        else:
            self._ending = True
        self._close()
        return rest

    def _ended(self, text: str, made: list[Delta]) -> str:
        """Between the end of a call's JSON and its closing tag, or the next opening one."""
        text, self._held = self._held + text, ""
        ends = [(at, tag) for tag in (END_CALL, OPEN_CALL) if (at := text.find(tag)) >= 0]
        if not ends:
            self._held = text
            return ""
        at, tag = min(ends)
        self._say(text[:at].strip(SPACE + "}"), made)
        self._ending = False
        return text[at:] if tag == OPEN_CALL else text[at + len(tag) :]

    def finish(self) -> Sequence[Delta]:
        made: list[Delta] = []
        reader, held = self._reader, self._held
        self._held = ""
        if reader is not None:
            if not self._named:
                made.append(Said(self._opened + reader.raw))
            self._close()
        elif self._ending:
            held = held.strip(SPACE + "}")
            self._say("" if END_CALL.startswith(held) else held, made)
        elif self._count == 0 or held.strip(SPACE):
            self._say(held, made)
        return made


class LlamaCalls(_Calls):
    """{"name": ..., "parameters": ...}, alone or several with ";" between: Llama 3.1 and later.

    Only an answer that begins so is calls. A name that is no tool's makes it plain text.
    """

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(names)
        self._held = ""
        self._state = "start"

    def push(self, text: str) -> Sequence[Delta]:
        made: list[Delta] = []
        while text:
            if self._state == "plain":
                made.append(Said(text))
                break
            text = self._between(text) if self._reader is None else self._call(text, made)
        return made

    def _between(self, text: str) -> str:
        """Before a call; returns the text to go on with."""
        text, self._held = self._held + text, ""
        skipped = SPACE if self._state == "start" else SPACE + ";,"
        shown = text.lstrip(skipped)
        if self._state == "start" and PYTHON_TAG.startswith(shown[: len(PYTHON_TAG)]):
            if len(shown) < len(PYTHON_TAG):
                self._held = text
                return ""
            shown = shown[len(PYTHON_TAG) :].lstrip(SPACE)
        if not shown:
            self._held = text
            return ""
        if shown[0] != "{":
            self._state = "plain"
            return text
        self._held = text[: len(text) - len(shown)]
        self._begin()
        return shown

    def _call(self, text: str, made: list[Delta]) -> str:
        made += self._read(text)
        reader = self._reader
        assert reader is not None
        if not (reader.done or reader.failed):
            return ""
        lost = not self._named
        self._state = "plain" if reader.failed else "more"
        held, self._held = self._held, ""
        self._close()
        return held + reader.raw + reader.rest if lost else reader.rest

    def finish(self) -> Sequence[Delta]:
        reader, held = self._reader, self._held
        self._held = ""
        if reader is not None:
            lost = not self._named
            self._close()
            return (Said(held + reader.raw),) if lost else ()
        return (Said(held),) if held and (self._count == 0 or held.strip(SPACE + ";,")) else ()


def new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


PARSERS: dict[str, Callable[[frozenset[str]], Parser]] = {
    "hermes": HermesCalls,
    "llama": LlamaCalls,
}
