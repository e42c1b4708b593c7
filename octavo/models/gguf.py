"""A reader of GGUF files (versions 2 and 3, little-endian), for files nobody vouches for.

It refuses what it cannot place: every count is held against the bytes that remain before anything
is allocated for it, every tensor must lie inside the file, aligned, and overlap no other. Only
`BadFile` (malformed) and `UnsupportedModel` (well-formed, but not for us) come out.
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import BadFile, UnsupportedModel
from octavo.models.mapped import MappedFile, StoredTensor
from octavo.models.quants import GGML_TYPES, TYPES

Value = bool | int | float | str | list[str] | npt.NDArray[Any]

MAX_STRING = 1 << 26  # a chat template is kilobytes; an architecture's name far less
MAX_NAME = 512
DEFAULT_ALIGNMENT = 32
WINDOW = 64  # bytes per string: more than most vocabularies need
MIN_PAIR_BYTES = 8 + 4 + 1  # key length, type, the smallest value
MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # name length, rank, one dimension, type, offset

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_DTYPES = {code: np.dtype(name) for code, name in _SCALARS.items()}
_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A parsed header over its mapping.

    metadata: scalars as Python values, string arrays as list[str], other arrays as read-only numpy
    views. data_start: where the tensors begin, hence the header's length.
    """

    source: MappedFile
    version: int
    metadata: dict[str, Value]
    tensors: dict[str, StoredTensor]
    data_start: int


