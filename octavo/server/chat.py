"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets

from starlette.routing import Route

from octavo.errors import InvalidRequest
from octavo.server import protocol
from octavo.server.exchange import Job
from octavo.server.generate import Generate, Visit, asked, caller, granted
from octavo.server.service import Service
from octavo.server.shapes import ChatShape


def routes(service: Service) -> list[Route]:
    return [Route("/v1/chat/completions", Generate(service, chat_job), methods=["POST"])]


def chat_job(service: Service, data: bytes, visit: Visit) -> Job:
    """The body of a chat request. Raises `InvalidRequest`."""
    body, ignored = protocol.parse(protocol.ChatBody, data, service.limits.strict)
    service.check_model(body.model)
    params = protocol.sampling(body, service.limits)
    messages = protocol.chat_messages(body)
    if service.served.template is None:
        raise InvalidRequest("this model has no chat template; use /v1/completions", "messages")
    ids = service.served.template(messages)
    held = granted(service, body, visit)
    id = f"chatcmpl-{secrets.token_hex(12)}"
    try:
        request = service.served.door.request(
            id,
            ids,
            params,
            arrival=visit.arrival,
            caller=caller(visit.key, body, held),
            skip_special=body.skip_special_tokens is not False,
        )
    except InvalidRequest as error:
        newer = body.max_completion_tokens is not None
        names = {"prompt": "messages"} | ({"max_tokens": "max_completion_tokens"} if newer else {})
        error.param = names.get(error.param or "", error.param)
        raise
    return Job((request,), asked(service, id, body), ChatShape, held.clamped, ignored)
