"""An hour of mixed traffic in ten minutes, and what is left of it in the server.

    python bench/soak.py                         ten minutes, SmolLM2, `octavo serve` started here
    python bench/soak.py --minutes 2 --plot soak.png
    python bench/soak.py -m qwen2.5-coder-0.5b   a model whose template shows tools

Arrivals are the shipped Azure conversation sample's, over and over, --compress times as fast;
sizes are its own, divided by --scale. Each arrival is drawn to be one of: chat, completions,
responses and messages, streamed and whole, with log-probabilities, with n; a JSON schema, a regex;
tools; embeddings; tokenising; a client that leaves in mid-stream. Beside them batches run one
after the other: a file is uploaded, worked off, read and deleted.

Every two seconds the server's books are read: resident memory, KV blocks, sequences, tasks of the
event loop, sockets, descriptors, threads. The verdict: every answer is one that was asked for, the
memory of the last quarter is that of the second (medians, within --slack), and all books return to
what they were. The exit status is 1 if not. --plot needs matplotlib.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from served import Books, Running, Served
from waste import trace

from octavo import plots
from octavo.benchmark import wire

# What is kept by design (blocks, responses, traces) is little, so that it is full early on.
FLAGS = ("--kv-memory", "64MiB", "--log-level", "error", "--max-stored", "16", "--traces", "64")
EVERY = 2.0  # seconds between two looks
SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["sea", "hill"]}, "deep": {"type": "boolean"}},
    "required": ["place", "deep"],
    "additionalProperties": False,
}
TOOL = {"name": "look", "description": "Look a place up.", "parameters": SCHEMA}
WORDS = "the sea is a wide and open place where ships go from one land to another in all".split()
BATCH_LINES = 8

Make = Callable[[random.Random, str, int], tuple[str, dict[str, Any]]]


def _chat(more: Callable[[random.Random], dict[str, Any]]) -> Make:
    def make(draw: random.Random, text: str, output: int) -> tuple[str, dict[str, Any]]:
        messages = [{"role": "user", "content": text}]
        return "/v1/chat/completions", {"messages": messages, "max_tokens": output} | more(draw)

    return make


def _completion(_: random.Random, text: str, output: int) -> tuple[str, dict[str, Any]]:
    body = {"prompt": text, "max_tokens": output, "stream": True, "logprobs": 2, "echo": True}
    return "/v1/completions", body


def _responses(draw: random.Random, text: str, output: int) -> tuple[str, dict[str, Any]]:
    body = {"input": text, "max_output_tokens": output, "stream": draw.random() < 0.7}
    return "/v1/responses", body


def _messages(draw: random.Random, text: str, output: int) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": text}]
    body = {"messages": messages, "max_tokens": output, "stream": draw.random() < 0.7}
    return "/v1/messages", body


def _schema(draw: random.Random) -> dict[str, Any]:
    named = {"name": "place", "schema": SCHEMA, "strict": True}
    format = {"type": "json_schema", "json_schema": named}
    return {"response_format": format, "stream": draw.random() < 0.5}


def _pattern(draw: random.Random) -> dict[str, Any]:
    return {"structured_outputs": {"regex": f"[a-{draw.choice('efgh')}]{{1,9}}"}}


def _tools(draw: random.Random) -> dict[str, Any]:
    choice = draw.choice(("auto", "required"))
    tools = [{"type": "function", "function": TOOL}]
    return {"tools": tools, "tool_choice": choice, "stream": draw.random() < 0.5}


KINDS: dict[str, tuple[int, Make]] = {
    "chat, streamed": (30, _chat(lambda _: {"stream": True, "temperature": 0.7})),
    "chat, whole": (10, _chat(lambda _: {"stream": False})),
    "chat, n = 2, log-probabilities": (
        5,
        _chat(lambda _: {"n": 2, "logprobs": True, "top_logprobs": 3, "stream": True}),
    ),
    "completions": (10, _completion),
    "responses": (8, _responses),
    "messages": (7, _messages),
    "JSON schema": (5, _chat(_schema)),
    "regex": (3, _chat(_pattern)),
    "tools": (4, _chat(_tools)),
    "embeddings": (4, lambda _, text, __: ("/v1/embeddings", {"input": [text, text[:40]]})),
    "tokenize": (4, lambda _, text, __: ("/tokenize", {"prompt": text})),
    "leaves in mid-stream": (10, _chat(lambda _: {"stream": True, "ignore_eos": True})),
}


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    kind: str
    path: str
    body: bytes
    patience: float  # seconds after which the client leaves


def arrivals(
    model: str, seconds: float, compress: float, scale: int, seed: int
) -> Iterator[Arrival]:
    """The trace, over and over, until `seconds`."""
    draw = random.Random(f"soak {seed}")
    names, weights = [*KINDS], [weight for weight, _ in KINDS.values()]
    rows = trace()
    length = rows[-1][0]
    for turn in itertools.count():
        for at, prompt, output in rows:
            when = (at + turn * length) / compress
            if when >= seconds:
                return
            kind = draw.choices(names, weights)[0]
            text = " ".join(draw.choices(WORDS, k=max(4, prompt // scale)))
            path, body = KINDS[kind][1](draw, text, max(2, output // scale))
            leaves = kind == "leaves in mid-stream"
            if leaves:
                body["max_tokens"] = 400
            patience = draw.uniform(0.02, 2.0) if leaves else 120.0
            yield Arrival(when, kind, path, json.dumps({"model": model} | body).encode(), patience)


@dataclass(slots=True)
class Run:
    """What came of it. series: (seconds from the start, the books)."""

    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    wrong: list[str] = field(default_factory=list)
    series: list[tuple[float, Books]] = field(default_factory=list)
    batches: int = 0
    tokens: float = 0.0
    seconds: float = 0.0


class Soak:
    """One server under such traffic."""

    def __init__(self, server: Running, model: str, tools: bool) -> None:
        self.server, self.model, self.tools = server, model, tools
        self.run = Run()
        self._target = wire.Target.of(server.url)
        self._over = asyncio.Event()

    async def all(self, work: Iterator[Arrival], seconds: float) -> None:
        dial = wire.dialer(self._target)
        begun = time.monotonic()
        looking = asyncio.create_task(self._look(begun))
        batching = asyncio.create_task(self._batches())
        async with asyncio.TaskGroup() as group:
            for arrival in work:
                await asyncio.sleep(max(0.0, begun + arrival.at - time.monotonic()))
                group.create_task(self._one(dial, arrival))
            await asyncio.sleep(max(0.0, begun + seconds - time.monotonic()))
        self._over.set()
        await asyncio.gather(looking, batching)
        self.run.seconds = time.monotonic() - begun

    async def _one(self, dial: wire.Dial, arrival: Arrival) -> None:
        message = self._target.message("POST", arrival.path, arrival.body)
        one = await wire.exchange(dial, message, arrival.patience)
        leaves = arrival.kind == "leaves in mid-stream"
        try:
            answer = wire.read(one.times, one.pieces)
            said = self._judge(arrival, answer, one.fault, leaves)
        except ValueError as error:
            said = f"no HTTP: {error}"
        self.run.counts[arrival.kind][said if said in GOOD else "wrong"] += 1
        if said not in GOOD:
            self.run.wrong.append(f"{arrival.kind}: {said}, after {arrival.body[:200]!r}")

    def _judge(self, arrival: Arrival, answer: wire.Answer, fault: str | None, leaves: bool) -> str:
        text = answer.content
        if answer.status in (503, 529):
            return "refused"
        if leaves and fault is not None and b'"error"' not in text:
            return "left"
        if answer.status == 400 and arrival.kind == "tools" and not self.tools:
            return "not shown" if b"template shows no tools" in text else text[:200].decode()
        if answer.status != 200 or fault is not None or not answer.whole or b'"error":{' in text:
            return f"{answer.status} {fault} {text[-300:]!r}"
        streamed = "event-stream" in answer.headers.get("content-type", "")
        ends = (b"data: [DONE]\n\n", b"message_stop", b"response.completed", b"response.incomplete")
        if streamed and not any(end in text for end in ends):
            return f"a stream without an end: {text[-200:]!r}"
        return "served"

    async def _look(self, begun: float) -> None:
        while not self._over.is_set():
            books = await asyncio.to_thread(self.server.books)
            self.run.series.append((time.monotonic() - begun, books))
            await asyncio.sleep(EVERY)

    async def _batches(self) -> None:
        number = 0
        while not self._over.is_set():
            number += 1
            try:
                await asyncio.to_thread(self._batch, number)
                self.run.batches += 1
            except (RuntimeError, OSError, KeyError) as error:
                self.run.wrong.append(f"batch {number}: {error}")
            await asyncio.sleep(1.0)

    def _batch(self, number: int) -> None:
        """One batch, from its file to the end of its files. Raises RuntimeError."""
        chat = "/v1/chat/completions"
        lines = []
        for i in range(BATCH_LINES):
            messages = [{"role": "user", "content": f"Say {number} and {i}."}]
            body = {"model": self.model, "messages": messages, "max_tokens": 12}
            lines.append({"custom_id": f"q{i}", "method": "POST", "url": chat, "body": body})
        content = "\n".join(map(json.dumps, lines))
        part = '--b\r\ncontent-disposition: form-data; name="{}"{}\r\n\r\n{}\r\n'
        form = part.format("file", '; filename="in.jsonl"', content) + part.format(
            "purpose", "", "batch"
        )
        kind = "multipart/form-data; boundary=b"
        file = self._ask("POST", "/v1/files", (form + "--b--\r\n").encode(), kind)["id"]
        asked = {"input_file_id": file, "endpoint": chat, "completion_window": "24h"}
        id = self._ask("POST", "/v1/batches", json.dumps(asked).encode())["id"]
        end = time.monotonic() + 300
        while (batch := self._ask("GET", f"/v1/batches/{id}"))["status"] != "completed":
            if time.monotonic() > end or batch["status"] in ("failed", "expired", "cancelled"):
                raise RuntimeError(f"{batch}")
            time.sleep(0.5)
        if batch["request_counts"]["completed"] != BATCH_LINES:
            raise RuntimeError(f"{batch['request_counts']}")
        results = self.server.get(f"/v1/files/{batch['output_file_id']}/content")
        if len(results.splitlines()) != BATCH_LINES:
            raise RuntimeError(f"{len(results.splitlines())} results")
        for name in (file, batch["output_file_id"]):
            self._ask("DELETE", f"/v1/files/{name}")

    def _ask(
        self, method: str, path: str, body: bytes = b"", kind: str = "application/json"
    ) -> Any:
        connection = http.client.HTTPConnection(self.server.host, self.server.port, timeout=60)
        try:
            connection.request(method, path, body, {"content-type": kind, "connection": "close"})
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"{method} {path}: {response.status} {data[:300]!r}")
        return json.loads(data)


GOOD = ("served", "left", "refused", "not shown")


@dataclass(frozen=True)
class Verdict:
    before: Books
    after: Books
    second: float  # bytes of resident memory, medians of that quarter and of the last
    last: float
    broken: list[str]


def verdict(run: Run, before: Books, after: Books, slack: int) -> Verdict:
    quarter = max(1, len(run.series) // 4)
    rss = [books.rss for _, books in run.series]
    second = statistics.median(rss[quarter : 2 * quarter] or rss)
    last = statistics.median(rss[-quarter:])
    broken = []
    if last - second > slack:
        broken.append(f"resident memory grew by {(last - second) / 2**20:.1f} MiB")
    if run.wrong:
        broken.append(f"{len(run.wrong)} answers are not what was asked for")
    if not run.batches:
        broken.append("no batch was completed")
    was, now = asdict(before), asdict(after)
    broken += [
        f"{name}: {now[name]}, before {was[name]}"
        for name in was
        if name not in ("rss", "threads") and now[name] > was[name]
    ]
    return Verdict(before, after, second, last, broken)


def soak(server: Running, args: argparse.Namespace) -> tuple[Run, Verdict]:
    tools = b'"tools"' not in _probe(server, args.model)
    warm = Soak(server, args.model, tools)
    few = arrivals(args.model, 8.0, args.compress, args.scale, args.seed + 1)
    asyncio.run(warm.all(few, 8.0))
    before = server.settled()
    made = Soak(server, args.model, tools)
    seconds = args.minutes * 60.0
    begun = server.gauges()["octavo_generation_tokens_total"]
    work = arrivals(args.model, seconds, args.compress, args.scale, args.seed)
    asyncio.run(made.all(work, seconds))
    after = server.settled(before)
    made.run.tokens = server.gauges()["octavo_generation_tokens_total"] - begun
    return made.run, verdict(made.run, before, after, args.slack << 20)


def _probe(server: Running, model: str) -> bytes:
    """What the server says to a tool."""
    path, body = KINDS["tools"][1](random.Random(0), "x", 2)
    target = wire.Target.of(server.url)
    message = target.message("POST", path, json.dumps({"model": model} | body).encode())

    async def ask() -> bytes:
        one = await wire.exchange(wire.dialer(target), message, 60.0)
        return wire.read(one.times, one.pieces).content

    return asyncio.run(ask())


def show(run: Run, found: Verdict) -> None:
    console = Console()
    console.width = max(console.width, 100)
    made = Table(title="Requests", title_justify="left")
    for name in ("", *GOOD, "wrong"):
        made.add_column(name, justify="right" if name else "left")
    for kind in KINDS:
        row = run.counts[kind]
        made.add_row(kind, *[str(row[word] or "") for word in (*GOOD, "wrong")])
    console.print(made)
    books = Table(title="The server's books", title_justify="left")
    for name in ("", "before", "least", "median", "most", "after"):
        books.add_column(name, justify="right" if name else "left")
    for name in asdict(found.before):
        seen = [getattr(one, name) for _, one in run.series]
        row = [getattr(found.before, name), min(seen), statistics.median(seen), max(seen),
               getattr(found.after, name)]  # fmt: skip
        shown = [f"{v / 2**20:.1f} MiB" if name == "rss" else f"{v:g}" for v in row]
        books.add_row(name.replace("_", " "), *shown)
    console.print(books)
    total = sum(sum(row.values()) for row in run.counts.values())
    console.print(
        f"{total} requests and {run.batches} batches of {BATCH_LINES} in {run.seconds:.0f} s, "
        f"{run.tokens:.0f} tokens; memory of the second quarter {found.second / 2**20:.1f} MiB, "
        f"of the last {found.last / 2**20:.1f} MiB"
    )
    for what in run.wrong[:20]:
        print(what[:600])
    console.print("\n".join(f"BROKEN: {law}" for law in found.broken) or "All laws hold.")


def draw(run: Run, file: str) -> None:
    """Memory, blocks and sequences, tasks and sockets over time."""
    drawing, axes = plots.figure(3, 1, width=9.0, height=8.0)
    times = [at / 60 for at, _ in run.series]
    lines = (
        ("Resident memory, MiB", (("rss", 2**20),)),
        ("KV blocks and sequences", (("blocks_held", 1), ("running", 1), ("waiting", 1))),
        ("Tasks, sockets, threads", (("tasks", 1), ("sockets", 1), ("threads", 1))),
    )
    for axis, (title, names) in zip(axes, lines, strict=True):
        for (name, unit), colour in zip(names, plots.COLOURS, strict=False):
            values = [getattr(books, name) / unit for _, books in run.series]
            axis.plot(times, values, color=colour, linewidth=1.2, label=name.replace("_", " "))
        axis.set_title(title)
        axis.set_ylim(0, axis.get_ylim()[1] * 1.2)
        if len(names) > 1:
            axis.legend(loc="upper right", ncols=len(names))
    axes[-1].set_xlabel("minutes")
    drawing.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--compress", type=float, default=6.0, help="times as fast as the trace")
    parser.add_argument("--scale", type=int, default=60, help="sizes are divided by it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slack", type=int, default=16, help="MiB that memory may grow by")
    parser.add_argument("--url", help="a server that runs, with --batch-dir")
    parser.add_argument("--pid", type=int, help="of that server, on this machine")
    parser.add_argument("--plot", metavar="FILE.png")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.plot:
        plots.require()
    with tempfile.TemporaryDirectory(prefix="octavo-soak-") as folder:
        if args.url:
            server = Running(args.url, args.pid)
        else:
            server = Served(args.model, *FLAGS, "--batch-dir", folder)
        with server:
            print(f"{args.minutes:g} minutes at {server.url} ...", file=sys.stderr)
            run, found = soak(server, args)
    if args.plot:
        draw(run, args.plot)
    print(json.dumps({"run": asdict(run), "verdict": asdict(found)})) if args.json else show(
        run, found
    )
    sys.exit(1 if found.broken else 0)


if __name__ == "__main__":
    main()
