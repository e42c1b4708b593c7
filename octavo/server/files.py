"""/v1/files: what batches read and write. A file is its owner's alone: the API key's."""

from __future__ import annotations

import asyncio
import secrets
import time
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from octavo.config import ServerConfig
from octavo.core.request import shown
from octavo.errors import InvalidRequest, NotFound, Overloaded, TenantLimit, Unsupported
from octavo.server.auth import Key
from octavo.server.decoding import told
from octavo.server.multipart import Multipart, boundary_of
from octavo.server.problems import reply_json
from octavo.server.service import Service
from octavo.server.store import Page, Store, StoredFile

UPLOADS = 8  # at once
IDLE_SECONDS = 30.0  # an upload that sends nothing for so long has left
MOST_FIELD = 1024
MOST_NAME = 255
MOST_LISTED = 10_000
DAY = 86_400
LEAST_AGE, MOST_AGE = 3600, 30 * DAY


def routes(service: Service) -> list[Route]:
    files = Files(service.store, service.config) if service.store is not None else Nothing()
    return [
        Route("/v1/files", files.upload, methods=["POST"]),
        Route("/v1/files", files.list, methods=["GET"]),
        Route("/v1/files/{id}", files.retrieve, methods=["GET"]),
        Route("/v1/files/{id}", files.delete, methods=["DELETE"]),
        Route("/v1/files/{id}/content", files.content, methods=["GET"]),
    ]


class FileForm(msgspec.Struct):
    """The form of an upload; for the document. file is the file itself, purpose is batch."""

    file: str
    purpose: str


class Nothing:
    """The endpoints of a server that keeps nothing on disk."""

    async def _absent(self, request: Request) -> Response:
        raise HTTPException(501, "this server keeps no files: start it with --batch-dir DIRECTORY")

    upload = create = list = retrieve = delete = content = cancel = _absent


def owner_of(request: Request) -> str:
    """Whose files and batches these are: a key's, by its digest, so that names may change."""
    key: Key | None = request.scope["octavo.key"]
    return "" if key is None else key.digest.hex()


def page_of(request: Request, most: int) -> Page:
    """`limit`, `after` and `order` of a list. Raises `InvalidRequest`."""
    query = request.query_params
    limit, order = query.get("limit", "20"), query.get("order", "desc")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 9 and 1 <= int(limit) <= most):
        what = f"limit must be an integer in [1, {most}], got {shown(limit)}"
        raise InvalidRequest(what, "limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order must be asc or desc, got {shown(order)}", "order")
    return Page(int(limit), query.get("after") or None, order == "desc")


def listed(objects: list[dict[str, Any]], page: Page) -> Response:
    """A page of a list; what is one too many only says that there are more."""
    kept = objects[: page.limit]
    return reply_json(
        {
            "object": "list",
            "data": kept,
            "first_id": kept[0]["id"] if kept else None,
            "last_id": kept[-1]["id"] if kept else None,
            "has_more": len(objects) > page.limit,
        }
    )


def as_object(file: StoredFile) -> dict[str, Any]:
    """OpenAI's File object."""
    found: dict[str, Any] = {
        "id": file.id,
        "object": "file",
        "bytes": file.size,
        "created_at": file.created,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
    }
    return found if file.expires is None else found | {"expires_at": file.expires}


class Files:
    """The endpoints, over one store."""

    def __init__(self, store: Store, config: ServerConfig) -> None:
        self._store = store
        self._config = config
        self._uploads = 0

    async def upload(self, request: Request) -> Response:
        """Keep a file of requests, written to disk as it comes."""
        boundary, owner = boundary_of(request.headers.get("content-type", "")), owner_of(request)
        store, most = self._store, self._config.max_file
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > most + MOST_FIELD * 16:
            raise too_large(most)
        number, size = await store.run(store.held, owner)
        if number >= self._config.max_files or size >= self._config.max_file_storage:
            raise TenantLimit(
                f"{number} files of {size} bytes are kept for this key: delete some first", 60.0
            )
        if self._uploads >= UPLOADS:
            raise Overloaded("too many files are being sent at once", 5.0)
        self._uploads += 1
        part = store.part()
        try:
            with open(part, "wb") as out:
                form = Form(out, min(most, self._config.max_file_storage - size))
                if not await _receive(request, Multipart(boundary, form)):
                    return Response(status_code=499)
            file = form.file(owner, self._config.file_days)
            await store.run(store.add_file, file, part)
        finally:
            self._uploads -= 1
            part.unlink(missing_ok=True)
        return reply_json(as_object(file))

    async def list(self, request: Request) -> Response:
        page, purpose = page_of(request, MOST_LISTED), request.query_params.get("purpose")
        store = self._store
        found = await store.run(store.files, owner_of(request), purpose, page)
        return listed([as_object(file) for file in found], page)

    async def retrieve(self, request: Request) -> Response:
        return reply_json(as_object(await self._file(request)))

    async def content(self, request: Request) -> Response:
        file = await self._file(request)
        return FileResponse(self._store.path(file.id), media_type="application/octet-stream")

    async def delete(self, request: Request) -> Response:
        """A batch that was read already goes on without its input."""
        file = await self._file(request)
        await self._store.run(self._store.drop_file, file.id, file.owner)
        return reply_json({"id": file.id, "object": "file", "deleted": True})

    async def _file(self, request: Request) -> StoredFile:
        id = request.path_params["id"]
        found = await self._store.run(self._store.file, id, owner_of(request))
        if found is None:
            raise NotFound(f"there is no file {shown(id)}", "file_id")
        return found


