"""What the API costs: processor time a token, and throughput beside the same engine without it.

    python bench/serving.py                                    both models, 64 streams
    python bench/serving.py -m smollm2-135m --streams 16 --repeats 5 --json

A real `octavo serve` and, in this process, `LLM` with the same settings are given the same prompts
of random tokens in turn: 64 at once, greedy, end-of-text ignored, no guessed tokens. The server is
asked over raw sockets for streams (`octavo.benchmark.wire`); what comes is kept and read after the
run. Throughput is output tokens over the whole time, prompts included, on both sides; "while
decoding", as in `octavo bench offline`, what came after the last of the first tokens.

API us/token: processor time of the server's main thread (sockets, HTTP, JSON, text, the kernel's
part in sending) and of all its threads but the engine's, over all tokens of the run, from the first
connection to the last byte. The client shares the cores with the server: "less client" takes its
processor time out of the wall time, as if it had been spread over all cores (least) or had held up
every step (most: an engine whose threads meet at barriers waits for the slowest). Medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from served import Served

from octavo import LLM, SamplingParams
from octavo.benchmark import wire

FLAGS = ("--speculation", "off", "--kv-memory", "512MiB", "--no-prefix-caching")


@dataclass(frozen=True)
class Shape:
    """So many streams at once, prompts of so many tokens, so many tokens written."""

    streams: int
    prompt: int
    output: int

    def prompts(self, top: int, repeat: int) -> list[list[int]]:
        draw = random.Random(f"serving {repeat}")
        return [
            [draw.randrange(1000, top) for _ in range(self.prompt)] for _ in range(self.streams)
        ]

    @property
    def tokens(self) -> int:
        return self.streams * self.output


@dataclass(frozen=True)
class Run:
    """Seconds of one run over the server, and what was seen: pieces are what the client's socket
    gave at once, events the chunks that carried text; decode: tokens a second after the last first
    one."""

    wall: float
    api_cpu: float
    step_cpu: float
    client_cpu: float
    pieces: int
    events: int
    decode: float


def decoding(times: list[list[float]]) -> float:
    """Tokens a second after the last of the first tokens; times: of each stream's tokens."""
    begun, end = max(stream[0] for stream in times), max(stream[-1] for stream in times)
    return sum(at > begun for stream in times for at in stream) / (end - begun)


def offline(llm: LLM, prompts: list[list[int]], output: int) -> tuple[float, float]:
    """The same requests without a server: seconds, and tokens a second of decoding."""
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    times: list[list[float]] = [[] for _ in prompts]
    begun = time.perf_counter()
    for piece in llm.stream(prompts, params):
        times[piece.prompt_index] += [time.perf_counter()] * len(piece.token_ids)
    wall = time.perf_counter() - begun
    assert all(len(stream) == output for stream in times)
    return wall, decoding(times)


