"""The ASGI application: who may enter, what is asked, and the answer on the wire.

Everything that one request does wrong, or that goes wrong inside it, ends in an OpenAI-shaped
error for that request alone. The generating endpoints write raw ASGI messages: one per step.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from octavo.config import LOOPBACK, ServerConfig
from octavo.core.request import Request
from octavo.core.stats import Timing
from octavo.door import Caller, Door
from octavo.errors import EngineError, InvalidRequest, OctavoError, Overloaded, UnknownModel
from octavo.server import protocol
from octavo.server.auth import Key, Keys
from octavo.server.driver import Admitted, Driver, Failed, Ticket
from octavo.server.metrics import Metrics
from octavo.server.reply import PING, Asked, ChatShape, CompletionShape, Head, Reply, encode
from octavo.text import Tokenizer

log = logging.getLogger("octavo")

OPEN_PATHS = ("/health", "/ready")
INLINE_BODY = 4 * 1024  # longer bodies are parsed and tokenised in a thread
BODY_SECONDS = 60.0
SEND_SECONDS = 60.0  # a client that reads nothing for so long has left
Template = Callable[[list[dict[str, str]]], list[int]]


@dataclass(frozen=True, slots=True)
class Served:
    """The model that is served. template: chat messages to token ids, or None."""

    name: str
    tokenizer: Tokenizer
    template: Template | None
    door: Door
    system_fingerprint: str
    version: str
    created: int
    priority: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """A parsed request body."""

    requests: tuple[Request, ...]
    asked: Asked
    shape: type[ChatShape] | type[CompletionShape]
    num_choices: int


class Occupancy:
    """How full the house is, and how fast it empties."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self.limit = limit
        self.live = 0
        self._clock = clock
        self._ended: deque[float] = deque(maxlen=64)

    def check(self) -> None:
        """Raises `Overloaded`, with the time in which half of the places will be free."""
        if self.live >= self.limit:
            raise Overloaded(
                f"all {self.limit} places of this server are taken", self.retry_after()
            )

    def enter(self) -> None:
        """Take a place."""
        self.live += 1

    def leave(self) -> None:
        self.live -= 1
        self._ended.append(self._clock())

    def retry_after(self) -> float:
        """Seconds, from the rate at which the latest requests ended; at least 1, at most 120."""
        if len(self._ended) < 2:
            return 5.0
        rate = len(self._ended) / max(self._clock() - self._ended[0], 1e-3)
        return min(max(self.live / 2 / rate, 1.0), 120.0)


