"""What the server says while it runs: one line a request, as text or as JSON, off the event loop.

A record is put into a bounded queue and written by a thread of its own, so that a terminal that is
stopped, or a full pipe, holds up nobody's tokens; what does not fit is counted and said later.
A request's line has ids, counts and times, never its text; what a stranger chose is escaped.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import logging.handlers
import queue
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from octavo.server.deadlines import FIELDS
from octavo.server.traces import Refusal, Trace

requests = logging.getLogger("octavo.request")
server = logging.getLogger("octavo.server")

MOST_QUEUED = 10_000
SPARSE_SECONDS = 1.0


def tell(trace: Trace) -> None:
    """One request is over. What only looked, and was answered, is said at level debug."""
    looked = trace.method in ("GET", "HEAD", "OPTIONS") and trace.status < 400
    level = logging.DEBUG if looked else logging.INFO
    if requests.isEnabledFor(level):
        requests.log(level, "request", extra={"trace": trace})


def say(event: str, message: str, fields: Mapping[str, object] = {}) -> None:
    """One line about the server itself, under a name that machines look for."""
    server.info(message, extra={"event": event, "fields": fields})


def facts(trace: Trace) -> dict[str, Any]:
    """A request's line as fields; milliseconds. What is not known is left out."""
    end = trace.finished if trace.finished is not None else trace.started
    start = trace.arrival if trace.arrival is not None else trace.started
    refused = trace.refusal or Refusal()
    forecast = next((t.predicted for t in trace.timings if t.predicted is not None), None)
    found = {
        "id": trace.id,
        "completion": trace.completion,
        "client": trace.client,
        "key": trace.key,
        "method": trace.method,
        "path": trace.path,
        "status": trace.status,
        "outcome": trace.outcome,
        "param": refused.param,
        "said": refused.said,
        "retry_after_ms": _ms(refused.retry),
        "stream": trace.stream or None,
        "body_bytes": trace.num_bytes,
        "max_tokens": trace.num_wanted,
        "slo": {f"{n}_ms": _ms(s) for n in FIELDS if (s := getattr(trace.slo, n)) is not None},
        "prompt_tokens": trace.num_prompt,
        "cached_tokens": trace.num_cached,
        "output_tokens": trace.num_output,
        "preemptions": sum(t.num_preemptions for t in trace.timings),
        "ahead_ms": _ms(refused.ahead),
        "forecast_ttft_ms": _ms(forecast.ttft if forecast else refused.ttft),
        "forecast_tpot_ms": _ms(forecast.tpot if forecast else refused.tpot),
        "queue_ms": _ms(trace.queued),
        "ttft_ms": _ms(trace.ttft),
        "tpot_ms": _ms(trace.tpot),
        "total_ms": _ms(end - start),
    }
    kept = ("status", "total_ms")
    return {name: v for name, v in found.items() if name in kept or v not in (None, "", 0, {})}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 2)


class JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, event, and the request's fields or a message."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
        }
        trace = getattr(record, "trace", None)
        if trace is not None:
            line |= {"event": "request"} | facts(trace)
        else:
            event = getattr(record, "event", record.name)
            line |= {"event": event, "message": record.getMessage()}
            line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class Lines(logging.Formatter):
    """A line to read; in colour on a terminal."""

    def __init__(self, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        trace = getattr(record, "trace", None)
        if trace is not None:
            return f"{self._dim(clock)} {self._request(trace)}"
        text = escaped(record.getMessage())
        if record.levelno >= logging.WARNING:
            text = self._styled(f"{record.levelname.lower()}: {text}", "yellow")
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return f"{self._dim(clock)} {text}"

    def _request(self, trace: Trace) -> str:
        found = facts(trace)
        good = 200 <= trace.status < 400
        status = self._styled(str(trace.status), "green" if good else "yellow")
        parts = [status, f"{trace.method} {escaped(trace.path)}"]
        refused = trace.refusal
        if refused is not None:
            parts += _turned_away(trace, found)
        elif trace.num_prompt:
            cached = f" ({trace.num_cached} cached)" if trace.num_cached else ""
            written = "" if trace.num_wanted == 0 else f" + {trace.num_output}"
            parts.append(f"{trace.num_prompt}{cached}{written} tokens")
        for name in ("queue", "ttft", "tpot", "total"):
            if f"{name}_ms" in found:
                parts.append(f"{name} {_short(found[f'{name}_ms'])}")
        if found.get("preemptions"):
            parts.append(f"preempted {found['preemptions']}x")
        if refused is None:
            parts.append(trace.outcome)
        else:
            parts.append(": ".join(p for p in (trace.outcome, refused.said or refused.param) if p))
            if refused.retry is not None:
                parts.append(f"again in {_short(refused.retry * 1e3)}")
        who = (trace.key or (trace.client if refused else ""), trace.completion or trace.id)
        parts.append(self._dim(" ".join(p for p in who if p)))
        return "  ".join(part for part in parts if part)

    def _dim(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[0m" if self._colour else text

    def _styled(self, text: str, colour: str) -> str:
        codes = {"green": 32, "yellow": 33}
        return f"\x1b[{codes[colour]}m{text}\x1b[0m" if self._colour else text


def _turned_away(trace: Trace, found: dict[str, Any]) -> list[str]:
    """What a refused request asked for, as far as it was read, and what was forecast for it."""
    size = f"{trace.num_bytes} bytes" if trace.num_bytes else ""
    if trace.num_prompt:
        more = f"{trace.num_wanted} more" if trace.num_wanted is not None else "more, as they come"
        size = f"{trace.num_prompt} tokens, {more} wanted"
    names = [n for n in ("ttft", "tpot") if f"forecast_{n}_ms" in found]
    times = ", ".join(f"{n} {_short(found[f'forecast_{n}_ms'])}" for n in names)
    return [size, f"forecast {times}" if times else ""]


def _short(ms: float) -> str:
    return f"{ms / 1e3:.2f} s" if ms >= 1e3 else f"{ms:.1f} ms"


def escaped(text: str) -> str:
    """With what is no printable character written as an escape: a path is a stranger's choice."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class _Queue(logging.handlers.QueueHandler):
    """Hands records over as they are; counts those that find no room."""

    def __init__(self, records: queue.Queue[logging.LogRecord]) -> None:
        super().__init__(records)
        self.lost = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.lost += 1
            return
        if self.lost:
            lost, self.lost = self.lost, 0
            logging.getLogger("octavo").warning("%d lines of the log were lost", lost)


class Sparse(logging.Filter):
    """At most one record a second of a logger that strangers can make speak."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0
        self._more = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno > logging.WARNING:
            return True
        if record.created < self._next:
            self._more += 1
            return False
        self._next = record.created + SPARSE_SECONDS
        if self._more:
            record.msg = f"{record.getMessage()} ({self._more} more like it)"
            record.args, self._more = (), 0
        return True


@contextlib.contextmanager
def written(style: str, level: str, stream: TextIO | None = None) -> Iterator[None]:
    """Logging for the time of a `with`. style: auto (colour on a terminal), text or json."""
    out = stream if stream is not None else sys.stderr
    handler = logging.StreamHandler(out)
    colour = style == "auto" and out.isatty()
    handler.setFormatter(JsonLines() if style == "json" else Lines(colour))
    records: queue.Queue[logging.LogRecord] = queue.Queue(MOST_QUEUED)
    listener = logging.handlers.QueueListener(records, handler)
    root, ours, front = logging.getLogger(), logging.getLogger("octavo"), Sparse()
    relay, uvicorn = _Queue(records), logging.getLogger("uvicorn.error")
    before = ours.level
    root.addHandler(relay)
    ours.setLevel(level.upper())
    uvicorn.addFilter(front)
    listener.start()
    try:
        yield
    finally:
        root.removeHandler(relay)
        uvicorn.removeFilter(front)
        ours.setLevel(before)
        listener.stop()
