"""Requests that are left, and servers that are full."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time

from octavo.conformance.book import check
from octavo.conformance.probe import CHAT, LONG, Probe, Unclear, error_of, need, short
from octavo.conformance.wire import Answer, Pending


def _left(probe: Probe, stream: bool) -> str:
    """Leave a request and see it go from the server's gauges."""
    before = probe.occupancy()
    body = probe.chat_body(LONG, max_tokens=1500, stream=stream, ignore_eos=None)
    with contextlib.closing(Pending(probe.wire, CHAT, body)):
        if not probe.until(lambda: probe.occupancy() > before, 20.0):
            raise Unclear("the gauges never showed the request")
    start = time.monotonic()
    gone = probe.until(lambda: probe.occupancy() <= before, probe.settings.freed)
    what = "a stream" if stream else "a plain request"
    need(gone, f"{what} still runs {probe.settings.freed:g} s after its client left")
    return f"gone {time.monotonic() - start:.2f} s after its client"


@check(
    "disconnect-stream",
    "A stream whose client left ends within about a second, and gives back what it held.",
    "vllm#9428; seen in the server's own gauges at /metrics",
    basis="practice",
)
def disconnect_stream(probe: Probe) -> str:
    return _left(probe, True)


@check(
    "disconnect-whole",
    "The same for a request that is not streamed.",
    "vllm#54947; seen in the server's own gauges at /metrics",
    basis="practice",
)
def disconnect_whole(probe: Probe) -> str:
    return _left(probe, False)


@check(
    "disconnect-crowd",
    "Requests whose clients left while they waited are gone too, and none is started for nobody.",
    "xorbitsai/inference#5549; seen in the server's own gauges at /metrics",
    basis="practice",
    heavy=True,
)
def disconnect_crowd(probe: Probe) -> str:
    before, crowd = probe.occupancy(), 96
    bodies = [probe.chat_body(f"{n}: {LONG}", max_tokens=1500, stream=True) for n in range(crowd)]
    pending = [Pending(probe.wire, CHAT, body) for body in bodies]
    try:
        seen = probe.until(lambda: probe.occupancy() >= before + crowd // 2, 20.0)
    finally:
        for one in pending:
            one.close()
    if not seen:
        raise Unclear("the gauges never showed the crowd")
    gone = probe.until(lambda: probe.occupancy() <= before, 2 * probe.settings.freed)
    need(gone, f"{probe.occupancy() - before:g} of {crowd} are still there")
    return f"{crowd} requests, gone with their clients"


@check(
    "overload",
    "A server that is full says 503 (or 429, if this key has its share) in an envelope, with "
    "Retry-After.",
    "RFC 9110 10.2.3, 15.6.4; OpenAI's API as it answers",
    basis="practice",
    heavy=True,
)
def overload(probe: Probe) -> str:
    count = probe.settings.flood
    body = probe.chat_body(LONG, max_tokens=400, stream=True)
    pending: list[Pending] = []
    try:
        answer = _flood(probe, pending, body, count)
    finally:
        for one in pending:
            one.close()
    if answer is None:
        raise Unclear(f"{count} requests at once were all taken (--flood sends more)")
    need(answer.status in (429, 503), f"{answer.status}: {short(answer.body)}")
    error_of(answer.json, answer.body)
    wait = answer.headers.get("retry-after", "")
    need(wait.isdecimal() and int(wait) >= 1, f"Retry-After is {wait!r}")
    probe.until(lambda: probe.post(CHAT, probe.chat_body(max_tokens=1)).status == 200, 20.0)
    return f"{answer.status}, Retry-After {wait}"


def _flood(
    probe: Probe, pending: list[Pending], body: dict[str, object], count: int
) -> Answer | None:
    """Send requests until one is refused; its answer, or None if none is."""
    silent: list[Pending] = []
    end = 0.0
    while len(pending) < count or (silent and time.monotonic() < end):
        more = min(16, count - len(pending))
        for _ in range(more):
            pending.append(Pending(probe.wire, CHAT, body))
            end = time.monotonic() + 3.0
        silent += pending[len(pending) - more :]
        for one in _ready(silent, 0.0 if more else 0.2):
            if b" 200" not in one.sock.recv(16, socket.MSG_PEEK):
                return one.answer()
            silent.remove(one)
    return None


def _ready(pending: list[Pending], patience: float) -> list[Pending]:
    """Those that have bytes to read."""
    with selectors.DefaultSelector() as selector:
        for one in pending:
            selector.register(one.sock, selectors.EVENT_READ, one)
        return [key.data for key, _ in selector.select(patience)]
