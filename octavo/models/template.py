"""Chat templates: messages to token ids, as transformers' `apply_chat_template` gives them.

A template is code that came with a model: it runs in jinja2's immutable sandbox, with a cap on what
it may write. Messages are data from strangers: no text of theirs becomes a control token. Where a
string could begin one (alone, or joined to the next string), its first character is swapped for a
private-use one before rendering; after rendering, control tokens are found, then the characters are
put back. A stand-in is one character that no filter trims, so templates see text of the same shape.

What a template itself builds around a role ("<|" + role + "|>") is its own; roles are a closed set.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from octavo.errors import ContextOverflow, InvalidRequest, ModelError, Unsupported, in_words
from octavo.models.tokenizer import ControlStrings, Tokenizer

MAX_CHARS = 1 << 24  # of one rendered prompt
MAX_REPEAT = 1 << 20  # of one string or list by "*" inside a template
ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
# Variables that only we set, as we do bos_token and its like; `documents` may be an extra.
OWN = frozenset(("messages", "tools", "add_generation_prompt"))

_PRIVATE = range(0x10FF00, 0x10FFFE)  # the last private-use code points


class _Guard:
    """Swaps first characters of control strings in one request's data, and swaps them back."""

    def __init__(self, controls: ControlStrings, data: object) -> None:
        self._controls = controls
        heads = sorted(controls.heads)
        used = set(_characters(data)) if heads else set()
        free = (chr(point) for point in _PRIVATE if chr(point) not in used)
        try:
            self._stand_in = {head: next(free) for head in heads}
        except StopIteration:
            raise InvalidRequest("messages use up the private-use characters", "messages") from None
        self._back = {ord(stand_in): head for head, stand_in in self._stand_in.items()}

    def hide(self, value: Any) -> Any:
        """A copy of JSON data in which no string, key or value, can begin a control string."""
        if isinstance(value, str):
            return self._hide_text(value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item) for item in value]
        return value

    def _hide_text(self, text: str) -> str:
        swaps = self._controls.possible(text)
        if not swaps:
            return text
        characters = list(text)
        for at in swaps:
            characters[at] = self._stand_in[characters[at]]
        return "".join(characters)

    def show(self, text: str) -> str:
        return text.translate(self._back)


def _characters(data: object) -> Iterator[str]:
    """The private-use characters of the range we draw from that occur in JSON data."""
    stack = [data]
    find = re.compile(f"[{chr(_PRIVATE[0])}-{chr(_PRIVATE[-1])}]").findall
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            yield from find(value)
        elif isinstance(value, Mapping):
            stack += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            stack += value


def _text_of(parts: list[Any], where: str) -> str:
    """Text parts joined by newlines, as vLLM and llama.cpp join them."""
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            name = repr(kind) if kind is not None else "without a type"
            raise Unsupported(f"{where}: content part {name} is not supported (text is)", where)
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{where}: a text part without text", where)
        texts.append(part["text"])
    return "\n".join(texts)


def _call(call: Any, where: str) -> Any:
    """A tool call with its arguments as an object: templates expect that, OpenAI sends JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"{where}: a tool call without a function", where)
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{where}: arguments are not JSON", where) from None
    return {**call, "function": {**function, "arguments": parsed}}


def _message(message: Any, index: int) -> dict[str, Any]:
    """One message as templates take it: keys without a value dropped, content a string."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} is not an object", where)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequest(f"{where}.role: {role!r} is none of {sorted(ROLES)}", f"{where}.role")
    clean = {key: value for key, value in message.items() if value is not None}
    content = clean.get("content")
    if isinstance(content, list):
        clean["content"] = _text_of(content, f"{where}.content")
    elif content is not None and not isinstance(content, str):
        raise InvalidRequest(f"{where}.content is neither text nor parts", f"{where}.content")
    calls = clean.get("tool_calls")
    if isinstance(calls, list):
        clean["tool_calls"] = [_call(call, f"{where}.tool_calls") for call in calls]
    elif calls is not None:
        raise InvalidRequest(f"{where}.tool_calls is not a list", f"{where}.tool_calls")
    return clean