class App:
    """The application. `start` and `stop` bracket its life inside the event loop."""

    def __init__(
        self,
        served: Served,
        driver: Driver,
        config: ServerConfig,
        metrics: Metrics,
        keys: Keys,
    ) -> None:
        self.served = served
        self.driver = driver
        self.config = config
        self.metrics = metrics
        self.keys = keys
        self.driver.ended = self._ended
        self.draining = False
        self.occupancy = Occupancy(config.max_queue, driver.clock)
        self.limits = protocol.Limits(config.max_n, config.max_prompts, served.priority)
        self.parsers = ThreadPoolExecutor(2, thread_name_prefix="octavo-parse")
        self._pinger: asyncio.Task[None] | None = None
        get, post = ["GET"], ["POST"]
        self.router = Router(
            [
                Route("/v1/chat/completions", Generate(self, self.chat_job), methods=post),
                Route("/v1/completions", Generate(self, self.completion_job), methods=post),
                Route("/v1/models", self.models, methods=get),
                Route("/v1/models/{id:path}", self.model, methods=get),
                Route("/health", self.health, methods=get),
                Route("/ready", self.ready, methods=get),
                Route("/metrics", self.metrics_page, methods=get),
                Route("/version", self.version, methods=get),
            ],
            redirect_slashes=False,
        )
        self._paths = {route.path for route in self.router.routes if isinstance(route, Route)}

    def start(self) -> None:
        self.driver.start()
        self._pinger = asyncio.create_task(self._ping())

    async def stop(self) -> None:
        if self._pinger is not None:
            self._pinger.cancel()
        await self.driver.stop()
        self.parsers.shutdown(wait=False, cancel_futures=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1003})
            return
        if scope["type"] != "http":
            raise NotImplementedError(scope["type"])
        outbound = Outbound(send, _request_id(scope))
        scope["app"] = self
        try:
            scope["octavo.key"] = self._enter(scope)
            await self.router(scope, receive, outbound)
        except HTTPException as error:
            await self._refuse(scope, outbound, _http_problem(error, scope))
        except Exception as error:
            if outbound.status:
                raise  # too late for an answer; closing the connection is the only sign left
            await self._refuse(scope, outbound, problem(error))
        finally:
            self.metrics.http.labels(self._label(scope["path"]), str(outbound.status)).inc()

    def _label(self, path: str) -> str:
        """The route's name: paths of strangers' choice would be endless labels."""
        if path.startswith("/v1/models/"):
            return "/v1/models/{id}"
        return path if path in self._paths else "other"

    async def _refuse(self, scope: Scope, send: Send, response: Response) -> None:
        await response(scope, _no_receive, send)

    def _enter(self, scope: Scope) -> Key | None:
        """The caller's key. Raises HTTP 401 where one is needed and none fits; 403 for a page of
        another site, which a browser lets send requests to this machine."""
        origin = _header(scope, b"origin")
        if origin and not self._trusts(origin, _header(scope, b"host")):
            raise HTTPException(403, f"pages of {origin} may not use this server")
        if not self.keys or scope["path"] in OPEN_PATHS:
            return None
        key = self.keys.find(_header(scope, b"authorization"))
        if key is None:
            raise HTTPException(401, "give a valid API key as Authorization: Bearer KEY")
        return key

    def _trusts(self, origin: str, host: str) -> bool:
        """A page of our own. Without keys its name must be loopback's, or a rebound name passes."""
        name = urlsplit(origin)
        return name.netloc == host and (bool(self.keys) or name.hostname in LOOPBACK)

    def _ended(self, timing: Timing) -> None:
        if timing.first_scheduled is not None:
            self.metrics.queue.observe(timing.first_scheduled - timing.queued)

    async def _ping(self) -> None:
        """Wake streams that have been silent for too long; drop clients that do not read."""
        pause = self.config.keepalive
        while True:
            await asyncio.sleep(pause / 8)
            now = self.driver.clock()
            for ticket in self.driver.tickets:
                if ticket.sending:
                    if now - ticket.touched > SEND_SECONDS and ticket.task is not None:
                        ticket.gone = True
                        ticket.task.cancel()
                elif ticket.touched and now - ticket.touched >= pause * 7 / 8:
                    ticket.ping = True
                    ticket.wake()

    # ---- small endpoints ----

    async def models(self, request: HttpRequest) -> Response:
        return reply_json({"object": "list", "data": [self._model()]})

    async def model(self, request: HttpRequest) -> Response:
        self.check_model(request.path_params["id"])
        return reply_json(self._model())

    def _model(self) -> dict[str, Any]:
        served = self.served
        return {
            "id": served.name,
            "object": "model",
            "created": served.created,
            "owned_by": "octavo",
            "max_model_len": served.door.capacity.max_context,
        }

    async def health(self, request: HttpRequest) -> Response:
        """Liveness: false once the engine is lost, and then a restart is the cure."""
        if self.driver.alive:
            return reply_json({"status": "ok"})
        return reply_json({"status": "failed", "reason": str(self.driver.failed)}, 503)

    async def ready(self, request: HttpRequest) -> Response:
        """Readiness: may traffic be sent here? Not while draining, nor when steps stall."""
        driver = self.driver
        stalled = driver.busy and driver.clock() - driver.progress > self.config.stall
        for bad, word in (
            (not driver.alive, "failed"),
            (self.draining, "draining"),
            (stalled, "stalled"),
        ):
            if bad:
                return reply_json({"status": word}, 503)
        return reply_json({"status": "ok"})

    async def metrics_page(self, request: HttpRequest) -> Response:
        return Response(self.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self, request: HttpRequest) -> Response:
        return reply_json({"version": self.served.version})

    # ---- parsing: may run in a thread ----

    def check_open(self) -> None:
        """Raises `Overloaded` while no new work is taken."""
        if self.draining:
            raise Overloaded("the server is shutting down", self.config.drain or 1.0)
        self.occupancy.check()

    def check_model(self, name: str) -> None:
        if name != self.served.name:
            raise UnknownModel(
                f"the model {name!r} is not served here; {self.served.name!r} is", "model"
            )

    def chat_job(self, data: bytes, key: Key | None) -> Job:
        """The body of a chat request. Raises `InvalidRequest`."""
        body = protocol.parse(protocol.ChatBody, data)
        self.check_model(body.model)
        params = protocol.sampling(body, self.limits)
        messages = protocol.chat_messages(body)
        if self.served.template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", "messages")
        ids = self.served.template(messages)
        id = f"chatcmpl-{secrets.token_hex(12)}"
        try:
            request = self.served.door.request(
                id,
                ids,
                params,
                arrival=self.driver.clock(),
                caller=_caller(key, body),
                skip_special=body.skip_special_tokens is not False,
            )
        except InvalidRequest as error:
            newer = body.max_completion_tokens is not None
            names = {"prompt": "messages"} | (
                {"max_tokens": "max_completion_tokens"} if newer else {}
            )
            error.param = names.get(error.param or "", error.param)
            raise
        return Job((request,), self._asked(id, body), ChatShape, params.n)

    def completion_job(self, data: bytes, key: Key | None) -> Job:
        """The body of a completions request. Raises `InvalidRequest`."""
        body = protocol.parse(protocol.CompletionBody, data)
        self.check_model(body.model)
        params = protocol.sampling(body, self.limits)
        prompts = protocol.completion_prompts(body, self.limits)
        id = f"cmpl-{secrets.token_hex(12)}"
        tokenizer, caller = self.served.tokenizer, _caller(key, body)
        requests, texts = [], []
        for number, prompt in enumerate(prompts):
            text = prompt if isinstance(prompt, str) else None
            ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            requests.append(
                self.served.door.request(
                    f"{id}-{number}",
                    ids,
                    params,
                    arrival=self.driver.clock(),
                    caller=caller,
                    skip_special=body.skip_special_tokens is not False,
                )
            )
            if body.echo:
                texts.append(text if text is not None else tokenizer.decode(ids, False))
        asked = self._asked(id, body, tuple(texts))
        return Job(tuple(requests), asked, CompletionShape, params.n * len(requests))

    def _asked(
        self,
        id: str,
        body: protocol.ChatBody | protocol.CompletionBody,
        echo: tuple[str, ...] = (),
    ) -> Asked:
        options, served = body.stream_options, self.served
        usage = bool(options is not None and options.include_usage)
        return Asked(
            Head(id, int(time.time()), served.name, served.system_fingerprint, usage),
            served.tokenizer,
            stream=bool(body.stream),
            skip_special=body.skip_special_tokens is not False,
            echo=echo,
        )


