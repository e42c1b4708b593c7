"""GGUF metadata: what each key means, and that no key is passed over in silence."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.errors import BadFile, UnsupportedModel
from octavo.models.config import ModelConfig, Rope
from octavo.models.config_gguf import config_from_gguf
from octavo.models.gguf import read_gguf
from tests.models import gguf_files as make


def config(tmp_path: Path, arch: str = "llama", **changes: Any) -> ModelConfig:
    """A small file's shape; changes are metadata, weights or drop."""
    return config_from_gguf(read_gguf(make.write(tmp_path / "x.gguf", arch, **changes)))


def test_llama_file_is_read_as_written(tmp_path: Path) -> None:
    assert config(tmp_path) == ModelConfig(
        architecture="llama", vocab_size=96, hidden_size=64, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=16, intermediate_size=96, max_context=256,
        norm_eps=float(np.float32(1e-5)), ropes=(Rope(50000.0),), rope_index=(0, 0),
        windows=(None, None), attn_scale=0.25, tied_head=True,
    )  # fmt: skip


def test_qwen_files_have_biases_or_query_norms(tmp_path: Path) -> None:
    qwen2, qwen3 = config(tmp_path, "qwen2"), config(tmp_path, "qwen3")
    assert (qwen2.qkv_bias, qwen2.qk_norm) == (True, False)
    assert (qwen3.qkv_bias, qwen3.qk_norm) == (False, True)


def test_linear_scaling_in_both_spellings(tmp_path: Path) -> None:
    for metadata in (
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scaling.factor": 4.0},
        {"llama.rope.scale_linear": 4.0},
    ):
        assert config(tmp_path, metadata=metadata).ropes == (Rope(50000.0, "linear", 4.0),)
    none = {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}
    assert config(tmp_path, metadata=none).ropes == (Rope(50000.0),)


def test_rope_freqs_become_explicit_factors(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    rope = config(tmp_path, weights={"rope_freqs.weight": factors}).ropes[0]
    assert (rope.scaling, rope.factors) == ("explicit", tuple(factors.tolist()))
    for bad in (factors[:4], factors - 1, factors * np.inf):
        with pytest.raises(BadFile, match="rope_freqs"):
            config(tmp_path, weights={"rope_freqs.weight": bad})
    both = {"llama.rope.scaling.factor": 4.0}
    with pytest.raises(UnsupportedModel, match="together with a scaling factor"):
        config(tmp_path, metadata=both, weights={"rope_freqs.weight": factors})


def test_gemma3_slides_in_five_of_six_layers(tmp_path: Path) -> None:
    window = {"gemma3.attention.sliding_window": 32}
    found = config(tmp_path, "gemma3", metadata=window)
    assert found.windows == (32, 32)
    assert [found.ropes[i].base for i in found.rope_index] == [10000.0, 10000.0]
    assert found.embed_scale == 8
    assert (found.act, found.qk_norm, found.post_norms) == ("gelu_tanh", True, True)
    every_second = window | {"gemma3.attention.sliding_window_pattern": 2}
    every_second |= {"gemma3.rope.freq_base_swa": 777.0, "gemma3.rope.scaling.factor": 8.0}
    found = config(tmp_path, "gemma3", metadata=every_second)
    assert found.windows == (32, None)
    assert [found.ropes[i] for i in found.rope_index] == [Rope(777.0), Rope(50000.0, "linear", 8.0)]
    listed = window | {"gemma3.attention.sliding_window_pattern": [False, True]}
    assert config(tmp_path, "gemma3", metadata=listed).windows == (None, 32)
    whole = config(tmp_path, "gemma3")
    assert (whole.windows, whole.rope_index) == ((None, None), (0, 0))


def test_window_as_long_as_the_context_is_no_window(tmp_path: Path) -> None:
    for window, expected in [(255, 255), (256, None), (9999, None), (0, None)]:
        metadata = {"llama.attention.sliding_window": window}
        assert config(tmp_path, metadata=metadata).windows == (expected, expected)


def test_attention_scale_may_be_said(tmp_path: Path) -> None:
    metadata = {"gemma3.attention.scale": 0.125}
    assert config(tmp_path, "gemma3", metadata=metadata).attn_scale == 0.125
    assert config(tmp_path, "gemma3").attn_scale == 1 / math.sqrt(16)


def test_per_layer_counts_must_agree(tmp_path: Path) -> None:
    same = {"llama.attention.head_count_kv": [2, 2]}
    assert config(tmp_path, metadata=same).num_kv_heads == 2
    differ = {"llama.attention.head_count_kv": [2, 4]}
    with pytest.raises(UnsupportedModel, match="head_count_kv differs by layer"):
        config(tmp_path, metadata=differ)


REFUSED: dict[str, Any] = {
    "llama.attn_logit_softcapping": 50.0,
    "llama.final_logit_softcapping": 30.0,
    "llama.expert_count": 8,
    "llama.attention.causal": False,
    "llama.attention.clamp_kqv": 8.0,
    "llama.logit_scale": 0.5,
    "llama.pooling_type": 1,
    "llama.rope.scaling.type": "yarn",
    "llama.rope.dimension_count": 8,
    "llama.attention.value_length": 8,
    "llama.tomorrows_key": 1,
    "llama.attention.sliding_window_pattern": 2,
}


@pytest.mark.parametrize("key", REFUSED)
def test_key_that_would_change_the_arithmetic_is_refused_by_name(key: str, tmp_path: Path) -> None:
    expected = "of different lengths" if "value_length" in key else key
    with pytest.raises(UnsupportedModel, match=expected):
        config(tmp_path, metadata={key: REFUSED[key]})


def test_qwen_window_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"qwen2\.attention\.sliding_window"):
        config(tmp_path, "qwen2", metadata={"qwen2.attention.sliding_window": 32})


