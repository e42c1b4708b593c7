"""Tokenizers against llama.cpp (fixtures) and transformers, and the laws of text and streams."""

from __future__ import annotations

import dataclasses
import gzip
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ContextOverflow, InvalidRequest, Unsupported
from octavo.models import hub
from octavo.models.gguf import read_gguf
from octavo.models.tokenizer import Tokenizer, load_tokenizer

FIXTURES = Path(__file__).parents[1] / "fixtures" / "tokenizer"
sys.path.insert(0, str(FIXTURES))
from corpus import texts  # noqa: E402
from reference import reference  # noqa: E402

MODELS = [
    pytest.param("smollm2-135m", id="smollm2"),
    pytest.param("gemma-3-270m", id="gemma3", marks=pytest.mark.models),
    pytest.param("qwen2.5-coder-0.5b", id="qwen2.5", marks=pytest.mark.models),
]
FIXTURE_OF = {
    "smollm2-135m": "smollm2",
    "gemma-3-270m": "gemma3",
    "qwen2.5-coder-0.5b": "qwen2.5",
}
CORPUS = texts()
_loaded: dict[str, Tokenizer] = {}


def metadata(name: str) -> dict[str, Any]:
    return read_gguf(hub.resolve(name)).metadata


def tokenizer(name: str) -> Tokenizer:
    if name not in _loaded:
        checkpoint = SimpleNamespace(metadata=metadata(name), directory=None)
        _loaded[name] = load_tokenizer(checkpoint)
    return _loaded[name]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return tokenizer("smollm2-135m")


def fixture(name: str) -> dict[str, Any]:
    with gzip.open(FIXTURES / f"{FIXTURE_OF[name]}.json.gz") as file:
        record: dict[str, Any] = json.load(file)
    return record


def comparable(name: str, text: str) -> bool:
    """Where we differ from llama.cpp on purpose.

    It takes every token spelled "</s>" for a control token; in Gemma's and Qwen's vocabularies it
    is an HTML tag. And a byte that SmolLM2's vocabulary lacks (0xF1: planes 4 to 7) disappears;
    llama.cpp lets it part its neighbours all the same, tokenizers (and the original) does not.
    """
    if name == "smollm2-135m":
        return not any(0x40000 <= ord(char) < 0x80000 for char in text)
    return "</s>" not in text


# llama.cpp


@pytest.mark.parametrize("name", MODELS)
def test_user_text_becomes_llama_cpps_ids(name: str) -> None:
    t = tokenizer(name)
    for text, ids in zip(CORPUS, fixture(name)["plain"], strict=True):
        if comparable(name, text):
            assert t.encode(text, bos=False) == ids, text


@pytest.mark.parametrize("name", MODELS)
def test_template_text_becomes_llama_cpps_ids(name: str) -> None:
    t = tokenizer(name)
    marked = [text for text in CORPUS if "<" in text]
    for text, ids in zip(marked, fixture(name)["control"], strict=True):
        if comparable(name, text):
            assert t.encode_with_control(text) == ids, text


# transformers


def agreed(name: str, text: str) -> bool:
    """Where transformers' conversion of a GGUF file agrees with llama.cpp and with us.

    It does not cut digits one by one for SmolLM2, folds the long s to s for Qwen, and for Gemma it
    merges spaces where the original takes the longest run it has a token for (31).
    """
    if name == "smollm2-135m":
        return not any(char.isnumeric() for char in text)
    if name == "qwen2.5-coder-0.5b":
        return "ſ" not in text
    return "\u2581" not in text and " " * 32 not in text


@pytest.mark.parametrize("name", MODELS)
def test_ids_are_those_of_transformers(name: str) -> None:
    t, other = tokenizer(name), reference(hub.resolve(name))
    for text in CORPUS:
        if agreed(name, text):
            want = other.encode(text, add_special_tokens=False)
            assert t.encode_with_control(text) == want, text


# laws


@pytest.mark.parametrize("name", MODELS)
def test_user_text_never_becomes_a_control_token(name: str) -> None:
    t = tokenizer(name)
    for text in [*CORPUS, *t.controls.controls, "".join(t.controls.controls)]:
        assert t.special_ids.isdisjoint(t.encode(text, bos=False)), text


@pytest.mark.parametrize("name", MODELS)
def test_decode_gives_the_text_back(name: str) -> None:
    t = tokenizer(name)
    known = set(b"".join(t.token_bytes(id) for id in range(t.vocab_size)))
    for text in CORPUS:
        want = text.replace("\u2581", " ") if name.startswith("gemma") else text
        if set(text.encode()) <= known:
            assert t.decode(t.encode(text, bos=False)) == want


