"""A model that makes NaN or infinity of a token: the sequence fails, and it alone.

0 * NaN is NaN, so a key or value that is not finite would reach tokens that do not see it, and from
them a block of the prefix cache that others share.
"""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from octavo.core.engine import Engine
from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.errors import EngineError
from octavo.kernels import _cpu, isas
from octavo.models.weights import RawTensor
from octavo.runtime.cpu import CpuExecutor, CpuOptions
from tests.runtime import small

POISON, AT = 7, 33
TEXT = array("i", [t if t != POISON else 8 for t in small.tokens(1, 120)])
MODES = ({}, {"act": "int8"}, {"act": "bf16"}, {"act": "fp32"}, {"kv_dtype": "int8"})
BROKEN = {"NaN": np.nan, "infinity": np.inf, "less": -np.inf}


class Poisoned(small.SmallCheckpoint):
    """The embedding of one token holds `value` in one place."""

    def __init__(self, value: float) -> None:
        super().__init__(small.config(tied_head=False))
        self.value = np.float32(value)

    def tensor(self, name: str) -> RawTensor:
        if name != "embed":
            return super().tensor(name)
        cfg = self.config
        values = np.random.default_rng(0).normal(0, 1, (cfg.vocab_size, cfg.hidden_size))
        table = values.astype(np.float32)
        table[POISON, 40] = self.value
        bits = (table.view(np.uint32) >> 16).astype(np.uint16)
        return RawTensor(name, "BF16", table.shape, bits.view(np.uint8).reshape(-1))


def executor(value: float, **options) -> CpuExecutor:
    chosen = {"kv_bytes": 24 << 20, "max_tokens": 256, "max_rows": 16, "threads": 2} | options
    return CpuExecutor(Poisoned(value), CpuOptions(**chosen))


def poisoned() -> array[int]:
    ids = TEXT[:]
    ids[AT] = POISON
    return ids


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("value", BROKEN.values(), ids=BROKEN)
def test_what_a_broken_token_leaves_behind_harms_nobody(isa, mode, value):
    """One step computes a sequence with such a token, and another one beside it; then a third goes
    on from the block before the token, as if it had found that in a cache."""
    one = executor(value, isa=isa, **mode)
    mate = small.row(1, 0, TEXT, [119], small.table(1))
    one.submit(small.batch(small.row(0, 0, TEXT, [119], small.table(0)), mate))
    clean = one.collect().rows
    one.submit(small.batch(small.row(0, 32, TEXT[32:40], [7], small.table(0)), step=1))
    after = one.collect().rows[0]
    one.submit(small.batch(small.row(0, 0, poisoned()[:80], [20], small.table(0)), mate, step=2))
    rows = one.collect().rows
    assert rows[1] == clean[1]
    assert rows[0].tokens == ()
    assert rows[0].error is not None
    assert f"NaN or infinity (token {AT} of the sequence)" in rows[0].error
    one.submit(small.batch(small.row(0, 32, TEXT[32:40], [7], small.table(0)), step=3))
    assert one.collect().rows[0] == after


def test_the_first_such_token_is_named_and_logits_are_refused():
    one = executor(np.nan)
    ids = poisoned()
    ids[90] = ids[60] = POISON
    row = small.row(0, 0, ids, [20], small.table(0))
    one.submit(small.batch(row))
    assert f"token {AT} of" in str(one.collect().rows[0].error)
    with pytest.raises(EngineError, match=f"token {AT} of"):
        one.logits(small.batch(row, step=1))


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("chunk", [30, 64])
def test_no_such_block_is_shared(isa, chunk):
    """Two requests share a block; the other one's second block holds a broken token. Whether it
    comes before, with or after, the good one gets what it gets alone."""
    good, bad = TEXT[:64], poisoned()
    alone = _outcome(_engine(isa, chunk), [("good", good)])["good"]
    assert len(alone) == 5
    for order in (["good", "bad"], ["bad", "good"]):
        got = _outcome(_engine(isa, chunk), [(n, good if n == "good" else bad) for n in order])
        assert got["good"] == alone
        assert "NaN or infinity" in got["bad"]
    engine = _engine(isa, chunk)
    assert "NaN or infinity" in _outcome(engine, [("bad", bad)])["bad"]
    assert _outcome(engine, [("good", good)])["good"] == alone
    assert engine.snapshot()["blocks_held"] == 0


def _engine(isa: str, chunk: int) -> Engine:
    one = executor(np.nan, isa=isa, max_tokens=chunk)
    return Engine(one, Scheduler(one.capacity))


def _outcome(engine: Engine, prompts: list[tuple[str, array[int]]]) -> dict[str, object]:
    """Of each request its tokens, or its error."""
    for name, ids in prompts:
        params = SamplingParams(temperature=0, max_tokens=5)
        engine.add(Request(name, ids, params, 0.0, 1))
    got: dict[str, object] = {name: () for name, _ in prompts}
    while engine.has_work:
        engine.pump(0.0)
        for event in engine.drain(0.0):
            got[event.request_id] = event.error or (*got[event.request_id], *event.tokens)
    return got


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("kind", ["bf16", "fp32", "int8"])
@pytest.mark.parametrize("value", [*BROKEN.values(), 3.4e38], ids=[*BROKEN, "no bf16"])
@pytest.mark.parametrize("dim", [64, 80])
def test_keys_and_values_reach_only_those_who_see_them(isa, kind, value, dim):
    """Bits of one tile of queries; 300 tokens are more than a split."""
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((300, h, dim), dtype=np.float32) for h in (6, 2, 2))
    want = _cpu.attend(q, k, v, 0.2, 0, 1, kind, isa)
    for where in (k, v):
        for token in (33, 290):
            where[token, 0, 5] = value
            got = _cpu.attend(q, k, v, 0.2, 0, 1, kind, isa)
            assert np.array_equal(got[:token], want[:token])
            assert np.array_equal(got[:, 3:], want[:, 3:])  # the other head's
            where[token, 0, 5] = 0.5
            want = _cpu.attend(q, k, v, 0.2, 0, 1, kind, isa)
