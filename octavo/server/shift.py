"""The shift that works batches off: reads their files, serves their requests, writes the results.

A request of a batch goes through the same door as one over HTTP: the endpoint's own parser, the
same `Exchange` and the same answer, into memory instead of a socket. It is of `Tier.BATCH`, so the
scheduler puts everybody else first (`core.offline`); here it is only seen to that batches never
hold more than half of the rows and half of the KV pool. Requests without a seed get one of their
batch and line: a request that is served again after a restart gives the same text.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import msgspec
from starlette.types import Message

from octavo.core.request import NO_SLO, Tier
from octavo.core.request import Request as EngineRequest
from octavo.errors import EngineError, Overloaded, TenantLimit, Unsupported
from octavo.server.auth import Key
from octavo.server.chat import chat_job
from octavo.server.completions import completion_job
from octavo.server.embeddings import embeddings_job
from octavo.server.exchange import Exchange, Job
from octavo.server.generate import Parse, Visit, parsed
from octavo.server.ledger import Ledger, seconds_now
from octavo.server.meters import Lease
from octavo.server.problems import envelope
from octavo.server.responses import Responses
from octavo.server.responses_store import Shelf
from octavo.server.service import Service
from octavo.server.store import Batch, Row, Settled, Store

log = logging.getLogger("octavo.batches")

ENDPOINTS: dict[str, Parse] = {
    "/v1/chat/completions": chat_job,
    "/v1/completions": completion_job,
    "/v1/embeddings": embeddings_job,
    "/v1/responses": Responses(Shelf(0)).job,  # their results are in the file: none is kept
}
AHEAD = 64  # rows of a batch that are fetched at once
EXPECTED = 512  # tokens of output that room is kept for, if more may come
LOOK = 5.0  # seconds after which deadlines are looked at, if nothing happens
PLACES = 0.2  # seconds after which a key that may have no more requests is looked at again
TRY_AGAIN = 5.0  # after a fault of ours


class Later(Exception):
    """The request was not served for a reason that is not its own."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class Pauses:
    """Until when each batch is left alone: what holds up one holds up no other."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def set(self, id: str, until: float) -> None:
        """A pause grows, it never shrinks."""
        self._until[id] = max(until, self._until.get(id, until))

    def over(self, id: str, now: float) -> bool:
        return self._until.get(id, now) <= now

    def drop(self, id: str) -> None:
        self._until.pop(id, None)

    def soonest(self, now: float) -> float:
        """Seconds until the next one ends; infinite if there is none."""
        return min((until - now for until in self._until.values() if until > now), default=inf)


class Inbox:
    """The side of an exchange where a socket would be; its client never leaves by itself."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self._never = asyncio.Event()

    async def receive(self) -> Message:
        await self._never.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message["body"]


@dataclass(slots=True)
class Room:
    """What batches may hold at once, and what they hold: sequences, and tokens of the KV pool."""

    rows: int
    tokens: int
    held_rows: int = 0
    held_tokens: int = 0

    def fits(self, rows: int, tokens: int) -> bool:
        """What is larger than the room has it to itself."""
        if not self.held_rows:
            return True
        return self.held_rows + rows <= self.rows and self.held_tokens + tokens <= self.tokens

    def take(self, rows: int, tokens: int) -> None:
        self.held_rows += rows
        self.held_tokens += tokens


