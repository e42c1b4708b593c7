"""What the CPU executor's sampler is given and what it gives back, as flat bytes.

`encode(batch)` returns `(rows, data)`. `rows` holds one 128-byte record for each `Want`, in the
order of `batch.rows` and of each row's `outputs`; that is also the order of the logits. `data` is
int32 words, to which the records' `*_at` fields point. One record, little-endian, no padding:

    offset  field
    0       temperature, top_p, min_p, typical_p        f32   temperature 0: greedy; -1: only score
    16      repetition, presence, frequency             f32
    28      top_k, num_logprobs (-1: none), 0           i32
    40      seed                                        u64
    48      choice, position                            i32
    56      target (-1: none), target_top               i32
    64      history_at, num_history, num_prompt         i32   token ids
    76      bias_at, num_bias                           i32   num_bias ids, then num_bias f32
    84      allowed_at, num_allowed                     i32   ids; 0: all are allowed
    92      banned_at, num_banned                       i32   ids
    100     suppress_at, num_suppress                   i32   ids
    108     mask_at, mask_bytes                         i32   bytes, padded to a word; 0: no mask
    116     0                                           i32
    120     0: the executor puts its pointer to `data`  u64

The executor copies `rows`, calls `link_sample_rows`, then for each record `sample`, which fills 184
bytes: error, detail, token i32; logprob, score f32; num_top i32; 20 ids i32; 20 logprobs f32.
`decode(batch, out)` turns these into one `RowResult` a row. Law: a record says all there is to know
of its row, so the same record and logits give the same bits whatever else is in the batch.

What the sampler does, in this order (penalties first and temperature before truncation, as vLLM and
transformers; top_k, typical, top_p, min_p in llama.cpp's order):

1. repetition penalty on every id of the history (Keskar et al. 2019: a positive logit is divided,
   another multiplied), then minus frequency * count and minus presence on ids of the output;
2. plus logit_bias;
3. ids not in allowed_token_ids, in banned_token_ids, in `suppress` or off in the mask: -inf;
4. temperature 0: the highest logit, lowest id first. Otherwise divide by temperature;
5. top_k: exactly k ids, among equals the lowest; typical_p (Meister et al. 2022); top_p: the
   shortest prefix in falling order whose probability reaches top_p; min_p: relative to the most
   likely id left. Each takes what the one before left, renormalised, and leaves at least one id;
6. inverse CDF over what is left, in rising order of id, at u = 53 bits of Philox4x32-10 (Salmon et
   al. 2011) with key = seed and counter = (position, choice, 0, 0).

Logprobs and scores are log-softmax of the logits as the model gave them.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Collection, Sequence
from typing import Any

from octavo.core.batch import Batch, Row, RowResult, SampleSpec, Want
from octavo.core.request import NO_WAY, SamplingParams, TokenLogprob
from octavo.errors import InvalidRequest

ROW_BYTES = 128
OUT_BYTES = 184

_OUT_WORDS = OUT_BYTES // 4
_TOP_WORD = 6  # of a record: where its ids begin
_MAX_TOP = 20
_HEAD = struct.Struct("<7f3i")
_PLAIN_TAIL = struct.Struct("<Qii ii 64x")
_TAIL = struct.Struct("<Qii ii 13i 12x")
assert _HEAD.size + _TAIL.size == _HEAD.size + _PLAIN_TAIL.size == ROW_BYTES
assert 4 * (_TOP_WORD + 2 * _MAX_TOP) == OUT_BYTES

_MASK64 = 2**64 - 1
_CACHE_LIMIT = 4096
_CACHE_WORDS = 1 << 22  # of ids and biases, in all entries
_SCORE_HEAD = _HEAD.pack(-1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0, -1, 0)

_ERRORS = {
    1: "the model's logits hold NaN (token {0})",
    2: "a logit is infinite (token {0})",
    3: NO_WAY + "no token may be chosen: all are masked, banned or impossible",
    4: "token id {0} is beyond the model's vocabulary",
    5: "the grammar's mask has {0} bytes, too few for the model's vocabulary",
}


class _Prepared:
    """What all the wants with one `SamplingParams` share. Ids are int32 words, ready to copy."""

    __slots__ = ("allowed", "banned", "bias", "head", "lists", "params")

    def __init__(self, params: SamplingParams) -> None:
        self.params = params  # held, so that its id() stays its own
        self.head = _HEAD.pack(
            params.temperature,
            params.top_p,
            params.min_p,
            params.typical_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            params.top_k,
            -1 if params.logprobs is None else params.logprobs,
            0,
        )
        ids = array("i", [token for token, _ in params.logit_bias]).tobytes()
        self.bias = ids + array("f", [bias for _, bias in params.logit_bias]).tobytes()
        self.allowed = array("i", params.allowed_token_ids or ()).tobytes()
        self.banned = array("i", params.banned_token_ids).tobytes()
        self.lists = bool(self.bias or self.allowed or self.banned)


class _Cache(dict[int, _Prepared]):
    """By identity: hashing a SamplingParams reads its twenty fields, longer than all the rest here.

    What has ended stays until the cache is full; long lists of ids fill it soon.
    """

    words = 0

    def make(self, params: SamplingParams) -> _Prepared:
        """The entry of these params, made and kept."""
        prepared = _Prepared(params)
        words = (len(prepared.bias) + len(prepared.allowed) + len(prepared.banned)) // 4
        if len(self) >= _CACHE_LIMIT or self.words + words > _CACHE_WORDS:
            self.clear()
            self.words = 0
        self[id(params)] = prepared
        self.words += words
        return prepared


_prepared = _Cache()


class _Data:
    """The int32 words that records point to."""

    __slots__ = ("parts", "words")

    def __init__(self) -> None:
        self.parts: list[bytes | array[int]] = []
        self.words = 0

    def add(self, part: bytes | array[int], words: int) -> int:
        """Append; returns where it begins."""
        at = self.words
        self.parts.append(part)
        self.words += words
        return at


def encode(batch: Batch) -> tuple[bytes, bytes]:
    """`(rows, data)` for every `Want` of the batch, in the format above."""
    rows: list[bytes] = []
    data = _Data()
    append, tail, prepared_of = rows.append, _PLAIN_TAIL.pack, _prepared.get
    for row in batch.rows:
        for want in row.outputs:
            spec = want.sample
            if spec is None:
                append(_SCORE_HEAD)
                append(_long_tail(want, row.start, data))
                continue
            prepared = prepared_of(id(spec.params)) or _prepared.make(spec.params)
            append(prepared.head)
            if (
                prepared.lists
                or spec.suppress
                or spec.history is not None
                or want.mask is not None
                or want.target is not None
            ):
                append(_long_tail(want, row.start, data))
            else:
                position = row.start + want.position + 1
                append(tail(spec.seed & _MASK64, spec.choice, position, -1, 0))
    return b"".join(rows), b"".join(data.parts)


def _long_tail(want: Want, start: int, data: _Data) -> bytes:
    target, top = (-1, 0) if want.target is None else (want.target, want.top)
    spec = want.sample
    if spec is None:
        return _PLAIN_TAIL.pack(0, 0, 0, target, top)
    slices = (*_history(spec, data), *_lists(spec, data), *_mask(want.mask, data))
    position = start + want.position + 1
    return _TAIL.pack(spec.seed & _MASK64, spec.choice, position, target, top, *slices)


def _history(spec: SampleSpec, data: _Data) -> tuple[int, int, int]:
    if spec.history is None:
        return 0, 0, 0
    count = len(spec.history)
    return data.add(spec.history, count), count, spec.num_prompt


def _lists(spec: SampleSpec, data: _Data) -> tuple[int, ...]:
    prepared = _prepared.get(id(spec.params)) or _prepared.make(spec.params)
    num_bias = len(prepared.bias) // 8
    num_allowed = len(prepared.allowed) // 4
    num_banned = len(prepared.banned) // 4
    num_suppress = len(spec.suppress)
    suppress = array("i", spec.suppress)
    return (
        data.add(prepared.bias, 2 * num_bias),
        num_bias,
        data.add(prepared.allowed, num_allowed),
        num_allowed,
        data.add(prepared.banned, num_banned),
        num_banned,
        data.add(suppress, num_suppress),
        num_suppress,
    )


def _mask(mask: bytes | None, data: _Data) -> tuple[int, int]:
    if mask is None:
        return 0, 0
    words = max(len(mask) + 3, 4) // 4
    # An empty mask counts as one byte: it must fail as too short, not pass as absent.
    return data.add(mask.ljust(4 * words, b"\0"), words), max(len(mask), 1)


def decode(batch: Batch, out: bytes | bytearray | memoryview) -> dict[int, RowResult]:
    """One `RowResult` for each row of the batch, by seq_id, from the sampler's records."""
    octets = memoryview(out).cast("B")
    words, floats = octets.cast("i"), octets.cast("f")
    errors = words[0::_OUT_WORDS].tolist()
    tokens = words[2::_OUT_WORDS].tolist()
    fine = not any(errors)
    results: dict[int, RowResult] = {}
    first = 0
    for row in batch.rows:
        after = first + len(row.outputs)
        if not fine and any(errors[first:after]):
            results[row.seq_id] = RowResult(error=_message(words, errors, first, after))
        else:
            for want in row.outputs:
                spec = want.sample
                if spec is None or want.target is not None or spec.params.logprobs is not None:
                    results[row.seq_id] = _decode_row(row, words, floats, first)
                    break
            else:
                results[row.seq_id] = RowResult(tuple(tokens[first:after]))
        first = after
    return results


