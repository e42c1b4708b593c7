"""The file of --step-log: the latest steps' shapes and times, written when the server ends.

They are kept in memory until then, so a disk that has no room would be known only when nobody can
help it any more. So room is looked for from the start; where it lacks, the log says so, once, and
the server goes on.
"""

from __future__ import annotations

import asyncio
import logging
import os
from itertools import count
from pathlib import Path

from octavo.config import holds_something, show_bytes
from octavo.core.steptime import LOG, StepModel
from octavo.errors import in_words

EVERY = 10.0  # seconds between two looks
MOST = 256 * LOG  # bytes: a line has fewer

log = logging.getLogger("octavo")


class StepLog:
    """Of one server, in its event loop; `write` at the end."""

    def __init__(self, path: str, model: StepModel) -> None:
        self._path = Path(path)
        self._model = model
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def wake(self) -> None:
        """Keys are no concern of it."""

    async def _watch(self) -> None:
        while not self._warned():
            await asyncio.sleep(EVERY)

    def _warned(self) -> bool:
        """Whether it was said that there is no room."""
        free = self._free()
        if free is None or free >= MOST:
            return False
        log.warning(
            "%s: %s are free on that disk, and the step log may need %s: it may be lost",
            self._path,
            show_bytes(free),
            show_bytes(MOST),
        )
        return True

    def _free(self) -> int | None:
        """Bytes that the file may have, with those it has; None where nobody can tell."""
        try:
            if self._path.exists() and not self._path.is_file():
                return None  # a pipe, a terminal
            disk = os.statvfs(self._path.parent)
            own = self._path.stat().st_size if self._path.exists() else 0
        except OSError:
            return None
        return disk.f_bavail * disk.f_frsize + own

    def write(self) -> None:
        """The steps so far, as lines of JSON. A disk without room keeps nobody from stopping, and
        what another server has written there meanwhile stays."""
        path = self._path
        for number in count(1):
            if not holds_something(path):
                break
            path = self._path.with_name(f"{self._path.name}.{number}")
        if path != self._path:
            log.warning("%s has another's steps: these are in %s", self._path, path)
        try:
            path.write_text("".join(line + "\n" for line in self._model.log()))
        except OSError as error:
            log.error("%s: the step log is lost: %s", path, in_words(error))