class Generate:
    """A generating endpoint, as a raw ASGI application."""

    def __init__(self, app: App, parse: Callable[[bytes, Key | None], Job]) -> None:
        self._app = app
        self._parse = parse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        app.check_open()
        # A place is taken only when the body is here: a client that trickles it holds none.
        try:
            async with asyncio.timeout(BODY_SECONDS):
                data = await read_body(scope, receive, app.config.max_body)
        except TimeoutError:
            raise HTTPException(408, f"the body took over {BODY_SECONDS:g} s") from None
        if data is None:
            return
        arrival = app.driver.clock()
        app.check_open()
        app.occupancy.enter()
        try:
            job = await self._job(data, scope["octavo.key"])
            await Exchange(app, job, arrival).run(receive, send)
        finally:
            app.occupancy.leave()

    async def _job(self, data: bytes, key: Key | None) -> Job:
        if len(data) <= INLINE_BODY:
            return self._parse(data, key)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._app.parsers, self._parse, data, key)


class Exchange:
    """One generating request, from admission to its last byte."""

    def __init__(self, app: App, job: Job, arrival: float) -> None:
        self.app = app
        self.job = job
        self.arrival = arrival
        self.first: float | None = None
        self.ticket = Ticket(job.requests)
        self.reply = Reply(job.asked, job.shape, job.requests)
        self.outcome = "error"

    async def run(self, receive: Receive, send: Send) -> None:
        """Answer, or raise before the first byte. A client that leaves ends the request."""
        driver = self.app.driver
        watch = asyncio.create_task(self._watch(receive))
        self.ticket.task = asyncio.current_task()
        driver.add(self.ticket)
        try:
            if self.job.asked.stream:
                await self._stream(send)
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
            driver.release(self.ticket)
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
            self.first = self.app.driver.clock()
        return self.reply.feed(events)

    async def _whole(self, send: Send) -> None:
        while self.reply.open_choices:
            await self._step()
            if self.ticket.gone:
                self.outcome = "abort"
                return
        self.outcome = self._finish()
        body = self.reply.whole()
        await send(_start(200, b"application/json", len(body)))
        await self._send(send, body)

    async def _stream(self, send: Send) -> None:
        ticket = self.ticket
        await self._admitted()
        if ticket.gone:
            self.outcome = "abort"
            return
        await send(_start(200, b"text/event-stream; charset=utf-8"))
        ticket.touched = self.app.driver.clock()
        try:
            while self.reply.open_choices:
                out = await self._step()
                if ticket.gone:
                    self.outcome = "abort"
                    return
                if ticket.ping:
                    ticket.ping = False
                    out = out or PING
                if out:
                    await self._send(send, out, True)
            self.outcome = self._finish()
            last = b""
        except OSError:
            raise
        except Exception as error:
            # The status is out: an error event is how the OpenAI API says it now.
            last = b"data: " + encode(envelope(error)[1]) + b"\n\n"
        await self._send(send, last)

    async def _send(self, send: Send, body: bytes, more: bool = False) -> None:
        ticket = self.ticket
        ticket.touched = self.app.driver.clock()
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

    def _measure(self) -> None:
        """Count the request once, when it is over."""
        metrics, reply, now = self.app.metrics, self.reply, self.app.driver.clock()
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


