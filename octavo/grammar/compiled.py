"""Grammars as watchers: each sequence has a matcher (llguidance) that says which tokens may follow.

A grammar is compiled where requests are parsed, never in a step; a sequence gets a copy, which
takes microseconds. Matching is deterministic, so masks are the same whoever shares the batch.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.core.request import FinishReason, StructuredOutputs, Watcher
from octavo.errors import InvalidRequest
from octavo.grammar.trial import Trial
from octavo.grammar.worker import LIMITS
from octavo.text import Tokenizer

MAX_CHARS = 256 * 1024  # of a grammar
KEPT = 64  # compiled grammars
KEPT_CHARS = 1 << 20

Matcher = Any  # llguidance.LLMatcher


class _Wrapped:
    """What llguidance reads of a tokenizer: the bytes of each id. 0xFF marks control tokens, so
    that no text of a grammar is one of them."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        special = tokenizer.special_ids
        self.eos_token_id = min(tokenizer.eos_ids, default=0)
        self.bos_token_id = None
        self.special_token_ids = sorted(special)
        self.tokens = [
            b"\xff" + tokenizer.token_bytes(i) if i in special else tokenizer.token_bytes(i)
            for i in range(min(tokenizer.vocab_size, vocab_size))
        ]
        self._encode = tokenizer.encode

    def __call__(self, text: bytes | str) -> list[int]:
        plain = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return self._encode(plain, bos=False)


class Grammars:
    """Compiles grammars for one model's tokens, and keeps the latest. Safe to share."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, trial: Trial | None = None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._trial = trial if trial is not None else Trial()
        self._lock = threading.Lock()
        self._tokens: Any = None
        self._kept: OrderedDict[tuple[str, str, bool], Matcher | InvalidRequest] = OrderedDict()
        self._chars = 0

    def warm(self) -> None:
        """Build what all grammars share: 0.2 to 0.7 s, in which no other Python runs."""
        with self._lock:
            if self._tokens is None:
                from llguidance import LLTokenizer

                wrapped: Any = _Wrapped(self._tokenizer, self._vocab_size)
                self._tokens = LLTokenizer(
                    wrapped, n_vocab=self._vocab_size, eos_token=sorted(self._tokenizer.eos_ids)
                )

    def close(self) -> None:
        self._trial.close()

    def compile(self, asked: StructuredOutputs) -> Callable[[], Matcher]:
        """A maker of matchers at the beginning. Raises `InvalidRequest` saying what is wrong."""
        kind, text = _text_of(asked)
        if len(text) > MAX_CHARS:
            what = f"{kind} has {len(text)} characters; at most {MAX_CHARS} are compiled"
            raise InvalidRequest(what, asked.param)
        key = kind, text, asked.strict
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
        if found is None:
            found = self._compile(*key)
            self._keep(key, found)
        if isinstance(found, InvalidRequest):
            raise InvalidRequest(f"{asked.param}: {found}", asked.param)
        matcher = found
        return lambda: matcher.deep_copy()

    def _compile(self, kind: str, text: str, strict: bool) -> Matcher | InvalidRequest:
        try:
            grammar = self._trial.grammar(kind, text, strict)
        except InvalidRequest as error:
            return error
        self.warm()
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(self._tokens, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
        if not matcher.is_error():
            matcher.compute_bitmask()  # every sequence begins with it
        return InvalidRequest(matcher.get_error()) if matcher.is_error() else matcher

    def _keep(self, key: tuple[str, str, bool], found: Matcher | InvalidRequest) -> None:
        with self._lock:
            if key not in self._kept:
                self._chars += len(key[1])
            self._kept[key] = found
            while len(self._kept) > KEPT or self._chars > KEPT_CHARS:
                (_, text, _), _ = self._kept.popitem(last=False)
                self._chars -= len(text)


def _text_of(asked: StructuredOutputs) -> tuple[str, str]:
    """(kind, text) of the one thing that is asked for."""
    if asked.json_object:
        return "json", '{"type": "object"}'
    if asked.json is not None:
        try:
            given = asked.json if isinstance(asked.json, Mapping) else json.loads(asked.json)
            if not isinstance(given, Mapping):
                raise ValueError("it is not an object")
            return "json", json.dumps(given)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"{asked.param}: no JSON schema: {error}", asked.param) from None
    if asked.choice is not None:
        return "choice", json.dumps(asked.choice)
    return ("regex", asked.regex) if asked.regex is not None else ("grammar", asked.grammar or "")


class GrammarWatcher:
    """Holds one sequence to a grammar; `other` watches the same tokens, and may end it sooner.

    A sequence ends with the token after which nothing more may come: its end token would only cost
    a step. What fails in the matcher is raised, and fails this sequence.
    """

    __slots__ = ("_mask", "_matcher", "_other")

    def __init__(self, matcher: Matcher, other: Watcher | None = None) -> None:
        self._matcher = matcher
        self._other = other
        self._mask: bytes | None = None

    def advance(self, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        self._mask = None
        if self._other is not None:
            kept, finish = self._other.advance(tokens)
            if finish is not None:
                return kept, finish
        for index, token in enumerate(tokens):
            if not self._matcher.consume_token(token):
                raise RuntimeError(f"the grammar failed: {self._matcher.get_error()}")
            if self._matcher.is_stopped():
                return index + 1, FinishReason.STOP
        return len(tokens), None

    def mask(self, position: int) -> bytes | None:
        if self._mask is None:
            self._mask = self._computed()
        return self._mask

    def ahead(self, draft: Sequence[int]) -> list[bytes | None]:
        masks: list[bytes | None] = []
        taken = 0
        try:
            for token in draft:
                if not self._matcher.try_consume_tokens([token]):
                    break
                taken += 1
                if self._matcher.is_stopped():
                    break
                masks.append(self._computed())
        finally:
            if taken:
                self._matcher.rollback(taken)
        return masks

    def _computed(self) -> bytes:
        mask: bytes = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise RuntimeError(f"the grammar failed: {self._matcher.get_error()}")
        return mask
