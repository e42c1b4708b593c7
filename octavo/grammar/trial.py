"""Tries grammars in a process of its own, and kills it when one takes too long.

No bound inside a compiler holds for every input: a JSON schema of forty characters ("multipleOf":
999983) took llguidance eight seconds and 350 MB, its limits notwithstanding.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from octavo.errors import EngineError, InvalidRequest

WORKER = Path(__file__).with_name("worker.py")
SECONDS = 2.0
START_SECONDS = 30.0


class TooSlow(InvalidRequest):
    """It took too long this time, perhaps for others' sake: it may be asked for again."""


class Trial:
    """One worker process, started at first use and again after it ended. Safe to share."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def grammar(self, kind: str, text: str, strict: bool = True) -> str:
        """llguidance's form of a grammar that compiles. Raises `InvalidRequest` for one that does
        not, or not in time; `EngineError` if there is no process to be had."""
        line = json.dumps({"kind": kind, "text": text, "strict": strict}).encode() + b"\n"
        with self._lock:
            reply = self._ask(line) or self._ask(line)  # an idle one may end as it is asked
        if reply is None:
            raise InvalidRequest("it needs more memory to compile than a grammar may")
        if "error" in reply:
            raise InvalidRequest(" ".join(str(reply["error"]).split())[:300])
        return str(reply["grammar"])

    def close(self) -> None:
        """End the process; the next call starts another."""
        with self._lock:
            self._end()

    def _ask(self, line: bytes) -> dict[str, Any] | None:
        """Its answer, or None if it ended without one."""
        process = self._running()
        assert process.stdin is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except OSError:
            self._end()
            return None
        try:
            return self._read(process, self.seconds)
        except TimeoutError:
            self._end()
            raise TooSlow(f"it takes over {self.seconds:g} s to compile") from None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
            )
            self._process = process
            if self._read(process, START_SECONDS) != {"ready": True}:
                raise EngineError("the grammar compiler did not start; is llguidance installed?")
        except (OSError, TimeoutError) as error:
            self._end()
            raise EngineError(f"the grammar compiler did not start: {error}") from error
        return process

    def _read(self, process: subprocess.Popen[bytes], seconds: float) -> dict[str, Any] | None:
        """The next line, or None at the end. Raises TimeoutError."""
        assert process.stdout is not None
        end, got = time.monotonic() + seconds, bytearray()
        waiting = select.poll()  # `select.select` takes no descriptor above 1023
        waiting.register(process.stdout, select.POLLIN)
        while not got.endswith(b"\n"):
            if not waiting.poll(max(0.0, end - time.monotonic()) * 1e3):
                raise TimeoutError
            part = process.stdout.read(1 << 16)
            if not part:
                self._end()
                return None
            got += part
        reply: dict[str, Any] = json.loads(got)
        return reply

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
