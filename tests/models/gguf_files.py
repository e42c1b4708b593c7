"""Small GGUF files: valid ones by the reference writer, by hand those it would not write."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

GB = struct.Struct("<Q").pack
U32 = struct.Struct("<I").pack


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return GB(len(raw)) + raw


def pair(key: str, code: int, value: bytes) -> bytes:
    return text(key) + U32(code) + value


def info(name: str, dims: tuple[int, ...], code: int, offset: int) -> bytes:
    return text(name) + U32(len(dims)) + b"".join(map(GB, dims)) + U32(code) + GB(offset)


def by_hand(
    pairs: list[bytes], infos: list[bytes], data: bytes = b"", version: int = 3, align: int = 32
) -> bytes:
    """A file with exactly these records; counts are right, all else is the caller's."""
    head = b"GGUF" + U32(version) + GB(len(infos)) + GB(len(pairs))
    head += b"".join(pairs) + b"".join(infos)
    return head + b"\0" * (-len(head) % align) + data


SIZES: dict[str, Any] = {
    "vocab": 96, "hidden": 64, "ffn": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "layers": 2
}  # fmt: skip


def tensors(arch: str, sizes: dict[str, Any] = SIZES) -> dict[str, tuple[int, ...]]:
    """Names and shapes of an architecture's tensors as llama.cpp lays them down."""
    hidden, ffn, dim = sizes["hidden"], sizes["ffn"], sizes["head_dim"]
    q, kv = sizes["heads"] * dim, sizes["kv_heads"] * dim
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (sizes["vocab"], hidden)}
    for i in range(sizes["layers"]):
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (hidden,), "attn_q.weight": (q, hidden),
            "attn_k.weight": (kv, hidden), "attn_v.weight": (kv, hidden),
            "attn_output.weight": (hidden, q), "ffn_norm.weight": (hidden,),
            "ffn_gate.weight": (ffn, hidden), "ffn_up.weight": (ffn, hidden),
            "ffn_down.weight": (hidden, ffn),
        }  # fmt: skip
        if arch == "qwen2":
            layer |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
        if arch in ("qwen3", "gemma3"):
            layer |= {"attn_q_norm.weight": (dim,), "attn_k_norm.weight": (dim,)}
        if arch == "gemma3":
            layer |= {"post_attention_norm.weight": (hidden,), "post_ffw_norm.weight": (hidden,)}
        found |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    found["output_norm.weight"] = (hidden,)
    return found


def keys(arch: str, sizes: dict[str, Any] = SIZES) -> dict[str, Any]:
    """The architecture's metadata, without its prefix."""
    found = {
        "block_count": sizes["layers"], "context_length": 256, "embedding_length": sizes["hidden"],
        "feed_forward_length": sizes["ffn"], "attention.head_count": sizes["heads"],
        "attention.head_count_kv": sizes["kv_heads"], "rope.freq_base": 50000.0,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    if sizes["heads"] * sizes["head_dim"] != sizes["hidden"] or arch in ("qwen3", "gemma3"):
        found |= {"attention.key_length": sizes["head_dim"]}
        found |= {"attention.value_length": sizes["head_dim"]}
    return found


def write(
    path: Path,
    arch: str = "llama",
    *,
    metadata: dict[str, Any] | None = None,
    weights: dict[str, np.ndarray] | None = None,
    drop: tuple[str, ...] = (),
    head_dim: int = 16,
) -> Path:
    """A small model by the reference writer. metadata: whole keys; None removes one."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)
    sizes = SIZES | {"head_dim": head_dim}
    values = {f"{arch}.{key}": value for key, value in keys(arch, sizes).items()} | (metadata or {})
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    drawn = {
        name: rng.standard_normal(shape, np.float32) for name, shape in tensors(arch, sizes).items()
    }
    for name, value in (drawn | (weights or {})).items():
        if name not in drop:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
