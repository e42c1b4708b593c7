"""GGUF vocabularies without a real file.

Pre-tokenizers against the `regex` module, a tiny llama-bpe against tokenizers' own loader,
SentencePiece against sentencepiece itself; and bad metadata.
"""

from __future__ import annotations

import io
import json
import sys
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import regex
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from octavo.errors import BadFile, ModelError, UnsupportedModel
from octavo.models.tokenizer import Tokenizer, load_tokenizer
from octavo.models.vocab_gguf import PRE_TOKENIZERS, from_gguf

sys.path.insert(0, str(Path(__file__).parents[1] / "fixtures" / "tokenizer"))
from corpus import texts

CORPUS = texts()

# The expressions of the original tokenizer.json files, not llama.cpp's adaptation of them.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ORIGINAL = {"gpt-2": GPT2, "qwen2": QWEN2, "llama-bpe": QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")}


def gpt2_metadata(pre: str, **extra: Any) -> dict[str, Any]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": alphabet,
        "tokenizer.ggml.token_type": np.ones(len(alphabet), np.int32),
        "tokenizer.ggml.merges": [],
        **extra,
    }


def of(metadata: dict[str, Any]) -> Tokenizer:
    return load_tokenizer(SimpleNamespace(metadata=metadata, directory=None))


def cuts_of(pre: str, text: str) -> list[str]:
    splitter = from_gguf(gpt2_metadata(pre)).encoder.pre_tokenizer
    return [text[start:end] for _, (start, end) in splitter.pre_tokenize_str(text)]


def known_to_all(text: str) -> str:
    """Without what libraries disagree on: code points younger than Unicode 3.2, and the long s
    (it folds to s under (?i), which llama.cpp's expressions do not do)."""
    category = unicodedata.ucd_3_2_0.category
    return "".join(char for char in text if category(char) != "Cn" and char != "ſ")


@pytest.mark.parametrize("pre", sorted(ORIGINAL))
def test_text_is_cut_as_the_original_expression_cuts_it(pre: str) -> None:
    pattern = regex.compile(ORIGINAL[pre])
    for text in map(known_to_all, CORPUS):
        assert cuts_of(pre, text) == pattern.findall(text), text


def test_smollm_cuts_every_digit_and_then_like_gpt2() -> None:
    pattern = regex.compile(GPT2)
    for text in map(known_to_all, CORPUS):
        pieces = regex.findall(r"\p{N}|\P{N}+", text)
        want = [cut for piece in pieces for cut in pattern.findall(piece)]
        assert cuts_of("smollm", text) == want, text


@pytest.fixture(scope="module")
def llama_bpe() -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """A tiny tokenizer shaped like Llama 3's, as GGUF metadata and as tokenizers loads it."""
    encoder = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(tokenizers.Regex(ORIGINAL["llama-bpe"]), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoder.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    encoder.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    encoder.train_from_iterator(CORPUS[:40], trainer)
    state = json.loads(encoder.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].__getitem__)
    kinds = np.array([3] * 3 + [1] * (len(tokens) - 3), np.int32)
    metadata = gpt2_metadata("llama-bpe") | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    return of(metadata), encoder


def test_a_tiny_llama_bpe_equals_the_one_it_was_made_from(
    llama_bpe: tuple[Tokenizer, tokenizers.Tokenizer],
) -> None:
    ours, reference = llama_bpe
    for text in map(known_to_all, CORPUS):
        want = reference.encode(text, add_special_tokens=False).ids
        assert ours.encode_with_control(text) == want, text
        assert ours.decode(want) == reference.decode(want)
        assert ours.decode(want, False) == reference.decode(want, skip_special_tokens=False)


def test_llama_bpe_begins_with_bos_and_stops_at_every_end(
    llama_bpe: tuple[Tokenizer, tokenizers.Tokenizer],
) -> None:
    ours, _ = llama_bpe
    assert ours.add_bos
    assert ours.encode("a") == [0, *ours.encode("a", bos=False)]
    assert ours.eos_ids == {1, 2}


# SentencePiece


@pytest.fixture(scope="module", params=[True, False], ids=["prefixed", "bare"])
def sentence_piece(request: pytest.FixtureRequest) -> tuple[Tokenizer, Any, bool]:
    """A tiny SentencePiece BPE model, and its vocabulary as GGUF metadata."""
    import sentencepiece

    prefix, out = bool(request.param), io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in CORPUS[:36] for line in text.splitlines()]),
        model_writer=out,
        model_type="bpe",
        vocab_size=1400,
        byte_fallback=True,
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        split_by_whitespace=prefix,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    size = model.get_piece_size()
    kinds = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1
        for i in range(size)
    ]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in range(size)],
        "tokenizer.ggml.scores": np.array([model.get_score(i) for i in range(size)], np.float32),
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    return of(metadata), model, prefix


