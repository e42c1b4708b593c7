"""A trace in numbers and in words: `GET /v1/requests/{id}/trace`, and `Server-Timing`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.core.history import Cold, Journal, Mark, Record, Wait
from octavo.core.request import FinishReason, State
from octavo.core.stats import Timing
from octavo.server.problems import reply_json
from octavo.server.service import Service
from octavo.server.traces import Trace, Traces

WAITS = {
    Wait.TURN: "for the running step and its turn",
    Wait.ROWS: "because as many sequences ran as a step may hold (--max-rows)",
    Wait.TOKENS: "because the steps' tokens went to other prompts (--max-batch-tokens)",
    Wait.BLOCKS: "because the KV pool had too few free blocks (--kv-memory)",
    Wait.TIME: "because streams with deadlines left no time",
    Wait.GROUP: "because a static group was closed",
    Wait.PREEMPTION: "because another sequence had just been preempted",
    Wait.TWIN: "until another request had computed the prefix that both share",
}
COLDS = {
    Cold.ALL: "all full blocks but the last token's were cached",
    Cold.SHORT: "it is shorter than a block, which is the least that is shared",
    Cold.NEW: "nobody with this key had computed what follows",
    Cold.EVICTED: "what follows was computed before, and evicted since",
    Cold.SCORED: "log-probabilities of the prompt were asked for: they must be computed",
    Cold.OFF: "the prefix cache is off",
}


def routes(service: Service) -> list[Route]:
    async def trace(request: Request) -> Response:
        key = request.scope["octavo.key"]
        reader = None if key is None or key.admin else key.name
        id = request.path_params["id"]
        found = service.traces.find(id, reader)
        if found is None:
            most = service.traces.most
            text = f"there is no trace of such a request of yours; the latest {most} are kept"
            return reply_json({"error": _error(text)}, 404)
        return reply_json(account(found, service.traces))

    return [Route("/v1/requests/{id}/trace", trace, methods=["GET"])]


def _error(text: str) -> dict[str, Any]:
    kind = "invalid_request_error"
    return {"message": text, "type": kind, "param": "id", "code": "trace_not_found"}


def account(trace: Trace, traces: Traces) -> dict[str, Any]:
    """All that is known of a request. Times in milliseconds, `at_ms` from its arrival."""
    now, start = traces.clock(), trace.arrival if trace.arrival is not None else trace.started
    end = trace.finished if trace.finished is not None else now
    door = _door(trace)
    choices = [_ended(timing, start, door) for timing in trace.timings]
    for id in trace.requests:
        for seq in traces.live.choices(id):
            waits = seq.record.waited(traces.journal, now)
            choices.append(_living(seq, start, traces) | _waits(waits, door))
    predicted = next((t.predicted for t in trace.timings if t.predicted is not None), None)
    parsed = trace.parsed if trace.parsed is not None else start
    ahead = {"running": trace.ahead[0], "waiting": trace.ahead[1]}
    return {
        "object": "request.trace",
        "id": trace.completion,
        "request_id": trace.id,
        "endpoint": trace.path,
        "created": int(trace.wall),
        "key": trace.key or None,
        "status": "ended" if trace.finished is not None else "in progress",
        "http_status": trace.status or None,
        "finish": trace.outcome or None,
        "stream": trace.stream,
        "why": _words(choices, door),
        "usage": {
            "prompt_tokens": trace.num_prompt,
            "cached_tokens": trace.num_cached,
            "completion_tokens": trace.num_output,
        },
        "ahead_on_arrival": ahead,
        "body_ms": _ms(start - trace.started),
        "parse_ms": _ms(parsed - start),
        "total_ms": _ms(end - start),
        "ttft_ms": _ms(trace.ttft),
        "tpot_ms": _ms(trace.tpot),
        "predicted_ttft_ms": _ms(predicted and predicted.ttft),
        "predicted_tpot_ms": _ms(predicted and predicted.tpot),
        "choices": choices,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def _door(trace: Trace) -> float:
    """Seconds that reading, templates and tokenising took: before the queue, though it counts from
    the arrival."""
    if trace.parsed is None or trace.arrival is None:
        return 0.0
    return trace.parsed - trace.arrival


def _waits(waits: dict[Wait, float], door: float) -> dict[str, Any]:
    """Milliseconds in the queue, in all and by reason."""
    found = {why: s - door * (why is Wait.TURN) for why, s in waits.items()}
    found = {why: s for why, s in found.items() if s > 0.0}
    return {
        "queue_ms": _ms(sum(found.values())),
        "waits_ms": {why.value: _ms(s) for why, s in found.items()},
    }


def _ended(t: Timing, start: float, door: float) -> dict[str, Any]:
    """The account of a sequence that has ended."""
    record = t.record
    assert record is not None
    found = {
        "request": t.request_id,
        "index": t.choice,
        "state": "ended",
        "finish": t.finish.value,
        "prompt_tokens": t.num_prompt,
        "output_tokens": t.num_output,
        "drafted_tokens": t.num_drafted,
        "accepted_tokens": t.num_accepted,
        "ttft_ms": _ms(t.ttft),
        "tpot_ms": _ms(t.tpot),
        "deadlines_met": t.met if t.slo else None,
    }
    found |= _waits(record.waits, door)
    return found | _history(record, t.num_cached, t.num_preemptions, start)


def _living(seq: Any, start: float, traces: Traces) -> dict[str, Any]:
    """The account so far of a sequence that waits or runs. The engine writes to it meanwhile: what
    is read here may be of two moments, each number is right by itself."""
    record, journal = seq.record, traces.journal
    waiting = seq.state in (State.WAITING, State.HELD)
    why = Wait.TWIN if seq.state is State.HELD else journal.why
    found = {
        "request": seq.request.id,
        "index": seq.choice,
        "state": seq.state.value,
        "waits_for": why.value if waiting else None,
        "finish": None,
        "prompt_tokens": seq.num_prompt,
        "output_tokens": seq.num_output,
        "drafted_tokens": seq.num_drafted,
        "accepted_tokens": seq.num_accepted,
        "ttft_ms": _ms(None if seq.first_token is None else seq.first_token - start),
    }
    return found | _history(record, seq.num_cached, seq.num_preemptions, start, journal)


def _history(
    record: Record, cached: int, preemptions: int, start: float, journal: Journal | None = None
) -> dict[str, Any]:
    """Cache, chunks, preemptions, and the steps from admission to first token and from there on."""
    joined, end = record.joined, record.ended
    slow = record.slow
    if journal is not None and joined is not None:  # it has not ended
        end, slow = journal.mark(), journal.slowest(joined.at)
    prefill = decode = None
    if joined is not None and end is not None:
        prefill = _company(joined, record.first or end)
        decode = _company(record.first, end) if record.first is not None else None
    return {
        "cached_tokens": cached,
        "cached_why": None if joined is None else record.cold.value,
        "num_chunks": record.num_chunks,
        "chunks": [
            {"at_ms": _ms(c.at - start), "start": c.start, "tokens": c.tokens}
            for c in list(record.chunks)
        ],
        "num_preemptions": preemptions,
        "preemptions": [
            {"at_ms": _ms(p.at - start), "lost_tokens": p.lost} for p in list(record.preemptions)
        ],
        "slowest_steps": [
            {
                "at_ms": _ms(s.at - start),
                "ms": _ms(s.seconds),
                "rows": s.rows,
                "tokens": round(s.tokens),
            }
            for s in slow
        ],
        "prefill_steps": prefill,
        "decode_steps": decode,
    }


def _company(begin: Mark, end: Mark) -> dict[str, Any]:
    """The steps between two marks: how many, how long, and how full they were on average."""
    steps = end.steps - begin.steps
    each = max(steps, 1)
    return {
        "steps": steps,
        "mean_rows": round((end.rows - begin.rows) / each, 2),
        "mean_tokens": round((end.tokens - begin.tokens) / each, 2),
        "mean_ms": _ms((end.seconds - begin.seconds) / each),
    }


# ---- in words ----


def _words(choices: list[dict[str, Any]], door: float) -> list[str]:
    """Where the time went, in the order of a request's life; the first choice for all, where they
    are alike."""
    if not choices:
        return ["it was not handed to the engine"]
    slow = max(choices, key=lambda c: c["queue_ms"])
    out = [f"reading and tokenising took {door * 1e3:.1f} ms"] if door >= 0.01 else []
    out.append(_waited(slow))
    first = choices[0]
    prompt, cached = first["prompt_tokens"], first["cached_tokens"]
    if first["cached_why"] is not None:
        out.append(
            f"{cached} of {prompt} prompt tokens came from the prefix cache: "
            f"{COLDS[Cold(first['cached_why'])]}"
        )
    for name, what in (("prefill_steps", "the first token"), ("decode_steps", "the rest")):
        steps = first[name]
        if steps and steps["steps"]:
            out.append(f"{what} took {_stepped(steps)}")
    if first["slowest_steps"]:
        slow = first["slowest_steps"][0]
        out.append(
            f"its slowest step took {slow['ms']:.1f} ms: {slow['rows']} sequences, "
            f"{slow['tokens']} tokens"
        )
    taken = sum(c["num_preemptions"] for c in choices)
    if taken:
        lost = sum(p["lost_tokens"] for c in choices for p in c["preemptions"])
        out.append(
            f"it was preempted {_times(taken)}, as the KV pool was full: {lost} tokens were "
            "computed again"
        )
    drafted = sum(c["drafted_tokens"] for c in choices)
    if drafted:
        held = sum(c["accepted_tokens"] for c in choices)
        out.append(f"{held} of {drafted} guessed tokens held, each a step saved")
    ends = {c["finish"] for c in choices}
    if FinishReason.ABORT.value in ends:
        out.append("it was aborted: the client left, or its time was over")
    return out


def _stepped(steps: dict[str, Any]) -> str:
    count, others = steps["steps"], steps["mean_rows"] - 1
    shared = f"shared with {others:.1f} others" if others >= 0.05 else "alone"
    if others >= 0.05 and count > 1:
        shared += " on average"
    tokens = f"{steps['mean_tokens']:.0f}"
    tokens += f" token{'' if tokens == '1' else 's'}{' each' if count > 1 else ''}"
    word = "step" if count == 1 else "steps"
    return f"{count} {word} of {steps['mean_ms']:.1f} ms, {shared} ({tokens})"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _waited(choice: dict[str, Any]) -> str:
    """What it waited for, the longest part first."""
    waits = sorted(choice["waits_ms"].items(), key=lambda item: -item[1])
    parts = [f"{ms:.1f} ms {WAITS[Wait(why)]}" for why, ms in waits if ms >= 0.05]
    if not parts:
        return "it did not wait"
    return f"it waited {choice['queue_ms']:.1f} ms: " + ", ".join(parts)


# ---- as headers ----


def server_timing(trace: Trace) -> bytes:
    """What is known of its times when the headers go out (W3C Server-Timing; milliseconds): of a
    stream what was before it, of a whole answer all."""
    running, waiting = trace.ahead
    parts = [f'ahead;desc="{running} running, {waiting} waiting"']
    if trace.arrival is not None and trace.parsed is not None:
        parts.append(f"parse;dur={(trace.parsed - trace.arrival) * 1e3:.1f}")
    queued, firsts = trace.queued, [t.ttft for t in trace.timings if t.ttft is not None]
    if firsts and queued is not None and trace.arrival is not None:
        ttft = min(firsts)
        total = max(t.finished for t in trace.timings) - trace.arrival
        cached = sum(t.num_cached for t in trace.timings if t.choice == 0)
        taken = sum(t.num_preemptions for t in trace.timings)
        parts += [
            f"queue;dur={queued * 1e3:.1f}",
            f"prefill;dur={max(0.0, ttft - _door(trace) - queued) * 1e3:.1f}",
            f"decode;dur={max(0.0, total - ttft) * 1e3:.1f}",
            f'cache;desc="{cached} of {trace.num_prompt} tokens"',
        ]
        parts += [f'preempted;desc="{_times(taken)}"'] if taken else []
    return ", ".join(parts).encode()
