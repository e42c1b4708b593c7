"""GGUF files: what the reference writer wrote is what we read; nothing else gets in."""

from __future__ import annotations

import contextlib
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import BadFile, UnsupportedModel
from octavo.models.gguf import GGUFFile, read_gguf
from octavo.models.weights import dequantize, open_checkpoint
from tests.models import gguf_files as make

REFUSALS = (BadFile, UnsupportedModel)


def read(tmp_path: Path, data: bytes) -> GGUFFile:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    return read_gguf(path)


def test_every_scalar_and_array_type_reads_as_written(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    scalars: dict[str, tuple[Callable[[str, Any], None], Any]] = {
        "u8": (writer.add_uint8, 200), "i8": (writer.add_int8, -100),
        "u16": (writer.add_uint16, 60000), "i16": (writer.add_int16, -30000),
        "u32": (writer.add_uint32, 2**32 - 1), "i32": (writer.add_int32, -(2**31)),
        "u64": (writer.add_uint64, 2**64 - 1), "i64": (writer.add_int64, -(2**63)),
        "f32": (writer.add_float32, 0.5), "f64": (writer.add_float64, 1e300),
        "yes": (writer.add_bool, True), "no": (writer.add_bool, False),
        "text": (writer.add_string, "año 🦙"),
    }  # fmt: skip
    for key, (add, value) in scalars.items():
        add(key, value)
    arrays: dict[str, list[Any]] = {
        "ints": [1, -2, 3], "floats": [0.5, -1.5], "bools": [True, False],
        "texts": ["", "a", "é" * 300, "b", "c" * 5000, "d"],
    }  # fmt: skip
    for key, values in arrays.items():
        writer.add_array(key, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = read_gguf(tmp_path / "x.gguf").metadata
    for key, (_, value) in scalars.items():
        assert found[key] == value
        assert type(found[key]) is type(value)
    for key, values in arrays.items():
        assert list(found[key]) == values  # type: ignore[arg-type]
    assert type(found["texts"]) is list


def test_tensors_lie_where_the_reference_reader_finds_them(tmp_path: Path) -> None:
    path = make.write(tmp_path / "x.gguf", "gemma3")
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        stored = ours.tensors[tensor.name]
        assert stored.start == tensor.data_offset
        assert stored.shape == tuple(reversed(tensor.shape.tolist()))
        assert stored.data.tobytes() == tensor.data.tobytes()
        assert not stored.data.flags.writeable
        assert stored.data.base is not None


def test_version_2_and_an_alignment_of_its_own(tmp_path: Path) -> None:
    data = np.arange(8, dtype=np.float32).tobytes()
    infos = [make.info("a", (4,), 0, 0), make.info("b", (4,), 0, 128)]
    pairs = [make.pair("general.alignment", 4, make.U32(128))]
    head = make.by_hand(pairs, infos, version=2, align=128)
    found = read(tmp_path, head + data[:16] + b"\0" * 112 + data[16:])
    assert found.version == 2
    assert found.tensors["b"].data.view(np.float32).tolist() == [4, 5, 6, 7]


DATA = bytes(64)
ONE = make.info("a", (8,), 0, 0)
BIG = 2**63
HOSTILE: dict[str, tuple[bytes, str]] = {
    "not gguf": (b"GGML" + bytes(60), "not a GGUF file"),
    "short": (b"GGUF\3\0\0\0", "not a GGUF file"),
    "count of tensors": (b"GGUF" + make.U32(3) + make.GB(BIG) + make.GB(0), "cannot fit"),
    "count of pairs": (b"GGUF" + make.U32(3) + make.GB(0) + make.GB(BIG), "cannot fit"),
    "key length": (make.by_hand([make.GB(BIG) + bytes(40)], []), "a string of"),
    "string length": (
        make.by_hand([make.pair("k", 8, make.GB(1000) + bytes(40))], []), "the file ends inside"),
    "array count": (
        make.by_hand([make.pair("k", 9, make.U32(4) + make.GB(2**62))], []), "cannot fit"),
    "byte array count": (
        make.by_hand([make.pair("k", 9, make.U32(0) + make.GB(2**64 - 1))], []), "cannot fit"),
    "string array count": (
        make.by_hand([make.pair("k", 9, make.U32(8) + make.GB(2**61))], []), "cannot fit"),
    "string in array": (
        make.by_hand([make.pair("k", 9, make.U32(8) + make.GB(2) + make.text("a")
                                + make.GB(2**64 - 1))], [], DATA), "a string of"),
    "string array cut short": (
        make.by_hand([make.pair("k", 9, make.U32(8) + make.GB(2) + make.text(b"x" * 12))], [],
                     align=1), "the file ends"),
    "nested array": (
        make.by_hand([make.pair("k", 9, make.U32(9) + make.GB(1) + make.U32(9))], [], DATA),
        "array of arrays"),
    "value type": (make.by_hand([make.pair("k", 13, bytes(8))], []), "unknown value type 13"),
    "array type": (
        make.by_hand([make.pair("k", 9, make.U32(99) + make.GB(1))], [], DATA),
        "unknown value type 99"),
    "bool": (make.by_hand([make.pair("k", 7, b"\2")], [], DATA), "neither 0 nor 1"),
    "key twice": (make.by_hand([make.pair("k", 0, b"\1")] * 2, [], DATA), "twice"),
    "bad key": (make.by_hand([make.text(b"\xff\xfe") + make.U32(0) + b"\0"], [], DATA), "UTF-8"),
    "bad string": (make.by_hand([make.pair("k", 8, make.text(b"\xc3("))], [], DATA), "UTF-8"),
    "bad string in array": (
        make.by_hand([make.pair("k", 9, make.U32(8) + make.GB(1) + make.text(b"\xed\xa0\x80"))],
                     [], DATA), "UTF-8"),
    "tensor twice": (
        make.by_hand([], [ONE, make.info("a", (8,), 0, 32)], DATA), "appears twice"),
    "no dimensions": (make.by_hand([], [make.info("a", (), 0, 0)], DATA), "0 dimensions"),
    "five dimensions": (make.by_hand([], [make.info("a", (1,) * 5, 0, 0)], DATA), "5 dimensions"),
    "rank": (make.by_hand([], [make.text("a") + make.U32(2**32 - 1)], DATA), "dimensions"),
    "zero dimension": (make.by_hand([], [make.info("a", (8, 0), 0, 0)], DATA), "of zero"),
    "product wraps": (
        make.by_hand([], [make.info("a", (2**32, 2**32), 0, 0)], DATA), "larger than the file"),
    "product wraps to 8": (
        make.by_hand([], [make.info("a", (2**61 + 2, 4), 0, 0)], DATA), "larger than the file"),
    "half a block": (make.by_hand([], [make.info("a", (48,), 2, 0)], DATA), "whole Q4_0 blocks"),
    "misaligned": (make.by_hand([], [make.info("a", (4,), 0, 16)], DATA), "not aligned"),
    "overlap": (
        make.by_hand([], [make.info("a", (16,), 0, 0), make.info("b", (8,), 0, 32)], DATA),
        "overlap"),
    "same place": (make.by_hand([], [ONE, make.info("b", (8,), 0, 0)], DATA), "overlap"),
    "past the end": (make.by_hand([], [make.info("a", (8,), 0, 64)], DATA), "past the end"),
    "offset": (make.by_hand([], [make.info("a", (8,), 0, 2**64 - 32)], DATA), "past the end"),
    "no data": (make.by_hand([], [ONE], align=1), "ends before"),
    "alignment 0": (
        make.by_hand([make.pair("general.alignment", 4, make.U32(0))], [ONE], DATA), "power of"),
    "alignment 24": (
        make.by_hand([make.pair("general.alignment", 4, make.U32(24))], [ONE], DATA), "power of"),
    "alignment is text": (
        make.by_hand([make.pair("general.alignment", 8, make.text("32"))], [ONE], DATA),
        "power of"),
    "huge alignment": (
        make.by_hand([make.pair("general.alignment", 10, make.GB(BIG))], [ONE], DATA),
        "ends before"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_is_refused_with_its_reason(name: str, tmp_path: Path) -> None:
    data, reason = HOSTILE[name]
    with pytest.raises(BadFile, match=reason):
        read(tmp_path, data)


def test_what_we_do_not_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"'a' is of type Q2_K.*we read F32"):
        read(tmp_path, make.by_hand([], [make.info("a", (256,), 10, 0)], DATA))
    with pytest.raises(UnsupportedModel, match="type 4711"):
        read(tmp_path, make.by_hand([], [make.info("a", (256,), 4711, 0)], DATA))
    with pytest.raises(UnsupportedModel, match="big-endian"):
        read(tmp_path, b"GGUF\0\0\0\3" + bytes(56))
    with pytest.raises(UnsupportedModel, match="version 1 "):
        read(tmp_path, make.by_hand([], [], DATA, version=1))
    with pytest.raises(UnsupportedModel, match="one of 3 parts"):
        read(tmp_path, make.by_hand([make.pair("split.count", 2, b"\3\0")], [], DATA))


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for path, reason in [
        (tmp_path / "none", "No such file"),
        (tmp_path, "not a regular file"),
        (tmp_path / "empty", "is empty"),
        (Path("/dev/zero"), "not a regular file"),
    ]:
        with pytest.raises(BadFile, match=reason):
            read_gguf(path)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole small model with a tokenizer, in a few kilobytes."""
    path = tmp_path_factory.mktemp("valid") / "x.gguf"
    metadata: dict[str, Any] = {
        "tokenizer.ggml.tokens": [f"<{i}>" for i in range(96)],
        "tokenizer.ggml.scores": [0.5] * 96,
        "tokenizer.chat_template": "{{ messages }}",
        "general.flag": True,
    }
    return make.write(path, "qwen2", metadata=metadata).read_bytes()


def open_all(path: Path) -> None:
    """Read everything that a user of the file would read."""
    checkpoint = open_checkpoint(path)
    for name in checkpoint.names():
        dequantize(checkpoint.tensor(name))
        checkpoint.release(name)


def survives(path: Path, data: bytes) -> bool:
    """Whether it opened; anything but our two refusals propagates and fails the test."""
    path.write_bytes(data)
    try:
        with np.errstate(all="ignore"):
            open_all(path)
    except REFUSALS:
        return False
    return True


def test_every_truncation_is_refused(valid: bytes, tmp_path: Path) -> None:
    header = read(tmp_path, valid).data_start
    path = tmp_path / "cut.gguf"
    cuts = set(range(0, header, 7)) | set(range(header, len(valid), 4099)) | {len(valid) - 1}
    for cut in sorted(cuts):
        assert not survives(path, valid[:cut]), cut


def test_random_damage_only_ever_refuses(valid: bytes, tmp_path: Path) -> None:
    rng = random.Random(20)
    header = read(tmp_path, valid).data_start
    path, opened, n = tmp_path / "damaged.gguf", 0, 1500
    for _ in range(n):
        data = bytearray(valid)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(header)
            data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        opened += survives(path, bytes(data))
    assert 0 < opened < n


COUNTS = st.sampled_from([0, 1, 2, 3, 31, 32, 33, 255, 2**31, 2**32, 2**61, 2**63, 2**64 - 1])
NAMES = st.sampled_from(
    ["a", "general.alignment", "token_embd.weight", "llama.block_count", "split.count", ""]
) | st.text(max_size=8)
SCALARS = st.builds(
    lambda key, code, raw: make.pair(key, code, raw),
    NAMES, st.integers(0, 14), st.binary(min_size=1, max_size=12),
)  # fmt: skip
ARRAYS = st.builds(
    lambda key, code, n, raw: make.pair(key, 9, make.U32(code) + make.GB(n) + raw),
    NAMES, st.integers(0, 14), COUNTS, st.binary(max_size=40),
)  # fmt: skip
TEXTS = st.builds(lambda key, value: make.pair(key, 8, make.text(value)), NAMES, NAMES)
INFOS = st.builds(
    make.info, NAMES, st.lists(COUNTS, max_size=5).map(tuple),
    st.sampled_from([0, 1, 2, 3, 6, 7, 8, 12, 13, 14, 30, 31]), COUNTS | st.just(64),
)  # fmt: skip


@settings(max_examples=400, derandomize=True, deadline=None, database=None)
@given(
    pairs=st.lists(SCALARS | ARRAYS | TEXTS, max_size=4),
    infos=st.lists(INFOS, max_size=4),
    version=st.sampled_from([2, 3, 3, 3, 0, 1, 4, 2**24 * 3]),
    data=st.integers(0, 300),
)
def test_well_formed_nonsense_only_ever_refuses(
    pairs: list[bytes], infos: list[bytes], version: int, data: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    path = tmp_path_factory.getbasetemp() / "nonsense.gguf"
    path.write_bytes(make.by_hand(pairs, infos, bytes(data), version))
    try:
        found = read_gguf(path)
    except REFUSALS:
        return
    for stored in found.tensors.values():
        assert found.data_start <= stored.start
        assert stored.start + len(stored.data) <= found.source.size


@pytest.mark.parametrize("key", ["split.count", "general.alignment"])
@pytest.mark.parametrize("code", range(13))
def test_a_number_of_the_header_may_be_of_any_type_and_only_refuses(
    key: str, code: int, tmp_path: Path
) -> None:
    for raw in (bytes(16), b"\x01" + bytes(15), b"\xff" * 16):
        value = make.U32(4) + make.GB(1) + raw[:4] if code == 9 else raw
        path = tmp_path / "typed.gguf"
        path.write_bytes(make.by_hand([make.pair(key, code, value)], [], bytes(64), 3))
        with contextlib.suppress(*REFUSALS):
            read_gguf(path)


def test_absurd_counts_allocate_next_to_nothing(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        for data, _ in HOSTILE.values():
            with pytest.raises(BadFile):
                read(tmp_path, data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
