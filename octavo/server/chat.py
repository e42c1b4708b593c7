"""POST /v1/chat/completions."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.routing import Route

from octavo.errors import InvalidRequest
from octavo.server import protocol
from octavo.server.decoding import Ignored
from octavo.server.exchange import Job
from octavo.server.generate import Generate, Visit, asked, caller, granted
from octavo.server.reply import ShapeMaker
from octavo.server.service import Service
from octavo.server.shapes import ChatShape


def routes(service: Service) -> list[Route]:
    return [Route("/v1/chat/completions", Generate(service, chat_job), methods=["POST"])]


@dataclass(frozen=True, slots=True)
class Wire:
    """How an answer goes out. names: what chat's fields are called in an API that is translated to
    chat's; ignored: unknown fields of the body."""

    id: str
    shape: ShapeMaker
    names: Mapping[str, str] = field(default_factory=dict)
    ignored: Ignored = ()

    def name(self, param: str | None) -> str | None:
        """The field that a caller of that API knows."""
        head = re.match(r"\w+", param or "")
        return (
            param
            if head is None or param is None
            else (self.names.get(head[0], head[0]) + param[head.end() :])
        )


def chat_job(service: Service, data: bytes, visit: Visit) -> Job:
    """The body of a chat request. Raises `InvalidRequest`."""
    body, ignored = protocol.parse(protocol.ChatBody, data, service.limits.strict)
    names = {"prompt": "messages"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    wire = Wire(f"chatcmpl-{secrets.token_hex(12)}", ChatShape, names, ignored)
    return job_of(service, body, visit, wire)


def job_of(service: Service, body: protocol.ChatBody, visit: Visit, wire: Wire) -> Job:
    """Messages into a job. Raises `InvalidRequest`, with the field's name in that API."""
    try:
        service.check_model(body.model)
        params = protocol.sampling(body, service.limits)
        request = service.served.door.request(
            wire.id,
            prompt_of(service, body),
            params,
            arrival=visit.arrival,
            caller=caller(visit.key, body, held := granted(service, body, visit)),
            skip_special=body.skip_special_tokens is not False,
        )
    except InvalidRequest as error:
        error.param = wire.name(error.param)
        raise
    return Job((request,), asked(service, wire.id, body), wire.shape, held.clamped, wire.ignored)


def prompt_of(service: Service, body: protocol.ChatBody) -> list[int]:
    """The token ids of the messages. Raises `InvalidRequest`."""
    messages = protocol.chat_messages(body)
    if service.served.template is None:
        raise InvalidRequest("this model has no chat template; use /v1/completions", "messages")
    return service.served.template(messages)