def _streamed(t: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> str:
    stream, at, out = t.stream(skip), 0, []
    for cut in [*sorted(cuts), len(ids)]:
        out.append(stream.push(ids[at : max(at, cut)]))
        at = max(at, cut)
    return "".join(out)


def _shown(t: Tokenizer, ids: list[int], skip: bool) -> str:
    """Their text without a character at the end that has only begun."""
    hidden = t.special_ids if skip else frozenset()
    raw = b"".join(t.token_bytes(id) for id in ids if id not in hidden)
    for size in (1, 2, 3):
        try:
            raw[-size:].decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return t.decode(ids, skip)[:-1]
    return t.decode(ids, skip)


@pytest.mark.parametrize("name", MODELS)
def test_streamed_pieces_join_to_the_decoded_text(name: str) -> None:
    t = tokenizer(name)
    short = [id for id in range(t.vocab_size) if len(t.token_bytes(id)) == 1]
    broken = [id for id in short if t.token_bytes(id) >= b"\x80"]
    ids = st.one_of(
        st.integers(0, t.vocab_size - 1),
        st.sampled_from(sorted(t.special_ids)),
        st.sampled_from(broken),
        st.integers(-3, t.vocab_size + 300),
    )

    @settings(max_examples=400, derandomize=True, deadline=None, database=None)
    @given(st.lists(ids, max_size=40), st.lists(st.integers(0, 40), max_size=8), st.booleans())
    def law(ids: list[int], cuts: list[int], skip: bool) -> None:
        assert _streamed(t, ids, cuts, skip) == _shown(t, ids, skip)

    law()


@pytest.mark.parametrize("name", MODELS)
def test_valid_text_streams_without_replacement_characters(name: str) -> None:
    t = tokenizer(name)
    for text in CORPUS:
        ids = t.encode(text, bos=False)
        if "\ufffd" in t.decode(ids):
            continue
        stream = t.stream()
        pieces = [stream.push([id]) for id in ids]
        assert "".join(pieces) == t.decode(ids)


def test_an_unfinished_character_is_held_back(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("🏴")
    stream = smollm2.stream()
    assert [stream.push([id]) for id in ids[:-1]] == [""] * (len(ids) - 1)
    assert smollm2.decode(ids[:-1]) == "\ufffd"  # of ids that are given all are shown
    assert stream.push(ids[-1:]) == "🏴"


def test_control_tokens_are_hidden_unless_asked_for(smollm2: Tokenizer) -> None:
    ids = smollm2.encode_with_control("<|im_start|>user\nhi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert smollm2.decode(ids) == "user\nhi"
    assert smollm2.decode(ids, skip_special=False) == "<|im_start|>user\nhi<|im_end|>"


def test_every_token_that_ends_a_turn_stops(smollm2: Tokenizer) -> None:
    assert smollm2.eos_ids == {0, 2}  # <|endoftext|>, <|im_end|>
    assert (smollm2.bos_id, smollm2.add_bos, smollm2.vocab_size) == (1, False, 49152)


@pytest.mark.models
def test_ends_and_beginnings_of_the_other_models() -> None:
    gemma, qwen = tokenizer("gemma-3-270m"), tokenizer("qwen2.5-coder-0.5b")
    assert (gemma.eos_ids, gemma.bos_id, gemma.add_bos) == ({1, 106}, 2, True)
    assert gemma.encode("hi")[0] == 2 != gemma.encode("hi", bos=False)[0]
    assert (qwen.eos_ids, qwen.add_bos) == ({151643, 151645}, False)


def test_a_lone_surrogate_is_refused(smollm2: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        smollm2.encode("a\ud800b")


def test_a_run_of_200_000_characters_without_a_break(smollm2: Tokenizer) -> None:
    for unit in ("a", " ", "\n", "!", "1", "<|im_end|>"):
        text = unit * (200_000 // len(unit))
        assert smollm2.decode(smollm2.encode(text)) == text


UNITS = (
    "a",
    " ",
    "\n",
    "!",
    "1",
    "a1",
    "#",
    "= ",
    "\0",
    "\t \n",
    "é",
    "日本",
    "the sea ",
    "<|im_end|>",
)


@pytest.mark.parametrize("name", MODELS)
def test_only_text_that_cannot_fit_is_refused_unread(name: str) -> None:
    """A limit one below the true number of tokens may refuse, at the number it never does."""
    t, refused = tokenizer(name), 0
    texts = [unit * (3000 // len(unit)) for unit in UNITS] + CORPUS[::20]
    for text in texts:
        ids = t.encode(text)
        assert t.limited(len(ids)).encode(text) == ids
        try:
            t.limited(len(ids) // 8).encode(text)
        except ContextOverflow:
            refused += 1
    assert refused >= len(UNITS) // 2


def test_text_of_megabytes_is_refused_at_once(smollm2: Tokenizer) -> None:
    limited = smollm2.limited(8192)
    limited.limited(1).encode("")
    assert len(limited.encode(" " * 100_000)) < 8192
    # Without anything that could read it.
    limited._vocab = dataclasses.replace(limited._vocab, encoder=None, inner=None)
    for unit in UNITS[::3]:
        text = unit * (16_000_000 // len(unit))
        with pytest.raises(ContextOverflow, match="at least"):
            limited.encode(text)


def test_a_long_text_lets_other_threads_run(smollm2: Tokenizer) -> None:
    """The server's engine and sockets go on while a long prompt is read."""
    text, done = "a1" * 20_000, threading.Event()

    def read() -> None:
        smollm2.encode(text)
        done.set()

    thread = threading.Thread(target=read)
    turns = 0
    thread.start()
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 20


@pytest.mark.models
def test_infilling_is_written_as_the_models_report_has_it() -> None:
    """Qwen2.5-Coder Technical Report, 3.2: <|fim_prefix|>, <|fim_suffix|>, <|fim_middle|>."""
    t = tokenizer("qwen2.5-coder-0.5b")
    prefix, suffix = "def f(a):\n    return ", "\n\nprint(f(1))\n"
    ids = t.infill(prefix, suffix)
    written = f"<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>"
    assert ids == t.encode_with_control(written)
    assert t.infill(t.encode(prefix), suffix) == ids
    # Nor can a caller write these tokens: what looks like one is text.
    assert t.infill("<|fim_middle|>", "x").count(ids[-1]) == 1
    ends = [t.token_bytes(id).decode() for id in t.infill_ends]
    assert ends == ["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]


def test_a_model_without_such_tokens_says_so(smollm2: Tokenizer) -> None:
    with pytest.raises(Unsupported, match=r"^suffix needs a model with .* got 'x'$") as caught:
        smollm2.infill("a", "x")
    assert caught.value.param == "suffix"
