"""Load on a server: what is sent when, and what each request saw. Times are seconds.

Open loop: every request goes out when it is due, whatever became of those before it, and its times
count from then. Closed loop: so many clients, each of which sends its next request when its last
one ended. Bodies are made before the run and answers are read after it.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from octavo.benchmark import wire
from octavo.core.request import NO_SLO, Slo
from octavo.sim.workload import Item, Workload

LEAD = 0.2  # seconds before the first request
TICK = 0.02  # seconds between two looks at how late the client's own loop is
FIRST_ID = 512  # ids below are often bytes and controls
REFUSALS = (429, 503)
UNATTAINABLE = "slo_unattainable"  # where an error event says it in the midst of a stream
# Common words, each a token of its own in nearly every vocabulary.
WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city community name president team minute idea kid body information back "
    "parent face others level office door health person art war history party result change "
    "morning reason research girl guy moment air teacher force education"
).split()


@dataclass(frozen=True, slots=True)
class Ask:
    """How sizes become requests. chat: messages of words, else /v1/completions with token ids below
    `vocab`, or with words. slo_headers: whether `slo` is told to the server. salt: the same gives
    the same prompts. more: further fields of the body."""

    model: str
    chat: bool = False
    words: bool = False
    vocab: int = 8192
    ignore_eos: bool = True
    slo: Slo = NO_SLO
    slo_headers: bool = True
    api_key: str | None = None
    salt: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def headers(self) -> dict[str, str]:
        """Of every request."""
        found = {"accept": "text/event-stream"}
        if self.api_key:
            found["authorization"] = f"Bearer {self.api_key}"
        if self.slo_headers:
            for name in ("ttft", "tpot", "e2e"):
                value = getattr(self.slo, name)
                if value is not None:
                    found[f"x-slo-{name}-ms"] = f"{value * 1e3:g}"
        return found

    def body(self, item: Item, block_tokens: int) -> bytes:
        """The JSON of one request: greedy, streamed, with its usage at the end."""
        spoken = self.chat or self.words
        ids = prompt_of(item, block_tokens, self.salt, len(WORDS) if spoken else self._span)
        text = " ".join(WORDS[i] for i in ids) if spoken else ""
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": item.output,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.chat:
            fields["messages"] = [{"role": "user", "content": text}]
        else:
            fields["prompt"] = text if spoken else [FIRST_ID + i for i in ids]
        return msgspec.json.encode(fields | dict(self.more))

    @property
    def _span(self) -> int:
        return max(1, self.vocab - FIRST_ID)


def prompt_of(item: Item, block_tokens: int, salt: str, span: int) -> list[int]:
    """item.prompt numbers below `span`: each of its blocks a function of that block's identity and
    the salt alone, so that equal prefixes are equal; what no block covers is its own."""
    numbers: list[int] = []
    for identity in item.blocks:
        if len(numbers) >= item.prompt:
            break
        numbers += random.Random(f"{salt} block {identity}").choices(range(span), k=block_tokens)
    own = random.Random(f"{salt} request {item.id}")
    numbers += own.choices(range(span), k=max(0, item.prompt - len(numbers)))
    return numbers[: item.prompt]


@dataclass(frozen=True, slots=True)
class Job:
    """One request, ready to go."""

    item: Item
    message: bytes


def jobs(load: Workload, ask: Ask, target: wire.Target) -> list[Job]:
    """All requests of a workload, as bytes."""
    headers = ask.headers()
    return [
        Job(i, target.message("POST", ask.path, ask.body(i, load.block_tokens), headers))
        for i in load.items
    ]


@dataclass(slots=True)
class Run:
    """What the client saw, unread. due: of each exchange. lags: how late the loop's own ticks were;
    cpu_seconds: processor time of the client, of `wall_seconds`."""

    jobs: Sequence[Job]
    due: list[float]
    exchanges: list[wire.Exchange]
    lags: list[float]
    cpu_seconds: float
    wall_seconds: float
    start: float


Told = Callable[[int, int], None]


async def drive(
    work: Sequence[Job],
    dial: wire.Dial,
    *,
    concurrency: int | None = None,
    timeout: float = 600.0,
    told: Told = lambda *_: None,
    cpu: Callable[[], float] = time.process_time,
) -> Run:
    """Send all of `work`: each when it is due, or, with `concurrency`, by so many clients."""
    loop = asyncio.get_running_loop()
    start, spent = loop.time() + LEAD, cpu()
    due = [start + job.item.at for job in work]
    slots: list[wire.Exchange | None] = [None] * len(work)
    done = 0

    async def one(index: int) -> None:
        nonlocal done
        slots[index] = await wire.exchange(dial, work[index].message, timeout)
        done += 1

    lags: list[float] = []
    ticker = asyncio.create_task(_ticks(lags, lambda: told(done, len(work))))
    gc.collect()
    gc.disable()  # a collection over the pieces kept would look like the server's pause
    try:
        if concurrency is None:
            await _open_loop(due, one)
        else:
            await _closed_loop(start, due, one, concurrency)
    finally:
        gc.enable()
        ticker.cancel()
    told(done, len(work))
    wall = loop.time() - start + LEAD
    exchanges = [one for one in slots if one is not None]
    return Run(work, due, exchanges, lags, cpu() - spent, wall, start)


async def _open_loop(due: Sequence[float], one: Callable[[int], Awaitable[None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for index, at in enumerate(due):
            await _until(at)
            group.create_task(_plainly(one, index))


async def _closed_loop(
    start: float, due: list[float], one: Callable[[int], Awaitable[None]], clients: int
) -> None:
    numbers = iter(range(len(due)))
    now = asyncio.get_running_loop().time

    async def client() -> None:
        for index in numbers:
            due[index] = now()
            await one(index)

    await _until(start)
    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())


async def _plainly(one: Callable[[int], Awaitable[None]], index: int) -> None:
    await one(index)


async def _until(at: float) -> None:
    left = at - asyncio.get_running_loop().time()
    if left > 0:
        await asyncio.sleep(left)


async def _ticks(lags: list[float], told: Callable[[], None]) -> None:
    """How late the loop is, again and again."""
    now = asyncio.get_running_loop().time
    while True:
        at = now() + TICK
        await asyncio.sleep(TICK)
        lags.append(max(0.0, now() - at))
        told()


# ---- what each request saw ----


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request. due, begun: when it was to go, and went. times: when pieces of text came.

    prompt, cached, tokens: as the server counts them (tokens: pieces, where it does not say);
    guessed: those of the tokens that had been guessed.
    error, code: why it was not served, in the server's words and in its code. refused: by
    admission (429, 503, or told while it waited that its deadlines cannot be kept): later it might
    have been served. predicted: by the server, in seconds.
    """

    item: Item
    due: float
    begun: float
    connected: float | None
    ended: float
    times: tuple[float, ...] = ()
    status: int = 0
    error: str | None = None
    code: str | None = None
    tokens: int = 0
    prompt: int | None = None
    cached: int | None = None
    guessed: int | None = None
    finish: str | None = None
    retry_after: int | None = None
    predicted: float | None = None
    refused: bool = False

    @property
    def served(self) -> bool:
        return self.error is None and not self.refused

    @property
    def bad(self) -> bool:
        """Whether it is the request that cannot be served, now or later: 400 and its like."""
        return not (self.served or self.refused) and 400 <= self.status < 500

    @property
    def failed(self) -> bool:
        """Whether the server broke off, or did not answer."""
        return not (self.served or self.refused or self.bad)

    @property
    def lag(self) -> float:
        """Seconds that the client was late with it."""
        return self.begun - self.due

    @property
    def ttft(self) -> float | None:
        return self.times[0] - self.due if self.served and self.times else None

    @property
    def e2e(self) -> float | None:
        return self.times[-1] - self.due if self.served and self.times else None

    @property
    def tpot(self) -> float | None:
        """(E2E - TTFT) / (tokens - 1); None below two tokens."""
        if not self.served or self.tokens < 2 or not self.times:
            return None
        return (self.times[-1] - self.times[0]) / (self.tokens - 1)

    @property
    def gaps(self) -> Iterator[float]:
        """Between two pieces: ITL, where a piece is a token."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return (after - before for before, after in pairs) if self.served else iter(())

    @property
    def short(self) -> bool:
        """Whether it got fewer tokens than it asked for."""
        return self.served and self.tokens < self.item.output

    def kept(self, name: str, limit: float | None) -> bool:
        """Whether an objective (ttft, tpot or e2e) was met; below two tokens any TPOT is."""
        if not self.served:
            return False
        value = getattr(self, name)
        if value is None:
            return limit is None or name == "tpot"
        return limit is None or value <= limit

    def met(self, slo: Slo) -> bool:
        """All objectives."""
        return all(self.kept(name, getattr(slo, name)) for name in ("ttft", "tpot", "e2e"))


def outcomes(run: Run) -> list[Outcome]:
    """Read all answers of a run."""
    rows = zip(run.jobs, run.due, run.exchanges, strict=True)
    return [outcome(job.item, due, one) for job, due, one in rows]


def outcome(item: Item, due: float, one: wire.Exchange) -> Outcome:
    """Read one answer."""
    base = Outcome(item, due, one.begun, one.connected, one.ended)
    try:
        answer = wire.read(one.times, one.pieces)
        found = _streamed(answer) if answer.status == 200 else _turned_away(answer)
    except (ValueError, msgspec.DecodeError) as error:
        return replace(base, error=f"not to be read: {error}")
    fault = one.fault or (None if answer.status else "the connection ended without an answer")
    if fault is None and answer.status == 200 and not answer.whole:
        fault = "the answer broke off"
    predicted = answer.headers.get("x-octavo-predicted-ttft-ms")
    found |= {
        "status": answer.status,
        "error": fault or found.get("error"),
        "retry_after": wire.whole_number(answer.headers.get("retry-after")),
        "predicted": None if predicted is None else float(predicted) / 1e3,
    }
    return replace(base, **found)


def _turned_away(answer: wire.Answer) -> dict[str, Any]:
    """A refusal or failure in the server's words, as fields of an `Outcome`."""
    try:
        said = msgspec.json.decode(answer.content)["error"]
        message, code = said["message"], said.get("code") and str(said["code"])
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        message, code = answer.content[:200].decode("utf-8", "replace"), None
    refused = answer.status in REFUSALS
    return {"error": f"HTTP {answer.status}: {message}", "code": code, "refused": refused}


