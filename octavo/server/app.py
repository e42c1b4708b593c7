"""The ASGI application: it composes the endpoints, says who may enter, and refuses.

Everything that one request does wrong, or that goes wrong inside it, ends in an OpenAI-shaped
error for that request alone. The generating endpoints write raw ASGI messages: one per step.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Router
from starlette.types import Message, Receive, Scope, Send

from octavo.config import ServerConfig
from octavo.core.admission import Admission
from octavo.core.request import shown
from octavo.errors import InvalidRequest
from octavo.server import (
    account,
    batches,
    certificate,
    chat,
    completions,
    embeddings,
    files,
    info,
    live,
    messages,
    openapi,
    page,
    responses,
    tokens,
)
from octavo.server.auth import Key, Keys
from octavo.server.cors import Cors, own_page
from octavo.server.driver import Driver
from octavo.server.headers import header
from octavo.server.logs import tell
from octavo.server.metrics import Metrics
from octavo.server.problems import AdminOnly, http_problem, problem, refusal, word
from octavo.server.service import Served, Service
from octavo.server.steplog import StepLog
from octavo.server.telemetry import Telemetry
from octavo.server.traces import Trace
from octavo.server.watchdog import Watchdog

ENDPOINTS = (  # modules with `routes(service)`
    chat,
    completions,
    responses,
    messages,
    embeddings,
    tokens,
    files,
    batches,
    info,
    account,
    live,
    openapi,
    page,
)
OPEN_PATHS = ("/health", "/ready", "/", page.ICON)
ADMIN_PATHS = ("/metrics", "/v1/engine/live")  # of all keys; where some keys are admin's


CLIENT_LEFT = 499  # nothing was answered, for nobody was there: nginx's status for logs

log = logging.getLogger("octavo")


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
        self.service = service = Service(served, driver, config, metrics, admission, keys)
        self.keys = keys
        self.cors = Cors(config.cors_origin)
        driver.ended.append(service.ended)
        self.watchdog = Watchdog(driver, admission.scheduler, config.stall)
        self.telemetry: Telemetry | None = None
        self.over: list[Callable[[Trace], None]] = [tell]  # called when a request is over
        self.certificate: ssl.SSLContext | None = None
        self._pinger: asyncio.Task[None] | None = None
        self.step_log: StepLog | None = None
        if config.step_log is not None:
            self.step_log = StepLog(config.step_log, admission.model)
            service.lives.append(self.step_log)
        routes = [route for module in ENDPOINTS for route in module.routes(service)]
        self.router = Router(routes, redirect_slashes=False)
        self._paths = {route.path: route for route in routes}

    @property
    def config(self) -> ServerConfig:
        return self.service.config

    def send_telemetry(self, telemetry: Telemetry) -> None:
        """Tell it of every request that is over; it is closed at the end."""
        self.telemetry = telemetry
        self.over.append(telemetry.request)

    def start(self) -> None:
        self.service.driver.start()
        self.watchdog.start()
        for life in self.service.lives:
            life.start()
        grammars = self.service.served.door.grammars
        if grammars is not None:  # what they share, before a stream could be held up by it
            self.service.compilers.submit(grammars.warm)
        self._pinger = asyncio.create_task(self._ping())

    async def stop(self) -> None:
        if self._pinger is not None:
            self._pinger.cancel()
        self.watchdog.stop()
        await self.rest()
        await self.service.driver.stop()
        if self.service.store is not None:
            self.service.store.close()
        if self.telemetry is not None:
            await asyncio.to_thread(self.telemetry.close)
        self.service.parsers.shutdown(wait=False, cancel_futures=True)
        self.service.compilers.shutdown(wait=False, cancel_futures=True)
        if self.service.served.door.grammars is not None:
            self.service.served.door.grammars.close()

    async def rest(self) -> None:
        """No new work is taken, and what nobody waits for is put aside."""
        self.service.draining = True
        for life in self.service.lives:
            await life.stop()

    def write_step_log(self) -> None:
        """The latest steps' shapes and times, if a file for them was given."""
        if self.step_log is not None:
            self.step_log.write()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1003})
            return
        if scope["type"] != "http":
            raise NotImplementedError(scope["type"])
        service, scope = self.service, _plain(scope)
        trace = Trace(_request_id(scope), scope["method"], scope["path"], service.driver.clock())
        trace.client = scope["client"][0] if scope.get("client") else ""
        outbound = Outbound(send, trace, self.cors.headers(header(scope, b"origin")))
        trace.parent = header(scope, b"traceparent")
        scope["octavo.trace"] = trace
        scope["app"] = self  # without one the router answers 404 and 405 itself, in plain text
        try:
            preflight = self.cors.preflight(scope)
            if preflight is not None:
                await preflight(scope, receive, outbound)
                return
            scope["octavo.key"] = key = self._enter(scope)
            trace.key = key.name if key is not None else ""
            _check_encoding(scope)
            await self.router(scope, receive, outbound)
        except HTTPException as error:
            await self._refuse(scope, outbound, error, http_problem(error, scope))
        except Exception as error:
            if trace.status:
                raise  # too late for an answer; closing the connection is the only sign left
            await self._refuse(scope, outbound, error, problem(error))
        finally:
            trace.status = trace.status or CLIENT_LEFT
            trace.finished = service.driver.clock()
            service.traces.leave(trace)
            for hear in self.over:
                hear(trace)
            service.metrics.http.labels(self._label(scope["path"]), str(trace.status)).inc()

    def _label(self, path: str) -> str:
        """The route's name: paths of strangers' choice would be endless labels."""
        if path in self._paths:
            return path
        found = (route for route in self._paths.values() if route.param_convertors)
        return next((route.path_format for route in found if route.path_regex.match(path)), "other")

    async def _refuse(self, scope: Scope, send: Send, error: Exception, response: Response) -> None:
        trace = scope["octavo.trace"]
        trace.outcome, trace.refusal = word(error), refusal(error, response)
        self.service.metrics.refusals.labels(trace.outcome).inc()
        if scope["path"].startswith(messages.PATH):
            response = messages.refusal(response)
        await response(scope, _no_receive, send)

    def _enter(self, scope: Scope) -> Key | None:
        """The caller's key. Raises HTTP 401 where one is needed and none fits; 403 for a page of
        another site, which a browser lets send requests to this machine."""
        origin = header(scope, b"origin")
        if origin and not (self.cors.named(origin) or self._own(origin, scope)):
            raise HTTPException(403, f"pages of {origin} may not use this server")
        path = scope["path"]
        if not self.keys or path in OPEN_PATHS or path.startswith(page.ASSETS):
            return None
        given = header(scope, b"authorization") or f"Bearer {header(scope, b'x-api-key')}"
        key = self.keys.find(given)
        if key is None:
            raise HTTPException(401, "give a valid API key as Authorization: Bearer KEY")
        if path in ADMIN_PATHS and self.keys.any_admin and not key.admin:
            raise AdminOnly(path)
        return key

    def _own(self, origin: str, scope: Scope) -> bool:
        return own_page(origin, header(scope, b"host"), bool(self.keys))

    def reload(self) -> None:
        """Read keys and certificate again; what is in the house goes on, batches of keys that are
        gone aside. Bad files change nothing: the log says so."""
        try:
            self.keys.reload()
            if self.certificate is not None:
                certificate.load(self.certificate, self.config)
        except InvalidRequest as error:
            log.error("keys and certificate stay as they were: %s", error)
        else:
            log.info("read the API keys again")
            for life in self.service.lives:
                life.wake()

    async def _ping(self) -> None:
        """Wake streams that have been silent for too long; drop clients that do not read."""
        pause, unread = self.config.keepalive, self.config.send_timeout
        while True:
            await asyncio.sleep(pause / 8)
            now = self.service.driver.clock()
            for ticket in self.service.driver.tickets:
                if ticket.sending:
                    if now - ticket.touched > unread and ticket.task is not None:
                        ticket.gone = True
                        ticket.task.cancel()
                elif ticket.touched and now - ticket.touched >= pause * 7 / 8:
                    ticket.ping = True
                    ticket.wake()


