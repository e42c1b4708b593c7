"""Errors in the shape of the OpenAI API: one envelope, a status, a code that is text or null."""

from __future__ import annotations

import errno
import logging
import random
import sqlite3
from dataclasses import replace
from math import ceil
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from octavo.errors import (
    ContextOverflow,
    EngineError,
    InvalidRequest,
    NotFound,
    OctavoError,
    Overloaded,
    TenantLimit,
    TimedOut,
    TooTight,
    Unattainable,
    UnknownModel,
)
from octavo.server.decoding import declared
from octavo.server.traces import Refusal

log = logging.getLogger("octavo")

SPREAD = 1.2  # how much later than told some are told to come back
_OURS, _THEIRS = "server_error", "invalid_request_error"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def reply_json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = msgspec.json.encode(value)
    return Response(body, status, headers, media_type="application/json")


def kind_of(error: Exception) -> tuple[int, str, str | None]:
    """(status, type, code) of what went wrong."""
    if isinstance(error, UnknownModel | NotFound):
        return 404, _THEIRS, error.code
    if isinstance(error, InvalidRequest):
        return 400, _THEIRS, error.code
    if isinstance(error, TenantLimit):
        return 429, error.kind, "rate_limit_exceeded"
    if isinstance(error, Unattainable):
        return (429, "tokens", error.code) if error.own else (503, _OURS, error.code)
    if isinstance(error, Overloaded):
        return 503, _OURS, "server_overloaded"
    if isinstance(error, TimedOut):
        return 504, _OURS, error.code
    if isinstance(error, EngineError):
        return 500, _OURS, "engine_error"
    if isinstance(error, RecursionError):  # only what strangers nest goes so deep
        return 400, _THEIRS, InvalidRequest.code
    if isinstance(error, OctavoError):
        return 500, _OURS, None
    if disk_is_full(error):
        return 507, _OURS, "insufficient_storage"
    return 500, _OURS, "internal_error"


def envelope(error: Exception) -> tuple[int, dict[str, Any]]:
    """(status, OpenAI's error object). What is not ours is logged and not shown."""
    status, kind, code = kind_of(error)
    if isinstance(error, RecursionError):
        error = InvalidRequest("the body is nested too deeply")
    elif status == 507:
        log.error("the disk of --batch-dir is full: %s", error)
        error = Exception("the server's disk is full: nothing was kept; try again later")
    elif not isinstance(error, OctavoError):
        log.error("a request failed", exc_info=error)
        error = Exception("this request failed inside the server; its log says why")
    param = getattr(error, "param", None)
    body = {"message": str(error), "type": kind, "param": param, "code": code}
    if isinstance(error, Unattainable | TooTight):
        body |= _prediction(error)
    return status, {"error": body}


def disk_is_full(error: Exception) -> bool:
    """Whether what failed is a write that found no room."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in NO_ROOM


def _prediction(error: Unattainable | TooTight) -> dict[str, float]:
    """What was predicted, in milliseconds."""
    found = {"predicted_ttft_ms": error.ttft, "predicted_tpot_ms": error.tpot}
    if isinstance(error, Unattainable):
        found["queue_ms"] = error.queue_seconds
    return {name: round(value * 1e3, 1) for name, value in found.items() if value is not None}


def problem(error: Exception) -> Response:
    """The HTTP answer to an exception."""
    status, body = envelope(error)
    headers = {}
    if isinstance(error, Overloaded):
        wait = max(1.0, error.retry_after)
        if not (isinstance(error, Unattainable) and error.kept):
            # Spread out, or all that were refused together would come back together.
            wait *= random.uniform(1.0, SPREAD)
        headers["retry-after"] = str(ceil(wait))
        headers["retry-after-ms"] = str(ceil(wait * 1e3))
    return reply_json(body, status, headers)


_CODES = {
    403: "forbidden_origin",
    408: "body_timeout",
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    415: "content_encoding_not_supported",
    499: "client_left",
    501: "not_offered",
}


class AdminOnly(HTTPException):
    """A path that wants an admin key, and was given another."""

    code = "admin_key_needed"

    def __init__(self, path: str) -> None:
        super().__init__(403, f"{path} needs an admin key")


def word(error: Exception) -> str:
    """What went wrong, in a word for logs: the code that the client was given."""
    if isinstance(error, HTTPException):
        code = getattr(error, "code", None) or _CODES.get(error.status_code)
        return code or f"http_{error.status_code}"
    return kind_of(error)[2] or "server_error"


def refusal(error: Exception, answer: Response) -> Refusal:
    """What an operator should know of a refusal; nothing that the client wrote is in it."""
    # These speak of numbers alone; other messages may quote a value, a name, a path.
    plain = isinstance(error, Overloaded | TooTight | TimedOut | ContextOverflow)
    found = Refusal(said=str(error) if plain else "", param=declared(getattr(error, "param", None)))
    wait = answer.headers.get("retry-after-ms")
    if wait is not None:
        found = replace(found, retry=int(wait) / 1e3)
    if isinstance(error, Unattainable | TooTight):
        ahead = error.queue_seconds if isinstance(error, Unattainable) else None
        found = replace(found, ttft=error.ttft, tpot=error.tpot, ahead=ahead)
    return found


def http_problem(error: HTTPException, scope: Scope) -> Response:
    status = error.status_code
    message = error.detail
    if status == 404:
        message = (
            f"{scope['path']} is not an endpoint of this server: /docs lists them, /v1/models the "
            "models, and / is a page to chat"
        )
    if status == 405:
        message = f"{scope['path']} takes {(error.headers or {}).get('Allow')}"
    body = {
        "message": message,
        "type": "authentication_error" if status == 401 else "invalid_request_error",
        "param": None,
        "code": getattr(error, "code", None) or _CODES.get(status),
    }
    headers = dict(error.headers or {})
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if status == 501:  # OpenAI's clients send whatever is a 5xx again, twice
        headers["x-should-retry"] = "false"
    return reply_json({"error": body}, status, headers)
