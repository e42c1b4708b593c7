"""Bodies of chat and completions: what is declared here is honoured in full, or refused by name."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from octavo.core.request import MAX_TOP_LOGPROBS, SamplingParams, shown
from octavo.errors import InvalidRequest, Unsupported
from octavo.server.deadlines import SloBody
from octavo.server.decoding import Ignored, Refused, decode, refuse, told
from octavo.server.structured import ResponseFormat, Structured, wanted
from octavo.server.tools import Tool, ToolCall, ToolChoice

COMPLETION_TOKENS = 16  # the OpenAI default of /v1/completions

# OpenAI's range; Anthropic's ends at 1. Above it a model is all but a die.
Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]
METADATA_PAIRS, METADATA_KEY, METADATA_VALUE = 16, 64, 512


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Refused = None


class Wishes(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Whose request it is, and what it wants of time."""

    user: str | None = None
    safety_identifier: str | None = None
    priority: int | None = None
    slo: SloBody | None = None
    service_tier: str | None = None


class Extras(Wishes, kw_only=True):
    """What every generating endpoint takes beyond its own API, in the field's usual words."""

    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    banned_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    speculation: bool | None = None
    structured_outputs: Structured | None = None
    # Other servers' names for structured_outputs: to pass over them would be no answer at all.
    guided_choice: Refused = None
    guided_grammar: Refused = None
    guided_json: Refused = None
    guided_regex: Refused = None
    grammar: Refused = None
    json_schema: Refused = None


class Sampling(Extras, kw_only=True):
    """What chat and completions share."""

    model: str
    max_tokens: int | None = None
    temperature: Temperature | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    response_format: ResponseFormat | None = None
    # Of use to the caller's records alone; the prefix cache needs no key to find what is alike.
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    # Known, and refused.
    prompt_cache_retention: Refused = None
    store: Refused = None


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message."""

    type: str
    text: str | None = None
    image_url: Refused = None
    input_audio: Refused = None
    file: Refused = None


class Message(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """reasoning_content, reasoning: an assistant's thoughts, where a template shows them again."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: Refused = None
    annotations: Refused = None
    audio: Refused = None
    function_call: Refused = None


class Prediction(msgspec.Struct, forbid_unknown_fields=True):
    """Text that the answer is expected to resemble."""

    type: Literal["content"]
    content: str | list[Part]


