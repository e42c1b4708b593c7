"""Checkpoints: the same values as transformers and the gguf package find, under our names."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from octavo.errors import BadFile, UnsupportedModel
from octavo.models.quants import TYPES, decode
from octavo.models.weights import (
    HF_GEMMA_LAYER_NAMES,
    HF_LAYER_NAMES,
    HF_NAMES,
    Checkpoint,
    dequantize,
    open_checkpoint,
    tensor_shapes,
)
from tests.models import gguf_files as make

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")


@pytest.mark.parametrize("name", TYPES)
def test_dequantizers_agree_with_the_gguf_package_on_any_bytes(name: str) -> None:
    kind, number = TYPES[name], gguf.GGMLQuantizationType[name]
    assert gguf.GGML_QUANT_SIZES[number] == (kind.block, kind.num_bytes)
    data = np.random.default_rng(1).integers(0, 256, (3, 50 * kind.num_bytes), np.uint8)
    with np.errstate(all="ignore"):
        theirs = gguf.dequantize(data, number)
        ours = decode(name, data)
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours, theirs.reshape(-1))


def test_decoding_never_aliases_the_file() -> None:
    data = np.zeros(64, np.uint8)
    decode("F32", data)[:] = 1
    assert not data.any()


@pytest.fixture(scope="module", params=ARCHITECTURES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Checkpoint, Any, Path]:
    """(our reading of a small GGUF, transformers' model of the same file, its folder)."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    folder = tmp_path_factory.mktemp(request.param)
    tokens = {"tokenizer.ggml.tokens": [f"<{i}>" for i in range(96)]}
    # transformers does not read key_length of qwen3 files, and takes heads to be of 128.
    dim = 128 if request.param == "qwen3" else 16
    path = make.write(folder / "x.gguf", request.param, metadata=tokens, head_dim=dim)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=path.name, dtype=torch.float32
    )
    return open_checkpoint(path), model, folder


def theirs_named(checkpoint: Checkpoint, name: str) -> str:
    if name in HF_NAMES:
        return HF_NAMES[name]
    _, layer, part = name.split(".")
    names = HF_GEMMA_LAYER_NAMES if checkpoint.config.post_norms else HF_LAYER_NAMES
    return f"model.layers.{layer}.{names[part]}"


def test_gguf_means_what_transformers_reads_in_it(pair: tuple[Checkpoint, Any, Path]) -> None:
    checkpoint, model, _ = pair
    state = model.state_dict()
    for name in checkpoint.names():
        # transformers takes Gemma's 1 out of the norms again.
        one = checkpoint.config.post_norms and name.endswith("norm")
        theirs = state[theirs_named(checkpoint, name)].numpy() + np.float32(one)
        np.testing.assert_allclose(dequantize(checkpoint.tensor(name)), theirs, atol=1e-6)
    used = {theirs_named(checkpoint, name) for name in checkpoint.names()}
    assert state.keys() - used == {"lm_head.weight"}
    assert checkpoint.config.tied_head


def test_directory_and_gguf_of_one_model_agree(pair: tuple[Checkpoint, Any, Path]) -> None:
    ours, model, folder = pair
    del model.config.quantization_config
    plain = type(model)(model.config)  # the one that was read from GGUF refuses to be saved
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder / "hf")
    other = open_checkpoint(folder / "hf")
    assert set(other.names()) == set(ours.names())
    for name in ours.names():
        np.testing.assert_allclose(
            dequantize(other.tensor(name)), dequantize(ours.tensor(name)), atol=1e-6
        )
    # What a GGUF file of Gemma 3 cannot say: query_pre_attn_scalar; and what ours did not.
    same = replace(other.config, attn_scale=ours.config.attn_scale, windows=ours.config.windows)
    if ours.config.architecture == "gemma3":
        same = replace(same, ropes=ours.config.ropes, rope_index=ours.config.rope_index)
    assert same == ours.config
    assert (other.metadata, other.directory) == (None, folder / "hf")
    assert ours.metadata is not None
    assert ours.directory is None


def test_only_llama_files_need_their_heads_unwoven(pair: tuple[Checkpoint, Any, Path]) -> None:
    checkpoint, _, _ = pair
    permuted = {name: checkpoint.tensor(name).permute_heads for name in checkpoint.names()}
    woven = {name: n for name, n in permuted.items() if n}
    expected = {"layers.0.q": 4, "layers.0.k": 2, "layers.1.q": 4, "layers.1.k": 2}
    assert woven == (expected if checkpoint.config.architecture == "llama" else {})


def test_biases_of_llama_files_are_unwoven_too(tmp_path: Path) -> None:
    sizes = {"q": 64, "k": 32, "v": 32}
    biases = {
        f"blk.{i}.attn_{part}.bias": np.arange(n, dtype=np.float32)
        for i in range(2)
        for part, n in sizes.items()
    }
    checkpoint = open_checkpoint(make.write(tmp_path / "x.gguf", weights=biases))
    assert checkpoint.config.qkv_bias
    halves = [*range(0, 16, 2), *range(1, 16, 2)]  # of one head
    bias = dequantize(checkpoint.tensor("layers.1.k_bias"))
    assert bias.tolist() == halves + [16 + i for i in halves]
    assert dequantize(checkpoint.tensor("layers.1.v_bias")).tolist() == list(range(32))


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    tied = open_checkpoint(make.write(tmp_path / "tied.gguf"))
    assert tied.config.tied_head
    assert "head" not in tied.names()
    assert tied.tensor("head").data.tobytes() == tied.tensor("embed").data.tobytes()
    head = {"output.weight": np.ones((96, 64), np.float32)}
    free = open_checkpoint(make.write(tmp_path / "free.gguf", weights=head))
    assert not free.config.tied_head
    assert dequantize(free.tensor("head")).min() == 1


