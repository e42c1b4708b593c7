"""A closed-loop load client for any OpenAI-compatible server: N clients, each sends its next
request when its last one ended. Prompts go as token ids to /v1/completions, greedy, streamed,
end-of-text ignored; an answer with fewer tokens than asked for makes the run void. Seconds."""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import time
from dataclasses import dataclass

import aiohttp
from workloads import Job


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@dataclass
class Outcome:
    sent: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    cached: int | None = None


async def send(http: aiohttp.ClientSession, url: str, model: str, job: Job) -> Outcome:
    """One request; raises RuntimeError if the server answers anything but a complete stream."""
    body = {
        "model": model,
        "prompt": job.prompt,
        "max_tokens": job.max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    out = Outcome(time.perf_counter())
    chunks = 0
    async with http.post(url + "/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
                continue
            now = time.perf_counter()
            message = json.loads(line[5:])
            if message.get("error"):
                raise RuntimeError(str(message["error"])[:300])
            if usage := message.get("usage"):
                out.tokens = usage["completion_tokens"]
                out.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            choices = message.get("choices") or ()
            # The last chunk counts too: an only token's text may be empty (half a character).
            if any(choice.get("text") or choice.get("finish_reason") for choice in choices):
                chunks += 1
                out.first = out.first or now
                out.last = now
    out.tokens = out.tokens or chunks
    if out.tokens != job.max_tokens:
        raise RuntimeError(f"asked for {job.max_tokens} tokens, got {out.tokens}")
    return out


async def _closed_loop(url: str, model: str, jobs: list[Job], concurrency: int) -> list[Outcome]:
    queue = iter(jobs)
    outcomes: list[Outcome] = []
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=1800)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:

        async def client() -> None:
            for job in queue:
                outcomes.append(await send(http, url, model, job))

        await asyncio.gather(*(client() for _ in range(concurrency)))
    return outcomes


def closed_loop(url: str, model: str, jobs: list[Job], concurrency: int) -> dict[str, float]:
    """Run `jobs` at `concurrency` and return output_tok_s, total_tok_s, decode_tok_s (tokens after
    the first ones, since the last first one), ttft and tpot medians."""
    started = time.perf_counter()
    cpu = time.process_time()
    outcomes = asyncio.run(_closed_loop(url, model, jobs, concurrency))
    ended, begun = max(o.last for o in outcomes), max(o.first for o in outcomes)
    wall = ended - started
    made = sum(o.tokens for o in outcomes)
    read = sum(len(job.prompt) for job in jobs)
    tpot = [(o.last - o.first) / (o.tokens - 1) for o in outcomes if o.tokens > 1]
    return {
        "output_tok_s": made / wall,
        "total_tok_s": (made + read) / wall,
        "decode_tok_s": (made - len(outcomes)) / max(ended - begun, 1e-9),
        "ttft_p50": statistics.median(o.first - o.sent for o in outcomes),
        "tpot_p50": statistics.median(tpot) if tpot else 0.0,
        "cached_tokens": float(sum(o.cached or 0 for o in outcomes)),
        "client_cpu_s": time.process_time() - cpu,
        "wall_s": wall,
    }
