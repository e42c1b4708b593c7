"""Blast radius: a fault injected at every stage of one request harms that request alone.

Each stage's function is made to raise once, at its first, third or later call, while eight requests
are on their way. Whoever meets the fault gets an error; the tokens of all others are those of a
plain loop over the same model (the oracle), the pool, the queues and the books are empty again, and
the next request is served.
"""

from __future__ import annotations

import asyncio
import importlib
import socket
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from octavo.core.batch import RowResult, StepResult
from octavo.core.request import SamplingParams
from tests.server.fakes import FakeExecutor, expected, expected_text, fake_template
from tests.server.house import PATIENCE, House, chat, events, inside, outside, wait_for
from tests.server.test_life import CHAT, raw

MODEL_PARAMS = SamplingParams(temperature=0, max_tokens=40)


class Fault(Exception):
    """The injected one."""


# Stages of a request on the event loop and its helpers: module, what raises in it.
STAGES = [
    ("octavo.server.exchange", "Bodies.read"),
    ("octavo.core.admission", "Admission.enter"),
    ("octavo.server.protocol", "parse"),
    ("octavo.server.protocol", "sampling"),
    ("octavo.door", "Door.request"),
    ("octavo.core.admission", "Admission.learn"),
    ("octavo.core.admission", "Admission.judge_all"),
    ("octavo.server.exchange", "Exchange.__init__"),
    ("octavo.server.traces", "Traces.enter"),
    ("octavo.core.scheduler", "Scheduler.add"),
    ("octavo.core.admission", "Admission.first_token"),
    ("octavo.server.reply", "Reply.feed"),
    ("octavo.server.reply", "Choice.take"),
    ("octavo.server.shapes", "ChatShape.open"),
    ("octavo.server.shapes", "ChatShape.text"),
    ("octavo.server.shapes", "ChatShape.close"),
    ("octavo.text", "OutputText.push"),
    ("octavo.server.exchange", "Exchange._send"),
    ("octavo.server.exchange", "Exchange._finish"),
    ("octavo.server.account", "server_timing"),
    ("octavo.server.app", "header"),
]


def armed(monkeypatch: pytest.MonkeyPatch, module: str, name: str, at: int) -> list[int]:
    """The function raises at its call number `at`, once; the list counts its calls."""
    owner: Any = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    real: Callable[..., Any] = getattr(owner, last)
    calls = [0]

    def faulty(*args: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            raise Fault("injected")
        return real(*args, **more)

    monkeypatch.setattr(owner, last, faulty)
    return calls


def oracle(text: str) -> str:
    ids = fake_template([{"role": "user", "content": text}])
    return expected_text(expected(ids, MODEL_PARAMS))[0]


def answer_of(response: httpx.Response) -> str | None:
    """The text that a client got, or None if it was told of an error."""
    if response.status_code != 200:
        assert response.json()["error"]["message"], response.text
        return None
    if not response.headers["content-type"].startswith("text/event-stream"):
        return str(response.json()["choices"][0]["message"]["content"])
    found = events(response.text)
    if found[-1] != "[DONE]":
        assert not found or "error" in found[-1] or "choices" in found[-1]
        return None
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in found[:-1])


async def clean(house: House) -> None:
    """Nothing of any request is left anywhere."""
    assert await asyncio.to_thread(house.idle)
    house.scheduler.check()
    service = house.app.service

    def held() -> Any:
        return (
            service.occupancy.live
            or service.bodies.held
            or house.driver.tickets
            or house.driver.busy
        )

    assert await asyncio.to_thread(wait_for, lambda: not held())
    assert service.occupancy.live == 0
    assert not house.driver.tickets
    assert not house.driver.busy
    assert house.admission.queued_tokens == pytest.approx(0.0)
    assert not house.admission.by_tenant
    assert service.bodies.held == 0
    assert not service.traces._open
    pool = house.scheduler.blocks
    assert pool.num_available == pool.num_blocks


@pytest.mark.parametrize("at", [1, 3, 4])
@pytest.mark.parametrize(("module", "name"), STAGES, ids=[name for _, name in STAGES])
def test_a_fault_at_any_stage_is_one_requests_own(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str, at: int
) -> None:
    texts = [f"neighbour {i}" for i in range(8)]

    async def ask(client: httpx.AsyncClient, i: int) -> str | None:
        try:
            return answer_of(await client.post(CHAT, json=chat(texts[i], stream=i % 2 == 0)))
        except Fault:  # out of the application: on a socket the connection would be closed
            return None

    async def run() -> None:
        house = House(FakeExecutor(seconds=0.0005))
        async with inside(house) as client:
            calls = armed(monkeypatch, module, name, at)
            answers = await asyncio.gather(*(ask(client, i) for i in range(8)))
            assert calls[0] >= at, "the stage was never reached"
            failed = [i for i, answer in enumerate(answers) if answer is None]
            assert len(failed) <= 1
            for i, answer in enumerate(answers):
                assert answer is None or answer == oracle(texts[i])
            monkeypatch.undo()
            await clean(house)
            after = await client.post(CHAT, json=chat("after"))
            assert answer_of(after) == oracle("after")
            assert (await client.get("/ready")).status_code == 200

    asyncio.run(run())


