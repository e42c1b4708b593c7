"""Anthropic's /v1/messages and /v1/messages/count_tokens, translated to chat's."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

import msgspec
from starlette.responses import Response
from starlette.routing import Route

from octavo.core.request import shown
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
    "reasoning_effort": "thinking",
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


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """any: at least one; tool: the one of that name."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Metadata(msgspec.Struct, forbid_unknown_fields=True):
    user_id: str | None = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """enabled asks for thoughts, disabled for none; adaptive leaves it to the model's template."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class CustomTool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool that the caller runs; any other type is refused."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountBody(Extras, kw_only=True):
    """POST /v1/messages/count_tokens: what its messages have too."""

    model: str
    messages: list[Turn]
    system: str | list[Block] | None = None
    tools: list[CustomTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    cache_control: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    context_management: Refused = None
    mcp_servers: Refused = None


class MessagesBody(CountBody, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
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
    kept = ("retry-after", "retry-after-ms", "www-authenticate", "allow", "accept-encoding")
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
    if body.thinking is not None and body.thinking.budget_tokens is not None:
        ignored = (*ignored, "thinking.budget_tokens")  # how long it thinks is the model's affair
    wire = Wire(f"msg_{secrets.token_hex(12)}", MessagesShape, NAMES, ignored, flat=True)
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
        error.rename(Wire("", MessagesShape, NAMES, flat=True).name(error.param))
        raise


def _translated(body: CountBody) -> dict[str, Any]:
    """The prompt as chat's fields."""
    extras = {name: getattr(body, name) for name in Extras.__struct_fields__}
    if body.service_tier is not None:
        tier = TIERS.get(body.service_tier)
        if tier is None:
            got = shown(body.service_tier)
            what = f"service_tier must be {' or '.join(TIERS)}, got {got}"
            raise Unsupported(what, "service_tier")
        extras["service_tier"] = tier
    choice, one_call = _tool_choice(body.tool_choice)
    config = body.output_config or OutputConfig()
    return extras | {
        "model": body.model,
        "messages": _messages(body),
        "tools": None if body.tools is None else [*map(_tool, range(len(body.tools)), body.tools)],
        "tool_choice": choice,
        "parallel_tool_calls": False if one_call else None,
        "response_format": _format(config.format),
        "reasoning_effort": _effort(body.thinking, config.effort),
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
        what = "the last message must be the user's, got role assistant: nothing is continued"
        raise Unsupported(what, "messages")
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
    texts, calls, thoughts = [], [], []
    for index, block in enumerate(turn.content):
        here = f"{at}[{index}]"
        if block.type == "tool_use":
            function = {
                "name": _given(block.name, f"{here}.name"),
                "arguments": msgspec.json.encode(block.input or {}).decode(),
            }
            id = _given(block.id, f"{here}.id")
            calls.append({"id": id, "type": "function", "function": function})
        elif block.type == "thinking":  # its template says whether a model is shown it again
            thoughts.append(_given(block.thinking, f"{here}.thinking"))
        elif block.type != "redacted_thinking":
            texts.append(_text([block], here))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _text(content: str | list[Block], at: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, block in enumerate(content):
        here = at if at.endswith("]") else f"{at}[{index}]"
        if block.type != "text":
            what = f"{here}.type must be text here, got {shown(block.type)}"
            raise Unsupported(what, f"{here}.type")
        refuse(block, here + ".")
        texts.append(_given(block.text, f"{here}.text"))
    return "".join(texts)


def _given(value: str | None, at: str) -> str:
    if value is None:
        raise InvalidRequest(f"{at} is required", at)
    return value


def _tool(index: int, tool: CustomTool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        at = f"tools[{index}].type"
        what = f"{at} must be custom, got {shown(tool.type)}: what a server runs itself is not here"
        raise Unsupported(what, at)
    given: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    function = {name: value for name, value in given.items() if value is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice | None) -> tuple[str | dict[str, Any] | None, bool]:
    """(chat's tool_choice, whether only one call is wanted)."""
    if choice is None:
        return None, False
    one = choice.disable_parallel_tool_use is True
    if choice.type == "tool":
        name = _given(choice.name, "tool_choice.name")
        return {"type": "function", "function": {"name": name}}, one
    return "required" if choice.type == "any" else choice.type, one


def _format(format: OutputFormat | None) -> dict[str, Any] | None:
    """output_config.format as chat's response_format."""
    if format is None:
        return None
    schema = {"name": "output", "schema": format.schema, "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _effort(thinking: Thinking | None, effort: str | None) -> str | None:
    """Chat's reasoning_effort."""
    if thinking is not None and thinking.type == "disabled":
        return "none"
    if effort is not None:
        return "xhigh" if effort == "max" else effort
    return "high" if thinking is not None and thinking.type == "enabled" else None
