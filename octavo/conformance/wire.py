"""HTTP with every byte kept, and when it came: a client library would forgive what is tested here.

Standard library only. Nothing is retried, nothing is decoded before it is asked for.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from octavo.errors import InvalidRequest

PART = 65536


def key_in(path: str | None, param: str) -> str | None:
    """The first key of a file: a key alone, or a line as `octavo serve --api-key-file` reads them.

    Raises `InvalidRequest`, naming `param`, where there is none.
    """
    if path is None:
        return None
    for line in Path(path).read_text().splitlines():
        words = [word for word in line.split("#")[0].split() if "=" not in word and word != "admin"]
        if words and words[-1].isascii():
            return words[-1]
    raise InvalidRequest(f"{path} has no key", param)


@dataclass
class Answer:
    """A whole answer. Header names are lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @cached_property
    def json(self) -> Any:
        """The body as JSON, or None if it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


@dataclass(frozen=True)
class Event:
    """One line of an event stream: kind is the field's name, "" for a comment. at: seconds from the
    request's first byte; end: whether an empty line followed at once."""

    at: float
    kind: str
    text: str


@dataclass
class Stream:
    """What came of a streamed request. parts: (seconds since it was sent, bytes) as they came;
    clean: whether the connection ended as HTTP says; cut: whether we left before the end."""

    status: int
    headers: dict[str, str]
    parts: list[tuple[float, bytes]] = field(default_factory=list)
    clean: bool = True
    cut: bool = False
    path: str = ""

    @property
    def body(self) -> bytes:
        return b"".join(part for _, part in self.parts)

    def events(self) -> Iterator[Event]:
        """The lines that are not empty, each at the time when its end came."""
        rest = b""
        for at, part in self.parts:
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                text = line.rstrip(b"\r").decode("utf-8", "surrogateescape")
                if text:
                    kind, _, value = text.partition(":")
                    yield Event(at, kind, value.removeprefix(" "))

    @property
    def data(self) -> list[str]:
        return [event.text for event in self.events() if event.kind == "data"]

    @property
    def done(self) -> int:
        """How many [DONE] there are."""
        return self.data.count("[DONE]")

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The data that are JSON objects."""
        found = []
        for text in self.data:
            with contextlib.suppress(ValueError):
                value = json.loads(text)
                if isinstance(value, dict):
                    found.append(value)
        return found

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice for chunk in self.chunks for choice in chunk.get("choices") or ()]

    def pieces(self, index: int = 0) -> list[str]:
        """The pieces of a choice's text, empty ones left out; of chat or of completions."""
        of = [choice for choice in self.choices if choice.get("index", 0) == index]
        texts = [(c.get("delta") or {}).get("content") or c.get("text") or "" for c in of]
        return [text for text in texts if text]

    def text(self, index: int = 0) -> str:
        return "".join(self.pieces(index))

    def finish(self, index: int = 0) -> str | None:
        """The last finish_reason of a choice."""
        of = [c.get("finish_reason") for c in self.choices if c.get("index", 0) == index]
        return next((reason for reason in reversed(of) if reason), None)

    @property
    def failed(self) -> bool:
        """Whether it ended with an error event."""
        return any("error" in chunk for chunk in self.chunks)


class Pending:
    """A request that was sent and is not read: to be left, or looked at."""

    def __init__(self, wire: Wire, path: str, body: Any) -> None:
        self.connection = wire.connect()
        wire.send(self.connection, "POST", path, body)
        assert self.connection.sock is not None
        self.sock: socket.socket = self.connection.sock

    def answer(self) -> Answer:
        found = self.connection.getresponse()
        return Answer(found.status, _headers(found), found.read())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.connection.close()


class Wire:
    """Requests to one server. timeout: seconds without a byte. seen: every stream, for the checks
    that look at all of them."""

    def __init__(self, url: str, key: str | None = None, timeout: float = 120.0) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        self.tls = parts.scheme == "https"
        self.host = parts.hostname or "127.0.0.1"
        self.port = parts.port or (443 if self.tls else 80)
        self.root = parts.path.rstrip("/").removesuffix("/v1")
        self.key = key
        self.timeout = timeout
        self.seen: list[Stream] = []

    def connect(self) -> http.client.HTTPConnection:
        if self.tls:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(
                self.host, self.port, timeout=self.timeout, context=context
            )
        return http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)

    def send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Send a request; a body that is not bytes is sent as JSON."""
        said = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        if body is not None:
            said["Content-Type"] = "application/json"
            body = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, self.root + path, body, said | (headers or {}))

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """A whole answer. Raises OSError or HTTPException if there is none."""
        with contextlib.closing(self.connect()) as connection:
            self.send(connection, method, path, body, headers)
            found = connection.getresponse()
            return Answer(found.status, _headers(found), found.read())

    def stream(
        self,
        path: str,
        body: Any,
        until: Callable[[Stream], bool] = lambda _: False,
        headers: dict[str, str] | None = None,
    ) -> Stream:
        """Read to the end, or leave as soon as `until` says so."""
        start = time.monotonic()
        with contextlib.closing(self.connect()) as connection:
            self.send(connection, "POST", path, body, headers)
            found = connection.getresponse()
            stream = Stream(found.status, _headers(found), path=path)
            try:
                while part := found.read1(PART):
                    stream.parts.append((time.monotonic() - start, part))
                    if until(stream):
                        stream.cut = True
                        break
            except (http.client.HTTPException, ConnectionError):
                stream.clean = False
            found.close()
        if stream.status == 200:
            self.seen.append(stream)
        return stream


def _headers(found: http.client.HTTPResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in found.getheaders()}
