"""A small server that behaves, but for the faults that it is given: one a check, of its name.

It shares no line with the server of the house. A model it has not: words follow from the prompt,
by a hash; a character may be cut in two between them.
"""

from __future__ import annotations

import base64
import codecs
import contextlib
import hashlib
import json
import random
import re
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "key-of-the-fake-server"
CONTEXT = 600
MOST_LIVE = 110
LONG_WORDS = ("Count", "story", "numbers", "Story")
SLOW = 400  # max_tokens from which on a request takes its time
CHAT_FIELDS = {
    "model", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "n",
    "stream", "stream_options", "stop", "seed", "presence_penalty", "frequency_penalty",
    "logit_bias", "logprobs", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls",
    "response_format", "user", "prompt", "echo",
}  # fmt: skip
PROBES = ("/health",)


class Refused(Exception):
    def __init__(self, status: int, message: str, param: str | None = None, code: str = "bad"):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


def words(key: str, count: int) -> list[bytes]:
    mark = f"{digest(key) % 256:02x}"
    return [f" {mark}{i:03d}".encode() for i in range(count)]


class Job:
    """A checked body of chat or completions."""

    def __init__(self, fake: Fake, body: dict[str, Any], chat: bool) -> None:
        self.fake, self.body, self.chat = fake, body, chat
        self.stream = bool(body.get("stream"))
        self.n = body.get("n") or 1
        self.prompt = "" if chat else body["prompt"]
        self.stops = body.get("stop") or []
        self.stops = [self.stops] if isinstance(self.stops, str) else self.stops
        if chat:
            texts = [fake.text_of(message) for message in body["messages"]]
            self.prompt = "\n".join(text for text in texts if text is not None)
            self.num_prompt = len(self.prompt.split()) + 5 * len(texts)
        else:
            self.num_prompt = len(str(self.prompt).split())
        if fake.has("no-silent-truncation"):
            self.num_prompt = min(self.num_prompt, 200)
        self.most = self.limit()

    def limit(self) -> int:
        body, fake = self.body, self.fake
        most = body.get("max_tokens")
        if body.get("max_completion_tokens") is not None and not fake.has("max-tokens"):
            most = body["max_completion_tokens"]
        if most is None and not self.chat:
            most = 64 if fake.has("completions-default-16") else 16
        if most is None and fake.has("chat-unbounded"):
            most = 128
        return CONTEXT - 10 if most is None else most

    # ---- the model ----

    def tokens(self, prompt: str, choice: int) -> list[bytes]:
        """All that the model would write, the end not among it."""
        body, fake = self.body, self.fake
        if "🙂" in prompt:
            data = "🙂🎉é".encode() * 6
            return [data[i : i + 3] for i in range(0, len(data), 3)]
        bias = body.get("logit_bias")
        if bias and not fake.has("logit-bias"):
            return [b" tok" + next(iter(bias)).encode()] * CONTEXT
        key = prompt
        if body.get("temperature", 1) > 0:
            seed = None if fake.has("seed-repeats") else body.get("seed")
            seed = random.random() if seed is None else seed
            key += f"|{seed}|{0 if fake.has('choices-differ') else choice}"
        if fake.has("greedy-repeats"):
            key += str(random.random())
        long = not self.chat or any(word in prompt for word in LONG_WORDS)
        return words(key, CONTEXT if long else 8)

    def write(self, prompt: str, choice: int) -> tuple[list[str], str, list[bytes]]:
        """(pieces of text as they may be sent, finish reason, tokens)."""
        fake, pieces, taken = self.fake, [], []
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        held, finish = "", "stop"
        for token in self.tokens(prompt, choice):
            if len(taken) == self.most:
                finish = "length"
                break
            taken.append(token)
            broken = fake.has("no-broken-characters")
            held += token.decode("utf-8", "replace") if broken else decoder.decode(token)
            at = min((held.find(stop) for stop in self.stops if stop in held), default=-1)
            if at >= 0 and not fake.has("stop-strings"):
                pieces.append(held[:at])
                held = ""
                break
            keep = self.keep(held)
            pieces.append(held[: len(held) - keep])
            held = held[len(held) - keep :]
        else:
            if fake.has("no-control-tokens"):
                held += "<|im_end|>"
        pieces.append(held + decoder.decode(b"", finish == "stop"))
        if fake.has("length-reason"):
            finish = "stop"
        return [piece for piece in pieces if piece], finish, taken

    def keep(self, held: str) -> int:
        """Characters that may be the beginning of a stop."""
        if self.fake.has("stop-not-streamed"):
            return 0
        if self.fake.has("stop-holds-little") and self.stops:
            return min(len(held), max(map(len, self.stops)) - 1)
        sizes = [
            size
            for stop in self.stops
            for size in range(1, min(len(held), len(stop)) + 1)
            if held.endswith(stop[:size])
        ]
        return max(sizes, default=0)

    # ---- its answer ----

    def logged(self, tokens: list[bytes]) -> dict[str, Any]:
        """Chat's logprobs."""
        items = []
        for i, token in enumerate(tokens):
            item = self.entry(token, -0.5)
            shift = 1 if self.fake.has("logprobs-position") else 0
            best = tokens[(i + shift) % len(tokens)]
            tops = [
                self.entry(best, -0.5 + 0.3 * shift),
                *(self.entry(b"zz", -3.0 - k) for k in range(20)),
            ]
            items.append(item | {"top_logprobs": tops[: self.body.get("top_logprobs") or 0]})
        return {"content": items, "refusal": None}

    def entry(self, token: bytes, logprob: float) -> dict[str, Any]:
        found = {"token": token.decode("utf-8", "replace"), "logprob": logprob}
        return found if self.fake.has("logprobs-shape") else found | {"bytes": list(token)}

    def old_logged(self, tokens: list[str], scores: list[float | None], at: int) -> dict[str, Any]:
        """Completions' logprobs; at: characters before."""
        offsets = []
        for token in tokens:
            offsets.append(at)
            at += len(token)
        tops = [None if s is None else {t: s} for t, s in zip(tokens, scores, strict=True)]
        found: dict[str, Any] = {
            "tokens": tokens, "token_logprobs": scores, "top_logprobs": tops,
            "text_offset": offsets,
        }  # fmt: skip
        if self.stream and self.fake.has("completions-logprobs"):
            del found["text_offset"]
        return found

    def calls(self) -> list[dict[str, Any]] | None:
        """The tool calls of the answer, if it has any."""
        body = self.body
        if not body.get("tools") or body.get("tool_choice") in (None, "auto"):
            return None
        if body["tool_choice"] == "required" and self.fake.has("tool-choice-required"):
            return None
        if body["tool_choice"] == "none" and not self.fake.has("tool-choice-none"):
            return None
        cities = ["Paris", "Rome"] if "Rome" in self.prompt else ["Paris"]
        name = body["tools"][0]["function"]["name"]
        return [
            {"id": f"call_{random.getrandbits(64):x}", "type": "function",
             "function": {"name": name, "arguments": json.dumps({"city": city})}}
            for city in cities
        ]  # fmt: skip

    def formatted(self) -> list[str] | None:
        """The text of structured output, in pieces."""
        wanted = (self.body.get("response_format") or {}).get("type")
        if wanted == "json_schema":
            text = '{"name": "Ann", "age": 7}'
            return ["Here it is: ", text] if self.fake.has("json-schema") else [text[:9], text[9:]]
        if wanted == "json_object":
            return ["[1]"] if self.fake.has("json-object") else ['{"a": ', "1}"]
        return None

    def usage(self, count: int, cached: int) -> dict[str, Any]:
        fake, prompt = self.fake, self.num_prompt
        count += int(self.stream and fake.has("stop-token-counted-once"))
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": count,
            "total_tokens": prompt + count + int(fake.has("usage-adds-up")),
        }
        if cached or not fake.has("cached-tokens"):
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if not fake.has("reasoning-tokens"):
            usage["completion_tokens_details"] = {"reasoning_tokens": 0}
        return usage


