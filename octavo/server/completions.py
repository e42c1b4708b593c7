"""POST /v1/completions."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

from starlette.routing import Route

from octavo.core.request import shown
from octavo.errors import Unsupported
from octavo.server import protocol
from octavo.server.exchange import Job
from octavo.server.generate import Generate, Visit, asked, caller, granted
from octavo.server.service import Service
from octavo.server.shapes import CompletionShape
from octavo.text import Tokenizer


def routes(service: Service) -> list[Route]:
    return [Route("/v1/completions", Generate(service, completion_job), methods=["POST"])]


def completion_job(service: Service, data: bytes, visit: Visit) -> Job:
    """The body of a completions request. Raises `InvalidRequest`."""
    body, ignored = protocol.parse(protocol.CompletionBody, data, service.limits.strict)
    service.check_model(body.model)
    params = protocol.sampling(body, service.limits)
    prompts = protocol.several(body.prompt, service.limits.max_prompts, "prompt")
    id = f"cmpl-{secrets.token_hex(12)}"
    held = granted(service, body, visit)
    tokenizer, who = service.served.tokenizer, caller(visit.key, body, held)
    if body.suffix:
        if body.echo:
            got = f"got {shown(body.suffix)} and true"
            raise Unsupported(f"suffix and echo: give one of them, {got}", "suffix")
        ends = (*params.stop_token_ids, *tokenizer.infill_ends)
        params = params if params.ignore_eos else replace(params, stop_token_ids=ends)
    requests, texts = [], []
    for number, prompt in enumerate(prompts):
        text = prompt if isinstance(prompt, str) else None
        ids = _ids(tokenizer, prompt, body.suffix)
        requests.append(
            service.served.door.request(
                f"{id}-{number}",
                ids,
                params,
                arrival=visit.arrival,
                caller=who,
                skip_special=body.skip_special_tokens is not False,
            )
        )
        if body.echo:
            texts.append(text if text is not None else tokenizer.decode(ids, False))
    wanted = asked(service, id, body, held, tuple(texts))
    return Job(tuple(requests), wanted, CompletionShape, held.clamped, ignored)


def _ids(tokenizer: Tokenizer, prompt: str | Sequence[int], suffix: str | None) -> Sequence[int]:
    """A prompt, or what the model is to write between it and a suffix."""
    if suffix:
        return tokenizer.infill(prompt, suffix)
    return tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
