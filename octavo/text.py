"""Where tokens become text: stop strings, held back only while they may still come true.

The same class reads the tokens twice: inside commit, as the `Watcher` that makes the engine stop,
and at the sending side, to make the text. It is deterministic and blind to how tokens are grouped,
so both agree, and a stream's pieces join to what a plain answer would have been.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from octavo.core.request import FinishReason, Watcher


class TokenStream(Protocol):
    """Incremental decoding of one sequence; keeps incomplete UTF-8 back, at the end for good: an
    answer that is cut inside a character ends before it."""

    def push(self, ids: Sequence[int], /) -> str: ...


class Tokenizer(Protocol):
    """What this package needs of a tokenizer."""

    @property
    def eos_ids(self) -> frozenset[int]: ...
    @property
    def special_ids(self) -> frozenset[int]: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def chat_templates(self) -> Mapping[str, str]: ...
    @property
    def infill_ends(self) -> tuple[int, ...]: ...
    def encode(self, text: str, *, bos: bool | None = None) -> list[int]: ...
    def infill(self, prefix: str | Sequence[int], suffix: str, /) -> list[int]: ...
    def encode_plain(self, text: str, *, first: bool) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str: ...
    def stream(self, skip_special: bool = True, *, continuation: bool = False) -> TokenStream: ...
    def token_bytes(self, token: int, /) -> bytes: ...


class StopScan:
    """Finds the first of some strings in text that arrives in pieces.

    What it holds back is the longest suffix that may yet begin a stop string, never more. `found`
    is the one that has come.
    """

    __slots__ = ("_held", "_stops", "found")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> tuple[str, bool]:
        """(text that can be shown, whether a stop string has come). The stop is never shown."""
        text = self._held + piece
        at = min((i for i in (text.find(stop) for stop in self._stops) if i >= 0), default=-1)
        if at >= 0:
            self._held = ""
            self.found = next(stop for stop in self._stops if text.startswith(stop, at))
            return text[:at], True
        keep = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """What was held back: no stop string can come true any more."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0


class OutputText:
    """The text of one choice. `stopped` turns true when a stop string has come.

    A stop string counts only if it lies wholly in what follows the first min_tokens tokens.
    """

    __slots__ = ("_exempt", "_scan", "_stream", "stopped")

    def __init__(self, stream: TokenStream, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._stream = stream
        self._scan = StopScan(stops) if stops else None
        self._exempt = min_tokens if stops else 0
        self.stopped = False

    @property
    def stop(self) -> str | None:
        """The stop string that has come."""
        return self._scan.found if self._scan is not None else None

    def push(self, tokens: Sequence[int]) -> str:
        """Take tokens; return the text that can be shown now."""
        if self._scan is None:
            return self._stream.push(tokens)
        if self.stopped:
            return ""
        shown = ""
        if self._exempt:
            first, tokens = tokens[: self._exempt], tokens[self._exempt :]
            self._exempt -= len(first)
            shown = self._stream.push(first)
        if tokens:
            piece, self.stopped = self._scan.push(self._stream.push(tokens))
            shown += piece
        return shown

    def finish(self) -> str:
        """The rest, when no more tokens come."""
        if self.stopped:
            return ""
        return self._scan.finish() if self._scan is not None else ""


class StopWatcher:
    """Ends a sequence at the token that completes a stop string."""

    __slots__ = ("_text",)

    def __init__(self, text: OutputText) -> None:
        self._text = text

    def advance(self, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        """(tokens kept, STOP if a stop string is complete)."""
        for index, token in enumerate(tokens):
            self._text.push((token,))
            if self._text.stopped:
                return index + 1, FinishReason.STOP
        return len(tokens), None

    def mask(self, position: int) -> bytes | None:
        return None

    def ahead(self, draft: Sequence[int]) -> list[bytes | None]:
        return [None] * len(draft)

    def forced(self) -> tuple[int, ...]:
        return ()


class Together:
    """Two watchers of the same tokens: `stop` may end what `masks` would go on with."""

    __slots__ = ("_masks", "_stop")

    def __init__(self, stop: Watcher, masks: Watcher) -> None:
        self._stop = stop
        self._masks = masks

    def advance(self, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        kept, finish = self._stop.advance(tokens)
        return (kept, finish) if finish is not None else self._masks.advance(tokens)

    def mask(self, position: int) -> bytes | None:
        return self._masks.mask(position)

    def ahead(self, draft: Sequence[int]) -> Sequence[bytes | None]:
        return self._masks.ahead(draft)

    def forced(self) -> Sequence[int]:
        return self._masks.forced()
