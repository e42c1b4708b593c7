"""One generating request on the wire, from its body to its last byte: one write per step.

Raises before the first byte, so that a refusal has its status; after it, an error event is the way
the OpenAI API has to say that something went wrong. Where the connection has a `Writer`, the steps
in the middle of a stream are written as they are delivered, without waking the request's task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from octavo.core.admission import Admission
from octavo.core.admission import Ticket as Counted
from octavo.core.request import Request, Tier
from octavo.errors import Overloaded
from octavo.server.deadlines import in_force
from octavo.server.decoding import Ignored, said_ignored
from octavo.server.driver import Admitted, Driver, Failed, News, Ticket
from octavo.server.headers import header
from octavo.server.metrics import Metrics
from octavo.server.reply import Asked, Reply, ShapeMaker
from octavo.server.wire import Writer


@dataclass(frozen=True, slots=True)
class Job:
    """A parsed request body. clamped: it asked for tighter deadlines than its key may. ignored: its
    fields that nobody here knows."""

    requests: tuple[Request, ...]
    asked: Asked
    shape: ShapeMaker
    clamped: bool = False
    ignored: Ignored = ()


def _served_at(tier: Tier, job: Job) -> Asked:
    """How the answer is wanted, with the tier that admission left it."""
    asked, was = job.asked, job.requests[0].tier
    if asked.head.tier is None or tier is was:
        return asked
    return replace(asked, head=replace(asked.head, tier=tier.name.lower()))


class Exchange:
    """One generating request, from admission to its last byte."""

    def __init__(
        self, driver: Driver, metrics: Metrics, admission: Admission, job: Job, counted: Counted
    ) -> None:
        self.driver = driver
        self.metrics = metrics
        self.admission = admission
        self.job = job
        self.counted = counted
        self.arrival = job.requests[0].arrival
        self.first: float | None = None
        self.scheduled: float | None = None  # these two of one that was left, as far as it came
        self.pace: float | None = None
        driver.check()  # it may have been lost while the body was parsed
        requests = admission.judge_all(job.requests, driver.clock(), counted.key)
        self.ticket = Ticket(requests)
        self.reply = Reply(_served_at(requests[0].tier, job), job.shape, requests)
        self.outcome = "error"

    def _said(self) -> list[tuple[bytes, bytes]]:
        """What is promised, as headers: the deadlines in force and the first token's forecast."""
        first = self.ticket.requests[0]
        wanted = self.job.requests[0].slo
        words = in_force(first.slo)
        if wanted and not first.slo:
            words = "degraded"
        elif self.job.clamped:
            words = f"clamped, {words}" if words else "clamped"
        headers = [(b"x-octavo-slo", words.encode())] if words else []
        if words and first.predicted is not None:
            expected = b"%.0f" % (first.predicted.ttft * 1e3)
            headers.append((b"x-octavo-predicted-ttft-ms", expected))
        return headers + said_ignored(self.job.ignored)

    async def run(self, receive: Receive, send: Send, writer: Writer | None = None) -> None:
        """Answer, or raise before the first byte. A client that leaves ends the request. writer: of
        the connection behind `send`, if it has one."""
        driver = self.driver
        watch = asyncio.create_task(self._watch(receive))
        self.ticket.task = asyncio.current_task()
        driver.add(self.ticket)
        try:
            if self.job.asked.stream:
                await self._stream(send, writer)
            else:
                await self._whole(send)
        except OSError:
            self.outcome = "abort"  # the client went away while we wrote
        except asyncio.CancelledError:
            if not self.ticket.gone:
                raise
            self.outcome = "abort"  # the client stopped reading
        finally:
            watch.cancel()
            if self.outcome == "abort":
                self._left()
            driver.release(self.ticket)
            for request in self.ticket.requests:  # of one that no engine ever took
                self.admission.forget(request)
            self._measure()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.ticket.gone = True
        self.ticket.wake()

    async def _step(self) -> bytes:
        """Wait for news; what to send of it. Raises what the request failed of."""
        events = []
        for item in await self.ticket.take():
            if isinstance(item, tuple):
                events.append(item)
            elif isinstance(item, Failed):
                raise item.error
        if not events:
            return b""
        if self.first is None and any(event.tokens for _, event in events):
            self.first = self.driver.clock()
            self.admission.first_token(self.counted)
        return self.reply.feed(events)

    async def _whole(self, send: Send) -> None:
        while self.reply.open_choices:
            await self._step()
            if self.ticket.gone:
                self.outcome = "abort"
                return
        self.outcome = self._finish()
        body = self.reply.whole()
        await send(_start(200, b"application/json", self._said(), len(body)))
        await self._send(send, body)

    def _at_once(self, writer: Writer) -> Callable[[list[News]], bool]:
        """What writes the news of a step in the middle of the stream, from within its delivery; the
        first token, the end, faults and connections that are full are left to the task."""
        ticket, clock = self.ticket, self.driver.clock

        def read(news: list[News]) -> bool:
            if self.first is None or not writer.ready:
                return False
            events = []
            for item in news:
                if not isinstance(item, tuple) or item[1].finish is not None or item[1].error:
                    return False
                events.append(item)
            try:
                out = self.reply.feed(events)
            except Exception as error:
                ticket.news = [Failed(error)]  # for the task, which ends the stream with it
                return False
            if out:
                ticket.touched = clock()
                writer.write(out)
            return True

        return read

    async def _stream(self, send: Send, writer: Writer | None) -> None:
        ticket = self.ticket
        await self._admitted()
        if ticket.gone:
            self.outcome = "abort"
            return
        await send(_start(200, b"text/event-stream; charset=utf-8", self._said()))
        ticket.touched = self.driver.clock()
        first = self.reply.start()
        if first:
            await self._send(send, first, True)
        if writer is not None:
            ticket.reader = self._at_once(writer)
        try:
            while self.reply.open_choices:
                out = await self._step()
                if ticket.gone:
                    self.outcome = "abort"
                    return
                if ticket.ping:
                    ticket.ping = False
                    out = out or self.reply.shape.ping
                if out:
                    await self._send(send, out, True)
            self.outcome = self._finish()
            last = b""
        except OSError:
            raise
        except Exception as error:
            last = self.reply.failure(error)  # the status is out: an event has to say it
        await self._send(send, last)

    async def _send(self, send: Send, body: bytes, more: bool = False) -> None:
        ticket = self.ticket
        ticket.touched = self.driver.clock()
        ticket.sending = True
        await send({"type": "http.response.body", "body": body, "more_body": more})
        ticket.sending = False

    async def _admitted(self) -> None:
        """Wait until the engine has taken the request, so that a refusal has its status."""
        ticket = self.ticket
        while not ticket.gone:
            for index, item in enumerate(ticket.news):
                if isinstance(item, Failed):
                    raise item.error
                if isinstance(item, Admitted):
                    del ticket.news[index]
                    return
            kept, ticket.news = ticket.news, []
            ticket.news = kept + await ticket.take()

    def _finish(self) -> str:
        reasons = {str(choice.finish) for choice in self.reply.choices}
        return reasons.pop() if len(reasons) == 1 else "mixed"

    def _left(self) -> None:
        """How far it came: its sequences' own times will be here only once they are aborted."""
        scheduler = self.admission.scheduler
        live = (seq for request in self.ticket.requests for seq in scheduler.choices(request.id))
        begun = [seq.first_scheduled for seq in live if seq.first_scheduled is not None]
        self.scheduled = min(begun, default=None)
        most = max((choice.num_tokens for choice in self.reply.choices), default=0)
        if self.first is not None and most > 1:
            self.pace = (self.driver.clock() - self.first) / (most - 1)

    def _measure(self) -> None:
        """Count the request once, when it is over."""
        metrics, reply, now = self.metrics, self.reply, self.driver.clock()
        metrics.requests.labels(self.outcome).inc()
        if self.first is None:
            return
        metrics.ttft.observe(self.first - self.arrival)
        if self.outcome in ("error", "abort"):
            return
        metrics.e2e.observe(now - self.arrival)
        most = max(choice.num_tokens for choice in reply.choices)
        if most > 1:
            metrics.tpot.observe((now - self.first) / (most - 1))


