"""What `bench/hostile.py` sends: request number i of a seed is the same bytes on every machine.

A `Case` is what one client does on one connection: pieces of bytes, pauses between them, and what
becomes of the answer. `whole` ones are well-formed HTTP requests, which are owed an answer; of
the others the server may close the connection.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

MODEL = "smollm2-135m"
LIMIT_MS = 4000  # every request asks for so little time: what it may generate ends then
HOLE = "\N{OBJECT REPLACEMENT CHARACTER}hole\N{OBJECT REPLACEMENT CHARACTER}"
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """kind: by which results are counted. sends: bytes to send, or seconds to wait. reads: bytes of
    the answer after which the client leaves; None: it reads all. slow: seconds before it reads at
    all, with a small window. rudely: it leaves by a reset."""

    kind: str
    sends: tuple[bytes | float, ...]
    whole: bool = False
    reads: int | None = None
    slow: float = 0.0
    rudely: bool = False


def message(method: str, path: str, body: bytes = b"", *heads: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: x", f"x-octavo-timeout-ms: {LIMIT_MS}"]
    lines += [*heads, "connection: close"]
    if body or method == "POST":
        lines += [f"content-length: {len(body)}"]
        if not any(head.startswith("content-type") for head in heads):
            lines += ["content-type: application/json"]
    return "\r\n".join((*lines, "", "")).encode("utf-8", "surrogateescape") + body


# ---- bodies that are right, with nearly everything in them ----

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "name": "ann", "content": [{"type": "text", "text": "What is the sea?"}]},
]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["b", "c"]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"name": "look", "description": "Look it up.", "parameters": SCHEMA, "strict": True}
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "seed": 7}
MORE = {
    "top_k": 5,
    "min_p": 0.01,
    "typical_p": 0.9,
    "repetition_penalty": 1.1,
    "min_tokens": 1,
    "ignore_eos": False,
    "stop_token_ids": [5],
    "banned_token_ids": [7],
    "allowed_token_ids": [100, 200, 300],
    "skip_special_tokens": True,
    "priority": 1,
    "speculation": True,
    "logit_bias": {"100": -1.5},
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "user": "ann",
    "stop": ["\n\n", "END"],
}

SAMPLES: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "/v1/chat/completions",
        {
            "messages": TALK,
            "max_tokens": 2,
            "n": 1,
            "logprobs": True,
            "top_logprobs": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
            "service_tier": "auto",
            "metadata": {"a": "b"},
            **SAMPLING,
            **MORE,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": TALK,
            "max_completion_tokens": 2,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA},
            },
            "prediction": {"type": "content", "content": "The sea is"},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                *TALK,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "look", "arguments": "{}"},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "wet"},
            ],
            "max_tokens": 2,
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
        },
    ),
    (
        "/v1/chat/completions",
        {"messages": TALK[:1], "max_tokens": 2, "structured_outputs": {"regex": "[a-c]{1,3}"}},
    ),
    (
        "/v1/chat/completions",
        {
            "messages": TALK[1:],
            "max_tokens": 2,
            "structured_outputs": {"grammar": 'start: "a" | "b"'},
        },
    ),
    (
        "/v1/completions",
        {
            "prompt": ["The sea", "A hill"],
            "max_tokens": 2,
            "echo": True,
            "logprobs": 1,
            "n": 1,
            "stream": True,
            **SAMPLING,
            **MORE,
        },
    ),
    ("/v1/completions", {"prompt": [[1, 2, 3]], "max_tokens": 2, "stream": False}),
    (
        "/v1/responses",
        {
            "input": [
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "What is the sea?"}],
                }
            ],
            "instructions": "Be brief.",
            "max_output_tokens": 2,
            "stream": True,
            "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
            "reasoning": {"effort": "low"},
            "store": True,
            "metadata": {"a": "b"},
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 1,
            "truncation": "disabled",
            "previous_response_id": None,
            "temperature": 0.5,
            "top_p": 0.9,
        },
    ),
    (
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Sea?"}]}],
            "system": "Be brief.",
            "max_tokens": 2,
            "stream": True,
            "stop_sequences": ["END"],
            "metadata": {"user_id": "ann"},
            "top_k": 5,
            "temperature": 0.5,
            "top_p": 0.9,
        },
    ),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "Sea?"}]}),
    (
        "/v1/embeddings",
        {
            "input": ["the sea", "a hill"],
            "encoding_format": "float",
            "dimensions": None,
            "user": "ann",
        },
    ),
    ("/tokenize", {"prompt": "the sea", "add_special_tokens": True}),
    ("/tokenize", {"messages": TALK}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    (
        "/v1/batches",
        {
            "input_file_id": "file-0",
            "endpoint": "/v1/completions",
            "completion_window": "24h",
            "metadata": {"a": "b"},
            "output_expires_after": {"anchor": "created_at", "seconds": 3600},
        },
    ),
)
STRANGE_FIELDS = (
    "audio",
    "functions",
    "modalities",
    "best_of",
    "suffix",
    "background",
    "__class__",
    "model",
    "slo",
    "chat_template_kwargs",
    "image_url",
    "\x00",
    "é" * 99,
)

# ---- values that are wrong nearly everywhere, as JSON or nearly so ----

DEEP = 5000
VALUES: tuple[str, ...] = (
    "null",
    "true",
    "false",
    "0",
    "-1",
    "1",
    "2",
    "0.5",
    "-0.0",
    "1e-320",
    "1e308",
    "1e999",
    "-1e999",
    "NaN",
    "Infinity",
    "-Infinity",
    "1" + "0" * 400,
    "-" + "9" * 5000,
    "2147483648",
    "4294967296",
    "9223372036854775808",
    "18446744073709551616",
    "0x10",
    "01",
    "1.",
    "+1",
    "--1",
    '""',
    '" "',
    '"a"',
    '"true"',
    '"5"',
    '"\\u0000"',
    '"\\ud800"',
    '"\\udfff\\ud800"',
    '"\\uffff"',
    '"\\u202e\\u200b"',
    '"\N{SMILING FACE WITH SUNGLASSES}"',
    '"' + "e\N{COMBINING ACUTE ACCENT}" * 999 + '"',
    '"' + "x" * 70_000 + '"',
    '"' + "ab " * 20_000 + '"',
    '"\t"',
    '"\\x"',
    '"unterminated',
    '"{{ 7 * 7 }}{% for x in range(10**9) %}{% endfor %}"',
    '"<|im_start|>system\\n"',
    '"../../etc"',
    '"auto"',
    '"required"',
    '"flex"',
    '"json_object"',
    '"text"',
    '"assistant"',
    '"a{1000000}"',
    '"((((a+)+)+)+)+$"',
    "[]",
    "{}",
    "[null]",
    '[""]',
    "[[]]",
    "[[[[1]]]]",
    '{"": null}',
    '{"a": 1}',
    '{"type": "object"}',
    '{"type": ["string", 5]}',
    '{"$ref": "#"}',
    '{"$ref": "http://a/b"}',
    '{"anyOf": []}',
    '{"type": "string", "pattern": "("}',
    '{"minItems": 1e18, "type": "array"}',
    "[" * DEEP + "]" * DEEP,
    '{"a":' * DEEP + "1" + "}" * DEEP,
    "[" * 50,
    "}" * 50,
    "[" + "0," * 9999 + "0]",
    "[" + '"a",' * 999 + '"a"]',
    "[-1, 1e9, 99999999]",
    '[{"type": "image_url"}]',
    "{" + ",".join(f'"k{i}": {i}' for i in range(2000)) + "}",
    '{"a": 1, "a": 2}',
    "[1, 1.5, true]",
)


def paths(value: Any, at: Path = ()) -> Iterator[Path]:
    """Of every value inside, its own place left out."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in pairs:
        yield (*at, key)
        if isinstance(inner, dict | list):
            yield from paths(inner, (*at, key))


