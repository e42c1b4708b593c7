"""A model's shape from a Hugging Face config.json, of transformers 5 or older.

Defaults are those of transformers' configuration classes. Every field that changes the arithmetic
there is read or refused by name here; a field that transformers itself does not know for the model
type changes nothing there, and nothing here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import BadFile, UnsupportedModel
from octavo.models.config import MAX_LAYERS, MAX_SIZE, ModelConfig, Rope, shown

ACTS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

# Refused at any value but these: what they ask for is not in our decoder.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "add_cross_attention": (None, False),
    "attention_bias": (None, False),  # it also asks for a bias on the output projection
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "auto_map": (None,),
    "compression_config": (None,),
    "embedding_multiplier": (None, 1),
    "final_logit_softcapping": (None,),
    "is_causal": (None, True),
    "is_decoder": (None, True, False),
    "is_encoder_decoder": (None, False),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "mlp_bias": (None, False),
    "no_rope_layers": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "partial_rotary_factor": (None, 1),
    "per_layer_config": (None,),
    "quantization_config": (None,),
    "residual_multiplier": (None, 1),
    "rope_interleaved": (None, False),
    "use_bidirectional_attention": (None, False),
    "use_qk_norm": (None,),
}


@dataclass(frozen=True, slots=True)
class Family:
    """What a model type fixes, and the defaults of its configuration class (None: no default)."""

    architecture: str
    causal_lm: str
    max_context: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    act_field: str = "hidden_act"
    act: str = "silu"
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False


FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM", 2048),
    "mistral": Family("mistral", "MistralForCausalLM", 131072, 8),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", 32768, 32, qkv_bias=True),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", 32768, 32, 128, qk_norm=True),
    "gemma3_text": Family(
        "gemma3",
        "Gemma3ForCausalLM",
        131072,
        num_kv_heads=4,
        head_dim=256,
        act_field="hidden_activation",
        act="gelu_pytorch_tanh",
        tied=True,
        qk_norm=True,
    ),
}
ROPE_FIELDS = {
    "default": {"original_max_position_embeddings", "factor"},
    "linear": {"factor", "original_max_position_embeddings"},
    "llama3": {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
}


class _Fields:
    """Typed access to a JSON object; errors name the file and the field."""

    def __init__(self, path: Path, values: dict[str, Any], where: str = "") -> None:
        self.path = path
        self.values = values
        self.where = where

    def wrong(self, key: str) -> BadFile:
        value = self.values.get(key)
        return BadFile(f"{self.path}: {self.where}{key} cannot be {shown(value)}")

    def refuse(self, key: str, why: str = "is not supported") -> UnsupportedModel:
        value = shown(self.values.get(key))
        return UnsupportedModel(f"{self.path}: {self.where}{key} = {value} {why}")

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer; null and absent mean the default."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 0 < value < MAX_SIZE:
            raise self.wrong(key)
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if type(value) is int and 0 < value < MAX_SIZE:
            return float(value)
        if type(value) is not float or not 0 < value < math.inf:
            raise self.wrong(key)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if type(value) is not bool:
            raise self.wrong(key)
        return value

    def mapping(self, key: str) -> _Fields | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key)
        return _Fields(self.path, value, f"{self.where}{key}.")


def _rope(fields: _Fields, outer: _Fields, default_base: float) -> Rope:
    """One rope from its own parameters (`fields`) and the config around them."""
    kind = fields.values.get("rope_type", fields.values.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_FIELDS:
        key = "rope_type" if "rope_type" in fields.values else "type"
        raise fields.refuse(key, f"is not a rope that we run ({', '.join(ROPE_FIELDS)})")
    known = ROPE_FIELDS[kind] | {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    for key in sorted(fields.values.keys() - known):
        raise fields.refuse(key)
    if fields.values.get("partial_rotary_factor") not in (None, 1):
        raise fields.refuse("partial_rotary_factor")
    base = fields.positive("rope_theta", default_base)
    if kind == "default":
        return Rope(base)
    factor = fields.positive("factor")
    if kind == "linear":
        return Rope(base, "linear", factor)
    context = fields.size(
        "original_max_position_embeddings", outer.size("max_position_embeddings", 8192)
    )
    low, high = fields.positive("low_freq_factor"), fields.positive("high_freq_factor")
    if low >= high:
        raise fields.wrong("high_freq_factor")
    return Rope(
        base,
        "llama3",
        factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=outer.size("original_max_position_embeddings", context),
    )


def _ropes(fields: _Fields, *, gemma: bool) -> tuple[Rope, Rope]:
    """(rope of full layers, rope of sliding layers)."""
    empty = _Fields(fields.path, {}, "rope_parameters.")
    scaling = fields.mapping("rope_scaling")
    given = fields.mapping("rope_parameters") or empty
    if not gemma:
        chosen = scaling if scaling and scaling.values else given
        rope = _rope(chosen, fields, fields.positive("rope_theta", 10000.0))
        return rope, rope
    nested = given.values.keys() & {"full_attention", "sliding_attention"}
    if given.values and not nested:
        raise fields.refuse("rope_parameters", "has neither full_attention nor sliding_attention")
    for key in sorted(given.values.keys() - {"full_attention", "sliding_attention"}):
        raise given.refuse(key)
    full = given.mapping("full_attention") or empty
    if scaling:
        full = _Fields(fields.path, {**full.values, **scaling.values}, "rope_scaling.")
    sliding = given.mapping("sliding_attention") or empty
    return (
        _rope(full, fields, fields.positive("rope_theta", 1_000_000.0)),
        _rope(sliding, fields, fields.positive("rope_local_base_freq", 10000.0)),
    )


def _sliding_by_default(fields: _Fields, model_type: str, num_layers: int) -> list[bool]:
    """Which layers slide when layer_types does not say."""
    if model_type == "gemma3_text":
        key = "sliding_window_pattern"
        every = fields.size(key, fields.size("_" + key, 6))
        return [(layer + 1) % every != 0 for layer in range(num_layers)]
    if model_type == "mistral":
        return [fields.values.get("sliding_window", 4096) is not None] * num_layers
    if model_type in ("qwen2", "qwen3") and fields.flag("use_sliding_window", False):
        first = fields.values.get("max_window_layers", 28)
        if type(first) is not int or first < 0:
            raise fields.wrong("max_window_layers")
        has_window = fields.values.get("sliding_window", 4096) is not None
        return [has_window and layer >= first for layer in range(num_layers)]
    return [False] * num_layers


def _sliding(fields: _Fields, model_type: str, num_layers: int) -> list[bool]:
    by_default = _sliding_by_default(fields, model_type, num_layers)
    types = fields.values.get("layer_types")
    if types is None:
        return by_default
    if not isinstance(types, list) or len(types) != num_layers:
        raise fields.wrong("layer_types")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModel(f"{fields.path}: layer_types: {shown(kind)} is not supported")
    sliding = [kind == "sliding_attention" for kind in types]
    if model_type in ("llama", "mistral") and sliding != by_default:
        # transformers ignores layer_types for these types; whoever wrote them did not mean that.
        raise fields.refuse("layer_types", f"contradicts model_type {model_type}")
    if any(sliding) and model_type != "gemma3_text" and not any(by_default):
        use = fields.flag("use_sliding_window", False)
        raise fields.refuse("layer_types", f"contradicts use_sliding_window = {use}")
    return sliding


def _family(fields: _Fields) -> tuple[str, Family]:
    model_type = fields.values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        why = f"is not supported (we run {', '.join(FAMILIES)})"
        if model_type == "gemma3":
            why = "has a vision tower; we run its text-only form, gemma3_text"
        raise fields.refuse("model_type", why)
    family = FAMILIES[model_type]
    if fields.values.get("architectures") not in (None, [], [family.causal_lm]):
        raise fields.refuse("architectures", f"is not {family.causal_lm}")
    for key, allowed in NEUTRAL.items():
        if fields.values.get(key) not in allowed:
            raise fields.refuse(key)
    return model_type, family


def _act(fields: _Fields, family: Family) -> str:
    act = fields.values.get(family.act_field, family.act)
    if not isinstance(act, str) or act not in ACTS:
        raise fields.refuse(family.act_field, f"is not supported (we run {', '.join(ACTS)})")
    return ACTS[act]


def config_from_hf(path: Path, values: dict[str, Any]) -> ModelConfig:
    """The shape of the model that config.json (`values`, parsed) describes.

    `path` is for messages. Raises BadFile, UnsupportedModel.
    """
    fields = _Fields(path, values)
    model_type, family = _family(fields)
    gemma = family.architecture == "gemma3"
    hidden, num_layers = fields.size("hidden_size"), fields.size("num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise fields.wrong("num_hidden_layers")
    num_heads = fields.size("num_attention_heads")
    head_dim = fields.size("head_dim", family.head_dim or max(1, hidden // num_heads))
    max_context = fields.size("max_position_embeddings", family.max_context)
    sliding = _sliding(fields, model_type, num_layers)
    window: int | None = None
    if any(sliding):
        window = fields.size("sliding_window", None if "sliding_window" in values else 4096)
    if window is not None and window >= max_context:
        window = None
    full, local = _ropes(fields, gemma=gemma)
    scalar = fields.positive("query_pre_attn_scalar", 256.0) if gemma else float(head_dim)
    kv_heads = family.num_kv_heads if "num_key_value_heads" not in values else None
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.size("num_key_value_heads", kv_heads or num_heads),
        head_dim=head_dim,
        intermediate_size=fields.size("intermediate_size"),
        max_context=max_context,
        norm_eps=fields.positive("rms_norm_eps", 1e-6),
        ropes=(full, local) if gemma else (full,),
        rope_index=tuple(map(int, sliding)) if gemma else (0,) * num_layers,
        windows=tuple(window if slides else None for slides in sliding),
        attn_scale=1 / math.sqrt(scalar),
        # transformers rounds this to the weights' dtype (25.25 for bf16 and 640); the model was
        # trained so, but llama.cpp and float32 runs use the exact root, and so do we.
        embed_scale=math.sqrt(hidden) if gemma else 1.0,
        act=_act(fields, family),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        post_norms=gemma,
        tied_head=fields.flag("tie_word_embeddings", family.tied),
    )
