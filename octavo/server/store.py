"""What the server keeps on disk: files, batches, and a row for every request of a batch.

One folder: `octavo.db` (SQLite, write-ahead log) and `files/`, a file of bytes for each file id. A
request's result and its state change in one transaction, and a file's row is written after its
bytes are, so a process that is killed at any moment loses no result and repeats none. All calls
are made in one thread, `Store.run` from the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from octavo.errors import InvalidRequest, in_words

P = ParamSpec("P")
T = TypeVar("T")

WAITING, DONE, FAILED = 0, 1, 2  # states of a request
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
VERSION = 1

_TABLES = """
CREATE TABLE IF NOT EXISTS files (
  id TEXT PRIMARY KEY, owner TEXT NOT NULL, name TEXT NOT NULL, purpose TEXT NOT NULL,
  size INTEGER NOT NULL, created INTEGER NOT NULL, expires INTEGER
) STRICT;
CREATE INDEX IF NOT EXISTS files_of ON files (owner, created, id);
CREATE TABLE IF NOT EXISTS batches (
  id TEXT PRIMARY KEY, owner TEXT NOT NULL, tenant TEXT NOT NULL, endpoint TEXT NOT NULL,
  input TEXT NOT NULL, window TEXT NOT NULL, metadata TEXT, created INTEGER NOT NULL,
  expires INTEGER NOT NULL, status TEXT NOT NULL, errors TEXT, output TEXT, error TEXT,
  started INTEGER, finalizing INTEGER, completed INTEGER, failed INTEGER, expired INTEGER,
  cancelling INTEGER, cancelled INTEGER,
  num_total INTEGER NOT NULL, num_done INTEGER NOT NULL, num_failed INTEGER NOT NULL,
  prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS batches_of ON batches (owner, created, id);
CREATE TABLE IF NOT EXISTS requests (
  batch TEXT NOT NULL, line INTEGER NOT NULL, custom_id TEXT NOT NULL, body BLOB NOT NULL,
  state INTEGER NOT NULL, status INTEGER, result BLOB,
  PRIMARY KEY (batch, line), UNIQUE (batch, custom_id)
) STRICT;
CREATE INDEX IF NOT EXISTS requests_by_state ON requests (batch, state, line);
"""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file. Times are Unix seconds; expires None: never."""

    id: str
    owner: str
    name: str
    purpose: str
    size: int
    created: int
    expires: int | None


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch, in the words of OpenAI's object; times are Unix seconds, None until then."""

    id: str
    owner: str
    tenant: str
    endpoint: str
    input: str
    window: str
    metadata: str | None
    created: int
    expires: int
    status: str = "validating"
    errors: str | None = None
    output: str | None = None
    error: str | None = None
    started: int | None = None
    finalizing: int | None = None
    completed: int | None = None
    failed: int | None = None
    expired: int | None = None
    cancelling: int | None = None
    cancelled: int | None = None
    num_total: int = 0
    num_done: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """A request of a batch. line: its number in the input file, from 1."""

    line: int
    custom_id: str
    body: bytes
    state: int = WAITING
    status: int | None = None
    result: bytes | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """What a list asks for: so many, those after an id, oldest or newest first."""

    limit: int = 20
    after: str | None = None
    newest: bool = True


@dataclass(frozen=True, slots=True)
class Settled:
    """What came of a request: its HTTP status, its answer as JSON, and the tokens it took."""

    status: int
    result: bytes
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def state(self) -> int:
        return DONE if self.status == 200 else FAILED


def _columns(cls: type[Any]) -> str:
    return ", ".join(field.name for field in fields(cls))


class Store:
    """One folder, used by one server at a time. Raises `InvalidRequest` if it cannot be had."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.bytes = self.folder / "files"
        try:
            self.bytes.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = open(self.folder / "lock", "w")  # noqa: SIM115
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            text = f"--batch-dir {folder} is used by another server"
            raise InvalidRequest(text, "batch_dir") from None
        except OSError as error:
            text = f"--batch-dir {folder} cannot be used: {in_words(error)}"
            raise InvalidRequest(text, "batch_dir") from None
        try:
            self._db = self._open()
        except sqlite3.DatabaseError as error:
            self._lock.close()
            raise InvalidRequest(f"{folder}/octavo.db: {error}", "batch_dir") from None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="octavo-store")
        self._closed = False
        self._tidy()

    def _open(self) -> sqlite3.Connection:
        path = self.folder / "octavo.db"
        path.touch(mode=0o600)
        db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        db.execute("PRAGMA journal_mode = WAL")
        # A result that a power cut takes is computed again; a killed process takes none.
        db.execute("PRAGMA synchronous = NORMAL")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, VERSION):
            raise sqlite3.DatabaseError(f"made by another version ({version})")
        db.executescript(_TABLES)
        db.execute(f"PRAGMA user_version = {VERSION}")
        return db

    async def run(self, call: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
        """A call of this store, in its thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: call(*args, **more))

    def close(self) -> None:
        """Idempotent; waits for the running call."""
        if not self._closed:
            self._closed = True
            self._thread.shutdown(wait=True)
            self._db.close()
            self._lock.close()

    @contextlib.contextmanager
    def _all(self) -> Iterator[sqlite3.Connection]:
        """One transaction."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
            self._db.execute("COMMIT")  # where a full disk may show
        except BaseException:
            if self._db.in_transaction:  # some errors roll back by themselves
                self._db.execute("ROLLBACK")
            raise

    def _tidy(self) -> None:
        """Bytes without a row are of uploads and results that were never finished."""
        known = {row[0] for row in self._db.execute("SELECT id FROM files")}
        for path in self.bytes.iterdir():
            if path.name not in known:
                path.unlink(missing_ok=True)

    # ---- files ----

    def path(self, file_id: str) -> Path:
        """Where its bytes are; ids are ours, never a client's text."""
        return self.bytes / file_id

    def part(self) -> Path:
        """Where bytes go that are still coming."""
        return self.bytes / f"part-{secrets.token_hex(12)}"

    def add_file(self, file: StoredFile, part: Path) -> None:
        """The bytes of `part` become those of `file`."""
        with open(part, "rb") as handle:
            os.fsync(handle.fileno())
        part.rename(self.path(file.id))
        try:
            with self._all() as db:
                _insert(db, "files", file)
        except BaseException:
            self.path(file.id).unlink()
            raise

    def file(self, file_id: str, owner: str) -> StoredFile | None:
        found = self._db.execute(
            f"SELECT {_columns(StoredFile)} FROM files WHERE id = ? AND owner = ?",
            (file_id, owner),
        ).fetchone()
        return None if found is None else StoredFile(*found)

    def files(self, owner: str, purpose: str | None, page: Page) -> list[StoredFile]:
        """One more than the page holds, if there are more."""
        more = ("AND purpose = ?", (purpose,)) if purpose is not None else ("", ())
        return [StoredFile(*row) for row in self._list("files", StoredFile, owner, page, more)]

    def drop_file(self, file_id: str, owner: str) -> bool:
        """Whether it was there."""
        with self._all() as db:
            gone = db.execute("DELETE FROM files WHERE id = ? AND owner = ?", (file_id, owner))
        if gone.rowcount:
            self.path(file_id).unlink(missing_ok=True)
        return bool(gone.rowcount)

    def held(self, owner: str) -> tuple[int, int]:
        """(number, bytes) of an owner's files."""
        query = "SELECT count(*), coalesce(sum(size), 0) FROM files WHERE owner = ?"
        number, size = self._db.execute(query, (owner,)).fetchone()
        return number, size

    def expire_files(self, now: int) -> None:
        """Files past their age go, but for inputs that a batch has not read yet."""
        old = self._db.execute(
            "SELECT id, owner FROM files WHERE expires <= ? AND id NOT IN "
            "(SELECT input FROM batches WHERE status = 'validating')",
            (now,),
        ).fetchall()
        for file_id, owner in old:
            self.drop_file(file_id, owner)

    def _list(
        self, table: str, cls: type[Any], owner: str, page: Page, more: tuple[str, tuple[Any, ...]]
    ) -> list[Any]:
        query, values = f"SELECT {_columns(cls)} FROM {table} WHERE owner = ? {more[0]}", [owner]
        values += more[1]
        if page.after is not None:
            sign = "<" if page.newest else ">"
            query += f" AND (created, id) {sign} (SELECT created, id FROM {table} WHERE id = ?)"
            values.append(page.after)
        order = "DESC" if page.newest else "ASC"
        query += f" ORDER BY created {order}, id {order} LIMIT ?"
        return self._db.execute(query, (*values, page.limit + 1)).fetchall()

    # ---- batches ----

    def add_batch(self, batch: Batch) -> None:
        with self._all() as db:
            _insert(db, "batches", batch)

    def batch(self, batch_id: str, owner: str) -> Batch | None:
        found = self._db.execute(
            f"SELECT {_columns(Batch)} FROM batches WHERE id = ? AND owner = ?", (batch_id, owner)
        ).fetchone()
        return None if found is None else Batch(*found)

    def batches(self, owner: str, page: Page) -> list[Batch]:
        """One more than the page holds, if there are more."""
        return [Batch(*row) for row in self._list("batches", Batch, owner, page, ("", ()))]

    def open_batches(self) -> list[Batch]:
        """Those of all owners that are not over, oldest first."""
        marks = ", ".join("?" * len(OPEN))
        query = f"SELECT {_columns(Batch)} FROM batches WHERE status IN ({marks})"
        return [Batch(*row) for row in self._db.execute(query + " ORDER BY created, id", OPEN)]

    def num_open(self, owner: str) -> int:
        marks = ", ".join("?" * len(OPEN))
        query = f"SELECT count(*) FROM batches WHERE owner = ? AND status IN ({marks})"
        count: int = self._db.execute(query, (owner, *OPEN)).fetchone()[0]
        return count

    def change(self, batch_id: str, was: Sequence[str], **values: Any) -> bool:
        """Set columns of a batch if its status is one of `was`; whether it was."""
        names = ", ".join(f"{name} = ?" for name in values)
        marks = ", ".join("?" * len(was))
        with self._all() as db:
            done = db.execute(
                f"UPDATE batches SET {names} WHERE id = ? AND status IN ({marks})",
                (*values.values(), batch_id, *was),
            )
        return bool(done.rowcount)

    # ---- requests ----

    def clear(self, batch_id: str) -> None:
        """Forget what was read of its input: it will be read again."""
        with self._all() as db:
            db.execute("DELETE FROM requests WHERE batch = ?", (batch_id,))

    def fill(self, batch_id: str, rows: Sequence[Row]) -> None:
        """Add requests, while the batch is validating."""
        with self._all() as db:
            db.executemany(
                "INSERT INTO requests (batch, line, custom_id, body, state) VALUES (?, ?, ?, ?, ?)",
                [(batch_id, row.line, row.custom_id, row.body, WAITING) for row in rows],
            )

    def waiting(self, batch_id: str, after: int, limit: int) -> list[Row]:
        """Requests without a result, in order, beyond that line."""
        return [
            Row(*found)
            for found in self._db.execute(
                f"SELECT {_columns(Row)} FROM requests WHERE batch = ? AND state = ? AND line > ? "
                "ORDER BY line LIMIT ?",
                (batch_id, WAITING, after, limit),
            )
        ]

    def num_waiting(self) -> int:
        query = "SELECT coalesce(sum(num_total - num_done - num_failed), 0) FROM batches WHERE "
        count: int = self._db.execute(query + "status = 'in_progress'").fetchone()[0]
        return count

    def settle(self, batch_id: str, line: int, came: Settled) -> bool:
        """Keep a request's result; False if it has one already or its batch is over."""
        counter = "num_done" if came.state == DONE else "num_failed"
        with self._all() as db:
            done = db.execute(
                "UPDATE requests SET state = ?, status = ?, result = ? "
                "WHERE batch = ? AND line = ? AND state = ?",
                (came.state, came.status, came.result, batch_id, line, WAITING),
            )
            if done.rowcount:
                db.execute(
                    f"UPDATE batches SET {counter} = {counter} + 1, "
                    "prompt_tokens = prompt_tokens + ?, cached_tokens = cached_tokens + ?, "
                    "output_tokens = output_tokens + ? WHERE id = ?",
                    (came.prompt_tokens, came.cached_tokens, came.output_tokens, batch_id),
                )
        return bool(done.rowcount)

    def rows(self, batch_id: str, states: Sequence[int]) -> Iterator[Row]:
        """Requests in those states, in order."""
        marks = ", ".join("?" * len(states))
        query = f"SELECT {_columns(Row)} FROM requests WHERE batch = ? AND state IN ({marks})"
        for found in self._db.execute(query + " ORDER BY line", (batch_id, *states)):
            yield Row(*found)

    def conclude(
        self, batch_id: str, made: Sequence[tuple[StoredFile, Path]], **values: Any
    ) -> None:
        """A batch is over: its files, its last status, and its requests gone, all or nothing."""
        for file, part in made:
            with open(part, "rb") as handle:
                os.fsync(handle.fileno())
            part.rename(self.path(file.id))
        names = ", ".join(f"{name} = ?" for name in values)
        with self._all() as db:
            for file, _ in made:
                _insert(db, "files", file)
            db.execute(f"UPDATE batches SET {names} WHERE id = ?", (*values.values(), batch_id))
            db.execute("DELETE FROM requests WHERE batch = ?", (batch_id,))


def _insert(db: sqlite3.Connection, table: str, value: StoredFile | Batch) -> None:
    marks = ", ".join("?" * len(fields(value)))
    db.execute(f"INSERT INTO {table} ({_columns(type(value))}) VALUES ({marks})", astuple(value))
