"""POST /v1/embeddings: what the served model makes of a text, as one vector.

The pooling is that of causal models: the last token is the one that has seen the whole text, so its
final hidden state, normed as the head reads it, is the embedding, at unit length. It goes through
the same scheduler, batch and program as everything else: alone or in a batch, it is the same.
"""

from __future__ import annotations

import base64
import math
import secrets
import time
from typing import Any, Literal

import numpy as np
from starlette.routing import Route

from octavo.core.request import SamplingParams
from octavo.errors import EngineError, InvalidRequest, Unsupported
from octavo.server.decoding import Refused, decode
from octavo.server.exchange import Job
from octavo.server.generate import Generate, Visit, caller, granted, told_tier
from octavo.server.parsing import Called
from octavo.server.protocol import Wishes, check_priority, several
from octavo.server.reply import Asked, Choice, Head, Logged, Reply
from octavo.server.service import Service

PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, embed=True)


class EmbeddingsBody(Wishes, kw_only=True):
    """POST /v1/embeddings: texts, or token ids. dimensions: the model's own, if at all."""

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    messages: Refused = None


def routes(service: Service) -> list[Route]:
    return [Route("/v1/embeddings", Generate(service, embeddings_job), methods=["POST"])]


def embeddings_job(service: Service, data: bytes, visit: Visit) -> Job:
    """The body of an embeddings request. Raises `InvalidRequest`."""
    body, ignored = decode(EmbeddingsBody, data, service.limits.strict)
    served = service.served
    service.check_model(body.model)
    check_priority(body, service.limits)
    if body.dimensions not in (None, served.hidden_size):
        what = f"dimensions must be {served.hidden_size}, those of this model"
        raise Unsupported(f"{what}, got {body.dimensions}", "dimensions")
    held = granted(service, body, visit)
    who = caller(visit.key, body, held)
    id = f"embd-{secrets.token_hex(12)}"
    requests = []
    for number, text in enumerate(several(body.input, service.config.max_inputs, "input")):
        try:
            ids = served.tokenizer.encode(text) if isinstance(text, str) else text
            made = served.door.request(
                f"{id}-{number}", ids, PARAMS, arrival=visit.arrival, caller=who
            )
        except InvalidRequest as error:
            error.rename("input")
            raise
        requests.append(made)
    head = Head(id, int(time.time()), served.name, served.system_fingerprint, tier=told_tier(held))

    def shape(asked: Asked, _: int) -> EmbeddingsShape:
        return EmbeddingsShape(asked, body.encoding_format == "base64")

    return Job(tuple(requests), Asked(head, served.tokenizer), shape, held.clamped, ignored)


class EmbeddingsShape:
    """The vectors in the order of the inputs; never a stream."""

    ping = b""

    def __init__(self, asked: Asked, packed: bool) -> None:
        self._asked = asked
        self._packed = packed

    def start(self, reply: Reply) -> bytes:
        return b""

    def open(self, choice: Choice) -> bytes:
        return b""

    def text(self, choice: Choice, text: str, logprobs: Any) -> bytes:
        return b""

    def thought(self, choice: Choice, text: str) -> bytes:
        return b""

    def call(self, choice: Choice, called: Called) -> bytes:
        return b""

    def close(self, choice: Choice) -> bytes:
        return b""

    def last(self, reply: Reply) -> bytes:
        return b""

    def failure(self, status: int, body: dict[str, Any]) -> bytes:
        return b""

    def logprobs(self, items: list[Logged]) -> None:
        return None

    def whole(self, reply: Reply) -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": choice.index, "embedding": self._vector(choice)}
            for choice in reply.choices
        ]
        tokens = reply.num_prompt_tokens
        head = self._asked.head
        tier = {} if head.tier is None else {"service_tier": head.tier}
        return tier | {
            "object": "list",
            "model": head.model,
            "data": data,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "pooling": "last token, at unit length",
        }

    def _vector(self, choice: Choice) -> str | list[float]:
        if choice.embedding is None:
            raise EngineError("the executor gave no embedding")
        state = np.frombuffer(choice.embedding, np.float32).astype(np.float64)
        length = math.sqrt(math.fsum((state * state).tolist()))
        unit = (state / max(length, 1e-12)).astype("<f4")
        return base64.b64encode(unit.tobytes()).decode() if self._packed else unit.tolist()