class _Reader:
    """A cursor that cannot leave the file."""

    def __init__(self, source: MappedFile) -> None:
        self.source = source
        self.buffer = source.buffer
        self.pos = 0

    def fail(self, what: str, at: int | None = None) -> BadFile:
        return BadFile(f"{self.source.path}: byte {self.pos if at is None else at}: {what}")

    @property
    def remaining(self) -> int:
        return self.source.size - self.pos

    def take(self, num_bytes: int, what: str) -> int:
        """Advance over num_bytes and return where they begin."""
        if num_bytes > self.remaining:
            raise self.fail(f"the file ends inside {what}")
        start = self.pos
        self.pos += num_bytes
        return start

    def u32(self, what: str) -> int:
        return int(_U32(self.buffer, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64(self.buffer, self.take(8, what))[0])

    def count(self, item_bytes: int, what: str) -> int:
        """A u64 that counts items of at least item_bytes each, all still to come in this file."""
        at = self.pos
        n = self.u64(what)
        if n * item_bytes > self.remaining:
            raise self.fail(f"{what}: {n} items cannot fit in the file", at)
        return n

    def string(self, what: str, limit: int = MAX_STRING) -> str:
        at = self.pos
        n = self.u64(what)
        if n > limit:
            raise self.fail(f"{what}: a string of {n} bytes (limit {limit})", at)
        start = self.take(n, what)
        try:
            return str(self.buffer[start : start + n], "utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what}: not UTF-8: {error.reason}", start) from None

    def strings(self, what: str) -> list[str]:
        """An array of strings, read through windows: slices of bytes are cheaper than of a map."""
        n = self.count(8, what)
        out: list[str] = []
        while len(out) < n:
            num_before = len(out)
            window = self.buffer[self.pos : self.pos + WINDOW * (n - num_before)]
            self.pos += self._window_strings(window, n, out, what)
            if len(out) == num_before:  # longer than the window, or than the file
                out.append(self.string(f"{what}[{num_before}]"))
        return out

    def _window_strings(self, window: bytes, n: int, out: list[str], what: str) -> int:
        """Append strings to `out`, to n at most, while they lie in the window; bytes consumed.

        Vocabularies are hundreds of thousands of strings, so the loop is bare.
        """
        append, pos, last = out.append, 0, len(window) - 8
        for _ in range(n - len(out)):
            if pos > last:
                break
            start = pos + 8
            end = start + _U64(window, pos)[0]
            if end > len(window):
                break
            try:
                append(window[start:end].decode())
            except UnicodeDecodeError as error:
                at = self.pos + start
                raise self.fail(f"{what}[{len(out)}]: not UTF-8: {error.reason}", at) from None
            pos = end
        return pos


def _scalars(reader: _Reader, code: int, n: int, what: str) -> npt.NDArray[Any]:
    """n values of a fixed-size type, as a view on the file."""
    dtype = _DTYPES.get(code)
    if dtype is None:
        raise reader.fail(f"{what}: unknown value type {code}")
    start = reader.take(n * dtype.itemsize, what)
    raw = reader.source.view(start, n * dtype.itemsize)
    if dtype.kind == "b" and n and int(raw.max()) > 1:
        raise reader.fail(f"{what}: a bool that is neither 0 nor 1", start)
    return raw.view(dtype)


def _value(reader: _Reader, what: str) -> Value:
    code = reader.u32(what)
    if code == _STRING:
        return reader.string(what)
    if code != _ARRAY:
        value = _scalars(reader, code, 1, what)[0].item()
        assert isinstance(value, bool | int | float)
        return value
    item = reader.u32(what)
    if item == _STRING:
        return reader.strings(what)
    if item == _ARRAY:
        raise reader.fail(f"{what}: an array of arrays")
    size = _DTYPES[item].itemsize if item in _DTYPES else 1
    return _scalars(reader, item, reader.count(size, what), what)


def _metadata(reader: _Reader, n: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(n):
        key = reader.string("a metadata key", MAX_NAME)
        if key in metadata:
            raise reader.fail(f"metadata key {key!r} appears twice")
        metadata[key] = _value(reader, f"metadata {key!r}")
    return metadata


def _shape(reader: _Reader, name: str) -> tuple[int, ...]:
    """Dimensions, outermost first."""
    rank = reader.u32(f"tensor {name!r}")
    if not 1 <= rank <= 4:
        raise reader.fail(f"tensor {name!r} has {rank} dimensions")
    shape = tuple(reader.u64(f"tensor {name!r}") for _ in range(rank))[::-1]
    if 0 in shape:
        raise reader.fail(f"tensor {name!r} has a dimension of zero: {shape}")
    return shape


def _tensor_bytes(reader: _Reader, name: str, type_name: str, shape: tuple[int, ...]) -> int:
    kind = TYPES[type_name]
    if shape[-1] % kind.block:
        raise reader.fail(f"tensor {name!r}: rows of {shape[-1]} are not whole {type_name} blocks")
    num_bytes = kind.num_bytes
    for n in (*shape[:-1], shape[-1] // kind.block):
        num_bytes *= n  # Python integers do not wrap
    if num_bytes > reader.source.size:
        raise reader.fail(f"tensor {name!r} {shape} is larger than the file")
    return num_bytes


def _tensor_infos(reader: _Reader, n: int) -> list[StoredTensor]:
    """Tensors with `start` still relative to the data section."""
    infos = []
    for _ in range(n):
        name = reader.string("a tensor's name", MAX_NAME)
        shape = _shape(reader, name)
        code = reader.u32(f"tensor {name!r}")
        type_name = GGML_TYPES.get(code, f"type {code}")
        if type_name not in TYPES:
            raise UnsupportedModel(
                f"{reader.source.path}: tensor {name!r} is of type {type_name}, "
                f"which we do not read (we read {', '.join(TYPES)})"
            )
        num_bytes = _tensor_bytes(reader, name, type_name, shape)
        offset = reader.u64(f"tensor {name!r}")
        infos.append(StoredTensor(reader.source, name, type_name, shape, offset, num_bytes))
    return infos


def _place(
    reader: _Reader, infos: list[StoredTensor], data_start: int, alignment: int
) -> dict[str, StoredTensor]:
    """Absolute positions, checked: inside the file, aligned, disjoint, each name once."""
    tensors: dict[str, StoredTensor] = {}
    end, before = 0, ""
    for info in sorted(infos, key=lambda info: info.start):
        if info.name in tensors:
            raise reader.fail(f"tensor {info.name!r} appears twice")
        if info.start % alignment:
            raise reader.fail(f"tensor {info.name!r} is not aligned to {alignment}")
        if info.start < end:
            raise reader.fail(f"tensors {before!r} and {info.name!r} overlap")
        end, before = info.start + info.num_bytes, info.name
        if data_start + end > reader.source.size:
            raise reader.fail(f"tensor {info.name!r} runs past the end of the file", data_start)
        tensors[info.name] = replace(info, start=data_start + info.start)
    return {info.name: tensors[info.name] for info in infos}


def _check_version(reader: _Reader) -> int:
    path = reader.source.path
    if reader.source.size < 24 or reader.buffer[:4] != b"GGUF":
        raise BadFile(f"{path}: not a GGUF file")
    reader.take(4, "the header")
    version = reader.u32("the header")
    if version not in (2, 3):
        if version & 0xFFFF == 0 and version:
            raise UnsupportedModel(f"{path}: a big-endian GGUF file")
        raise UnsupportedModel(f"{path}: GGUF version {version} (we read 2 and 3)")
    return version


def read_gguf(path: Path) -> GGUFFile:
    """Map a GGUF file and check all of its header. Raises BadFile, UnsupportedModel."""
    reader = _Reader(MappedFile(path))
    version = _check_version(reader)
    at = reader.pos
    num_tensors, num_pairs = reader.u64("the header"), reader.u64("the header")
    if num_tensors * MIN_TENSOR_BYTES + num_pairs * MIN_PAIR_BYTES > reader.remaining:
        raise reader.fail(
            f"{num_tensors} tensors and {num_pairs} metadata pairs cannot fit in the file", at
        )
    metadata = _metadata(reader, num_pairs)
    parts = metadata.get("split.count", 0)
    if type(parts) is not int:
        raise reader.fail(f"split.count is a {type(parts).__name__}, not a number")
    if parts > 1:
        raise UnsupportedModel(
            f"{path}: one of {parts} parts (split.count); "
            "join them first: llama-gguf-split --merge FIRST OUT"
        )
    infos = _tensor_infos(reader, num_tensors)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise reader.fail(f"general.alignment is {alignment!r}, not a power of two")
    data_start = -(-reader.pos // alignment) * alignment
    if infos and data_start > reader.source.size:
        raise reader.fail("the file ends before its tensors")
    tensors = _place(reader, infos, data_start, alignment)
    return GGUFFile(reader.source, version, metadata, tensors, min(data_start, reader.source.size))