def embedded(batch: Batch) -> list[tuple[int, int]]:
    """(seq_id, which want of the batch) of the rows that an embedding is wanted of."""
    found, after = [], 0
    for row in batch.rows:
        wants = row.outputs
        if wants:
            after += len(wants)
            spec = wants[-1].sample
            if spec is not None and spec.params.embed:
                found.append((row.seq_id, after - 1))
    return found


def _message(words: Any, errors: list[int], first: int, after: int) -> str:
    bad = next(i for i in range(first, after) if errors[i])
    return _ERRORS[errors[bad]].format(words[bad * _OUT_WORDS + 1])


def _decode_row(row: Row, words: Any, floats: Any, first: int) -> RowResult:
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    scores: list[TokenLogprob] = []
    for at, want in enumerate(row.outputs, first):
        word = at * _OUT_WORDS
        ids = word + _TOP_WORD
        after = ids + words[word + 5]
        values = floats[ids + _MAX_TOP : after + _MAX_TOP]
        top = tuple(zip(words[ids:after].tolist(), values.tolist(), strict=True))
        if want.sample is not None:
            token = words[word + 2]
            tokens.append(token)
            num = want.sample.params.logprobs
            if num is not None:
                logprobs.append(TokenLogprob(token, floats[word + 3], top[:num]))
        if want.target is not None:
            scores.append(TokenLogprob(want.target, floats[word + 4], top[: want.top]))
    return RowResult(tuple(tokens), tuple(logprobs), tuple(scores))


