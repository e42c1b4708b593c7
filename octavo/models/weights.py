"""A checkpoint: a model's shape and its tensors under our names, whatever file they came from.

It opens GGUF files and Hugging Face directories, checks that every tensor the shape asks for is
there with that shape, and that nothing is there that we would not use. Invariant: tensor bytes are
views on the mapped file; nobody copies a model to read it.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from octavo.errors import BadFile, UnsupportedModel
from octavo.models.config import ModelConfig
from octavo.models.config_gguf import config_from_gguf
from octavo.models.config_hf import config_from_hf
from octavo.models.gguf import GGUFFile, Value, read_gguf
from octavo.models.mapped import Bytes, MappedFile, StoredTensor
from octavo.models.quants import TYPES, Floats, decode
from octavo.models.safetensors import parse_json, read_directory

SAMPLE_BYTES = 128


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as stored. shape is (rows, cols) or (n,); data is uint8, mapped, row-major.

    permute_heads: 0, or the number of heads whose rows are interleaved pairs (x0, y0, x1, y1 ...)
    and must become halves (x0, x1 ... y0, y1 ...) for NeoX rope. add: to be added to each element.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    data: Bytes
    permute_heads: int = 0
    add: float = 0.0


@dataclass(frozen=True, slots=True)
class Located:
    """Where a logical tensor comes from, and what is to be done to it."""

    stored: StoredTensor
    permute_heads: int = 0
    add: float = 0.0


class Checkpoint:
    """An opened model.

    Exactly one of `metadata` (GGUF) and `directory` (Hugging Face) is set: the tokenizer and chat
    template come from there. fingerprint: 256 bits in hex over headers, sizes and a sample of every
    tensor; equal across processes and machines, different between different weights.
    """

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        located: dict[str, Located],
        fingerprint: str,
        *,
        metadata: dict[str, Value] | None = None,
        directory: Path | None = None,
    ) -> None:
        self.path = path
        self.config = config
        self.fingerprint = fingerprint
        self.metadata = metadata
        self.directory = directory
        self._located = located

    def names(self) -> tuple[str, ...]:
        """Logical names, in the model's order. A tied head is not among them."""
        return tuple(self._located)

    def tensor(self, name: str) -> RawTensor:
        """The tensor of a logical name; "head" is the embedding when the two are tied."""
        found = self._found(name)
        stored = found.stored
        return RawTensor(
            name, stored.type, stored.shape, stored.data, found.permute_heads, found.add
        )

    def release(self, name: str) -> None:
        """Give the tensor's pages back; call it when its bytes have been packed."""
        stored = self._found(name).stored
        stored.source.release(stored.start, stored.num_bytes)

    def _found(self, name: str) -> Located:
        if name == "head" and self.config.tied_head:
            name = "embed"
        return self._located[name]


def dequantize(tensor: RawTensor) -> Floats:
    """float32 values in `shape`, un-permuted and with `add` applied: what the model means."""
    values = decode(tensor.type, tensor.data).reshape(tensor.shape)
    if tensor.permute_heads:
        pairs = values.reshape(tensor.permute_heads, -1, 2, *tensor.shape[1:])
        values = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(tensor.shape)
    return values + np.float32(tensor.add) if tensor.add else values


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every logical tensor of a model, with its shape, in the order it is used."""
    hidden, ffn, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "q": (config.q_size, hidden),
        "k": (config.kv_size, hidden),
        "v": (config.kv_size, hidden),
    }
    if config.qkv_bias:
        layer |= {"q_bias": (config.q_size,)}
        layer |= {"k_bias": (config.kv_size,), "v_bias": (config.kv_size,)}
    if config.qk_norm:
        layer |= {"q_norm": (head_dim,), "k_norm": (head_dim,)}
    layer["o"] = (hidden, config.q_size)
    if config.post_norms:
        layer["attn_post_norm"] = (hidden,)
    layer["ffn_norm"] = (hidden,)
    layer |= {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}
    if config.post_norms:
        layer["ffn_post_norm"] = (hidden,)
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab_size, hidden)}
    for i in range(config.num_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["final_norm"] = (hidden,)
    if not config.tied_head:
        shapes["head"] = (config.vocab_size, hidden)
    return shapes


GGUF_NAMES = {"embed": "token_embd.weight", "final_norm": "output_norm.weight"}
GGUF_NAMES |= {"head": "output.weight"}
GGUF_LAYER_NAMES = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "o": "attn_output.weight",
    "attn_post_norm": "post_attention_norm.weight",
    "ffn_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "ffn_post_norm": "post_ffw_norm.weight",
}


def _gguf_name(logical: str) -> str:
    if logical in GGUF_NAMES:
        return GGUF_NAMES[logical]
    _, layer, name = logical.split(".")
    return f"blk.{layer}.{GGUF_LAYER_NAMES[name]}"


def _gguf_permute(config: ModelConfig, logical: str) -> int:
    """llama.cpp's converter interleaves q and k of the llama architecture, for its own rope."""
    if config.architecture != "llama":
        return 0
    part = logical.rpartition(".")[2]
    return {
        "q": config.num_heads,
        "q_bias": config.num_heads,
        "k": config.num_kv_heads,
        "k_bias": config.num_kv_heads,
    }.get(part, 0)