class Fake:
    """The server. `url` while it stands; `faults`: names of checks that it must fail. takes: a
    path, a field and a value out of its range that it takes all the same."""

    def __init__(self, *faults: str, takes: tuple[str, str, float] | None = None) -> None:
        self.faults = set(faults)
        self.takes = takes
        self.live = 0
        self.lock = threading.Lock()
        self.prefill = threading.Lock()
        self.seen: set[str] = set()
        self.files: dict[str, dict[str, Any]] = {}
        self.contents: dict[str, bytes] = {}
        self.batches: dict[str, dict[str, Any]] = {}
        self.responses: set[str] = set()
        self.url = ""

    def has(self, fault: str) -> bool:
        return fault in self.faults

    @contextlib.contextmanager
    def standing(self) -> Iterator[Fake]:
        server = Server(("127.0.0.1", 0), Handler)
        server.fake = self
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    # ---- what is asked ----

    def text_of(self, message: dict[str, Any]) -> str | None:
        content = message.get("content")
        if message["role"] == "developer" and self.has("developer-role"):
            return None
        if content is None:
            if self.has("null-content-history"):
                raise Refused(400, "content is required", "messages")
            return "call"
        if isinstance(content, list):
            if self.has("content-parts"):
                return json.dumps(content)
            return "".join(part["text"] for part in content)
        return content

    def checked(self, body: Any, chat: bool) -> None:
        """Raises `Refused` for what is wrong."""
        if not isinstance(body, dict):
            raise Refused(400, "the body must be an object")
        if body.get("model") != "fake":
            status, code = (400, "bad") if self.has("unknown-model") else (404, "model_not_found")
            raise Refused(status, "no such model", "model", code)
        path = "/v1/chat/completions" if chat else "/v1/completions"
        for name, ok in self.rules(body, chat):
            if not ok and self.takes != (path, name, body.get(name)):
                param = None if self.has("bad-values-named") else name
                raise Refused(400, f"{name} is wrong", param)
        schema = (body.get("response_format") or {}).get("json_schema")
        if schema and not self.has("bad-schema"):
            inner = schema["schema"]
            if inner.get("type") not in ("object", None) or inner.get("properties") == 7:
                raise Refused(400, "the schema is none", "response_format")
            if "$ref" in inner:
                raise Refused(400, "no such reference", "response_format")

    def ranged(self, path: str, body: dict[str, Any], most: float) -> None:
        """Raises `Refused` for a temperature out of its range."""
        heat = body.get("temperature", 0)
        if not 0 <= heat <= most and self.takes != (path, "temperature", heat):
            raise Refused(400, f"temperature is at most {most}", "temperature")

    def rules(self, body: dict[str, Any], chat: bool) -> Iterator[tuple[str, bool]]:
        def number(name: str, low: float, high: float) -> tuple[str, bool]:
            value = body.get(name)
            kinds = isinstance(value, int | float) and not isinstance(value, bool)
            return name, value is None or (kinds and low <= value <= high)

        def whole(name: str, low: int, high: int) -> tuple[str, bool]:
            value = body.get(name)
            return name, value is None or (type(value) is int and low <= value <= high)

        lowest = -9 if self.has("bad-values-refused") else 0
        yield number("temperature", lowest, 2)
        yield number("top_p", 0, 1)
        yield number("presence_penalty", -2, 2)
        yield number("frequency_penalty", -2, 2)
        yield whole("n", 1, 10**9 if self.has("n-limit") else 8)
        yield whole("max_tokens", 1, 10**9)
        yield whole("seed", -(2**63), 2**63)
        yield "stream", isinstance(body.get("stream", False), bool)
        bias = body.get("logit_bias") or {}
        yield "logit_bias", all(key.isdecimal() for key in bias)
        stop = body.get("stop")
        stops = stop if isinstance(stop, list) else [stop or ""]
        yield "stop", len(stops) <= 4 and all(isinstance(one, str) for one in stops)
        if chat:
            messages = body.get("messages")
            roles = ("system", "developer", "user", "assistant", "tool")
            ok = isinstance(messages, list) and bool(messages)
            yield "messages", ok and all(m.get("role") in roles for m in messages)
            most = 99 if self.has("logprobs-limits") else 20
            yield whole("top_logprobs", 0, most)
            yield "top_logprobs", bool(body.get("logprobs")) or body.get("top_logprobs") is None

    def admit(self, body: dict[str, Any], chat: bool) -> Job:
        self.checked(body, chat)
        if self.has("n-limit"):
            body["n"] = min(body.get("n") or 1, 8)
        job = Job(self, body, chat)
        asked = body.get("max_completion_tokens") or body.get("max_tokens") or 0
        if (chat and job.num_prompt > CONTEXT) or len(job.prompt) > 10 * CONTEXT:
            status = 500 if self.has("overflow-400") and not job.stream else 400
            text = f"{job.num_prompt} tokens do not fit {CONTEXT}"
            raise Refused(status, text, "messages", "context_length_exceeded")
        if asked > 10 * CONTEXT:
            status = 500 if self.has("overflow-with-output") else 400
            text = f"{job.num_prompt} + {asked} tokens do not fit {CONTEXT}"
            raise Refused(status, text, "max_tokens", "context_length_exceeded")
        return job


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024
    fake: Fake

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that leave are none."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    @property
    def fake(self) -> Fake:
        return self.server.fake

    # ---- answers ----

    def send(self, status: int, body: bytes, kind: str = "application/json", **more: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in more.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def reply(self, value: Any, status: int = 200, **more: str) -> None:
        self.send(status, json.dumps(value).encode(), **more)

    def refuse(self, error: Refused, **more: str) -> None:
        code: Any = error.status if self.fake.has("error-envelope") else error.code
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        told = {"message": str(error), "type": kind, "param": error.param, "code": code}
        self.reply({"error": told}, error.status, **more)

    def open_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def piece(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def event(self, value: Any, name: str = "") -> None:
        head = f"event: {name}\n" if name else ""
        end = "\n" if self.fake.has("sse-lines") else "\n\n"
        text = value if isinstance(value, str) else json.dumps(value)
        self.piece(f"{head}data: {text}{end}".encode())

    # ---- the door ----

    def do_GET(self) -> None:
        self.route("GET")

    def do_POST(self) -> None:
        self.route("POST")

    def do_DELETE(self) -> None:
        self.route("DELETE")

    def route(self, method: str) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path
        try:
            self.enter(path)
            for pattern, methods in ROUTES.items():
                found = re.fullmatch(pattern, path)
                if found:
                    if method not in methods:
                        raise Refused(405, "wrong method", code="method_not_allowed")
                    methods[method](self, data, *found.groups())
                    return
            if self.fake.has("unknown-path"):
                self.send(404, b"Not Found", "text/plain")
                return
            raise Refused(404, f"{path} is not here", code="not_found")
        except Refused as error:
            self.refuse(error)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def enter(self, path: str) -> None:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        given = self.headers.get("x-api-key", given) or given
        open_ = path in PROBES or (path == "/metrics" and self.fake.has("key-everywhere"))
        if given != KEY and not open_:
            raise Refused(401, "wrong key", code="invalid_api_key")

    def body(self, data: bytes) -> Any:
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            status = 500 if self.fake.has("bad-json") else 400
            raise Refused(status, "the body is no JSON") from None

    # ---- small endpoints ----

    def models(self, _: bytes) -> None:
        model = {"id": "fake", "object": "model", "created": 1, "owned_by": "nobody"}
        model["max_model_len"] = CONTEXT
        if self.fake.has("models-list"):
            del model["owned_by"]
        self.reply({"object": "list", "data": [model]})

    def metrics(self, _: bytes) -> None:
        self.send(200, f"octavo_requests_running {self.fake.live}\n".encode(), "text/plain")

    # ---- chat and completions ----

    def chat(self, data: bytes) -> None:
        self.generate(self.body(data), True)

    def completions(self, data: bytes) -> None:
        self.generate(self.body(data), False)

    def generate(self, body: Any, chat: bool) -> None:
        fake = self.fake
        if isinstance(body, dict):
            late = fake.has("overflow-before-stream") and body.get("stream") is True
            try:
                job = fake.admit(body, chat)
            except Refused as error:
                if not (late and error.code == "context_length_exceeded"):
                    raise
                self.open_stream()
                self.event({"error": {"message": str(error)}})
                self.piece(b"")
                return
        else:
            raise Refused(400, "the body must be an object")
        with fake.lock:
            full = fake.live >= MOST_LIVE
            fake.live += not full
        if full:
            retry = {} if fake.has("overload") else {"Retry_After": "2"}
            self.refuse(Refused(503, "full", code="server_overloaded"), **retry)
            return
        try:
            self.served(job)
        finally:
            with fake.lock:
                fake.live -= 1

    def served(self, job: Job) -> None:
        unknown = sorted(set(job.body) - CHAT_FIELDS)
        said = {"x_ignored": ",".join(unknown)} if unknown else {}
        if self.fake.has("unknown-field-said"):
            said = {}
        if job.stream:
            self.streamed(job)
        elif job.body.get("max_tokens", 0) >= SLOW and not self.slowly(job):
            return
        else:
            self.reply(self.whole(job), **said)

    def slowly(self, job: Job) -> bool:
        """Take some seconds; false if the client left, unless that is not seen."""
        fake = self.fake
        deaf = fake.has("disconnect-stream" if job.stream else "disconnect-whole")
        crowd = fake.has("disconnect-crowd") and fake.live > 8
        for _ in range(400):
            time.sleep(0.01)
            if not deaf and not crowd and self.left():
                return False
        return True

    def left(self) -> bool:
        ready, _, _ = select.select([self.connection], [], [], 0)
        try:
            return bool(ready) and not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def cached(self, job: Job) -> int:
        with self.fake.lock:
            known = str(job.prompt) in self.fake.seen
            self.fake.seen.add(str(job.prompt))
        return job.num_prompt // 2 if known and job.num_prompt > 60 else 0

    def head(self, job: Job, kind: str) -> dict[str, Any]:
        finger = random.random() if self.fake.has("system-fingerprint") else "fp_fake"
        return {
            "id": f"id-{random.getrandbits(64):x}", "object": kind, "created": int(time.time()),
            "model": "fake", "system_fingerprint": str(finger),
        }  # fmt: skip

    def whole(self, job: Job) -> dict[str, Any]:
        cached = self.cached(job)
        choices, count = self.chat_choices(job) if job.chat else self.text_choices(job)
        kind = "chat.completion" if job.chat else "text_completion"
        if self.fake.has("chat-shape"):
            kind += "s"
        return self.head(job, kind) | {"choices": choices, "usage": job.usage(count, cached)}

    def chat_choices(self, job: Job) -> tuple[list[dict[str, Any]], int]:
        fake, choices, counts = self.fake, [], []
        for index in range(job.n):
            calls, formatted = job.calls(), job.formatted()
            pieces, finish, tokens = job.write(job.prompt, index)
            message: dict[str, Any] = {"role": "assistant", "content": "".join(pieces)}
            if formatted is not None:
                message["content"], finish = "".join(formatted), "stop"
            if calls is not None:
                message["content"] = "" if fake.has("tool-content-null") else None
                if fake.has("tool-arguments"):
                    for call in calls:
                        call["function"]["arguments"] = {"city": "Paris"}
                message["tool_calls"], finish = calls, "tool_calls"
            logged = job.logged(tokens) if job.body.get("logprobs") else None
            choices.append(
                {"index": index, "message": message, "logprobs": logged, "finish_reason": finish}
            )
            counts.append(len(tokens))
        return choices, counts[0] if fake.has("n-choices") else sum(counts)

    def text_choices(self, job: Job) -> tuple[list[dict[str, Any]], int]:
        fake, choices, count = self.fake, [], 0
        for index, prompt in enumerate(self.prompts(job)):
            pieces, finish, tokens = job.write(prompt, index)
            text = "".join(pieces)
            if job.body.get("echo") and not fake.has("echo"):
                text = prompt + text
            choice = {"text": text, "index": index, "finish_reason": finish}
            if not fake.has("completion-shape"):
                choice["logprobs"] = self.old(job, prompt, tokens)
            choices.append(choice)
            count += len(tokens)
        return choices, count

    def prompts(self, job: Job) -> list[str]:
        given = job.body["prompt"]
        if isinstance(given, str):
            return [given]
        if all(type(item) is int for item in given):
            return [str(given)]
        return given[:1] if self.fake.has("completion-prompts") else given

    def old(self, job: Job, prompt: str, tokens: list[bytes]) -> dict[str, Any] | None:
        if job.body.get("logprobs") is None:
            return None
        texts = [token.decode() for token in tokens]
        scores: list[float | None] = [-0.5] * len(texts)
        if job.body.get("echo") and not self.fake.has("echo-logprobs"):
            before = re.findall(r" ?\w+", prompt)
            return job.old_logged(before + texts, [None, *([-1.0] * (len(before) - 1)), *scores], 0)
        return job.old_logged(texts, scores, 0)

    # ---- streams ----

    def streamed(self, job: Job) -> None:
        self.open_stream()
        if "once" in job.prompt:
            self.queue()
        if job.body.get("max_tokens", 0) >= SLOW and not self.slowly(job):
            return
        fake, cached = self.fake, self.cached(job)
        head = self.head(job, "chat.completion.chunk" if job.chat else "text_completion")
        wanted = (job.body.get("stream_options") or {}).get("include_usage")
        count = 0
        for index in range(job.n):
            for choice in self.deltas(job, index):
                if fake.has("stream-finish-reason") and choice["finish_reason"] is None:
                    del choice["finish_reason"]
                chunk = head | {"choices": [choice]} | ({"usage": None} if wanted else {})
                if fake.has("stream-chunks-alike"):
                    chunk["id"] = f"id-{random.getrandbits(64):x}"
                self.event(chunk)
                count += 1
                if fake.has("stream-ends-honestly") and count > 3 and job.body["temperature"] > 1:
                    self.piece(b"")
                    return
        counts = [len(job.write(str(job.prompt), index)[2]) for index in range(job.n)]
        usage = head | {"choices": [], "usage": job.usage(sum(counts), cached)}
        if fake.has("stream-usage-chunk"):
            del usage["choices"]
        if wanted or fake.has("stream-no-usage-unasked"):
            self.event(usage)
        for _ in range(2 if fake.has("stream-done-once") else 1):
            self.event("[DONE]")
        self.piece(b"")

    def queue(self) -> None:
        """Prefills go one after the other; who waits is told that it lives."""
        while not self.fake.prefill.acquire(timeout=0.1):
            if not self.fake.has("stream-keepalive"):
                self.piece(b": wait\n\n")
        try:
            time.sleep(0.3)
        finally:
            self.fake.prefill.release()

    def deltas(self, job: Job, index: int) -> Iterator[dict[str, Any]]:
        fake, calls, formatted = self.fake, job.calls(), job.formatted()
        pieces, finish, tokens = job.write(str(job.prompt), index)
        if fake.has("stream-equals-whole"):
            pieces[0] = pieces[0].lstrip()
        if not job.chat:
            yield from self.old_deltas(job, pieces, finish, tokens)
            return
        role = {"role": "assistant"}

        def choice(delta: dict[str, Any], reason: str | None = None, logged: Any = None) -> Any:
            if fake.has("stream-role-first"):
                delta = role | delta
            return {"index": index, "delta": delta, "logprobs": logged, "finish_reason": reason}

        yield choice(role | {"content": ""})
        if calls is not None:
            for delta in self.call_deltas(calls):
                yield choice({"tool_calls": [delta]})
            yield choice({}, "stop" if fake.has("tool-finish-reason") else "tool_calls")
            return
        if formatted is not None:
            pieces, finish = formatted, "stop"
        logged = job.logged(tokens) if job.body.get("logprobs") else None
        for piece in pieces:
            yield choice({"content": piece}, None, logged)
            logged = None
        yield choice({}, finish)

    def call_deltas(self, calls: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for number, call in enumerate(calls):
            index = 0 if self.fake.has("tool-indexes") else number
            function = {"name": call["function"]["name"], "arguments": ""}
            opening = {"index": index, "id": call["id"], "type": "function", "function": function}
            if self.fake.has("tool-first-delta"):
                del opening["id"]
            yield opening
            text = call["function"]["arguments"]
            for part in (text[:4], text[4:]):
                yield {"index": index, "function": {"arguments": part}}

    def old_deltas(
        self, job: Job, pieces: list[str], finish: str, tokens: list[bytes]
    ) -> Iterator[dict[str, Any]]:
        logged = self.old(job, str(job.prompt), tokens)
        for number, piece in enumerate(pieces):
            found = logged if number == 0 else None
            yield {"index": 0, "text": piece, "logprobs": found, "finish_reason": None}
        yield {"index": 0, "text": "", "logprobs": None, "finish_reason": finish}

    # ---- embeddings, responses, messages ----

    def embeddings(self, data: bytes) -> None:
        body = self.body(data)
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        found: list[Any] = []
        for index, text in enumerate(texts):
            vector = [digest(text + str(i)) / 2**48 for i in range(8)]
            if body.get("encoding_format") == "base64":
                if self.fake.has("embeddings"):
                    vector = vector[::-1]
                packed = base64.b64encode(struct.pack("<8f", *vector)).decode()
                found.append({"object": "embedding", "index": index, "embedding": packed})
            else:
                found.append({"object": "embedding", "index": index, "embedding": vector})
        usage = {"prompt_tokens": len(texts), "total_tokens": len(texts)}
        self.reply({"object": "list", "data": found, "model": "fake", "usage": usage})

    def response(self, data: bytes) -> None:
        body = self.body(data)
        self.fake.ranged("/v1/responses", body, 2)
        part = {"type": "output_text", "text": "Hi there.", "annotations": []}
        message = {"type": "message", "role": "assistant", "content": [part], "id": "msg_1"}
        total = 6 if self.fake.has("responses") else 5
        usage = {"input_tokens": 3, "output_tokens": 2, "total_tokens": total}
        self.fake.responses.add(id := f"resp_{random.getrandbits(64):x}")
        whole = {"id": id, "object": "response", "status": "completed",
                 "output": [message], "usage": usage}  # fmt: skip
        if not body.get("stream"):
            self.reply(whole)
            return
        self.open_stream()
        events = [
            {"type": "response.created", "response": whole},
            {"type": "response.output_text.delta", "delta": "Hi "},
            {"type": "response.output_text.delta", "delta": "there."},
            {"type": "response.output_text.done", "text": "Hi there."},
            {"type": "response.completed", "response": whole},
        ]
        for number, event in enumerate(events):
            gap = number > 2 and self.fake.has("responses-stream")
            self.event(event | {"sequence_number": number + gap}, str(event["type"]))
        self.piece(b"")

    def forget(self, _: bytes, id: str) -> None:
        self.fake.responses.discard(id)
        self.reply({"id": id, "object": "response", "deleted": True})

    def messages(self, data: bytes) -> None:
        body = self.body(data)
        self.fake.ranged("/v1/messages", body, 1)
        reason = "stop" if self.fake.has("messages") else "end_turn"
        whole = {
            "id": "msg_1", "type": "message", "role": "assistant", "model": "fake",
            "content": [{"type": "text", "text": "Hi."}], "stop_reason": reason,
            "usage": {"input_tokens": 4, "output_tokens": 2},
        }  # fmt: skip
        if not body.get("stream"):
            self.reply(whole)
            return
        kinds = ["message_start", "content_block_start", "content_block_delta",
                 "content_block_stop", "message_delta", "message_stop"]  # fmt: skip
        if self.fake.has("messages-stream"):
            kinds.remove("message_delta")
        self.open_stream()
        for kind in kinds:
            self.event({"type": kind}, kind)
        self.piece(b"")

    def count_tokens(self, _: bytes) -> None:
        self.reply({"input_tokens": 4})

    # ---- files and batches ----

    def upload(self, data: bytes) -> None:
        mark = self.headers["Content-Type"].partition("boundary=")[2].encode()
        parts = data.split(b"--" + mark)
        content = next(part for part in parts if b"filename=" in part)
        content = content.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n")
        if self.fake.has("files"):
            content = content.replace(b"\r\n", b"\n")
        self.reply(self.keep(content, "in.jsonl", "batch"))

    def keep(self, content: bytes, name: str, purpose: str) -> dict[str, Any]:
        id = f"file-{random.getrandbits(64):x}"
        self.fake.contents[id] = content
        self.fake.files[id] = {
            "id": id, "object": "file", "bytes": len(content), "created_at": 1,
            "filename": name, "purpose": purpose, "status": "processed",
        }  # fmt: skip
        return self.fake.files[id]

    def list_files(self, _: bytes) -> None:
        self.reply({"object": "list", "data": list(self.fake.files.values()), "has_more": False})

    def file(self, _: bytes, id: str) -> None:
        if id not in self.fake.files:
            raise Refused(404, "no such file", code="not_found")
        self.reply(self.fake.files[id])

    def delete(self, _: bytes, id: str) -> None:
        self.fake.files.pop(id, None)
        self.reply({"id": id, "object": "file", "deleted": True})

    def content(self, _: bytes, id: str) -> None:
        self.send(200, self.fake.contents[id], "application/octet-stream")

    def make_batch(self, data: bytes) -> None:
        body = self.body(data)
        good, bad = [], []
        for text in self.fake.contents[body["input_file_id"]].splitlines():
            line = json.loads(text)
            found: dict[str, Any] = {"custom_id": line["custom_id"], "error": None}
            try:
                answer: Any = self.whole(self.fake.admit(line["body"], True))
                good.append(found | {"response": {"status_code": 200, "body": answer}})
            except Refused as error:
                answer = {"error": {"message": str(error)}}
                bad.append(found | {"response": {"status_code": 400, "body": answer}})
        if self.fake.has("batches"):
            good.append(good[0])
        files = [
            self.keep("\n".join(map(json.dumps, lines)).encode(), "out", "batch_output")["id"]
            for lines in (good, bad)
        ]
        counts = {"total": len(good) + len(bad), "completed": len(good), "failed": len(bad)}
        batch = {"id": "batch_1", "object": "batch", "status": "completed",
                 "request_counts": counts, "output_file_id": files[0],
                 "error_file_id": files[1]}  # fmt: skip
        self.fake.batches["batch_1"] = batch
        self.reply(batch)

    def batch(self, _: bytes, id: str) -> None:
        self.reply(self.fake.batches[id])

    def list_batches(self, _: bytes) -> None:
        self.reply({"object": "list", "data": list(self.fake.batches.values())})


ROUTES: dict[str, dict[str, Any]] = {
    r"/v1/models": {"GET": Handler.models},
    r"/metrics": {"GET": Handler.metrics},
    r"/v1/chat/completions": {"POST": Handler.chat},
    r"/v1/completions": {"POST": Handler.completions},
    r"/v1/embeddings": {"POST": Handler.embeddings},
    r"/v1/responses": {"POST": Handler.response},
    r"/v1/responses/([^/]+)": {"DELETE": Handler.forget},
    r"/v1/messages": {"POST": Handler.messages},
    r"/v1/messages/count_tokens": {"POST": Handler.count_tokens},
    r"/v1/files": {"POST": Handler.upload, "GET": Handler.list_files},
    r"/v1/files/([^/]+)": {"GET": Handler.file, "DELETE": Handler.delete},
    r"/v1/files/([^/]+)/content": {"GET": Handler.content},
    r"/v1/batches": {"POST": Handler.make_batch, "GET": Handler.list_batches},
    r"/v1/batches/([^/]+)": {"GET": Handler.batch},
}
