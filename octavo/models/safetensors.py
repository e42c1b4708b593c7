"""A reader of safetensors files and of directories of them, for files nobody vouches for.

A file is a length, a JSON header and bytes; every tensor must lie inside the bytes, have exactly
the size its shape says, and overlap no other. Pickled weights are refused: they can run code.
The format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.errors import BadFile, UnsupportedModel
from octavo.models.mapped import Bytes, MappedFile, StoredTensor

MAX_HEADER = 100_000_000  # the limit of the reference implementation
MAX_RANK = 8
ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}


def parse_json(path: Path, text: bytes) -> dict[str, Any]:
    """A JSON object whose keys are unique, or BadFile."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key appears twice")
        return found

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadFile(f"{path}: not a JSON object")
    return value


def _size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _entry(source: MappedFile, base: int, name: str, entry: object) -> StoredTensor:
    """One header entry, checked by itself."""

    def wrong(what: str) -> BadFile:
        return BadFile(f"{source.path}: tensor {name!r}: {what}")

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise wrong("its entry is not dtype, shape, data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise wrong("dtype is not a string")
    if dtype not in ITEM_BYTES:
        raise UnsupportedModel(f"{source.path}: tensor {name!r} is of type {dtype[:40]}")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(_size, shape)):
        raise wrong("bad shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_size, offsets)):
        raise wrong("bad data_offsets")
    start, end = offsets
    if not start <= end <= source.size - base:
        raise wrong("it does not lie inside the file")
    num_bytes = ITEM_BYTES[dtype]
    for n in shape:
        num_bytes *= n
    if num_bytes != end - start:
        raise wrong(f"{end - start} bytes for {dtype} {shape}")
    return StoredTensor(source, name, dtype, tuple(shape), base + start, num_bytes)


def read_safetensors(path: Path) -> tuple[dict[str, StoredTensor], Bytes]:
    """(tensors by stored name, the header's bytes). Raises BadFile, UnsupportedModel."""
    source = MappedFile(path)
    length = int.from_bytes(source.buffer[:8], "little")
    if source.size < 8 or length > min(MAX_HEADER, source.size - 8):
        raise BadFile(f"{path}: not a safetensors file, or cut short")
    base = 8 + length
    header = parse_json(path, source.buffer[8:base])
    header.pop("__metadata__", None)
    tensors = {name: _entry(source, base, name, entry) for name, entry in header.items()}
    end, before = base, ""
    for stored in sorted(tensors.values(), key=lambda stored: (stored.start, stored.num_bytes)):
        if stored.start < end:
            raise BadFile(f"{path}: tensors {before!r} and {stored.name!r} overlap")
        end, before = stored.start + stored.num_bytes, stored.name
    return tensors, source.view(0, base)


def _read_sharded(index: Path) -> tuple[dict[str, StoredTensor], list[Bytes]]:
    weight_map = parse_json(index, MappedFile(index).data.tobytes()).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadFile(f"{index}: weight_map is missing")
    names: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        # A shard is a sibling: an index must not make us read elsewhere.
        if not isinstance(file, str) or Path(file).name != file or "\0" in file:
            raise BadFile(f"{index}: tensor {name!r} is said to be in {file!r}")
        names.setdefault(file, []).append(name)
    tensors: dict[str, StoredTensor] = {}
    headers = []
    for file in sorted(names):
        shard, header = read_safetensors(index.parent / file)
        headers.append(header)
        for name in names[file]:
            if name not in shard:
                raise BadFile(f"{index}: tensor {name!r} is not in {file}")
            tensors[name] = shard[name]
    return tensors, headers


def read_directory(directory: Path) -> tuple[dict[str, StoredTensor], list[Bytes]]:
    """(tensors, headers) of model.safetensors, or of the shards that its index names."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        tensors, header = read_safetensors(single)
        return tensors, [header]
    if index.is_file():
        return _read_sharded(index)
    if list(directory.glob("*.bin")) or list(directory.glob("*.pth")):
        raise UnsupportedModel(
            f"{directory}: pickled weights can run code and are not read; convert to safetensors"
        )
    raise BadFile(f"{directory}: no model.safetensors and no model.safetensors.index.json")
