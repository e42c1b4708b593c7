"""A batch's books: its input becomes rows, its rows become the files of results.

The input is read in pieces while the batch is validating; killed in the middle, it is read again
from its beginning. A batch is over when its files, its last status and the end of its rows are
written, in one transaction.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from octavo.config import ServerConfig
from octavo.core.request import shown
from octavo.server.files import DAY
from octavo.server.store import DONE, FAILED, WAITING, Batch, Row, Store, StoredFile

PIECE = 256  # lines
MOST_ERRORS = 100
BOM = b"\xef\xbb\xbf"
MOST_ID = 512
WHY = {
    "cancelled": ("batch_cancelled", "This request was not executed: the batch was cancelled."),
    "expired": (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
}


def seconds_now(clock: Callable[[], float]) -> int:
    return int(clock())


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """A line of an input file."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


_line = msgspec.json.Decoder(Line)


class Wrong(Exception):
    """What is wrong with a line, in the words of OpenAI's batch errors."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class Reader:
    """An input file, piece by piece. `errors` gathers what is wrong; `count` the lines taken."""

    def __init__(self, path: Path, endpoint: str, most: int, most_line: int) -> None:
        self._path = path
        self._endpoint = endpoint
        self._most = most
        self._most_line = most_line
        self._ids: set[str] = set()
        self.errors: list[dict[str, object]] = []
        self.count = 0

    def pieces(self) -> Iterator[list[Row]]:
        """Rows, some at a time; none any more once something is wrong."""
        rows: list[Row] = []
        with open(self._path, "rb") as handle:
            for number, line in self._lines(handle):
                try:
                    rows.append(self._row(number, line))
                except Wrong as wrong:
                    self._wrong(number, wrong)
                if len(self.errors) >= MOST_ERRORS:
                    return
                if len(rows) >= PIECE:
                    yield rows
                    rows = []
        if rows:
            yield rows
        if not self.count and not self.errors:
            self._wrong(None, Wrong("empty_file", "the file has no requests"))

    def _lines(self, handle: BinaryIO) -> Iterator[tuple[int, bytes]]:
        number = 0
        if handle.read(len(BOM)) != BOM:  # what editors of another world begin a file with
            handle.seek(0)
        while line := handle.readline(self._most_line + 1):
            number += 1
            if len(line) > self._most_line:
                text = f"a line may have at most {self._most_line} bytes"
                self._wrong(number, Wrong("line_too_long", text))
                return
            if line.strip():
                yield number, line

    def _row(self, number: int, line: bytes) -> Row:
        try:
            found = _line.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Wrong("invalid_json_line", f"not a request: {error}") from None
        except RecursionError:
            raise Wrong("invalid_json_line", "nested too deeply") from None
        if not 0 < len(found.custom_id) <= MOST_ID:
            raise Wrong("invalid_custom_id", f"1 to {MOST_ID} characters", "custom_id")
        if found.custom_id in self._ids:
            text = f"{shown(found.custom_id)} is there twice"
            raise Wrong("duplicate_custom_id", text, "custom_id")
        if found.method != "POST":
            raise Wrong("invalid_method", "method must be POST", "method")
        if found.url != self._endpoint:
            text = f"url must be the batch's endpoint {self._endpoint}"
            raise Wrong("invalid_url", text, "url")
        if bytes(found.body)[:1] != b"{":
            raise Wrong("invalid_request", "body must be an object", "body")
        if self.count >= self._most:
            raise Wrong("too_many_tasks", f"a batch may have at most {self._most} requests")
        self._ids.add(found.custom_id)
        self.count += 1
        return Row(number, found.custom_id, bytes(found.body))

    def _wrong(self, number: int | None, wrong: Wrong) -> None:
        error: dict[str, object] = {
            "code": wrong.code,
            "line": number,
            "message": str(wrong),
            "param": wrong.param,
        }
        if len(self.errors) < MOST_ERRORS:
            self.errors.append(error)


class Ledger:
    """The books of one store."""

    def __init__(
        self, store: Store, config: ServerConfig, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._config = config
        self._clock = clock

    async def validate(self, batch: Batch) -> None:
        """Read its input: it is in progress then, or failed with what is wrong."""
        store, config = self._store, self._config
        await store.run(store.clear, batch.id)
        path = store.path(batch.input)
        reader = Reader(path, batch.endpoint, config.max_batch_requests, config.max_body)
        pieces = reader.pieces()
        try:
            while (rows := await store.run(next, pieces, None)) is not None:
                if not reader.errors:
                    await store.run(store.fill, batch.id, rows)
        except FileNotFoundError:
            text = "the input file was deleted before it was read"
            reader.errors = [
                {"code": "file_not_found", "line": None, "message": text, "param": "input_file_id"}
            ]
        now, was = seconds_now(self._clock), ("validating",)
        if not reader.errors:
            values = {"status": "in_progress", "started": now, "num_total": reader.count}
            await store.run(store.change, batch.id, was, **values)
            return
        await store.run(store.clear, batch.id)
        errors = json.dumps(reader.errors)
        await store.run(store.change, batch.id, was, status="failed", failed=now, errors=errors)

    async def disown(self, batch: Batch) -> None:
        """Its key is not in the key file any more: it is cancelled, and says why."""
        text = "the API key that made this batch has been removed from the server's keys"
        errors = [{"code": "api_key_removed", "line": None, "message": text, "param": None}]
        now, was = seconds_now(self._clock), ("validating", "in_progress")
        values = {"status": "cancelling", "cancelling": now, "errors": json.dumps(errors)}
        await self._store.run(self._store.change, batch.id, was, **values)

    async def finalizing(self, batch: Batch) -> None:
        now, was = seconds_now(self._clock), ("in_progress",)
        await self._store.run(
            self._store.change, batch.id, was, status="finalizing", finalizing=now
        )

    async def conclude(self, batch: Batch, status: str) -> None:
        """Write the files of results, and that it is over."""
        await self._store.run(self._conclude, batch, status)

    def _conclude(self, batch: Batch, status: str) -> None:
        now = seconds_now(self._clock)
        made: list[tuple[StoredFile, Path] | None] = []
        try:
            made.append(self._written(batch, (DONE,), status, now))
            made.append(self._written(batch, (FAILED, WAITING), status, now))
            output, error = (None if one is None else one[0].id for one in made)
            files = [one for one in made if one is not None]
            values = {status: now, "status": status, "output": output, "error": error}
            self._store.conclude(batch.id, files, **values)
        except BaseException:  # a full disk, say: it is tried again, and must not fill it further
            for file, part in filter(None, made):
                part.unlink(missing_ok=True)
                self._store.path(file.id).unlink(missing_ok=True)
            raise

    def _written(
        self, batch: Batch, states: tuple[int, ...], status: str, now: int
    ) -> tuple[StoredFile, Path] | None:
        """A file of results; None if there are none."""
        part, size = self._store.part(), 0
        try:
            with open(part, "wb") as out:
                for row in self._store.rows(batch.id, states):
                    size += out.write(_result(batch.id, row, status) + b"\n")
        except BaseException:
            part.unlink()
            raise
        if not size:
            part.unlink()
            return None
        what = "output" if states == (DONE,) else "error"
        kept = json.loads(batch.metadata) if batch.metadata else {}
        file = StoredFile(
            id=f"file-{secrets.token_hex(12)}",
            owner=batch.owner,
            name=f"{batch.id}_{what}.jsonl",
            purpose="batch_output",
            size=size,
            created=now,
            expires=now + kept.get("age", self._config.file_days * DAY),
        )
        return file, part


def _result(batch_id: str, row: Row, status: str) -> bytes:
    """A line of results, with the answer's own bytes in it."""
    id = hashlib.sha256(f"{batch_id} {row.line}".encode()).hexdigest()[:24]
    found: dict[str, object] = {"id": f"batch_req_{id}", "custom_id": row.custom_id}
    if row.state == WAITING:
        code, message = WHY[status]
        found |= {"response": None, "error": {"code": code, "message": message}}
        return msgspec.json.encode(found)
    assert row.result is not None
    response = {
        "status_code": row.status,
        "request_id": f"req_{id}",
        "body": msgspec.Raw(row.result),
    }
    return msgspec.json.encode(found | {"response": response, "error": None})