async def _receive(request: Request, body: Multipart) -> bool:
    """Read the whole body; false if the client left."""
    pieces = request.stream().__aiter__()
    while True:
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                piece = await anext(pieces, None)
        except ClientDisconnect:
            return False
        except TimeoutError:
            raise HTTPException(408, f"no byte of the file for {IDLE_SECONDS:g} s") from None
        if piece is None:
            body.close()
            return True
        body.feed(piece)


def too_large(most: int) -> HTTPException:
    return HTTPException(413, f"a file may have at most {most} bytes")


class Form:
    """An upload's form: the file goes to disk, the fields are kept."""

    def __init__(self, out: BinaryIO, most: int) -> None:
        self._out = out
        self._most = most
        self._name = ""
        self.size = 0
        self.filename: str | None = None
        self.fields: dict[str, bytes] = {}

    def begin(self, name: str, filename: str | None) -> None:
        if name == "file":
            if self.filename is not None:
                raise InvalidRequest("one file at a time", "file")
            self.filename = _shown_name(filename or "upload.jsonl")
        elif name in self.fields:
            raise InvalidRequest(f"{shown(name)} is given twice", name)
        else:
            self.fields[name] = b""
        self._name = name

    def take(self, content: bytes) -> None:
        if self._name != "file":
            self.fields[self._name] += content
            if len(self.fields[self._name]) > MOST_FIELD:
                raise InvalidRequest(f"{shown(self._name)} is too long", self._name)
            return
        self.size += len(content)
        if self.size > self._most:
            raise too_large(self._most)
        self._out.write(content)

    def end(self) -> None:
        pass

    def file(self, owner: str, days: int) -> StoredFile:
        """What was uploaded. Raises `InvalidRequest`, `Unsupported`."""
        purpose = self._text("purpose")
        if self.filename is None:
            raise InvalidRequest("file is required", "file")
        if not purpose:
            raise InvalidRequest("purpose is required", "purpose")
        if purpose != "batch":
            raise Unsupported(f"purpose must be batch, got {shown(purpose)}", "purpose")
        known = {"purpose", "expires_after[anchor]", "expires_after[seconds]"}
        if unknown := set(self.fields) - known:
            name = min(unknown)
            raise Unsupported(f"unknown field {shown(name)}", name)
        now = int(time.time())
        return StoredFile(
            id=f"file-{secrets.token_hex(12)}",
            owner=owner,
            name=self.filename,
            purpose=purpose,
            size=self.size,
            created=now,
            expires=now + self._age(days),
        )

    def _age(self, days: int) -> int:
        anchor, seconds = (self._text(f"expires_after[{name}]") for name in ("anchor", "seconds"))
        if anchor is None and seconds is None:
            return days * DAY
        if anchor != "created_at":
            what = f"expires_after.anchor must be created_at, got {shown(anchor)}"
            raise InvalidRequest(what, "expires_after.anchor")
        whole = seconds is not None and seconds.isdecimal() and len(seconds) < 12
        return age(int(seconds) if seconds is not None and whole else seconds)

    def _text(self, name: str) -> str | None:
        given = self.fields.get(name)
        try:
            return None if given is None else given.decode()
        except UnicodeDecodeError:
            raise InvalidRequest(f"{name} is no UTF-8", name) from None


def age(seconds: int | str | None) -> int:
    """A file's age in seconds; what is no number is no age. Raises `InvalidRequest`."""
    if not isinstance(seconds, int) or not LEAST_AGE <= seconds <= MOST_AGE:
        what = f"must be an integer in [{LEAST_AGE}, {MOST_AGE}], got {told(seconds)}"
        raise InvalidRequest(f"expires_after.seconds {what}", "expires_after.seconds")
    return seconds


def _shown_name(name: str) -> str:
    """A file's name, to be shown and never to be opened: its last part, without control codes."""
    last = Path(name.replace("\\", "/")).name
    return "".join(c for c in last if c.isprintable())[:MOST_NAME] or "upload.jsonl"
