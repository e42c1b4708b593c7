"""Vocabularies: what a model's files say about its tokens, as one value.

Two readers, one result: `from_gguf` (metadata, as llama.cpp reads it) and `from_hf` (tokenizer.json
and its neighbours). The invariant to keep: `Vocab.encoder` is built so that it reads every control
string as plain text; control tokens are placed by `octavo.models.tokenizer` alone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from octavo.errors import BadFile, UnsupportedModel

# token types of GGUF (llama.cpp, llama_token_type)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

SPACE = "\u2581"  # how SentencePiece writes a space

# Texts that end a turn wherever they are control tokens (from llama.cpp, llama-vocab.cpp).
END_TEXTS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT]"
    " [EOS] <|end_of_text|> <end_of_utterance> <eos>".split()
)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"

# tokenizer.ggml.pre -> the expressions that cut text, one after the other (llama-vocab.cpp)
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
}
_LLAMA3_NAMES = frozenset(("llama-bpe", "llama3", "llama-v3"))


@dataclass(frozen=True, slots=True)
class Control:
    """A control token. lstrip, rstrip: it takes the whitespace before or after it with it."""

    id: int
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True, slots=True)
class Vocab:
    """All that is known of a model's tokens.

    encoder: text to ids; `inner`: the same for text that does not begin the input. piece: the bytes
    of a token, b"" for an id that is none. controls: by text. special_ids: left out of text.
    leading_space: decoded text loses one space at its start. named: bos_token, eos_token ... for
    templates. templates: chat templates by name.
    """

    encoder: tokenizers.Tokenizer
    inner: tokenizers.Tokenizer
    size: int
    piece: Callable[[int], bytes]
    controls: Mapping[str, Control]
    special_ids: frozenset[int]
    bos_id: int | None
    eos_ids: frozenset[int]
    add_bos: bool
    leading_space: bool
    named: Mapping[str, str]
    templates: Mapping[str, str]


def _byte_alphabet() -> dict[int, int]:
    """Code point -> byte, in GPT-2's printable spelling of bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: byte for byte in printable} | {256 + i: byte for i, byte in enumerate(rest)}


_BYTE_OF = _byte_alphabet()


def _spelled_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; one not written in the alphabet stands for itself."""
    try:
        return bytes(_BYTE_OF[ord(char)] for char in token)
    except KeyError:
        return token.encode()


def _byte_token(token: str) -> int | None:
    """The byte that "<0xAB>" stands for."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


@contextmanager
def _no_collection() -> Iterator[None]:
    """Hundreds of thousands of tuples at once: without this the collector walks them again and
    again, for half of the time it takes to build a vocabulary."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# GGUF


def _read(metadata: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    value = metadata.get(key, default)
    if value is not default and not isinstance(value, kind):
        raise BadFile(f"metadata {key!r} is not of type {kind.__name__}")
    return value


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(map(str.__instancecheck__, value)):
        raise BadFile(f"metadata {key!r} is missing or not an array of strings")
    return value


def _numbers(metadata: Mapping[str, Any], key: str, length: int) -> list[Any]:
    """The first `length` numbers of an array."""
    value = metadata.get(key)
    if value is None or isinstance(value, str) or not hasattr(value, "__len__"):
        raise BadFile(f"metadata {key!r} is missing or not an array of numbers")
    if len(value) < length:
        raise BadFile(f"metadata {key!r} has {len(value)} values for {length} tokens")
    return list(value.tolist() if hasattr(value, "tolist") else value)[:length]


def _token_id(metadata: Mapping[str, Any], name: str, size: int, default: int | None) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = _read(metadata, key, int, None)
    if value is None:
        return default if default is not None and default < size else None
    if not 0 <= value < size:
        raise BadFile(f"metadata {key!r} is {value}, but there are {size} tokens")
    return int(value)


def _byte_level(metadata: Mapping[str, Any], ids: dict[str, int]) -> tokenizers.Tokenizer:
    pre = _read(metadata, "tokenizer.ggml.pre", str, "default")
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise UnsupportedModel(f"pre-tokenizer {pre!r} (tokenizer.ggml.pre); known: {known}")
    merges = []
    for line in _strings(metadata, "tokenizer.ggml.merges"):
        left, space, right = line.partition(" ")
        if not (left and space and right):
            raise BadFile(f"tokenizer.ggml.merges: {line!r} is not a pair")
        merges.append((left, right))
    model = _bpe(ids, merges, ignore_merges=pre in _LLAMA3_NAMES)
    encoder = tokenizers.Tokenizer(model)
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in PRE_TOKENIZERS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoder.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    return encoder


def _bpe(ids: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    """A BPE model. Merges that could only make a token left out of `ids` are left out too."""
    try:
        return models.BPE(vocab=ids, merges=merges, **options)
    except Exception:  # tokenizers raises nothing narrower
        kept = [pair for pair in merges if {*pair, pair[0] + pair[1]} <= ids.keys()]
        try:
            return models.BPE(vocab=ids, merges=kept, **options)
        except Exception as error:
            raise BadFile(f"the tokenizer's merges cannot be used: {error}") from error


def _score_merges(ids: dict[str, int], mergeable: Mapping[str, float]) -> list[tuple[str, str]]:
    """The merges SentencePiece's BPE implies: any two tokens whose concatenation is a token, the
    best score first. Among equals the order in the file, then the shorter left part."""
    ranked = sorted(mergeable, key=lambda token: (-mergeable[token], ids[token]))
    return [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(1, len(token))
        if token[:cut] in mergeable and token[cut:] in mergeable
    ]


def _sentencepiece(
    metadata: Mapping[str, Any], ids: dict[str, int], types: list[int]
) -> tokenizers.Tokenizer:
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    scores = _numbers(metadata, "tokenizer.ggml.scores", len(tokens))
    mergeable = {
        token: score
        for token, score, kind in zip(tokens, scores, types, strict=True)
        if kind == NORMAL
    }
    encoder = tokenizers.Tokenizer(_bpe(ids, _score_merges(ids, mergeable), byte_fallback=True))
    steps: list[Any] = [normalizers.Replace(" ", SPACE)]
    if _read(metadata, "tokenizer.ggml.add_space_prefix", bool, True):
        steps.insert(0, normalizers.Prepend(SPACE))
    encoder.normalizer = normalizers.Sequence(steps)
    return encoder


def _gguf_piece(kind: str, tokens: Sequence[str], types: Sequence[int], id: int) -> bytes:
    """The bytes of a token, as llama.cpp's token_to_piece."""
    if not 0 <= id < len(tokens):
        return b""
    token, type = tokens[id], types[id]
    if type == NORMAL:
        return _spelled_bytes(token) if kind == "gpt2" else token.replace(SPACE, " ").encode()
    if type == BYTE:
        byte = _byte_token(token)
        return b"" if byte is None else bytes((byte,))
    return b"" if type == UNUSED else token.encode()


