"""Grammars as watchers: each sequence has a matcher (llguidance) that says which tokens may follow.

A grammar is compiled before a request is handed on, never in a step; a sequence gets a copy, which
takes microseconds. Matching is deterministic, so masks are the same whoever shares the batch.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from octavo.core.request import NO_WAY, FinishReason, StructuredOutputs, Watcher
from octavo.errors import InvalidRequest
from octavo.grammar.trial import TooSlow, Trial
from octavo.grammar.worker import LIMITS
from octavo.text import Tokenizer

MAX_CHARS = 256 * 1024  # of a grammar
REFUSED = "Unimplemented keys"  # llguidance's words for what a schema says and it cannot keep
LENIENT = '; with "strict": false these are ignored'
KEPT = 64  # compiled grammars
KEPT_CHARS = 1 << 20

Matcher = Any  # llguidance.LLMatcher
Key = tuple[str, str, bool]  # kind, text, strict
Found = Any  # a Matcher, or the InvalidRequest that says why there is none


class Missing(Exception):
    """A grammar that is not compiled is needed where none may be compiled."""

    def __init__(self, key: Key) -> None:
        super().__init__(key[0])
        self.key = key


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
        self._encode = tokenizer.encode_plain

    def __call__(self, text: bytes | str) -> list[int]:
        plain = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return self._encode(plain, first=False)


class Grammars:
    """Compiles grammars for one model's tokens, and keeps the latest. Safe to share."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, trial: Trial | None = None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._trial = trial if trial is not None else Trial()
        self._lock = threading.Lock()
        self._warming = threading.Lock()
        self._here = threading.local()
        self._tokens: Any = None
        self._kept: OrderedDict[Key, Found] = OrderedDict()
        self._chars = 0

    def warm(self) -> None:
        """Build what all grammars share: 0.2 to 0.7 s, in which no other Python runs."""
        with self._warming:
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
        return self._made(kind, text, asked.strict, asked.param)

    def watcher(self, asked: StructuredOutputs) -> Callable[[], Watcher]:
        """A maker of watchers for one request's choices. Raises `InvalidRequest`."""
        matcher = self.compile(asked)
        if not asked.after:
            return lambda: GrammarWatcher(matcher())
        first, end = None, asked.after.encode()
        if asked.first:
            first = self._made("choice", json.dumps([asked.first]), True, asked.param)
        lead = Lead(end, self._going_on(), self._tokenizer.token_bytes)
        return lambda: LeadWatcher(lead, first and first(), GrammarWatcher(matcher()))

    def _going_on(self) -> bytes:
        """A mask that allows all but the ends."""
        mask = bytearray(b"\xff" * (self._vocab_size // 8 + 1))
        for token in self._tokenizer.eos_ids:
            mask[token >> 3] &= ~(1 << (token & 7))
        return bytes(mask)

    def _made(self, kind: str, text: str, strict: bool, param: str) -> Callable[[], Matcher]:
        key = kind, text, strict
        given: Mapping[Key, Found] | None = getattr(self._here, "given", None)
        if given is None:
            found = self.find(key)
        else:
            found = given[key] if key in given else self._latest(key)
            if found is None:
                raise Missing(key)
        if isinstance(found, InvalidRequest):
            # `structured_outputs` is vLLM's, and has no such field.
            hint = (
                LENIENT if str(found).startswith(REFUSED) and param != "structured_outputs" else ""
            )
            raise InvalidRequest(f"{param}: {found}{hint}", param)
        matcher = found
        return lambda: matcher.deep_copy()

    @contextlib.contextmanager
    def compiling_none(self, given: Mapping[Key, Found]) -> Iterator[None]:
        """In this thread, within the `with`, a grammar that is neither among `given` nor compiled
        already raises `Missing`."""
        self._here.given = given
        try:
            yield
        finally:
            self._here.given = None

    def find(self, key: Key) -> Found:
        """The matcher of a grammar, compiled if it must be, or what is wrong with it."""
        found = self._latest(key)
        if found is None:
            found = self._compile(*key)
            if not isinstance(found, TooSlow):
                self._keep(key, found)
        return found

    def _latest(self, key: Key) -> Found | None:
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def _compile(self, kind: str, text: str, strict: bool) -> Found:
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

    def _keep(self, key: Key, found: Found) -> None:
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
    """Holds one sequence to a grammar.

    A sequence ends with the token after which nothing more may come: its end token would only cost
    a step. What fails in the matcher is raised, and fails this sequence.
    """

    __slots__ = ("_mask", "_matcher")

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self._mask: bytes | None = None

    def advance(self, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        self._mask = None
        for index, token in enumerate(tokens):
            if not self._matcher.consume_token(token):
                raise InvalidRequest(f"{NO_WAY}the grammar failed: {self._matcher.get_error()}")
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

    def forced(self) -> Sequence[int]:
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return tokens

    def _computed(self) -> bytes:
        mask: bytes = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise InvalidRequest(f"{NO_WAY}the grammar failed: {self._matcher.get_error()}")
        return mask


class Lead(NamedTuple):
    """What may come before a grammar: any text to the end of `until`, under `mask`."""

    until: bytes
    mask: bytes
    bytes_of: Callable[[int], bytes]


class LeadWatcher:
    """Lets a text come (a model's thoughts) that a grammar does not hold for, then the grammar.

    first: a matcher of how that text begins. What a token has beyond the end of it is let pass.
    """

    __slots__ = ("_first", "_lead", "_tail", "_then")

    def __init__(self, lead: Lead, first: Matcher | None, then: GrammarWatcher) -> None:
        self._lead: Lead | None = lead
        self._first = None if first is None else GrammarWatcher(first)
        self._then = then
        self._tail = b""

    def advance(self, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        for index, token in enumerate(tokens):
            if self._lead is None:
                kept, finish = self._then.advance(tokens[index:])
                return index + kept, finish
            if self._first is not None and self._first.advance((token,))[1] is not None:
                self._first = None
            self._tail, ended = _passed(self._lead, self._tail, token)
            if ended:
                self._lead = None
        return len(tokens), None

    def mask(self, position: int) -> bytes | None:
        if self._lead is None:
            return self._then.mask(position)
        return self._lead.mask if self._first is None else self._first.mask(position)

    def ahead(self, draft: Sequence[int]) -> list[bytes | None]:
        lead, tail = self._lead, self._tail
        if lead is None:
            return self._then.ahead(draft)
        masks: list[bytes | None] = []
        for token in draft if self._first is None else ():
            tail, ended = _passed(lead, tail, token)
            if ended or not lead.mask[token >> 3] >> (token & 7) & 1:
                break
            masks.append(lead.mask)
        return masks

    def forced(self) -> Sequence[int]:
        if self._lead is None:
            return self._then.forced()
        return () if self._first is None else self._first.forced()


def _passed(lead: Lead, tail: bytes, token: int) -> tuple[bytes, bool]:
    """The text's end with one token more, and whether the lead has ended in it."""
    text = tail + lead.bytes_of(token)
    return text[-len(lead.until) :], lead.until in text
