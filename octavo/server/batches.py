"""/v1/batches: many requests in a file, answered when there is time, in a file."""

from __future__ import annotations

import json
import re
import secrets
import time
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.core.request import shown
from octavo.errors import InvalidRequest, NotFound, TenantLimit
from octavo.server.auth import Key
from octavo.server.decoding import decode, said_ignored
from octavo.server.files import Nothing, age, listed, owner_of, page_of
from octavo.server.generate import body_of
from octavo.server.problems import reply_json
from octavo.server.service import Service
from octavo.server.shift import ENDPOINTS, Shift
from octavo.server.store import Batch, Store

MOST_OPEN = 100  # batches of one key that are not over
MOST_LISTED = 100
MOST_HOURS = 168


def routes(service: Service) -> list[Route]:
    batches: Batches | Nothing = Nothing()
    if service.store is not None:
        shift = Shift(service, service.store)
        service.lives.append(shift)
        batches = Batches(service, service.store, shift)
    return [
        Route("/v1/batches", batches.create, methods=["POST"]),
        Route("/v1/batches", batches.list, methods=["GET"]),
        Route("/v1/batches/{id}", batches.retrieve, methods=["GET"]),
        Route("/v1/batches/{id}/cancel", batches.cancel, methods=["POST"]),
    ]


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    """How old the files of results become."""

    anchor: Literal["created_at"]
    seconds: int


class BatchBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


def as_object(batch: Batch) -> dict[str, Any]:
    """OpenAI's Batch object."""
    errors = None
    if batch.errors is not None:
        errors = {"object": "list", "data": json.loads(batch.errors)}
    metadata = json.loads(batch.metadata) if batch.metadata else {}
    output, prompt = batch.output_tokens, batch.prompt_tokens
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": errors,
        "input_file_id": batch.input,
        "completion_window": batch.window,
        "status": batch.status,
        "output_file_id": batch.output,
        "error_file_id": batch.error,
        "created_at": batch.created,
        "in_progress_at": batch.started,
        "expires_at": batch.expires,
        "finalizing_at": batch.finalizing,
        "completed_at": batch.completed,
        "failed_at": batch.failed,
        "expired_at": batch.expired,
        "cancelling_at": batch.cancelling,
        "cancelled_at": batch.cancelled,
        "request_counts": {
            "total": batch.num_total,
            "completed": batch.num_done,
            "failed": batch.num_failed,
        },
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": batch.cached_tokens},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + output,
        },
        "metadata": metadata.get("said"),
    }


class Batches:
    """The endpoints, over one store; `shift` does the work."""

    def __init__(self, service: Service, store: Store, shift: Shift) -> None:
        self._service = service
        self._store = store
        self._shift = shift

    async def create(self, request: Request) -> Response:
        data = await body_of(self._service, request.scope, request.receive)
        body, ignored = decode(BatchBody, data or b"", self._service.limits.strict)
        owner = owner_of(request)
        hours = _hours(body.completion_window)
        if body.endpoint not in ENDPOINTS:
            known = ", ".join(ENDPOINTS)
            what = f"endpoint must be one of {known}, got {shown(body.endpoint)}"
            raise InvalidRequest(what, "endpoint")
        metadata = _metadata(body)
        store = self._store
        file = await store.run(store.file, body.input_file_id, owner)
        if file is None or file.purpose != "batch":
            raise NotFound(
                f"there is no file {shown(body.input_file_id)} of purpose batch", "input_file_id"
            )
        if await store.run(store.num_open, owner) >= MOST_OPEN:
            raise TenantLimit(f"{MOST_OPEN} batches of this key are not over yet", 60.0)
        key: Key | None = request.scope["octavo.key"]
        now = int(time.time())
        batch = Batch(
            id=f"batch_{secrets.token_hex(12)}",
            owner=owner,
            tenant="" if key is None else key.name,
            endpoint=body.endpoint,
            input=file.id,
            window=body.completion_window,
            metadata=metadata,
            created=now,
            expires=now + hours * 3600,
        )
        await store.run(store.add_batch, batch)
        self._shift.wake()
        heads = {name.decode(): value.decode() for name, value in said_ignored(ignored)}
        return reply_json(as_object(batch), headers=heads)

    async def list(self, request: Request) -> Response:
        page = page_of(request, MOST_LISTED)
        found = await self._store.run(self._store.batches, owner_of(request), page)
        return listed([as_object(batch) for batch in found], page)

    async def retrieve(self, request: Request) -> Response:
        return reply_json(as_object(await self._batch(request)))

    async def cancel(self, request: Request) -> Response:
        """Stop it; what is answered by then is kept. Of one that is over nothing changes."""
        batch, store = await self._batch(request), self._store
        was = ("validating", "in_progress")
        now = int(time.time())
        await store.run(store.change, batch.id, was, status="cancelling", cancelling=now)
        self._shift.wake()
        return reply_json(as_object(await self._batch(request)))

    async def _batch(self, request: Request) -> Batch:
        id = request.path_params["id"]
        found = await self._store.run(self._store.batch, id, owner_of(request))
        if found is None:
            raise NotFound(f"there is no batch {shown(id)}", "batch_id")
        return found


def _hours(window: str) -> int:
    """Hours of a completion window, such as 24h. Raises `InvalidRequest`."""
    found = re.fullmatch(r"([1-9][0-9]{0,2})h", window, re.ASCII)
    if found is None or int(found[1]) > MOST_HOURS:
        raise InvalidRequest(
            f"completion_window must be hours from 1h to {MOST_HOURS}h, such as 24h, "
            f"got {shown(window)}",
            "completion_window",
        )
    return int(found[1])


def _metadata(body: BatchBody) -> str | None:
    """What is kept beside the batch: the caller's metadata, and the age of its results."""
    said = body.metadata
    if said is not None and (
        len(said) > 16 or any(len(k) > 64 or len(v) > 512 for k, v in said.items())
    ):
        raise InvalidRequest(
            "metadata may have 16 keys of 64 characters, with texts of 512", "metadata"
        )
    kept: dict[str, Any] = {} if said is None else {"said": said}
    if body.output_expires_after is not None:
        kept["age"] = age(body.output_expires_after.seconds)
    return json.dumps(kept) if kept else None