def _are_objects(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, Mapping) for item in value)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers': jinja2's own escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> Any:
    """The sandbox, with the names that templates expect. jinja2 is imported at first use."""
    import jinja2
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("*", "**"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            numbers = isinstance(left, int | float) and isinstance(right, int | float)
            if operator == "**" and not (numbers and abs(right) <= 64 and abs(left) <= 1 << 32):
                raise SecurityError("a power that is too large")
            if not numbers:
                size = len(left if hasattr(left, "__len__") else right)
                count = right if hasattr(left, "__len__") else left
                if isinstance(count, int) and size * count > MAX_REPEAT:
                    raise SecurityError("a repetition that is too long")
            return super().call_binop(context, operator, left, right)

    class Generation(Extension):
        """{% generation %} marks the assistant's text for training; here it is transparent."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            body: list[nodes.Node] = parser.parse_statements(
                ("name:endgeneration",), drop_needle=True
            )
            return body

    class Raised(jinja2.TemplateError):
        """What the template itself refused."""

    def raise_exception(message: str) -> None:
        raise Raised(message)

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.extend(refused=Raised)
    return environment


class _Compiled:
    """One template: compiled, with the variables it reads."""

    def __init__(self, source: str) -> None:
        import jinja2
        from jinja2 import meta

        self._environment = _environment()
        try:
            tree = self._environment.parse(source)
            self.reads = meta.find_undeclared_variables(tree) - self._environment.globals.keys()
            self._template = self._environment.from_string(source)
        except jinja2.TemplateError as error:
            at = f" (line {line})" if (line := getattr(error, "lineno", None)) else ""
            raise ModelError(f"the model's chat template does not compile: {error}{at}") from error
        # What jinja2 leaves to Python: loops in each other twenty deep, a name given twice, numbers
        # of thousands of digits. The lines of that are of what jinja2 made, not of the source.
        except (SyntaxError, ValueError, OverflowError) as error:
            what = error.msg if isinstance(error, SyntaxError) else error
            raise ModelError(f"the model's chat template does not compile: {what}") from error
        except RecursionError as error:
            raise ModelError("the model's chat template is nested too deeply") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """Raises InvalidRequest and ModelError only."""
        from jinja2.exceptions import SecurityError

        pieces, size = [], 0
        try:
            for piece in self._template.generate(variables):
                size += len(piece)
                if size > MAX_CHARS:
                    raise InvalidRequest(
                        f"the chat template wrote more than {MAX_CHARS} characters", "messages"
                    )
                pieces.append(piece)
        except InvalidRequest:
            raise
        except self._environment.refused as error:
            raise InvalidRequest(str(error), "messages") from error
        except SecurityError as error:
            raise ModelError(f"the model's chat template left its sandbox: {error}") from error
        except Exception as error:  # a template may fail in any way on data it did not expect
            raise InvalidRequest(
                f"the model's chat template failed on these messages: {error}", "messages"
            ) from error
        return "".join(pieces)


def template_file(path: str) -> str:
    """The chat template in a file, which is to stand for a model's own. Raises `InvalidRequest` for
    what cannot be read, does not compile or looks at no messages."""
    try:
        source = Path(path).read_text(encoding="utf-8-sig")  # a byte order mark is no text
        if "messages" in _Compiled(source).reads:
            return source
        why = "this is no chat template: it never looks at `messages`"
    except UnicodeDecodeError:
        why = "not UTF-8"
    except OSError as error:
        why = in_words(error)
    except ModelError as error:
        why = str(error).removeprefix("the model's chat template ")
    raise InvalidRequest(f"--chat-template {path}: {why}", "chat_template")


class ChatTemplate:
    """A model's chat template. Compiled at first use; safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiled: dict[str, _Compiled] = {}

    def ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> list[int]:
        """Token ids of a conversation, BOS included where the template writes it.

        messages: OpenAI's; content a string, text parts, or absent. extra: further variables of the
        template, e.g. enable_thinking. Raises InvalidRequest (no template; the template refuses or
        fails), Unsupported (parts other than text; tools or extras the template does not read),
        ModelError (the template does not compile or leaves the sandbox).
        """
        guard, text = self._render(messages, tools, add_generation_prompt, extra)
        parts = self._tokenizer.controls.split(text)
        try:
            return self._tokenizer.encode_parts((guard.show(plain), end) for plain, end in parts)
        except ContextOverflow as error:
            error.param = "messages"
            raise

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """What the template writes, for people to read: control tokens look like text here."""
        guard, text = self._render(messages, tools, add_generation_prompt, extra)
        return guard.show(text)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        extra: dict[str, Any],
    ) -> tuple[_Guard, str]:
        if tools is not None and not _are_objects(tools):
            raise InvalidRequest("tools is not a list of objects", "tools")
        if not messages:
            raise InvalidRequest("messages is empty", "messages")
        template = self._template("tool_use" if tools else "default")
        if tools and "tools" not in template.reads:
            raise Unsupported("this model's chat template takes no tools", "tools")
        for name in extra:
            if name not in template.reads or name in OWN or name.endswith("_token"):
                raise Unsupported(f"this model's chat template has no setting {name!r}", name)
        clean = [_message(message, index) for index, message in enumerate(messages)]
        data = {"messages": clean, "tools": list(tools) if tools else None, **extra}
        try:
            guard = _Guard(self._tokenizer.controls, data)
            hidden = guard.hide(data)
        except RecursionError:
            raise InvalidRequest("messages are nested too deeply", "messages") from None
        for message, shown in zip(hidden["messages"], clean, strict=True):
            message["role"] = shown["role"]  # checked above, and templates compare it
        variables = {"documents": None, **self._tokenizer.named, **hidden}
        return guard, template.render({**variables, "add_generation_prompt": add_generation_prompt})

    def _template(self, name: str) -> _Compiled:
        sources = self._tokenizer.chat_templates
        if name not in sources:
            name = "default"
        if name not in sources:
            raise InvalidRequest("this model has no chat template; use /v1/completions", "messages")
        if name not in self._compiled:
            self._compiled[name] = _Compiled(sources[name])
        return self._compiled[name]
