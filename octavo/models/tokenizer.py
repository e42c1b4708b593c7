"""Text to token ids and back.

User text never becomes control tokens: `encode` reads "<|im_end|>" as ten characters; only
`encode_with_control`, for text a template wrote, knows better. Decoding is over bytes: a token is
its bytes, text is those bytes as UTF-8, and what cannot be UTF-8 becomes U+FFFD. A stream holds an
unfinished character back, so its pieces joined always equal `decode` of all ids, but for a
character at the end that never ended: nobody is shown half of one.
"""

from __future__ import annotations

import codecs
import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from octavo.errors import ContextOverflow, InvalidRequest, ModelError, Unsupported
from octavo.models.vocab import Control, Vocab
from octavo.models.vocab_gguf import from_gguf
from octavo.models.vocab_hf import from_hf

SHORT = 1000  # characters that are read at once
# Before prefix, suffix and middle, and what ends a middle: Qwen2.5-Coder's technical report, 3.2.
INFILL = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
INFILL_ENDS = ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Source(Protocol):
    """What a checkpoint holds for us: exactly one of GGUF metadata and a Hugging Face directory."""

    @property
    def metadata(self) -> Mapping[str, Any] | None: ...
    @property
    def directory(self) -> Path | None: ...


class ControlStrings:
    """Finds control strings in text: the leftmost first, the longest there."""

    def __init__(self, controls: Mapping[str, Control]) -> None:
        self.controls = controls
        self.lengths = tuple(sorted({len(text) for text in controls}, reverse=True))
        heads = {form for text in controls for form in (text[0], text[0].lower(), text[0].upper())}
        self.heads = frozenset(head for head in heads if len(head) == 1)
        self._head = re.compile("|".join(map(re.escape, sorted(self.heads))) or "(?!)")

    def starts(self, text: str) -> Iterable[int]:
        """Where a control string could begin."""
        return (match.start() for match in self._head.finditer(text))

    @cached_property
    def _beginnings(self) -> tuple[frozenset[str], frozenset[str]]:
        """Control strings, and their proper beginnings, in lower case."""
        lower = frozenset(text.lower() for text in self.controls)
        return lower, frozenset(text[:end] for text in lower for end in range(1, len(text)))

    def possible(self, text: str) -> list[int]:
        """Where a control string begins, whole or cut off by the end of the text, in any case and
        whatever space follows: a template may join, trim or lower what it is given."""
        whole, beginnings = self._beginnings
        end = len(text.rstrip())
        return [
            at
            for at in self.starts(text)
            if (end - at < self.lengths[0] and text[at:end].lower() in beginnings)
            or any(text[at : at + length].lower() in whole for length in self.lengths)
        ]

    def split(self, text: str) -> list[tuple[str, Control | None]]:
        """Text as (plain text, the control that follows it) pairs; the last has None."""
        parts: list[tuple[str, Control | None]] = []
        at, strip = 0, False
        for start in self.starts(text):
            if start < at:
                continue
            for length in self.lengths:
                control = self.controls.get(text[start : start + length])
                if control is not None:
                    plain = text[at:start].lstrip() if strip else text[at:start]
                    parts.append((plain.rstrip() if control.lstrip else plain, control))
                    at, strip = start + length, control.rstrip
                    break
        parts.append((text[at:].lstrip() if strip else text[at:], None))
        return parts


class _Pieces(dict[int, bytes]):
    """Token id -> bytes, filled as tokens are met. Ids that are no tokens are b"" and not kept."""

    def __init__(self, vocab: Vocab, hidden: frozenset[int]) -> None:
        super().__init__()
        self._vocab = vocab
        self._hidden = hidden

    def __missing__(self, id: int) -> bytes:
        if not 0 <= id < self._vocab.size:
            return b""
        piece = b"" if id in self._hidden else self._vocab.piece(id)
        self[id] = piece
        return piece


