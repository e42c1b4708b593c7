"""Reading request headers off an ASGI scope."""

from __future__ import annotations

from starlette.types import Scope


def header(scope: Scope, name: bytes) -> str:
    """The first header of that (lower-case) name, or ""."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")
