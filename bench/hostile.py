"""Ten thousand hostile requests at a server that goes on serving others.

    python bench/hostile.py                          starts `octavo serve` with SmolLM2; minutes
    python bench/hostile.py --count 1000 --seed 7    fewer; other ones
    python bench/hostile.py --url http://127.0.0.1:8000 --pid 4711

What is sent is in `hostile_cases.py`, the same bytes for a seed: every field of every endpoint with
values that are wrong, bodies cut everywhere, lengths and chunks that lie, heads that are none,
uploads, megabytes, clients that leave at every moment or read nothing, --at-once of them in turn;
beside it --idle connections that only stand there, silent, half a head in, or after an answer.
All the while control streams ask the same greedy questions with log-probabilities.

Laws, each of which is checked; the exit status is 1 if one is broken:

    the process lives, and answers afterwards what it answered before
    every control answer is bit for bit what it was before: text, tokens, log-probabilities
    no answer is a fault of the server's own: no 500, no broken HTTP, no stream that ends in one
    every well-formed request is answered, and every refusal is an error in the API's shape
    resident memory stays as it was after the first fifth, within --slack; threads too, but for
    those that a pool has not started yet
    sequences, KV blocks, places, tasks, sockets and descriptors return to the baseline
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import resource
import socket
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hostile_cases import MODEL, RESET, Case, cases, message
from rich.console import Console
from rich.table import Table
from served import Books, Running, Served

from octavo.benchmark import wire

# What is kept by design (blocks, responses, traces) is little, so that it is full early on.
FLAGS = ("--kv-memory", "64MiB", "--log-level", "error", "--max-stored", "16", "--traces", "64")
CONTROLS = (
    {"prompt": "The sea is", "max_tokens": 24, "logprobs": 3, "stream": True},
    {"prompt": "Once upon a time", "max_tokens": 40, "logprobs": 1, "stream": True},
    {"prompt": "def add(a, b):\n", "max_tokens": 16, "logprobs": 5, "stream": False},
    {"prompt": "1, 2, 3, 4, 5, 6, 7, 8,", "max_tokens": 32, "logprobs": 0, "stream": True},
)
PATIENCE = 30.0  # seconds after which a well-formed request counts as not answered
MARKS = 5
POOLED = 4  # threads that pools may still start
SHOWN = 20
OUR_FAULTS = (b'"internal_error"', b'"engine_error"', b"Internal Server Error")
MAY_FAIL = (501, 503, 504, 529)  # not offered, too busy, took too long, /v1/messages' too busy
SHAPED = (b'"error":', b'"status":')


@dataclass(slots=True)
class Came:
    """What came back. status 0: nothing; fault: why it is no answer that HTTP knows."""

    status: int = 0
    head: bytes = b""
    body: bytes = b""
    fault: str | None = None
    late: bool = False


@dataclass(slots=True)
class Tally:
    """By kind of request, how often each status came (0: closed without a word, -1: nobody
    waited for it), and what breaks a law."""

    statuses: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    faults: list[str] = field(default_factory=list)
    unshaped: list[str] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    controls: int = 0
    refused: int = 0
    changed: list[str] = field(default_factory=list)
    reopened: int = 0

    def take(self, number: int, case: Case, came: Came) -> None:
        gone = case.reads is not None and not came.status
        self.statuses[case.kind][-1 if gone else came.status] += 1
        sent = b"".join(piece for piece in case.sends if isinstance(piece, bytes))
        what = f"#{number} {case.kind}: {came.status} {came.body[:200]!r} after {sent[:400]!r}"
        if any(fault in came.body for fault in OUR_FAULTS) or (
            came.status >= 500 and came.status not in MAY_FAIL
        ):
            self.faults.append(what)
        elif came.fault is not None:
            self.faults.append(f"{came.fault}: {what} {came.head[:200]!r}")
        elif came.status >= 400 and case.reads is None and not _shaped(case, came):
            self.unshaped.append(what)
        if case.whole and (came.late or not came.status):
            self.unanswered.append(what)


def _shaped(case: Case, came: Came) -> bool:
    first = case.sends[0] if case.sends else b""
    bare = isinstance(first, bytes) and first.startswith(b"HEAD ")
    return bare or any(word in came.body for word in SHAPED)


async def play(host: str, port: int, case: Case) -> Came:
    """One client, from its first byte to its leaving."""
    made = socket.socket()
    made.setblocking(False)
    loop = asyncio.get_running_loop()
    if case.slow:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    if case.rudely:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    try:
        await loop.sock_connect(made, (host, port))
        reading = asyncio.create_task(_read(made, case))
        try:
            for piece in case.sends:
                if isinstance(piece, float):
                    await asyncio.sleep(piece)
                    continue
                with contextlib.suppress(OSError):  # it may refuse before it has all of it
                    await asyncio.wait_for(loop.sock_sendall(made, piece), PATIENCE)
            if case.whole or case.reads is not None:
                return await reading
            # Half a request: whoever goes on waiting for it is told that no more comes.
            with contextlib.suppress(OSError):
                made.shutdown(socket.SHUT_WR)
            return await reading
        finally:
            reading.cancel()
    except OSError as error:
        return Came(fault=f"no connection ({error})")
    finally:
        made.close()


async def _read(made: socket.socket, case: Case) -> Came:
    loop = asyncio.get_running_loop()
    if case.reads == 0:
        await asyncio.sleep(0)
        return Came()
    await asyncio.sleep(case.slow)
    got = bytearray()
    late = False
    try:
        async with asyncio.timeout(PATIENCE):
            while case.reads is None or len(got) < case.reads:
                part = await loop.sock_recv(made, 65536)
                if not part:
                    break
                got += part
    except OSError:
        pass
    except TimeoutError:
        late = True
    # Half a request may break off its answer: it was told that no more comes.
    return _answer(bytes(got), late, cut=case.reads is not None or not case.whole)


def _answer(got: bytes, late: bool, cut: bool) -> Came:
    if not got:
        return Came(late=late)
    try:
        answer = wire.read([0.0], [got])
    except ValueError as error:
        return Came(1, got[:300], b"", f"no HTTP ({error})", late)
    head = got.partition(b"\r\n\r\n")[0]
    if answer.status == 100:
        return _answer(got.partition(b"\r\n\r\n")[2], late, cut)
    broken = not (answer.whole or cut or late or b"connection: close" not in head.lower())
    bare = b" 204 " in head[:20] or b" 304 " in head[:20] or not answer.content
    fault = "the answer broke off" if broken and not bare else None
    return Came(answer.status, head, answer.content, fault, late)


class Control:
    """One of the others: asks the same again and again, and compares."""

    def __init__(self, server: Running, asked: dict[str, Any]) -> None:
        self.server = server
        self.asked = {"model": MODEL, "temperature": 0, "ignore_eos": True} | asked
        body = json.dumps(self.asked).encode()
        self.message = message("POST", "/v1/completions", body).replace(
            b"x-octavo-timeout-ms: 4000\r\n", b""
        )
        self.reference: str | None = None

    async def once(self) -> tuple[int, str]:
        """(status, all that must be equal)."""
        dial = wire.dialer(wire.Target.of(self.server.url))
        one = await wire.exchange(dial, self.message, 300.0)
        answer = wire.read(one.times, one.pieces)
        if answer.status != 200 or one.fault is not None or not answer.whole:
            return answer.status, f"{one.fault} {answer.content[:300]!r}"
        return 200, "\n".join(map(json.dumps, _choices(answer)))

    async def watch(self, tally: Tally, over: asyncio.Event) -> None:
        while not over.is_set():
            status, said = await self.once()
            if status == 503:
                tally.refused += 1
                await asyncio.sleep(0.5)
                continue
            tally.controls += 1
            if said != self.reference:
                tally.changed.append(f"{self.asked['prompt']!r}: {status} {said[:300]}")


def _choices(answer: wire.Answer) -> Iterator[Any]:
    """What the answer says, joined: text, tokens, log-probabilities, alternatives, finish."""
    if answer.headers.get("content-type", "").startswith("application/json"):
        messages = [json.loads(answer.content)]
    else:
        found = [data for _, data in wire.events(answer.body)]
        messages = [json.loads(data) for data in found if data != b"[DONE]"]
    text, finish = "", None
    logged: dict[str, list[Any]] = defaultdict(list)
    for one in messages:
        if "error" in one:
            yield one
        for choice in one.get("choices", ()):
            text += choice["text"]
            finish = choice["finish_reason"] or finish
            for name, values in (choice["logprobs"] or {}).items():
                logged[name] += values
    yield [text, finish, logged]


class Idle:
    """Connections that only stand there; one that the server closes is opened again."""

    def __init__(self, server: Running, tally: Tally) -> None:
        self._server, self._tally = server, tally
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, count: int) -> None:
        up = asyncio.Semaphore(50)
        ready = [asyncio.Event() for _ in range(count)]
        self._tasks = [asyncio.create_task(self._stand(i, up, ready[i])) for i in range(count)]
        await asyncio.gather(*(event.wait() for event in ready))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _stand(self, number: int, up: asyncio.Semaphore, ready: asyncio.Event) -> None:
        first = (b"", b"GET /health HTTP/1.1\r\nho", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        while True:
            try:
                async with up:
                    reader, writer = await asyncio.open_connection(
                        self._server.host, self._server.port
                    )
                    writer.write(first[number % 3])
                    ready.set()
            except OSError:
                await asyncio.sleep(0.5)
                continue
            try:
                while await reader.read(4096):
                    pass
            except OSError:
                pass
            finally:
                writer.close()
            self._tally.reopened += 1
            await asyncio.sleep(0.05)


@dataclass(slots=True)
class Report:
    """What a run showed. marks: (requests so far, books)."""

    tally: Tally
    baseline: Books
    marks: list[tuple[int, Books]]
    after: Books
    alive: bool
    same_after: bool
    seconds: float
    log: str

    def broken(self, slack: int) -> list[str]:
        """The laws that are broken."""
        tally, found = self.tally, list[str]()
        if not self.alive:
            found.append("the server has ended")
        if not self.same_after:
            found.append("it answers afterwards otherwise than before")
        if tally.changed or not tally.controls:
            found.append(f"{len(tally.changed)} of {tally.controls} control answers changed")
        if tally.faults:
            found.append(f"{len(tally.faults)} answers are faults of the server's own")
        if tally.unanswered:
            found.append(f"{len(tally.unanswered)} well-formed requests were not answered")
        if tally.unshaped:
            found.append(f"{len(tally.unshaped)} refusals are not in the API's shape")
        grown = self.marks[-1][1].rss - self.marks[0][1].rss
        if grown > slack:
            found.append(f"resident memory grew by {grown / 2**20:.1f} MiB")
        if self.after.threads > self.marks[0][1].threads + POOLED:
            found.append(f"threads: {self.after.threads}, early on {self.marks[0][1].threads}")
        before, after = asdict(self.baseline), asdict(self.after)
        found += [
            f"{name}: {after[name]}, before {before[name]}"
            for name in before
            if name not in ("rss", "threads") and after[name] > before[name]
        ]
        return found


async def attack(server: Running, args: argparse.Namespace) -> Report:
    """All of it."""
    tally, over, begun = Tally(), asyncio.Event(), time.monotonic()
    controls = [Control(server, asked) for asked in CONTROLS]
    for control in controls:
        _, control.reference = await control.once()
    for number, case in enumerate(cases(200, args.seed + 1)):  # all threads and caches are there
        await play(server.host, server.port, case)
        if number % 50 == 0:
            print(f"warming up {number}", file=sys.stderr)
    baseline = await asyncio.to_thread(server.settled)
    idle = Idle(server, tally)
    await idle.start(args.idle)
    watching = [asyncio.create_task(control.watch(tally, over)) for control in controls]
    marks: list[tuple[int, Books]] = []
    queue = enumerate(cases(args.count, args.seed))
    for mark in range(1, MARKS + 1):
        upto = args.count * mark // MARKS
        await _wave(server, queue, upto, tally, args.at_once)
        books = await asyncio.to_thread(quiet_look, server)
        marks.append((upto, books))
        said = f"{upto} requests, {time.monotonic() - begun:.0f} s, RSS {books.rss / 2**20:.0f} MiB"
        wrong = len(tally.faults) + len(tally.unanswered) + len(tally.unshaped)
        print(f"{said}, controls {tally.controls}, wrong {wrong}", file=sys.stderr)
    over.set()
    await asyncio.gather(*watching)
    same = [await control.once() == (200, control.reference) for control in controls]
    await idle.stop()
    after = await asyncio.to_thread(server.settled, baseline)
    seconds = time.monotonic() - begun
    alive = await asyncio.to_thread(lambda: server.alive)
    return Report(tally, baseline, marks, after, alive, all(same), seconds, server.log())


def quiet_look(server: Running) -> Books:
    """The books; of the memory the least of some looks, as controls and the collector go on."""
    looks = []
    for _ in range(6):
        time.sleep(0.3)
        looks.append(server.books())
    return replace(looks[-1], rss=min(look.rss for look in looks))


async def _wave(
    server: Running, queue: Iterator[tuple[int, Case]], upto: int, tally: Tally, at_once: int
) -> None:
    """Send up to request number `upto`, so many at once."""

    async def client() -> None:
        for number, case in queue:
            tally.take(number, case, await play(server.host, server.port, case))
            if number >= upto - at_once:
                return

    await asyncio.gather(*(client() for _ in range(at_once)))


WORDS = {0: "closed", -1: "left", 1: "no HTTP"}


def show(report: Report, slack: int) -> None:
    console = Console()
    console.width = max(console.width, 120)
    tally = report.tally
    statuses = sorted({status for row in tally.statuses.values() for status in row})
    made = Table(title="Answers by kind of request", title_justify="left")
    made.add_column("", no_wrap=True)
    for status in statuses:
        made.add_column(WORDS.get(status, str(status)), justify="right")
    for kind, row in sorted(tally.statuses.items()):
        made.add_row(kind, *[str(row[status] or "") for status in statuses])
    console.print(made)
    books = Table(title="The server's books", title_justify="left")
    rows = [("before", report.baseline), *((str(n), b) for n, b in report.marks)]
    names = [*asdict(report.baseline)]
    for name in ("", *names):
        books.add_column(name.replace("_", " "), justify="right" if name else "left")
    for name, one in (*rows, ("after", report.after)):
        values = asdict(one) | {"rss": f"{one.rss / 2**20:.1f} MiB"}
        books.add_row(name, *[str(values[key]) for key in names])
    console.print(books)
    same = tally.controls - len(tally.changed)
    console.print(
        f"{same} of {tally.controls} control answers as before (refused: {tally.refused}); "
        f"{tally.reopened} idle connections closed by the server and opened again; "
        f"{report.seconds:.0f} s"
    )
    for what in (*tally.faults, *tally.unanswered, *tally.unshaped, *tally.changed)[:SHOWN]:
        print(what[:600])
    if tally.faults or not report.alive:
        print(f"The end of the server's log:\n{report.log[-6000:]}")
    broken = report.broken(slack)
    console.print("\n".join(f"BROKEN: {law}" for law in broken) or "All laws hold.")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=40)
    parser.add_argument("--idle", type=int, default=2000)
    parser.add_argument("--slack", type=int, default=16, help="MiB that memory may grow by")
    parser.add_argument("--url", help="a server that runs; it must serve smollm2-135m")
    parser.add_argument("--pid", type=int, help="of that server, on this machine")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory(prefix="octavo-hostile-") as folder:
        started = Running(args.url, args.pid) if args.url else Served(
            MODEL, *FLAGS, "--batch-dir", folder
        )  # fmt: skip
        with started as server:
            report = asyncio.run(attack(server, args))
    broken = report.broken(args.slack << 20)
    if args.json:
        print(json.dumps(asdict(report) | {"broken": broken}))
    else:
        show(report, args.slack << 20)
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
