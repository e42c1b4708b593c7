"""`octavo bench serve`: what a server does for its callers under load, in the field's definitions.

TTFT: first text - due (open loop: when it was to be sent; closed loop: when it was). TPOT:
(E2E - TTFT) / (tokens - 1). ITL: every gap between two pieces of a stream, pooled; a server that
sends several tokens in a piece has fewer, longer ones. E2E: last text - due. Goodput: requests that
met all their objectives, a second, over the whole duration with drain. Attainment: met over all
sent; what was not served met nothing. The objectives are judged here, by what arrived. Not served
are, apart: refused (429, 503: later it might have been), bad requests (400 and its like: never, as
with deadlines that an idle server could not keep), failed (all else).

A run in which the client was the bottleneck says nothing about a server: how late requests were
sent, how late the client's own loop ran, and its share of a core are measured, and judged too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from octavo.benchmark import load, wire
from octavo.benchmark.load import Ask, Outcome, Run
from octavo.core.request import Slo
from octavo.errors import InvalidRequest
from octavo.sim.report import Spread
from octavo.sim.workload import Item, Workload

MOST_LAG = 0.020  # seconds, of the 99th percentile
MOST_CPU = 0.9  # of a core: the client is one thread
NAMES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Plan:
    """load: who comes when. concurrency: None is open loop, else so many clients in a closed one.
    ask: how it becomes requests; its salt is drawn anew if it has none. warmup: requests before
    the first that counts, one after another. timeout: of a request, in seconds."""

    load: Workload
    ask: Ask
    concurrency: int | None = None
    warmup: int = 1
    timeout: float = 600.0


def measure(
    url: str,
    plan: Plan,
    watch: Callable[[str], None] = lambda _: None,
    told: load.Told = lambda *_: None,
) -> tuple[dict[str, Any], list[Outcome]]:
    """Run the plan against a server; the report as plain values, and every request.

    Raises `InvalidRequest` where there is no server, or it has not the model.
    """
    target = wire.Target.of(url)
    dial = wire.dialer(target)
    return asyncio.run(conduct(target, dial, plan, watch, told))


async def conduct(
    target: wire.Target,
    dial: wire.Dial,
    plan: Plan,
    watch: Callable[[str], None] = lambda _: None,
    told: load.Told = lambda *_: None,
) -> tuple[dict[str, Any], list[Outcome]]:
    """`measure` over any way to connect."""
    model = plan.ask.model or await served_model(target, dial, plan.ask)
    salt = plan.ask.salt or secrets.token_hex(8)
    ask = dataclasses.replace(plan.ask, model=model, salt=salt)
    watch(f"making {len(plan.load)} requests")
    ask = await _warm(target, dial, ask, plan, watch)
    work = load.jobs(plan.load, ask, target)
    run = await load.drive(
        work, dial, concurrency=plan.concurrency, timeout=plan.timeout, told=told
    )
    watch("reading the answers")
    found = load.outcomes(run)
    about = {
        "url": f"{target.host}:{target.port}{target.base}",
        "model": model,
        "load": plan.load.name,
        "changes": list(plan.load.changes),
        "arrivals": "open loop" if plan.concurrency is None else f"{plan.concurrency} clients",
        "offered_per_s": plan.load.rate if plan.concurrency is None else None,
        "slo_told": bool(ask.slo) and ask.slo_headers,
    }
    return about | report(found, run, ask.slo), found


async def served_model(target: wire.Target, dial: wire.Dial, ask: Ask) -> str:
    """The first model that a server has. Raises `InvalidRequest`."""
    one = await wire.exchange(dial, target.message("GET", "/v1/models", b"", ask.headers()), 30.0)
    where = f"http://{target.host}:{target.port}{target.base}/v1/models"
    answer = wire.read(one.times, one.pieces)
    if answer.status == 401:
        raise InvalidRequest(f"{where}: HTTP 401; give an --api-key-file", "api_key_file")
    if answer.status != 200:
        why = one.fault or (f"HTTP {answer.status}" if answer.status else "no answer")
        raise InvalidRequest(f"{where}: {why}; name the --model", "model")
    try:
        return str(msgspec.json.decode(answer.content)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        text = f"{where} names no model ({error}); name the --model"
        raise InvalidRequest(text, "model") from error


async def _warm(
    target: wire.Target, dial: wire.Dial, ask: Ask, plan: Plan, watch: Callable[[str], None]
) -> Ask:
    """A few requests that do not count, one after another; a failure is told at once. A server that
    refuses deadlines is not told them: they are judged here all the same."""
    plain = dataclasses.replace(ask, salt=ask.salt + " warm")
    for number in range(plan.warmup):
        first = plan.load.items[number % len(plan.load)]
        item = Item(f"warm-{number}", 0.0, min(first.prompt, 256), min(first.output, 16))
        body = plain.body(item, plan.load.block_tokens)
        message = target.message("POST", plain.path, body, plain.headers())
        seen = load.outcome(item, 0.0, await wire.exchange(dial, message, plan.timeout))
        if seen.bad and seen.code == load.UNATTAINABLE:
            continue  # the load's own objectives are why: it is for the report to say so
        if seen.error is not None and not seen.refused:
            if ask.slo_headers and "x-slo" in seen.error:
                watch(f"deadlines are judged here alone, for the server refuses them: {seen.error}")
                silent = dataclasses.replace(ask, slo_headers=False)
                return await _warm(target, dial, silent, plan, watch)
            raise InvalidRequest(f"the first request failed: {seen.error}", "url")
    return ask


# ---- the report ----


def report(found: Sequence[Outcome], run: Run, slo: Slo) -> dict[str, Any]:
    """A run in numbers; distributions in seconds, rates per second. NaN is None, and so is what
    objectives decide where there are none."""
    served = [o for o in found if o.served]
    refused = [o for o in found if o.refused]
    bad, failed = [o for o in found if o.bad], [o for o in found if o.failed]
    seconds = max(o.ended for o in found) - min(o.due for o in found) if found else 0.0
    good = sum(o.met(slo) for o in found)
    tokens = sum(o.tokens for o in served)
    read = sum(o.prompt if o.prompt is not None else o.item.prompt for o in served)
    asked = [n for n in NAMES if getattr(slo, n) is not None]
    per = max(seconds, 1e-9)
    client = _client(found, run)
    shares = {n: sum(o.kept(n, getattr(slo, n)) for o in found) for n in asked} | {"all": good}
    judged = {
        "attainment": {n: count / max(1, len(found)) for n, count in shares.items()},
        "kept": good / max(1, len(served) + len(failed)),
        "goodput_per_s": good / per,
    }
    return {
        "seconds": seconds,
        "sent": len(found),
        "served": len(served),
        "refused": len(refused),
        "bad_requests": len(bad),
        "failed": len(failed),
        "short": sum(o.short for o in served),
        "errors": dict(Counter(o.error or "" for o in failed).most_common(5)),
        "bad_request_errors": dict(Counter(o.error or "" for o in bad).most_common(5)),
        "refusals": dict(Counter(str(o.status) for o in refused)),
        "retry_after_s": Spread.of(o.retry_after for o in refused if o.retry_after).as_dict(),
        "requests_per_s": len(served) / per,
        "output_tokens_per_s": tokens / per,
        "total_tokens_per_s": (tokens + read) / per,
        "prompt_tokens": read,
        "output_tokens": tokens,
        "cached_tokens": sum(o.cached or 0 for o in served),
        "guessed_tokens": _guessed(served),
        "ttft_s": Spread.of(t for o in served if (t := o.ttft) is not None).as_dict(),
        "tpot_s": Spread.of(t for o in served if (t := o.tpot) is not None).as_dict(),
        "itl_s": Spread.of(gap for o in served for gap in o.gaps).as_dict(),
        "e2e_s": Spread.of(t for o in served if (t := o.e2e) is not None).as_dict(),
        "slo": {f"{n}_s": getattr(slo, n) for n in NAMES},
        **(judged if asked else dict.fromkeys(judged)),
        "most_at_once": _most_at_once(found),
        "client": client,
        "faults": _faults(client),
        "valid": not _faults(client),
    }


def _guessed(served: Sequence[Outcome]) -> int | None:
    """Tokens that were guessed and held; None where the server does not tell."""
    told = [o.guessed for o in served if o.guessed is not None]
    return sum(told) if told else None


def _client(found: Sequence[Outcome], run: Run) -> dict[str, Any]:
    """How much of what was measured may be the client's own doing."""
    connects = [o.connected - o.begun for o in found if o.connected is not None]
    return {
        "send_lag_s": Spread.of(o.lag for o in found).as_dict(),
        "loop_lag_s": Spread.of(run.lags).as_dict(),
        "connect_s": Spread.of(connects).as_dict(),
        "cpu_share": run.cpu_seconds / run.wall_seconds if run.wall_seconds else 0.0,
    }


