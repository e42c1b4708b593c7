"""A vocabulary from GGUF metadata, as llama.cpp reads it (llama-vocab.cpp).

Byte-level BPE (`gpt2`) with the pre-tokenizers listed here, and SentencePiece BPE (`llama`) merged
by score; anything else is an error that names it. Control tokens are not in the encoder at all.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from octavo.errors import BadFile, UnsupportedModel
from octavo.models.vocab import END_TEXTS, SPACE, Control, Vocab, byte_token, spelled_bytes

# token types of GGUF (llama.cpp, llama_token_type)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

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


def _read(metadata: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    value = metadata.get(key, default)
    if value is not default and not isinstance(value, kind):
        raise BadFile(f"metadata {key!r} is not of type {kind.__name__}")
    return value


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or {*map(type, value)} - {str}:
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
    lines = _strings(metadata, "tokenizer.ggml.merges")
    bpe = partial(models.BPE, vocab=ids, ignore_merges=pre in _LLAMA3_NAMES)
    try:
        model = bpe(merges=[tuple(line.split(" ")) for line in lines])  # type: ignore[misc]
    except KeyboardInterrupt:
        raise
    except BaseException:  # tokenizers panics over tokens it does not know; checking costs 4x
        model = bpe(merges=_checked_merges(lines, ids))
    encoder = tokenizers.Tokenizer(model)
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in PRE_TOKENIZERS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoder.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    return encoder


def _checked_merges(lines: Sequence[str], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Merges of known tokens into known tokens: control tokens are not among `ids`."""
    merges = []
    for line in lines:
        left, space, right = line.partition(" ")
        if not (left and space and right):
            raise BadFile(f"tokenizer.ggml.merges: {line!r} is not a pair")
        if {left, right, left + right} <= ids.keys():
            merges.append((left, right))
    return merges


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
    merges = _score_merges(ids, mergeable)
    encoder = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges, byte_fallback=True))
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
        return spelled_bytes(token) if kind == "gpt2" else token.replace(SPACE, " ").encode()
    if type == BYTE:
        byte = byte_token(token)
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
    special = [i for i in range(size) if types[i] in (CONTROL, UNKNOWN)]
    controls = {tokens[i]: Control(i) for i in special if tokens[i]}
    with _no_collection():
        ids = dict(zip(tokens, range(size), strict=True))
        if len(ids) != size:
            raise BadFile("tokenizer.ggml.tokens: a token appears twice")
        for i in special:
            del ids[tokens[i]]  # the encoder cannot emit what it does not know
        encoder = _sentencepiece(metadata, ids, types) if spm else _byte_level(metadata, ids)
    added = [tokens[i] for i in range(size) if types[i] == USER_DEFINED]
    encoder.add_tokens([AddedToken(token, normalized=False) for token in added])
    bos = _token_id(metadata, "bos", size, 1 if spm else None)
    llama3 = _read(metadata, "tokenizer.ggml.pre", str, "") in _LLAMA3_NAMES
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
        special_ids=frozenset(special),
        bos_id=bos,
        eos_ids=_gguf_eos(metadata, controls, size, spm=spm),
        add_bos=bool(add_bos) and bos is not None,
        leading_space=spm and _read(metadata, "tokenizer.ggml.add_space_prefix", bool, True),
        named=named,
        templates=_gguf_templates(metadata),
        lossless=not spm or {f"<0x{byte:02X}>" for byte in range(256)} <= ids.keys(),
    )
