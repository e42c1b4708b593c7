"""What a model writes, taken apart as it comes: thoughts, tool calls, and what is said.

A parser hears text in pieces of any size and answers with deltas; the same text gives the same
deltas joined, however it was cut. Nothing is lost: what looks like a call and is none is said.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from octavo.text import overlap

OPEN_THOUGHT, END_THOUGHT = "<think>", "</think>"
OPEN_CALL, END_CALL = "<tool_call>", "</tool_call>"
MOST_GAP = 64  # characters that may stand between a call and the tag that closes it
PYTHON_TAG = "<|python_tag|>"
CALL_LIST = "[TOOL_CALLS]"
SPACE = " \t\r\n"
CALL_KEYS = frozenset({"name", "arguments", "parameters", "id", "type"})


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
        self._opened = opened
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
            if self._opened and OPEN_THOUGHT.startswith(text):
                self._held = text
                return ()
            if self._opened:  # by the prompt: some models write the tag again
                text, self._opened = text.removeprefix(OPEN_THOUGHT).lstrip(SPACE), False
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
            held = "" if held == OPEN_THOUGHT and self._opened else held.rstrip(SPACE)
            return (Thought(held),) if held else ()
        return [*(self._then.push(held) if held else ()), *self._then.finish()]


class CallReader:
    """Reads one JSON object, {"name": ..., "arguments" or "parameters": {...}}, as its text comes.

    done: the object has ended; failed: it cannot go on so. ready: it is a call of one of `names`
    for sure, whatever follows. raw: all that was read; rest: text after the end or the failure.
    keys: the only ones that the object may have, where other ones make it none.
    """

    def __init__(self, names: frozenset[str], keys: frozenset[str] | None = None) -> None:
        self.name: str | None = None
        self.done = False
        self.failed = False
        self.raw = ""
        self.rest = ""
        self._names = names
        self._keys = keys
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

    @property
    def argued(self) -> bool:
        """Whether arguments have been named."""
        return self._arguments is not None

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
            return self._keys is None or self._key in self._keys
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
            return self._depth > 0 or self._key != "name" or self._namely()
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

    def _namely(self) -> bool:
        """Whether what has come of the name's string can still become a name."""
        begun = self.raw[self._start + 1 : self._at + 1]
        return "\\" in begun or any(name.startswith(begun) for name in self._names)

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
        self._held = ""

    def _read(self, text: str) -> list[Delta]:
        """Let the reader have more; deltas of its call."""
        assert self._reader is not None
        arguments = self._reader.push(text)
        made: list[Delta] = []
        if not self._reader.ready:
            return made
        if not self._named:
            self._named = True
            made.append(Called(self._count, "", self._id(), self._reader.name))
        if arguments:
            made.append(Called(self._count, arguments))
        return made

    def _id(self) -> str:
        return new_id()

    def _begin(self) -> None:
        self._reader, self._named = CallReader(self._names), False

    def _close(self) -> None:
        self._reader = None
        self._count += self._named

    def _say(self, text: str, made: list[Delta]) -> None:
        if text:
            made.append(Said(text))

    def _before(self, tag: str, text: str, made: list[Delta]) -> tuple[str, str] | None:
        """Say what comes before a tag, but not the white space at its end: (the tag with that
        space before it, what follows it) once it has come."""
        text, self._held = self._held + text, ""
        at = text.find(tag)
        end = len(text) - overlap(text, tag) if at < 0 else at
        shown = text[:end].rstrip(SPACE)
        self._say(shown, made)
        if at < 0:
            self._held = text[len(shown) :]
            return None
        return text[len(shown) : at] + tag, text[at + len(tag) :]


class HermesCalls(_Calls):
    """<tool_call>{"name": ..., "arguments": ...}</tool_call>, anywhere: Hermes, Qwen 2.5 and 3.

    White space before a call is dropped; so is what little may be missing or too much at its end.
    """

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(names)
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
        found = self._before(OPEN_CALL, text, made)
        if found is None:
            return ""
        self._opened, rest = found
        self._begin()
        return rest

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
        ends = [
            (at, tag)
            for tag in (END_CALL, OPEN_CALL)
            if (at := text.find(tag, 0, MOST_GAP + len(tag))) >= 0
        ]
        if not ends:
            if len(text) >= MOST_GAP + len(END_CALL):
                self._ending = False  # the tag was forgotten: what follows is text
                return text
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


