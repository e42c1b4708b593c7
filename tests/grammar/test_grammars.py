"""Grammars compile or are refused in words, in bounded time; matchers allow what the format says.

The oracles: jsonschema for schemas, Python's `re` for patterns.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import signal
from array import array
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from octavo.core.request import FinishReason, StructuredOutputs, Watcher
from octavo.errors import InvalidRequest
from octavo.grammar.compiled import KEPT, Grammars
from octavo.grammar.trial import Trial
from octavo.grammar.worker import LIMITS
from octavo.text import OutputText, StopWatcher, Together
from tests.server.fakes import BOS, EOS, VOCAB, FakeTokenizer
from tests.server.house import PATIENCE

TOKENIZER = FakeTokenizer()
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
        "next": {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"const": "x"}]},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def trial() -> Iterator[Trial]:
    made = Trial(PATIENCE)
    yield made
    made.close()


@pytest.fixture(scope="module")
def grammars(trial: Trial) -> Grammars:
    return Grammars(TOKENIZER, VOCAB, trial)


def on(mask: bytes | None) -> list[int]:
    assert mask is not None
    return [i for i in range(VOCAB) if mask[i >> 3] >> (i & 7) & 1]


def written(watcher: Watcher, seed: int, most: int = 400) -> tuple[str, FinishReason | None]:
    """A random text that the masks allow; ends are taken where there are any."""
    rng, tokens = random.Random(seed), list[int]()
    while len(tokens) < most:
        allowed = on(watcher.mask(len(tokens)))
        ends = [token for token in allowed if token in (EOS, *b'"}]')]
        token = rng.choice(ends if ends and rng.random() < 0.5 else allowed)
        if token == EOS:
            return TOKENIZER.decode(tokens), FinishReason.STOP
        tokens.append(token)
        kept, finish = watcher.advance((token,))
        assert kept == 1
        if finish is not None:
            return TOKENIZER.decode(tokens), finish
    return TOKENIZER.decode(tokens), None


def watcher(grammars: Grammars, **asked: Any) -> Watcher:
    return grammars.watcher(StructuredOutputs(**asked))()


@pytest.mark.parametrize("seed", range(30))
def test_random_text_under_a_schema_is_valid_under_it(grammars: Grammars, seed: int) -> None:
    text, finish = written(watcher(grammars, json=PERSON), seed)
    assert finish is FinishReason.STOP
    jsonschema.validate(json.loads(text), PERSON)
    assert not re.search(r"[\n\t]|  ", re.sub(r'"[^"]*"', "", text))


@pytest.mark.parametrize("seed", range(10))
def test_any_object_and_the_empty_schema_end_and_parse(grammars: Grammars, seed: int) -> None:
    for asked in ({"json_object": True}, {"json": {}}, {"json": '{"type": "object"}'}):
        text, finish = written(watcher(grammars, **asked), seed, 4000)
        assert finish is FinishReason.STOP
        assert "json" in asked or isinstance(json.loads(text), dict)
        json.loads(text)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("pattern", [r"\d{3}-[a-f]+", "^a(b|cd)*e$", r"(é|🙂){2}", r"x\$"])
def test_a_pattern_matches_the_whole_text(grammars: Grammars, pattern: str, seed: int) -> None:
    text, finish = written(watcher(grammars, regex=pattern), seed)
    assert finish is FinishReason.STOP
    assert re.fullmatch(pattern, text)


def test_a_choice_is_one_of_its_texts_whatever_they_hold(grammars: Grammars) -> None:
    words = ("yes", "yes, but", 'a "b"\n', "é\u2028", "back\\slash", "/regex/", "<s>", " ", "\x7f")
    found = {written(watcher(grammars, choice=words), seed)[0] for seed in range(80)}
    assert found == set(words)


@pytest.mark.parametrize(
    "grammar",
    ['start: "a" WORD\nWORD: /[0-9]{2}/', 'root ::= "a" digit digit\ndigit ::= [0-9]'],
    ids=["Lark", "GBNF"],
)
def test_both_common_grammar_languages_are_read(grammars: Grammars, grammar: str) -> None:
    text, _ = written(watcher(grammars, grammar=grammar), 1)
    assert re.fullmatch(r"a\d\d", text)


def test_control_tokens_are_never_text(grammars: Grammars) -> None:
    """ "<s>" as a text is three bytes; the token that looks like it is not allowed."""
    allowed = on(watcher(grammars, regex=".*").mask(0))
    assert BOS not in allowed
    assert EOS in allowed
    assert ord("<") in on(watcher(grammars, choice=("<s>",)).mask(0))


def test_guesses_are_judged_without_moving(grammars: Grammars) -> None:
    text = array("i", [*b'{"name": "Al","age": 7, "tags": ["red"]}'])
    moved, still = watcher(grammars, json=PERSON), watcher(grammars, json=PERSON)
    first = still.mask(0)
    masks = still.ahead(text)
    assert still.mask(0) == first
    assert len(masks) == len(text) - 1  # after the last guess nothing follows
    for position, token in enumerate(text):
        if position:
            assert moved.mask(position) == masks[position - 1]
        assert token in on(moved.mask(position))
        kept, finish = moved.advance((token,))
        assert (kept, finish is None) == (1, position < len(text) - 1)
    wrong = array("i", [*b'{"name": 5'])
    assert len(still.ahead(wrong)) == 9
    assert still.ahead(array("i", [ord("x")])) == []
    assert written(still, 3)[1] is FinishReason.STOP


def test_a_stop_string_ends_what_a_grammar_would_go_on_with(grammars: Grammars) -> None:
    stop = StopWatcher(OutputText(TOKENIZER.stream(), ("bb",)))
    both = Together(stop, watcher(grammars, regex="a(b|c)+d"))
    assert both.advance(tuple(b"acb")) == (3, None)
    assert both.advance(tuple(b"bcc")) == (1, FinishReason.STOP)


def test_a_lead_is_free_and_the_grammar_holds_behind_it(grammars: Grammars) -> None:
    asked = {"regex": "[0-9]{2}", "after": "</think>", "first": "<think>"}
    free, guessed = watcher(grammars, **asked), watcher(grammars, **asked)
    lead, answer = array("i", [*b"<think>1 < 2</think>"]), array("i", [*b"42"])
    for at, token in enumerate(lead):
        allowed = on(free.mask(at))
        assert allowed == [token] if at < 7 else EOS not in allowed and len(allowed) > 250
        if at == 7:
            guessed.advance(lead[:7])
            ahead = guessed.ahead(lead[7:])
            assert len(ahead) == len(lead) - 8  # what ends the lead is no guess
            assert set(ahead) == {free.mask(at)}
            assert guessed.ahead(array("i", [EOS])) == []
        assert free.advance((token,)) == (1, None)
    assert on(free.mask(len(lead))) == [*b"0123456789"]
    assert free.advance(answer) == (2, FinishReason.STOP)
    assert guessed.advance([*lead[7:], *answer]) == (len(lead) - 7 + 2, FinishReason.STOP)


def test_an_end_token_ends_a_text_that_could_go_on(grammars: Grammars) -> None:
    either = watcher(grammars, regex="a+")
    assert EOS not in on(either.mask(0))
    either.advance(b"a")
    assert EOS in on(either.mask(1))
    assert either.advance((EOS,)) == (1, FinishReason.STOP)


def test_a_token_against_the_grammar_is_an_error_of_this_sequence(grammars: Grammars) -> None:
    one, other = watcher(grammars, regex="ab"), watcher(grammars, regex="ab")
    with pytest.raises(InvalidRequest, match="grammar failed"):
        one.advance(b"x")
    assert other.advance(b"ab") == (2, FinishReason.STOP)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


EITHER = [
    {"anyOf": [{"properties": {f"a{i}": {}}}, {"properties": {f"b{i}": {}}}]} for i in range(14)
]
MANY = {f"p{i}": {"type": "string"} for i in range(1500)}
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("not a pattern", {"regex": "(("}, "invalid regex"),
    ("look-around", {"regex": r"(?=a)a"}, "look-around"),
    ("not a grammar", {"grammar": "hello"}, "Expected"),
    ("a rule that is missing", {"grammar": "start: foo"}, "unknown name"),
    ("not JSON", {"json": "{"}, "no JSON schema"),
    ("not an object", {"json": "[1]"}, "no JSON schema"),
    ("a keyword that cannot be kept", {"json": {"uniqueItems": True}}, "uniqueItems"),
    ("a type that is none", {"json": {"type": "text"}}, "text"),
    ("an endless reference", {"json": {"$ref": "#"}}, "NoExtension"),
    ("a reference to elsewhere", {"json": {"$ref": "http://x.y/z"}}, "x.y"),
    ("nested deeply", {"json": nested(300)}, "recursion"),
    ("nested beyond Python", {"json": nested(20_000)}, "no JSON schema"),
    ("an intersection that explodes", {"json": {"allOf": EITHER}}, "large"),
    ("too many rows at its first key", {"json": {"type": "object", "properties": MANY}}, "items"),
    ("too long", {"regex": "a" * 300_000}, "characters"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "what"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_what_does_not_compile_is_refused_in_words(
    grammars: Grammars, asked: dict[str, Any], what: str
) -> None:
    for _ in range(2):  # the second answer is a remembered one
        with pytest.raises(InvalidRequest, match=what) as caught:
            grammars.compile(StructuredOutputs(**asked, param="response_format"))
        assert caught.value.param == "response_format"


PLACES: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"a": {"type": "array", "items": {"type": "odd"}}}},
     "Invalid type: odd (at #/properties/a/items)"),
    ({"type": "odd"}, "Invalid type: odd (at #)"),
    ({"not": {}}, 'Unimplemented keys: ["not"] (at #)'),
    ({"properties": {"a/b": {"uniqueItems": True}}, "additionalProperties": True},
     'Unimplemented keys: ["uniqueItems"] (at #/properties/a~1b)'),
    ({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"pattern": "(?=a)"}}},
     "(at #/$defs/x)"),
    ({"properties": {"a": {"$ref": "#/$defs/y"}}, "$defs": {"x": {"type": "string"}}},
     "(at #/properties/a)"),
    ({"anyOf": [{"type": "string"}, {"type": "integer", "multipleOf": 0}]}, "(at #/anyOf/1)"),
    ({"properties": {"a": 5}}, "must be an object or a boolean (at #/properties/a)"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "what"), PLACES, ids=[what for _, what in PLACES])
def test_what_is_wrong_in_a_schema_is_found_in_it(
    grammars: Grammars, schema: dict[str, Any], what: str
) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(what)):
        grammars.compile(StructuredOutputs(json={"type": "object"} | schema))


def test_what_is_refused_by_name_says_how_it_could_be_ignored(grammars: Grammars) -> None:
    for param, said in (("response_format", True), ("structured_outputs", False)):
        with pytest.raises(InvalidRequest, match="uniqueItems") as caught:
            grammars.compile(StructuredOutputs(json={"uniqueItems": True}, param=param))
        assert ('"strict": false' in str(caught.value)) == said
    with pytest.raises(InvalidRequest, match="Invalid type") as caught:
        grammars.compile(StructuredOutputs(json={"type": "odd"}, param="response_format"))
    assert "strict" not in str(caught.value)


def test_best_effort_ignores_what_cannot_be_kept(grammars: Grammars) -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "boolean"}}
    text, _ = written(watcher(grammars, json=schema, strict=False), 2)
    assert isinstance(json.loads(text), list)


def test_what_takes_too_long_is_given_up_and_the_next_is_served() -> None:
    trial = Trial(seconds=0.05)
    try:
        with pytest.raises(InvalidRequest, match="takes over"):
            trial.grammar("json", '{"type": "integer", "multipleOf": 999983}')
        trial.seconds = PATIENCE
        assert trial.grammar("regex", "a")
        trial.seconds = 0.05
        with pytest.raises(InvalidRequest, match="takes over"):
            trial.grammar("json", '{"type": "integer", "multipleOf": 999979}')
    finally:
        trial.close()


def test_slowness_is_not_remembered() -> None:
    trial = Trial(seconds=0.05)
    grammars = Grammars(TOKENIZER, VOCAB, trial)
    try:
        os.kill(trial._running().pid, signal.SIGSTOP)  # the slowest that there can be
        with pytest.raises(InvalidRequest, match="takes over"):
            grammars.compile(StructuredOutputs(regex="ab*"))
        trial.seconds = PATIENCE
        assert grammars.compile(StructuredOutputs(regex="ab*"))
    finally:
        trial.close()


def test_a_compiler_that_dies_is_replaced() -> None:
    trial = Trial(PATIENCE)
    try:
        assert trial.grammar("regex", "a")
        assert trial._process is not None
        trial._process.kill()
        trial._process.wait()
        assert trial.grammar("regex", "b")
    finally:
        trial.close()


def test_it_works_however_many_files_are_open() -> None:
    """A server with two thousand connections has descriptors above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    trial = Trial(PATIENCE)
    try:
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(os.devnull)) for _ in range(1100)]
            assert max(file.fileno() for file in files) > 1023
            assert trial.grammar("regex", "[a-c]{1,3}")
    finally:
        trial.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_few_grammars_are_kept(trial: Trial) -> None:
    grammars = Grammars(TOKENIZER, VOCAB, trial)
    for i in range(KEPT + 10):
        grammars.compile(StructuredOutputs(regex=f"a{{{i + 1}}}"))
    assert len(grammars._kept) == KEPT


def test_the_limits_are_those_that_llguidance_knows() -> None:
    from llguidance import LLParserLimits

    limits = LLParserLimits(**LIMITS)
    assert {name: getattr(limits, name) for name in LIMITS} == LIMITS


@pytest.mark.parametrize(
    "asked",
    [{}, {"regex": "a", "json_object": True}, {"choice": ()}, {"choice": ("a", 1)}, {"json": 5},
     {"regex": 1}, {"json_object": 1}, {"grammar": b""}, {"regex": "a", "strict": None}],
    ids=str,
)  # fmt: skip
def test_exactly_one_well_formed_thing_is_asked_for(asked: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        StructuredOutputs(**asked)
    assert caught.value.param == "structured_outputs"