class Shift:
    """One server's batches. `start` and `stop` bracket its work, in the event loop."""

    def __init__(
        self, service: Service, store: Store, clock: Callable[[], float] = time.time
    ) -> None:
        capacity = service.served.door.capacity
        self._service = service
        self._store = store
        self._clock = clock
        self._ledger = Ledger(store, service.config, clock)
        self.room = Room(
            max(1, capacity.max_rows // 2), capacity.num_blocks * capacity.block_size // 2
        )
        self._freed = asyncio.Condition()
        self._woken = asyncio.Event()
        self._queues: dict[str, deque[Row]] = {}
        self._read: dict[str, int] = {}  # the last line of a batch that was fetched
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._turn = 0
        self._rows_wait = Pauses()  # before more of a batch's requests are started
        self._books_wait = Pauses()  # before its status is moved on
        self._main: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._main = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End at once: what has no result yet is served after the next start. Idempotent."""
        main, self._main = self._main, None
        if main is None:
            return
        main.cancel()
        await asyncio.gather(main, return_exceptions=True)
        await self._withdraw(lambda _: True)

    def wake(self) -> None:
        """There is news: a batch was made or cancelled, a request ended."""
        self._woken.set()

    async def _run(self) -> None:
        while True:
            self._woken.clear()
            try:
                await self._tend()
                await self._feed()
            except Exception:
                log.exception("batches: trying again in %g s", TRY_AGAIN)
                await asyncio.sleep(TRY_AGAIN)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._rest()):
                    await self._woken.wait()

    def _rest(self) -> float:
        """Seconds until there is something to do, if nothing happens."""
        now = self._clock()
        return min(LOOK, self._rows_wait.soonest(now), self._books_wait.soonest(now))

    # ---- batches ----

    async def _tend(self) -> None:
        """Move every batch on that can be; what fails of one is tried again, the others go on."""
        await self._store.run(self._store.expire_files, seconds_now(self._clock))
        for batch in await self._store.run(self._store.open_batches):
            if not self._books_wait.over(batch.id, self._clock()):
                continue
            try:
                await self._move(batch)
            except Exception:
                log.exception("%s: trying again in %g s", batch.id, TRY_AGAIN)
                self._books_wait.set(batch.id, self._clock() + TRY_AGAIN)

    async def _move(self, batch: Batch) -> None:
        ledger = self._ledger
        if self._disowned(batch):
            log.warning("%s is cancelled: its API key has been removed", batch.id)
            await ledger.disown(batch)
            self.wake()
        elif batch.status == "validating":
            await ledger.validate(batch)
            self.wake()
        elif batch.status == "cancelling":
            await self._over(batch, "cancelled")
        elif batch.status == "finalizing":
            await self._over(batch, "completed")
        elif batch.expires <= seconds_now(self._clock):
            await self._over(batch, "expired")
        elif batch.num_total == batch.num_done + batch.num_failed:
            await ledger.finalizing(batch)
            await self._over(batch, "completed")

    def _disowned(self, batch: Batch) -> bool:
        """Whether there is work to do for a key that may not enter any more. A server without keys
        asks nobody."""
        if batch.status not in ("validating", "in_progress") or not batch.owner:
            return False
        keys = self._service.keys
        return bool(keys) and keys.known(bytes.fromhex(batch.owner)) is None

    async def _over(self, batch: Batch, status: str) -> None:
        await self._withdraw(lambda key: key[0] == batch.id)
        self._queues.pop(batch.id, None)
        self._read.pop(batch.id, None)
        await self._ledger.conclude(batch, status)
        self._rows_wait.drop(batch.id)
        self._books_wait.drop(batch.id)
        log.info("%s of %d requests is %s", batch.id, batch.num_total, status)

    async def _withdraw(self, which: Callable[[tuple[str, int]], bool]) -> None:
        """Take requests back from the engine; they have no result."""
        tasks = [task for key, task in self._tasks.items() if which(key)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- requests ----

    async def _feed(self) -> None:
        """Start requests for as long as there is room, one of each batch in turn."""
        batches = [
            batch
            for batch in await self._store.run(self._store.open_batches)
            if batch.status == "in_progress"
        ]
        while batches and self._may_feed():
            self._turn += 1
            batch = batches[self._turn % len(batches)]
            row = await self._next(batch)
            if row is None:
                batches.remove(batch)
                continue
            key = (batch.id, row.line)
            self._tasks[key] = task = asyncio.create_task(self._serve(batch, row))
            task.add_done_callback(partial(self._ended, key))

    def _may_feed(self) -> bool:
        service = self._service
        open_ = not service.draining and service.driver.alive
        # Those that are being parsed hold no room yet: as many as there are rows at most.
        return open_ and len(self._tasks) < self.room.rows

    async def _next(self, batch: Batch) -> Row | None:
        """Its next row; None if there is none, or none for now."""
        if not self._rows_wait.over(batch.id, self._clock()):  # it may have begun in this round
            return None
        try:
            return await self._fetched(batch)
        except Exception:
            log.exception("%s: trying again in %g s", batch.id, TRY_AGAIN)
            self._rows_wait.set(batch.id, self._clock() + TRY_AGAIN)
            return None

    async def _fetched(self, batch: Batch) -> Row | None:
        queue = self._queues.setdefault(batch.id, deque())
        if not queue:
            after = self._read.get(batch.id, 0)
            rows = await self._store.run(self._store.waiting, batch.id, after, AHEAD)
            queue.extend(rows)
            if rows:
                self._read[batch.id] = rows[-1].line
        return queue.popleft() if queue else None

    def _ended(self, key: tuple[str, int], _: object) -> None:
        del self._tasks[key]
        self.wake()

    async def _serve(self, batch: Batch, row: Row) -> None:
        """One request, from its row to its result in the same row."""
        try:
            came = await self._answer(batch, row)
            await asyncio.shield(self._store.run(self._store.settle, batch.id, row.line, came))
        except Later as later:
            self._again(batch, row, later.seconds)
        except Exception:
            log.exception("%s, line %d: trying again", batch.id, row.line)
            self._again(batch, row, TRY_AGAIN)

    def _again(self, batch: Batch, row: Row, seconds: float) -> None:
        """Serve it later, and nothing else of its batch before."""
        if batch.id in self._queues:
            self._queues[batch.id].appendleft(row)
        self._rows_wait.set(batch.id, self._clock() + seconds)

    async def _answer(self, batch: Batch, row: Row) -> Settled:
        """What comes of it. Raises `Later`."""
        inbox = Inbox()
        try:
            await self._exchange(batch, row, inbox)
        except TenantLimit as error:
            # A place of the key's may be free at any time, and to look costs nothing; tokens cost
            # the parsing of what is refused.
            most = PLACES if error.kind == "requests" else 30.0
            raise Later(min(max(error.retry_after, 0.1), most)) from None
        except Overloaded as error:
            raise Later(min(max(error.retry_after, 0.5), 30.0)) from None
        except Exception as error:
            if isinstance(error, EngineError) and not self._service.driver.alive:
                raise Later(TRY_AGAIN) from None
            status, body = envelope(error)
            return Settled(status, msgspec.json.encode(body))
        if not inbox.status:
            raise Later(0.5)  # it was aborted: the house is being closed
        return _settled(inbox)

    async def _exchange(self, batch: Batch, row: Row, inbox: Inbox) -> None:
        """Serve it, as a part of what its key may use. Raises `TenantLimit` too."""
        meters, key = self._service.meters, None
        if batch.owner:
            key = self._service.keys.known(bytes.fromhex(batch.owner))
        with meters.enter(meters.of(key)) as lease:
            try:
                await self._within(batch, row, inbox, lease)
            except Overloaded:
                lease.withdraw()
                raise

    async def _within(self, batch: Batch, row: Row, inbox: Inbox, lease: Lease) -> None:
        """Parse it, wait for room, and serve it there."""
        service, now = self._service, self._service.driver.clock()
        key = Key(batch.tenant, bytes.fromhex(batch.owner)) if batch.owner else None
        visit = Visit(key, now, NO_SLO)
        job = await parsed(service, ENDPOINTS[batch.endpoint], row.body, visit)
        job = _offline(job, batch, row.line)
        need = _need(job)
        await self._enter(*need)
        try:
            lease.reserve(job.requests)
            await self._admitted(job, batch, len(row.body), inbox, lease)
        finally:
            self.room.take(-need[0], -need[1])
            async with self._freed:
                self._freed.notify_all()

    async def _admitted(
        self, job: Job, batch: Batch, size: int, inbox: Inbox, lease: Lease
    ) -> None:
        service, now = self._service, self._service.driver.clock()
        prompt = sum(len(request.prompt) for request in job.requests)
        counted = service.admission.enter(batch.tenant, size, NO_SLO, now)
        try:
            service.admission.learn(counted, prompt)
            job = replace(job, requests=tuple(replace(r, arrival=now) for r in job.requests))
            exchange = Exchange(service.driver, service.metrics, service.admission, job, counted)
            try:
                await exchange.run(inbox.receive, inbox.send)
            finally:
                lease.used = prompt + exchange.reply.num_tokens
        finally:
            service.admission.leave(counted)

    async def _enter(self, rows: int, tokens: int) -> None:
        """Wait until there is room, and take it."""
        async with self._freed:
            await self._freed.wait_for(lambda: self.room.fits(rows, tokens))
            self.room.take(rows, tokens)


def _need(job: Job) -> tuple[int, int]:
    """(sequences, tokens) that a job will hold; of long outputs the beginning."""
    rows = sum(request.params.n for request in job.requests)
    tokens = 0
    for request in job.requests:
        output = min(request.params.max_tokens or EXPECTED, EXPECTED)
        tokens += len(request.prompt) + request.params.n * output
    return rows, tokens


def _offline(job: Job, batch: Batch, line: int) -> Job:
    """A job that nobody waits for. Raises `Unsupported`."""
    if job.asked.stream:
        raise Unsupported("stream must be false in a batch, got true", "stream")
    seeds = (f"{batch.id} {line} {number}".encode() for number in itertools.count())
    requests = (_behind(request, seed) for request, seed in zip(job.requests, seeds, strict=False))
    return replace(job, requests=tuple(requests))


def _behind(request: EngineRequest, seed: bytes) -> EngineRequest:
    """Last in line; with a prefix cache of its own, so that nobody is held up by what it computes
    slowly; with a seed that is the same after a restart, if it names none."""
    drawn = int.from_bytes(hashlib.blake2b(seed, digest_size=8).digest(), "little")
    return replace(
        request,
        tier=Tier.BATCH,
        slo=NO_SLO,
        priority=0,
        namespace=hashlib.sha256(b"batch\0" + request.namespace).digest(),
        seed=request.seed if request.params.seed is not None else drawn,
    )


def _settled(inbox: Inbox) -> Settled:
    usage = msgspec.json.decode(inbox.body).get("usage") or {}
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return Settled(
        inbox.status,
        inbox.body,
        usage.get("prompt_tokens") or usage.get("input_tokens") or 0,
        details.get("cached_tokens") or 0,
        usage.get("completion_tokens") or usage.get("output_tokens") or 0,
    )
