"""Pages of other sites: kept out, but for the origins that were named (`--cors-origin`).

A browser asks before it lets a page send what no form could (a preflight: OPTIONS), and shows a
page an answer only if its headers allow it (https://fetch.spec.whatwg.org/#http-cors-protocol).
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.types import Scope

from octavo.config import LOOPBACK
from octavo.server.headers import header

ANY = "*"
ALLOWED_HEADERS = (
    "authorization, content-type, x-api-key, anthropic-version, x-request-id, x-octavo-timeout-ms, "
    "x-slo-ttft-ms, x-slo-tpot-ms, x-slo-e2e-ms, x-slo-fallback"
)
SHOWN_HEADERS = (
    "x-request-id, server-timing, retry-after, retry-after-ms, x-ratelimit-limit-requests, "
    "x-ratelimit-limit-tokens, x-ratelimit-remaining-requests, x-ratelimit-remaining-tokens, "
    "x-ratelimit-reset-requests, x-ratelimit-reset-tokens, x-octavo-slo, x-octavo-ignored, "
    "x-octavo-predicted-ttft-ms"
)
REMEMBERED = "600"  # seconds for which a browser need not ask again


class Cors:
    """Which origins may use this server from a page."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self.origins = frozenset(origin.rstrip("/") for origin in origins)

    def named(self, origin: str) -> bool:
        return bool(origin) and (ANY in self.origins or origin in self.origins)

    def preflight(self, scope: Scope) -> Response | None:
        """The answer to a preflight of an origin that was named; it carries no key."""
        if scope["method"] != "OPTIONS" or not header(scope, b"access-control-request-method"):
            return None
        origin = header(scope, b"origin")
        if not self.named(origin):
            return None
        headers = dict(self.headers(origin)) | {
            "access-control-allow-methods": "GET, POST, DELETE, OPTIONS",
            "access-control-allow-headers": _wanted(scope),
            "access-control-max-age": REMEMBERED,
        }
        return Response(status_code=204, headers=headers)

    def headers(self, origin: str) -> list[tuple[str, str]]:
        """What an answer to a page of that origin carries. `Vary` in any case: a cache must not
        show one origin what was allowed to another."""
        if not self.origins:
            return []
        if not self.named(origin):
            return [("vary", "origin")]
        return [
            ("access-control-allow-origin", origin),
            ("access-control-expose-headers", SHOWN_HEADERS),
            ("vary", "origin"),
        ]


def _wanted(scope: Scope) -> str:
    """Ours, and those of the client's that are harmless: OpenAI's clients send x-stainless-*."""
    asked = header(scope, b"access-control-request-headers").lower().replace(" ", "").split(",")
    more = [name for name in asked if name.startswith("x-stainless-") and len(name) < 64][:32]
    return ", ".join([ALLOWED_HEADERS, *more])


def own_page(origin: str, host: str, keys: bool) -> bool:
    """A page of this server. Without keys its name must be loopback's, or a rebound name passes."""
    try:
        name = urlsplit(origin)
    except ValueError:
        return False
    return name.netloc == host and (keys or name.hostname in LOOPBACK)
