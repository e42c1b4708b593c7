"""uvicorn's HTTP protocol, with the caps that it lacks against strangers.

A head (request line and headers) may have so many bytes and take so long, from the connection's
first moment on: a client that sends nothing, a byte a second, or a header without end is closed
(408, 431). So many connections may be open; one more is told to come back and closed. What is no
HTTP is told so in the API's shape, like everything else that is refused.

A client that is answered before it has sent everything, for its body is too large or its head has
no end, can still read why: what it goes on sending is thrown away for a while before the connection
is closed. Closed with bytes unread, the system would reset it, and the answer be lost on the way
(RFC 9112, section 9.6).
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from octavo.config import ServerConfig

WRITER = "octavo.writer"  # in a scope's extensions: the connection's `Writer`
CODES = {
    400: "invalid_http",
    408: "head_timeout",
    431: "head_too_large",
    503: "server_overloaded",
}
SENDING = (400, 431)  # refusals of what may still be on its way
SPARE_FILES = 256  # descriptors that are not connections
MOST_FILES = 65_536


def most_files() -> int:
    """Raise this process's limit of open files as far as it may; what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return wanted if soft == resource.RLIM_INFINITY else soft


def wire(config: ServerConfig) -> type[asyncio.Protocol]:
    """The protocol for a server of that configuration."""
    least = max(1, most_files() - SPARE_FILES)
    most = config.max_connections if config.max_connections is not None else least

    class Wire(_Wire):
        max_connections = min(most, least)
        max_head = config.max_head
        head_seconds = config.head_timeout

    return Wire


class Writer:
    """The way of a stream's bytes past ASGI, from one function call to the socket.

    A task that is woken, a message and three coroutines for every token of every stream cost more
    than the text itself. Only between the head of a chunked answer and its end, which go through
    ASGI like any other; what it writes is one chunk.
    """

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def ready(self) -> bool:
        """Whether the client takes bytes now: it is there and has read enough of the last ones."""
        cycle = self._cycle
        return (
            cycle.chunked_encoding is True
            and cycle.response_started
            and not (cycle.disconnected or cycle.response_complete or cycle.flow.write_paused)
            and not cycle.transport.is_closing()
        )

    def write(self, body: bytes) -> None:
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


LINGER = 30.0  # seconds that a client which was answered early may go on sending
FEW_AHEAD = 8  # requests that a client may send ahead and still be noticed when it leaves


class TooLong(Exception):
    """The head has more bytes than it may."""


class _Transport:
    """A connection as its request sees it: writing goes straight there, closing is the protocol's.

    So uvicorn, which closes after the last byte of an answer, leaves the client time to read it.
    """

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, inner: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = inner.write
        self.is_closing = inner.is_closing
        self.close = close


