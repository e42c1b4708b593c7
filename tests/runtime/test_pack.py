"""Packing loses nothing, puts heads back in order and refuses what it cannot hold, by name."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.kernels import _cpu
from tests.runtime.blocks import NUMBER, QUANTISED, TYPES, group, random_rows


def packed(name: str, data: np.ndarray, rows: int, k: int, **options: int) -> object:
    return _cpu.pack(NUMBER[name], data.reshape(-1), rows, k, **options)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("rows", [1, 16, 53])
def test_unpacking_gives_the_files_bytes_back(name: str, rows: int) -> None:
    for k in (group(name) * 3, group(name) * 8):
        if name in ("F32", "F16", "BF16"):
            k += 31
        size = random_rows(name, rows, k, 0).shape[1]
        data = np.random.default_rng(k).integers(0, 256, (rows, size), dtype=np.uint8)
        if name in QUANTISED:  # any bytes but scales that are no number
            blocks = data.reshape(rows, k // group(name), -1)
            blocks[:, :, [209] if name == "Q6_K" else [1, 3]] &= 0xBF
        for threads in (1, 3):
            handle = packed(name, data, rows, k, threads=threads)
            assert (handle.n, handle.k, handle.panels) == (rows, k, -(-rows // 16))
            assert _cpu.unpack(handle) == data.tobytes()


@pytest.mark.parametrize("name", TYPES)
def test_interleaved_heads_come_back_in_halves(name: str) -> None:
    heads, dim, k = 3, 10, max(group(name), 32) * 2
    data = random_rows(name, heads * dim, k, 1)
    # llama.cpp's converter: reshape(heads, 2, dim / 2).swapaxes(1, 2). This is its inverse.
    order = np.arange(heads * dim).reshape(heads, dim // 2, 2).swapaxes(1, 2).reshape(-1)
    handle = packed(name, data, heads * dim, k, permute_heads=heads)
    assert _cpu.unpack(handle) == data[order].tobytes()


@pytest.mark.parametrize("name", QUANTISED)
def test_a_width_that_the_type_cannot_have_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        _cpu.pack(NUMBER[name], np.zeros(1 << 12, np.uint8), 1, group(name) + 16)


def test_wrong_sizes_types_and_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="need 18 bytes"):
        _cpu.pack(NUMBER["Q4_0"], np.zeros(19, np.uint8), 1, 32)
    with pytest.raises(ValueError, match="type 9 "):
        _cpu.pack(9, np.zeros(64, np.uint8), 1, 32)
    with pytest.raises(ValueError, match="heads"):
        _cpu.pack(NUMBER["F32"], np.zeros(24, np.uint8), 6, 1, permute_heads=2)
    with pytest.raises(ValueError):
        _cpu.pack(NUMBER["F32"], np.zeros(0, np.uint8), 0, 1)
    with pytest.raises(ValueError):
        _cpu.pack(NUMBER["F32"], np.zeros(0, np.uint8), 1, 0)


@pytest.mark.parametrize(
    ("name", "bits"),
    list(zip(TYPES, (32, 16, 16, 4.5, 5, 5.5, 6, 8.5, 4.625, 5.625, 6.5625), strict=True)),
)
def test_packed_weights_are_no_larger_than_stated(name: str, bits: float) -> None:
    k = 2048
    handle = packed(name, random_rows(name, 32, k, 2), 32, k)
    assert handle.nbytes == 32 * k * bits / 8
