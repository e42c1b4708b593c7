"""Every knob, once: frozen dataclasses whose fields are the CLI's flags, names, types and help.

Nothing here reads the environment, and nothing changes after it is made: a `None` that means
"choose for me" is resolved once, by `octavo.assembly`, and the result is printed.
"""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from octavo.errors import InvalidRequest, install

DEFAULT_MODEL = "smollm2-135m"
LOOPBACK = ("127.0.0.1", "::1", "localhost")

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{u}i": 2 ** (10 * (i + 1)) for i, u in enumerate("kmgt")}


def parse_bytes(text: str | int) -> int:
    """Bytes from "1GiB", "512 MiB", "1.5g" or a plain number. Raises `InvalidRequest`."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]?i?)b?\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise InvalidRequest(f"{text!r} is not a size; write it like 1GiB, 512MiB or 1500000000")
    return int(float(match[1]) * _UNITS[match[2]])


def show_bytes(count: float) -> str:
    """1073741824 -> "1.00 GiB"; `parse_bytes` reads it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def holds_something(path: str | os.PathLike[str]) -> int:
    """Bytes of a file that would be lost if it was written anew; 0 for what has none, as a pipe."""
    try:
        return os.stat(path).st_size if os.path.isfile(path) else 0
    except OSError:
        return 0


def knob(default: Any, text: str, **extra: Any) -> Any:
    """A field with its help. extra: short="-m", metavar="SIZE", size=True (takes 1GiB), output=True
    (a file to be written; "log": of a run, never over that of another), chats=True (of use to
    commands that chat), section="Steps" (under which --help has it, and the fields after it)."""
    return field(default=default, metadata={"help": text, **extra})


