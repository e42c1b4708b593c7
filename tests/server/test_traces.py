"""Why was my request slow: the trace of a request, who may read it, and its header."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.server.traces import Trace
from tests.server.fakes import FakeExecutor
from tests.server.house import House, chat, completion, inside, outside, wait_for
from tests.server.test_life import CHAT, LONG, raw, running

pytestmark = pytest.mark.anyio

ALICE, BOB = "alice-key-0123456789", "bob-key-0123456789ab"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def keys(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "keys"
    path.write_text(f"alice {ALICE}\nbob {BOB}\n")
    return {"api_key_file": str(path)}


async def test_a_trace_adds_up() -> None:
    house = House()
    async with inside(house) as client:
        text = "x" * 100
        first = await client.post(CHAT, json=chat(text, max_tokens=5, ignore_eos=True))
        again = await client.post(CHAT, json=chat(text, max_tokens=5, ignore_eos=True, n=2))
        found = (await client.get(f"/v1/requests/{again.json()['id']}/trace")).json()
        by_header = await client.get(f"/v1/requests/{again.headers['x-request-id']}/trace")
        assert by_header.json() == found
        assert found["status"] == "ended"
        assert (found["finish"], found["http_status"], found["stream"]) == ("length", 200, False)
        usage = again.json()["usage"]
        assert found["usage"]["prompt_tokens"] == usage["prompt_tokens"]
        assert found["usage"]["completion_tokens"] == usage["completion_tokens"] == 10
        assert found["usage"]["cached_tokens"] > 90
        assert [c["index"] for c in found["choices"]] == [0, 1]
        for choice in found["choices"]:
            assert choice["queue_ms"] == pytest.approx(sum(choice["waits_ms"].values()), abs=0.01)
            assert choice["output_tokens"] == 5
            assert choice["cached_why"] == "all"
            assert choice["prefill_steps"]["steps"] >= 1
            assert choice["decode_steps"]["steps"] == 4
            assert choice["decode_steps"]["mean_rows"] == 2
        assert found["total_ms"] >= found["ttft_ms"] > 0
        assert any("came from the prefix cache" in line for line in found["why"])
        cold = (await client.get(f"/v1/requests/{first.json()['id']}/trace")).json()
        assert cold["choices"][0]["cached_why"] == "new"
        assert any(line.endswith("alone (1 token each)") for line in cold["why"])


async def test_no_text_and_no_token_is_kept() -> None:
    house = House()
    async with inside(house) as client:
        answer = await client.post("/v1/completions", json=completion("a secret word"))
        kept = house.app.service.traces.find(answer.json()["id"], None)
        assert kept is not None
        assert "secret" not in repr(kept)
        assert not any(name == "prompt" or "token_ids" in name for name in Trace.__slots__)


async def test_only_its_own_key_may_read_it(tmp_path: Path) -> None:
    async with inside(House(**keys(tmp_path))) as client:
        own = {"authorization": f"Bearer {ALICE}", "x-request-id": "mine"}
        answer = await client.post(CHAT, json=chat(max_tokens=2), headers=own)
        for id in (answer.json()["id"], "mine"):
            path = f"/v1/requests/{id}/trace"
            assert (await client.get(path, headers=own)).status_code == 200
            other = await client.get(path, headers={"authorization": f"Bearer {BOB}"})
            assert other.status_code == 404
            assert other.json()["error"]["code"] == "trace_not_found"
            assert (await client.get(path)).status_code == 401


async def test_the_ring_is_bounded_and_forgets_the_oldest() -> None:
    house = House(traces=3)
    async with inside(house) as client:
        ids = [(await client.post(CHAT, json=chat(max_tokens=1))).json()["id"] for _ in range(6)]
        found = [(await client.get(f"/v1/requests/{id}/trace")).status_code for id in ids]
        assert found == [404] * 3 + [200] * 3
        traces = house.app.service.traces
        assert len(traces._done) == len(traces._by_engine) == len(traces._by_client) == 3
        assert not traces._open
    async with inside(House(traces=0)) as client:
        id = (await client.post(CHAT, json=chat(max_tokens=1))).json()["id"]
        assert (await client.get(f"/v1/requests/{id}/trace")).status_code == 404


async def test_server_timing_says_what_is_known() -> None:
    async with inside(House()) as client:
        whole = await client.post(CHAT, json=chat(max_tokens=3))
        names = re.findall(r"([a-z]+);", whole.headers["server-timing"])
        assert names == ["ahead", "parse", "queue", "prefill", "decode", "cache"]
        stream = await client.post(CHAT, json=chat(max_tokens=3, stream=True))
        assert re.findall(r"([a-z]+);", stream.headers["server-timing"])[:2] == ["ahead", "parse"]
        assert "server-timing" not in (await client.get("/version")).headers


def test_one_that_waits_says_for_what() -> None:
    executor = FakeExecutor(seconds=0.01, blocks=100)
    with outside(House(executor, port=0)) as house:
        first = raw(house, chat("x" * 600, stream=True, **LONG | {"max_tokens": 900}))
        assert wait_for(lambda: running(house) == 1)
        second = raw(house, chat("y" * 1400, stream=True, **LONG | {"max_tokens": 100}))
        assert wait_for(lambda: house.engine.snapshot()["waiting"] == 1)
        (ticket,) = [t for t in house.driver.tickets if house.scheduler.choices(t.requests[0].id)[0]
                     .first_scheduled is None]  # fmt: skip
        path = f"{house.url}/v1/requests/{ticket.requests[0].id}/trace"
        assert wait_for(lambda: httpx.get(path).json()["choices"][0]["waits_ms"].get("blocks"))
        found = httpx.get(path).json()
        assert found["status"] == "in progress"
        assert found["choices"][0]["state"] == "waiting"
        assert "KV pool" in found["why"][0]
        second.close()
        assert wait_for(lambda: house.engine.snapshot()["waiting"] == 0)
        assert wait_for(lambda: httpx.get(path).json()["finish"] == "abort")
        first.close()
        assert house.idle()