class _Reach:
    """How much text a token can hold: all in all, and of each of the 256 bytes."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab

    @cached_property
    def _most(self) -> tuple[int, npt.NDArray[np.int64]]:
        pieces = [self._vocab.piece(id) for id in range(self._vocab.size)]
        lengths = np.array([*map(len, pieces), 0])
        owners = np.repeat(np.arange(len(lengths)), lengths)
        spelled = np.frombuffer(b"".join(pieces), np.uint8)
        each, counts = np.unique(owners * 256 + spelled, return_counts=True)
        most = np.zeros(256, np.int64)
        np.maximum.at(most, each % 256, counts)
        return max(1, int(lengths.max())), most

    def fewest(self, text: bytes) -> int:
        """A number of tokens that `text` cannot do without. Bytes in no token are lost anyway."""
        longest, most = self._most
        counts = np.bincount(np.frombuffer(text, np.uint8), minlength=256)
        counts[most == 0] = 0
        each = -(-counts // np.maximum(most, 1))
        return max(int(each.max()), -(-int(counts.sum()) // longest))


class TokenStream:
    """Turns ids into text as they come. What is pushed, joined, is `decode` of all ids without a
    character at the end that has only begun: it comes with the id that ends it, or never."""

    __slots__ = ("_decode", "_leading", "_piece")

    def __init__(self, pieces: _Pieces, *, leading_space: bool) -> None:
        self._piece = pieces.__getitem__
        self._decode = _utf8_decoder("replace").decode
        self._leading = leading_space

    def push(self, ids: Sequence[int]) -> str:
        """The text these ids complete; "" when they end inside a character."""
        text = self._decode(b"".join(map(self._piece, ids)))
        if self._leading and text:
            self._leading = False
            return text[1:] if text[0] == " " else text
        return text


class Tokenizer:
    """A model's tokenizer. Safe to share between threads."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._all = _Pieces(vocab, frozenset())
        self._shown = _Pieces(vocab, vocab.special_ids)
        self.controls = ControlStrings(vocab.controls)
        self.vocab_size = vocab.size
        self.special_ids = vocab.special_ids
        self.bos_id = vocab.bos_id
        self.eos_ids = vocab.eos_ids
        self.add_bos = vocab.add_bos
        self.named = vocab.named
        self.chat_templates = vocab.templates
        self.most_tokens: int | None = None
        self._reach = _Reach(vocab)

    def limited(self, most_tokens: int) -> Tokenizer:
        """The same tokenizer, refusing text that is sure to have more tokens than that.

        Reading a text takes time and memory by its length: what cannot fit is not worth either.
        """
        limited = copy.copy(self)
        limited.most_tokens = most_tokens
        return limited

    def with_template(self, source: str) -> Tokenizer:
        """The same tokenizer with that chat template and no other."""
        other = copy.copy(self)
        other.chat_templates = {"default": source}
        return other

    @property
    def chat_template(self) -> str | None:
        """The template named "default"."""
        return self.chat_templates.get("default")

    def encode(self, text: str, *, bos: bool | None = None) -> list[int]:
        """Ids of user text: control strings in it are plain text.

        bos: begin with BOS; None does as the model asks. Raises InvalidRequest (lone surrogate).
        """
        start = self._bos(self.add_bos if bos is None else bos)
        return start + self.encode_plain(text, first=True)

    def encode_with_control(self, text: str, *, bos: bool = False) -> list[int]:
        """Ids of text that a template wrote: control strings are control tokens."""
        return self._bos(bos) + self.encode_parts(self.controls.split(text))

    def encode_parts(self, parts: Iterable[tuple[str, Control | None]]) -> list[int]:
        """Ids of what `ControlStrings.split` found."""
        ids: list[int] = []
        first = True
        for plain, control in parts:
            if plain:
                ids += self.encode_plain(plain, first=first)
            if control is not None:
                ids.append(control.id)
            first = False
        return ids

    def encode_plain(self, text: str, *, first: bool) -> list[int]:
        """Ids of plain text, never a control token. first: the text begins the input."""
        encoder = self._vocab.encoder if first else self._vocab.inner
        try:
            self._check_length(text)
            if len(text) <= SHORT:
                encoding = encoder.encode(text, add_special_tokens=False)
            else:  # the only call that lets other threads run meanwhile
                encoding = encoder.encode_batch([text], add_special_tokens=False)[0]
        except (TypeError, UnicodeEncodeError):  # tokenizers says "must be str"
            raise InvalidRequest("text contains a lone surrogate, which is no character") from None
        ids: list[int] = encoding.ids
        if self.special_ids.isdisjoint(ids):
            return ids
        return self._without_control(text, encoding, first=first)

    def _check_length(self, text: str) -> None:
        """Raises ContextOverflow if `text` is sure to be too long."""
        if self.most_tokens is None or len(text) <= self.most_tokens or not self._vocab.lossless:
            return
        least = self._reach.fewest(text.encode())
        if least > self.most_tokens:
            raise ContextOverflow(
                f"a text of {len(text)} characters has at least {least} tokens; "
                f"the context holds {self.most_tokens}",
                "prompt",
            )

    def _without_control(self, text: str, encoding: Any, *, first: bool) -> list[int]:
        """A vocabulary can spell a control token by merges: cut the text inside every such one."""
        cuts = [0]
        for id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if id in self.special_ids:
                if end - start < 2:
                    what = f"{text[start:end]!r} is a control token of this model"
                    raise InvalidRequest(f"the text {what}, and nothing else spells it")
                cuts.append((start + end) // 2)
        ids: list[int] = []
        for start, end in pairwise([*cuts, len(text)]):
            ids += self.encode_plain(text[start:end], first=first and start == 0)
        return ids

    def _bos(self, wanted: bool) -> list[int]:
        return [self.bos_id] if wanted and self.bos_id is not None else []

    @cached_property
    def infill_ids(self) -> tuple[int, ...] | None:
        """Control tokens before a prefix, a suffix and the middle that is to be written between
        them, in Qwen2.5-Coder's form; None where the model has none."""
        controls = self._vocab.controls
        if not controls.keys() >= set(INFILL):
            return None
        return tuple(controls[text].id for text in INFILL)

    @cached_property
    def infill_ends(self) -> tuple[int, ...]:
        """What ends a middle besides the end of a text: another file would begin."""
        controls = self._vocab.controls
        return tuple(controls[text].id for text in INFILL_ENDS if text in controls)

    def infill(self, prefix: str | Sequence[int], suffix: str) -> list[int]:
        """Ids after which the model writes what stands between the two. Raises InvalidRequest."""
        if self.infill_ids is None:
            what = "needs a model with fill-in-the-middle tokens, such as qwen2.5-coder-0.5b"
            raise Unsupported(f"suffix {what}, got {suffix[:32]!r}", "suffix")
        before, after, middle = self.infill_ids
        own = self.encode_plain(prefix, first=True) if isinstance(prefix, str) else prefix
        rest = self.encode_plain(suffix, first=True)
        return [*self._bos(self.add_bos), before, *own, after, *rest, middle]

    def decode(
        self, ids: Iterable[int], skip_special: bool = True, *, continuation: bool = False
    ) -> str:
        """Text of ids. continuation: it continues earlier text, so a leading space is kept."""
        pieces = self._shown if skip_special else self._all
        text = b"".join(map(pieces.__getitem__, ids)).decode("utf-8", "replace")
        if self._vocab.leading_space and not continuation and text[:1] == " ":
            return text[1:]
        return text

    def stream(self, skip_special: bool = True, *, continuation: bool = False) -> TokenStream:
        """Decoding that runs with generation; the arguments mean what they mean for `decode`."""
        leading = self._vocab.leading_space and not continuation
        return TokenStream(self._shown if skip_special else self._all, leading_space=leading)

    def token_bytes(self, id: int) -> bytes:
        """A token's bytes, its text if it is a control token; b"" for an id that is no token."""
        return self._all[id]

    def token_text(self, id: int) -> str:
        """A token as text on its own: bytes that are no whole characters become U+FFFD."""
        return self._all[id].decode("utf-8", "replace")


def load_tokenizer(checkpoint: Source) -> Tokenizer:
    """The tokenizer of a checkpoint. Raises BadFile, UnsupportedModel, ModelError."""
    if checkpoint.metadata is not None:
        return Tokenizer(from_gguf(checkpoint.metadata))
    if checkpoint.directory is not None:
        return Tokenizer(from_hf(checkpoint.directory))
    raise ModelError("this checkpoint has neither GGUF metadata nor a directory")
