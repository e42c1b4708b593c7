"""The definition of every op, in plain torch: the kernels' oracle and the training backend.

Everything is differentiable and out of place. A step is a pack of sequences, ragged, never padded:
serving, scoring and packed training are one layout and one `attend`. It aims at being read, not at
speed; it refuses nothing and quantises nothing. Needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.errors import EngineError
from octavo.models.config import ModelConfig, Rope
from octavo.models.decoder import forward, weight_specs
from octavo.models.weights import Checkpoint, dequantize
from octavo.ops.table import Heads, inv_freq


class Past(Protocol):
    """KV of earlier steps, by sequence and layer; k and v are [tokens, num_kv_heads, head_dim]."""

    def read(self, layer: int, sequence: int, end: int) -> tuple[Tensor, Tensor]:
        """k and v of positions 0 .. end-1."""
        ...

    def write(self, layer: int, sequence: int, start: int, k: Tensor, v: Tensor) -> None:
        """Keep k and v of positions from start on; they may replace what was there."""
        ...


@dataclass(frozen=True, slots=True)
class Pack:
    """The ragged batch of one step. Segment s owns rows cu_seqlens[s] .. cu_seqlens[s+1]-1.

    wanted: rows whose logits are wanted, None for all. parents: for each segment -1 or an earlier
    segment of this pack that it continues (prompt sharing: one prompt, many completions); its
    positions resume after the parent's. sequences: the name of each segment in the KV of earlier
    steps, if there is any; a segment then continues its sequence from its first position.
    """

    cu_seqlens: tuple[int, ...]
    wanted: tuple[int, ...] | None = None
    parents: tuple[int, ...] | None = None
    sequences: tuple[int, ...] = ()

    def lineage(self, segment: int) -> list[int]:
        """The segment's ancestors within the pack, oldest first, then itself."""
        line = [segment]
        while self.parents is not None and self.parents[line[0]] >= 0:
            line.insert(0, self.parents[line[0]])
        return line

    def rows(self, segment: int) -> slice:
        return slice(self.cu_seqlens[segment], self.cu_seqlens[segment + 1])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """NeoX rope on x [T, heads, head_dim]: pair (i, i + head_dim/2) turns by position * freq[i]."""
    freq = torch.tensor(inv_freq(rope, x.shape[-1]), dtype=torch.float64, device=x.device)
    angle = (positions.double()[:, None] * freq)[:, None, :]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def activation(name: str, x: Tensor) -> Tensor:
    """silu, or gelu in its tanh form."""
    return {"silu": F.silu, "gelu_tanh": lambda y: F.gelu(y, approximate="tanh")}[name](x)


