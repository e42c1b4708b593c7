"""The ASGI application: who may enter, what is asked, and the answer on the wire.

Everything that one request does wrong, or that goes wrong inside it, ends in an OpenAI-shaped
error for that request alone. The generating endpoints write raw ASGI messages: one per step.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from octavo.config import LOOPBACK, ServerConfig
from octavo.core.admission import Admission
from octavo.core.request import Slo, shown
from octavo.door import Caller, Door
from octavo.errors import InvalidRequest, Overloaded, UnknownModel
from octavo.server import protocol
from octavo.server.auth import Key, Keys
from octavo.server.deadlines import Deadlines, Granted
from octavo.server.driver import Driver
from octavo.server.exchange import Bodies, Exchange, Job
from octavo.server.headers import header
from octavo.server.metrics import Metrics
from octavo.server.problems import http_problem, problem, reply_json
from octavo.server.reply import Asked, ChatShape, CompletionShape, Head
from octavo.text import Tokenizer

OPEN_PATHS = ("/health", "/ready")
INLINE_BODY = 4 * 1024  # longer bodies are parsed and tokenised in a thread
BODY_SECONDS = 60.0
BODIES = 16  # largest bodies that may be on their way at once, or as many bytes of smaller ones
SEND_SECONDS = 60.0  # a client that reads nothing for so long has left
Template = Callable[[list[dict[str, str]]], list[int]]


@dataclass(frozen=True, slots=True)
class Served:
    """The model that is served. template: chat messages to token ids, or None. priority, timed:
    whether the policy looks at `priority`, and whether it keeps deadlines."""

    name: str
    tokenizer: Tokenizer
    template: Template | None
    door: Door
    system_fingerprint: str
    version: str
    created: int
    priority: bool = False
    timed: bool = False


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
        admission: Admission,
    ) -> None:
        self.served = served
        self.driver = driver
        self.config = config
        self.metrics = metrics
        self.keys = keys
        self.admission = admission
        self.deadlines = Deadlines.read(served.timed, config.slo)
        self.driver.ended = metrics.ended
        self.draining = False
        self.bodies = Bodies(config.max_body, BODIES * config.max_body)
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

    def write_step_log(self) -> None:
        """The latest steps' shapes and times, if a file for them was given."""
        if self.config.step_log is not None:
            lines = (line + "\n" for line in self.admission.model.log())
            Path(self.config.step_log).write_text("".join(lines))

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
            await self._refuse(scope, outbound, http_problem(error, scope))
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
        origin = header(scope, b"origin")
        if origin and not self._trusts(origin, header(scope, b"host")):
            raise HTTPException(403, f"pages of {origin} may not use this server")
        if not self.keys or scope["path"] in OPEN_PATHS:
            return None
        key = self.keys.find(header(scope, b"authorization"))
        if key is None:
            raise HTTPException(401, "give a valid API key as Authorization: Bearer KEY")
        return key

    def _trusts(self, origin: str, host: str) -> bool:
        """A page of our own. Without keys its name must be loopback's, or a rebound name passes."""
        try:
            name = urlsplit(origin)
        except ValueError:
            return False
        return name.netloc == host and (bool(self.keys) or name.hostname in LOOPBACK)

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
                f"the model {shown(name)} is not served here; {self.served.name!r} is", "model"
            )

    def chat_job(self, data: bytes, visit: Visit) -> Job:
        """The body of a chat request. Raises `InvalidRequest`."""
        body = protocol.parse(protocol.ChatBody, data)
        self.check_model(body.model)
        params = protocol.sampling(body, self.limits)
        messages = protocol.chat_messages(body)
        if self.served.template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", "messages")
        ids = self.served.template(messages)
        granted = self._granted(body, visit)
        id = f"chatcmpl-{secrets.token_hex(12)}"
        try:
            request = self.served.door.request(
                id,
                ids,
                params,
                arrival=visit.arrival,
                caller=_caller(visit.key, body, granted),
                skip_special=body.skip_special_tokens is not False,
            )
        except InvalidRequest as error:
            newer = body.max_completion_tokens is not None
            names = {"prompt": "messages"} | (
                {"max_tokens": "max_completion_tokens"} if newer else {}
            )
            error.param = names.get(error.param or "", error.param)
            raise
        return Job((request,), self._asked(id, body), ChatShape, params.n, granted.clamped)

    def completion_job(self, data: bytes, visit: Visit) -> Job:
        """The body of a completions request. Raises `InvalidRequest`."""
        body = protocol.parse(protocol.CompletionBody, data)
        self.check_model(body.model)
        params = protocol.sampling(body, self.limits)
        prompts = protocol.completion_prompts(body, self.limits)
        id = f"cmpl-{secrets.token_hex(12)}"
        granted = self._granted(body, visit)
        tokenizer, caller = self.served.tokenizer, _caller(visit.key, body, granted)
        requests, texts = [], []
        for number, prompt in enumerate(prompts):
            text = prompt if isinstance(prompt, str) else None
            ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            requests.append(
                self.served.door.request(
                    f"{id}-{number}",
                    ids,
                    params,
                    arrival=visit.arrival,
                    caller=caller,
                    skip_special=body.skip_special_tokens is not False,
                )
            )
            if body.echo:
                texts.append(text if text is not None else tokenizer.decode(ids, False))
        asked = self._asked(id, body, tuple(texts))
        choices = params.n * len(requests)
        return Job(tuple(requests), asked, CompletionShape, choices, granted.clamped)

    def _granted(self, body: protocol.ChatBody | protocol.CompletionBody, visit: Visit) -> Granted:
        return self.deadlines.granted(visit.asked, body.slo, body.service_tier, visit.key)

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


