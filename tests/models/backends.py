"""Ways to get full logits out of each backend, in one form, for the tests.

A run takes steps; a step is a list of (sequence, start, tokens), mixed as the scheduler might; it
returns, for each sequence in order of its name, the float32 logits of all its positions.
"""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from octavo.core.batch import Batch, Row, Want
from octavo.models.config import ModelConfig
from octavo.models.weights import open_checkpoint
from octavo.ops import reference as ref

try:
    from octavo import kernels
    from octavo.runtime import cpu as runtime_cpu
except ImportError:  # the extension is not built
    runtime_cpu = None

Step = list[tuple[int, int, list[int]]]
Run = Callable[[list[Step]], list[np.ndarray]]


def _gather(pieces: dict[int, list[np.ndarray]]) -> list[np.ndarray]:
    return [np.concatenate(pieces[name]) for name in sorted(pieces)]


def _arrays(step: Step) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    tokens = [t for _, _, text in step for t in text]
    positions = [start + i for _, start, text in step for i in range(len(text))]
    cu = np.cumsum([0] + [len(text) for _, _, text in step])
    return torch.tensor(tokens), torch.tensor(positions), tuple(cu.tolist())


def reference(folder: Path, cfg: ModelConfig | None = None, *, block_size: int = 0) -> Run:
    """The reference ops; block_size 0 keeps contiguous KV, else pages of that size."""
    checkpoint = open_checkpoint(folder)
    shape = cfg or checkpoint.config
    weights = ref.load(checkpoint)

    def run(steps: list[Step]) -> list[np.ndarray]:
        past: ref.Past
        if block_size:
            past = ref.PagedPast(shape, 64 * 8, block_size)
            # Blocks of different sequences interleave, and none is where its number says.
            past.tables = {s: tuple(509 - 7 * j - s for j in range(72)) for s in range(7)}
        else:
            past = ref.ContiguousPast(ref.Heads(0, shape.num_kv_heads, shape.head_dim))
        pieces: dict[int, list[np.ndarray]] = {}
        for step in steps:
            tokens, positions, cu = _arrays(step)
            pack = ref.Pack(cu, sequences=tuple(name for name, _, _ in step))
            with torch.no_grad():
                out = ref.logits(weights, shape, ref.ReferenceOps(pack, past), tokens, positions)
            for (name, _, _), (a, b) in zip(step, itertools.pairwise(cu), strict=True):
                pieces.setdefault(name, []).append(out[a:b].numpy())
        return _gather(pieces)

    return run


def _row(name: int, start: int, text: list[int]) -> Row:
    """All logits wanted; blocks of different sequences interleave."""
    table = array("i", [31 - 6 * j - name for j in range(4)])
    wants = tuple(Want(i, target=0) for i in range(len(text)))
    return Row(name, start, array("i", text), table, wants)


def cpu(folder: Path, isa: str) -> Run:
    """The CPU backend with float32 activations and cache."""
    options = runtime_cpu.CpuOptions(threads=2, act="fp32", isa=isa, max_tokens=128, max_rows=8)
    executor = runtime_cpu.CpuExecutor(open_checkpoint(folder), options)

    def run(steps: list[Step]) -> list[np.ndarray]:
        pieces: dict[int, list[np.ndarray]] = {}
        for number, step in enumerate(steps):
            rows = tuple(_row(name, start, text) for name, start, text in step)
            out, at = executor.logits(Batch(number, rows)), 0
            for name, _, text in step:
                pieces.setdefault(name, []).append(out[at : at + len(text)])
                at += len(text)
        return _gather(pieces)

    return run


BACKENDS: dict[str, Callable[[Path], Run]] = {
    "reference": reference,
    "reference-paged": lambda folder: reference(folder, block_size=3),
}
if runtime_cpu is not None:
    BACKENDS |= {f"cpu-{isa}": functools.partial(cpu, isa=isa) for isa in kernels.isas()}
