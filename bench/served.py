"""A server process as a bench sees it from outside: its address, memory, threads and books.

Everything is read from `/proc` and from the server's own `/metrics` and `/load`; nothing of it runs
in this process.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

_SAMPLE = re.compile(r"^(\w+) (\S+)$", re.M)


@dataclass(frozen=True, slots=True)
class Cpu:
    """Seconds of processor time so far. loop: of the main thread, where sockets, JSON and text are;
    steps: of the busiest `compute` others, which are the engine's; rest: of what is left (log,
    door, watchdog)."""

    loop: float
    steps: float
    rest: float

    def __sub__(self, other: Cpu) -> Cpu:
        pairs = zip(asdict(self).values(), asdict(other).values(), strict=True)
        return Cpu(*(a - b for a, b in pairs))


@dataclass(frozen=True, slots=True)
class Books:
    """What must be as before once nobody is served: sequences, KV blocks, places, tasks of the
    event loop, descriptors, threads; and what must not grow: resident bytes."""

    running: int
    waiting: int
    blocks_held: int
    places: int
    tasks: int
    sockets: int
    files: int
    threads: int
    rss: int

    @property
    def idle(self) -> bool:
        return not (self.running or self.waiting or self.blocks_held or self.places)


class Running:
    """A server that somebody started. pid: of its process on this machine; None: it is elsewhere,
    and what only `/proc` knows is 0."""

    def __init__(self, url: str, pid: int | None = None) -> None:
        self.url = url
        self.pid = pid
        parts = urlsplit(url)
        self.host, self.port = str(parts.hostname), int(parts.port or 80)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def alive(self) -> bool:
        """Whether it answers; of a process of ours, whether it has not ended."""
        try:
            return b"ok" in self.get("/health")
        except OSError:
            return False

    def log(self) -> str:
        """What it said on its standard error, if that is known."""
        return ""

    @property
    def _proc(self) -> Path:
        return Path("/proc") / str(self.pid)

    def get(self, path: str, timeout: float = 20.0) -> bytes:
        """The body of a GET. Raises RuntimeError for any status but 200."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            connection.request("GET", path, headers={"connection": "close"})
            response = connection.getresponse()
            body = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"GET {path}: {response.status} {body[:200]!r}")
        return body

    def load(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.get("/load"))
        return found

    def gauges(self) -> dict[str, float]:
        """Metrics without labels, by name."""
        page = self.get("/metrics").decode()
        return {name: float(value) for name, value in _SAMPLE.findall(page)}

    def cpu(self, compute: int) -> Cpu:
        main, others = 0.0, []
        for task in (self._proc / "task").iterdir():
            seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
            if int(task.name) == self.pid:
                main = seconds
            else:
                others.append(seconds)
        others.sort(reverse=True)
        return Cpu(main, sum(others[:compute]), sum(others[compute:]))

    def rss(self) -> int:
        """Resident bytes that belong to nobody's file: heap and mapped memory."""
        if self.pid is None:
            return 0
        status = (self._proc / "status").read_text()
        return int(re.findall(r"RssAnon:\s+(\d+)", status)[0]) << 10

    def files(self) -> tuple[int, int]:
        """(sockets, other descriptors)."""
        sockets = others = 0
        if self.pid is None:
            return 0, 0
        for entry in (self._proc / "fd").iterdir():
            try:
                kind = os.readlink(entry)
            except OSError:
                continue
            sockets += kind.startswith("socket:")
            others += not kind.startswith("socket:")
        return sockets, others

    def books(self) -> Books:
        """One look at all of it."""
        load = self.load()
        sockets, files = self.files()
        threads = len(list((self._proc / "task").iterdir())) if self.pid is not None else 0
        return Books(
            load["sequences_running"],
            load["sequences_waiting"],
            load["kv_blocks_held"],
            load["requests"],
            int(self.gauges()["octavo_event_loop_tasks"]),
            sockets,
            files,
            threads,
            self.rss(),
        )

    def settled(self, wanted: Books | None = None, seconds: float = 30.0) -> Books:
        """The books once the house is empty and, if `wanted` is given, has no more sockets than
        that; after `seconds` as they are then."""
        end = time.monotonic() + seconds
        while True:
            books = self.books()
            fine = books.idle and (wanted is None or books.sockets <= wanted.sockets)
            if fine or time.monotonic() > end:
                return books
            time.sleep(0.05)


class Served(Running):
    """`octavo serve` as a process of ours. Use as a context: it is terminated at the end."""

    def __init__(self, model: str, *flags: str) -> None:
        words = [sys.executable, "-m", "octavo.cli", "serve", "--port", "0", "-m", model]
        self._log = tempfile.NamedTemporaryFile("w+", prefix="octavo-bench-", suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*words, *flags], stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        super().__init__(self._said(), self.process.pid)

    def _said(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = re.search(r"http://[\d.]+:\d+", line)
            if found:
                return found[0]
        raise RuntimeError(f"the server did not start:\n{self.log()[-2000:]}")

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def log(self) -> str:
        """What it said on its standard error."""
        return Path(self._log.name).read_text(errors="replace")
