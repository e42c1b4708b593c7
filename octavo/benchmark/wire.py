"""HTTP as a load client needs it: raw sockets, every piece kept with the time it came.

One connection a request, closed after the answer. While the load runs nothing is parsed; what the
pieces say is read afterwards, so that the client's share of the machine stays small.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from array import array
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from octavo.errors import InvalidRequest
from octavo.terminal import unreached

Pieces = list[tuple[float, bytes]]
Make = Callable[[], asyncio.Protocol]
Dial = Callable[[Make], Awaitable[Any]]
LAST_CHUNK = b"\r\n0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Target:
    """Where a server is. base: what stands before /v1 in its paths."""

    host: str
    port: int
    tls: bool = False
    base: str = ""

    @classmethod
    def of(cls, url: str) -> Target:
        """From http://host:port, with or without /v1 at its end. Raises `InvalidRequest`."""
        full = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(full)
            port = parts.port
        except ValueError as error:
            raise InvalidRequest(f"{url!r} is no address of a server: {error}", "url") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise InvalidRequest(
                f"{url!r} is no address of a server; write it like http://127.0.0.1:8000", "url"
            )
        tls = parts.scheme == "https"
        base = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, base)

    def message(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> bytes:
        """A whole request as it goes over the wire."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.base}{path} HTTP/1.1", f"host: {host}:{self.port}"]
        lines += ["connection: close", f"content-length: {len(body)}"]
        if body:
            lines.append("content-type: application/json")
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        return "\r\n".join((*lines, "", "")).encode("latin-1") + body


class Exchange(asyncio.Protocol):
    """One request and what came of it. Times are the loop's: begun, when it was to be sent;
    connected, when it was; ended, when the answer was over. fault: why there is no whole answer."""

    def __init__(self, message: bytes) -> None:
        loop = asyncio.get_running_loop()
        self._now = loop.time
        self._message = message
        self._transport: asyncio.Transport | None = None
        self.done: asyncio.Future[None] = loop.create_future()
        self.times = array("d")
        self.pieces: list[bytes] = []
        self.begun = self._now()
        self.connected: float | None = None
        self.ended = self.begun
        self.fault: str | None = None

    def connection_made(self, transport: Any) -> None:
        self.connected = self._now()
        self._transport = transport
        transport.write(self._message)
        self._message = b""

    def data_received(self, data: bytes) -> None:
        self.times.append(self._now())
        self.pieces.append(data)
        # Some servers keep a connection open although they were asked to close it.
        if data.endswith(LAST_CHUNK) and self._transport is not None:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(f"{type(exc).__name__}: {exc}" if exc is not None else None)

    def end(self, fault: str | None) -> None:
        """It is over; the first word counts."""
        if not self.done.done():
            self.ended, self.fault = self._now(), fault
            self.done.set_result(None)

    def abandon(self, fault: str) -> None:
        """Nobody waits for it any more."""
        self.end(fault)
        if self._transport is not None:
            self._transport.abort()


async def exchange(dial: Dial, message: bytes, timeout: float) -> Exchange:
    """Send one request over a connection of its own, and wait for the end of its answer.

    Never raises for what the server or the network does: that is in `fault`.
    """
    one = Exchange(message)
    try:
        async with asyncio.timeout(timeout):
            await dial(lambda: one)
            await asyncio.shield(one.done)
    except TimeoutError:
        one.abandon(f"no whole answer within {timeout:g} s")
    except OSError as error:
        one.end(f"{type(error).__name__}: {error}")
    return one


def dialer(target: Target) -> Dial:
    """How connections are made: the name is looked up once. Raises `InvalidRequest` where nobody
    answers."""
    try:
        with socket.create_connection((target.host, target.port), 10.0) as found:
            address = str(found.getpeername()[0])
    except OSError as error:
        where = f"{target.host}:{target.port}"
        why = unreached(target.host, target.port, error)
        raise InvalidRequest(f"no server at {where}: {why}", "url") from error
    context = ssl.create_default_context() if target.tls else None
    name = target.host if target.tls else None

    def dial(make: Make) -> Awaitable[Any]:
        loop = asyncio.get_running_loop()
        return loop.create_connection(make, address, target.port, ssl=context, server_hostname=name)

    return dial


# ---- what came, read afterwards ----


@dataclass(frozen=True, slots=True)
class Answer:
    """status 0: there was none. body: its bytes, with the time at which each piece of them came.
    whole: whether it came to its end."""

    status: int
    headers: Mapping[str, str]
    body: Pieces
    whole: bool

    @property
    def content(self) -> bytes:
        return b"".join(data for _, data in self.body)


def read(times: Iterable[float], pieces: Iterable[bytes]) -> Answer:
    """The answer in the pieces of an exchange. Raises ValueError where they are no HTTP."""
    came = list(zip(times, pieces, strict=True))
    head, rest = _head(came)
    if head is None:
        return Answer(0, {}, [], whole=False)
    first, *lines = head.split(b"\r\n")
    words = first.split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1."):
        raise ValueError(f"no HTTP/1.1: {first[:60]!r}")
    status = int(words[1])
    pairs = (line.decode("latin-1").partition(":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body, whole = _unchunked(rest)
        return Answer(status, headers, body, whole)
    length = headers.get("content-length")
    size = sum(len(data) for _, data in rest)
    return Answer(status, headers, rest, length is None or size >= int(length))


def _head(came: Pieces) -> tuple[bytes | None, Pieces]:
    """The head of an answer, and the pieces behind it."""
    held = b""
    for index, (at, data) in enumerate(came):
        held += data
        end = held.find(b"\r\n\r\n")
        if end >= 0:
            more = held[end + 4 :]
            return held[:end], [*([(at, more)] if more else []), *came[index + 1 :]]
    return None, []


def _unchunked(came: Pieces) -> tuple[Pieces, bool]:
    """Without the framing of chunks (RFC 9112, 7.1); whether the last one was there."""
    body: Pieces = []
    held, left = bytearray(), -1  # left: of the chunk that is being read; -1: its size comes
    for at, data in came:
        held += data
        out = bytearray()
        while True:
            if left < 0:
                end = held.find(b"\r\n")
                if end < 0:
                    break
                left = int(bytes(held[:end]).partition(b";")[0], 16)
                del held[: end + 2]
                if left == 0:
                    return [*body, *([(at, bytes(out))] if out else [])], True
            if len(held) < left + 2:  # a chunk counts once it is there with its line's end
                break
            out += held[:left]
            del held[: left + 2]
            left = -1
        if out:
            body.append((at, bytes(out)))
    return body, False


def events(body: Pieces) -> Iterator[tuple[float, bytes]]:
    """(when its last byte came, data) of each line of data in a stream of server-sent events."""
    held = b""
    for at, data in body:
        *lines, held = (held + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield at, line[5:].strip()


def whole_number(text: str | None) -> int | None:
    """Of a header; None where there is none."""
    with contextlib.suppress(ValueError, TypeError):
        return int(text or "")
    return None
