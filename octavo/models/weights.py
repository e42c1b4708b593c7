"""A checkpoint: a model's shape and its tensors under our names, whatever file they came from.

It opens GGUF files and Hugging Face directories, checks that every tensor the shape asks for is
there with that shape, and that nothing is there that we would not use. Invariant: tensor bytes are
views on the mapped file; nobody copies a model to read it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octavo.errors import BadFile, UnsupportedModel
from octavo.models.config import ModelConfig
from octavo.models.config_gguf import config_from_gguf
from octavo.models.gguf import GGUFFile, Value, read_gguf
from octavo.models.mapped import Bytes, StoredTensor
from octavo.models.quants import Floats, decode

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
    inert: Iterable[str] = (),
) -> dict[str, StoredTensor]:
    """Stored tensors by logical name. wanted: logical name -> (stored name, shape).

    Raises BadFile naming a tensor that is missing or has another shape, UnsupportedModel naming one
    that the model as we run it would not use.
    """
    found = {}
    for logical, (name, shape) in wanted.items():
        stored = tensors.get(name)
        if stored is None:
            raise BadFile(f"{path}: tensor {name!r} is missing")
        if stored.shape != shape:
            raise BadFile(f"{path}: tensor {name!r} is {stored.shape}, should be {shape}")
        found[logical] = stored
    strangers = tensors.keys() - {name for name, _ in wanted.values()} - set(inert)
    if strangers:
        raise UnsupportedModel(
            f"{path}: tensor {min(strangers)!r} has no place in this model ({len(strangers)} such)"
        )
    return found


def sample_hash(headers: Iterable[Bytes | bytes], tensors: Iterable[StoredTensor]) -> str:
    """SHA-256, in hex, over whole headers and the start, middle and end of every tensor."""
    digest = hashlib.sha256()
    for header in headers:
        digest.update(struct.pack("<Q", len(header)))
        digest.update(header)
    for stored in tensors:
        data, n = stored.data, min(SAMPLE_BYTES, stored.num_bytes)
        for at in (0, (len(data) - n) // 2, len(data) - n):
            digest.update(data[at : at + n])
    return digest.hexdigest()


def _open_gguf(path: Path) -> Checkpoint:
    gguf: GGUFFile = read_gguf(path)
    config = config_from_gguf(gguf)
    wanted = {name: (_gguf_name(name), shape) for name, shape in tensor_shapes(config).items()}
    stored = locate(path, gguf.tensors, wanted, inert=("rope_freqs.weight",))
    located = {
        name: Located(tensor, _gguf_permute(config, name)) for name, tensor in stored.items()
    }
    header = gguf.source.view(0, gguf.data_start)
    fingerprint = sample_hash([header], gguf.tensors.values())
    return Checkpoint(path, config, located, fingerprint, metadata=gguf.metadata)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a .gguf file or a Hugging Face directory. Raises BadFile, UnsupportedModel."""
    path = Path(path)
    if path.is_dir():
        raise UnsupportedModel(f"{path}: directories are not read yet")
    return _open_gguf(path)