def test_names_and_shapes_are_the_configs(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make.write(tmp_path / "x.gguf", "gemma3"))
    shapes = tensor_shapes(checkpoint.config)
    assert checkpoint.names() == tuple(shapes)
    assert all(checkpoint.tensor(name).shape == shape for name, shape in shapes.items())
    with pytest.raises(KeyError):
        checkpoint.tensor("layers.2.q")


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    path = make.write(tmp_path / "x.gguf", drop=("blk.1.ffn_up.weight",))
    with pytest.raises(BadFile, match=r"'blk.1.ffn_up.weight' is missing"):
        open_checkpoint(path)
    wrong = {"blk.0.attn_k.weight": np.zeros((64, 64), np.float32)}
    with pytest.raises(BadFile, match=r"'blk.0.attn_k.weight' is \(64, 64\), should be \(32, 64\)"):
        open_checkpoint(make.write(tmp_path / "x.gguf", weights=wrong))


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_inp.weight", "blk.1.attn_output.bias", "blk.2.x"])
def test_tensor_that_we_would_not_use_is_named(name: str, tmp_path: Path) -> None:
    extra = {name: np.zeros(64, np.float32)}
    with pytest.raises(UnsupportedModel, match=name):
        open_checkpoint(make.write(tmp_path / "x.gguf", weights=extra))


def test_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    first = open_checkpoint(make.write(tmp_path / "a.gguf")).fingerprint
    assert len(bytes.fromhex(first)) == 32
    assert open_checkpoint(make.write(tmp_path / "b.gguf")).fingerprint == first
    code = (
        "import sys;from octavo.models.weights import open_checkpoint as o;from pathlib import Path"
    )
    code += ";print(o(Path(sys.argv[1])).fingerprint)"
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "b.gguf")],
        capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"},
    )  # fmt: skip
    assert run.stdout.strip() == first
    norm = {"blk.1.ffn_norm.weight": np.ones(64, np.float32)}
    assert open_checkpoint(make.write(tmp_path / "c.gguf", weights=norm)).fingerprint != first
    other = {"llama.rope.freq_base": 10000.0}
    assert open_checkpoint(make.write(tmp_path / "d.gguf", metadata=other)).fingerprint != first


def resident_kib() -> int:
    """File-backed resident memory of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssFile:")[1].split()[0])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_released_pages_leave_memory_and_come_back(tmp_path: Path) -> None:
    embed = {"token_embd.weight": np.arange(1 << 22, dtype=np.float32).reshape(-1, 64)}
    path = make.write(tmp_path / "x.gguf", weights=embed)
    tensor = (checkpoint := open_checkpoint(path)).tensor("embed")
    before = resident_kib()
    assert int(tensor.data.max()) == 255
    touched = resident_kib()
    checkpoint.release("embed")
    released = resident_kib()
    assert touched - before > 12_000
    assert touched - released > 12_000
    assert decode("F32", tensor.data[:8]).tolist() == [0, 1]


def test_default_model_opens(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    config = checkpoint.config
    assert (config.architecture, config.num_layers, config.hidden_size) == ("llama", 30, 576)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_context, config.tied_head) == (49152, 8192, True)
    assert config.ropes[0].base == 100000
    assert config.norm_eps == pytest.approx(1e-5)
    assert checkpoint.tensor("embed").type == "Q8_0"
    assert checkpoint.tensor("layers.29.down").type == "Q4_1"
    agrees_with_the_gguf_package(checkpoint, 7)


def agrees_with_the_gguf_package(checkpoint: Checkpoint, layer: int) -> None:
    """One layer's matrices. (The package's own reader takes half a minute over a vocabulary.)"""
    for part in ("q", "k", "v", "o", "gate", "up", "down"):
        tensor = replace(checkpoint.tensor(f"layers.{layer}.{part}"), permute_heads=0)
        number = gguf.GGMLQuantizationType[tensor.type]
        rows = tensor.data.reshape(tensor.shape[0], -1)
        np.testing.assert_array_equal(dequantize(tensor), gguf.dequantize(rows, number))


# As their cards give them: layers, hidden, heads, kv heads, head_dim, ffn, vocab, tied, bias.
CARDS = {
    "gemma-3-270m": (18, 640, 4, 1, 256, 2048, 262144, True, False),
    "qwen2.5-coder-0.5b": (24, 896, 14, 2, 64, 4864, 151936, False, True),
    "qwen2.5-coder-1.5b": (28, 1536, 12, 2, 128, 8960, 151936, False, True),
}


@pytest.mark.models
@pytest.mark.parametrize("name", CARDS)
def test_other_named_models_open(name: str) -> None:
    from octavo.models import hub

    checkpoint = open_checkpoint(hub.resolve(name))
    c = checkpoint.config
    card = (c.num_layers, c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim)
    assert (*card, c.intermediate_size, c.vocab_size, c.tied_head, c.qkv_bias) == CARDS[name]
    assert c.max_context == 32768
    assert c.ropes[0].base == 1e6
    if name == "gemma-3-270m":
        assert [i for i, window in enumerate(c.windows) if window is None] == [5, 11, 17]
        assert set(c.windows) == {512, None}
        assert [c.ropes[i].base for i in c.rope_index[4:6]] == [1e4, 1e6]
        assert (c.attn_scale, c.act, c.qk_norm, c.post_norms) == (1 / 16, "gelu_tanh", True, True)
    agrees_with_the_gguf_package(checkpoint, 0)
