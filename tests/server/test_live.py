"""The live stream: what it says is what is, it says no text, and watching changes nothing."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from octavo.core.scheduler import unwatched
from octavo.server import live
from octavo.server.frames import UNREADABLE
from tests.server.fakes import FakeExecutor
from tests.server.house import PATIENCE, House, chat, outside, wait_for

LIVE = "/v1/engine/live"


class Mirror:
    """What a watcher knows, put together from frames as the page does it."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.tables: dict[int, list[int]] = {}
        self.parents: dict[int, int] = {}
        self.steps: list[list[Any]] = []
        self.ended: list[list[Any]] = []
        self.raw = ""

    def take(self, line: str) -> None:
        frame = json.loads(line)
        self.raw += line
        if frame["kind"] == "hello":
            self.tables, self.parents = {}, {}
        self.state |= frame
        self.tables |= dict(frame["tables"])
        self.parents |= dict(frame["parents"])
        self.steps += frame.get("steps", [])
        self.ended += frame["ended"]
        running = {row[0] for row in frame.get("rows", [])}
        self.tables = {seq_id: t for seq_id, t in self.tables.items() if seq_id in running}

    def counts(self) -> tuple[int, int, int]:
        """(held, shared, cached) blocks."""
        refs: dict[int, int] = {}
        for table in self.tables.values():
            for block in table:
                refs[block] = refs.get(block, 0) + 1
        readable = {block for block, parent in self.parents.items() if parent != UNREADABLE}
        return len(refs), sum(n > 1 for n in refs.values()), len(readable - refs.keys())


def watch(house: House, mirror: Mirror, until: Any) -> None:
    """Take frames until `until(mirror)`."""
    end = time.monotonic() + PATIENCE
    with httpx.stream("GET", house.url + LIVE) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("data: "):
                mirror.take(line.removeprefix("data: "))
                if until(mirror):
                    return
            assert time.monotonic() < end, "what was waited for did not come"


def ask(house: House, number: int, max_tokens: int = 30) -> str:
    body = chat("secret words " * 12 + str(number), max_tokens=max_tokens, ignore_eos=True)
    answer = httpx.post(house.url + "/v1/chat/completions", json=body)
    return answer.json()["choices"][0]["message"]["content"]


def test_what_watchers_put_together_is_the_truth_and_has_no_text_in_it() -> None:
    with outside(House(FakeExecutor(seconds=0.004), port=0)) as house:
        mirror, many = Mirror(), threading.Event()

        def done(m: Mirror) -> bool:
            if len(m.tables) > 1:
                many.set()
            return len(m.ended) == 12 and not m.state["rows"]

        with ThreadPoolExecutor(13) as pool:
            watching = pool.submit(watch, house, mirror, done)
            assert wait_for(lambda: house.scheduler.witness is not unwatched)
            house.executor.gate.clear()
            asking = pool.map(lambda n: ask(house, n), range(12))
            assert wait_for(lambda: len(house.driver.tickets) == 12), "all at once"
            house.executor.gate.set()
            texts = list(asking)
            watching.result()
        assert many.is_set()
        blocks = house.scheduler.blocks
        assert mirror.counts() == (blocks.num_held, 0, blocks.num_cached)
        assert mirror.state["counters"]["output_tokens"] == 12 * 30
        # Every step once and in order; in each row as many tokens as were computed.
        numbers = [step[0] for step in mirror.steps]
        assert numbers == list(range(1, house.executor.steps + 1))
        rows: list[int] = []
        total = 0
        for step in mirror.steps:
            rows = step[5] or rows
            total += sum(abs(n) for n in rows[1::2])
        assert total == house.scheduler.stats.counters.computed_tokens
        assert all(ttft > 0 for _, ttft, *_ in mirror.ended)
        assert "secret" not in mirror.raw
        assert not any(text[:12] in mirror.raw for text in texts)


def test_shared_blocks_and_the_prefix_tree_are_seen() -> None:
    with outside(House(FakeExecutor(seconds=0.02), port=0)) as house:
        mirror = Mirror()
        with ThreadPoolExecutor(5) as pool:
            ask(house, 0)  # publishes the prefix
            futures = [pool.submit(ask, house, n, 1500) for n in range(1, 5)]
            watch(house, mirror, lambda m: m.counts()[1] > 3 and len(m.tables) == 4)
            house.executor.seconds = 0.0  # they have been seen
            for future in futures:
                future.result()
        shared = set.intersection(*(set(table) for table in mirror.tables.values()))
        assert len(shared) >= 9  # 150 tokens in common, blocks of 16
        chain = mirror.tables[min(mirror.tables)][:9]
        assert [mirror.parents[block] for block in chain] == [-1, *chain[:-1]]


def test_waiting_sequences_say_why() -> None:
    with outside(House(FakeExecutor(seconds=0.02, blocks=24), port=0)) as house:
        mirror = Mirror()
        house.executor.gate.clear()
        with ThreadPoolExecutor(6) as pool:
            bodies = [chat(f"{n} " * 60, max_tokens=60, ignore_eos=True) for n in range(6)]
            url = house.url + "/v1/chat/completions"
            futures = [pool.submit(httpx.post, url, json=b) for b in bodies]
            assert wait_for(lambda: len(house.driver.tickets) == 6), "all at once"
            house.executor.gate.set()
            watch(house, mirror, lambda m: any(q[6] == "blocks" for q in m.state.get("queue", ())))
            why = next(q for q in mirror.state["queue"] if q[6] == "blocks")
            assert why[7] == -(-why[3] // 16)  # as many blocks as its tokens need
            for future in futures:
                assert future.result().status_code == 200


def test_nothing_is_kept_while_nobody_watches() -> None:
    with outside(House(port=0)) as house:
        ask(house, 1)
        assert house.scheduler.witness is unwatched
        watch(house, Mirror(), lambda m: m.state.get("counters", {}).get("steps", 0) > 0)
        assert wait_for(lambda: house.scheduler.witness is unwatched)


def test_one_that_falls_behind_is_told_everything_anew() -> None:
    watcher = live.Watcher.__new__(live.Watcher)
    watcher.frames, watcher.anew, watcher.over = [], False, False
    watcher.wake = threading.Event()  # type: ignore[assignment]
    for number in range(live.BEHIND):
        watcher.push(b"%d" % number)
    assert watcher.frames == [b"%d" % number for number in range(live.BEHIND)]
    watcher.push(b"one too many")
    assert watcher.anew
    assert watcher.frames == []
    watcher.push(b"part of the whole that will come")
    assert watcher.frames == []


def test_a_look_that_fails_harms_nobody(monkeypatch: Any) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("cannot look")

    monkeypatch.setattr(live, "look", broken)
    with outside(House(port=0)) as house, httpx.stream("GET", house.url + LIVE) as answer:
        assert answer.status_code == 200
        assert ask(house, 1) == ask(house, 1)


def test_watchers_are_few_and_leave_when_the_house_closes(monkeypatch: Any) -> None:
    monkeypatch.setattr(live, "WATCHERS", 1)
    with (
        outside(House(port=0)) as house,
        httpx.stream("GET", house.url + LIVE) as first,
    ):
        lines = first.iter_lines()
        next(lines)
        second = httpx.get(house.url + LIVE)
        assert second.status_code == 503
        assert "retry-after" in second.headers
        house.shutdown()
        for _ in lines:  # it has an end, and one that is not cut off
            pass