def validate(
    params: SamplingParams, vocab_size: int, stop_ids: frozenset[int] = frozenset()
) -> None:
    """Refuse token ids that the model does not have, and choices that leave nothing to choose.

    stop_ids: those that end the request, which min_tokens forbids at first; without them, the
    params' own. Raises InvalidRequest naming the field. Called at the door, where the model is
    known. A list longer than the vocabulary names ids twice: each would cost time in every step.
    """

    def within(param: str, ids: Sequence[int]) -> None:
        if ids and max(ids) >= vocab_size:
            bad = next(token for token in ids if token >= vocab_size)
            raise InvalidRequest(
                f"{param}: token id {bad} is beyond the vocabulary of {vocab_size}", param
            )
        if len(ids) > vocab_size:
            raise InvalidRequest(
                f"{param} has {len(ids)} ids, but the vocabulary only {vocab_size}", param
            )

    within("logit_bias", [token for token, _ in params.logit_bias])
    within("banned_token_ids", params.banned_token_ids)
    within("stop_token_ids", params.stop_token_ids)
    within("allowed_token_ids", params.allowed_token_ids or ())
    allowed: Collection[int] = range(vocab_size)
    if params.allowed_token_ids is not None:
        allowed = frozenset(params.allowed_token_ids)
    banned = frozenset(params.banned_token_ids)
    if _covers(banned, allowed):
        raise InvalidRequest("banned_token_ids leave no token to choose", "banned_token_ids")
    stops = stop_ids.union(params.stop_token_ids)
    if params.min_tokens and stops and _covers(banned | stops, allowed):
        raise InvalidRequest(
            "min_tokens forbids the tokens that end the text, and no others may be chosen",
            "min_tokens",
        )


def _covers(ids: frozenset[int], allowed: Collection[int]) -> bool:
    return len(ids) >= len(allowed) and ids.issuperset(allowed)
