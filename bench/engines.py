"""An engine that can be given a workload, in its four shapes: a server, a worker process that takes
tasks by line, and llama.cpp's two benches.

Between turns an engine's processes are stopped (SIGSTOP): some never rest, and an idle engine must
not tax another's turn.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
import urllib.request
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

from client import closed_loop, free_port
from workloads import Job

Figures = dict[str, float]
WARM_TOKENS = 8


class Engine(Protocol):
    """serves: the cells it can be asked for. warm: the cell's first requests cut short, unmeasured,
    so that what compiles or grows on first use has done so. group: its process group while it
    lives from turn to turn."""

    name: str
    serves: tuple[str, ...]

    @property
    def group(self) -> int | None: ...
    def start(self) -> None: ...
    def wake(self) -> None: ...
    def warm(self, cell: str, jobs: list[Job], concurrency: int) -> None: ...
    def run(self, cell: str, jobs: list[Job], concurrency: int) -> Figures: ...
    def rest(self) -> None: ...
    def stop(self) -> None: ...


class Child:
    """A process in a session of its own, so that signals reach it and its children alone."""

    process: subprocess.Popen | None = None

    @property
    def group(self) -> int | None:
        return None if self.process is None else self.process.pid

    def wake(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    def rest(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)

    def warm(self, cell: str, jobs: list[Job], concurrency: int) -> None:
        short = [replace(job, max_tokens=min(job.max_tokens, WARM_TOKENS)) for job in jobs]
        self.run(cell, short[:concurrency], concurrency)

    def run(self, cell: str, jobs: list[Job], concurrency: int) -> Figures:
        raise NotImplementedError

    def end(self) -> None:
        """Ask the whole group to end."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
            os.killpg(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End the whole group: within three seconds, or by force."""
        if self.process is None:
            return
        self.end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(3)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class Server(Child):
    """An OpenAI-compatible server. {port} in the command is filled in."""

    name: str
    command: list[str]
    model: str = "default"
    env: dict[str, str] = field(default_factory=dict)
    ready_path: str = "/v1/models"
    serves: tuple[str, ...] = ("chat", "shared_prefix")

    def start(self) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [part.replace("{port}", str(port)) for part in self.command]
        log = Path(tempfile.gettempdir()) / f"bench-{self.name.replace(' ', '-')}-{port}.log"
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.env},
                start_new_session=True,
            )
        deadline = time.monotonic() + 300
        while True:
            try:
                urllib.request.urlopen(self.url + self.ready_path, timeout=5).read()
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{self.name} did not start; see {log}") from None
                time.sleep(0.3)

    def run(self, cell: str, jobs: list[Job], concurrency: int) -> Figures:
        figures = closed_loop(self.url, self.model, jobs, concurrency)
        if cell == "prefill":
            rate = len(jobs[0].prompt) / figures["ttft_p50"]
        else:
            rate = figures["decode_tok_s" if cell in ("single", "batch8") else "output_tok_s"]
        return figures | {"output_tok_s": rate}


@dataclass
class Worker(Child):
    """An engine in a process of its own that takes one JSON line per run and answers one."""

    name: str
    command: list[str]
    serves: tuple[str, ...]

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._answer()

    def _answer(self) -> Figures:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):
                return dict(json.loads(line[1:]))
        raise RuntimeError(f"{self.name} ended with {self.process.wait()}")

    def run(self, cell: str, jobs: list[Job], concurrency: int) -> Figures:
        assert self.process.stdin is not None
        task = {"cell": cell, "concurrency": concurrency, "jobs": [asdict(job) for job in jobs]}
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        return self._answer()


@dataclass
class LlamaTool:
    """A bench of llama.cpp's own, run anew for each turn; it loads the model and warms itself."""

    name: str
    tools: Path
    model: Path
    threads: int
    repack: bool = True
    serves: tuple[str, ...] = ()
    group: int | None = None

    def start(self) -> None:
        return

    wake = rest = stop = start

    def warm(self, cell: str, jobs: list[Job], concurrency: int) -> None:
        return

    def _lines(self, tool: str, options: list[str]) -> list[dict]:
        command = [str(self.tools / tool), "-m", str(self.model), "-t", str(self.threads), *options]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{tool} ended with {done.returncode}: {done.stderr[-300:]}")
        return [json.loads(x) for x in done.stdout.splitlines() if x.startswith("{")]


class LlamaBench(LlamaTool):
    """llama-bench: its own measure of one stream (tg) and of a prefill (pp)."""

    def run(self, cell: str, jobs: list[Job], concurrency: int) -> Figures:
        (job,) = jobs
        prompt, made = (0, job.max_tokens) if cell == "single" else (len(job.prompt), 0)
        options = ["-p", str(prompt), "-n", str(made), "-r", "1", "-o", "jsonl"]
        (line,) = self._lines("llama-bench", [*options, "--repack", str(int(self.repack))])
        return {"output_tok_s": float(line["avg_ts"])}


class LlamaBatched(LlamaTool):
    """llama-batched-bench: decoding of several sequences at once, after their prompts (tg)."""

    def batched(self, prompt: int, made: int, streams: int) -> dict[str, float]:
        """Its figures: speed_pp, speed_tg and others, tokens per second."""
        options = ["-npp", str(prompt), "-ntg", str(made), "-npl", str(streams)]
        options += ["-c", str(streams * (prompt + made) + 256), "-b", "2048", "-ub", "512"]
        options += ["--output-format", "jsonl", *([] if self.repack else ["--no-repack"])]
        return dict(self._lines("llama-batched-bench", options)[-1])

    def run(self, cell: str, jobs: list[Job], concurrency: int) -> Figures:
        line = self.batched(len(jobs[0].prompt), jobs[0].max_tokens, len(jobs))
        return {"output_tok_s": float(line["speed_tg"]), "prompt_tok_s": float(line["speed_pp"])}


def stop_all(engines: list[Engine]) -> None:
    """Tell all to end at once, then wait for each."""
    for engine in engines:
        if isinstance(engine, Child):
            engine.end()
    for engine in engines:
        engine.stop()
