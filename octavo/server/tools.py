"""Tools as a request names them, and the grammar that holds a model to calling them.

`Tool` and `ToolCall` are OpenAI's; `toolbox` checks a request's fields and says what they ask of
the answer; `Toolbox.outputs` is that as a grammar, where there is one.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from octavo.core.request import StructuredOutputs, shown
from octavo.errors import InvalidRequest, Unsupported
from octavo.grammar.worker import JSON_FORM
from octavo.server.parsing import END_CALL, OPEN_CALL

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_OPEN = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties", "additionalProperties"}
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


class Function(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """strict: the arguments are sure to be valid under `parameters`."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """arguments: JSON, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call in an assistant's message."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools that an answer may call. must: it calls at least one; several: more than one."""

    functions: tuple[Function, ...]
    must: bool = False
    several: bool = True

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function.name for function in self.functions)

    def shown(self) -> list[dict[str, Any]]:
        """As chat templates take them."""
        shown = []
        for function in self.functions:
            given: dict[str, Any] = {
                "name": function.name,
                "description": function.description,
                "parameters": function.parameters,
            }
            kept = {name: value for name, value in given.items() if value is not None}
            shown.append({"type": "function", "function": kept})
        return shown

    def outputs(self, dialect: str, text: StructuredOutputs | None) -> StructuredOutputs | None:
        """What the answer is held to. text: what it must be where it calls nothing.

        None: to nothing, and calls are found where there are any.
        """
        strict = any(function.strict for function in self.functions)
        if not (self.must or strict or text is not None or not self.several):
            return None
        lark = GRAMMARS[dialect](self, text)
        rules = [_rule(i, function, dialect) for i, function in enumerate(self.functions)]
        any_call = " | ".join(f"f{i}" for i in range(len(rules)))
        grammar = "\n".join(["%llguidance {}", *lark, f"object: {any_call}", *rules])
        return StructuredOutputs(grammar=grammar, param="tools")


def toolbox(
    tools: list[Tool] | None, choice: ToolChoice | None, parallel: bool | None
) -> Toolbox | None:
    """What the fields ask for; None: no tool may be called. Raises `InvalidRequest`."""
    if not tools:
        if choice is not None and choice not in ("none", "auto"):
            got = shown(choice if isinstance(choice, str) else choice.function.name)
            raise InvalidRequest(f"tool_choice {got} needs tools, got none", "tool_choice")
        return None
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools may be at most {MAX_TOOLS}, got {len(tools)}", "tools")
    functions = tuple(tool.function for tool in tools)
    for index, function in enumerate(functions):
        if not _NAME.fullmatch(function.name):
            at = f"tools[{index}].function.name"
            what = f"{at} must be 1 to 128 of a-z A-Z 0-9 _ - ., got {shown(function.name)}"
            raise InvalidRequest(what, at)
    names = [function.name for function in functions]
    if twice := [name for name in names if names.count(name) > 1]:
        what = f"tools must have names of their own, got {shown(twice[0])} twice"
        raise InvalidRequest(what, "tools")
    if choice == "none":
        return None
    if isinstance(choice, NamedTool):
        named = tuple(f for f in functions if f.name == choice.function.name)
        if not named:
            raise InvalidRequest(
                f"tool_choice: no tool is called {choice.function.name[:80]!r}", "tool_choice"
            )
        return Toolbox(named, must=True, several=False)
    return Toolbox(functions, choice == "required", parallel is not False)


# ---- grammars in Lark's form --------------------------------------------------------------------


def _hermes(box: Toolbox, text: StructuredOutputs | None) -> list[str]:
    """Calls in tags; in front of them, where nothing is forced, any text or what `text` says."""
    call = f'call: {_text(OPEN_CALL)} "\\n" object "\\n" {_text(END_CALL)}'
    more = '("\\n" call)*' if box.several else ""
    if box.must:
        return [f"start: call {more}", call]
    if text is not None:
        return [f"start: call {more} | {_value(text)}", call]
    spoken = f"spoken[lazy]: TEXT {_text(OPEN_CALL)}"
    tagged = f'tagged: spoken "\\n" object "\\n" {_text(END_CALL)}'
    start = "start: tagged* ending" if box.several else "start: tagged | ending"
    return [start, "ending: TEXT", spoken, tagged, "TEXT: /(.|\\n)*/"]


def _llama(box: Toolbox, text: StructuredOutputs | None) -> list[str]:
    """Bare objects; an answer that does not begin with "{" is text."""
    more = '("; " object)*' if box.several else ""
    if box.must:
        return [f"start: object {more}"]
    if text is not None:
        return [f"start: object {more} | {_value(text)}"]
    return [f"start: object {more} | TEXT", "TEXT: /[^{](.|\\n)*/"]


def _mistral(box: Toolbox, text: StructuredOutputs | None) -> list[str]:
    """A list. Its tag is a control token, which no grammar writes: the list begins the answer."""
    more = '(", " object)*' if box.several else ""
    calls = f'"[" object {more} "]"'
    if box.must:
        return [f"start: {calls}"]
    if text is not None:
        return [f"start: {calls} | {_value(text)}"]
    return [f"start: {calls} | TEXT", "TEXT: /[^\\[](.|\\n)*/"]


GRAMMARS = {"hermes": _hermes, "llama": _llama, "mistral": _mistral}


def _rule(index: int, function: Function, dialect: str) -> str:
    key = "parameters" if dialect == "llama" else "arguments"
    head = f'{{"name": {json.dumps(function.name)}, "{key}": '
    schema = function.parameters or NO_PARAMETERS
    if "properties" in schema and not _OPEN & schema.keys():
        # No arguments are made up: what a function does not name it does not take.
        schema = {"type": "object", "additionalProperties": False} | schema
    return f'f{index}: {_text(head)} {_json(schema, bool(function.strict))} "}}"'


def _value(text: StructuredOutputs) -> str:
    if text.json_object:
        return _json({"type": "object"}, True)
    if isinstance(text.json, dict):
        return _json(text.json, text.strict)
    raise Unsupported("structured_outputs cannot be combined with tools", "structured_outputs")


def _json(schema: dict[str, Any], strict: bool) -> str:
    return "%json " + json.dumps(schema | {"x-guidance": JSON_FORM | {"lenient": not strict}})


def _text(text: str) -> str:
    return json.dumps(text)
