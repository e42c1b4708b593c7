"""The page at `/`, as `make web` built it into the package: a few files, read once.

What is in the folder is all that there is to ask for: no path of a stranger's meets the disk. The
page loads nothing from elsewhere and the browser is told to see to that.
"""

from __future__ import annotations

import hashlib
import mimetypes
from dataclasses import dataclass
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.server.service import Service

ASSETS = "/assets/"
ICON = "/favicon.ico"  # what browsers ask for where a page names no icon: there is none
FOLDER = Path(__file__).resolve().parent.parent / "web"
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_FOREVER = "public, max-age=31536000, immutable"  # the name has the content's hash in it

MISSING = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Octavo</title>
<h1>Octavo is serving; its page was not built</h1>
<p>The API is here all the same: <a href="/v1/models">/v1/models</a>.</p>
<p>To get the page: install Node 20.19 or newer, run <code>make web</code> in the source
tree, and start the server again. Wheels that were built where Node is at hand have it.</p>
</html>
"""


@dataclass(frozen=True, slots=True)
class File:
    """A file of the page; zipped: the same by gzip, if that was built."""

    media_type: str
    plain: bytes
    zipped: bytes | None
    etag: str


HOW = "not built: make web, with Node 20.19 or newer"


def built() -> bool:
    """Whether there is a page."""
    return (FOLDER / "index.html").is_file()


class Page:
    """The files by path: `/` and those under `/assets/`."""

    def __init__(self, files: dict[str, File]) -> None:
        self._files = files

    @classmethod
    def read(cls, folder: Path) -> Page:
        """What is in the folder; nothing if it was not built."""
        if not (folder / "index.html").is_file():
            return cls({})
        paths = [folder / "index.html", *sorted((folder / "assets").glob("*"))]
        files = {
            "/" if path.name == "index.html" else ASSETS + path.name: _file(path)
            for path in paths
            if path.is_file() and path.suffix != ".gz"
        }
        return cls(files)

    async def index(self, request: Request) -> Response:
        if not self._files:
            return Response(MISSING, 404, _HEADERS, media_type="text/html; charset=utf-8")
        return _answer(request, self._files["/"], "no-cache")

    async def asset(self, request: Request) -> Response:
        found = self._files.get(request.url.path)
        if found is None:
            raise HTTPException(404)
        return _answer(request, found, _FOREVER)


def routes(service: Service) -> list[Route]:  # noqa: ARG001
    page = Page.read(FOLDER)
    return [
        Route("/", page.index, methods=["GET"]),
        Route(ASSETS + "{name}", page.asset, methods=["GET"]),
        Route(ICON, _no_icon, methods=["GET"]),
    ]


async def _no_icon(request: Request) -> Response:  # noqa: ARG001
    return Response(None, 204, {"cache-control": "public, max-age=86400"})


def _file(path: Path) -> File:
    data = path.read_bytes()
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    if kind.startswith("text/") or kind.endswith("javascript"):
        kind += "; charset=utf-8"
    packed = path.with_name(path.name + ".gz")
    zipped = packed.read_bytes() if packed.is_file() else None
    return File(kind, data, zipped, f'"{hashlib.sha256(data).hexdigest()[:20]}"')


def _answer(request: Request, file: File, caching: str) -> Response:
    headers = _HEADERS | {"cache-control": caching, "etag": file.etag, "vary": "accept-encoding"}
    if request.headers.get("if-none-match") == file.etag:
        return Response(None, 304, headers)
    accepted = request.headers.get("accept-encoding", "")
    if file.zipped is not None and "gzip" in accepted:
        headers["content-encoding"] = "gzip"
        return Response(file.zipped, 200, headers, media_type=file.media_type)
    return Response(file.plain, 200, headers, media_type=file.media_type)
