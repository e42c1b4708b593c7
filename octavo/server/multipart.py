"""multipart/form-data as it comes, in bounded memory (RFC 7578; RFC 2046, section 5.1.1).

Bytes go in, in pieces cut anywhere; parts come out through a `Sink`. Nothing of a part's content
is held but what may be the beginning of a boundary.
"""

from __future__ import annotations

import re
from typing import Protocol

from octavo.errors import InvalidRequest

MOST_HEADERS = 8 * 1024
MOST_PARTS = 16
_BOUNDARY = re.compile(r"multipart/form-data\s*;.*?\bboundary=(?:\"([^\"]+)\"|([^;\s]+))", re.I)
_PARAMETER = re.compile(r";\s*([a-z*]+)\s*=\s*(?:\"((?:[^\"\\]|\\.)*)\"|([^;\s\"]+))", re.I)


class Sink(Protocol):
    """Takes parts: begin, its content in pieces, end."""

    def begin(self, name: str, filename: str | None) -> None: ...
    def take(self, content: bytes) -> None: ...
    def end(self) -> None: ...


def boundary_of(content_type: str) -> bytes:
    """The boundary that a Content-Type names. Raises `InvalidRequest`."""
    found = _BOUNDARY.match(content_type)
    boundary = (found[1] or found[2]) if found else ""
    if not 0 < len(boundary) <= 70 or not boundary.isascii():
        raise InvalidRequest("the body must be multipart/form-data with a boundary", "file")
    return boundary.encode()


class Multipart:
    """One body. `feed` raises `InvalidRequest` for what is malformed, and what the sink raises."""

    def __init__(self, boundary: bytes, sink: Sink) -> None:
        self._mark = b"\r\n--" + boundary
        self._sink = sink
        self._held = b"\r\n"  # so that the first boundary looks like the others
        self._state = self._preamble
        self._parts = 0
        self.done = False

    def feed(self, data: bytes) -> None:
        self._held += data
        while not self.done and self._state():
            pass
        if self.done:
            self._held = b""  # an epilogue means nothing

    def close(self) -> None:
        """The body is over. Raises `InvalidRequest` if it was cut short."""
        if not self.done:
            raise InvalidRequest("the multipart body ends before its last boundary", "file")

    def _up_to_mark(self) -> tuple[bytes, bool]:
        """Content before the next boundary, and whether that is here."""
        at = self._held.find(self._mark)
        if at >= 0:
            content, self._held = self._held[:at], self._held[at + len(self._mark) :]
            return content, True
        keep = len(self._mark) - 1
        content, self._held = self._held[:-keep], self._held[-keep:]
        return content, False

    def _preamble(self) -> bool:
        _, found = self._up_to_mark()
        if found:
            self._state = self._after_mark
        return found

    def _after_mark(self) -> bool:
        """Two dashes end the body; else spaces and a line's end, and a part begins."""
        if len(self._held) < 2:
            return False
        if self._held.startswith(b"--"):
            self.done = True
            return False
        rest = self._held.lstrip(b" \t")
        if len(rest) < 2:
            if len(self._held) > MOST_HEADERS:
                raise InvalidRequest("a multipart boundary is malformed", "file")
            return False
        if not rest.startswith(b"\r\n"):
            raise InvalidRequest("a multipart boundary is malformed", "file")
        self._held = rest  # its line end may be the empty line of a part without headers
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise InvalidRequest(f"a form may have at most {MOST_PARTS} parts", "file")
        self._state = self._headers
        return True

    def _headers(self) -> bool:
        at = self._held.find(b"\r\n\r\n")
        if at > MOST_HEADERS or (at < 0 and len(self._held) > MOST_HEADERS):
            raise InvalidRequest("a part's headers are too long", "file")
        if at < 0:
            return False
        lines, self._held = self._held[:at], self._held[at + 4 :]
        self._sink.begin(*_disposition(lines))
        self._state = self._content
        return True

    def _content(self) -> bool:
        content, found = self._up_to_mark()
        if content:
            self._sink.take(content)
        if found:
            self._sink.end()
            self._state = self._after_mark
        return found


def _disposition(lines: bytes) -> tuple[str, str | None]:
    """(name, file name) of a part's headers."""
    try:
        text = lines.decode()
    except UnicodeDecodeError:
        raise InvalidRequest("a part's headers are no UTF-8", "file") from None
    for line in text.split("\r\n"):
        title, _, value = line.partition(":")
        if title.strip().lower() != "content-disposition":
            continue
        kind, semicolon, _ = value.partition(";")
        if kind.strip().lower() != "form-data":
            break
        found = {
            name.lower(): re.sub(r"\\(.)", r"\1", quoted) or plain
            for name, quoted, plain in _PARAMETER.findall(semicolon + value.partition(";")[2])
        }
        if "name" in found:
            return found["name"], found.get("filename")
    raise InvalidRequest("a part has no Content-Disposition: form-data with a name", "file")