def locate(
    path: Path,
    tensors: dict[str, StoredTensor],
    wanted: dict[str, tuple[str, tuple[int, ...]]],
    inert: re.Pattern[str],
) -> dict[str, StoredTensor]:
    """Stored tensors by logical name. wanted: logical name -> (stored name, shape).

    Raises BadFile naming a tensor that is missing or has another shape, UnsupportedModel naming one
    of a type that we do not read, or that the model as we run it would not use.
    """
    found = {}
    for logical, (name, shape) in wanted.items():
        stored = tensors.get(name)
        if stored is None:
            raise BadFile(f"{path}: tensor {name!r} is missing")
        if stored.shape != shape:
            raise BadFile(f"{path}: tensor {name!r} is {stored.shape}, should be {shape}")
        if stored.type not in TYPES:
            raise UnsupportedModel(f"{path}: tensor {name!r} is of type {stored.type}")
        found[logical] = stored
    used = {name for name, _ in wanted.values()}
    strangers = [name for name in tensors if name not in used and not inert.fullmatch(name)]
    if strangers:
        raise UnsupportedModel(
            f"{path}: tensor {min(strangers)!r} has no place in a model of this shape "
            f"({len(strangers)} such)"
        )
    return found


def _check_shape(path: Path, config: ModelConfig) -> None:
    """What each size may be was checked on reading; this is how they must fit together."""
    if config.head_dim % 2:
        raise UnsupportedModel(f"{path}: heads of odd length {config.head_dim}")
    if config.num_heads % config.num_kv_heads:
        raise BadFile(
            f"{path}: {config.num_heads} heads over {config.num_kv_heads} key-value heads"
        )


def sample_hash(headers: Iterable[Bytes | bytes], tensors: Iterable[StoredTensor]) -> str:
    """SHA-256, in hex, over whole headers and the start, middle and end of every tensor."""
    digest = hashlib.sha256()
    for header in headers:
        digest.update(struct.pack("<Q", len(header)))
        digest.update(bytes(header))
    for stored in tensors:
        data, n = stored.data, min(SAMPLE_BYTES, stored.num_bytes)
        for at in (0, (len(data) - n) // 2, len(data) - n):
            digest.update(data[at : at + n].tobytes())
    return digest.hexdigest()


GGUF_INERT = re.compile(r"rope_freqs\.weight")  # read with the config


def _open_gguf(path: Path) -> Checkpoint:
    gguf: GGUFFile = read_gguf(path)
    config = config_from_gguf(gguf)
    _check_shape(path, config)
    wanted = {name: (_gguf_name(name), shape) for name, shape in tensor_shapes(config).items()}
    stored = locate(path, gguf.tensors, wanted, GGUF_INERT)
    located = {
        name: Located(tensor, _gguf_permute(config, name)) for name, tensor in stored.items()
    }
    header = gguf.source.view(0, gguf.data_start)
    fingerprint = sample_hash([header], gguf.tensors.values())
    return Checkpoint(path, config, located, fingerprint, metadata=gguf.metadata)


HF_NAMES = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight"}
HF_NAMES |= {"head": "lm_head.weight"}
HF_LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o": "self_attn.o_proj.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
# Gemma has a norm on both sides of each half, and calls the second one by the others' third name.
HF_GEMMA_LAYER_NAMES = HF_LAYER_NAMES | {
    "attn_post_norm": "post_attention_layernorm.weight",
    "ffn_norm": "pre_feedforward_layernorm.weight",
    "ffn_post_norm": "post_feedforward_layernorm.weight",
}
# Old checkpoints store the rope's frequencies, which follow from the config.
HF_INERT = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def _hf_name(config: ModelConfig, logical: str) -> str:
    if logical in HF_NAMES:
        return HF_NAMES[logical]
    _, layer, name = logical.split(".")
    names = HF_GEMMA_LAYER_NAMES if config.post_norms else HF_LAYER_NAMES
    return f"model.layers.{layer}.{names[name]}"


def _hf_head(config: ModelConfig, tensors: dict[str, StoredTensor]) -> ModelConfig:
    """Settle a head that is stored although the config ties it: as transformers 5 does.

    Equal to the embedding, it is dropped from `tensors`; different, it is the head.
    """
    embed, head = tensors.get(HF_NAMES["embed"]), tensors.get(HF_NAMES["head"])
    if not config.tied_head or embed is None or head is None:
        return config
    if embed.type == head.type and np.array_equal(embed.data, head.data):
        del tensors[HF_NAMES["head"]]
        return config
    return replace(config, tied_head=False)


def _open_directory(path: Path) -> Checkpoint:
    if not (path / "config.json").is_file():
        files = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; did you mean {path / files[0]}?" if files else ""
        raise BadFile(f"{path}: no config.json{hint}")
    text = MappedFile(path / "config.json").data.tobytes()
    config = config_from_hf(path / "config.json", parse_json(path / "config.json", text))
    _check_shape(path, config)
    tensors, headers = read_directory(path)
    config = _hf_head(config, tensors)
    wanted = {
        name: (_hf_name(config, name), shape) for name, shape in tensor_shapes(config).items()
    }
    stored = locate(path, tensors, wanted, HF_INERT)
    located = {
        # Gemma's norms multiply by 1 + w; GGUF files have the 1 in them already.
        name: Located(tensor, add=1.0 if config.post_norms and name.endswith("norm") else 0.0)
        for name, tensor in stored.items()
    }
    fingerprint = sample_hash([text, *headers], tensors.values())
    return Checkpoint(path, config, located, fingerprint, directory=path)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a .gguf file or a Hugging Face directory. Raises BadFile, UnsupportedModel."""
    path = Path(path)
    return _open_directory(path) if path.is_dir() else _open_gguf(path)
