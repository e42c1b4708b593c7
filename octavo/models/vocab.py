"""Vocabularies: what a model's files say about its tokens, as one value.

Two readers, one result: `vocab_gguf` (metadata, as llama.cpp reads it) and `vocab_hf`
(tokenizer.json and its neighbours). The invariant to keep: `Vocab.encoder` is built so that it
reads control strings as plain text; control tokens are placed by `octavo.models.tokenizer` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import tokenizers

SPACE = "\u2581"  # how SentencePiece writes a space

# Texts that end a turn wherever they are control tokens (from llama.cpp, llama-vocab.cpp).
END_TEXTS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT]"
    " [EOS] <|end_of_text|> <end_of_utterance> <eos>".split()
)


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
    leading_space: decoded text loses one space at its start. lossless: ids of a text hold all its
    bytes that any token has, so its length bounds their number. named: bos_token, eos_token ... for
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
    lossless: bool = False


def _byte_alphabet() -> dict[int, int]:
    """Code point -> byte, in GPT-2's printable spelling of bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: byte for byte in printable} | {256 + i: byte for i, byte in enumerate(rest)}


_BYTE_OF = _byte_alphabet()


def spelled_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; one not written in the alphabet stands for itself."""
    try:
        return bytes(_BYTE_OF[ord(char)] for char in token)
    except KeyError:
        return token.encode()


def byte_token(token: str) -> int | None:
    """The byte that "<0xAB>" stands for."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None
