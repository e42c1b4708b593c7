"""POST, GET and DELETE of /v1/responses: OpenAI's Responses API, translated to chat's.

What is asked becomes a chat body, so that sampling, tools, formats and errors are chat's; what is
answered goes out in `ResponsesShape`. Responses are kept in memory for `previous_response_id`.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.core.request import shown
from octavo.errors import InvalidRequest, NotFound, Unsupported
from octavo.server.auth import Key
from octavo.server.chat import Wire, job_of
from octavo.server.decoding import Refused, decode, refuse, taken, told
from octavo.server.exchange import Job
from octavo.server.generate import Generate, Visit
from octavo.server.problems import reply_json
from octavo.server.protocol import ChatBody, Extras, Temperature, check_metadata
from octavo.server.reply import Asked, encode
from octavo.server.responses_shape import ResponsesShape
from octavo.server.responses_store import Kept, Shelf
from octavo.server.service import Service

LOGPROBS = "message.output_text.logprobs"
# But for the first there is nothing to include: no thought is encrypted, no tool runs here.
INCLUDES = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
TEXTS = ("input_text", "output_text", "text", "reasoning_text", "refusal")
NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}


class InputPart(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    detail: str | None = None
    image_url: Refused = None
    file_id: Refused = None
    file_data: Refused = None
    file_url: Refused = None
    input_audio: Refused = None


class InputItem(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What was said, called or answered; of no `type` it is a message."""

    type: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    id: str | None = None
    status: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[Any] | None = None
    encrypted_content: str | None = None


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the caller runs; any other type is refused."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    """How the text is to look."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None
    summary: Refused = None
    generate_summary: Refused = None