def visible(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """The mask [queries, keys] from their positions: causal, and at most window positions back."""
    distance = queries[:, None] - keys[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """q [n, H, D] on k, v [m, Hkv, D] under the mask seen [n, m]; gives [n, H, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, v)


class ReferenceOps:
    """`Ops` on tensors, for one step over `pack`; past must be given if it names sequences."""

    def __init__(self, pack: Pack, past: Past | None = None) -> None:
        self.pack = pack
        self._past = past or _NoPast()
        self._positions = torch.empty(0)
        self._selected = torch.empty(0, dtype=torch.long)  # rows that are left of the step's
        self._kv: dict[int, tuple[Tensor, Tensor]] = {}

    def embed(self, tokens: Tensor, table: Tensor, *, scale: float) -> Tensor:
        return F.embedding(tokens.long(), table) * scale

    def norm_qkv(
        self, x: Tensor, positions: Tensor, norm: Tensor, qkv: Tensor, *,
        bias: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None,
        layer: int, rope: Rope, eps: float, heads: Heads,
    ) -> Tensor:  # fmt: skip
        fused = F.linear(rms_norm(x, norm, eps), qkv, bias)
        sizes = [heads.q_size, heads.kv_size, heads.kv_size]
        parts = torch.split(fused, sizes, -1)  # type: ignore[no-untyped-call]
        q, k, v = (part.reshape(len(x), -1, heads.head_dim) for part in parts)
        q = q if q_norm is None else rms_norm(q, q_norm, eps)
        k = k if k_norm is None else rms_norm(k, k_norm, eps)
        q, k = rotate(q, positions, rope), rotate(k, positions, rope)
        self._positions = positions
        self._selected = torch.arange(len(x), device=x.device)
        self._kv[layer] = (k, v)
        for segment, name in enumerate(self.pack.sequences):
            rows = self.pack.rows(segment)
            self._past.write(layer, name, int(positions[rows][0]), k[rows], v[rows])
        return q.flatten(-2)

    def attend(
        self, q: Tensor, *, layer: int, scale: float, window: int | None, heads: Heads
    ) -> Tensor:
        q = q.reshape(len(q), heads.num_heads, heads.head_dim)
        outputs, order = [], []
        for segment in range(len(self.pack.cu_seqlens) - 1):
            rows = self.pack.rows(segment)
            mine = (self._selected >= rows.start) & (self._selected < rows.stop)
            k, v, at = self._keys(layer, segment)
            seen = visible(self._positions[self._selected[mine]], at, window)
            outputs.append(attention(q[mine], k, v, seen, scale).flatten(-2))
            order.append(mine.nonzero().flatten())
        return torch.cat(outputs)[torch.cat(order).argsort()]

    def select(self, x: Tensor) -> Tensor:
        if self.pack.wanted is None:
            return x
        self._selected = torch.tensor(self.pack.wanted, dtype=torch.long, device=x.device)
        return x[self._selected]

    def _keys(self, layer: int, segment: int) -> tuple[Tensor, Tensor, Tensor]:
        """k, v and positions of all that the segment may look at, itself last."""
        pack, (k, v) = self.pack, self._kv[layer]
        line = [pack.rows(s) for s in pack.lineage(segment)]
        keys, values = [k[rows] for rows in line], [v[rows] for rows in line]
        positions = [self._positions[rows] for rows in line]
        if pack.sequences:
            start = int(positions[0][0])
            past_k, past_v = self._past.read(layer, pack.sequences[segment], start)
            keys, values = [past_k, *keys], [past_v, *values]
            positions = [torch.arange(start, device=k.device), *positions]
        return torch.cat(keys), torch.cat(values), torch.cat(positions)

    def out_residual(
        self, a: Tensor, o: Tensor, x: Tensor, *, post_norm: Tensor | None, eps: float
    ) -> Tensor:
        y = F.linear(a, o)
        return x + (y if post_norm is None else rms_norm(y, post_norm, eps))

    def norm_gate_up_act(
        self, x: Tensor, norm: Tensor, gate_up: Tensor, *, act: str, eps: float
    ) -> Tensor:
        gate, up = F.linear(rms_norm(x, norm, eps), gate_up).chunk(2, -1)
        return activation(act, gate) * up

    def down_residual(
        self, h: Tensor, down: Tensor, x: Tensor, *, post_norm: Tensor | None, eps: float
    ) -> Tensor:
        return self.out_residual(h, down, x, post_norm=post_norm, eps=eps)

    def final_norm_head(self, x: Tensor, norm: Tensor, head: Tensor, *, eps: float) -> Tensor:
        return F.linear(rms_norm(x, norm, eps), head)


class _NoPast:
    """Stands where no sequence is named, and so is never asked."""

    def read(self, layer: int, sequence: int, end: int) -> tuple[Tensor, Tensor]:
        raise EngineError(f"sequence {sequence} is named, but no past was given")

    def write(self, layer: int, sequence: int, start: int, k: Tensor, v: Tensor) -> None:
        self.read(layer, sequence, start)


class ContiguousPast:
    """KV of each sequence as one growing tensor."""

    def __init__(self, heads: Heads) -> None:
        self._empty = torch.empty(0, heads.num_kv_heads, heads.head_dim)
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def read(self, layer: int, sequence: int, end: int) -> tuple[Tensor, Tensor]:
        k, v = self._kept.get((layer, sequence), (self._empty, self._empty))
        return k[:end], v[:end]

    def write(self, layer: int, sequence: int, start: int, k: Tensor, v: Tensor) -> None:
        old_k, old_v = self.read(layer, sequence, start)
        self._kept[layer, sequence] = (torch.cat((old_k, k)), torch.cat((old_v, v)))


class PagedPast:
    """KV in blocks of block_size tokens; tables[sequence] lists its blocks. Not differentiable."""

    def __init__(self, cfg: ModelConfig, num_blocks: int, block_size: int = 32) -> None:
        shape = (cfg.num_layers, num_blocks * block_size, cfg.num_kv_heads, cfg.head_dim)
        # NaN, so that a slot read before it is written cannot pass unseen.
        self._k = torch.full(shape, float("nan"))
        self._v = torch.full(shape, float("nan"))
        self._block_size = block_size
        self.tables: dict[int, tuple[int, ...]] = {}

    def _slots(self, sequence: int, start: int, end: int) -> Tensor:
        size, table = self._block_size, self.tables[sequence]
        return torch.tensor([table[p // size] * size + p % size for p in range(start, end)]).long()

    def read(self, layer: int, sequence: int, end: int) -> tuple[Tensor, Tensor]:
        slots = self._slots(sequence, 0, end)
        return self._k[layer, slots], self._v[layer, slots]

    def write(self, layer: int, sequence: int, start: int, k: Tensor, v: Tensor) -> None:
        slots = self._slots(sequence, start, start + len(k))
        self._k[layer, slots], self._v[layer, slots] = k.detach(), v.detach()


def load(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Every weight of a checkpoint as the reference takes it: float32, parts stacked."""
    return {
        spec.name: torch.cat(
            [torch.from_numpy(dequantize(checkpoint.tensor(part))) for part in spec.parts]
        )
        for spec in weight_specs(checkpoint.config)
    }


def logits(
    weights: Mapping[str, Tensor], cfg: ModelConfig, ops: ReferenceOps, tokens: Tensor,
    positions: Tensor,
) -> Tensor:  # fmt: skip
    """Logits [S, vocab] of a step over the whole model; tokens and positions are [T]."""
    return forward(ops, weights, cfg, tokens, positions, range(cfg.num_layers))