def replaced(value: Any, at: Path, by: Any) -> Any:
    if not at:
        return by
    made = dict(value) if isinstance(value, dict) else list(value)
    made[at[0]] = replaced(made[at[0]], at[1:], by) if len(at) > 1 else by
    return made


def spelled(body: Any, raw: str) -> bytes:
    """The body as JSON, with `raw` in its hole, be it JSON or not."""
    return json.dumps(body).replace(json.dumps(HOLE), raw).encode("utf-8", "surrogatepass")


TARGETS: tuple[tuple[str, dict[str, Any], Path], ...] = tuple(
    (path, sample, at)
    for path, bare in SAMPLES
    for sample in [{"model": MODEL} | bare]
    for at in [*paths(sample), *((name,) for name in STRANGE_FIELDS if name not in sample)]
)


def field(draw: random.Random, number: int) -> Case:
    """Every field of every body in turn; one or, seldom, three of them at once."""
    path, sample, at = TARGETS[number % len(TARGETS)]
    body: Any = sample
    if draw.random() < 0.1:
        for other in draw.sample([*sample], min(2, len(sample))):
            if (other,) != at[:1]:
                body = body | {other: draw.choice((None, -1, 10**30, "", [], {}, "\ud800", True))}
    data = spelled(replaced(body, at, HOLE), VALUES[draw.randrange(len(VALUES))])
    return Case("field", (message("POST", path, data),), whole=True)


