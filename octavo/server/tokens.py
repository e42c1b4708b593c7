"""POST /tokenize and /detokenize, in vLLM's shapes: text or messages to token ids, and back."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.routing import Route

from octavo.core.request import shown
from octavo.errors import InvalidRequest
from octavo.server.answer import Answer
from octavo.server.chat import prompt_of
from octavo.server.decoding import Ignored, Refused, decode, taken
from octavo.server.protocol import ChatBody
from octavo.server.service import Service


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /tokenize: a prompt, or messages as of /v1/chat/completions.

    add_special_tokens: begin the prompt as the model wants it; control strings in it are plain text
    all the same.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: Refused = None
    continue_final_message: Refused = None
    chat_template: Refused = None
    chat_template_kwargs: Refused = None


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /detokenize. Control tokens are shown as they are written."""

    tokens: list[int]
    model: str | None = None


def routes(service: Service) -> list[Route]:
    post = ["POST"]
    return [
        Route("/tokenize", Answer(service, tokenize), methods=post),
        Route("/detokenize", Answer(service, detokenize), methods=post),
    ]


def tokenize(service: Service, data: bytes) -> tuple[Any, Ignored]:
    """The ids of a prompt. Raises `InvalidRequest`."""
    body, ignored = decode(TokenizeBody, data, service.limits.strict)
    tokenizer = service.served.tokenizer
    if body.model is not None:
        service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        got = "neither" if body.prompt is None else "both"
        raise InvalidRequest(f"give either prompt or messages, got {got}", "prompt")
    if body.prompt is not None:
        bos = False if body.add_special_tokens is False else None
        ids = tokenizer.encode(body.prompt, bos=bos)
    else:
        if body.add_special_tokens:
            raise InvalidRequest(
                "add_special_tokens: messages have those that their template writes, got true",
                "add_special_tokens",
            )
        chat = {"model": service.served.name, "messages": body.messages}
        if body.tools:
            chat["tools"] = body.tools
        ids = prompt_of(service, taken(ChatBody, chat))
    texts = [tokenizer.token_bytes(id).decode("utf-8", "replace") for id in ids]
    return {
        "count": len(ids),
        "max_model_len": service.served.door.capacity.max_context,
        "tokens": ids,
        "token_strs": texts if body.return_token_strs else None,
    }, ignored


def detokenize(service: Service, data: bytes) -> tuple[Any, Ignored]:
    """The text of ids. Raises `InvalidRequest`."""
    body, ignored = decode(DetokenizeBody, data, service.limits.strict)
    if body.model is not None:
        service.check_model(body.model)
    size = service.served.door.vocab_size
    for id in body.tokens:
        if not 0 <= id < size:
            what = f"tokens must be ids in [0, {size - 1}], got {shown(id)}"
            raise InvalidRequest(what, "tokens")
    return {"prompt": service.served.tokenizer.decode(body.tokens, False)}, ignored
