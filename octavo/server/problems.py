"""Errors in the shape of the OpenAI API: one envelope, a status, a code that is text or null."""

from __future__ import annotations

import errno
import logging
import random
import sqlite3
from math import ceil
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from octavo.errors import (
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

log = logging.getLogger("octavo")

SPREAD = 1.2  # how much later than told some are told to come back
_OURS = "server_error"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def reply_json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = msgspec.json.encode(value)
    return Response(body, status, headers, media_type="application/json")


def envelope(error: Exception) -> tuple[int, dict[str, Any]]:
    """(status, OpenAI's error object). What is not ours is logged and not shown."""
    if isinstance(error, RecursionError):  # only what strangers nest goes so deep
        error = InvalidRequest("the body is nested too deeply")
    param = getattr(error, "param", None)
    code: str | None
    if isinstance(error, UnknownModel | NotFound):
        status, kind, code = 404, "invalid_request_error", error.code
    elif isinstance(error, InvalidRequest):
        status, kind, code = 400, "invalid_request_error", error.code
    elif isinstance(error, TenantLimit):
        status, kind, code = 429, error.kind, "rate_limit_exceeded"
    elif isinstance(error, Unattainable):
        status, kind, code = (429, "tokens", error.code) if error.own else (503, _OURS, error.code)
    elif isinstance(error, Overloaded):
        status, kind, code = 503, "server_error", "server_overloaded"
    elif isinstance(error, TimedOut):
        status, kind, code = 504, _OURS, error.code
    elif isinstance(error, EngineError):
        status, kind, code = 500, "server_error", "engine_error"
    elif isinstance(error, OctavoError):
        status, kind, code = 500, "server_error", None
    elif disk_is_full(error):
        log.error("the disk of --batch-dir is full: %s", error)
        status, kind, code = 507, _OURS, "insufficient_storage"
        error = Exception("the server's disk is full: nothing was kept; try again later")
    else:
        log.error("a request failed", exc_info=error)
        status, kind, code = 500, "server_error", "internal_error"
        error = Exception("this request failed inside the server; its log says why")
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
    499: "client_left",
}


class AdminOnly(HTTPException):
    """A path that wants an admin key, and was given another."""

    code = "admin_key_needed"

    def __init__(self, path: str) -> None:
        super().__init__(403, f"{path} needs an admin key")


def word(error: Exception) -> str:
    """What went wrong, in a word for logs: never what was said."""
    if isinstance(error, HTTPException):
        return getattr(error, "code", None) or _CODES.get(error.status_code, "http_error")
    return str(getattr(error, "code", None) or type(error).__name__)


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
    return reply_json({"error": body}, status, headers)
