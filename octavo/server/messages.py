"""Anthropic's /v1/messages and /v1/messages/count_tokens, translated to chat's."""

from __future__ import annotations

import secrets
from typing import Any, Literal

import msgspec
from starlette.responses import Response
from starlette.routing import Route

from octavo.errors import InvalidRequest, Unsupported
from octavo.server.answer import Answer
from octavo.server.chat import Wire, job_of, prompt_of
from octavo.server.decoding import Ignored, Refused, decode, refuse, taken
from octavo.server.exchange import Job
from octavo.server.generate import Generate, Visit
from octavo.server.messages_shape import MessagesShape, anthropic_error
from octavo.server.problems import reply_json
from octavo.server.protocol import ChatBody, Extras
from octavo.server.service import Service

PATH = "/v1/messages"
NAMES = {
    "prompt": "messages",
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "response_format": "output_config.format",
}
TIERS = {"auto": "auto", "standard_only": "default"}


class Block(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A block of content. cache_control: what is alike is found without being marked."""

    type: Literal[
        "text",
        "image",
        "document",
        "search_result",
        "thinking",
        "redacted_thinking",
        "tool_use",
        "tool_result",
    ]
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    cache_control: dict[str, Any] | None = None
    citations: Refused = None
    source: Refused = None


class Turn(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class Metadata(msgspec.Struct, forbid_unknown_fields=True):
    user_id: str | None = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    budget_tokens: int | None = None
    display: str | None = None


class CountBody(Extras, kw_only=True):
    """POST /v1/messages/count_tokens: what its messages have too."""

    model: str
    messages: list[Turn]
    system: str | list[Block] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    cache_control: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    context_management: Refused = None
    mcp_servers: Refused = None


class MessagesBody(CountBody, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: Metadata | None = None
    container: Refused = None
    inference_geo: Refused = None


def routes(service: Service) -> list[Route]:
    post = ["POST"]
    return [
        Route(PATH, Generate(service, messages_job), methods=post),
        Route(f"{PATH}/count_tokens", Answer(service, count_tokens), methods=post),
    ]


def refusal(response: Response) -> Response:
    """A refusal in OpenAI's words as Anthropic's."""
    status, body = anthropic_error(response.status_code, msgspec.json.decode(response.body))
    kept = ("retry-after", "retry-after-ms", "www-authenticate", "allow")
    headers = {name: response.headers[name] for name in kept if name in response.headers}
    return reply_json(body, status, headers)


def messages_job(service: Service, data: bytes, visit: Visit) -> Job:
    """The body of a messages request. Raises `InvalidRequest`."""
    body, ignored = decode(MessagesBody, data, service.limits.strict)
    metadata = body.metadata or Metadata()
    chat = _translated(body) | {
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "user": metadata.user_id or body.user,
    }
    wire = Wire(f"msg_{secrets.token_hex(12)}", MessagesShape, NAMES, ignored)
    return job_of(service, _chat_body(chat), visit, wire)


def count_tokens(service: Service, data: bytes) -> tuple[Any, Ignored]:
    """How long the prompt of a messages request is."""
    body, ignored = decode(CountBody, data, service.limits.strict)
    service.check_model(body.model)
    return {"input_tokens": len(prompt_of(service, _chat_body(_translated(body))))}, ignored


def _chat_body(chat: dict[str, Any]) -> ChatBody:
    try:
        return taken(ChatBody, {name: value for name, value in chat.items() if value is not None})
    except InvalidRequest as error:
        error.param = Wire("", MessagesShape, NAMES).name(error.param)
        raise


def _translated(body: CountBody) -> dict[str, Any]:
    """The prompt as chat's fields."""
    extras = {name: getattr(body, name) for name in Extras.__struct_fields__}
    if body.service_tier is not None:
        tier = TIERS.get(body.service_tier)
        if tier is None:
            raise Unsupported(f"service_tier must be {' or '.join(TIERS)}", "service_tier")
        extras["service_tier"] = tier
    if body.thinking is not None and body.thinking.type != "disabled":
        raise Unsupported("thinking is not supported by this version", "thinking")
    choice, one_call = _tool_choice(body.tool_choice)
    return extras | {
        "model": body.model,
        "messages": _messages(body),
        "tools": None if body.tools is None else [*map(_tool, range(len(body.tools)), body.tools)],
        "tool_choice": choice,
        "parallel_tool_calls": False if one_call else None,
        "response_format": _format(body.output_config),
    }


def _messages(body: CountBody) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    if body.system is not None:
        made.append({"role": "system", "content": _text(body.system, "system")})
    for index, turn in enumerate(body.messages):
        at = f"messages[{index}]"
        if turn.role == "user":
            made += _of_user(turn, f"{at}.content")
        else:
            made.append(_of_assistant(turn, f"{at}.content"))
    if body.messages and body.messages[-1].role == "assistant":
        raise Unsupported("the last message must be the user's: nothing is continued", "messages")
    return made


def _of_user(turn: Turn, at: str) -> list[dict[str, Any]]:
    """Results of tools are messages of their own; text between them stays where it is."""
    if isinstance(turn.content, str):
        return [{"role": "user", "content": turn.content}]
    made: list[dict[str, Any]] = []
    for index, block in enumerate(turn.content):
        here = f"{at}[{index}]"
        if block.type == "tool_result":
            id = _given(block.tool_use_id, f"{here}.tool_use_id")
            text = "" if block.content is None else _text(block.content, f"{here}.content")
            made.append({"role": "tool", "tool_call_id": id, "content": text})
        elif made and made[-1]["role"] == "user":
            made[-1]["content"] += _text([block], here)
        else:
            made.append({"role": "user", "content": _text([block], here)})
    return made or [{"role": "user", "content": ""}]


def _of_assistant(turn: Turn, at: str) -> dict[str, Any]:
    if isinstance(turn.content, str):
        return {"role": "assistant", "content": turn.content}
    texts, calls = [], []
    for index, block in enumerate(turn.content):
        here = f"{at}[{index}]"
        if block.type == "tool_use":
            function = {
                "name": _given(block.name, f"{here}.name"),
                "arguments": msgspec.json.encode(block.input or {}).decode(),
            }
            id = _given(block.id, f"{here}.id")
            calls.append({"id": id, "type": "function", "function": function})
        elif block.type not in ("thinking", "redacted_thinking"):  # not shown to a model again
            texts.append(_text([block], here))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    return message | ({"tool_calls": calls} if calls else {})


def _text(content: str | list[Block], at: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, block in enumerate(content):
        here = at if at.endswith("]") else f"{at}[{index}]"
        if block.type != "text":
            raise Unsupported(f"{here}: only blocks that are text", f"{here}.type")
        refuse(block, here + ".")
        texts.append(_given(block.text, f"{here}.text"))
    return "".join(texts)


def _given(value: str | None, at: str) -> str:
    if value is None:
        raise InvalidRequest(f"{at} is required", at)
    return value


def _tool(index: int, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        at = f"tools[{index}].type"
        raise Unsupported(f"{at}: only custom tools; what a server runs itself is not here", at)
    renamed = {"input_schema": "parameters"}
    function = {renamed.get(k, k): v for k, v in tool.items() if k not in ("type", "cache_control")}
    return {"type": "function", "function": function}


def _tool_choice(choice: dict[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool]:
    """(chat's tool_choice, whether only one call is wanted)."""
    if choice is None:
        return None, False
    one = choice.get("disable_parallel_tool_use") is True
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}, one
    words = {"auto": "auto", "any": "required", "none": "none"}
    if kind not in words:
        raise InvalidRequest("tool_choice.type must be auto, any, tool or none", "tool_choice.type")
    return words[kind], one


def _format(config: dict[str, Any] | None) -> dict[str, Any] | None:
    """output_config.format as chat's response_format."""
    if config is None:
        return None
    for name in config:
        if name != "format":
            raise Unsupported(f"output_config.{name} is not supported", f"output_config.{name}")
    format = config.get("format")
    if not isinstance(format, dict) or format.get("type") != "json_schema":
        return None if format is None else {"type": str(format)}
    schema = {"name": "output", "schema": format.get("schema"), "strict": True}
    return {"type": "json_schema", "json_schema": schema}
