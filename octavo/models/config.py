"""The shape of a model, in our words. Families differ only in these fields.

Readers (`from_gguf`, `from_hf`) live beside the files they read; an unknown architecture is an
error that names it, never a guess.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_SIZE = 1 << 31  # on every size; their products then stay below 2**63 in the kernels' int64
MAX_LAYERS = 4096  # a hostile file must not make us build long tuples


def shown(value: object) -> str:
    """A value from a file nobody vouches for, short enough for an error message."""
    try:
        text = "missing" if value is None else repr(value)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding (Su et al. 2021), NeoX pairing (i, i + dim/2), with optional scaling.

    scaling: "none", "linear" (divide positions by factor), "llama3" (Llama 3.1's frequency bands),
    "explicit" (inv_freq divided elementwise by `factors`, one per pair: GGUF's rope_freqs.weight).
    """

    base: float
    scaling: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense decoder. Linear weights are (out, in), stored by rows.

    windows: per layer, the sliding window in tokens (a token sees itself and window-1 before it) or
    None. rope_index: per layer, which of `ropes` it uses. attn_scale multiplies q·k. embed_scale
    multiplies embeddings. qk_norm: RMS norm over head_dim on q and k before rope. post_norms:
    RMS norm on the attention and feed-forward outputs before the residual sum (Gemma).
    act: "silu" or "gelu_tanh", applied to the gate.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_context: int
    norm_eps: float
    ropes: tuple[Rope, ...]
    rope_index: tuple[int, ...]
    windows: tuple[int | None, ...]
    attn_scale: float
    embed_scale: float = 1.0
    act: str = "silu"
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    tied_head: bool = False

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim
