"""A small random checkpoint in memory, its matrices in all the file formats in turn."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from octavo.core.batch import Batch, Row, SampleSpec, Want
from octavo.core.request import SamplingParams
from octavo.models.config import ModelConfig, Rope
from octavo.models.weights import RawTensor, tensor_shapes
from octavo.ops.table import WEIGHT_BLOCKS
from octavo.runtime.cpu import CpuExecutor, CpuOptions
from tests.runtime.blocks import random_rows

TYPES = ("Q4_0", "Q8_0", "Q4_1", "Q6_K", "Q5_0", "BF16", "Q4_K", "Q5_1", "F16", "Q5_K")


def config(**changes) -> ModelConfig:
    """Three layers that use everything: bias, qk-norm, post-norms, a window, two ropes."""
    fields = {
        "architecture": "small", "vocab_size": 330, "hidden_size": 256, "num_layers": 3,
        "num_heads": 6, "num_kv_heads": 2, "head_dim": 64, "intermediate_size": 512,
        "max_context": 2048, "norm_eps": 1e-5, "ropes": (Rope(10000.0), Rope(500.0)),
        "rope_index": (0, 1, 0), "windows": (None, 40, None), "attn_scale": 0.125,
        "qkv_bias": True, "qk_norm": True, "post_norms": True, "tied_head": True,
    }  # fmt: skip
    return ModelConfig(**(fields | changes))


class SmallCheckpoint:
    """What CpuExecutor asks of a checkpoint. Weights are a function of the config alone."""

    def __init__(self, cfg: ModelConfig) -> None:
        self.config = cfg
        self.released: list[str] = []
        self._shapes = tensor_shapes(cfg)

    def names(self) -> tuple[str, ...]:
        return tuple(self._shapes)

    def release(self, name: str) -> None:
        self.released.append(name)

    def tensor(self, name: str) -> RawTensor:
        number = self.names().index(name)
        shape = self._shapes[name]
        if len(shape) == 1:
            rng = np.random.default_rng(number)
            mean = 0.0 if name.endswith("bias") else 1.0
            values = rng.normal(mean, 0.2, shape).astype(np.float32)
            return RawTensor(name, "F32", shape, values.view(np.uint8))
        kind = TYPES[number % len(TYPES)]
        if shape[1] % WEIGHT_BLOCKS[kind][0]:
            kind = "Q8_0"
        return RawTensor(name, kind, shape, random_rows(kind, *shape, seed=1).reshape(-1))


def executor(cfg: ModelConfig | None = None, **options) -> CpuExecutor:
    chosen = {"kv_bytes": 24 << 20, "max_tokens": 256, "max_rows": 16, "threads": 1} | options
    return CpuExecutor(SmallCheckpoint(cfg or config()), CpuOptions(**chosen))


def tokens(seed: int, count: int, vocab: int = 330) -> array[int]:
    return array("i", np.random.default_rng(seed).integers(0, vocab, count).tolist())


def row(seq: int, start: int, ids: array[int], wants: Iterable[int], table: array[int]) -> Row:
    """A row that samples greedily at the positions `wants`, counted from its first token."""
    params = SamplingParams(temperature=0, logprobs=3)
    outputs = tuple(Want(i, SampleSpec(params, 1, 0)) for i in wants)
    return Row(seq, start, ids, table, outputs)


def table(seq: int, blocks: int = 20) -> array[int]:
    """Blocks of up to three sequences, interleaved and falling."""
    return array("i", [3 * (blocks - j) + seq % 3 for j in range(blocks)])


def batch(*rows: Row, step: int = 0) -> Batch:
    return Batch(step, tuple(rows))
