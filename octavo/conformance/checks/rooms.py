"""Endpoints that a server may have: embeddings, responses, messages, files and batches."""

from __future__ import annotations

import base64
import json
import secrets
import struct
from math import sqrt
from typing import Any

from octavo.conformance.book import check
from octavo.conformance.probe import (
    ABSENT,
    CHAT,
    NotOffered,
    Probe,
    Unclear,
    error_of,
    need,
    optional,
    short,
    text_of,
)
from octavo.conformance.wire import Stream

# ---- embeddings ----


@check(
    "embeddings",
    'POST /v1/embeddings: {"object": "list", "data": [{"object": "embedding", "index", '
    '"embedding"}], "usage"}, one for each input, the same for the same text; base64 is the same '
    "floats.",
    "OpenAI spec, CreateEmbeddingResponse, encoding_format",
)
def embeddings(probe: Probe) -> str:
    texts = ["the sea", "a stone", "the sea"]
    body = {"model": probe.model, "input": texts}
    answer = optional("/v1/embeddings", probe.post("/v1/embeddings", body))
    need(answer["object"] == "list", f"object {answer['object']!r}")
    need([d["index"] for d in answer["data"]] == [0, 1, 2], f"indexes of {short(answer)}")
    vectors = [d["embedding"] for d in answer["data"]]
    need(len({len(v) for v in vectors}) == 1, "lengths differ")
    need(_near(vectors[0], vectors[2]), "the same text has two embeddings")
    need(not _near(vectors[0], vectors[1]), "two texts have one embedding")
    need(answer["usage"]["prompt_tokens"] > 0, f"usage {answer['usage']}")
    coded = probe.good("/v1/embeddings", body | {"input": "the sea", "encoding_format": "base64"})
    text = coded["data"][0]["embedding"]
    need(isinstance(text, str), "encoding_format base64 gave no text")
    raw = base64.b64decode(text)
    found = list(struct.unpack(f"<{len(raw) // 4}f", raw))
    need(_near(found, vectors[0]), "base64 holds other numbers")
    return f"{len(vectors[0])} dimensions"


def _near(a: list[float], b: list[float]) -> bool:
    far = sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)))
    return far < 1e-3 * sqrt(sum(x * x for x in a))


# ---- responses ----


@check(
    "responses",
    'POST /v1/responses: object "response", status, output with a message of output_text, usage '
    "with input_tokens and output_tokens.",
    "OpenAI spec, Response",
)
def responses(probe: Probe) -> str:
    body = {"model": probe.model, "input": "Say hi.", "max_output_tokens": 16, "temperature": 0}
    answer = optional("/v1/responses", probe.post("/v1/responses", body))
    probe.made.append(f"/v1/responses/{answer['id']}")
    need(answer["object"] == "response", f"object {answer['object']!r}")
    need(answer["status"] in ("completed", "incomplete"), f"status {answer['status']!r}")
    message = next(item for item in answer["output"] if item["type"] == "message")
    part = message["content"][0]
    need(part["type"] == "output_text" and isinstance(part["text"], str), f"{short(message)}")
    usage = answer["usage"]
    total = usage["input_tokens"] + usage["output_tokens"]
    need(usage["total_tokens"] == total, f"usage {usage}")
    return short(part["text"], 60)


@check(
    "responses-stream",
    "Its stream: events whose name is their type, numbered without gaps, from response.created to "
    "response.completed (or incomplete); deltas join to the text.",
    "OpenAI spec, ResponseStreamEvent, sequence_number",
)
def responses_stream(probe: Probe) -> str:
    responses(probe)
    body = {"model": probe.model, "input": "Say hi.", "max_output_tokens": 16, "temperature": 0}
    stream = probe.good_stream("/v1/responses", body | {"stream": True})
    events = _named(stream)
    kinds = [event["type"] for event in events]
    need(kinds[0] == "response.created", f"it begins with {kinds[0]}")
    probe.made.append(f"/v1/responses/{events[0]['response']['id']}")
    need(kinds[-1] in ("response.completed", "response.incomplete"), f"ends with {kinds[-1]}")
    numbers = [event["sequence_number"] for event in events]
    need(numbers == list(range(numbers[0], numbers[0] + len(numbers))), f"numbers {numbers}")
    deltas = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    done = next(e["text"] for e in events if e["type"] == "response.output_text.done")
    need(deltas == done, f"deltas {deltas!r}, done {done!r}")
    return f"{len(events)} events"


