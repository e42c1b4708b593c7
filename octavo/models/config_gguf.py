"""A model's shape from GGUF metadata.

Every key under the architecture's own prefix is either understood, known not to matter, or refused
by name: a key that we do not know may change the arithmetic. Meanings follow llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from octavo.errors import BadFile, UnsupportedModel
from octavo.models.config import MAX_LAYERS, MAX_SIZE, ModelConfig, Rope, shown
from octavo.models.gguf import GGUFFile, Value
from octavo.models.quants import decode

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
SCALINGS = ("none", "linear")

# Keys that say nothing about the arithmetic of the families above.
INERT = frozenset(
    {
        "tensor_data_layout",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
    }
)
# Keys that are harmless at exactly these values, and refused at any other.
NEUTRAL: dict[str, tuple[Value, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (1,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (1,),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (1,),
    "rope.scaling.attn_factor": (1,),
    "use_parallel_residual": (False,),
}


class _Keys:
    """Typed access to `{architecture}.*`, remembering what was asked for."""

    def __init__(self, gguf: GGUFFile) -> None:
        self.path = gguf.source.path
        self.metadata = gguf.metadata
        architecture = gguf.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise BadFile(f"{self.path}: general.architecture is missing")
        if architecture not in ARCHITECTURES:
            raise UnsupportedModel(
                f"{self.path}: architecture {architecture!r} (we run {', '.join(ARCHITECTURES)})"
            )
        self.architecture = architecture
        self.used: set[str] = set()

    def get(self, key: str) -> Value | None:
        self.used.add(key)
        return self.metadata.get(f"{self.architecture}.{key}")

    def wrong(self, key: str, value: object) -> BadFile:
        return BadFile(f"{self.path}: {self.architecture}.{key} cannot be {shown(value)}")

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise BadFile(f"{self.path}: {self.architecture}.{key} is missing")
            return default
        if type(value) is not int or not 0 < value < MAX_SIZE:
            raise self.wrong(key, value)
        return value

    def uniform_size(self, key: str, default: int | None = None) -> int:
        """A size that may be given per layer; we run models where all layers agree."""
        value = self.get(key)
        if not isinstance(value, np.ndarray):
            return self.size(key, default)
        if value.dtype.kind not in "iu" or not len(value) or not 0 < int(value[0]) < MAX_SIZE:
            raise self.wrong(key, value)
        if (value != value[0]).any():
            raise UnsupportedModel(f"{self.path}: {self.architecture}.{key} differs by layer")
        return int(value[0])

    def positive(self, key: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not 0 < value < math.inf:  # type: ignore[operator]
            raise self.wrong(key, value)
        return float(value)  # type: ignore[arg-type]

    def refuse_rest(self) -> None:
        """Raise on the first key that is neither used, nor inert, nor at its neutral value."""
        prefix = self.architecture + "."
        for full, value in self.metadata.items():
            key = full.removeprefix(prefix)
            if key == full or key in self.used or key in INERT:
                continue
            if isinstance(value, bool | int | float) and value in NEUTRAL.get(key, ()):
                continue
            raise UnsupportedModel(f"{self.path}: {full} = {shown(value)} is not supported")


def _factors(gguf: GGUFFile, head_dim: int) -> tuple[float, ...]:
    """rope_freqs.weight: Llama 3's bands, already worked out by the converter."""
    tensor = gguf.tensors.get("rope_freqs.weight")
    if tensor is None:
        return ()
    if tensor.shape != (head_dim // 2,) or tensor.type not in ("F32", "F16", "BF16"):
        raise BadFile(
            f"{gguf.source.path}: rope_freqs.weight is {tensor.type} {tensor.shape}, "
            f"not F32 ({head_dim // 2},)"
        )
    factors = decode(tensor.type, tensor.data)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise BadFile(f"{gguf.source.path}: rope_freqs.weight has values that are not positive")
    return tuple(factors.tolist())


def _rope(keys: _Keys, gguf: GGUFFile, head_dim: int) -> Rope:
    """The rope of layers that see the whole context."""
    base = keys.positive("rope.freq_base", 10000.0)
    for key in ("rope.dimension_count", "rope.dimension_count_swa"):
        if keys.size(key, head_dim) != head_dim:
            raise UnsupportedModel(
                f"{keys.path}: {keys.architecture}.{key} is not the head's {head_dim}: "
                "partial rotary embedding is not supported"
            )
    scaling = keys.get("rope.scaling.type")
    if scaling is not None and scaling not in SCALINGS:
        raise UnsupportedModel(
            f"{keys.path}: {keys.architecture}.rope.scaling.type = {shown(scaling)} "
            f"(we run {', '.join(SCALINGS)} and rope_freqs.weight)"
        )
    factor = keys.positive("rope.scaling.factor", keys.positive("rope.scale_linear", 1.0))
    linear = scaling != "none" and factor != 1.0
    factors = _factors(gguf, head_dim)
    if factors and linear:
        raise UnsupportedModel(f"{keys.path}: rope_freqs.weight together with a scaling factor")
    if factors:
        return Rope(base, "explicit", factors=factors)
    return Rope(base, "linear", factor) if linear else Rope(base)


def _local_layers(keys: _Keys, num_layers: int) -> Sequence[bool]:
    """Gemma 3: which layers slide. Without the key every sixth layer is global."""
    key = "attention.sliding_window_pattern"
    pattern = keys.get(key)
    if isinstance(pattern, np.ndarray) and pattern.dtype.kind in "biu":
        if len(pattern) != num_layers:
            raise keys.wrong(key, pattern)
        return [bool(local) for local in pattern]
    every = keys.size(key, 6)
    return [(layer + 1) % every != 0 for layer in range(num_layers)]


def _attention(
    keys: _Keys, rope: Rope, num_layers: int, max_context: int
) -> tuple[tuple[Rope, ...], tuple[int, ...], tuple[int | None, ...]]:
    """(ropes, rope_index, windows)."""
    window: int | None = None
    if keys.architecture in ("llama", "gemma3") and keys.get("attention.sliding_window") != 0:
        window = keys.size("attention.sliding_window", max_context)
        if window >= max_context:
            window = None
    if keys.architecture != "gemma3":
        return (rope,), (0,) * num_layers, (window,) * num_layers
    if keys.get("attention.sliding_window") in (None, 0):
        return (rope,), (0,) * num_layers, (None,) * num_layers
    local = _local_layers(keys, num_layers)
    ropes = (rope, Rope(keys.positive("rope.freq_base_swa", 10000.0)))
    return ropes, tuple(map(int, local)), tuple(window if slides else None for slides in local)


def _attn_scale(keys: _Keys, num_layers: int, hidden: int, num_heads: int, head_dim: int) -> float:
    """1/sqrt(head_dim), but for Gemma 3 27B (62 layers), whose file does not say otherwise."""
    if keys.architecture == "gemma3" and num_layers == 62:
        head_dim = hidden // num_heads
    return keys.positive("attention.scale", 1 / math.sqrt(head_dim))


def config_from_gguf(gguf: GGUFFile) -> ModelConfig:
    """The shape of the model in a GGUF file. Raises BadFile, UnsupportedModel."""
    keys = _Keys(gguf)
    gemma = keys.architecture == "gemma3"
    embed = gguf.tensors.get("token_embd.weight")
    if embed is None or len(embed.shape) != 2:
        raise BadFile(f"{keys.path}: token_embd.weight is missing or not a matrix")
    num_layers = keys.size("block_count")
    if num_layers > min(MAX_LAYERS, len(gguf.tensors)):
        raise keys.wrong("block_count", num_layers)
    hidden = keys.size("embedding_length")
    num_heads = keys.uniform_size("attention.head_count")
    head_dim = keys.size("attention.key_length", max(1, hidden // num_heads))
    if keys.size("attention.value_length", max(1, hidden // num_heads)) != head_dim:
        raise UnsupportedModel(f"{keys.path}: keys and values of different lengths")
    if keys.size("vocab_size", embed.shape[0]) != embed.shape[0]:
        raise keys.wrong("vocab_size", keys.get("vocab_size"))
    max_context = keys.size("context_length")
    rope = _rope(keys, gguf, head_dim)
    ropes, rope_index, windows = _attention(keys, rope, num_layers, max_context)
    config = ModelConfig(
        architecture=keys.architecture,
        vocab_size=embed.shape[0],
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=keys.uniform_size("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=keys.uniform_size("feed_forward_length"),
        max_context=max_context,
        norm_eps=keys.positive("attention.layer_norm_rms_epsilon"),
        ropes=ropes,
        rope_index=rope_index,
        windows=windows,
        attn_scale=_attn_scale(keys, num_layers, hidden, num_heads, head_dim),
        embed_scale=math.sqrt(hidden) if gemma else 1.0,
        act="gelu_tanh" if gemma else "silu",
        qkv_bias="blk.0.attn_q.bias" in gguf.tensors,
        qk_norm=keys.architecture in ("qwen3", "gemma3"),
        post_norms=gemma,
        tied_head="output.weight" not in gguf.tensors,
    )
    keys.refuse_rest()
    return config
