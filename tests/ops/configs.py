"""One small ModelConfig of each kind that the decoder must serve."""

from dataclasses import replace

from octavo.models.config import ModelConfig, Rope

LLAMA = ModelConfig(
    architecture="llama", vocab_size=131, hidden_size=48, num_layers=3, num_heads=6,
    num_kv_heads=2, head_dim=16, intermediate_size=80, max_context=512, norm_eps=1e-5,
    ropes=(Rope(10000.0),), rope_index=(0,) * 3, windows=(None,) * 3, attn_scale=0.25,
)  # fmt: skip
QWEN2 = replace(LLAMA, architecture="qwen2", qkv_bias=True, tied_head=True)
QWEN3 = replace(LLAMA, architecture="qwen3", qk_norm=True)
MISTRAL = replace(LLAMA, architecture="mistral", windows=(7,) * 3)
GEMMA3 = replace(
    LLAMA, architecture="gemma3", num_layers=7, rope_index=(0, 0, 0, 0, 0, 1, 0),
    ropes=(Rope(10000.0), Rope(1e6)), windows=(7, 7, 7, 7, 7, None, 7), embed_scale=48**0.5,
    act="gelu_tanh", qk_norm=True, post_norms=True, tied_head=True,
)  # fmt: skip
SMOLLM2 = ModelConfig(
    architecture="llama", vocab_size=49152, hidden_size=576, num_layers=30, num_heads=9,
    num_kv_heads=3, head_dim=64, intermediate_size=1536, max_context=8192, norm_eps=1e-5,
    ropes=(Rope(100000.0),), rope_index=(0,) * 30, windows=(None,) * 30, attn_scale=0.125,
    tied_head=True,
)  # fmt: skip
FAMILIES = {cfg.architecture: cfg for cfg in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA3)}
