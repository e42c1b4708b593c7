"""The way into the engine that generating endpoints share: a place, a body, a job, an answer."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from octavo.core.admission import Ticket as Counted
from octavo.core.request import Slo, Tier, shown
from octavo.door import Caller
from octavo.errors import InvalidRequest, TimedOut
from octavo.server import protocol
from octavo.server.auth import Key
from octavo.server.deadlines import Granted
from octavo.server.exchange import Exchange, Job
from octavo.server.headers import header
from octavo.server.reply import Asked, Head
from octavo.server.service import Service
from octavo.server.traces import Trace
from octavo.server.wire import WRITER

TIMEOUT = "x-octavo-timeout-ms"
MOST_NAME = 64  # characters of a tenant's; OpenAI's safety_identifier has no more


@dataclass(frozen=True, slots=True)
class Visit:
    """What is known of a request before its body is read."""

    key: Key | None
    arrival: float
    asked: Slo


Parse = Callable[[Service, bytes, Visit], Job]  # of a body; may run in a thread


class Generate:
    """A generating endpoint, as a raw ASGI application."""

    def __init__(self, service: Service, parse: Parse) -> None:
        self._service = service
        self._parse = parse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, key, trace = self._service, scope["octavo.key"], scope["octavo.trace"]
        service.check_open()
        trace.meter = service.meters.of(key)
        limit = request_timeout(scope, service.config.timeout)
        trace.slo = asked = service.deadlines.asked(scope)
        # A place is taken only when the body is here: a client that trickles it holds none.
        data = await body_of(service, scope, receive)
        if data is None:
            return
        trace.arrival = arrival = service.driver.clock()
        trace.num_bytes = len(data)
        service.check_open()
        service.driver.check()
        deadline = Deadline(limit, service.config.timeout)
        with service.meters.enter(trace.meter) as lease:
            # Counted before it is parsed: a flood must not be tokenised before it is refused.
            # known: when it comes again.
            name = key.name if key else ""
            known = hash((name, data, asked.deadlines)) if service.deadlines.kept else None
            held = service.deadlines.held(asked, key, data)
            ticket = service.admission.enter(name, len(data), held, arrival, known)
            service.occupancy.enter()
            try:
                visit = Visit(key, arrival, asked)
                try:
                    async with asyncio.timeout_at(deadline.at):
                        job = await parsed(service, self._parse, data, visit, receive)
                except TimeoutError:
                    raise deadline.error from None
                trace.measure(job.requests)
                lease.reserve(job.requests)
                exchange = self._admitted(job, ticket, trace)
                writer = scope.get("extensions", {}).get(WRITER)
                try:
                    with _limited(exchange, deadline, trace):
                        await exchange.run(receive, send, writer)
                finally:
                    lease.used = trace.num_prompt + trace.num_output
            finally:
                service.occupancy.leave()
                service.admission.leave(ticket)

    def _admitted(self, job: Job, ticket: Counted, trace: Trace) -> Exchange:
        """The job, judged and on record. Raises `Unattainable`."""
        service = self._service
        service.admission.learn(ticket, trace.num_prompt)
        exchange = Exchange(service.driver, service.metrics, service.admission, job, ticket)
        trace.stream = job.asked.stream
        service.traces.enter(trace, job.asked.head.id, job.requests)
        return exchange


async def parsed(
    service: Service, parse: Parse, data: bytes, visit: Visit, receive: Receive | None = None
) -> Job:
    """The job of a body, parsed where that holds nobody up. Raises what `parse` does, and HTTP 499
    if the client left before: in a queue of slow grammars nobody keeps a place for those."""
    compiling, parsing = service.compiling, partial(parse, service, data, visit)
    job = compiling.at_once(parsing, len(data))
    if job is not None:
        return job
    making = compiling.made(parsing, visit.key.name if visit.key else "")
    if receive is None:
        return await making
    made = asyncio.create_task(making)
    left = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait((made, left), return_when=asyncio.FIRST_COMPLETED)
        if made.done():
            return made.result()
        raise HTTPException(499, "the client left")
    finally:
        left.cancel()
        made.cancel()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Deadline:
    """When a request must be over, and what is said then; from when its body is there. limit, most:
    seconds that it may take, and that any request may."""

    def __init__(self, limit: float, most: float) -> None:
        self.at = asyncio.get_running_loop().time() + limit
        whose = "its own " + TIMEOUT if limit < most else "--timeout"
        self.error = TimedOut(f"the request took longer than the {limit:g} s that it may ({whose})")


@contextlib.contextmanager
def _limited(exchange: Exchange, deadline: Deadline, trace: Trace) -> Iterator[None]:
    """It is answered before `deadline`, and what came of it is put on record."""
    loop = asyncio.get_running_loop()
    timer = loop.call_at(deadline.at, exchange.driver.fail, exchange.ticket, deadline.error)
    try:
        yield
    finally:
        timer.cancel()
        trace.outcome, trace.first = exchange.outcome, exchange.first
        trace.scheduled, trace.pace = exchange.scheduled, exchange.pace
        trace.num_output = exchange.reply.num_tokens
        trace.num_cached = exchange.reply.num_cached


def request_timeout(scope: Scope, most: float) -> float:
    """Seconds that a request may take: those of x-octavo-timeout-ms, never more than `most`.
    Raises `InvalidRequest`."""
    given = header(scope, TIMEOUT.encode())
    if not given:
        return most
    if not given.isdecimal() or not int(given[:18]) > 0:
        text = f"{TIMEOUT} must be a whole number of milliseconds above 0"
        raise InvalidRequest(f"{text}, got {shown(given)}", TIMEOUT)
    return min(most, int(given[:18]) / 1e3)


async def body_of(service: Service, scope: Scope, receive: Receive) -> bytes | None:
    """The whole body, or None if the client left. Raises HTTP 408, 413, and `Overloaded`."""
    seconds = service.config.body_timeout
    try:
        async with asyncio.timeout(seconds):
            return await service.bodies.read(scope, receive)
    except TimeoutError:
        raise HTTPException(408, f"the body took over {seconds:g} s") from None


def granted(service: Service, body: protocol.Wishes, visit: Visit) -> Granted:
    """What the request is held to of time. Raises `InvalidRequest`."""
    return service.deadlines.granted(visit.asked, body.slo, body.service_tier, visit.key)


def asked(
    service: Service,
    id: str,
    body: protocol.ChatBody | protocol.CompletionBody,
    held: Granted,
    echo: tuple[str, ...] = (),
) -> Asked:
    """How the answer is wanted."""
    options, served = body.stream_options, service.served
    usage = bool(options is not None and options.include_usage)
    return Asked(
        Head(id, int(time.time()), served.name, served.system_fingerprint, usage, told_tier(held)),
        served.tokenizer,
        stream=bool(body.stream),
        skip_special=body.skip_special_tokens is not False,
        echo=echo,
    )


def told_tier(held: Granted) -> str | None:
    """The tier as the answer names it, if it is to."""
    return held.tier.name.lower() if held.named or held.tier is not Tier.DEFAULT else None


def caller(key: Key | None, body: protocol.Wishes, granted: Granted) -> Caller:
    """A tenant is a key; where there are none, a `user`, by its old or its new name. Names are
    remembered, thousands of them: a long one by its hash."""
    tenant = key.name if key is not None else body.user or body.safety_identifier or ""
    if len(tenant) > MOST_NAME:
        tenant = hashlib.sha256(tenant.encode("utf-8", "surrogatepass")).hexdigest()
    salt = b"" if key is None else key.salt
    return Caller(tenant, salt, body.priority or 0, granted.slo, granted.tier)