class _Wire(HttpToolsProtocol):
    max_connections = 0
    max_head = 0
    head_seconds = 0.0

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._in_head = True
        self._between = True  # whether what comes next begins a head
        # Bytes of the head that comes, empty lines before it among them; in a body, those since the
        # last that were its own: of a trailer or a chunk's extension that has no end.
        self._size = 0
        self._fed = 0  # bytes that are being parsed, if they begin with a head
        self._parsed = 0  # bytes of url and headers, of a head that began within a piece
        self._parting = False  # all is said, and what still comes is thrown away
        self._timer: asyncio.TimerHandle | None = None
        self._open: list[RequestResponseCycle] = []  # begun and not answered, pipelined ones too

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._close(503, "all connections of this server are taken", b"retry-after: 5\r\n")
        else:
            self._wind_up()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwind()
        super().connection_lost(exc)  # tells the latest request only
        self._tell_all()

    def data_received(self, data: bytes) -> None:
        # The parser gets of a head what it may have and no more: one in a single piece is counted
        # to the byte too; where a client sends ahead, by the parser's names and values.
        while data and not self._over:
            room = len(data)
            if self._in_head or self._between:
                room = self.max_head - self._size
                if room <= 0:
                    return self._close(431, f"a request's head may have {self.max_head} bytes")
            piece, data = data[:room], data[room:]
            self._size += len(piece)
            self._fed = self._size if self._between else 0
            super().data_received(piece)
            if self._size > self.max_head and not (self._in_head or self._between or self._over):
                return self._close(431, f"what is beside a body may have {self.max_head} bytes")
        if self._idle and self._timer is None and self.timeout_keep_alive_task is None:
            # What came is no request, an empty line perhaps, or the rest of one that was answered.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._between = True, False
        self._size, self._fed, self._parsed = self._fed, 0, 0
        if self._timer is None:
            self._wind_up()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        if self._in_head:  # a trailer is no header (RFC 9110, section 6.5.1)
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._size = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._unwind()
        super().on_headers_complete()
        cycle = self.cycle
        if cycle is not None and cycle.scope is self.scope:
            parting = _Transport(self.transport, partial(self._answered, cycle))
            cycle.transport = parting  # type: ignore[assignment]
            self.scope["extensions"] = {WRITER: Writer(cycle)}  # type: ignore[dict-item]
            self._open = [other for other in self._open if not other.response_complete]
            self._open.append(cycle)
        if 0 < len(self.pipeline) <= FEW_AHEAD:
            self.flow.resume_reading()  # or it would not be seen that the client leaves

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._between, self._size = True, 0
        self._unwind()  # of a body that was answered before it had come

    def on_response_complete(self) -> None:
        super().on_response_complete()
        early = self.cycle.response_complete and self.cycle.more_body
        if early and not self._over and self._timer is None:
            self._timer = self.loop.call_later(LINGER, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        if self._over:
            return
        if self._parsed > self.max_head:
            self._close(431, f"a request's head may have {self.max_head} bytes")
        else:
            self._close(400, "this is no HTTP that is understood here")

    def _count(self, size: int) -> None:
        self._parsed += size
        if self._parsed > self.max_head:
            raise TooLong  # the parser stops; `send_400_response` is called then

    def _wind_up(self) -> None:
        self._timer = self.loop.call_later(self.head_seconds, self._late)

    def _unwind(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def _over(self) -> bool:
        return self._parting or self.transport.is_closing()

    @property
    def _idle(self) -> bool:
        """Whether all that was asked is answered."""
        answered = self.cycle is not None and self.cycle.response_complete
        return answered and not (self._in_head or self._over)

    def _tell_all(self) -> None:
        """To requests that are not answered the client is gone: nothing reaches it any more."""
        for cycle in self._open:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._open.clear()

    def _answered(self, cycle: RequestResponseCycle) -> None:
        """The last byte of the connection is written."""
        if cycle.more_body:
            self._part()
        else:
            self.transport.close()

    def _part(self) -> None:
        """Write no more, and close when the client does, or after a while."""
        if self._over:
            return
        self._parting = True
        self._tell_all()
        self._unwind()
        self.flow.resume_reading()
        if self.transport.can_write_eof():  # not with TLS; an answer's length says its end too
            self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER, self.transport.close)

    def _late(self) -> None:
        self._timer = None
        if not self._over:
            self._close(408, f"the head did not come within {self.head_seconds:g} s")

    def _close(self, status: int, text: str, more: bytes = b"") -> None:
        """Say it in OpenAI's shape, as far as the client reads, and close."""
        self._unwind()
        kind = "server_error" if status == 503 else "invalid_request_error"
        code = CODES[status]
        body = (
            f'{{"error":{{"message":"{text}","type":"{kind}","param":null,"code":"{code}"}}}}'
        ).encode()
        head = b"HTTP/1.1 %d \r\ncontent-type: application/json\r\nconnection: close\r\n" % status
        length = b"content-length: %d\r\n" % len(body)
        self.transport.write(head + more + length + b"\r\n" + body)
        if status in SENDING:
            self._part()
        else:
            self.transport.close()