def right(draw: random.Random, **more: Any) -> tuple[str, bytes]:
    """A path, and a body that is right or would be."""
    path, sample = SAMPLES[draw.randrange(len(SAMPLES))]
    return path, json.dumps({"model": MODEL} | sample | more).encode()


def cut(draw: random.Random, number: int) -> Case:
    """A body that ends too soon: the length says so, or the client leaves."""
    path, data = right(draw)
    at = number * 7919 % len(data)
    if number % 2:
        return Case("body cut", (message("POST", path, data[:at]),), whole=True)
    whole = message("POST", path, data)
    return Case(
        "client cut off", (whole[: len(whole) - len(data) + at],), reads=0, rudely=number % 4 == 0
    )


LENGTHS = (
    "-1",
    "+5",
    "abc",
    "",
    "0x10",
    "1e3",
    "9" * 30,
    "5, 5",
    "5\r\ncontent-length: 9",
    " ",
    "1_0",
    "5;q=1",
    "٣",
    "18446744073709551617",
    "0",
    "1",
    "99999999999",
)


def framing(draw: random.Random, number: int) -> Case:
    """Lengths that lie, and chunks that are none."""
    path, data = right(draw)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n".encode()
    if number % 3 == 0:
        length = draw.choice(LENGTHS).encode()
        return Case("length", (head + b"content-length: " + length + b"\r\n\r\n" + data, 0.05))
    chunked = (
        head
        + b"transfer-encoding: "
        + draw.choice(
            (
                b"chunked",
                b"chunked",
                b"chunked",
                b"gzip, chunked",
                b"chunked, chunked",
                b"x",
                b"chunked\r\ncontent-length: 5",
            )
        )
        + b"\r\n\r\n"
    )
    size = b"%x\r\n" % len(data)
    bad = draw.choice(
        (
            b"zz\r\n" + data,
            b"-5\r\n" + data,
            b"F" * 17 + b"\r\n" + data,
            b"F" * 5000,
            b"\r\n\r\n",
            b"0\r\n",
            size + data,
            size + data + b"0\r\n\r\n",
            size + data[:-5] + b"\r\n0\r\n\r\n",
            b"5\nhello\n0\n\n",
            size[:-2] + b";ext=" + b"e" * 9000 + b"\r\n" + data + b"\r\n0\r\n\r\n",
            b"0\r\n" + b"trailer: t\r\n" * 5000 + b"\r\n",
            b"".join(b"1\r\n%c\r\n" % c for c in data) + b"0\r\n\r\n",
            draw.randbytes(300),
        )
    )
    return Case("chunks", (chunked + bad, 0.05))


def heads(draw: random.Random, number: int) -> Case:
    """Request lines and headers that are none, too many, too long or twice."""
    good = "GET /health HTTP/1.1\r\nhost: x\r\n"
    noise = draw.randbytes(200)
    made: tuple[bytes, ...] = (
        noise,
        noise + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + noise,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\r\n" * 500,
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.0\r\n\r\n",
        b"get /health HTTP/1.1\r\nhost: x\r\n\r\n",
        b"\x00" * 999,
        b"BREW /health HTTP/1.1\r\nhost: x\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET http://other/health HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /%zz%00%ff HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET //../../etc/passwd HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /health?" + b"q=%ff&" * 5000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        f"{good}x: {'v' * 100_000}\r\n\r\n".encode(),
        f"{good}{'x: y' * 1}\r\n".encode() + b"a: b\r\n" * 9000,
        f"{good}{'n' * 70_000}: v\r\n\r\n".encode(),
        f"{good}host: y\r\nhost: z\r\n\r\n".encode(),
        f"{good}bad header\r\n\r\n".encode(),
        f"{good}: v\r\n\r\n".encode(),
        f"{good}a\x00b: v\r\n\r\n".encode(),
        f"{good}a: b\x00c\r\n\r\n".encode(),
        f"{good}a: b\r\n folded\r\n\r\n".encode(),
        f"{good}a : b\r\n\r\n".encode(),
        f"{good}authorization: {'Bearer ' * 500}\r\n\r\n".encode(),
        f"{good}origin: null\r\n\r\n".encode(),
        f"{good}origin: http://[::1\r\n\r\n".encode(),
        f"{good}x-request-id: {'é' * 90}\r\n\r\n".encode(),
        f"{good}traceparent: 00-zz-1-1\r\ncookie: {'a=b;' * 999}\r\n\r\n".encode(),
        f"{good}expect: 100-continue\r\ncontent-length: 10\r\n\r\n".encode(),
        f"{good}upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-key: x\r\n\r\n".encode(),
        f"{good}upgrade: h2c\r\nconnection: upgrade, http2-settings\r\n\r\n".encode(),
        good.encode(),
        good.encode() + b"\r\n" + good.encode() + b"\r\n" + noise,
    )
    return Case("head", (made[number % len(made)], 0.05))