def _gguf_eos(
    metadata: Mapping[str, Any], controls: Mapping[str, Control], size: int, *, spm: bool
) -> frozenset[int]:
    ends = [_token_id(metadata, "eos", size, 2 if spm else None)]
    ends += [_token_id(metadata, name, size, None) for name in ("eot", "eom")]
    ends += [controls[text].id for text in END_TEXTS & controls.keys()]
    return frozenset(id for id in ends if id is not None)


def _gguf_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    found = {}
    for key in metadata:
        if key == prefix or key.startswith(prefix + "."):
            found[key[len(prefix) + 1 :] or "default"] = _read(metadata, key, str, "")
    return found


def from_gguf(metadata: Mapping[str, Any]) -> Vocab:
    """The vocabulary in a GGUF file's metadata. Raises BadFile, UnsupportedModel.

    Models `gpt2` (byte-level BPE) and `llama` (SentencePiece BPE, merged by score).
    """
    kind = _read(metadata, "tokenizer.ggml.model", str, "none")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(f"tokenizer {kind!r} (tokenizer.ggml.model); known: gpt2, llama")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    size, spm = len(tokens), kind == "llama"
    types = (
        _numbers(metadata, "tokenizer.ggml.token_type", size)
        if "tokenizer.ggml.token_type" in metadata
        else [NORMAL] * size
    )
    controls = {tokens[i]: Control(i) for i in range(size) if types[i] in (CONTROL, UNKNOWN)}
    with _no_collection():
        ids = dict(zip(tokens, range(size), strict=True))
        if len(ids) != size:
            raise BadFile("tokenizer.ggml.tokens: a token appears twice")
        for text in controls:
            del ids[text]  # the encoder cannot emit what it does not know
        encoder = _sentencepiece(metadata, ids, types) if spm else _byte_level(metadata, ids)
    added = [tokens[i] for i in range(size) if types[i] == USER_DEFINED]
    encoder.add_tokens([AddedToken(token, normalized=False) for token in added])
    bos = _token_id(metadata, "bos", size, 1 if spm else None)
    llama3 = metadata.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
    add_bos = _read(metadata, "tokenizer.ggml.add_bos_token", bool, spm or llama3)
    named = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        id = _token_id(metadata, key, size, None)
        if id is not None:
            named[f"{name}_token"] = tokens[id]
    return Vocab(
        encoder=encoder,
        inner=encoder,
        size=size,
        piece=partial(_gguf_piece, kind, tokens, types),
        controls=controls,
        special_ids=frozenset(control.id for control in controls.values()),
        bos_id=bos,
        eos_ids=_gguf_eos(metadata, controls, size, spm=spm),
        add_bos=bool(add_bos) and bos is not None,
        leading_space=spm and _read(metadata, "tokenizer.ggml.add_space_prefix", bool, True),
        named=named,
        templates=_gguf_templates(metadata),
    )
