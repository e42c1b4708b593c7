"""Tiny random checkpoints of every family, made by transformers, and the ModelConfig of each.

The configs are written out twice on purpose: once for transformers, once for us, so that neither
reader nor decoder can be wrong unseen. Weights are drawn wide, so that logits are far from flat and
every norm, bias and scale matters; sizes are odd: head_dim is not hidden/heads, groups are uneven.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.models.config import ModelConfig, Rope

VOCAB = 199
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "attn_implementation": "eager",
}


@dataclass(frozen=True)
class Family:
    """class prefix in transformers, its config's fields, and our config's fields."""

    prefix: str
    theirs: dict[str, Any]
    ours: dict[str, Any]


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
GEMMA_LAYERS = ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"]
FAMILIES: dict[str, Family] = {
    "llama": Family(
        "Llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {},
    ),
    "llama-rope3": Family(
        "Llama",
        {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
        {"ropes": (Rope(10000.0, "llama3", 8.0, 1.0, 4.0, 64),), "tied_head": True},
    ),
    "llama-linear": Family(
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0}},
        {"ropes": (Rope(20000.0, "linear", 4.0),)},
    ),
    "mistral": Family(
        "Mistral",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_window": 11,
            "num_key_value_heads": 3,
        },
        {"windows": (11,) * 3, "num_kv_heads": 3},
    ),
    "qwen2": Family(
        "Qwen2",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
        },
        {
            "ropes": (Rope(1e6),), "norm_eps": 1e-6, "tied_head": True, "qkv_bias": True,
            "num_heads": 7, "num_kv_heads": 1,
        },
    ),
    "qwen3": Family(
        "Qwen3",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "rms_norm_eps": 1e-6,
            "head_dim": 16,
        },
        {
            "ropes": (Rope(1e6),), "norm_eps": 1e-6, "qk_norm": True, "head_dim": 16,
            "attn_scale": 0.25,
        },
    ),
    "gemma3": Family(
        "Gemma3",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
            "layer_types": GEMMA_LAYERS,
            "num_hidden_layers": 7,
            "sliding_window": 9,
            "query_pre_attn_scalar": 20,
            "rms_norm_eps": 1e-6,
            "hidden_activation": "gelu_pytorch_tanh",
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 64,
        },
        {
            "ropes": (Rope(10000.0), Rope(1e6, "linear", 8.0)), "num_layers": 7,
            "rope_index": (0,) * 5 + (1, 0), "windows": (9,) * 5 + (None, 9), "norm_eps": 1e-6,
            "attn_scale": 20**-0.5, "embed_scale": 96**0.5, "act": "gelu_tanh", "qk_norm": True,
            "post_norms": True, "tied_head": True, "num_heads": 4, "num_kv_heads": 1,
            "head_dim": 64,
        },
    ),
}  # fmt: skip


def config_of(name: str) -> ModelConfig:
    """What the checkpoint `name` means in our words."""
    ours = FAMILIES[name].ours
    num_layers = ours.get("num_layers", 3)
    fields: dict[str, Any] = {
        "architecture": name.split("-")[0],
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "num_layers": num_layers,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 32,
        "intermediate_size": 160,
        "max_context": 512,
        "norm_eps": 1e-5,
        "ropes": (Rope(10000.0),),
        "rope_index": (0,) * num_layers,
        "windows": (None,) * num_layers,
        "attn_scale": 32**-0.5,
    }
    return ModelConfig(**(fields | ours))


def make(name: str, folder: Path, *, seed: int = 0) -> Any:
    """Write the checkpoint to `folder` as a Hugging Face directory; return transformers' model.

    The model is float32, in eval mode, with eager attention.
    """
    import torch
    import transformers

    family = FAMILIES[name]
    config_class = getattr(
        transformers, "Gemma3TextConfig" if name == "gemma3" else f"{family.prefix}Config"
    )
    config = config_class(**(COMMON | family.theirs))
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family.prefix}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            # Norms around 1 (Gemma's are stored less 1), biases around 0, matrices of gain about 1.
            if "norm" in key:
                tensor.normal_(0.0 if name == "gemma3" else 1.0, 0.3)
            elif tensor.dim() == 1:
                tensor.normal_(0.0, 0.5)
            else:
                tensor.normal_(0.0, 1.5 * tensor.shape[1] ** -0.5)
    model.save_pretrained(folder)
    return model