HEADS = (
    "x-octavo-timeout-ms",
    "x-slo-ttft-ms",
    "x-slo-tpot-ms",
    "x-slo-e2e-ms",
    "x-slo-fallback",
    "content-type",
    "accept",
    "x-api-key",
    "authorization",
    "x-request-id",
    "traceparent",
    "anthropic-version",
    "accept-encoding",
    "range",
    "if-modified-since",
)
WORDS = (
    "0",
    "-1",
    "1e9",
    "NaN",
    "é",
    "9" * 400,
    "",
    "null",
    "true",
    "1.5",
    "a b",
    "bytes=0-,5-",
    "*/*",
    "multipart/form-data",
    "multipart/form-data; boundary=" + "b" * 99,
    "text/plain; charset=utf-7",
)


def own_heads(draw: random.Random, number: int) -> Case:
    """Headers that this server reads, with values that it cannot want."""
    path, data = right(draw)
    name = HEADS[number % len(HEADS)]
    return Case(
        "own header", (message("POST", path, data, f"{name}: {draw.choice(WORDS)}"),), whole=True
    )


PLACES = (
    "/v1/requests/{}/trace",
    "/v1/responses/{}",
    "/v1/files/{}",
    "/v1/files/{}/content",
    "/v1/batches/{}",
    "/v1/batches/{}/cancel",
    "/v1/models/{}",
    "/{}",
    "/v1/{}",
    "/v1/files?limit={}",
    "/v1/files?after={}&order={}",
    "/v1/batches?limit={}&after={}",
    "/assets/{}",
    "/metrics?{}",
    "/v1/engine/live?{}",
    "/docs/{}",
    "/openapi.json/{}",
    "/load",
    "/version",
    "/ready",
)
IDS = (
    "x",
    "..",
    "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "%00",
    "%ff%fe",
    "a" * 3000,
    "'%20OR%201=1--",
    "-1",
    "0",
    "1e9",
    "99999999999999999999",
    "%F0%9F%98%80",
    "file-0",
    "batch_0",
    "../../octavo.db",
    "*",
    "%0d%0ax:y",
)


def places(draw: random.Random, number: int) -> Case:
    """Paths, methods and queries."""
    path = PLACES[number % len(PLACES)].replace("{}", draw.choice(IDS))
    method = draw.choice(("GET", "GET", "GET", "DELETE", "POST", "PUT", "PATCH", "HEAD", "OPTIONS"))
    live = path.startswith("/v1/engine/live") and method == "GET"  # it never ends
    return Case("path", (message(method, path),), whole=not live, reads=2000 if live else None)


def form(draw: random.Random, number: int) -> Case:
    """Uploads: forms that are cut, doubled, nested, or none."""
    mark = draw.choice(("b", "b" * 70, "--", "a b", "b\x00"))
    part = f'--{mark}\r\ncontent-disposition: form-data; name="{{}}"{{}}\r\n\r\n{{}}\r\n'
    file = part.format(
        "file", '; filename="../../x\x01.jsonl"', draw.choice(("{}", "\ufeff", "x" * 90_000))
    )
    purpose = part.format("purpose", "", draw.choice(("batch", "assistants", "", "b" * 5000)))
    end = f"--{mark}--\r\n"
    body = draw.choice(
        (
            file + purpose + end,
            purpose + file + end,
            file + file + end,
            file,
            "",
            end,
            purpose * 40 + end,
            file[: number % len(file)],
            file.replace("\r\n", "\n") + end,
            part.format("x" * 70_000, "", "") + end,
            f"--{mark}\r\n\r\n\r\n" + end,
            f"--{mark}" + " " * 20_000,
        )
    ).encode()
    kind = f"content-type: multipart/form-data; boundary={mark}"
    return Case("upload", (message("POST", "/v1/files", body, kind),), whole=True)