class Spoils(FakeExecutor):
    """One row of its sixth step comes back wrong, as a broken kernel or sampler would leave it."""

    def __init__(self, how: str) -> None:
        super().__init__(seconds=0.0005)
        self.how = how
        self.spoilt = 0

    def collect(self) -> StepResult:
        result = super().collect()
        if self.steps < 6 or self.spoilt or len(result.rows) < 3:
            return result
        rows = dict(result.rows)
        victim = sorted(rows)[1]
        made = rows[victim]
        if not made.tokens:
            return result
        self.spoilt += 1
        if self.how == "missing":
            del rows[victim]
        elif self.how == "error":
            rows[victim] = RowResult(error="the logits are not finite")
        else:
            count = {"none": 0, "two": 2}[self.how]
            rows[victim] = made._replace(tokens=made.tokens * count)
        return StepResult(result.step, rows)


@pytest.mark.parametrize("how", ["missing", "error", "none", "two"])
def test_a_row_that_comes_back_wrong_is_one_sequences_own(how: str) -> None:
    texts = [f"neighbour {i}" for i in range(8)]

    async def run() -> None:
        executor = Spoils(how)
        house = House(executor)
        async with inside(house) as client:
            jobs = [client.post(CHAT, json=chat(t, stream=i % 2 == 0)) for i, t in enumerate(texts)]
            answers = [answer_of(a) for a in await asyncio.gather(*jobs)]
            assert executor.spoilt == 1
            assert answers.count(None) == 1
            for text, got in zip(texts, answers, strict=True):
                assert got is None or got == oracle(text)
            await clean(house)

    asyncio.run(run())


class Bystanders:
    """Streams that must not notice: their texts are the oracle's."""

    def __init__(self, url: str, count: int = 4) -> None:
        self.texts = [f"bystander {i}" for i in range(count)]
        self.got: dict[str, str | None] = {}
        self._threads = [threading.Thread(target=self._one, args=(url, t)) for t in self.texts]
        for thread in self._threads:
            thread.start()

    def _one(self, url: str, text: str) -> None:
        answer = httpx.post(url + CHAT, json=chat(text, stream=True), timeout=60)
        self.got[text] = answer_of(answer)

    def check(self) -> None:
        for thread in self._threads:
            thread.join()
        assert self.got == {text: oracle(text) for text in self.texts}


def test_clients_that_leave_at_every_moment_harm_nobody() -> None:
    """Cut within the head, within the body, before the first token, after so many bytes."""
    import json

    with outside(House(FakeExecutor(seconds=0.002), port=0)) as house:
        body = json.dumps(chat("leaver", stream=True, max_tokens=300, ignore_eos=True)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        whole = head + body
        host, port = house.url.removeprefix("http://").split(":")
        neighbours = Bystanders(house.url)
        left = []
        for cut in range(0, len(whole), 9):
            made = socket.create_connection((host, int(port)), timeout=PATIENCE)
            made.sendall(whole[:cut])
            left.append(made)
            if cut % 2:
                made.close()
        for read in (0, 1, 100, 250, 400, 1000, 3000):
            leaver = raw(house, chat("leaver", stream=True, max_tokens=300, ignore_eos=True))
            seen = 0
            while seen < read:
                seen += len(leaver.recv(min(200, read - seen)))
            leaver.close()
        neighbours.check()
        for made in left:
            made.close()
        assert wait_for(lambda: house.app.service.occupancy.live == 0)
        asyncio.run(clean(house))
        assert httpx.post(house.url + CHAT, json=chat("after")).status_code == 200


def test_a_step_that_fails_tells_everybody_and_keeps_answering() -> None:
    """The executor is lost: that is no one request's fault. Nobody hangs, nobody gets a wrong
    token, probes and refusals go on."""
    with outside(House(FakeExecutor(seconds=0.005), port=0)) as house:
        house.executor.gate.clear()
        clients = [
            raw(house, chat(f"lost {i}", stream=True, max_tokens=1500, ignore_eos=True))
            for i in range(4)
        ]
        assert wait_for(lambda: len(house.driver.tickets) == 4)
        house.executor.gate.set()
        assert wait_for(lambda: house.engine.snapshot()["running"] == 4)
        house.executor.fail = RuntimeError("the device is gone")
        for client in clients:
            got = b""
            while b"0\r\n\r\n" not in got[-7:]:
                part = client.recv(65536)
                if not part:
                    break
                got += part
            assert b'"error"' in got
            assert b"[DONE]" not in got
            client.close()
        assert httpx.get(house.url + "/health").status_code == 503
        assert httpx.get(house.url + "/ready").status_code == 503
        refused = httpx.post(house.url + CHAT, json=chat())
        assert refused.status_code == 500
        assert refused.json()["error"]["code"] == "engine_error"
