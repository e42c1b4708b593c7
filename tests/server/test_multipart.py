"""Laws of the form parser: cut anywhere, it gives the same parts; hostile bytes give an error."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import InvalidRequest
from octavo.server.multipart import MOST_HEADERS, MOST_PARTS, Multipart, boundary_of

MARK = b"mark-1"


class Gathered:
    def __init__(self) -> None:
        self.parts: list[list] = []

    def begin(self, name: str, filename: str | None) -> None:
        self.parts.append([name, filename, b""])

    def take(self, content: bytes) -> None:
        self.parts[-1][2] += content

    def end(self) -> None:
        self.parts[-1] = tuple(self.parts[-1])


def written(parts: list[tuple[str, str | None, bytes]], mark: bytes = MARK) -> bytes:
    out = b""
    for name, filename, content in parts:
        said = f'form-data; name="{name}"' + (f'; filename="{filename}"' if filename else "")
        out += b"--" + mark + b"\r\nContent-Disposition: " + said.encode() + b"\r\n"
        out += b"Content-Type: application/octet-stream\r\n\r\n" + content + b"\r\n"
    return out + b"--" + mark + b"--\r\n"


def read(body: bytes, cuts: list[int] = []) -> list[tuple]:  # noqa: B006
    sink = Gathered()
    parser = Multipart(MARK, sink)
    edges = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    for start, end in pairwise(edges):
        parser.feed(body[start:end])
    parser.close()
    return sink.parts


CONTENT = st.one_of(
    st.binary(max_size=60),
    st.lists(st.sampled_from([b"\r\n--", MARK, b"\r", b"\n", b"--", b"x"]), max_size=8).map(
        b"".join
    ),
)
NAMES = st.text("abcdefgh", min_size=1, max_size=5)


@given(
    st.lists(st.tuples(NAMES, st.one_of(st.none(), NAMES), CONTENT), min_size=1, max_size=4),
    st.lists(st.integers(0, 10_000), max_size=12),
)
@settings(max_examples=300, derandomize=True, deadline=None)
def test_parts_come_out_as_they_went_in_however_the_body_is_cut(parts, cuts) -> None:
    if any(b"\r\n--" + MARK in b"\r\n" + content + b"\r\n" for _, _, content in parts):
        return  # no writer may choose a boundary that its content holds
    assert read(written(parts), cuts) == parts


@given(st.binary(max_size=200), st.lists(st.integers(0, 300), max_size=6))
@settings(max_examples=300, derandomize=True, deadline=None)
def test_any_bytes_are_parts_or_a_refusal(body, cuts) -> None:
    for tried in (body, b"--" + MARK + body, b"--" + MARK + b"\r\n" + body):
        try:
            read(tried, cuts)
        except InvalidRequest:
            continue


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--mark-1",
        b"--mark-1\r\n",
        written([("a", None, b"x")])[:-8],
        b"--mark-1\r\n\r\nno headers\r\n--mark-1--\r\n",
        b"--mark-1\r\nContent-Disposition: attachment; name=x\r\n\r\nx\r\n--mark-1--\r\n",
        b"--mark-1\r\nContent-Disposition: form-data\r\n\r\nx\r\n--mark-1--\r\n",
        b"--mark-1\r\nContent-Disposition: form-data; name=\xff\r\n\r\nx\r\n--mark-1--\r\n",
        b"--mark-1 x\r\nContent-Disposition: form-data; name=x\r\n\r\nx\r\n--mark-1--\r\n",
        b"--mark-1\r\nX: " + b"y" * MOST_HEADERS + b"\r\n\r\n",
        written([("a", None, b"")] * (MOST_PARTS + 1)),
    ],
)
def test_a_malformed_form_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read(body)


def test_nothing_of_a_part_is_held_but_the_beginning_of_a_boundary() -> None:
    sink = Gathered()
    parser = Multipart(MARK, sink)
    parser.feed(written([("file", "x", b"")])[: -len(b"\r\n--mark-1--\r\n")])
    for _ in range(100):
        parser.feed(b"0" * 4096)
    assert len(parser._held) < len(MARK) + 4
    assert len(sink.parts[0][2]) > 99 * 4096


def test_names_may_be_quoted_escaped_or_bare() -> None:
    body = (
        b'--mark-1\r\ncontent-disposition: Form-Data; Name="a\\"b"; filename=c.txt\r\n\r\nx\r\n'
        b"--mark-1--\r\nwhat follows means nothing"
    )
    assert read(body) == [('a"b', "c.txt", b"x")]


@pytest.mark.parametrize(
    ("kind", "boundary"),
    [
        ("multipart/form-data; boundary=abc", b"abc"),
        ('multipart/form-data; charset=utf-8; boundary="a b"', b"a b"),
        ("Multipart/Form-Data;boundary=x", b"x"),
    ],
)
def test_the_boundary_is_found(kind: str, boundary: bytes) -> None:
    assert boundary_of(kind) == boundary


@pytest.mark.parametrize(
    "kind",
    ["", "application/json", "multipart/form-data", f"multipart/form-data; boundary={'x' * 71}"],
)
def test_no_boundary_no_form(kind: str) -> None:
    with pytest.raises(InvalidRequest):
        boundary_of(kind)