def test_neutral_values_pass(tmp_path: Path) -> None:
    metadata = {
        "llama.expert_count": 0, "llama.attention.causal": True, "llama.rope.dimension_count": 16,
        "llama.final_logit_softcapping": 0.0, "llama.vocab_size": 96,
        "llama.tensor_data_layout": "Meta AI original pth", "general.anything": "x",
    }  # fmt: skip
    assert config(tmp_path, metadata=metadata) == config(tmp_path)


MALFORMED: dict[str, tuple[Any, ...]] = {
    "llama.block_count": (None, 0, 2**31, 5000, "2", True, -1.0),
    "llama.embedding_length": (None, 0, 2**32 - 1, 64.0),
    "llama.attention.head_count": (None, 0, [], [0, 0], ["4"], [0.5]),
    "llama.context_length": (None, 0),
    "llama.vocab_size": (97, 0),
    "llama.attention.layer_norm_rms_epsilon": (None, 0.0, -1.0, math.inf, math.nan, "x"),
    "llama.rope.freq_base": (0.0, math.nan, "x"),
    "llama.rope.scaling.factor": (0.0, -1.0, math.inf),
}


@pytest.mark.parametrize("key", MALFORMED)
def test_malformed_value_is_refused_by_name(key: str, tmp_path: Path) -> None:
    for value in MALFORMED[key]:
        with pytest.raises(BadFile, match=key):
            config(tmp_path, metadata={key: value})


def test_architecture_is_named(tmp_path: Path) -> None:
    path = make.write(tmp_path / "x.gguf")
    path.write_bytes(path.read_bytes().replace(make.text("llama"), make.text("mamba")))
    with pytest.raises(UnsupportedModel, match="'mamba'"):
        config_from_gguf(read_gguf(path))
    path.write_bytes(make.by_hand([], []))
    with pytest.raises(BadFile, match=r"general\.architecture"):
        config_from_gguf(read_gguf(path))
