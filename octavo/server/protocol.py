"""Request bodies: bytes in, a value that is honoured in full out, or an error naming the field.

Three kinds of field: declared here with a type and honoured; declared as `Refused`, known to the
OpenAI API and refused unless it says what we do anyway; anything else is unknown, and refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from octavo.core.request import MAX_TOP_LOGPROBS, SamplingParams
from octavo.errors import InvalidRequest, Unsupported
from octavo.server.deadlines import SloBody

MAX_STOPS = 4
COMPLETION_TOKENS = 16  # the OpenAI default of /v1/completions

Refused = Any  # a field that is read only to be refused by name


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Refused = None


class Sampling(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What chat and completions share."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    # Beyond OpenAI's, in the field's usual words.
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    banned_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    speculation: bool | None = None
    slo: SloBody | None = None
    service_tier: str | None = None
    # Known, and refused.
    metadata: Refused = None
    prompt_cache_key: Refused = None
    prompt_cache_retention: Refused = None
    safety_identifier: Refused = None
    store: Refused = None
    response_format: Refused = None


class Message(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    refusal: Refused = None
    annotations: Refused = None
    audio: Refused = None
    function_call: Refused = None
    tool_calls: Refused = None
    tool_call_id: Refused = None


class Prediction(msgspec.Struct, forbid_unknown_fields=True):
    """Text that the answer is expected to resemble."""

    type: Literal["content"]
    content: str | list[dict[str, Any]]


class ChatBody(Sampling, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prediction: Prediction | None = None
    audio: Refused = None
    functions: Refused = None
    function_call: Refused = None
    modalities: Refused = None
    parallel_tool_calls: Refused = None
    reasoning_effort: Refused = None
    tools: Refused = None
    tool_choice: Refused = None
    verbosity: Refused = None
    web_search_options: Refused = None


class CompletionBody(Sampling, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: Refused = None
    suffix: Refused = None


# The values of refused fields that ask for nothing but what happens anyway.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "tool_calls": ([],),
    "annotations": ([],),
    "suffix": ("",),
    "best_of": (1,),
    "include_obfuscation": (False,),
}

Body = TypeVar("Body", ChatBody, CompletionBody)
_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {
    cls: msgspec.json.Decoder(cls) for cls in (ChatBody, CompletionBody)
}
_REFUSED: dict[type, tuple[str, ...]] = {
    cls: tuple(item.name for item in msgspec.structs.fields(cls) if item.type is Any)
    for cls in (ChatBody, CompletionBody, Message, StreamOptions)
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Caps of the server on one request."""

    max_n: int = 8
    max_prompts: int = 64
    priority: bool = False


def parse(cls: type[Body], data: bytes) -> Body:
    """A checked body. Raises `InvalidRequest` or `Unsupported`, naming the field."""
    try:
        body: Body = _DECODERS[cls].decode(data)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    _refuse(body, "")
    if body.stream_options is not None:
        _refuse(body.stream_options, "stream_options.")
        if not body.stream:
            raise InvalidRequest("stream_options needs stream: true", "stream_options")
    return body


def _named(message: str) -> InvalidRequest:
    """msgspec's message, with the path it names as `param`."""
    text, _, path = message.partition(" - at `")
    param = re.sub(r"^(key in )?`?\$\.?", "", path.rstrip("`")).replace("[...]", "")
    unknown = re.search(r"unknown field `(.*)`", text)
    missing = re.search(r"missing required field `(.*)`", text)
    found = unknown or missing
    if found:
        param = f"{param}.{found[1]}" if param else found[1]
    if unknown:
        return Unsupported(f"unknown field {param}", param)
    if missing:
        return InvalidRequest(f"{param} is required", param)
    return InvalidRequest(f"{param or 'the body'}: {text}", param or None)


def _refuse(value: msgspec.Struct, prefix: str) -> None:
    for name in _REFUSED[type(value)]:
        given = getattr(value, name)
        if given is not None and not any(
            given == ok and type(given) is type(ok) for ok in _HARMLESS.get(name, ())
        ):
            raise Unsupported(f"{prefix}{name} is not supported by this version", prefix + name)


