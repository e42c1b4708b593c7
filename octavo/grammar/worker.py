"""The process in which a stranger's grammar is tried first: it may be killed, and nothing else is.

One JSON object a line: `{"kind", "text", "strict"}` comes in, `{"grammar"}` (llguidance's own form)
or `{"error"}` goes out; `{"ready": true}` is the first line. It is run as a script and imports
nothing of ours. It ends with its input, after some idle time, or when it has grown large.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
from typing import Any

IDLE_SECONDS = 60
ADDRESS_SPACE = 1 << 30
PROBED = 24  # tokens of the first text that a grammar allows
LARGE = 192 << 20  # bytes resident: a new process is cheaper than keeping them

# Bounds of llguidance (LLParserLimits). A mask is computed between two steps, so what one may cost
# is kept to some milliseconds; states of the lexer hold one to two kB each, for every sequence.
LIMITS: dict[str, Any] = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 10_000,
    "max_lexer_states": 25_000,
    "max_grammar_size": 200_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}

# One line of JSON, with or without a space after "," and ":": models write both, and there is no
# run of white space to get lost in.
JSON_FORM: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}


def grammar_of(kind: str, text: str, strict: bool) -> str:
    """llguidance's form of what was asked. Raises ValueError where that shows already here."""
    from llguidance import LLMatcher

    if kind == "json":
        overrides: Any = JSON_FORM | {"lenient": not strict}
        return LLMatcher.grammar_from_json_schema(text, overrides=overrides)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(_anchored(text))
    if kind == "choice":
        words = json.loads(text)
        # A terminal: as rules they would be an Earley item each.
        lark = "start: CHOICE\nCHOICE: " + " | ".join(map(_quoted, words))
        return LLMatcher.grammar_from_lark(lark)
    from llguidance.gbnf_to_lark import any_to_lark

    return LLMatcher.grammar_from_lark(any_to_lark(text))


def _quoted(word: str) -> str:
    return json.dumps(word, ensure_ascii=False).replace("\x7f", r"\x7f")  # no letter of Lark's


def _anchored(regex: str) -> str:
    """A pattern always matches the whole output: anchors around it say nothing more."""
    regex = regex.removeprefix("^")
    backslashes = len(regex[:-1]) - len(regex[:-1].rstrip("\\"))
    return regex[:-1] if regex.endswith("$") and backslashes % 2 == 0 else regex


def tried(kind: str, text: str, strict: bool, tokenizer: Any) -> str:
    """The grammar, compiled and asked for the masks of some text. Raises ValueError if it fails."""
    from llguidance import LLMatcher, LLParserLimits

    grammar = grammar_of(kind, text, strict)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
    for _ in range(PROBED):  # what is too large at its first key or so must not fail in a step
        if matcher.is_error() or matcher.is_stopped():
            break
        allowed = int.from_bytes(matcher.compute_bitmask(), "little") & ((1 << 256) - 1)
        if not allowed:
            break
        matcher.consume_token((allowed & -allowed).bit_length() - 1)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    if matcher.is_stopped() and not matcher.is_accepting():
        raise ValueError("it allows no text at all")
    return grammar


SEARCH_SECONDS = 0.5
MOST_STEPS = 40
_MAPS = ("$defs", "definitions", "properties", "patternProperties")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "additionalItems", "contains", "propertyNames")


def located(text: str, strict: bool, tokenizer: Any, error: str) -> str:
    """The error of a JSON schema with where in it it is (a JSON Pointer): in the innermost part
    that fails alone, as far as that can be found soon."""
    schema, until, path = json.loads(text), time.monotonic() + SEARCH_SECONDS, ""
    shared = {name: schema[name] for name in _MAPS[:2] if name in schema}
    inner: Any = schema
    while inner is not None and path.count("/") < MOST_STEPS:
        parts, inner = _parts(inner), None
        for step, part in parts:
            if time.monotonic() > until:
                break
            found = _failure(part, shared, strict, tokenizer)
            if found is not None:
                path, error, inner = path + step, found, part
                break
    if path.count("/") >= MOST_STEPS:  # what is nested too deeply is so everywhere
        return error
    return f"{error[:200]} (at #{path})"


def _parts(schema: Any) -> list[tuple[str, Any]]:
    """(step of a JSON Pointer, subschema) of all that is directly in a schema."""
    if not isinstance(schema, dict):
        return []
    found: list[tuple[str, Any]] = []
    for name in _MAPS:
        if isinstance(schema.get(name), dict):
            found += [(f"/{name}/{_escaped(key)}", part) for key, part in schema[name].items()]
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            found += [(f"/{name}/{index}", part) for index, part in enumerate(schema[name])]
    return found + [(f"/{name}", schema[name]) for name in _SINGLE if name in schema]


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _failure(part: Any, shared: dict[str, Any], strict: bool, tokenizer: Any) -> str | None:
    """What is wrong with a subschema alone, with the definitions that it may refer to."""
    if not isinstance(part, dict):
        return None if isinstance(part, bool) else "a schema must be an object or a boolean"
    try:
        tried("json", json.dumps(shared | part), strict, tokenizer)
    except Exception as error:
        return str(error)
    return None


class _Bytes:
    """A tokenizer of single bytes: what a grammar costs to compile does not depend on tokens."""

    is_tokenizer_wrapper = True
    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes((i,)) for i in range(256)), b"\xff</s>")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def main() -> None:
    from llguidance import LLTokenizer

    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is for our parent
    tokenizer: Any = LLTokenizer(_Bytes())  # type: ignore[arg-type]
    _say({"ready": True})
    signal.alarm(IDLE_SECONDS)
    for line in sys.stdin.buffer:
        signal.alarm(0)
        asked = json.loads(line)
        try:
            grammar = tried(asked["kind"], asked["text"], asked["strict"], tokenizer)
            _say({"grammar": grammar})
        except Exception as error:  # whatever a stranger's text makes a parser raise
            _say({"error": _told(asked, tokenizer, str(error) or type(error).__name__)})
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > LARGE:
            return
        signal.alarm(IDLE_SECONDS)


def _told(asked: dict[str, Any], tokenizer: Any, error: str) -> str:
    if asked["kind"] != "json":
        return error
    try:
        return located(asked["text"], asked["strict"], tokenizer, error)
    except Exception:  # nested beyond what can be walked
        return error


def _say(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