def body(path: str, model: str, prompt: list[int], output: int) -> bytes:
    asked: dict[str, Any] = {
        "model": model,
        "max_tokens": output,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    if path.endswith("chat/completions"):
        words = " ".join(f"word{token}" for token in prompt[: len(prompt) // 4])
        return json.dumps(asked | {"messages": [{"role": "user", "content": words}]}).encode()
    return json.dumps(asked | {"prompt": prompt}).encode()


async def _all(dial: wire.Dial, messages: list[bytes]) -> list[wire.Exchange]:
    return await asyncio.gather(*(wire.exchange(dial, m, 300.0) for m in messages))


def served(server: Served, path: str, bodies: list[bytes], output: int, compute: int) -> Run:
    """One run over the server. Raises RuntimeError if a stream has not all its tokens."""
    target = wire.Target.of(server.url)
    messages = [target.message("POST", path, data) for data in bodies]
    dial = wire.dialer(target)
    before, own = server.cpu(compute), time.process_time()
    begun = time.perf_counter()
    made = asyncio.run(_all(dial, messages))
    wall = time.perf_counter() - begun
    client = time.process_time() - own
    spent = server.cpu(compute) - before
    events, times = 0, []
    for one in made:
        answer = wire.read(one.times, one.pieces)
        came = [*wire.events(answer.body)]
        said = [data for _, data in came]
        times.append([at for at, _ in came[:-2]])
        if answer.status != 200 or len(said) < 2 or said[-1] != b"[DONE]":
            raise RuntimeError(f"HTTP {answer.status}: {answer.content[-300:]!r} {one.fault}")
        usage = json.loads(said[-2])["usage"]
        if usage["completion_tokens"] != output:
            raise RuntimeError(f"{usage['completion_tokens']} tokens, not {output}")
        events += len(said) - 2
    pieces = sum(len(one.pieces) for one in made)
    # Half a character has no event: its token came with the next one.
    rate = decoding(times) * output * len(made) / events
    return Run(wall, spent.loop + spent.rest, spent.steps, client, pieces, events, rate)


def measure(model: str, path: str, shape: Shape, repeats: int) -> dict[str, Any]:
    """Both sides in turn, `repeats` times."""
    cores = len(os.sched_getaffinity(0))
    runs: list[Run] = []
    plain: list[tuple[float, float]] = []
    llm = LLM(model, speculation="off", kv_memory=512 << 20, prefix_caching=False)
    compute = llm.config.threads or cores
    top = llm.assembly.door.vocab_size
    with Served(model, *FLAGS) as server:
        for repeat in range(-1, repeats):
            prompts = shape.prompts(top, repeat)
            output = shape.output if repeat >= 0 else 8  # the first one warms both up
            bodies = [body(path, model, prompt, output) for prompt in prompts]
            plain.append(offline(llm, prompts, output))
            runs.append(served(server, path, bodies, output, compute))
    return row(model, path, shape, cores, plain[1:], runs[1:])


def row(
    model: str,
    path: str,
    shape: Shape,
    cores: int,
    alone: list[tuple[float, float]],
    runs: list[Run],
) -> dict[str, Any]:
    """What the runs say, as values. Shares are of each run beside the offline one before it."""
    plain = [wall for wall, _ in alone]
    pairs = list(zip(plain, runs, strict=True))
    decodes = [run.decode / rate for (_, rate), run in zip(alone, runs, strict=True)]

    def share(held_up: float) -> float:
        return statistics.median(p / (r.wall - held_up * r.client_cpu) for p, r in pairs)

    def middle(values: list[float]) -> float:
        return statistics.median(values)

    return {
        "model": model,
        "path": path,
        **asdict(shape),
        "repeats": len(runs),
        "offline_tok_s": middle([shape.tokens / p for p in plain]),
        "served_tok_s": middle([shape.tokens / r.wall for r in runs]),
        "api_us_per_token": middle([1e6 * r.api_cpu / shape.tokens for r in runs]),
        "client_us_per_token": middle([1e6 * r.client_cpu / shape.tokens for r in runs]),
        "share": share(0.0),
        "share_less_client_least": share(1.0 / cores),
        "share_less_client_most": share(1.0),
        "decode_share": middle(decodes),
        "events_per_token": middle([r.events / shape.tokens for r in runs]),
        "pieces_per_token": middle([r.pieces / shape.tokens for r in runs]),
        "runs": [asdict(r) for r in runs],
        "offline": alone,
    }


LINES = (
    ("API, us/token", "api_us_per_token", "{:.1f}"),
    ("client, us/token", "client_us_per_token", "{:.1f}"),
    ("offline, tok/s", "offline_tok_s", "{:.0f}"),
    ("served, tok/s", "served_tok_s", "{:.0f}"),
    ("share", "share", "{:.1%}"),
    ("share while decoding", "decode_share", "{:.1%}"),
    ("less client, least", "share_less_client_least", "{:.1%}"),
    ("less client, most", "share_less_client_most", "{:.1%}"),
    ("events/token", "events_per_token", "{:.2f}"),
    ("reads/token", "pieces_per_token", "{:.2f}"),
)


def table(rows: list[dict[str, Any]]) -> None:
    made = Table(title="The API beside the engine alone", title_justify="left")
    made.add_column("")
    for one in rows:
        made.add_column(f"{one['model']}, {one['streams']} streams", justify="right")
    for words, key, form in LINES:
        made.add_row(words, *[form.format(one[key]) for one in rows])
    Console().print(made)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", default="qwen2.5-coder-0.5b,smollm2-135m")
    parser.add_argument("--path", default="/v1/completions", help="or /v1/chat/completions")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    shape = Shape(args.streams, args.prompt, args.output)
    rows = []
    for model in args.model.split(","):
        print(f"{model} ...", file=sys.stderr)
        rows.append(measure(model, args.path, shape, args.repeats))
    print(json.dumps(rows)) if args.json else table(rows)


if __name__ == "__main__":
    main()
