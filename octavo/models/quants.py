"""Tensor types: their layout in a file, and what their bytes mean as float32.

The layouts are those of ggml (ggml-common.h). Dequantizers are plain numpy, for vectors, tests and
references; the kernels read packed forms of the same bytes. Blocks never cross a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# ggml's numbers, including types that we can only name in an error.
GGML_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}


def _half(blocks: Bytes) -> Floats:
    """[..., 2] bytes to [..., 1] float32: one fp16 scale."""
    return np.ascontiguousarray(blocks).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[..., n] bytes to [..., 2n]: all low nibbles, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """[B, 4] bytes to [B, 32] of 0 or 16: the fifth bit of each weight, little-endian."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << np.uint8(4)


def _f32(b: Bytes) -> Floats:
    return b.view(np.float32)


def _f16(b: Bytes) -> Floats:
    return b.view(np.float16).astype(np.float32)


def _bf16(b: Bytes) -> Floats:
    return (b.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _q4_0(b: Bytes) -> Floats:
    return _half(b[:, :2]) * (_nibbles(b[:, 2:]).astype(np.float32) - 8)


def _q4_1(b: Bytes) -> Floats:
    return _half(b[:, :2]) * _nibbles(b[:, 4:]).astype(np.float32) + _half(b[:, 2:4])


def _q5_0(b: Bytes) -> Floats:
    codes = _nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6])
    return _half(b[:, :2]) * (codes.astype(np.float32) - 16)


def _q5_1(b: Bytes) -> Floats:
    codes = _nibbles(b[:, 8:]) | _fifth_bits(b[:, 4:8])
    return _half(b[:, :2]) * codes.astype(np.float32) + _half(b[:, 2:4])


def _q8_0(b: Bytes) -> Floats:
    return _half(b[:, :2]) * np.ascontiguousarray(b[:, 2:]).view(np.int8).astype(np.float32)


def _k_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """[B, 12] bytes to scales and minima, [B, 8] each of 6 bits (Q4_K, Q5_K)."""
    low, mid, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=-1)
    minima = np.concatenate([mid & 63, (high >> 4) | ((mid >> 6) << 4)], axis=-1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _k_affine(b: Bytes, codes: Bytes) -> Floats:
    """d * scale * code - dmin * minimum, over eight groups of 32."""
    scales, minima = _k_scales(b[:, 4:16])
    step, base = _half(b[:, :2]) * scales, _half(b[:, 2:4]) * minima
    return step[:, :, None] * codes.astype(np.float32) - base[:, :, None]


def _k_nibbles(packed: Bytes) -> Bytes:
    """[B, 128] to [B, 8, 32]: each 32 bytes hold two groups, low nibbles first."""
    chunks = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([chunks & 15, chunks >> 4], axis=2).reshape(-1, 8, 32)


def _q4_k(b: Bytes) -> Floats:
    return _k_affine(b, _k_nibbles(b[:, 16:]))


def _q5_k(b: Bytes) -> Floats:
    shifts = np.arange(8, dtype=np.uint8)[None, :, None]
    fifth = ((b[:, None, 16:48] >> shifts) & np.uint8(1)) << np.uint8(4)
    return _k_affine(b, _k_nibbles(b[:, 48:]) | fifth)


def _q6_k(b: Bytes) -> Floats:
    low = b[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[None, None, :, None]
    high = (b[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    codes = (low | (high << 4)).reshape(-1, 16, 16).astype(np.float32) - 32
    scales = np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.float32)
    step = _half(b[:, 208:]) * scales
    return step[:, :, None] * codes


@dataclass(frozen=True, slots=True)
class TensorType:
    """block weights are stored in num_bytes; `decode` turns [B, num_bytes] uint8 into float32."""

    block: int
    num_bytes: int
    decode: Callable[[Bytes], Floats]


TYPES = {
    "F32": TensorType(1, 4, _f32),
    "F16": TensorType(1, 2, _f16),
    "BF16": TensorType(1, 2, _bf16),
    "Q4_0": TensorType(32, 18, _q4_0),
    "Q4_1": TensorType(32, 20, _q4_1),
    "Q5_0": TensorType(32, 22, _q5_0),
    "Q5_1": TensorType(32, 24, _q5_1),
    "Q8_0": TensorType(32, 34, _q8_0),
    "Q4_K": TensorType(256, 144, _q4_k),
    "Q5_K": TensorType(256, 176, _q5_k),
    "Q6_K": TensorType(256, 210, _q6_k),
}


def decode(type_name: str, data: Bytes) -> Floats:
    """The weights of whole blocks, flat float32, in file order. Copies; never writes to `data`."""
    kind = TYPES[type_name]
    blocks = np.ascontiguousarray(data).reshape(-1, kind.num_bytes)
    return np.array(kind.decode(blocks), dtype=np.float32, copy=True).reshape(-1)
