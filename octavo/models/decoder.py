"""The dense decoder: Llama, Mistral, Qwen 2/2.5/3, Gemma 3 are this one function.

What differs between them is fields of `ModelConfig`. Values and weights are opaque: nothing here
looks at a number, a shape or a length, so the same lines are traced into a Program, run eagerly on
torch, and differentiated.
"""

from __future__ import annotations

from typing import TypeVar

from octavo.models.config import ModelConfig
from octavo.ops.table import Heads, Ops, Weights, WeightSpec

V = TypeVar("V")
W = TypeVar("W")


def forward(
    ops: Ops[V, W], w: Weights[W], cfg: ModelConfig, tokens: V, positions: V, stage: range
) -> V:
    """Run layers `stage`; range(cfg.num_layers) is the whole model.

    tokens, positions: i32 [T]. A stage that does not begin at layer 0 takes, in place of tokens,
    the hidden state f32 [T, hidden] that the stage before it returned. The last stage returns
    logits f32 [S, vocab], the others the hidden state.
    """
    x = ops.embed(tokens, w["embed"], scale=cfg.embed_scale) if stage.start == 0 else tokens
    for i in stage:
        x = layer(ops, w, cfg, i, x, positions)
    if stage.stop < cfg.num_layers:
        return x
    return ops.final_norm_head(x, w["final_norm"], w[head_name(cfg)], eps=cfg.norm_eps)


def layer(ops: Ops[V, W], w: Weights[W], cfg: ModelConfig, i: int, x: V, positions: V) -> V:
    """Layer i on the hidden state x, f32 [T, hidden]; returns the same shape, the last one only the
    wanted rows, [S, hidden]."""
    name, eps, heads = f"layers.{i}.", cfg.norm_eps, heads_of(cfg)
    qk, post = cfg.qk_norm, cfg.post_norms
    q = ops.norm_qkv(
        x, positions, w[name + "attn_norm"], w[name + "qkv"],
        bias=w[name + "qkv_bias"] if cfg.qkv_bias else None,
        q_norm=w[name + "q_norm"] if qk else None, k_norm=w[name + "k_norm"] if qk else None,
        layer=i, rope=cfg.ropes[cfg.rope_index[i]], eps=eps, heads=heads,
    )  # fmt: skip
    if i == cfg.num_layers - 1:  # all tokens have left their K and V: who is not wanted is done
        q, x = ops.select(q), ops.select(x)
    a = ops.attend(q, layer=i, scale=cfg.attn_scale, window=cfg.windows[i], heads=heads)
    post_norm = w[name + "attn_post_norm"] if post else None
    x = ops.out_residual(a, w[name + "o"], x, post_norm=post_norm, eps=eps)
    h = ops.norm_gate_up_act(x, w[name + "ffn_norm"], w[name + "gate_up"], act=cfg.act, eps=eps)
    post_norm = w[name + "ffn_post_norm"] if post else None
    return ops.down_residual(h, w[name + "down"], x, post_norm=post_norm, eps=eps)


def heads_of(cfg: ModelConfig) -> Heads:
    return Heads(cfg.num_heads, cfg.num_kv_heads, cfg.head_dim)


def head_name(cfg: ModelConfig) -> str:
    """The weight that the head multiplies: a tied head is the embedding itself, held once."""
    return "embed" if cfg.tied_head else "head"


def weight_specs(cfg: ModelConfig, stage: range | None = None) -> tuple[WeightSpec, ...]:
    """Every weight that `forward` over `stage` (None: the whole model) asks for, in its order."""
    layers = range(cfg.num_layers) if stage is None else stage
    last = layers.stop == cfg.num_layers
    hidden, specs = cfg.hidden_size, []
    if layers.start == 0 or (last and cfg.tied_head):
        specs.append(_spec("embed", "embedding", {"embed": cfg.vocab_size}, hidden))
    for i in layers:
        specs += _layer_specs(cfg, i)
    if last:
        specs.append(_spec("final_norm", "vector", {"final_norm": hidden}))
        if not cfg.tied_head:
            specs.append(_spec("head", "linear", {"head": cfg.vocab_size}, hidden))
    return tuple(specs)


def _layer_specs(cfg: ModelConfig, i: int) -> list[WeightSpec]:
    name, hidden, ffn = f"layers.{i}.", cfg.hidden_size, cfg.intermediate_size
    q, kv = cfg.q_size, cfg.kv_size
    qkv = {name + "q": q, name + "k": kv, name + "v": kv}
    bias = {part + "_bias": rows for part, rows in qkv.items()}

    def vector(short: str, size: int) -> WeightSpec:
        return _spec(name + short, "vector", {name + short: size})

    specs = [vector("attn_norm", hidden), _spec(name + "qkv", "linear", qkv, hidden)]
    if cfg.qkv_bias:
        specs.append(_spec(name + "qkv_bias", "vector", bias))
    if cfg.qk_norm:
        specs += [vector("q_norm", cfg.head_dim), vector("k_norm", cfg.head_dim)]
    specs.append(_spec(name + "o", "linear", {name + "o": hidden}, q))
    if cfg.post_norms:
        specs.append(vector("attn_post_norm", hidden))
    specs.append(vector("ffn_norm", hidden))
    gate_up = {name + "gate": ffn, name + "up": ffn}
    specs.append(_spec(name + "gate_up", "linear", gate_up, hidden))
    specs.append(_spec(name + "down", "linear", {name + "down": hidden}, ffn))
    if cfg.post_norms:
        specs.append(vector("ffn_post_norm", hidden))
    return specs


def _spec(name: str, kind: str, parts: dict[str, int], cols: int | None = None) -> WeightSpec:
    rows = tuple(parts.values())
    shape = (sum(rows),) if cols is None else (sum(rows), cols)
    return WeightSpec(name, kind, tuple(parts), shape, rows)