def test_sentencepiece_ids_and_text(sentence_piece: tuple[Tokenizer, Any, bool]) -> None:
    ours, model, prefix = sentence_piece
    for text in CORPUS:
        if text and "\0" not in text and "\u2581" not in text:
            ids = model.encode(text)
            assert ours.encode(text, bos=False) == ids, text
            assert ours.decode(ids) == model.decode(ids)
            assert ours.decode(ids, continuation=True) == (" " * prefix + text)


def test_sentencepiece_streams_join(sentence_piece: tuple[Tokenizer, Any, bool]) -> None:
    ours = sentence_piece[0]

    @settings(max_examples=300, derandomize=True, deadline=None, database=None)
    @given(
        st.lists(st.integers(0, ours.vocab_size) | st.integers(3, 258), max_size=30), st.booleans()
    )
    def law(ids: list[int], continuation: bool) -> None:
        stream = ours.stream(continuation=continuation)
        text = "".join(stream.push([id]) for id in ids)
        whole = ours.decode(ids, continuation=continuation)
        # Nothing but a character at the end that has only begun may be missing.
        assert whole in (text, text + "\ufffd")

    law()


def test_sentencepiece_defaults(sentence_piece: tuple[Tokenizer, Any, bool]) -> None:
    ours, model, _ = sentence_piece
    assert (ours.bos_id, ours.eos_ids, ours.add_bos) == (1, {2}, True)
    assert ours.special_ids == {0, 1, 2}
    assert ours.encode("<s></s><unk>", bos=False) == model.encode("<s></s><unk>")


# metadata nobody vouches for


def test_a_control_token_that_merges_could_spell_is_not_reachable() -> None:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "abc"]
    kinds = np.array([1] * (len(tokens) - 1) + [3], np.int32)
    extra = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["a b", "ab c"],
    }
    t = of(gpt2_metadata("gpt-2", **extra))
    assert t.encode("abc") == [tokens.index("ab"), tokens.index("c")]
    assert t.encode_with_control("abc") == [tokens.index("abc")]


@pytest.mark.parametrize("pre", ["deepseek-llm", "default", "tekken"])
def test_an_unknown_pre_tokenizer_is_named(pre: str) -> None:
    with pytest.raises(UnsupportedModel, match=pre):
        from_gguf(gpt2_metadata(pre))
    assert pre not in PRE_TOKENIZERS


def test_an_unknown_tokenizer_model_is_named() -> None:
    with pytest.raises(UnsupportedModel, match="bert"):
        from_gguf({"tokenizer.ggml.model": "bert"})
    with pytest.raises(UnsupportedModel, match="none"):
        from_gguf({})


@pytest.mark.parametrize(
    "bad",
    [
        {"tokenizer.ggml.tokens": None},
        {"tokenizer.ggml.tokens": ["a", "a"]},
        {"tokenizer.ggml.tokens": [1, 2]},
        {"tokenizer.ggml.token_type": np.ones(3, np.int32)},
        {"tokenizer.ggml.token_type": "x"},
        {"tokenizer.ggml.merges": ["ab"]},
        {"tokenizer.ggml.merges": [" b"]},
        {"tokenizer.ggml.merges": 3},
        {"tokenizer.ggml.eos_token_id": 10**6},
        {"tokenizer.ggml.bos_token_id": "x"},
        {"tokenizer.ggml.pre": 3},
        {"tokenizer.chat_template": 3},
        {"tokenizer.ggml.add_bos_token": "yes"},
    ],
    ids=lambda bad: f"{next(iter(bad))}={str(next(iter(bad.values())))[:12]}",
)
def test_bad_metadata_is_an_error_of_ours(bad: dict[str, Any]) -> None:
    with pytest.raises(BadFile, match=next(iter(bad)).rsplit(".", 1)[1]):
        from_gguf(gpt2_metadata("gpt-2", **bad))


def test_named_templates_are_found() -> None:
    extra = {"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b"}
    t = of(gpt2_metadata("gpt-2", **extra))
    assert t.chat_template == "a"
    assert t.chat_templates == {"default": "a", "tool_use": "b"}
    assert of(gpt2_metadata("gpt-2")).chat_template is None


def test_a_checkpoint_without_either_source_is_refused() -> None:
    with pytest.raises(ModelError):
        load_tokenizer(SimpleNamespace(metadata=None, directory=None))


def test_ids_that_are_no_tokens_have_no_bytes() -> None:
    t = of(gpt2_metadata("gpt-2"))
    assert t.token_bytes(10**9) == b"" == t.token_bytes(-1)
    assert t.decode([-1, 10**9]) == ""