class Outbound:
    """`send` with more on the head: the request id, its times, its key's limits, CORS."""

    def __init__(self, send: Send, trace: Trace, more: list[tuple[str, str]]) -> None:
        self._send = send
        self._trace = trace
        self._more = [(name.encode(), value.encode("latin-1")) for name, value in more]

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            trace, headers = self._trace, list(message.get("headers", ()))
            trace.status = message["status"]
            headers.append((b"x-request-id", trace.id.encode()))
            if trace.completion:
                headers.append((b"server-timing", account.server_timing(trace)))
            if trace.meter is not None:
                headers += trace.meter.headers()
            present = {name for name, _ in headers}
            headers += [item for item in self._more if item[0] not in present]
            message["headers"] = headers
        await self._send(message)


def _plain(scope: Scope) -> Scope:
    """With the path as the routes have it: a slash at its end means nothing."""
    path = scope["path"]
    return {**scope, "path": path[:-1]} if len(path) > 1 and path.endswith("/") else scope


def _check_encoding(scope: Scope) -> None:
    """Raises HTTP 415 for a body that would have to be unpacked first: nobody knows how large it
    would become."""
    given = header(scope, b"content-encoding")
    if scope["method"] not in ("GET", "HEAD") and given.strip().lower() not in ("", "identity"):
        what = f"send the body as it is: content-encoding {shown(given)} is not supported"
        raise HTTPException(415, what, {"accept-encoding": "identity"})


async def _no_receive() -> Message:
    return {"type": "http.disconnect"}


def _request_id(scope: Scope) -> str:
    """The client's own id for its logs, if it is a sane one, else one of ours. Never a key."""
    given = header(scope, b"x-request-id")
    if 0 < len(given) <= 128 and given.isascii() and given.isprintable():
        return given
    return secrets.token_hex(12)