def _start(
    status: int, kind: bytes, said: list[tuple[bytes, bytes]], length: int | None = None
) -> Message:
    headers = [(b"content-type", kind), (b"cache-control", b"no-store"), *said]
    if length is None:
        headers.append((b"x-accel-buffering", b"no"))  # proxies must not gather the stream
    else:
        headers.append((b"content-length", b"%d" % length))
    return {"type": "http.response.start", "status": status, "headers": headers}


class Bodies:
    """Bytes of request bodies that are being read, of all connections together.

    Without a limit, clients that send most of a body and wait would fill the memory.
    """

    def __init__(self, most_each: int, most: int) -> None:
        self.most_each = most_each
        self.most = most
        self.held = 0

    async def read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body, or None if the client left.

        Raises HTTP 413 for one above `most_each` bytes, `Overloaded` while all hold `most`.
        """
        declared = header(scope, b"content-length")
        if declared.isdecimal() and int(declared) > self.most_each:
            raise self._too_large()
        body = bytearray()
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                part = message.get("body", b"")
                if len(body) + len(part) > self.most_each:
                    raise self._too_large()
                if self.held + len(part) > self.most:
                    raise Overloaded(
                        "too many request bodies are being sent at once (--max-bodies)", 5.0
                    )
                self.held += len(part)
                body += part
                if not message.get("more_body"):
                    return bytes(body)
        finally:
            self.held -= len(body)

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"the body may have at most {self.most_each} bytes (--max-body)")
