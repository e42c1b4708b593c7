"""Random weights in every file format, and what they mean according to the gguf package."""

from __future__ import annotations

import gguf
import numpy as np

TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
QUANTISED = TYPES[3:]
NUMBER = {name: int(gguf.GGMLQuantizationType[name]) for name in TYPES}

# Offset and size of a block's fp16 fields: scale, and the minimum that centres the weights on 0.
_HALVES = {
    "Q4_0": {0: 1.0},
    "Q4_1": {0: 1.0, 2: -7.5},
    "Q5_0": {0: 1.0},
    "Q5_1": {0: 1.0, 2: -15.5},
    "Q8_0": {0: 1.0},
    "Q4_K": {0: 1.0, 2: 7.5},
    "Q5_K": {0: 1.0, 2: 15.5},
    "Q6_K": {208: 1.0},
}


def group(name: str) -> int:
    """Elements of a block."""
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][0]


def random_rows(name: str, rows: int, k: int, seed: int) -> np.ndarray:
    """uint8 [rows, bytes of a row]: every bit pattern of the quants, finite scales of one size."""
    rng = np.random.default_rng([seed, NUMBER[name], rows, k])
    if name == "F32":
        return rng.normal(size=(rows, k)).astype(np.float32).view(np.uint8)
    if name == "F16":
        return rng.normal(size=(rows, k)).astype(np.float16).view(np.uint8)
    if name == "BF16":
        bits = rng.normal(size=(rows, k)).astype(np.float32).view(np.uint32)
        return (bits >> 16).astype(np.uint16).view(np.uint8)
    elements, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    data = rng.integers(0, 256, (rows, k // elements, width), dtype=np.uint8)
    for offset, size in _HALVES[name].items():
        scale = (rng.uniform(0.5, 1.5, (rows, k // elements, 1)) * 0.01 * size).astype(np.float16)
        data[:, :, offset : offset + 2] = scale.view(np.uint8)
    return data.reshape(rows, -1)


def dequantised(name: str, data: np.ndarray) -> np.ndarray:
    """float32 [rows, k] of the rows, by the gguf package."""
    return gguf.dequantize(data, gguf.GGMLQuantizationType[name]).astype(np.float32)