def _streamed(answer: wire.Answer) -> dict[str, Any]:
    """Fields of an `Outcome` from a stream of chunks."""
    times: list[float] = []
    found: dict[str, Any] = {}
    usage: dict[str, Any] = {}
    for at, data in wire.events(answer.body):
        if data == b"[DONE]":
            break
        message = msgspec.json.decode(data)
        if wrong := message.get("error"):
            found["error"] = str(wrong)[:200]
            found["refused"] = isinstance(wrong, dict) and wrong.get("code") == UNATTAINABLE
        usage = message.get("usage") or usage
        for choice in message.get("choices") or ():
            found["finish"] = choice.get("finish_reason") or found.get("finish")
            if _text(choice):
                times.append(at)
            elif choice.get("finish_reason") and not times:
                times.append(at)  # an only token may be half a character: it has no text
    if "error" not in found and found.get("finish") is None:
        found["error"] = "the stream ended without a finish_reason"
    details = usage.get("prompt_tokens_details") or {}
    written = usage.get("completion_tokens_details") or {}
    return found | {
        "times": tuple(times),
        "tokens": usage.get("completion_tokens") or len(times),
        "prompt": usage.get("prompt_tokens"),
        "cached": details.get("cached_tokens"),
        "guessed": written.get("accepted_prediction_tokens"),
    }


def _text(choice: dict[str, Any]) -> str:
    """What a choice of a chunk adds: text, or of a chat its content or thoughts."""
    delta = choice.get("delta") or {}
    text = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
    return str(text or delta.get("reasoning") or "")