def _named(stream: Stream) -> list[dict[str, Any]]:
    """The data of events that have a name, which must be their type."""
    name, found = "", []
    for event in stream.events():
        if event.kind == "event":
            name = event.text
        elif event.kind == "data" and event.text != "[DONE]":
            value = json.loads(event.text)
            need(value.get("type") == name, f"event {name!r} holds type {value.get('type')!r}")
            found.append(value)
    need(found, f"no events: {short(stream.body)}")
    return found


# ---- messages ----

HELLO = [{"role": "user", "content": "Say hi."}]


def _anthropic(probe: Probe) -> dict[str, str]:
    found = {"anthropic-version": "2023-06-01"}
    return found if probe.wire.key is None else found | {"x-api-key": probe.wire.key}


@check(
    "messages",
    'POST /v1/messages: type "message", role "assistant", content [{type: text}], stop_reason, '
    "usage; count_tokens counts the same prompt.",
    "Anthropic API reference, Messages, Count tokens",
)
def messages(probe: Probe) -> str:
    body: dict[str, Any] = {"model": probe.model, "max_tokens": 12, "messages": HELLO}
    heads = _anthropic(probe)
    answer = optional("/v1/messages", probe.wire.ask("POST", "/v1/messages", body, heads))
    need(answer["type"] == "message" and answer["role"] == "assistant", short(answer))
    need(answer["content"][0]["type"] == "text", f"content {short(answer['content'])}")
    known = ("end_turn", "max_tokens", "stop_sequence")
    need(answer["stop_reason"] in known, f"stop_reason {answer['stop_reason']!r}")
    usage = answer["usage"]
    need(usage["output_tokens"] > 0, f"usage {usage}")
    # input_tokens are those that no cache had; the rest is counted beside them.
    beside = ("cache_read_input_tokens", "cache_creation_input_tokens")
    count = usage["input_tokens"] + sum(usage.get(name) or 0 for name in beside)
    del body["max_tokens"]
    counted = probe.wire.ask("POST", "/v1/messages/count_tokens", body, heads)
    if counted.status not in ABSENT:
        told = counted.json["input_tokens"]
        need(told == count, f"{count} used, counted {told}")
    return short(answer["content"][0]["text"], 60)


@check(
    "messages-stream",
    "Its stream: message_start, content_block_start, deltas, content_block_stop, message_delta, "
    "message_stop.",
    "Anthropic API reference, Streaming messages",
)
def messages_stream(probe: Probe) -> str:
    messages(probe)
    body = {"model": probe.model, "max_tokens": 12, "messages": HELLO, "stream": True}
    stream = probe.good_stream("/v1/messages", body, headers=_anthropic(probe))
    kinds = [event["type"] for event in _named(stream) if event["type"] != "ping"]
    inner = [kind for kind in kinds if kind != "content_block_delta"]
    wanted = ["message_start", "content_block_start", "content_block_stop"]
    need(inner == [*wanted, "message_delta", "message_stop"], f"events {inner}")
    return f"{len(kinds)} events"


# ---- files and batches ----


def _upload(probe: Probe, content: bytes) -> dict[str, Any]:
    mark = secrets.token_hex(12)
    parts = [
        f'--{mark}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n',
        f'--{mark}\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n'
        "Content-Type: application/jsonl\r\n\r\n",
    ]
    body = "".join(parts).encode() + content + f"\r\n--{mark}--\r\n".encode()
    kind = {"Content-Type": f"multipart/form-data; boundary={mark}"}
    made = optional("/v1/files", probe.wire.ask("POST", "/v1/files", body, kind))
    probe.made.append(f"/v1/files/{made['id']}")
    return made