@dataclass(frozen=True, slots=True)
class Visit:
    """What is known of a request before its body is read."""

    key: Key | None
    arrival: float
    asked: Slo


class Generate:
    """A generating endpoint, as a raw ASGI application."""

    def __init__(self, app: App, parse: Callable[[bytes, Visit], Job]) -> None:
        self._app = app
        self._parse = parse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app, key = self._app, scope["octavo.key"]
        app.check_open()
        asked = app.deadlines.asked(scope)
        # A place is taken only when the body is here: a client that trickles it holds none.
        try:
            async with asyncio.timeout(BODY_SECONDS):
                data = await app.bodies.read(scope, receive)
        except TimeoutError:
            raise HTTPException(408, f"the body took over {BODY_SECONDS:g} s") from None
        if data is None:
            return
        arrival = app.driver.clock()
        app.check_open()
        # Counted before it is parsed: a flood must not be tokenised before it is refused.
        ticket = app.admission.enter(key.name if key else "", len(data), asked, arrival)
        app.occupancy.enter()
        try:
            job = await self._job(data, Visit(key, arrival, asked))
            app.admission.learn(ticket, sum(len(request.prompt) for request in job.requests))
            exchange = Exchange(app.driver, app.metrics, app.admission, job, ticket)
            await exchange.run(receive, send)
        finally:
            app.occupancy.leave()
            app.admission.leave(ticket)

    async def _job(self, data: bytes, visit: Visit) -> Job:
        if len(data) <= INLINE_BODY:
            return self._parse(data, visit)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._app.parsers, self._parse, data, visit)


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


async def _no_receive() -> Message:
    return {"type": "http.disconnect"}


def _request_id(scope: Scope) -> bytes:
    """The client's own id for its logs, if it is a sane one, else one of ours. Never a key."""
    given = header(scope, b"x-request-id")
    if 0 < len(given) <= 128 and given.isascii() and given.isprintable():
        return given.encode()
    return secrets.token_hex(12).encode()


def _caller(
    key: Key | None, body: protocol.ChatBody | protocol.CompletionBody, granted: Granted
) -> Caller:
    """A tenant is a key; where there are none, a `user`."""
    tenant = key.name if key is not None else body.user or ""
    salt = b"" if key is None else key.salt
    return Caller(tenant, salt, body.priority or 0, granted.slo, granted.tier)
