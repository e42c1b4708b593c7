"""Thoughts and calls are found whatever the pieces that text comes in, and nothing is lost."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.server.parsing import (
    Called,
    HermesCalls,
    LlamaCalls,
    MistralCalls,
    Parser,
    Plain,
    Said,
    Thinking,
    Thought,
    WholeCalls,
    nine,
)

NAMES = frozenset({"get_weather", "now", "réserver"})
ROME = '{"name": "get_weather", "arguments": {"city": "Rome", "tags": ["a}", "\\"{"]}}'
NOW = '{"name": "now", "arguments": {}}'

Heard = tuple[str, str, tuple[tuple[str, str], ...]]


def heard(parser: Parser, pieces: list[str]) -> Heard:
    """(thoughts, content, calls as (name, arguments)) of a text in pieces."""
    said, thought = "", ""
    calls: list[tuple[str, str, str]] = []
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + [*parser.finish()]
    for delta in deltas:
        if isinstance(delta, Said):
            said += delta.text
        elif isinstance(delta, Thought):
            thought += delta.text
        elif delta.id is not None:
            assert delta.number == len(calls)
            assert delta.name is not None
            assert delta.arguments == ""
            calls.append((delta.id, delta.name, ""))
        else:
            assert delta.name is None
            assert delta.number == len(calls) - 1
            assert delta.arguments
            id, name, arguments = calls[-1]
            calls[-1] = id, name, arguments + delta.arguments
    assert all(delta.text for delta in deltas if not isinstance(delta, Called))
    assert len({id for id, _, _ in calls}) == len(calls)
    return thought, said, tuple((name, arguments) for _, name, arguments in calls)


def cuts(text: str, count: int = 30) -> list[list[str]]:
    """The text whole, by characters, and cut at random."""
    rng = random.Random(text)
    ways = [[text], list(text)]
    for _ in range(count):
        at = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randrange(6))))
        ways.append([text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)])
    return ways


def wrap(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


ARGUMENTS = '{"city": "Rome", "tags": ["a}", "\\"{"]}'
HERMES: list[tuple[str, str, tuple[tuple[str, str], ...]]] = [
    ("hello <world> a < b", "hello <world> a < b", ()),
    ("  padded \n", "  padded \n", ()),
    (wrap(ROME), "", (("get_weather", ARGUMENTS),)),
    (f"Let me see.\n\n{wrap(ROME)}\n", "Let me see.", (("get_weather", ARGUMENTS),)),
    (wrap(ROME, NOW), "", (("get_weather", ARGUMENTS), ("now", "{}"))),
    (f"{wrap(NOW)} and {wrap(NOW)} done", " and done", (("now", "{}"),) * 2),
    ('<tool_call>{"name":"now"}</tool_call>', "", (("now", "{}"),)),
    ('<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>', "", (("now", '{"a": 1}'),)),
    ('<tool_call>{"id": 5, "type": "function", "name": "now", "arguments": null}</tool_call>', "",
     (("now", "{}"),)),
    ('<tool_call>{"name": "r\\u00e9server", "arguments": {}}</tool_call>', "",
     (("réserver", "{}"),)),
    # What is forgiven: a brace too few or too many, no closing tag, the next call at once.
    ('<tool_call>{"name": "now", "arguments": {}\n</tool_call>', "", (("now", "{}"),)),
    ('<tool_call>{"name": "now", "arguments": {}}}</tool_call>x', "x", (("now", "{}"),)),
    (f"<tool_call>{NOW}", "", (("now", "{}"),)),
    (f"<tool_call>{NOW}<tool_call>{NOW}</tool_call>", "", (("now", "{}"),) * 2),
    (f"<tool_call>{NOW} oops </tool_call> end", "oops end", (("now", "{}"),)),
    # Cut short inside the arguments: they are what came.
    ('<tool_call>{"name": "now", "arguments": {"a": [1', "", (("now", '{"a": [1'),)),
    # None of these is a call: all of it is text.
    *((text, text, ()) for text in (
        "<tool_call>", "<tool_call>\n", "<tool_call>{", "<tool_call>hello</tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "now", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": 5}</tool_call>', "<tool_call>[]</tool_call>",
        '<tool_call>{"name": "now', "<tool_call>{}</tool_call>", "<tool_cal", "</tool_call>",
        '<tool_call>{"name": "now", "name": "now"}</tool_call>',
    )),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said", "calls"), HERMES, ids=[h[0][:60] for h in HERMES])
def test_hermes_calls(text: str, said: str, calls: tuple[tuple[str, str], ...]) -> None:
    for pieces in cuts(text):
        _, content, found = heard(HermesCalls(NAMES), pieces)
        assert (content.replace("and  done", "and done"), found) == (said, calls)


LLAMA_ROME = ROME.replace("arguments", "parameters")
LLAMA_NOW = NOW.replace("arguments", "parameters")
LLAMA: list[tuple[str, str, tuple[tuple[str, str], ...]]] = [
    ("hello {", "hello {", ()),
    (LLAMA_ROME, "", (("get_weather", ARGUMENTS),)),
    (f"\n{LLAMA_ROME}; {LLAMA_NOW}\n", "", (("get_weather", ARGUMENTS), ("now", "{}"))),
    (f"<|python_tag|>{LLAMA_NOW}", "", (("now", "{}"),)),
    (f"{LLAMA_NOW} That is all.", " That is all.", (("now", "{}"),)),
    ('{"type": "function", "name": "now", "parameters": {}}', "", (("now", "{}"),)),
    *((text, text, ()) for text in (
        '{"a": 1}', '{"name": "unknown", "parameters": {}}', '{"name": "Anna"', "{", "  ", "",
        " {x}", '{"name": "now", "parameters": 5} {', "<|python_ta", "<|python_tag|",
        f"see {LLAMA_NOW}",
    )),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said", "calls"), LLAMA, ids=[h[0][:60] for h in LLAMA])
def test_llama_calls(text: str, said: str, calls: tuple[tuple[str, str], ...]) -> None:
    for pieces in cuts(text):
        assert heard(LlamaCalls(NAMES), pieces)[1:] == (said, calls)


MISTRAL_ROME = ROME[:-1] + ', "id": "D681PevKs"}'
MISTRAL: list[tuple[str, str, tuple[tuple[str, str], ...]]] = [
    ("hello [world]", "hello [world]", ()),
    (f"[TOOL_CALLS] [{MISTRAL_ROME}]", "", (("get_weather", ARGUMENTS),)),
    (f"[TOOL_CALLS][{ROME}, {NOW}]", "", (("get_weather", ARGUMENTS), ("now", "{}"))),
    (f"Let me see.\n[TOOL_CALLS] [{NOW}]", "Let me see.", (("now", "{}"),)),
    (f"[{NOW}]", "", (("now", "{}"),)),
    (f" [ {ROME},\n{NOW} ]\n", "", (("get_weather", ARGUMENTS), ("now", "{}"))),
    (f"[TOOL_CALLS] [{NOW}] That is all.", " That is all.", (("now", "{}"),)),
    # Cut short: a list without its end, arguments without theirs.
    (f"[TOOL_CALLS] [{NOW}", "", (("now", "{}"),)),
    ('[TOOL_CALLS] [{"name": "now", "arguments": {"a": [1', "", (("now", '{"a": [1'),)),
    *((text, text, ()) for text in (
        "[TOOL_CALLS]", "[TOOL_CALLS] [", "[TOOL_CALLS] []", "[TOOL_CALLS] now", "[TOOL_CAL", "[",
        "[1, 2]", "[]", '[{"a": 1}]', '[{"name": "Anna", "arguments": {}}]', "  ", "",
        '[TOOL_CALLS] [{"name": "unknown", "arguments": {}}]', "[[1], [2]]", "[ ]",
        f"see [{NOW}]",
    )),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said", "calls"), MISTRAL, ids=[h[0][:60] for h in MISTRAL])
def test_mistral_calls(text: str, said: str, calls: tuple[tuple[str, str], ...]) -> None:
    for pieces in cuts(text):
        assert heard(MistralCalls(NAMES), pieces)[1:] == (said, calls)


def whole_calls(names: frozenset[str], begins: str = "{[`") -> Parser:
    return WholeCalls(HermesCalls(names), names, begins, nine)


# What Qwen2.5-Coder 0.5B and 1.5B wrote, greedy, with get_weather and get_time as tools.
WROTE = '```json\n{\n  "name": "get_weather",\n  "arguments": {\n    "city": "Rome"\n  }\n}\n```'
JOKE = '{"name": "Joke", "arguments": {"message": "Why did the tomato turn red?"}}'
ANNA = '```json\n{\n  "name": "Anna",\n  "arguments": {\n    "city": "New York"\n  }\n}\n```'
WHOLE: list[tuple[str, str, tuple[tuple[str, str], ...]]] = [
    (WROTE, "", (("get_weather", '{\n    "city": "Rome"\n  }'),)),
    (ROME, "", (("get_weather", ARGUMENTS),)),
    (f"\n{ROME}\n", "", (("get_weather", ARGUMENTS),)),
    (LLAMA_ROME, "", (("get_weather", ARGUMENTS),)),
    (f"```\n{NOW}\n```\n", "", (("now", "{}"),)),
    (f"```tool_call\n{NOW}```", "", (("now", "{}"),)),
    (f"[{ROME}, {NOW}]", "", (("get_weather", ARGUMENTS), ("now", "{}"))),
    (f"```json\n[\n  {ROME},\n  {NOW}\n]\n```", "",
     (("get_weather", ARGUMENTS), ("now", "{}"))),
    ('{"type": "function", "id": "a", "name": "now", "parameters": null}', "", (("now", "{}"),)),
    ('{"arguments": {"a": 1}, "name": "now"}', "", (("now", '{"a": 1}'),)),
    (wrap(ROME), "", (("get_weather", ARGUMENTS),)),
    (f"I look.\n{wrap(NOW)}", "I look.", (("now", "{}"),)),
    # None of these is a call: all of it is text.
    *((text, text, ()) for text in (
        JOKE, ANNA, "", "  ", "hello", "{", "{}", "[]", "```", "`now`", "```json\n", "[1, 2]",
        '{"name": "now"}', '{"name": "now", "arguments": [1]}',
        '{"name": "now", "arguments": "{}"}', '{"name": "now", "arguments": {}, "mood": "good"}',
        '{"city": "Rome", "temperature": 21}', '{"name": "Rome", "temperature": 21}',
        f"{NOW} That is the call.", f"```json\n{NOW}\n```\nThis asks for the time.",
        f"The call:\n```json\n{NOW}\n```", f"```json\n{NOW}\n", f"{NOW}\n```", f"{NOW}]",
        f"[{NOW}", f"[{NOW},]", f"[{NOW}, 1]", f"[{NOW}, {JOKE}]", f"[{NOW}] [{NOW}]",
        f"{NOW}\n{NOW}", '```python\nprint({"name": "now"})\n```', "[[" + NOW + "]]",
        '{"name": "now", "arguments": {"a": 1,}}', '{"name": "now", "arguments": {} ',
        '{"name": "now", "arguments": {"a": "cut',
    )),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said", "calls"), WHOLE, ids=[h[0][:60] for h in WHOLE])
def test_an_answer_that_is_nothing_but_a_call_without_tags_is_a_call(
    text: str, said: str, calls: tuple[tuple[str, str], ...]
) -> None:
    for pieces in cuts(text):
        assert heard(whole_calls(NAMES), pieces)[1:] == (said, calls)


HELD = [
    ("The ", ["The"]),
    ("{", []),
    ('{"na', []),
    ('{"name": "Jo', ['{"name": "Jo']),  # no tool's name begins so
    ('{"city"', ['{"city"']),
    ('{"name": "now", "arguments": {"long', []),
    (f"{NOW}\n\n", []),
    (f"{NOW}\nT", [f"{NOW}\nT"]),
    ("```json\n", []),
    ("```json\nx", ["```json\nx"]),
    ("[1", ["[1"]),
]


@pytest.mark.parametrize(("text", "said"), HELD)
def test_an_answer_is_held_back_only_while_it_may_yet_be_nothing_but_calls(
    text: str, said: list[str]
) -> None:
    parser = whole_calls(NAMES)
    shown = [d for c in text for d in parser.push(c)]
    assert "".join(d.text for d in shown if isinstance(d, Said)) == "".join(said)


def test_an_answer_begins_as_it_is_asked_to() -> None:
    for begins, text in (("[`", NOW), ("{`", f"[{NOW}]"), ("{[", WROTE)):
        assert heard(whole_calls(NAMES, begins), [text])[1:] == (text, ())


@pytest.mark.parametrize("parser", [HermesCalls, LlamaCalls, MistralCalls, whole_calls])
@settings(derandomize=True, max_examples=300)
@given(data=st.data())
def test_how_text_is_cut_changes_nothing_and_no_character_is_lost(
    parser: Callable[[frozenset[str]], Parser], data: st.DataObject
) -> None:
    bits = [ROME, LLAMA_NOW, "<tool_call>", "</tool_call>", "{", "}", '"name"', ": ", '"now"', " x",
            "\n", ", ", '"arguments"', "[1]", "\\", '"', "null", "; ", "[TOOL_CALLS]",
            "[", "]", NOW, "```json\n", "```"]  # fmt: skip
    parts = data.draw(st.lists(st.sampled_from(bits), max_size=12))
    text = "".join(parts)
    whole = heard(parser(NAMES), [text])
    for pieces in cuts(text, 4):
        assert heard(parser(NAMES), pieces) == whole
    if not whole[2]:
        assert whole[1] == text
    kept = "".join(whole[1].split())
    for _, arguments in whole[2]:
        kept += "".join(arguments.split())
    assert len(kept) <= len("".join(text.split())) + 2 * len(whole[2])


def test_streamed_arguments_come_before_they_end() -> None:
    parser = HermesCalls(NAMES)
    assert parser.push('<tool_call>{"name": "get_weather", "argu') == []
    first, then = parser.push('ments": {"city": "Ro')
    assert isinstance(first, Called)
    assert (first.name, first.arguments) == ("get_weather", "")
    assert then == Called(0, '{"city": "Ro')
    assert [d.arguments for d in parser.push('me"}}') if isinstance(d, Called)] == ['me"}']


def test_text_is_held_back_only_while_it_may_yet_be_a_call() -> None:
    parser = HermesCalls(NAMES)
    assert parser.push("a <") == [Said("a")]
    assert parser.push("b") == [Said(" <b")]


def test_a_forgotten_end_of_a_call_does_not_hold_the_rest_back() -> None:
    story = "Once upon a time there was a tag that nobody closed. " * 4 + "End"
    text = "<tool_call>" + NOW + " " + story
    whole = heard(HermesCalls(NAMES), [text])
    assert whole == heard(HermesCalls(NAMES), list(text))
    assert whole == ("", " " + story, (("now", "{}"),))
    parser = HermesCalls(NAMES)
    parser.push("<tool_call>" + NOW)
    early = [delta.text for c in story[:120] for delta in parser.push(c) if isinstance(delta, Said)]
    assert len("".join(early)) > 100


THOUGHTS = [
    ("<think>\nso\n</think>\n\nyes", False, "so", "yes"),
    ("so be it</think>yes", True, "so be it", "yes"),
    ("<think>\nso be it</think>yes", True, "so be it", "yes"),  # the tag a second time
    ("<think>", True, "", ""),
    ("<thi", True, "<thi", ""),
    ("so <think>more</think>yes", True, "so <think>more", "yes"),
    ("\n<think>\n\n</think>\n\nyes ", False, "", "yes "),
    ("yes <think>no</think>", False, "", "yes <think>no</think>"),
    ("<think>cut off", False, "cut off", ""),
    ("<thi", False, "", "<thi"),
    ("a < b </thin", True, "a < b </thin", ""),
    ("", True, "", ""),
    ("  hello", False, "", "  hello"),
]


@pytest.mark.parametrize(("text", "opened", "thought", "said"), THOUGHTS)
def test_thoughts_are_what_stands_in_front_between_the_tags(
    text: str, opened: bool, thought: str, said: str
) -> None:
    for pieces in cuts(text):
        assert heard(Thinking(Plain(), opened=opened), pieces) == (thought, said, ())


def test_a_call_after_a_thought_is_a_call_and_one_inside_is_thought() -> None:
    text = f"<think>{wrap(NOW)}</think>\n{wrap(ROME)}"
    for pieces in cuts(text):
        thought, said, calls = heard(Thinking(HermesCalls(NAMES), opened=False), pieces)
        assert (thought, said) == (wrap(NOW), "")
        assert json.loads(calls[0][1])["city"] == "Rome"
