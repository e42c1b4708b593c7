"""JSON bytes into a declared body, or an error that names the field.

Three kinds of field: declared with a type, and honoured; declared as `Refused`: known to the API
and refused by name unless it asks for what happens anyway, or for something beside the answer; any
other is unknown. What is unknown, or beside the answer, is accepted and named in the answer's
`x-octavo-ignored`, or refused by a strict server.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from octavo.core.request import shown
from octavo.errors import InvalidRequest, Unsupported

Refused = Any  # a field that is read only to be refused by name
Ignored = tuple[str, ...]  # names of fields that were there and are unknown

IGNORED_HEADER = b"x-octavo-ignored"
MOST_NAMED = 16
MOST_NAME = 64  # characters of a name that a stranger chose, in a message
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)

# The values of refused fields that ask for nothing but what happens anyway.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "modalities": (["text"],),
    "tools": ([],),
    "functions": ([],),
    "annotations": ([],),
    "suffix": ("",),
    "best_of": (1,),
    "background": (False,),
    "function_call": ("none", "auto"),  # of functions there are none
    "mcp_servers": ([],),
    "summary": ("auto",),  # the best that the model has, and it has none
    "verbosity": ("medium",),
    "echo": (False,),
    "include_obfuscation": (False,),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template_kwargs": ({},),
}

# What asks for something beside the answer, which is the same without it: to keep a copy for
# OpenAI's own products (nothing is kept here, nor found by GET), to keep the prefix for longer (it
# is kept while there is room).
_BESIDE: dict[str, tuple[Any, ...]] = {"store": (True,), "prompt_cache_retention": ("24h",)}

# What other servers' fields are called here.
_INSTEAD = {
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "grammar": "structured_outputs.grammar",
    "json_schema": "response_format or structured_outputs.json",
}

Body = TypeVar("Body", bound=msgspec.Struct)


@functools.cache
def _decoder(cls: type[Body]) -> msgspec.json.Decoder[Body]:
    return msgspec.json.Decoder(cls)


@functools.cache
def _refused(cls: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(item.name for item in msgspec.structs.fields(cls) if item.type is Any)


@functools.cache
def _declared() -> frozenset[str]:
    """The names of all fields that a body may have."""
    kinds: list[type[msgspec.Struct]] = [msgspec.Struct]
    names: set[str] = set()
    while kinds:
        kinds += (below := kinds.pop().__subclasses__())
        ours = (kind for kind in below if kind.__module__.startswith("octavo."))
        names.update(item.encode_name for kind in ours for item in msgspec.structs.fields(kind))
    return frozenset(names)


def declared(param: str | None) -> str:
    """The field of a body that `param` is, or is in; nothing where the name is not one of ours, for
    then a stranger chose it."""
    name = re.split(r"[.\[]", param or "", maxsplit=1)[0]
    return name if name in _declared() else ""


def refused_fields() -> dict[str, tuple[str, ...]]:
    """Fields of bodies that are known and refused, by the name of their struct."""
    found: dict[str, tuple[str, ...]] = {}
    kinds: list[type[msgspec.Struct]] = [msgspec.Struct]
    while kinds:
        kinds += (below := kinds.pop().__subclasses__())
        found |= {c.__name__: _refused(c) for c in below if c.__module__.startswith("octavo.")}
    return found


def decode(cls: type[Body], data: bytes, strict: bool = False) -> tuple[Body, Ignored]:
    """A body, and those of its fields that are ignored: unknown ones, and what is asked for beside
    the answer. Raises `InvalidRequest` or `Unsupported`, naming the field.
    Of `cls` itself refused fields are refused; of what it holds, `refuse` does that."""
    ignored: Ignored = ()
    try:
        body = _decoder(cls).decode(data)
    except msgspec.ValidationError as error:
        if strict or not _UNKNOWN.match(str(error)):
            raise _named(cls, str(error), _raw(data)) from None
        body, ignored = _lenient(cls, data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    beside = () if strict else _beside(body)
    refuse(body, passed=beside)
    return body, (*ignored, *beside)


def taken(cls: type[Body], value: Any) -> Body:
    """A body out of another API's, translated to JSON-like objects. Raises as `decode`."""
    try:
        body = msgspec.convert(value, cls)
    except msgspec.ValidationError as error:
        raise _named(cls, str(error), value) from None
    refuse(body)
    return body