# Far above any use: what is larger is a slip of the hand, and would not fit the kernels' integers.
_MOST = {
    "kv_memory": 2**50,
    "threads": 4096,
    "max_context": 2**31 - 1,
    "max_rows": 2**16,
    "max_batch_tokens": 2**20,
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What runs, and on how much of the machine. None means: chosen from the machine, and said."""

    model: str = knob(
        DEFAULT_MODEL,
        "Named model, GGUF file, Hugging Face directory or org/name.",
        short="-m",
        section="Model and machine",
    )
    file: str | None = knob(
        None, "Take a named model's bytes from this file or folder, not from the network."
    )
    chat_template: str | None = knob(
        None,
        "Use the Jinja chat template in this file, not the model's own (which a base model lacks). "
        "BOS is what it writes: {{ bos_token }}.",
        chats=True,
    )
    kv_memory: int | None = knob(
        None,
        "Memory for the KV pool, e.g. 1GiB (default: what as many sequences of --max-context "
        "tokens need as one step computes, at most half of the memory that is free).",
        size=True,
    )
    threads: int | None = knob(None, "Compute threads (default: one per core).")
    isa: str = knob("auto", "Instruction set: auto, amx, avx512, avx2 or portable.")
    act: Literal["auto", "mixed", "pairs", "int8", "bf16", "fp32"] = knob(
        "auto",
        "Activations: int8, mixed (int8, outliers in 16 bits), pairs (16 bits throughout: exact, "
        "slower), bf16 or fp32 (for checks); auto takes mixed for narrow models, else int8.",
    )
    kv_dtype: Literal["auto", "bf16", "int8", "fp32"] = knob(
        "auto",
        "Keys and values in the KV pool: bf16, int8 (twice the tokens in the same memory, but "
        "coarser: least so for SmolLM2) or fp32; auto is bf16, or fp32 with --act fp32.",
    )
    pin: bool = knob(False, "Bind each compute thread to a core of its own.")
    max_context: int | None = knob(None, "Longest sequence in tokens (default: the model's own).")
    max_rows: int = knob(64, "Most sequences computed in one step.", section="Steps")
    max_batch_tokens: int = knob(512, "Most tokens computed in one step (prefill chunk).")
    prefix_caching: bool = knob(True, "Re-use KV blocks of prompts that begin alike.")
    policy: Literal["fcfs", "priority", "sjf", "fair", "slo", "fair-slo", "static"] = knob(
        "fcfs",
        "Who goes first. fcfs: by arrival; priority: by the request's `priority`, and age; sjf: "
        "short prompts, and age; fair: the tenant that got least; slo: by deadline, in steps no "
        "longer than the streams' slack; fair-slo: both; static: a group at a time, to compare.",
    )
    speculation: Literal["off", "auto"] = knob(
        "auto",
        "Guess tokens from earlier text and check them, where that saves time: the same tokens, "
        "sooner where text repeats itself.",
    )

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
            ok = value is None or 1 <= value <= most
            _need(ok, name, f"at least 1 and at most {most}", value)
        _need(bool(self.model), "model", "a name or a path", self.model)
        policies = get_args(get_type_hints(EngineConfig)["policy"])
        _need(self.policy in policies, "policy", " or ".join(policies), self.policy)
        known = self.speculation in ("off", "auto")
        _need(known, "speculation", "off or auto", self.speculation)


# Fields of `EngineConfig` that change nothing for some commands, which therefore do not take them.
ONE_AT_A_TIME = ("max_rows", "policy")  # nobody else is there: a conversation
ONE_ANSWER = (*ONE_AT_A_TIME, "prefix_caching")
RANKING = ("prefix_caching", "policy")  # requests alike, all there at once, with nothing cached
SCHEDULING = (*RANKING, "speculation")  # steps made by hand, or schedulers of an experiment's own


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The door: where it stands, who may enter, how many at once. Times in seconds."""

    host: str = knob(
        "127.0.0.1",
        "Address to bind; any but loopback needs --api-key-file.",
        section="Address and keys",
    )
    port: int = knob(8000, "Port to bind; 0 picks a free one.", short="-p")
    served_model_name: str | None = knob(None, "Name that clients use (default: the model's).")
    api_key_file: str | None = knob(
        None,
        "File of API keys, 16 characters or more, one a line: KEY, or NAME KEY and what it may do: "
        "tier=flex weight=2 (its share where --policy is fair) ttft=1 tpot=0.05 e2e=30 (no "
        "tighter deadlines than these, in seconds) rpm=60 tpm=20000 concurrent=4 (requests and "
        "tokens a minute, requests at once); admin (then /metrics and others' traces are for "
        "admin keys alone). # starts a comment. SIGHUP reads it again.",
    )
    tls_cert: str | None = knob(None, "Certificate chain (PEM): serve HTTPS; needs --tls-key.")
    tls_key: str | None = knob(None, "Private key of --tls-cert (PEM). SIGHUP reads both again.")
    cors_origin: tuple[str, ...] = knob(
        (),
        "Let pages of this origin use the server, e.g. https://chat.example.com; * for any, with "
        "API keys only (may be repeated).",
        metavar="ORIGIN",
    )
    timeout: float = knob(
        600.0,
        "Most seconds a request may take; x-octavo-timeout-ms asks for less.",
        section="Queue and deadlines",
    )
    max_queue: int = knob(
        256,
        "Most requests in the house, each counted from its whole body to the last byte of its "
        "answer: parsed, waiting and running; more are told when to return (503).",
    )
    slo: tuple[str, ...] = knob(
        (),
        "Deadlines in seconds for requests that name none, e.g. ttft=2,tpot=0.05 or, for one "
        "service tier, priority:ttft=0.5 (needs --policy slo or fair-slo; may be repeated). A "
        "request names its own in the headers x-slo-ttft-ms, x-slo-tpot-ms and x-slo-e2e-ms.",
        metavar="[TIER:]NAME=S,...",
    )
    max_queued_tokens: int | None = knob(
        None,
        "Most prompt tokens waiting for their first token; more are told when to return (default: "
        "any number).",
    )
    max_queued_seconds: float = knob(
        300.0, "Most seconds that the prompts which wait would take, by this machine's own speed."
    )
    max_tenant_tokens: int | None = knob(
        None, "Most tokens of one API key (or `user`) being served at once (default: any number)."
    )
    strict: bool = knob(
        False,
        "Refuse unknown fields of requests, and what they ask for beside the answer (store, "
        "prompt_cache_retention: 24h); else these are named in x-octavo-ignored.",
        section="What a request may ask for",
    )
    max_body: int = knob(16 * 2**20, "Largest request body.", size=True)
    max_output_tokens: int | None = knob(
        None,
        "Most tokens of one answer: what a request may ask for, and what one gets that asks for no "
        "number (default: what the context has room for).",
    )
    max_n: int = knob(8, "Largest `n` of one request.")
    max_prompts: int = knob(64, "Most prompts in one completions request.")
    max_inputs: int = knob(2048, "Most texts in one embeddings request.")
    max_stops: int = knob(4, "Most stop strings of one request.")
    max_logprobs: int = knob(20, "Most alternatives that log-probabilities may be asked for.")
    max_stored: int = knob(
        256, "Most responses kept in memory for each API key, for previous_response_id; 0 for none."
    )
    batch_dir: str | None = knob(
        None,
        "Keep files and batches in this directory: /v1/files and /v1/batches (default: off).",
        section="Files and batches",
    )
    max_file: int = knob(100 * 2**20, "Largest file to upload.", size=True)
    max_file_storage: int = knob(2 * 2**30, "Most bytes of files of one API key.", size=True)
    max_files: int = knob(1000, "Most files of one API key.")
    max_batch_requests: int = knob(50_000, "Most requests in one batch.")
    file_days: int = knob(30, "Days after which files are deleted.")
    max_connections: int | None = knob(
        None,
        "Most open connections (default: as many files as may be open, less some).",
        section="Connections",
    )
    max_bodies: int = knob(
        256 * 2**20, "Most bytes of bodies that are on their way, of all requests.", size=True
    )
    max_head: int = knob(64 * 2**10, "Largest head (request line and headers).", size=True)
    head_timeout: float = knob(30.0, "Seconds in which a head must have come.")
    body_timeout: float = knob(60.0, "Seconds in which a body must have come.")
    send_timeout: float = knob(60.0, "Seconds after which a client that reads nothing is dropped.")
    keepalive: float = knob(10.0, "Seconds of silence before a stream gets a comment line.")
    traces: int = knob(
        1024,
        "Latest requests of which /v1/requests/ID/trace can say why they took as long as they did "
        "(times and counts, no text).",
        section="Watching and stopping",
    )
    step_log: str | None = knob(
        None,
        "Write the latest steps' shapes and times into this new file (JSON lines) when the server "
        "ends; a disk without room for them is told of at once.",
        output="log",
    )
    vllm_metric_names: bool = knob(
        False, "In /metrics, what means the same under vLLM's names too: its dashboards work."
    )
    otel_endpoint: str | None = knob(
        None,
        "Send OpenTelemetry traces and gen_ai.server.* metrics here by OTLP over HTTP, e.g. "
        f"http://localhost:4318 (needs OpenTelemetry: {install('otel')}).",
        metavar="URL",
    )
    log_format: Literal["auto", "text", "json"] = knob(
        "auto", "Lines to read (auto: in colour on a terminal), or a JSON object each."
    )
    log_level: Literal["debug", "info", "warning", "error"] = knob(
        "info", "Least that is said; debug has requests that only look (health, metrics) too."
    )
    stall: float = knob(60.0, "Seconds without a finished step before /ready says no.")
    drain: float = knob(30.0, "Seconds that running requests get to finish on shutdown.")

    def __post_init__(self) -> None:
        _need(0 <= self.port < 65536, "port", "in [0, 65535]", self.port)
        counts = ("max_queue", "max_body", "max_n", "max_prompts", "max_file", "max_files")
        for name in (*counts, "max_inputs", "max_file_storage", "max_batch_requests", "file_days"):
            _need(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("max_queued_tokens", "max_tenant_tokens"):
            most = getattr(self, name)
            _need(most is None or most >= 1, name, "at least 1", most)
        _need(self.max_stored >= 0, "max_stored", "at least 0", self.max_stored)
        for name in ("max_output_tokens", "max_stops", "max_bodies", "max_head", "max_connections"):
            most = getattr(self, name)
            _need(most is None or most >= 1, name, "at least 1", most)
        _need(0 <= self.max_logprobs <= 20, "max_logprobs", "in [0, 20]", self.max_logprobs)
        times = ("keepalive", "stall", "timeout", "head_timeout", "body_timeout", "send_timeout")
        for name in times:
            value = getattr(self, name)
            ok = isfinite(value) and value > 0
            _need(ok, name, "a number of seconds above 0", value)
        most_seconds = self.max_queued_seconds  # infinite is no cap
        _need(most_seconds > 0, "max_queued_seconds", "above 0", most_seconds)
        _need(isfinite(self.drain) and self.drain >= 0, "drain", "at least 0", self.drain)
        _need(0 <= self.traces <= 10**6, "traces", "in [0, 1000000]", self.traces)
        both = (self.tls_cert is None) == (self.tls_key is None)
        _need(both, "tls_cert", "given together with --tls-key", self.tls_cert)
        if "*" in self.cors_origin and self.api_key_file is None:
            raise InvalidRequest(
                "--cors-origin * lets any page that anybody opens use this server: name the "
                "origins, or give --api-key-file too",
                "cors_origin",
            )
        for origin in self.cors_origin:
            named = re.fullmatch(r"\*|https?://[^/\s?#]+/?", origin) is not None
            _need(named, "cors_origin", "* or an origin such as https://example.com", origin)
        if self.host not in LOOPBACK and self.api_key_file is None:
            raise InvalidRequest(
                f"--host {self.host} is reachable from other machines: give --api-key-file too",
                "api_key_file",
            )


@dataclass(frozen=True, slots=True)
class TalkConfig:
    """How `octavo run` and `octavo chat` choose tokens."""

    system: str | None = knob(None, "System message.", short="-s", section="Answer")
    max_tokens: int | None = knob(
        None,
        "Most tokens to write; the model usually stops before (default: 1024, or what the context "
        "has room for).",
    )
    temperature: float = knob(
        0.3, "0 is greedy; 1 is the model's own distribution; 2 the most.", short="-t"
    )
    top_p: float = knob(0.95, "Keep the smallest set of tokens with this probability.")
    top_k: int = knob(0, "Keep the k likeliest tokens; 0 keeps all.")
    min_p: float = knob(0.0, "Drop tokens less likely than this share of the likeliest.")
    repetition_penalty: float = knob(1.0, "Above 1: tokens already there become less likely.")
    seed: int | None = knob(None, "Repeat a run exactly.")
    stop: tuple[str, ...] = knob((), "Text at which to stop (may be given several times).")

    def __post_init__(self) -> None:
        hot = 0 <= self.temperature <= 2  # as in the API: above it a model is all but a die
        _need(hot, "temperature", "a number in [0, 2]", self.temperature)


def _need(ok: bool, name: str, what: str, value: object) -> None:
    if not ok:
        raise InvalidRequest(f"--{name.replace('_', '-')} must be {what}, got {value!r}", name)


Config = TypeVar("Config", EngineConfig, ServerConfig, TalkConfig)


def take(cls: type[Config], flags: dict[str, Any]) -> Config:
    """Build `cls` from parsed flags, taking its own fields out of `flags`."""
    names = [item.name for item in dataclasses.fields(cls) if item.name in flags]
    return cls(**{name: flags.pop(name) for name in names})