class Outbound:
    """`send` with the request id on the head, remembering the status."""

    def __init__(self, send: Send, request_id: bytes) -> None:
        self._send = send
        self._id = request_id
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self._id)]
        await self._send(message)


def _start(status: int, kind: bytes, length: int | None = None) -> Message:
    headers = [(b"content-type", kind), (b"cache-control", b"no-store")]
    if length is None:
        headers.append((b"x-accel-buffering", b"no"))  # proxies must not gather the stream
    else:
        headers.append((b"content-length", b"%d" % length))
    return {"type": "http.response.start", "status": status, "headers": headers}


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes | None:
    """The whole body, or None if the client left. Raises HTTP 413 above `limit` bytes."""
    declared = _header(scope, b"content-length")
    too_large = HTTPException(413, f"the body may have at most {limit} bytes")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise too_large
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


async def _no_receive() -> Message:
    return {"type": "http.disconnect"}


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def _request_id(scope: Scope) -> bytes:
    """The client's own id for its logs, if it is a sane one, else one of ours. Never a key."""
    given = _header(scope, b"x-request-id")
    if 0 < len(given) <= 128 and given.isascii() and given.isprintable():
        return given.encode()
    return secrets.token_hex(12).encode()


def _caller(key: Key | None, body: protocol.ChatBody | protocol.CompletionBody) -> Caller:
    names = [key.name] if key is not None else []
    tenant = "/".join([*names, body.user] if body.user else names)
    return Caller(tenant, b"" if key is None else key.salt, body.priority or 0)


def reply_json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = msgspec.json.encode(value)
    return Response(body, status, headers, media_type="application/json")


def envelope(error: Exception) -> tuple[int, dict[str, Any]]:
    """(status, OpenAI's error object). What is not ours is logged and not shown."""
    param = getattr(error, "param", None)
    code: str | None
    if isinstance(error, UnknownModel):
        status, kind, code = 404, "invalid_request_error", error.code
    elif isinstance(error, InvalidRequest):
        status, kind, code = 400, "invalid_request_error", error.code
    elif isinstance(error, Overloaded):
        status, kind, code = 503, "server_error", "server_overloaded"
    elif isinstance(error, EngineError):
        status, kind, code = 500, "server_error", "engine_error"
    elif isinstance(error, OctavoError):
        status, kind, code = 500, "server_error", None
    else:
        log.error("a request failed", exc_info=error)
        status, kind, code = 500, "server_error", "internal_error"
        error = Exception("this request failed inside the server; its log says why")
    body = {"message": str(error), "type": kind, "param": param, "code": code}
    return status, {"error": body}


def problem(error: Exception) -> Response:
    """The HTTP answer to an exception."""
    status, body = envelope(error)
    headers = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(max(1, round(error.retry_after)))
    return reply_json(body, status, headers)


_CODES = {
    403: "forbidden_origin",
    408: "body_timeout",
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
}


def _http_problem(error: HTTPException, scope: Scope) -> Response:
    status = error.status_code
    message = error.detail
    if status == 404:
        message = f"{scope['path']} is not an endpoint of this server"
    if status == 405:
        message = f"{scope['path']} takes {(error.headers or {}).get('Allow')}"
    body = {
        "message": message,
        "type": "authentication_error" if status == 401 else "invalid_request_error",
        "param": None,
        "code": _CODES.get(status),
    }
    headers = dict(error.headers or {})
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return reply_json({"error": body}, status, headers)
