"""Products with packed weights: right, bitwise independent of company, and unharmed by NaN."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.kernels import _cpu
from tests.runtime.blocks import NUMBER, QUANTISED, TYPES, dequantised, group, random_rows

ISAS = _cpu.isas()
ACTS = ("int8", "mixed", "pairs", "bf16", "fp32")
# Relative Frobenius error against float64 on the weights as the file defines them.
GATE = dict.fromkeys(QUANTISED, 1.5e-2) | {"BF16": 4e-3, "F16": 1e-5, "F32": 1e-5}


def weights(name: str, n: int, k: int, seed: int = 0) -> tuple[object, np.ndarray]:
    data = random_rows(name, n, k, seed)
    return _cpu.pack(NUMBER[name], data.reshape(-1), n, k), dequantised(name, data)


def tokens(t: int, k: int, seed: int = 0) -> np.ndarray:
    """Rows with the outliers that real activations have."""
    rng = np.random.default_rng([seed, t, k])
    x = rng.standard_t(4, (t, k))
    x[:, :: max(1, k // 3)] *= 8
    return x.astype(np.float32)


def error(y: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(y - exact) / np.linalg.norm(exact))


def widths(name: str) -> list[int]:
    return (
        [256, 768] if group(name) == 256 else [32, 96, 576] if group(name) == 32 else [1, 33, 200]
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", TYPES)
def test_products_match_float64(name: str, isa: str) -> None:
    for k in widths(name):
        handle, w = weights(name, 37, k)
        for t in (1, 5, 11):
            x = np.random.default_rng([t, k]).normal(size=(t, k)).astype(np.float32)
            exact = x.astype(np.float64) @ w.astype(np.float64).T
            y = _cpu.linear(handle, x, isa)
            assert y.shape == (t, 37)
            # One product of two bf16 has their full error; averages do not.
            assert error(y, exact) <= (GATE[name] if k > 1 else 1e-2)
            assert error(_cpu.linear(handle, x, isa, "fp32"), exact) <= 1e-5
            if name in QUANTISED:
                assert error(_cpu.linear(handle, x, isa, "pairs"), exact) <= 6e-5
                assert error(_cpu.linear(handle, x, isa, "bf16"), exact) <= 4e-3


@pytest.mark.parametrize("act", ["int8", "mixed", "pairs"])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", QUANTISED)
def test_products_of_the_quantised_activations_are_exact(name: str, isa: str, act: str) -> None:
    k = max(group(name) * 2, 576 // group(name) * group(name))
    handle, w = weights(name, 48, k)
    x = tokens(9, k)
    q, d, _ = _cpu.quantise(x, isa, act)
    exact = (q * np.repeat(d, 32, axis=1).astype(np.float64)) @ w.astype(np.float64).T
    assert error(_cpu.linear(handle, x, isa, act), exact) <= 1e-5


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", QUANTISED)
def test_in_bf16_only_the_activations_are_rounded(name: str, isa: str) -> None:
    k = max(group(name) * 2, 576 // group(name) * group(name))
    handle, w = weights(name, 48, k)
    # Values of one sign: what the integers' constant adds is many times their products.
    for x in (tokens(9, k), np.abs(tokens(9, k))):
        # Half of the bits dropped, and its carry, by integers: ties go to even.
        bits = x.view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).view(np.float32)
        exact = rounded.astype(np.float64) @ w.astype(np.float64).T
        assert error(_cpu.linear(handle, x, isa, "bf16"), exact) <= 1e-5


def scales(least: np.ndarray) -> np.ndarray:
    """The least numbers of four significant bits that are no less; 1 where there is nothing."""
    mantissa, exponent = np.frexp(np.where(least < 1e-30, 1, least).astype(np.float64))
    return np.ldexp(np.ceil(mantissa * 16 - 1e-5), exponent - 4).astype(np.float32)


@pytest.mark.parametrize("isa", ISAS)
def test_quantising_rounds_to_nearest_of_the_largest(isa: str) -> None:
    x = tokens(7, 160)
    x[2, :32] = 0
    x[3, 32:64] = 1e-38
    q, d, wide = _cpu.quantise(x, isa)
    blocks = x.reshape(7, 5, 32)
    amax = np.abs(blocks).max(axis=2)
    assert (d == scales(amax / 127)).all()
    assert np.abs(q.reshape(7, 5, 32) - blocks / d[..., None]).max() <= 0.5001
    assert np.abs(q).max() == 127
    assert not wide.any()
    assert all((_cpu.quantise(x, other)[0] == q).all() for other in ISAS)


@pytest.mark.parametrize("isa", ISAS)
def test_pairs_have_256_times_the_steps(isa: str) -> None:
    x = tokens(7, 160)
    q, d, wide = _cpu.quantise(x, isa, "pairs")
    blocks = x.reshape(7, 5, 32)
    assert (d == scales(np.abs(blocks).max(axis=2) / 127 / 256)).all()
    # Numbers as large as 32,512 meet a float's rounding before their own.
    assert np.abs(q.reshape(7, 5, 32) - blocks / d[..., None]).max() <= 0.505
    assert (wide == 255).all()
    assert all((_cpu.quantise(x, other, "pairs")[0] == q).all() for other in ISAS)


@pytest.mark.parametrize("isa", ISAS)
def test_outliers_have_two_bytes_and_do_not_cost_the_others_theirs(isa: str) -> None:
    x = tokens(40, 160)
    x[3, :32] = 0
    x[4, 8] = 1e30  # the rest of this block is as nothing to it
    q, d, wide = _cpu.quantise(x, isa, "mixed")
    quads = np.abs(x.reshape(40, 5, 8, 4)).max(axis=3)
    limit = 2.5 * np.minimum(quads[..., :4], quads[..., 4:]).max(axis=2)
    outside = quads > limit[..., None]
    assert (wide == (outside << np.arange(8)).sum(axis=2)).all()
    assert 0.02 < outside.mean() < 0.5
    body = np.where(outside, 0, quads).max(axis=2)
    assert (d == scales(np.maximum(body / 127, quads.max(axis=2) / 32512))).all()
    numbers = q.reshape(40, 5, 8, 4)
    assert np.abs(numbers[~outside]).max() == 127
    assert 127 < np.abs(numbers[outside]).max() <= 32513
    exact = x.reshape(40, 5, 32) / d[..., None]
    assert np.abs(q.reshape(40, 5, 32) - exact).max() <= 0.505
    assert all((_cpu.quantise(x, other, "mixed")[0] == q).all() for other in ISAS)


@pytest.mark.parametrize("act", ["int8", "mixed", "pairs"])
@pytest.mark.parametrize("isa", ISAS)
def test_a_block_is_quantised_alike_in_any_company(isa: str, act: str) -> None:
    x = tokens(37, 100)  # the last block has four values
    x[3, 5], x[4, 40], x[7, 70], x[20, 99] = np.nan, np.inf, -1e31, np.nan
    x[5, :32] = 0
    x[6, :32] = 1e-30
    q, d, wide = _cpu.quantise(x, isa, act)
    for r in range(37):
        for a, b in zip((q, d, wide), _cpu.quantise(x[r : r + 1], isa, act), strict=True):
            assert (a[r].view(np.int32) == b[0].view(np.int32)).all()
    poisoned = np.argwhere(np.isnan(d))
    assert poisoned.tolist() == [[3, 0], [4, 1], [7, 2], [20, 3]]
    assert not any(q[r, 32 * b : 32 * b + 32].any() for r, b in poisoned)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", TYPES)
def test_a_row_has_the_same_bits_in_any_company(name: str, isa: str, act: str) -> None:
    k = 256 if group(name) == 256 else 96
    handle, _ = weights(name, 90, k)
    x = tokens(70, k)
    alone = np.concatenate([_cpu.linear(handle, x[i : i + 1], isa, act) for i in range(70)])
    for t in (2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 23, 31, 40, 70):
        assert (_cpu.linear(handle, x[:t], isa, act) == alone[:t]).all()
    for part in ((0, 1, 0, 40), (1, 6, 3, 21), (2, 5, 7, 8), (5, 6, 9, 70), (0, 2, 16, 60)):
        p0, p1, r0, r1 = part
        y = _cpu.linear(handle, x, isa, act, part)
        assert (y == alone[r0:r1, p0 * 16 : p1 * 16]).all()


@pytest.mark.skipif("amx" not in ISAS, reason="this processor has no matrix tiles")
@pytest.mark.parametrize("act", ["int8", "mixed", "pairs"])
@pytest.mark.parametrize("name", QUANTISED)
def test_tiles_give_the_bits_of_vectors(name: str, act: str) -> None:
    # 47 rows are the vectors', 48 the tiles'; and what is beyond whole tiles and pairs of panels.
    k = 768 if group(name) == 256 else 96
    handle, _ = weights(name, 90, k)
    for t in (47, 48, 61, 150):
        x = tokens(t, k)
        # As large as sums can be: each value at its form's end, of one sign.
        x[5] = 1e4
        x[6, ::2], x[6, 1::2] = 1.0, 127.0
        x[7] = 0
        x[8, 40] = np.nan
        for part in (None, (1, 6, 3, t - 2)):
            tiles = _cpu.linear(handle, x, "amx", act, part)
            vectors = _cpu.linear(handle, x, "avx512", act, part)
            assert np.array_equal(tiles, vectors, equal_nan=True)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", TYPES)
def test_a_poisoned_row_poisons_itself_alone(name: str, isa: str, act: str) -> None:
    k = 512
    handle, _ = weights(name, 20, k)
    x = tokens(9, k)
    clean = _cpu.linear(handle, x, isa, act)
    for bad in (np.nan, np.inf, -np.inf):
        x[4, 77] = bad
        y = _cpu.linear(handle, x, isa, act)
        others = [i for i in range(9) if i != 4]
        assert (y[others] == clean[others]).all()
        assert not np.isfinite(y[4]).any()


@pytest.mark.parametrize("name", QUANTISED)
def test_a_scale_that_is_no_number_is_refused(name: str) -> None:
    k = 2 * group(name)
    least = {"Q4_1": 2, "Q5_1": 2, "Q4_K": 2, "Q5_K": 2}.get(name, 1)
    for bad in (np.inf, -np.inf, np.nan):
        for which in range(least):
            data = random_rows(name, 5, k, 4).reshape(5, 2, -1)
            at = (208 if name == "Q6_K" else 0) + 2 * which
            data[3, 1, at : at + 2] = np.array([bad], np.float16).view(np.uint8)
            with pytest.raises(ValueError, match="row 3 has a scale that is no number"):
                _cpu.pack(NUMBER[name], data.reshape(-1), 5, k)


@pytest.mark.parametrize("act", ["int8", "mixed", "pairs"])
@pytest.mark.parametrize("name", QUANTISED)
def test_scales_at_the_ends_of_their_range(name: str, act: str) -> None:
    """Weights whose scale is 0 or the least there is, activations huge, tiny, zero or poisoned: in
    a tile of many rows the scales are multiplied by adding integers."""
    k = 2 * group(name)
    data = random_rows(name, 16, k, 4).reshape(16, k // group(name), -1)
    scale = slice(208, 210) if name == "Q6_K" else slice(0, 2)
    data[::2, :, scale] = np.array([0], np.float16).view(np.uint8)
    data[1::4, :, scale] = np.array([6e-8], np.float16).view(np.uint8)
    w = dequantised(name, data.reshape(16, -1)).astype(np.float64)
    handle = _cpu.pack(NUMBER[name], data.reshape(-1), 16, k)
    x = tokens(48, k)
    for row, factor in enumerate((0, 1e-25, 1e-20, 1e-5, 1e5, 1e20, 1e28)):
        x[row] *= np.float32(factor)
    x[9, 5], x[20, 40], x[30, 7] = np.nan, np.inf, 1e31
    finite = [row for row in range(48) if row not in (9, 20, 30)]
    for isa in ISAS:
        alone = np.concatenate([_cpu.linear(handle, x[i : i + 1], isa, act) for i in range(48)])
        many = _cpu.linear(handle, x, isa, act)
        np.testing.assert_array_equal(many, alone)
        assert np.isnan(many[[9, 20, 30]]).all()
        exact = x[finite].astype(np.float64) @ w.T
        norms = np.linalg.norm(x[finite].astype(np.float64), axis=1, keepdims=True)
        bound = 0.03 * norms * np.linalg.norm(w, axis=1) + 1e-30
        assert (np.abs(many[finite] - exact) <= bound).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", TYPES)
def test_embeddings_are_the_rows_of_the_file(name: str, isa: str) -> None:
    for k in widths(name):
        handle, w = weights(name, 21, k)
        for i in (0, 7, 15, 16, 20):
            row = _cpu.embed_row(handle, i, 1.0, isa)[0]
            assert (row == w[i]).all()
            assert (_cpu.embed_row(handle, i, 2.5, isa)[0] == np.float32(2.5) * w[i]).all()


@pytest.mark.parametrize("name", QUANTISED)
def test_extreme_quants_do_not_saturate(name: str) -> None:
    # Every weight byte 0 or 255 against activations at +-127: the largest sums there are.
    k = group(name) * 2
    for fill in (0, 255):
        data = random_rows(name, 16, k, 3)
        blocks = data.reshape(16, k // group(name), -1)
        first = {"Q4_1": 4, "Q5_1": 4, "Q4_K": 4, "Q5_K": 4, "Q6_K": 0}.get(name, 2)
        last = 208 if name == "Q6_K" else None
        blocks[:, :, first:last] = fill
        w = dequantised(name, data).astype(np.float64)
        handle = _cpu.pack(NUMBER[name], data.reshape(-1), 16, k)
        x = np.full((3, k), 127, np.float32)
        x[1] = -127
        x[2, ::2] = -127
        for isa in ISAS:
            exact = x @ w.T
            np.testing.assert_allclose(_cpu.linear(handle, x, isa), exact, rtol=2e-5, atol=1e-2)
            pairs = _cpu.linear(handle, x * np.float32(0.999), isa, "pairs")
            np.testing.assert_allclose(pairs, exact * 0.999, rtol=1e-4, atol=1e-2)
            far = x * np.where(np.arange(k) % 32 < 16, 256, 1).astype(np.float32)
            mixed = _cpu.linear(handle, far, isa, "mixed")
            np.testing.assert_allclose(mixed, far @ w.T, rtol=2e-5, atol=1)
            halves = _cpu.linear(handle, x, isa, "bf16")
            np.testing.assert_allclose(halves, exact, rtol=2e-5, atol=1e-2)
