"""The door: token ids and `SamplingParams` become a `Request`, or an error that names the field.

Shared by the library and the server, so that both refuse the same things in the same words.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import index

from octavo.core.executor import Capacity
from octavo.core.request import NO_SLO, Request, SamplingParams, Slo, Tier, Watcher
from octavo.errors import ContextOverflow, InvalidRequest, Unsupported
from octavo.grammar.compiled import Grammars
from octavo.runtime.sampling import validate
from octavo.text import OutputText, StopWatcher, Together, Tokenizer


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and what of time. salt separates prefix caches; lower priority runs first."""

    tenant: str = ""
    salt: bytes = b""
    priority: int = 0
    slo: Slo = NO_SLO
    tier: Tier = Tier.DEFAULT


@dataclass(frozen=True, slots=True)
class Door:
    """What a request is checked against. fingerprint: of the weights and of how the cache holds
    keys and values; it seeds the prefix cache. speculates: whether the engine guesses tokens, so
    that a request may ask for it. grammars: of this tokenizer, for structured output."""

    tokenizer: Tokenizer
    capacity: Capacity
    vocab_size: int
    fingerprint: str
    speculates: bool = False
    grammars: Grammars | None = None

    def request(
        self,
        id: str,
        prompt: Iterable[int],
        params: SamplingParams,
        *,
        arrival: float,
        caller: Caller = Caller(),
        skip_special: bool = True,
    ) -> Request:
        """A valid request. Raises `InvalidRequest` (`param` is "prompt" or the params' field).

        skip_special: whether stop strings are sought in text without special tokens.
        """
        ids = token_ids(prompt)
        eos = frozenset() if params.ignore_eos else self.tokenizer.eos_ids
        self._check_lengths(ids, params)
        self._check_ids(ids)
        self._check_speculation(params)
        validate(params, self.vocab_size, eos)
        return Request(
            id=id,
            prompt=ids,
            params=params,
            arrival=arrival,
            seed=secrets.randbits(64) if params.seed is None else params.seed % 2**64,
            stop_ids=eos | frozenset(params.stop_token_ids),
            priority=caller.priority,
            tenant=caller.tenant,
            namespace=self.namespace(caller.salt),
            watcher=self._watcher(params, skip_special),
            prediction=self._predicted(params),
            slo=caller.slo,
            tier=caller.tier,
        )

    @property
    def room(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return min(self.capacity.max_context, self._pool)

    @property
    def _pool(self) -> int:
        return self.capacity.num_blocks * self.capacity.block_size + 1  # the last is never computed

    def namespace(self, salt: bytes) -> bytes:
        """What block hashes are seeded with: the weights, and whose requests these are."""
        return hashlib.sha256(self.fingerprint.encode() + b"\0" + salt).digest()

    def _watcher(self, params: SamplingParams, skip_special: bool) -> Callable[[], Watcher] | None:
        """A maker of what looks over each choice: stop strings, a grammar, both, or nothing."""
        tokenizer, stops, least = self.tokenizer, params.stop, params.min_tokens

        def stop() -> StopWatcher:
            stream = tokenizer.stream(skip_special, continuation=True)
            return StopWatcher(OutputText(stream, stops, least))

        if params.structured_outputs is None:
            return stop if stops else None
        if self.grammars is None:
            raise Unsupported("structured output is not set up here", "structured_outputs")
        if least:
            what = f"min_tokens {least} cannot be kept: a grammar decides where the text ends"
            raise Unsupported(what, "min_tokens")
        grammar = self.grammars.watcher(params.structured_outputs)
        return (lambda: Together(stop(), grammar())) if stops else grammar

    def _check_lengths(self, prompt: array[int], params: SamplingParams) -> None:
        if not prompt:
            raise InvalidRequest("the prompt has no tokens", "prompt")
        limit = self.room
        wanted = len(prompt) + (params.max_tokens or 1)
        if wanted > limit:
            asked = f" + max_tokens {params.max_tokens}" if params.max_tokens else ""
            what = "context" if limit < self._pool else "KV pool"
            raise ContextOverflow(
                f"the prompt's {len(prompt)} tokens{asked} do not fit the {what} of {limit} tokens",
                "prompt" if len(prompt) >= limit else "max_tokens",
            )

    def _check_speculation(self, params: SamplingParams) -> None:
        for name in ("speculation", "prediction"):
            if getattr(params, name) and not self.speculates:
                raise Unsupported(f"{name} needs an engine with --speculation auto", name)
        if params.prediction and params.speculation is False:
            raise InvalidRequest("prediction is of no use with speculation: false", "prediction")

    def _predicted(self, params: SamplingParams) -> array[int] | None:
        """The prediction's ids. What is longer than any output can be is refused."""
        if not params.prediction:
            return None
        try:
            ids = token_ids(self.tokenizer.encode(params.prediction, bos=False))
        except InvalidRequest as error:
            raise type(error)(f"prediction: {error}", "prediction") from None
        most = self.capacity.max_context
        if len(ids) > most:
            what = f"prediction has {len(ids)} tokens, and the context holds {most}"
            raise ContextOverflow(what, "prediction")
        return ids

    def _check_ids(self, prompt: array[int]) -> None:
        if not (min(prompt) >= 0 and max(prompt) < self.vocab_size):
            bad = next(i for i in prompt if not 0 <= i < self.vocab_size)
            raise InvalidRequest(
                f"prompt has token id {bad}; the vocabulary ends at {self.vocab_size - 1}", "prompt"
            )


def token_ids(prompt: Iterable[int]) -> array[int]:
    """A prompt's ids, packed. Raises `InvalidRequest` for what is no id."""
    try:
        return array("i", map(index, prompt))
    except TypeError:
        raise InvalidRequest("a prompt is a text or token ids", "prompt") from None
    except OverflowError:
        raise InvalidRequest("prompt has a token id beyond 32 bits", "prompt") from None