@check(
    "files",
    'POST /v1/files keeps a file: {"id", "object": "file", "bytes", "created_at", "filename", '
    '"purpose"}; it is listed, its content comes back byte for byte, and it can be deleted.',
    "OpenAI spec, OpenAIFile, DeleteFileResponse",
)
def files(probe: Probe) -> str:
    content = b'{"custom_id": "\xc3\xa9"}\r\n--not-the-end\r\n'
    made = _upload(probe, content)
    want = {"object": "file", "bytes": len(content), "filename": "in.jsonl", "purpose": "batch"}
    got = {name: made.get(name) for name in want}
    need(got == want, f"wanted {want}, got {short(made)}")
    path = f"/v1/files/{made['id']}"
    need(probe.wire.ask("GET", path).json["id"] == made["id"], "it cannot be retrieved")
    need(probe.wire.ask("GET", path + "/content").body == content, "its content is another")
    listed = [file["id"] for file in probe.wire.ask("GET", "/v1/files").json["data"]]
    need(made["id"] in listed, "it is not listed")
    gone = probe.wire.ask("DELETE", path).json
    need(gone["deleted"] is True and gone["object"] == "file", f"{short(gone)}")
    after = probe.wire.ask("GET", path)
    need(after.status == 404, f"deleted, and then {after.status}")
    error_of(after.json, after.body)
    return f"{made['id']}: {made['bytes']} bytes there and back"


@check(
    "batches",
    "A batch runs every request of its file once: custom_ids come back in the output or the error "
    "file, request_counts say how many.",
    "OpenAI spec, Batch, BatchRequestOutput",
)
def batches(probe: Probe) -> str:
    bodies = [probe.chat_body(f"Say {n}.", max_tokens=4) for n in range(3)]
    bodies.append({"model": probe.model, "messages": "none"})
    lines = [
        {"custom_id": f"q-{n}", "method": "POST", "url": CHAT, "body": body}
        for n, body in enumerate(bodies)
    ]
    made = _upload(probe, "\n".join(map(json.dumps, lines)).encode())
    asked = {"input_file_id": made["id"], "endpoint": CHAT, "completion_window": "24h"}
    batch = optional("/v1/batches", probe.post("/v1/batches", asked))
    return _followed(probe, batch, text_of(probe.chat("Say 0.", max_tokens=4)))


def _followed(probe: Probe, batch: dict[str, Any], alone: str) -> str:
    path = f"/v1/batches/{batch['id']}"
    need(batch["object"] == "batch", f"object {batch['object']!r}")
    last = batch

    def over() -> bool:
        nonlocal last
        last = probe.wire.ask("GET", path).json
        return last["status"] in ("completed", "failed", "expired", "cancelled")

    if not probe.until(over, probe.settings.wait):
        probe.post(f"{path}/cancel", {})
        raise Unclear(f"not over in {probe.settings.wait:g} s: {last['status']}")
    results = [last.get(f"{kind}_file_id") for kind in ("output", "error")]
    probe.made += [f"/v1/files/{file}" for file in results if file]
    need(last["status"] == "completed", f"{last['status']}: {short(last.get('errors'))}")
    counts = last["request_counts"]
    need(counts == {"total": 4, "completed": 3, "failed": 1}, f"request_counts {counts}")
    good = _lines(probe, last["output_file_id"])
    bad = _lines(probe, last["error_file_id"])
    need(sorted(good) == ["q-0", "q-1", "q-2"], f"output file: {sorted(good)}")
    need(sorted(bad) == ["q-3"], f"error file: {sorted(bad)}")
    reply = good["q-0"]["response"]
    need(reply["status_code"] == 200, f"status_code {reply['status_code']}")
    text = text_of(reply["body"])
    need(text == alone, f"in the batch {text!r}, over HTTP {alone!r}")
    return f"{batch['id']}: 3 and 1 of 4"


def _lines(probe: Probe, file: str | None) -> dict[str, Any]:
    if file is None:
        raise NotOffered("no file of results")
    body = probe.wire.ask("GET", f"/v1/files/{file}/content").body
    lines = [json.loads(line) for line in body.decode().splitlines()]
    ids = [line["custom_id"] for line in lines]
    need(len(set(ids)) == len(ids), f"a custom_id is there twice: {ids}")
    return {line["custom_id"]: line for line in lines}
