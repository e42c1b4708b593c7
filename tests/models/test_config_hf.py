"""config.json: our shape is the one that transformers builds from the same file."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import BadFile, UnsupportedModel
from octavo.models.config import ModelConfig, Rope
from octavo.models.config_hf import FAMILIES, NEUTRAL, config_from_hf
from tests.models import tiny

CLASSES = {
    "llama": "LlamaConfig", "mistral": "MistralConfig", "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config", "gemma3_text": "Gemma3TextConfig",
}  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


def config(model_type: str = "llama", **changes: Any) -> ModelConfig:
    values = {"model_type": model_type} | SIZES | changes
    # Through JSON, so that a test cannot pass what a file cannot hold.
    return config_from_hf(Path("config.json"), json.loads(json.dumps(values)))


def layer_ropes(found: ModelConfig) -> list[Rope]:
    return [found.ropes[i] for i in found.rope_index]


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_directory_of_every_family_means_what_was_written_by_hand(
    name: str, tmp_path: Path
) -> None:
    family = tiny.FAMILIES[name]
    import transformers

    prefix = "Gemma3Text" if name == "gemma3" else family.prefix
    theirs = getattr(transformers, f"{prefix}Config")(**(tiny.COMMON | family.theirs))
    theirs.save_pretrained(tmp_path)
    ours = config_from_hf(tmp_path, json.loads((tmp_path / "config.json").read_text()))
    expected = tiny.config_of(name)
    assert layer_ropes(ours) == layer_ropes(expected)
    same = replace(ours, ropes=expected.ropes, rope_index=expected.rope_index)
    assert same == replace(
        expected, attn_scale=pytest.approx(expected.attn_scale), architecture=ours.architecture
    )


@pytest.mark.parametrize("model_type", CLASSES)
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    import transformers

    required = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    values = {key: SIZES[key] for key in required} | {"intermediate_size": 96}
    theirs = getattr(transformers, CLASSES[model_type])(**values)
    ours = config_from_hf(Path("x"), {"model_type": model_type} | values)
    head_dim = getattr(theirs, "head_dim", None) or 16
    assert (ours.head_dim, ours.num_kv_heads) == (head_dim, theirs.num_key_value_heads)
    assert (ours.max_context, ours.norm_eps) == (theirs.max_position_embeddings, 1e-6)
    assert ours.tied_head == theirs.tie_word_embeddings
    window = theirs.sliding_window if model_type in ("mistral", "gemma3_text") else None
    types = getattr(theirs, "layer_types", None) or ["sliding_attention" if window else "x"] * 7
    assert ours.windows == tuple(window if t == "sliding_attention" else None for t in types)
    ropes = theirs.rope_parameters
    for rope, kind in zip(layer_ropes(ours), types, strict=True):
        assert rope == Rope(ropes.get(kind, ropes)["rope_theta"])
    scalar = getattr(theirs, "query_pre_attn_scalar", head_dim)
    assert ours.attn_scale == 1 / math.sqrt(scalar)


# Fields of transformers' classes that change nothing in a forward pass on text, or only training.
IGNORED = set(
    "_name_or_path transformers_version architectures output_hidden_states return_dict dtype "
    "problem_type chunk_size_feed_forward id2label label2id output_attentions use_cache "
    "initializer_range pad_token_id bos_token_id eos_token_id pretraining_tp "
    "attention_dropout model_type".split()
)
READ = set(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads head_dim "
    "num_key_value_heads hidden_act hidden_activation max_position_embeddings rms_norm_eps "
    "tie_word_embeddings rope_parameters sliding_window use_sliding_window max_window_layers "
    "layer_types query_pre_attn_scalar _sliding_window_pattern".split()
)


@pytest.mark.parametrize("model_type", CLASSES)
def test_no_field_that_transformers_knows_is_passed_over(model_type: str) -> None:
    import transformers

    known = set(getattr(transformers, CLASSES[model_type])().to_dict())
    assert known - IGNORED - READ - NEUTRAL.keys() == set()


OLD_LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def test_older_rope_spellings() -> None:
    assert config(rope_theta=500000.0).ropes == (Rope(500000.0),)
    assert config(rope_theta=1000000).ropes == (Rope(1e6),)
    assert config(rope_theta=5e5, rope_scaling=OLD_LLAMA3).ropes == (
        Rope(5e5, "llama3", 32.0, 1.0, 4.0, 8192),
    )
    linear = {"type": "linear", "factor": 2.0}
    assert config(rope_scaling=linear).ropes == (Rope(10000.0, "linear", 2.0),)
    assert config(rope_scaling=None).ropes == (Rope(10000.0),)
    without = {k: v for k, v in OLD_LLAMA3.items() if not k.startswith("original")}
    assert config(rope_scaling=without).ropes[0].original_context == 256


def test_older_gemma_spellings() -> None:
    found = config(
        "gemma3_text", rope_theta=2e6, rope_local_base_freq=500.0, sliding_window=16,
        rope_scaling={"rope_type": "linear", "factor": 8.0}, sliding_window_pattern=3,
    )  # fmt: skip
    local, full = Rope(500.0), Rope(2e6, "linear", 8.0)
    assert layer_ropes(found) == [local, local, full] * 2 + [local]
    assert found.windows == (16, 16, None, 16, 16, None, 16)


def test_windows() -> None:
    assert config("mistral", sliding_window=None).windows == (None,) * 7
    assert config("mistral", sliding_window=16).windows == (16,) * 7
    assert config("mistral", sliding_window=256).windows == (None,) * 7
    off = {"sliding_window": 16, "max_window_layers": 3}
    assert config("qwen2", **off).windows == (None,) * 7
    on = config("qwen2", use_sliding_window=True, **off)
    assert on.windows == (None,) * 3 + (16,) * 4
    with pytest.raises(BadFile, match="sliding_window"):
        config("gemma3_text", sliding_window=None)
    with pytest.raises(BadFile, match="sliding_window"):
        config("mistral", sliding_window=0)


def test_layer_types_must_fit() -> None:
    full, slides = "full_attention", "sliding_attention"
    with pytest.raises(BadFile, match="layer_types"):
        config("gemma3_text", layer_types=[full])
    with pytest.raises(UnsupportedModel, match="chunked_attention"):
        config("gemma3_text", layer_types=["chunked_attention"] * 7)
    with pytest.raises(UnsupportedModel, match="layer_types"):
        config("mistral", sliding_window=16, layer_types=[full] * 7)
    with pytest.raises(UnsupportedModel, match="layer_types"):
        config("qwen2", layer_types=[slides] * 7)
    assert config("llama", layer_types=[full] * 7).windows == (None,) * 7


def test_nulls_mean_absent() -> None:
    found = config(head_dim=None, num_key_value_heads=None, rope_parameters=None)
    assert (found.head_dim, found.num_kv_heads) == (16, 4)


REFUSED: dict[str, Any] = {
    "attention_bias": True, "mlp_bias": True, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0, "use_bidirectional_attention": True, "num_experts": 8,
    "quantization_config": {"quant_method": "gptq"}, "auto_map": {"AutoModel": "x.Y"},
    "is_encoder_decoder": True, "partial_rotary_factor": 0.5, "no_rope_layers": [1],
    "hidden_act": "gelu", "architectures": ["LlamaForSequenceClassification"],
    "logits_scaling": 8.0, "rope_interleaved": True,
}  # fmt: skip


@pytest.mark.parametrize("key", REFUSED)
def test_field_that_would_change_the_arithmetic_is_refused_by_name(key: str) -> None:
    with pytest.raises(UnsupportedModel, match=key):
        config(**{key: REFUSED[key]})


ROPES: list[tuple[dict[str, Any], str]] = [
    ({"rope_type": "yarn", "factor": 4.0}, "rope_type = 'yarn'"),
    ({"type": "dynamic", "factor": 4.0}, "type = 'dynamic'"),
    ({"rope_type": "default", "mrope_section": [1, 2]}, "mrope_section"),
    ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"full_attention": {"rope_type": "default"}}, "full_attention"),
    ({"rope_type": ["linear"]}, "rope_type"),
]


@pytest.mark.parametrize(("rope", "reason"), ROPES)
def test_rope_that_we_do_not_run_is_named(rope: dict[str, Any], reason: str) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        with pytest.raises(UnsupportedModel, match=reason):
            config(**{key: rope})


def test_model_types_are_named() -> None:
    with pytest.raises(UnsupportedModel, match=r"'mixtral'.*we run llama"):
        config("mixtral")
    with pytest.raises(UnsupportedModel, match="vision"):
        config("gemma3")
    for missing in ({"model_type": None}, {"model_type": ["llama"]}):
        with pytest.raises(UnsupportedModel, match="model_type"):
            config_from_hf(Path("x"), SIZES | missing)
    assert set(FAMILIES) == set(CLASSES)


MALFORMED: dict[str, tuple[Any, ...]] = {
    "vocab_size": (None, 0, -1, True, "96", 1.5, 2**31, [96]),
    "num_hidden_layers": (None, 0, 2**30, 5000),
    "num_attention_heads": (None, 0),
    "head_dim": (0, "16"),
    "num_key_value_heads": (0, [2]),
    "rms_norm_eps": (0.0, -1e-5, "1e-5", math.nan, math.inf, True),
    "rope_theta": (0, -1.0, math.inf, "x", 10**400),
    "tie_word_embeddings": (None, 1, "true"),
    "rope_scaling": ([], "linear", 2),
}


@pytest.mark.parametrize("key", MALFORMED)
def test_malformed_field_is_refused_by_name(key: str) -> None:
    for value in MALFORMED[key]:
        with pytest.raises(BadFile, match=key):
            config(**{key: value})


def test_llama3_bands_must_be_in_order() -> None:
    for change in ({"high_freq_factor": 1.0}, {"factor": None}, {"low_freq_factor": -1}):
        with pytest.raises(BadFile, match="factor"):
            config(rope_scaling=OLD_LLAMA3 | change)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(sorted(READ)),
    lambda inner: (
        st.lists(inner, max_size=8)
        | st.dictionaries(st.sampled_from(["rope_type", "type", "factor", "rope_theta"]), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=400, derandomize=True, deadline=None, database=None)
@given(
    model_type=st.sampled_from(sorted(CLASSES)),
    changes=st.dictionaries(st.sampled_from(sorted(READ | NEUTRAL.keys())), VALUES, max_size=3),
)
def test_any_json_in_any_field_only_ever_refuses(model_type: str, changes: dict[str, Any]) -> None:
    try:
        found = config(model_type, **changes)
    except (BadFile, UnsupportedModel):
        return
    assert len(found.windows) == len(found.rope_index) == found.num_layers
    assert all(window is None or 0 < window < found.max_context for window in found.windows)


def test_deep_nesting_is_refused_like_anything_else() -> None:
    deep: Any = "x"
    for _ in range(50_000):
        deep = [deep]
    with pytest.raises((BadFile, UnsupportedModel), match="hidden_act"):
        config_from_hf(Path("x"), {"model_type": "llama"} | SIZES | {"hidden_act": deep})
