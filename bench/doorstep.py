"""A server that refuses, seen by its client: how soon it says so, and whether its word is true.

Requests come when they are due; one that is refused comes again, once, after as many seconds as
`Retry-After` said. All on the client's clock, connection included.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from client import free_port

from octavo.benchmark import load, wire
from octavo.core.request import Slo
from octavo.neighbours import Neighbours
from octavo.sim.workload import Item, Workload

PATIENCE = 60.0  # seconds until a server must be there


@contextlib.contextmanager
def server(model: str, log: Path) -> Iterator[tuple[str, int]]:
    """`octavo serve --policy slo` in a process of its own; its address and process."""
    port = free_port()
    command = [
        sys.executable, "-m", "octavo", "serve", "-m", model, "--policy", "slo", "--port",
        str(port), "--speculation", "off", "--kv-memory", "1GiB",
    ]  # fmt: skip
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        _wait(f"http://127.0.0.1:{port}/ready", process)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait(15)


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1):
            return
        time.sleep(0.1)
    raise RuntimeError("the server did not come up")


def visit(
    url: str, process: int, model: str, work: Workload, slo: Slo, look: float
) -> dict[str, Any]:
    """Send a workload; what became of it. look: seconds between two looks at what others take of
    the machine, beside this process and the server's."""
    return asyncio.run(_visited(wire.Target.of(url), process, model, work, slo, look))


async def _visited(
    target: wire.Target, process: int, model: str, work: Workload, slo: Slo, look: float
) -> dict[str, Any]:
    others: list[float] = []
    watch = asyncio.create_task(_watch(process, look, others))
    try:
        found = await _visit(target, model, work, slo)
    finally:
        watch.cancel()
    return found | {"others": others}


async def _watch(process: int, look: float, others: list[float]) -> None:
    """What others take of the machine, again and again."""
    while True:
        around, spent, begun = Neighbours(), _spent(process), time.monotonic()
        await asyncio.sleep(look)
        its = (_spent(process) - spent) / (time.monotonic() - begun) / (os.cpu_count() or 1)
        others.append(max(0.0, (around.share() or 0.0) - its))


def _spent(process: int) -> float:
    """Processor seconds of a process (Linux)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _visit(target: wire.Target, model: str, work: Workload, slo: Slo) -> dict[str, Any]:
    ask = load.Ask(model, slo=slo, salt="door")
    loop = asyncio.get_running_loop()
    dial = partial(loop.create_connection, host=target.host, port=target.port)
    first: list[load.Outcome] = []
    again: list[tuple[float, load.Outcome]] = []
    for item in work.items[:8]:
        await wire.exchange(dial, _message(ask, target, item, work, "warm"), PATIENCE)
    start = loop.time() + 0.2

    async def one(item: Item) -> None:
        due = start + item.at
        await asyncio.sleep(max(0.0, due - loop.time()))
        seen = load.outcome(item, due, await wire.exchange(
            dial, _message(ask, target, item, work, ""), PATIENCE))  # fmt: skip
        first.append(seen)
        if seen.refused and seen.retry_after:
            await asyncio.sleep(max(0.0, seen.ended + seen.retry_after - loop.time()))
            due = loop.time()
            message = _message(ask, target, item, work, "")  # what it had asked
            retried = load.outcome(item, due, await wire.exchange(dial, message, PATIENCE))
            again.append((due - start, retried))

    await asyncio.gather(*(one(item) for item in work.items))
    return _said(first, again, work.items[-1].at, slo) | {
        "rows": [
            *(_row(one, one.due - start, slo) for one in first),
            *(_row(one, at, slo) | {"again": True} for at, one in again),
        ]
    }


def _message(ask: load.Ask, target: wire.Target, item: Item, work: Workload, what: str) -> bytes:
    body = ask.body(item._replace(id=item.id + what), work.block_tokens)
    return target.message("POST", ask.path, body, ask.headers())


def _row(one: load.Outcome, at: float, slo: Slo) -> dict[str, Any]:
    """One visit: what it was told, and what it had."""
    return {
        "id": one.item.id, "at": round(at, 4), "prompt": one.item.prompt,
        "output": one.item.output, "begun": one.lag, "took": one.ended - one.begun,
        "error": one.error, "retry_after": one.retry_after, "forecast": one.predicted,
        "ttft": one.ttft, "tpot": one.tpot, "met": one.met(slo),
    }  # fmt: skip


def _said(
    first: list[load.Outcome], again: list[tuple[float, load.Outcome]], last: float, slo: Slo
) -> dict[str, Any]:
    """Retries after the last arrival tell nothing: nobody else comes then."""
    took = [1e3 * (one.ended - one.begun) for one in first if one.refused]
    took += [1e3 * (one.ended - one.begun) for _, one in again if one.refused]
    retried = [one for at, one in again if at <= last]
    served = [one for one in first if one.served]
    return {
        "sent": len(first),
        "refused": sum(one.refused for one in first),
        "failed": sum(one.error is not None and not one.refused for one in first),
        "kept": sum(one.met(slo) for one in served),
        "served": len(served),
        "refusal_ms": {
            f"P{q}": float(np.percentile(took, q)) for q in (50, 90, 99, 100)
        } if took else {},
        "under_10_ms": float(np.mean([t < 10.0 for t in took])) if took else None,
        "retried": len(retried),
        "let_in": sum(not one.refused for one in retried),
        "told_s": sorted(one.retry_after for one in first if one.refused and one.retry_after),
        "lag_p99_ms": float(np.percentile([1e3 * one.lag for one in first], 99)),
    }  # fmt: skip