def sampling(body: ChatBody | CompletionBody, limits: Limits) -> SamplingParams:
    """The body's sampling fields. Raises `InvalidRequest`, `Unsupported`."""
    n = 1 if body.n is None else body.n
    if n > limits.max_n:
        raise InvalidRequest(f"n must be at most {limits.max_n} on this server, got {n}", "n")
    if body.priority is not None and not limits.priority:
        raise Unsupported("priority needs a server started with --policy priority", "priority")
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
        "stop": _stops(body.stop),
        "logit_bias": _bias(body.logit_bias),
    }
    kept = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(max_tokens=_max_tokens(body), **_logprobs(body), **kept)


def _prediction(body: ChatBody | CompletionBody) -> str | None:
    given = body.prediction if isinstance(body, ChatBody) else None
    return None if given is None else _plain(given.content, "prediction.content")


def _max_tokens(body: ChatBody | CompletionBody) -> int | None:
    if isinstance(body, CompletionBody):
        return COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and new < 1:
        raise InvalidRequest("max_completion_tokens must be at least 1", "max_completion_tokens")
    if new is not None and old is not None and new != old:
        raise InvalidRequest(
            "max_tokens is the old name of max_completion_tokens: give one of them", "max_tokens"
        )
    return old if new is None else new


def _logprobs(body: ChatBody | CompletionBody) -> dict[str, Any]:
    if isinstance(body, CompletionBody):
        if body.logprobs is None:
            return {}
        if body.echo and (body.n or 1) > 1:
            raise Unsupported("echo with logprobs is for one choice: n must be 1", "n")
        both = {"logprobs": body.logprobs}
        return both | ({"prompt_logprobs": body.logprobs} if body.echo else {})
    top = body.top_logprobs
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"top_logprobs must be in [0, {MAX_TOP_LOGPROBS}]", "top_logprobs")
    if top is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs")
    return {"logprobs": top or 0} if body.logprobs else {}


def _stops(stop: str | list[str] | None) -> tuple[str, ...] | None:
    if stop is None:
        return None
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop takes at most {MAX_STOPS} strings, got {len(stops)}", "stop")
    return stops


def _bias(bias: dict[str, float] | None) -> tuple[tuple[int, float], ...] | None:
    if bias is None:
        return None
    if not all(re.fullmatch(r"0|[1-9][0-9]{0,8}", key) for key in bias):
        raise InvalidRequest("logit_bias maps token ids to numbers in [-100, 100]", "logit_bias")
    return tuple(sorted((int(key), value) for key, value in bias.items()))


def _tuple(ids: list[int] | None) -> tuple[int, ...] | None:
    return None if ids is None else tuple(ids)


def chat_messages(body: ChatBody) -> list[dict[str, str]]:
    """Messages as a template takes them. `developer` is OpenAI's newer word for `system`."""
    if not body.messages:
        raise InvalidRequest("messages is empty", "messages")
    made = []
    for index, message in enumerate(body.messages):
        at = f"messages[{index}]."
        _refuse(message, at)
        role = "system" if message.role == "developer" else message.role
        if message.content is None and role != "assistant":
            raise InvalidRequest(f"{at}content is required", at + "content")
        plain = {"role": role, "content": _plain(message.content, at + "content")}
        made.append(plain if message.name is None else plain | {"name": message.name})
    return made


def _plain(content: str | list[dict[str, Any]] | None, at: str) -> str:
    """Text of a message; parts must be text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        if part.get("type") != "text":
            raise Unsupported(f"{at}[{index}]: only parts of type text", f"{at}[{index}].type")
        if not isinstance(part.get("text"), str) or set(part) - {"type", "text"}:
            raise InvalidRequest(f"{at}[{index}] must have just type and text", f"{at}[{index}]")
        texts.append(part["text"])
    return "".join(texts)


def completion_prompts(body: CompletionBody, limits: Limits) -> list[str | list[int]]:
    """The prompts, one to `max_prompts`, each a text or token ids."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(type(item) is int for item in prompt):
        return [prompt]  # type: ignore[list-item]
    if len(prompt) > limits.max_prompts:
        raise InvalidRequest(
            f"at most {limits.max_prompts} prompts a request, got {len(prompt)}", "prompt"
        )
    if prompt and all(isinstance(item, str) for item in prompt):
        return prompt  # type: ignore[return-value]
    if prompt and all(isinstance(item, list) for item in prompt):
        return prompt  # type: ignore[return-value]
    raise InvalidRequest("prompt must be text, texts, token ids, or lists of token ids", "prompt")