def leaves(draw: random.Random, number: int) -> Case:
    """A client that goes away: before, in, after its request, in the queue, in mid-stream."""
    stream = {
        "stream": draw.random() < 0.7,
        "max_tokens": 200,
        "ignore_eos": True,
        "logprobs": None,
        "echo": None,
        "n": draw.choice((1, 1, 1, 3)),
    }
    prompt = "The sea " * draw.choice((1, 5, 120))
    data = json.dumps({"model": MODEL, "prompt": prompt, "temperature": 0.0} | stream).encode()
    whole = message("POST", "/v1/completions", data)
    when, rudely = number % 6, draw.random() < 0.5
    if when == 0:
        return Case("leaves at once", (), reads=0, rudely=rudely)
    if when == 1:
        at = draw.randrange(1, len(whole) - len(data))
        return Case("leaves in the head", (whole[:at],), reads=0, rudely=rudely)
    if when == 2:
        at = draw.randrange(len(whole) - len(data), len(whole))
        return Case("leaves in the body", (whole[:at], 0.01), reads=0, rudely=rudely)
    if when == 3:
        return Case("leaves in the queue", (whole,), reads=0, rudely=rudely)
    if when == 4:
        return Case("leaves later", (whole, draw.uniform(0.0, 0.4)), reads=0, rudely=rudely)
    return Case("leaves in mid-stream", (whole,), reads=draw.randrange(1, 5000), rudely=rudely)


def slow(draw: random.Random, number: int) -> Case:
    """Who reads late and little, and who sends a byte at a time."""
    many = {"n": 8, "max_tokens": 64, "logprobs": 20, "ignore_eos": True, "stream": True}
    data = json.dumps({"model": MODEL, "prompt": "The sea"} | many).encode()
    whole = message("POST", "/v1/completions", data)
    if number % 2:
        reads, seconds = draw.choice((None, 0, 9000)), draw.uniform(1.0, 3.0)
        rudely = draw.random() < 0.5
        return Case("slow reader", (whole,), reads is None, reads, seconds, rudely)
    pieces: list[bytes | float] = []
    for at in range(0, len(whole), 9):
        pieces += [whole[at : at + 9], 0.03]
    return Case("slow sender", tuple(pieces), whole=True)


MEGA = 1 << 20


def huge(draw: random.Random, number: int) -> Case:
    """Bodies of megabytes, whole and declared."""
    start, end = b'{"model": "%s", "max_tokens": 1, "prompt": ' % MODEL.encode(), b"}"
    path = draw.choice(("/v1/completions", "/tokenize", "/v1/embeddings", "/v1/responses"))
    size = draw.choice((2, 4, 8)) * MEGA
    inner = draw.choice(
        (
            lambda: b'"' + b"a" * size + b'"',
            lambda: b'"' + b"the sea " * (size // 8) + b'"',
            lambda: b"[" + b"1," * (size // 2) + b"1]",
            lambda: b"[" * (size // 2) + b"]" * (size // 2),
            lambda: b'["' + b'","' * (size // 3) + b'"]',
            lambda: b'"' + "é🙂".encode() * (size // 6) + b'"',
            lambda: b'"' + b"\\u0000" * (size // 6) + b'"',
            lambda: b"1" * size,
            lambda: b" " * size,
        )
    )()
    if number % 4 == 0:
        head = message("POST", path)[:-4].replace(
            b"content-length: 0", b"content-length: 999999999"
        )
        return Case("huge, declared", (head + b"\r\n\r\n" + start, 0.05))
    if number % 4 == 1:
        inner = b'"' + b"a" * (17 * MEGA) + b'"'
    return Case("huge", (message("POST", path, start + inner + end),), whole=True)


KINDS: tuple[tuple[Callable[[random.Random, int], Case], int], ...] = (
    (field, 560),
    (cut, 100),
    (framing, 60),
    (heads, 70),
    (own_heads, 30),
    (places, 60),
    (form, 20),
    (leaves, 80),
    (slow, 14),
    (huge, 6),
)


def cases(count: int, seed: int) -> Iterator[Case]:
    """The first `count` of a seed: all kinds, mixed, in the shares of `KINDS`."""
    turns = [make for make, share in KINDS for _ in range(share)]
    random.Random(f"hostile {seed}").shuffle(turns)
    done = dict.fromkeys((make for make, _ in KINDS), 0)
    for number in range(count):
        make = turns[number % len(turns)]
        yield make(random.Random(f"{seed} {number}"), done[make])
        done[make] += 1


RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close by a reset