class MistralCalls(_Calls):
    """[TOOL_CALLS] [{"name": ..., "arguments": ...}, ...], or the list alone where an answer
    begins with it: Mistral's v2 to v7. Their templates take ids of nine letters and digits."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(names)
        self._opened = ""  # what came of a list since the last call in it
        self._calls = 0  # in the list
        self._state = "start"

    def _id(self) -> str:
        return nine()

    def push(self, text: str) -> Sequence[Delta]:
        made: list[Delta] = []
        while text:
            if self._reader is not None:
                made += self._read(text)
                text = self._judged(made)
            elif self._state == "start":
                text = self._start(text)
            elif self._state == "spoken":
                text = self._spoken(text, made)
            else:
                text = self._between(text, made)
        return made

    def _start(self, text: str) -> str:
        """Whether the answer begins with a list that has no tag; returns the text to go on with."""
        text, self._held = self._held + text, ""
        if re.fullmatch(r"\s*(\[\s*)?", text):
            self._held = text
            return ""
        self._state = "spoken"
        if re.match(r"\s*\[\s*\{", text):
            self._state, self._calls, self._opened = "tag", 0, ""
        return text

    def _spoken(self, text: str, made: list[Delta]) -> str:
        found = self._before(CALL_LIST, text, made)
        if found is None:
            return ""
        self._opened, rest = found
        self._state, self._calls = "tag", 0
        return rest

    def _between(self, text: str, made: list[Delta]) -> str:
        """Of a list, what is outside of its objects; returns the text to go on with."""
        shown = text.lstrip(SPACE)
        self._opened += text[: len(text) - len(shown)]
        if not shown:
            return ""
        follow = {"tag": {"[": "first"}, "first": {"{": "call"}, "next": {",": "first", "]": "end"}}
        state = follow[self._state].get(shown[0])
        if state == "call":
            self._begin()
            return shown
        if state is None or state == "end":
            if not self._calls:
                self._say(self._opened, made)
            self._state, self._opened = "spoken", ""
            return shown[state == "end" :]
        self._state, self._opened = state, self._opened + shown[0]
        return shown[1:]

    def _judged(self, made: list[Delta]) -> str:
        reader = self._reader
        assert reader is not None
        if not (reader.done or reader.failed):
            return ""
        self._state = "next" if self._named and reader.done else "spoken"
        if self._named:
            self._calls += 1
        else:
            self._say(self._opened + reader.raw, made)
        self._opened = ""
        self._close()
        return reader.rest

    def finish(self) -> Sequence[Delta]:
        made: list[Delta] = []
        reader, held = self._reader, self._held
        self._held = ""
        if reader is not None:
            if not self._named:
                self._say(self._opened + reader.raw, made)
            self._close()
        elif self._state in ("start", "spoken"):
            if self._count == 0 or held.strip(SPACE):
                self._say(held, made)
        elif not self._calls:
            self._say(self._opened, made)
        return made


class WholeCalls:
    """An answer that is nothing but a call without its tags, or a list of such, and be it in a
    fence: so small models answer. Whatever else comes is for `then`.

    begins: with which characters such an answer may begin. Nothing is passed on while the text may
    still be one; names of no tool, keys that calls do not have, or anything beside it end that.
    """

    thinking = False
    _HEAD = re.compile(r"\s*(?:(?P<fence>```)[A-Za-z_]*\s*)?(?P<list>\[\s*)?")
    _MAY = re.compile(r"\s*(?:`{0,2}|```[A-Za-z_]*\s*(?:\[\s*)?|\[\s*)")
    MOST_HEAD = 64

    def __init__(self, then: Parser, names: frozenset[str], begins: str, id: Callable[[], str]):
        self._then = then
        self._names = names
        self._begins = begins
        self._id = id
        self._held = ""
        self._state = "head"
        self._awaited = ""  # after the calls, of what closes the list and the fence
        self._calls: list[tuple[CallReader, list[str]]] = []

    def push(self, text: str) -> Sequence[Delta]:
        if self._state == "then":
            return self._then.push(text)
        self._held += text
        text = self._head() if self._state == "head" else text
        while text:
            text = self._object(text) if self._state == "object" else self._between(text)
        return self._given_up() if self._state == "lost" else ()

    def _given_up(self) -> Sequence[Delta]:
        held, self._held, self._state = self._held, "", "then"
        self._calls.clear()
        return self._then.push(held)

    def _head(self) -> str:
        """What comes before the first object; returns its text once that has begun."""
        begun = self._held.lstrip(SPACE)
        at = self._held.find("{")
        if begun and begun[0] not in self._begins:
            self._state = "lost"
        elif at >= 0:
            head = self._HEAD.fullmatch(self._held, 0, at)
            if head is None:
                self._state = "lost"
                return ""
            self._awaited = ("]" if head["list"] else "") + (head["fence"] or "")
            self._open()
            return self._held[at:]
        elif len(self._held) > self.MOST_HEAD or not self._MAY.fullmatch(self._held):
            self._state = "lost"
        return ""

    def _open(self) -> None:
        self._calls.append((CallReader(self._names, CALL_KEYS), []))
        self._state = "object"

    def _object(self, text: str) -> str:
        reader, arguments = self._calls[-1]
        arguments.append(reader.push(text))
        if reader.failed or (reader.done and not self._is_call(reader)):
            self._state = "lost"
            return ""
        self._state = "between" if reader.done else "object"
        return reader.rest if reader.done else ""

    def _is_call(self, reader: CallReader) -> bool:
        return reader.argued and isinstance(_loaded(reader.raw), dict)

    def _between(self, text: str) -> str:
        """After an object: a comma and the next one in a list, or what closes it all."""
        text = text.lstrip(SPACE)
        if not text:
            return ""
        if self._state == "comma" and text[0] == "{":
            self._open()
            return text
        if self._state == "between" and text[0] == "," and self._awaited[:1] == "]":
            self._state = "comma"
        elif self._state == "between" and text[0] == self._awaited[:1]:
            self._awaited = self._awaited[1:]
        else:
            self._state = "lost"
            return ""
        return text[1:]

    def finish(self) -> Sequence[Delta]:
        if self._state == "between" and not self._awaited:
            self._state, self._held = "then", ""
            made: list[Delta] = []
            for number, (reader, arguments) in enumerate(self._calls):
                made.append(Called(number, "", self._id(), reader.name))
                made.append(Called(number, "".join(arguments)))
            return made
        return [*(self._given_up() if self._held else ()), *self._then.finish()]


def new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def nine() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class Form(NamedTuple):
    """How calls are written. parser: what reads them; bare: with which characters an answer may
    begin that is calls without tags (`WholeCalls`); id: a new one."""

    parser: Callable[[frozenset[str]], Parser]
    bare: str
    id: Callable[[], str] = new_id


FORMS: dict[str, Form] = {
    "hermes": Form(HermesCalls, "{[`"),
    "llama": Form(LlamaCalls, "[`"),  # it reads an object alone, as it comes
    "mistral": Form(MistralCalls, "{`", nine),  # and it a list
}
