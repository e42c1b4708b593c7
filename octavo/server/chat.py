"""POST /v1/chat/completions."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from starlette.routing import Route

from octavo.core.request import SamplingParams
from octavo.errors import InvalidRequest, Unsupported
from octavo.models.registry import MODELS
from octavo.server import protocol
from octavo.server.decoding import Ignored, told
from octavo.server.exchange import Job
from octavo.server.generate import Generate, Visit, asked, caller, granted
from octavo.server.reply import ShapeMaker
from octavo.server.service import Service
from octavo.server.shapes import ChatShape
from octavo.server.speech import Speech
from octavo.server.tools import Toolbox, toolbox


def routes(service: Service) -> list[Route]:
    return [Route("/v1/chat/completions", Generate(service, chat_job), methods=["POST"])]


@dataclass(frozen=True, slots=True)
class Wire:
    """How an answer goes out. names: what chat's fields are called in an API that is translated to
    chat's; ignored: unknown fields of the body; flat: a tool is there what chat calls its function.
    """

    id: str
    shape: ShapeMaker
    names: Mapping[str, str] = field(default_factory=dict)
    ignored: Ignored = ()
    flat: bool = False

    def name(self, param: str | None) -> str | None:
        """The field that a caller of that API knows."""
        head = re.match(r"\w+", param or "")
        if head is None or param is None:
            return param
        rest = param[head.end() :]
        if self.flat and head[0] == "tools":
            rest = rest.replace(".function", "", 1)
        return self.names.get(head[0], head[0]) + rest


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
        params = _named(protocol.sampling(body, service.limits), wire)
        box = tools_of(service, body)
        ids = _prompt(service, body, box)
        params = protocol.fitted(params, service.limits, service.served.door.room - len(ids))
        speech = Speech.of(service, ids, box, params)
        shown = speech is not None and speech.tagged
        held = granted(service, body, visit)
        request = service.served.door.request(
            wire.id,
            ids,
            params if speech is None else speech.held(params),
            arrival=visit.arrival,
            caller=caller(visit.key, body, held),
            skip_special=body.skip_special_tokens is not False and not shown,
        )
    except InvalidRequest as error:
        error.rename(wire.name(error.param))
        raise
    wanted = asked(service, wire.id, body, held)
    if speech is not None:
        skip = wanted.skip_special and not shown
        wanted = replace(wanted, parser=speech.parser, skip_special=skip)
    return Job((request,), wanted, wire.shape, held.clamped, wire.ignored)


def _named(params: SamplingParams, wire: Wire) -> SamplingParams:
    """A grammar may also fail while it runs: it is to be called then what the caller calls it."""
    held = params.structured_outputs
    if held is None or not wire.names:
        return params
    param = wire.name(held.param) or held.param
    return replace(params, structured_outputs=replace(held, param=param))


def prompt_of(service: Service, body: protocol.ChatBody) -> list[int]:
    """The token ids of the messages. Raises `InvalidRequest`."""
    return _prompt(service, body, tools_of(service, body))


def tools_of(service: Service, body: protocol.ChatBody) -> Toolbox | None:
    """The tools that may be called. Raises `InvalidRequest`."""
    box = toolbox(body.tools, body.tool_choice, body.parallel_tool_calls)
    if box is not None and service.served.dialect.calls is None:
        have = " and ".join(model.name for model in MODELS.values() if model.calls)
        what = "this model's chat template shows no tools, or in a form that is not known here"
        raise Unsupported(f"{what}; {have} have them", "tools")
    return box


def _prompt(service: Service, body: protocol.ChatBody, box: Toolbox | None) -> list[int]:
    messages = protocol.chat_messages(body)
    if service.served.template is None:
        raise InvalidRequest("this model has no chat template; use /v1/completions", "messages")
    settings = body.chat_template_kwargs or {}
    for name in settings.keys() & {"messages", "tools", "add_generation_prompt"}:
        at = f"chat_template_kwargs.{name}"
        raise Unsupported(f"{at} cannot be set, got {told(settings[name])}", at)
    more = service.served.dialect.settings(body.reasoning_effort) | settings
    try:
        given = {"tools": box.shown()} if box is not None else {}
        return service.served.template(messages, **given, **more)
    except Unsupported as error:
        if error.param in settings:
            error.param = f"chat_template_kwargs.{error.param}"
        raise