class Options(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: Refused = None


class ResponsesBody(Extras, kw_only=True):
    """POST /v1/responses."""

    model: str
    input: str | list[InputItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: Options | None = None
    temperature: Temperature | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    truncation: str | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    max_tool_calls: int | None = None  # of tools that the server runs, and it runs none
    # Known, and refused.
    background: Refused = None
    conversation: Refused = None
    prompt: Refused = None
    prompt_cache_retention: Refused = None


def routes(service: Service) -> list[Route]:
    responses = Responses(Shelf(service.config.max_stored))
    one = "/v1/responses/{id}"
    return [
        Route("/v1/responses", Generate(service, responses.job), methods=["POST"]),
        Route(one, responses.show, methods=["GET"]),
        Route(one, responses.delete, methods=["DELETE"]),
    ]


class Responses:
    """The endpoints, over one shelf."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf

    def job(self, service: Service, data: bytes, visit: Visit) -> Job:
        """The body of a responses request. Raises `InvalidRequest`."""
        body, ignored = decode(ResponsesBody, data, service.limits.strict)
        _check(body)
        id = f"resp_{secrets.token_hex(24)}"
        given = (
            [InputItem("message", "user", body.input)]
            if isinstance(body.input, str)
            else body.input
        )
        earlier = self._earlier(body, visit.key)
        messages = _messages(body.instructions, [*earlier, *given], len(earlier))
        keeps = self._keeps(body)
        done = partial(self._keep, _owner(visit.key), [*earlier, *given]) if keeps else _forget
        fields = _fields(body, keeps)

        def shape(asked: Asked, _: int) -> ResponsesShape:
            return ResponsesShape(asked, fields, done)

        return _translated(
            service, body, messages, visit, Wire(id, shape, NAMES, ignored, flat=True)
        )

    def _keeps(self, body: ResponsesBody) -> bool:
        if self.shelf.most == 0 and body.store:
            raise Unsupported("store needs a server with --max-stored above 0", "store")
        return self.shelf.most > 0 and body.store is not False

    def _earlier(self, body: ResponsesBody, key: Key | None) -> Sequence[InputItem]:
        """The conversation that is continued."""
        id = body.previous_response_id
        if id is None:
            return ()
        kept = self.shelf.find(_owner(key), id)
        if kept is None:
            error = InvalidRequest(
                f"no response {id[:80]!r} is kept here: it was not stored, or has made room for "
                "later ones",
                "previous_response_id",
            )
            error.code = "previous_response_not_found"
            raise error
        return kept.items

    def _keep(self, owner: str, items: list[InputItem], response: dict[str, Any]) -> None:
        output = msgspec.convert(response["output"], list[InputItem])
        data = encode(response)
        whole = (*items, *output)
        self.shelf.put(owner, response["id"], Kept(data, whole, len(data) + len(encode(whole))))

    async def show(self, request: Request) -> Response:
        id = request.path_params["id"]
        if request.query_params.get("stream") in ("true", "1"):
            raise Unsupported("a kept response is not streamed again", "stream")
        kept = self.shelf.find(_owner(request.scope["octavo.key"]), id)
        if kept is None:
            raise NotFound(f"no response {id[:80]!r} is kept here", "id")
        return Response(kept.response, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        id = request.path_params["id"]
        if not self.shelf.drop(_owner(request.scope["octavo.key"]), id):
            raise NotFound(f"no response {id[:80]!r} is kept here", "id")
        return reply_json({"id": id, "object": "response", "deleted": True})


def _owner(key: Key | None) -> str:
    return key.name if key is not None else ""


def _forget(response: dict[str, Any]) -> None:
    """What becomes of a response that is not to be kept."""


def _check(body: ResponsesBody) -> None:
    check_metadata(body.metadata)
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        what = f"max_output_tokens must be at least 1, got {body.max_output_tokens}"
        raise InvalidRequest(what, "max_output_tokens")
    if body.truncation not in (None, "disabled"):
        what = f"truncation must be disabled, got {shown(body.truncation)}: nothing is cut off here"
        raise Unsupported(what, "truncation")
    for name in body.include or ():
        if name not in INCLUDES:
            what = f"include may have {', '.join(INCLUDES)}, got {shown(name)}"
            raise Unsupported(what, "include")
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        what = f"top_logprobs {body.top_logprobs} needs include: [{LOGPROBS!r}]"
        raise InvalidRequest(f"{what}, got {told(body.include)}", "top_logprobs")
    if body.stream_options is not None:
        refuse(body.stream_options, "stream_options.")
        if not body.stream:
            what = f"stream_options needs stream: true, got {told(body.stream)}"
            raise InvalidRequest(what, "stream_options")
    if body.reasoning is not None:
        refuse(body.reasoning, "reasoning.")
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        what = f"text.verbosity must be medium in this version, got {shown(body.text.verbosity)}"
        raise Unsupported(what, "text.verbosity")


def _translated(
    service: Service, body: ResponsesBody, messages: list[Any], visit: Visit, wire: Wire
) -> Job:
    """The body as chat would have it."""
    logged = LOGPROBS in (body.include or ())
    reasoning, text = body.reasoning or Reasoning(), body.text or TextOptions()
    asked = {name: getattr(body, name) for name in Extras.__struct_fields__} | {
        "model": body.model,
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "logprobs": logged or None,
        "top_logprobs": body.top_logprobs if logged else None,
        "stream": body.stream,
        "reasoning_effort": reasoning.effort,
        "response_format": _format(text.format),
        "tools": None if body.tools is None else [*map(_tool, range(len(body.tools)), body.tools)],
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
    }
    try:
        chat = taken(ChatBody, {name: value for name, value in asked.items() if value is not None})
    except InvalidRequest as error:
        error.rename(wire.name(error.param))
        raise
    return job_of(service, chat, visit, wire)


def _messages(
    instructions: str | None, items: Sequence[InputItem], num_earlier: int
) -> list[dict[str, Any]]:
    """Items as chat's messages; a turn's calls stand in one message. num_earlier: items that are
    not of this request's input."""
    made: list[dict[str, Any]] = []
    thought: dict[str, Any] = {}
    if instructions is not None:
        made.append({"role": "system", "content": instructions})
    for index, item in enumerate(items, -num_earlier):
        at, kind = f"input[{index}]", item.type or "message"
        if kind == "message":
            if item.role not in ("user", "assistant", "system", "developer"):
                what = "must be user, assistant, system or developer"
                raise InvalidRequest(f"{at}.role {what}, got {told(item.role)}", f"{at}.role")
            text = _plain(item.content, f"{at}.content")
            said = {"role": item.role, "content": text}
            made.append(said | thought if item.role == "assistant" else said)
            thought = {}
        elif kind == "function_call":
            if not made or made[-1]["role"] != "assistant":
                made.append({"role": "assistant", "content": None} | thought)
                thought = {}
            made[-1].setdefault("tool_calls", []).append(_call(item, at))
        elif kind == "function_call_output":
            id = _given(item.call_id, f"{at}.call_id")
            text = _plain(item.output, f"{at}.output")
            made.append({"role": "tool", "tool_call_id": id, "content": text})
        elif kind == "reasoning":  # its template says whether a model is shown it again
            text = _plain(item.content or "", f"{at}.content")
            thought = {"reasoning_content": text} if text else {}
        else:
            what = "must be message, function_call, function_call_output or reasoning"
            raise Unsupported(f"{at}.type {what}, got {shown(kind)}", f"{at}.type")
    return made


def _call(item: InputItem, at: str) -> dict[str, Any]:
    function = {
        "name": _given(item.name, f"{at}.name"),
        "arguments": _given(item.arguments, f"{at}.arguments"),
    }
    return {"id": _given(item.call_id, f"{at}.call_id"), "type": "function", "function": function}


def _given(value: str | None, at: str) -> str:
    if value is None:
        raise InvalidRequest(f"{at} is required", at)
    return value


def _plain(content: str | list[InputPart] | None, at: str) -> str:
    if content is None:
        raise InvalidRequest(f"{at} is required", at)
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        here = f"{at}[{index}]"
        if part.type not in TEXTS:
            what = f"{here}.type must be one of {', '.join(TEXTS)}, got {shown(part.type)}"
            raise Unsupported(what, f"{here}.type")
        refuse(part, here + ".")
        name = "refusal" if part.type == "refusal" else "text"
        texts.append(_given(getattr(part, name), f"{here}.{name}"))
    return "".join(texts)


def _format(format: dict[str, Any] | None) -> dict[str, Any] | None:
    """text.format as chat's response_format, which holds a schema one level deeper."""
    if format is None or format.get("type") != "json_schema":
        return format
    inner = {name: value for name, value in format.items() if name != "type"}
    return {"type": "json_schema", "json_schema": inner}


def _tool(index: int, tool: FunctionTool) -> dict[str, Any]:
    if tool.type != "function":
        at = f"tools[{index}].type"
        what = f"{at} must be function, got {shown(tool.type)}: what a server runs is not here"
        raise Unsupported(what, at)
    function = {
        name: value
        for name in ("name", "description", "parameters", "strict")
        if (value := getattr(tool, name)) is not None
    }
    return {"type": "function", "function": function}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        what = "tool_choice must be auto, none, required or a function"
        raise Unsupported(f"{what}, got {shown(choice)}", "tool_choice")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _fields(body: ResponsesBody, keeps: bool) -> dict[str, Any]:
    """What a response says of its request."""
    text = body.text or TextOptions()
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "store": keeps,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": text.format or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