def _faults(client: dict[str, Any]) -> list[str]:
    """Why a run says nothing about the server; nothing if it does."""
    faults = []
    for key, what in (("send_lag_s", "requests were sent late"), ("loop_lag_s", "it ran late")):
        late = client[key]["p99"]
        if late is not None and late > MOST_LAG:
            faults.append(f"{what} by {late * 1e3:.0f} ms (P99; at most {MOST_LAG * 1e3:.0f})")
    if client["cpu_share"] > MOST_CPU:
        faults.append(f"it used {client['cpu_share']:.0%} of its core")
    return faults


def _most_at_once(found: Sequence[Outcome]) -> int:
    moves = sorted((at, step) for o in found for at, step in ((o.begun, 1), (o.ended, -1)))
    return int(np.cumsum([step for _, step in moves]).max()) if moves else 0


def row(outcome: Outcome, start: float, slo: Slo) -> dict[str, Any]:
    """One request for a log: also a trace that can be sent again. Times in seconds."""
    met = {f"{n}_met": outcome.kept(n, getattr(slo, n)) for n in NAMES if getattr(slo, n)}
    return {
        "request_id": outcome.item.id,
        "arrival_s": round(outcome.due - start, 6),
        "prompt_tokens": outcome.prompt if outcome.prompt is not None else outcome.item.prompt,
        "output_tokens": outcome.tokens if outcome.served else outcome.item.output,
        "asked_tokens": outcome.item.output,
        "cached_tokens": outcome.cached,
        "guessed_tokens": outcome.guessed,
        "status": outcome.status,
        "refused": outcome.refused,
        "bad_request": outcome.bad,
        "error": outcome.error,
        "error_code": outcome.code,
        "finish_reason": outcome.finish,
        "lag_s": outcome.lag,
        "ttft_s": outcome.ttft,
        "tpot_s": outcome.tpot,
        "e2e_s": outcome.e2e,
        "times_s": [round(at - outcome.due, 6) for at in outcome.times],
        "retry_after_s": outcome.retry_after,
        "predicted_ttft_s": outcome.predicted,
        "met": outcome.met(slo),
        **met,
    }


def write_rows(found: Sequence[Outcome], slo: Slo, path: str | Path) -> None:
    """One request a line. Raises `InvalidRequest` where the file cannot be written."""
    start = min((o.due for o in found), default=0.0)
    try:
        with Path(path).open("w") as file:
            for one in found:
                file.write(json.dumps(row(one, start, slo)) + "\n")
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}", "requests_out") from error
