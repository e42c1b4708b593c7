"""A model without arithmetic: the next token is a hash of all before it, kept in KV slots.

The executor stores a running hash of the prefix in each slot and reads it back through the block
table, so a wrong table, a stale block or a cache mix-up changes the text. `expected` is the same
model as a plain loop: the oracle.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from octavo.core.batch import Batch, Row, RowResult, SampleSpec, StepResult, Want
from octavo.core.executor import Capacity
from octavo.core.request import NO_WAY, SamplingParams, TokenLogprob
from octavo.errors import Unsupported

BOS, EOS, ROLE, END, BOOM = 256, 257, 258, 259, 260
WORDS = (b" the", b" cat", b" sat", b"ing", b"\n", "é".encode(), "🙂".encode(), b"STOP")
VOCAB = 261 + len(WORDS)
CHOKES = 5  # allowed alone, it makes the row fail in the executor
SPECIAL = {BOS: b"<s>", EOS: b"</s>", ROLE: b"<|", END: b"|>", BOOM: b"<boom>"}


class FakeStream:
    def __init__(self, tokenizer: FakeTokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(self._tokenizer.joined(ids, self._skip))


class FakeTokenizer:
    """Bytes are tokens; a few words too. Encoding uses bytes alone. Decoding BOOM raises."""

    eos_ids = frozenset({EOS})
    special_ids = frozenset(SPECIAL)
    vocab_size = VOCAB
    bos_id = BOS
    chat_templates: ClassVar[dict[str, str]] = {}
    infill_ends: tuple[int, ...] = ()

    def encode(self, text: str, *, bos: bool | None = None) -> list[int]:
        return ([BOS] if bos is not False else []) + list(text.encode())

    def encode_plain(self, text: str, *, first: bool) -> list[int]:
        return list(text.encode())

    def infill(self, prefix: str | Sequence[int], suffix: str) -> list[int]:
        raise Unsupported("suffix needs a model with fill-in-the-middle tokens", "suffix")

    def token_bytes(self, token: int) -> bytes:
        if token < 256:
            return bytes([token])
        return SPECIAL[token] if token in SPECIAL else WORDS[token - 261]

    def joined(self, ids: Iterable[int], skip_special: bool) -> bytes:
        ids = list(ids)
        if BOOM in ids:
            raise RuntimeError("this token cannot be decoded")
        return b"".join(
            b"" if skip_special and token in SPECIAL else self.token_bytes(token) for token in ids
        )

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self.joined(ids, skip_special).decode("utf-8", "replace")

    def stream(self, skip_special: bool = True, *, continuation: bool = False) -> FakeStream:
        return FakeStream(self, skip_special)


def fake_template(messages: list[dict[str, Any]], tools: Any = None, **more: Any) -> list[int]:
    """<s>tools<|role|>content, calls ... <|assistant|>. One that says "raise" makes it fail."""
    ids = [BOS, *(json.dumps(tools).encode() if tools else b"")]
    for message in messages:
        if message["content"] == "raise":
            raise RuntimeError("the template failed")
        ids += [ROLE, *message["role"].encode(), END, *message["content"].encode()]
        ids += (
            json.dumps(message.get("tool_calls", "")).encode() if "tool_calls" in message else b""
        )
    opening = b"<think>" if more.get("enable_thinking") else b""
    return [*ids, ROLE, *b"assistant", END, *opening]


def _hash(state: int, token: int) -> int:
    data = state.to_bytes(8, "little") + token.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


# Bytes that begin a character, and what must follow, so that UTF-8 is often split over tokens.
_FOLLOW = {0xC3: 0xA9, 0xF0: 0x9F, 0x9F: 0x99, 0x99: 0x82}
_LETTERS = b"abcdefghijklmnopqrstuvwxyz  "


def choose(state: int, last: int, spec: SampleSpec, mask: bytes | None = None) -> int:
    """The next token: a function of the prefix, and of seed and choice if not greedy."""
    params = spec.params
    if last in _FOLLOW and mask is None:
        return _FOLLOW[last]
    value = state
    if params.temperature > 0:
        value = _hash(_hash(state, spec.seed & 0x7FFFFFFF), spec.choice)
    if mask is not None:
        on = [token for token in range(VOCAB) if mask[token >> 3] >> (token & 7) & 1]
        on = [token for token in on if token not in params.banned_token_ids]
        if not on:
            raise ValueError(NO_WAY + "no token is allowed")
        # Mostly to an end where there is one, or random JSON never ends.
        ends = [token for token in on if token in (EOS, ord('"'), ord("}"), ord("]"))]
        on = ends if ends and value % 8 else on
        return on[value // 8 % len(on)]
    allowed = params.allowed_token_ids
    if allowed == (CHOKES,):
        raise ValueError("no token is allowed")
    for _ in range(1000):
        token = _pick(value)
        if allowed is not None:
            token = allowed[value % len(allowed)]
        biased = [i for i, bias in params.logit_bias if bias >= 100]
        token = biased[0] if biased else token
        if token not in spec.suppress and token not in params.banned_token_ids:
            return token
        value = _hash(value, 1)
    raise ValueError("no token is allowed")


def _pick(value: int) -> int:
    kind, which = value % 64, value // 64
    if kind < 2:
        return EOS
    if kind < 6:
        return (0xC3, 0xF0)[which % 2]
    if kind < 20:
        return 261 + which % len(WORDS)
    return _LETTERS[which % len(_LETTERS)]


def logprob(state: int, token: int, top: int) -> TokenLogprob:
    pairs = tuple((100 + i, -1.0 - i - state % 7 / 8) for i in range(top))
    return TokenLogprob(token, -0.5 - (state ^ token) % 16 / 8, pairs)


def fake_state(state: int) -> bytes:
    """What stands for the last hidden state: eight float32 numbers."""
    return struct.pack("<8f", *[byte - 99.5 for byte in state.to_bytes(8, "little")])


class FakeExecutor:
    """Runs the fake model. `seconds` is how long a step takes; `fail` makes the next one fail.

    No step ends while `gate` is closed (cleared): what a test wants to see of a running request,
    or to do beside it, it does in the meantime, however slow the machine is. `halt`, asked before
    every step ends, closes the gate when it says so.
    """

    script = b""  # what every answer says, before an end, where the mask lets it

    def __init__(self, *, blocks: int = 512, seconds: float = 0.0, context: int = 2048) -> None:
        self.capacity = Capacity(
            num_blocks=blocks,
            block_size=16,
            max_tokens=256,
            max_rows=64,
            max_outputs=256,
            max_context=context,
        )
        self.seconds = seconds
        self.fail: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.halt: Callable[[], bool] | None = None
        self.steps = 0
        self._slots: dict[int, int] = {}
        self._batch: Batch | None = None

    def submit(self, batch: Batch) -> None:
        assert self._batch is None
        self._batch = batch

    def ready_at(self) -> float | None:
        return None

    def collect(self) -> StepResult:
        batch, self._batch = self._batch, None
        assert batch is not None
        if self.halt is not None and self.halt():
            self.halt = None
            self.gate.clear()
        self.gate.wait(60.0)
        if self.fail is not None:
            raise self.fail
        if self.seconds:
            time.sleep(self.seconds)
        self.steps += 1
        return StepResult(batch.step, {row.seq_id: self._row(row) for row in batch.rows})

    def _scripted(self, row: Row, want: Want, token: int) -> int:
        if not self.script or want.sample is None:
            return token
        at = row.start + want.position + 1 - want.sample.num_prompt
        said = self.script[at] if at < len(self.script) else EOS
        mask = want.mask
        return said if mask is None or mask[said >> 3] >> (said & 7) & 1 else token

    def _slot(self, row: Row, at: int) -> int:
        size = self.capacity.block_size
        return row.block_table[at // size] * size + at % size

    def _row(self, row: Row) -> RowResult:
        state = self._slots[self._slot(row, row.start - 1)] if row.start else 0
        states = []
        for offset, token in enumerate(row.tokens):
            state = _hash(state, token)
            states.append(state)
            self._slots[self._slot(row, row.start + offset)] = state
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        scores: list[TokenLogprob] = []
        embedding = None
        for want in row.outputs:
            state = states[want.position]
            if want.target is not None:
                scores.append(logprob(state, want.target, want.top))
            if want.sample is not None:
                try:
                    token = choose(state, row.tokens[want.position], want.sample, want.mask)
                    token = self._scripted(row, want, token)
                except ValueError as error:
                    return RowResult(error=str(error))
                tokens.append(token)
                if want.sample.params.embed:
                    embedding = fake_state(state)
                if want.sample.params.logprobs is not None:
                    logprobs.append(logprob(state, token, want.sample.params.logprobs))
        return RowResult(tuple(tokens), tuple(logprobs), tuple(scores), embedding=embedding)


def expected(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    seed: int = 0,
    choice: int = 0,
    context: int = 2048,
) -> list[int]:
    """The tokens that the fake model writes, the one that stops included; stop strings aside."""
    state = 0
    for token in prompt:
        state = _hash(state, token)
    out: list[int] = []
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    last = prompt[-1]
    most = params.max_tokens or context - len(prompt)
    while len(out) < most:
        suppress = tuple(stops) if len(out) < params.min_tokens else ()
        spec = SampleSpec(params, seed, choice, suppress=suppress)
        last = choose(state, last, spec)
        out.append(last)
        if last in stops:
            break
        state = _hash(state, last)
    return out


def expected_text(tokens: Sequence[int], stops: Sequence[str] = ()) -> tuple[str, str, int]:
    """(text, finish reason, tokens used) that a client must see of `tokens`."""
    tokenizer = FakeTokenizer()
    for count in range(1, len(tokens) + 1):
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(tokenizer.joined(tokens[:count], True))
        at = min((text.find(stop) for stop in stops if stop in text), default=-1)
        if at >= 0:
            return text[:at], "stop", count
    finish = "stop" if tokens and tokens[-1] == EOS else "length"
    return shown_text(tokens), finish, len(tokens)


def shown_text(tokens: Sequence[int]) -> str:
    """The text of tokens, without a character at the end that has only begun."""
    raw = FakeTokenizer().joined(tokens, True)
    for size in (1, 2, 3):
        try:
            raw[-size:].decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return raw[:-size].decode("utf-8", "replace")
    return raw.decode("utf-8", "replace")