def _beside(body: msgspec.Struct) -> Ignored:
    names = _refused(type(body))
    return tuple(name for name in names if _among(getattr(body, name), _BESIDE.get(name, ())))


def _among(given: Any, values: tuple[Any, ...]) -> bool:
    return any(given == value and type(given) is type(value) for value in values)


def refuse(value: msgspec.Struct, prefix: str = "", passed: Ignored = ()) -> None:
    """Raises `Unsupported` for a field that is known and refused. prefix: where `value` is; passed:
    fields that are not refused."""
    for name in _refused(type(value)):
        given = getattr(value, name)
        fine = given is None or name in passed or _among(given, _HARMLESS.get(name, ()))
        if not fine:
            raise Unsupported(f"{prefix}{name} {_why_not(name)}, got {told(given)}", prefix + name)


def _why_not(name: str) -> str:
    if name in _INSTEAD:
        return f"is not supported: give {_INSTEAD[name]}"
    harmless = " or ".join(map(told, _HARMLESS.get(name, ())))
    return f"must be {harmless} in this version" if harmless else "is not supported by this version"


def told(value: Any) -> str:
    """A value of a body, short enough for a message, its constants as JSON has them."""
    constants = {None: "null", True: "true", False: "false"}
    return constants[value] if value is None or isinstance(value, bool) else shown(value)


def said_ignored(ignored: Ignored) -> list[tuple[bytes, bytes]]:
    """The header that names them; letters of a stranger's choice do not get into a header."""
    if not ignored:
        return []
    names = [re.sub(r"[^\w.\[\]-]", "?", name[:64], flags=re.ASCII) for name in ignored]
    more = ["..."] if len(names) > MOST_NAMED else []
    return [(IGNORED_HEADER, ", ".join(names[:MOST_NAMED] + more).encode())]


def _lenient(cls: type[Body], data: bytes) -> tuple[Body, Ignored]:
    """The slow way, for bodies with unknown fields: these are taken out and named."""
    try:
        raw = msgspec.json.decode(data)
        found: dict[str, None] = {}
        _prune(raw, _info(cls), "", found)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    try:
        return msgspec.convert(raw, cls), tuple(found)
    except msgspec.ValidationError as error:
        raise _named(cls, str(error), raw) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


@functools.cache
def _info(cls: type[msgspec.Struct]) -> inspect.Type:
    return inspect.type_info(cls)


def _prune(value: Any, kind: inspect.Type, path: str, found: dict[str, None]) -> None:
    """Take out of `value` what a struct of its type does not know. A struct with STRICT is our own:
    no foreign client has fields there that we could not know."""
    if isinstance(kind, inspect.UnionType):
        for choice in kind.types:
            _prune(value, choice, path, found)
    elif isinstance(kind, inspect.ListType) and isinstance(value, list):
        for item in value:
            _prune(item, kind.item_type, path + "[]", found)
    elif isinstance(kind, inspect.StructType) and isinstance(value, dict):
        if kind.tag_field is not None and value.get(kind.tag_field) != kind.tag:
            return  # another of the union, or none: that is for the decoder to say
        known = {item.encode_name: item.type for item in kind.fields}
        strict = getattr(kind.cls, "STRICT", False)
        prefix = path + "." if path else ""
        for name in list(value):
            if name in known:
                _prune(value[name], known[name], prefix + name, found)
            elif name != kind.tag_field and not strict:
                found[prefix + name] = None
                del value[name]


def _values(cls: type[msgspec.Struct], path: str) -> list[str]:
    """What may stand at a path of msgspec's, if only certain words may."""
    kinds = _flat([_info(cls)])
    for step in re.findall(r"[^.\[\]]+|\[[^\]]*\]", path):
        inner: list[inspect.Type] = []
        for kind in kinds:
            if isinstance(kind, inspect.ListType | inspect.VarTupleType) and step[0] == "[":
                inner.append(kind.item_type)
            elif isinstance(kind, inspect.DictType) and step[0] == "[":
                inner.append(kind.value_type)
            elif isinstance(kind, inspect.StructType):
                inner += [item.type for item in kind.fields if item.encode_name == step]
                if kind.tag_field == step:
                    inner.append(inspect.LiteralType((kind.tag,)))
        kinds = _flat(inner)
    found = [value for k in kinds if isinstance(k, inspect.LiteralType) for value in k.values]
    return list(dict.fromkeys(map(str, found)))


