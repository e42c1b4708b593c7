"""safetensors: what the reference library wrote is what we read; nothing else gets in."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch

from octavo.errors import BadFile, UnsupportedModel
from octavo.models.safetensors import read_directory, read_safetensors
from octavo.models.weights import dequantize, open_checkpoint
from tests.models import tiny

REFUSALS = (BadFile, UnsupportedModel)


def by_hand(header: Any, data: bytes = bytes(64)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(start: int, end: int, shape: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_tensors_read_as_the_reference_wrote_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.standard_normal((3, 5), np.float32), "b": np.arange(7, dtype=np.float16),
        "ids": np.arange(4), "scalar": np.array(2, np.float32), "none": np.zeros((0, 4), "u1"),
    }  # fmt: skip
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors", {"format": "np"})
    found, header = read_safetensors(tmp_path / "x.safetensors")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].shape == array.shape
        assert found[name].data.tobytes() == array.tobytes()
    assert (found["b"].type, found["ids"].type) == ("F16", "I64")
    assert bytes(header[:8]) == struct.pack("<Q", len(header) - 8)


GOOD = {"a": entry(0, 32, [2, 4]), "b": entry(32, 64, [8])}
HOSTILE: dict[str, tuple[bytes, str]] = {
    "tiny": (b"\2\0\0\0", "not a safetensors file"),
    "header length": (struct.pack("<Q", 2**63) + bytes(64), "not a safetensors file"),
    "header past the end": (struct.pack("<Q", 65) + bytes(64), "not a safetensors file"),
    "not json": (by_hand(b"{'a'"), "not valid JSON"),
    "not utf-8": (by_hand(b'{"\xff": 1}'), "not valid JSON"),
    "a list": (by_hand([]), "not a JSON object"),
    "deep": (by_hand(b'{"a":' + b"[" * 100_000), "not valid JSON"),
    "long number": (by_hand(b'{"a":' + b"9" * 10_000 + b"}"), "not valid JSON"),
    "twice": (by_hand(b'{"a": 1, "a": 1}'), "appears twice"),
    "entry": (by_hand({"a": 1}), "not dtype, shape"),
    "extra field": (by_hand({"a": GOOD["a"] | {"x": 1}}), "not dtype, shape"),
    "dtype": (by_hand({"a": entry(0, 32, [8]) | {"dtype": 1}}), "dtype"),
    "negative": (by_hand({"a": entry(0, 32, [-8])}), "bad shape"),
    "bool": (by_hand({"a": entry(0, 4, [True])}), "bad shape"),
    "float": (by_hand({"a": entry(0, 32, [8.0])}), "bad shape"),
    "rank": (by_hand({"a": entry(0, 4, [1] * 1000)}), "bad shape"),
    "offsets": (by_hand({"a": entry(0, 32, [8]) | {"data_offsets": [0]}}), "bad data_offsets"),
    "null offset": (by_hand({"a": entry(0, 32, [8]) | {"data_offsets": [0, None]}}), "bad data"),
    "backwards": (by_hand({"a": entry(32, 0, [8])}), "inside the file"),
    "past the end": (by_hand({"a": entry(36, 68, [8])}), "inside the file"),
    "far": (by_hand({"a": entry(2**62, 2**62 + 32, [8])}), "inside the file"),
    "size": (by_hand({"a": entry(0, 32, [9])}), "32 bytes for F32"),
    "product": (by_hand({"a": entry(0, 0, [2**32, 2**32])}), "0 bytes for F32"),
    "overlap": (by_hand({"a": entry(0, 32, [8]), "b": entry(28, 60, [8])}), "overlap"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_is_refused_with_its_reason(name: str, tmp_path: Path) -> None:
    data, reason = HOSTILE[name]
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(BadFile, match=reason):
        read_safetensors(tmp_path / "x.safetensors")


def test_unknown_dtype_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(by_hand({"a": entry(0, 32, [8], "F4")}))
    with pytest.raises(UnsupportedModel, match="'a' is of type F4"):
        read_safetensors(tmp_path / "x.safetensors")


def test_random_damage_only_ever_refuses(tmp_path: Path) -> None:
    valid, path, rng = by_hand(GOOD), tmp_path / "x.safetensors", random.Random(3)
    opened, n = 0, 800
    for _ in range(n):
        data = bytearray(valid[: rng.choice((len(valid), rng.randrange(1, len(valid))))])
        for _ in range(rng.choice((1, 2, 6))):
            data[rng.randrange(len(data))] = rng.choice(b'\0\xff{}[]",:0189aF' + rng.randbytes(4))
        path.write_bytes(data)
        try:
            found, header = read_safetensors(path)
        except REFUSALS:
            continue
        opened += 1
        for stored in found.values():
            assert len(header) <= stored.start
            assert stored.start + len(stored.data) == stored.start + stored.num_bytes
            assert stored.start + stored.num_bytes <= len(data)
    assert 0 < opened < n


def sharded(tmp_path: Path, weight_map: Any) -> Path:
    ones, twos = np.ones(4, np.float32), np.full(4, 2, np.float32)
    safetensors.numpy.save_file({"a": ones}, tmp_path / "model-1-of-2.safetensors")
    safetensors.numpy.save_file({"b": twos}, tmp_path / "model-2-of-2.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_shards_are_joined_by_their_index(tmp_path: Path) -> None:
    names = {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}
    found, headers = read_directory(sharded(tmp_path, names))
    assert found["a"].data.view(np.float32).tolist() == [1] * 4
    assert found["b"].data.view(np.float32).tolist() == [2] * 4
    assert len(headers) == 2


INDEXES: list[tuple[Any, str]] = [
    (None, "weight_map is missing"),
    ({}, "weight_map is missing"),
    ({"a": "../secret.safetensors"}, "said to be in"),
    ({"a": "/etc/passwd"}, "said to be in"),
    ({"a": ""}, "said to be in|not a regular"),
    ({"a": ".."}, "said to be in|not a regular"),
    ({"a": 7}, "said to be in"),
    ({"a": "x\0y"}, "said to be in"),
    ({"a": "model-2-of-2.safetensors"}, "'a' is not in"),
    ({"a": "model-3-of-2.safetensors"}, "No such file"),
]


@pytest.mark.parametrize(("weight_map", "reason"), INDEXES)
def test_hostile_index_is_refused(weight_map: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=reason):
        read_directory(sharded(tmp_path, weight_map))


def test_directories_without_safetensors_say_so(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"no model\.safetensors"):
        read_directory(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UnsupportedModel, match="can run code"):
        read_directory(tmp_path)
    with pytest.raises(BadFile, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "x.gguf").touch()
    with pytest.raises(BadFile, match=r"did you mean .*x\.gguf"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", tiny.FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_family_opens_with_the_values_of_its_model(
    name: str, dtype: str, tmp_path: Path
) -> None:
    import torch

    model = tiny.make(name, tmp_path)
    if dtype != "float32":
        model.to(getattr(torch, dtype)).save_pretrained(tmp_path, max_shard_size="100KB")
        (tmp_path / "model.safetensors").unlink()
    checkpoint = open_checkpoint(tmp_path)
    state = {key: value.float().numpy() for key, value in model.state_dict().items()}
    embed = dequantize(checkpoint.tensor("embed"))
    np.testing.assert_array_equal(embed, state["model.embed_tokens.weight"])
    np.testing.assert_array_equal(dequantize(checkpoint.tensor("head")), state["lm_head.weight"])
    last = checkpoint.config.num_layers - 1
    down = dequantize(checkpoint.tensor(f"layers.{last}.down"))
    np.testing.assert_array_equal(down, state[f"model.layers.{last}.mlp.down_proj.weight"])
    one = np.float32(name == "gemma3")
    norm = dequantize(checkpoint.tensor("final_norm"))
    np.testing.assert_allclose(norm, state["model.norm.weight"] + one, rtol=1e-6)
    num_values = sum(checkpoint.tensor(key).data.size for key in checkpoint.names())
    item = 4 if dtype == "float32" else 2
    assert num_values == item * sum(value.numel() for value in model.parameters())


def rewrite(tmp_path: Path, change: dict[str, Any], drop: str = "") -> Path:
    """A tied tiny Llama with some stored tensors changed."""
    tiny.make("llama-rope3", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(path) | change
    tensors.pop(drop, None)
    safetensors.torch.save_file(tensors, path)
    return tmp_path


def test_head_that_is_stored_and_tied(tmp_path: Path) -> None:
    import torch

    tiny.make("llama-rope3", tmp_path)
    embed = safetensors.torch.load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    same = open_checkpoint(rewrite(tmp_path, {"lm_head.weight": embed.clone()}))
    assert same.config.tied_head
    other = open_checkpoint(rewrite(tmp_path, {"lm_head.weight": torch.ones_like(embed)}))
    assert not other.config.tied_head
    assert dequantize(other.tensor("head")).max() == 1


def test_missing_misshapen_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    import torch

    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(BadFile, match=f"{name}' is missing"):
        open_checkpoint(rewrite(tmp_path, {}, drop=name))
    with pytest.raises(BadFile, match=rf"{name}' is \(4, 4\), should be \(160, 96\)"):
        open_checkpoint(rewrite(tmp_path, {name: torch.zeros(4, 4)}))
    with pytest.raises(UnsupportedModel, match=f"{name}' is of type F64"):
        open_checkpoint(rewrite(tmp_path, {name: torch.zeros(160, 96).double()}))
    bias = "model.layers.1.self_attn.o_proj.bias"
    with pytest.raises(UnsupportedModel, match=bias):
        open_checkpoint(rewrite(tmp_path, {bias: torch.zeros(96)}))
    inert = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16)}
    assert open_checkpoint(rewrite(tmp_path, inert)).config.num_layers == 3


def test_fingerprint_covers_config_and_weights(tmp_path: Path) -> None:
    import torch

    first = open_checkpoint(rewrite(tmp_path, {})).fingerprint
    assert open_checkpoint(rewrite(tmp_path, {})).fingerprint == first
    zeros = {"model.layers.2.self_attn.k_proj.weight": torch.zeros(64, 96)}
    assert open_checkpoint(rewrite(tmp_path, zeros)).fingerprint != first
    rewrite(tmp_path, {})
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        text.replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-06')
    )
    assert open_checkpoint(tmp_path).fingerprint != first


def test_opened_norm_weights_of_gemma_carry_their_one(tmp_path: Path) -> None:
    tiny.make("gemma3", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    adds = {name.rpartition(".")[2]: checkpoint.tensor(name).add for name in checkpoint.names()}
    norms = {"attn_norm", "attn_post_norm", "ffn_norm", "ffn_post_norm", "q_norm", "k_norm"}
    assert {name for name, add in adds.items() if add == 1.0} == norms | {"final_norm"}