class ChatBody(Sampling, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prediction: Prediction | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    audio: Refused = None
    functions: Refused = None
    function_call: Refused = None
    modalities: Refused = None
    verbosity: Refused = None
    web_search_options: Refused = None
    # Of the other endpoint.
    best_of: Refused = None
    echo: Refused = None
    prompt: Refused = None
    suffix: Refused = None


class CompletionBody(Sampling, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    best_of: Refused = None
    # Of the other endpoint.
    max_completion_tokens: Refused = None
    messages: Refused = None
    prediction: Refused = None
    tools: Refused = None
    top_logprobs: Refused = None


Body = TypeVar("Body", ChatBody, CompletionBody)


@dataclass(frozen=True, slots=True)
class Limits:
    """Caps of the server on one request. strict: unknown fields are refused."""

    max_n: int = 8
    max_prompts: int = 64
    priority: bool = False
    strict: bool = False
    max_stops: int = 4
    max_logprobs: int = MAX_TOP_LOGPROBS
    max_output_tokens: int | None = None


def parse(cls: type[Body], data: bytes, strict: bool = False) -> tuple[Body, Ignored]:
    """A checked body and its unknown fields. Raises `InvalidRequest` or `Unsupported`."""
    body, ignored = decode(cls, data, strict)
    if body.stream_options is not None:
        refuse(body.stream_options, "stream_options.")
        if not body.stream:
            what = f"stream_options needs stream: true, got {told(body.stream)}"
            raise InvalidRequest(what, "stream_options")
    check_metadata(body.metadata)
    return body, ignored


def check_priority(body: Wishes, limits: Limits) -> None:
    """Raises `Unsupported` for a priority that nobody would look at."""
    if body.priority is not None and not limits.priority:
        what = f"priority {body.priority} needs a server started with --policy priority"
        raise Unsupported(what, "priority")


def check_metadata(metadata: dict[str, str] | None) -> None:
    """OpenAI's limits. It is for the caller's own records: nothing is stored here."""
    for key, value in (metadata or {}).items():
        if len(key) > METADATA_KEY or len(value) > METADATA_VALUE:
            most = f"keys have at most {METADATA_KEY} characters, values {METADATA_VALUE}"
            got = f"got {len(key)} and {len(value)} at {shown(key)}"
            raise InvalidRequest(f"metadata: {most}, {got}", "metadata")
    if metadata is not None and len(metadata) > METADATA_PAIRS:
        what = f"metadata has at most {METADATA_PAIRS} pairs, got {len(metadata)}"
        raise InvalidRequest(what, "metadata")


def sampling(body: ChatBody | CompletionBody, limits: Limits) -> SamplingParams:
    """The body's sampling fields. Raises `InvalidRequest`, `Unsupported`."""
    _within("n", body.n, 1, limits.max_n)
    check_priority(body, limits)
    given: dict[str, Any] = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "n": body.n,
        "seed": body.seed,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "typical_p": body.typical_p,
        "repetition_penalty": body.repetition_penalty,
        "min_tokens": body.min_tokens,
        "ignore_eos": body.ignore_eos,
        "speculation": body.speculation,
        "prediction": _prediction(body),
        "stop_token_ids": _tuple(body.stop_token_ids),
        "allowed_token_ids": _tuple(body.allowed_token_ids),
        "banned_token_ids": _tuple(body.banned_token_ids),
        "stop": _stops(body.stop, limits.max_stops),
        "logit_bias": _bias(body.logit_bias),
        "structured_outputs": wanted(body.response_format, body.structured_outputs),
    }
    kept = {name: value for name, value in given.items() if value is not None}
    logprobs = _logprobs(body, limits)
    return SamplingParams(max_tokens=_max_tokens(body, limits), **logprobs, **kept)


def fitted(params: SamplingParams, limits: Limits, left: int) -> SamplingParams:
    """Of a request that asks for no number of tokens: as many as the server lets one have, and as
    the context has left beside the prompt. (A prompt that leaves none is refused for that.)"""
    most = limits.max_output_tokens
    if most is None or params.max_tokens is not None or left < 1:
        return params
    return replace(params, max_tokens=min(most, left))


def _within(name: str, value: int | None, low: int, high: int) -> None:
    """Raises `InvalidRequest` for what is beyond one of the server's own bounds."""
    if value is not None and not low <= value <= high:
        what = f"at least {low} and at most {high} on this server"
        raise InvalidRequest(f"{name} must be {what}, got {shown(value)}", name)


def _prediction(body: ChatBody | CompletionBody) -> str | None:
    given = body.prediction if isinstance(body, ChatBody) else None
    return None if given is None else _plain(given.content, "prediction.content")


def _max_tokens(body: ChatBody | CompletionBody, limits: Limits) -> int | None:
    most = limits.max_output_tokens
    if most is not None:
        _within("max_tokens", body.max_tokens, 1, most)
    if isinstance(body, CompletionBody):
        default = COMPLETION_TOKENS if most is None else min(COMPLETION_TOKENS, most)
        return default if body.max_tokens is None else body.max_tokens
    new, old = body.max_completion_tokens, body.max_tokens
    if most is not None:
        _within("max_completion_tokens", new, 1, most)
    if new is not None and new < 1:
        what = f"max_completion_tokens must be at least 1, got {new}"
        raise InvalidRequest(what, "max_completion_tokens")
    if new is not None and old is not None and new != old:
        raise InvalidRequest(
            "give max_completion_tokens, or its old name max_tokens, or the same in both, "
            f"got {new} and {old}",
            "max_tokens",
        )
    return old if new is None else new


def _logprobs(body: ChatBody | CompletionBody, limits: Limits) -> dict[str, Any]:
    if isinstance(body, CompletionBody):
        if body.logprobs is None:
            return {}
        _within("logprobs", body.logprobs, 0, limits.max_logprobs)
        if body.echo and (body.n or 1) > 1:
            what = f"n must be 1 with echo and logprobs, got {body.n}"
            raise Unsupported(what, "n")
        both = {"logprobs": body.logprobs}
        return both | ({"prompt_logprobs": body.logprobs} if body.echo else {})
    top = body.top_logprobs
    _within("top_logprobs", top, 0, limits.max_logprobs)
    if top and not body.logprobs:
        what = f"top_logprobs {top} needs logprobs: true, got {told(body.logprobs)}"
        raise InvalidRequest(what, "top_logprobs")
    return {"logprobs": top or 0} if body.logprobs else {}


def _stops(stop: str | list[str] | None, most: int) -> tuple[str, ...] | None:
    if stop is None:
        return None
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > most:
        raise InvalidRequest(f"stop may have at most {most} texts, got {len(stops)}", "stop")
    if not all(stops):
        raise InvalidRequest(f"stop must be texts of a character or more, got {told(stop)}", "stop")
    return stops


def _bias(bias: dict[str, float] | None) -> tuple[tuple[int, float], ...] | None:
    if bias is None:
        return None
    for key, value in bias.items():
        if not (re.fullmatch(r"0|[1-9][0-9]{0,8}", key) and -100.0 <= value <= 100.0):
            what = "logit_bias maps token ids to numbers in [-100, 100]"
            raise InvalidRequest(f"{what}, got {shown(key)}: {shown(value)}", "logit_bias")
    return tuple(sorted((int(key), value) for key, value in bias.items()))


def _tuple(ids: list[int] | None) -> tuple[int, ...] | None:
    return None if ids is None else tuple(ids)


def chat_messages(body: ChatBody) -> list[dict[str, Any]]:
    """Messages as a template takes them. `developer` is OpenAI's newer word for `system`."""
    if not body.messages:
        raise InvalidRequest("messages is empty", "messages")
    made = []
    for index, message in enumerate(body.messages):
        at = f"messages[{index}]."
        refuse(message, at)
        role = "system" if message.role == "developer" else message.role
        if message.content is None and role != "assistant":
            raise InvalidRequest(f"{at}content is required", at + "content")
        if (message.tool_call_id is None) == (role == "tool"):
            theirs = f"belongs to messages with role tool, got role {role}"
            what = "is required with role tool" if role == "tool" else theirs
            raise InvalidRequest(f"{at}tool_call_id {what}", at + "tool_call_id")
        plain: dict[str, Any] = {"role": role, "content": _plain(message.content, at + "content")}
        if role == "assistant":
            plain |= _of_assistant(message)
        elif message.tool_calls:
            what = f"{at}tool_calls belong to messages with role assistant, got role {role}"
            raise InvalidRequest(what, at + "tool_calls")
        plain |= {"tool_call_id": message.tool_call_id} if role == "tool" else {}
        made.append(plain if message.name is None else plain | {"name": message.name})
    return made


def _of_assistant(message: Message) -> dict[str, Any]:
    """What an assistant's message has besides its text."""
    more: dict[str, Any] = {}
    thoughts = message.reasoning_content or message.reasoning
    if thoughts:
        more["reasoning_content"] = thoughts
    if message.tool_calls:
        more["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]
    return more


def _plain(content: str | list[Part] | None, at: str) -> str:
    """Text of a message; parts must be text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        if part.type != "text":
            where = f"{at}[{index}].type"
            raise Unsupported(f"{where} must be text, got {shown(part.type)}", where)
        refuse(part, f"{at}[{index}].")
        if part.text is None:
            raise InvalidRequest(f"{at}[{index}].text is required", f"{at}[{index}].text")
        texts.append(part.text)
    return "".join(texts)


def several(given: str | list[Any], most: int, field: str) -> list[str | list[int]]:
    """What may be one text or token ids, or up to `most` of either. Raises `InvalidRequest`."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequest(f"{field} is an empty list: give text or token ids", field)
    if all(type(item) is int for item in given):
        return [given]
    if len(given) > most:
        what = f"{field} may have at most {most} items on this server, got {len(given)}"
        raise InvalidRequest(what, field)
    if {type(item) for item in given} in ({str}, {list}):
        return given
    what = f"{field} must be text, texts, token ids, or lists of token ids, got {shown(given)}"
    raise InvalidRequest(what, field)