def _flat(kinds: list[inspect.Type]) -> list[inspect.Type]:
    """With unions taken apart."""
    return [
        one
        for kind in kinds
        for one in (kind.types if isinstance(kind, inspect.UnionType) else (kind,))
    ]


_KINDS: dict[str, type] = {
    "int": int, "float": float, "str": str, "bool": bool, "null": type(None), "array": list,
    "object": dict,
}  # fmt: skip
_WORDS = {"int": "an integer", "float": "a number", "str": "a text", "bool": "true or false"}
_WORDS |= {"array": "a list", "object": "an object", "null": "null"}
_NOWHERE = object()


def _raw(data: bytes) -> Any:
    """The body as it is, to say what was in it. One that goes wrong further on is not looked at."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return _NOWHERE


def _standing(value: Any, steps: list[str]) -> Iterator[Any]:
    """What stands at a path of msgspec's; of a dict with any keys, what stands there of each."""
    if not steps:
        yield value
    elif isinstance(value, dict):
        inner = value.values() if steps[0] == "[...]" else [value.get(steps[0], _NOWHERE)]
        for item in inner:
            yield from _standing(item, steps[1:])
    elif isinstance(value, list) and steps[0].strip("[]").isdecimal():
        yield from _standing(value[int(steps[0].strip("[]"))], steps[1:])


def _got(raw: Any, path: str, kind: type | None = None) -> str:
    """ ", got" and the value at a path, if it can be found: the first of a kind that is wrong."""
    found = _standing(raw, re.findall(r"[^.\[\]]+|\[[^\]]*\]", path))
    values = (v for v in found if v is not _NOWHERE and (kind is None or type(v) is kind))
    return next((f", got {told(value)}" for value in values), "")


def _named(cls: type[msgspec.Struct], message: str, raw: Any) -> InvalidRequest:
    """msgspec's message, with the path it names as `param`, and what stands there in `raw`."""
    text, _, path = message.partition(" - at `")
    path = re.sub(r"^(key in )?`?\$\.?", "", path.rstrip("`"))
    param = path.replace("[...]", "")
    wrong = re.fullmatch(r"Invalid (?:enum )?value (.*)", text, re.DOTALL)
    if wrong is not None and (words := _values(cls, path)):
        what = f"must be one of {', '.join(words)}, got {wrong[1][:64]}"
        return InvalidRequest(f"{param} {what}", param)
    beyond = re.fullmatch(r"Expected `(?:int|float)` ([<>])= (\S+)", text)
    if beyond is not None:
        end = "most" if beyond[1] == "<" else "least"
        what = f"must be at {end} {float(beyond[2]):g}{_got(raw, path)}"
        return InvalidRequest(f"{param} {what}", param)
    kinds = re.fullmatch(r"Expected `([a-z |]+)`, got `([a-z]+)`", text)
    if kinds is not None and kinds[2] in _KINDS:
        allowed = " or ".join(_WORDS.get(kind, kind) for kind in kinds[1].split(" | "))
        got = _got(raw, path, _KINDS[kinds[2]]) or f", got {_WORDS[kinds[2]]}"
        return InvalidRequest(f"{param or 'the body'} must be {allowed}{got}", param or None)
    unknown = _UNKNOWN.match(text)
    missing = re.search(r"missing required field `(.*)`", text)
    found = unknown or missing
    if found:
        name = found[1] if len(found[1]) <= MOST_NAME else found[1][:MOST_NAME] + "..."
        param = f"{param}.{name}" if param else name
    if unknown:
        return Unsupported(f"unknown field {param}", param)
    if missing:
        return InvalidRequest(f"{param} is required", param)
    return InvalidRequest(f"{param or 'the body'}: {text}", param or None)
