"""Endpoints that answer out of a body without the engine: counting and turning text to tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from octavo.server.decoding import Ignored, said_ignored
from octavo.server.generate import body_of
from octavo.server.problems import reply_json
from octavo.server.service import Service

Work = Callable[[Service, bytes], tuple[Any, Ignored]]  # of a body; runs in a thread


class Answer:
    """One such endpoint, as a raw ASGI application. It takes a place, and counts against its key,
    like any other request."""

    def __init__(self, service: Service, work: Work) -> None:
        self._service = service
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, trace = self._service, scope["octavo.trace"]
        service.check_open()
        trace.meter = service.meters.of(scope["octavo.key"])
        data = await body_of(service, scope, receive)
        if data is None:
            return
        service.check_open()
        with service.meters.enter(trace.meter):
            service.occupancy.enter()
            try:
                loop, pool = asyncio.get_running_loop(), service.parsers
                value, ignored = await loop.run_in_executor(pool, self._work, service, data)
            finally:
                service.occupancy.leave()
        said = {name.decode(): value.decode() for name, value in said_ignored(ignored)}
        await reply_json(value, headers=said)(scope, receive, send)
