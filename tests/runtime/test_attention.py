"""Paged attention against plain softmax in float64, and its laws by equality of bits."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.kernels import _cpu

ISAS = _cpu.isas()
KINDS = ("bf16", "fp32", "int8")


def _inputs(n, context, heads, kv_heads, dim, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (n, heads, dim), (context, kv_heads, dim), (context, kv_heads, dim)
    return tuple(rng.standard_normal(s, dtype=np.float32) for s in shapes)


def _reference(q, k, v, scale, window):
    n, heads, _ = q.shape
    context, kv_heads, _ = k.shape
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, heads // kv_heads, axis=1) for x in (k, v))
    scores = np.einsum("nhd,chd->hnc", q, k) * scale
    query = np.arange(context - n, context)[:, None]
    key = np.arange(context)[None, :]
    seen = (key <= query) & ((key > query - window) if window else True)
    scores = np.where(seen, scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    return np.einsum("hnc,chd->nhd", p, v)


def _rounded(x):
    """x [tokens, heads, dim] as an int8 cache means it: its scale is rounded up to bf16."""
    most = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
    scale = ((most.view(np.uint32) + 0xFFFF) & 0xFFFF0000).view(np.float32)
    return np.rint(x * (1 / scale)) * scale


def _error(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


SHAPES = [
    # n, context, heads, kv_heads, dim, window
    (1, 1, 3, 1, 16, 0),
    (1, 33, 9, 3, 64, 0),
    (5, 300, 7, 1, 64, 0),
    (70, 70, 4, 2, 32, 0),
    (3, 517, 4, 1, 256, 0),
    (40, 600, 4, 1, 80, 100),
    (9, 1025, 6, 2, 96, 512),
    (2, 777, 12, 2, 128, 1),
    (13, 260, 16, 1, 16, 20),
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_attends_like_softmax(isa, shape, kind):
    n, context, heads, kv_heads, dim, window = shape
    q, k, v = _inputs(n, context, heads, kv_heads, dim)
    scale = dim**-0.5
    got = _cpu.attend(q, k, v, scale, window, 1, kind, isa)
    want = _reference(q, k, v, scale, window)
    assert _error(got, want) < {"fp32": 1e-6, "bf16": 6e-3, "int8": 2e-2}[kind]
    assert np.abs(got - want).max() < {"fp32": 1e-5, "bf16": 5e-2, "int8": 1e-1}[kind]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_loses_what_rounding_keys_and_values_loses_and_little_more(isa, shape):
    """Tokens of very different size, as attention sinks are: each has a scale of its own."""
    n, context, heads, kv_heads, dim, window = shape
    q, k, v = _inputs(n, context, heads, kv_heads, dim, seed=4)
    k[::7] *= 3
    v[0] *= 1e-3
    v[::5] *= 30
    scale = dim**-0.5
    got = _cpu.attend(q, k, v, scale, window, 1, "int8", isa)
    want = _reference(q, _rounded(k), _rounded(v), scale, window)
    assert _error(got, want) < 3e-4


@pytest.mark.parametrize("isa", ISAS)
def test_int8_takes_zeros(isa):
    q, k, v = _inputs(3, 40, 2, 1, 32, seed=5)
    k[:20] = 0
    v[10:30] = 0
    want = _reference(q, _rounded_or_zero(k), _rounded_or_zero(v), 0.3, 0)
    assert _error(_cpu.attend(q, k, v, 0.3, 0, 1, "int8", isa), want) < 3e-4
    assert not _cpu.attend(0 * q, k, 0 * v, 0.3, 0, 1, "int8", isa).any()


def _rounded_or_zero(x):
    return np.where(x.any(axis=-1, keepdims=True), _rounded(np.where(x == 0, 1e-30, x)), 0)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("window", [0, 37, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_attends_alike_alone_chunked_and_whole(isa, window, kind):
    context, heads, kv_heads, dim = 600, 6, 2, 32
    q, k, v = _inputs(context, context, heads, kv_heads, dim, seed=1)
    whole = _cpu.attend(q, k, v, 0.2, window, 1, kind, isa)
    at = 0
    for size in (1, 31, 1, 64, 159, 1, 2, 200, 1, 140):
        part = _cpu.attend(
            q[at : at + size], k[: at + size], v[: at + size], 0.2, window, 1, kind, isa
        )
        assert np.array_equal(part, whole[at : at + size])
        at += size
    assert at == context


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize(("n", "context"), [(1, 2000), (4, 1100), (300, 300)])
@pytest.mark.parametrize("window", [0, 700])
@pytest.mark.parametrize("kind", KINDS)
def test_threads_do_not_change_a_bit(threads, n, context, window, kind):
    q, k, v = _inputs(n, context, 6, 2, 64, seed=2)
    alone = _cpu.attend(q, k, v, 0.125, window, 1, kind, "auto")
    assert np.array_equal(_cpu.attend(q, k, v, 0.125, window, threads, kind, "auto"), alone)


def test_large_scores_neither_overflow_nor_vanish():
    q, k, v = _inputs(4, 64, 2, 1, 64, seed=3)
    got = _cpu.attend(q * 100, k * 100, v, 1.0, 0, 1, "fp32", "auto")
    assert _error(got, _reference(q * 100, k * 100, v, 1.0, 0)) < 1e-3
