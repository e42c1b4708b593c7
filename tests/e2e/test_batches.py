"""`octavo serve --batch-dir`, killed in mid-batch: nothing is lost, nothing is repeated."""

from __future__ import annotations

import json
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import openai

from tests.e2e.test_serve import start

OVER = ("completed", "failed", "expired", "cancelled")
KILLS = 2


def lines() -> list[dict[str, Any]]:
    found = []
    for i in range(36):
        body: dict[str, Any] = {
            "model": "smollm2-135m",
            "messages": [{"role": "user", "content": f"Tell me something about the number {i}."}],
            "max_tokens": 24,
            "logprobs": True,
        }
        body |= {"temperature": 0} if i % 2 else {"temperature": 0.9, "seed": i}
        if i % 9 == 0:
            body["n"] = 2
        url = "/v1/chat/completions"
        found.append({"custom_id": f"q{i}", "method": "POST", "url": url, "body": body})
    return found


def begun(by: openai.OpenAI) -> str:
    content = "\n".join(json.dumps(line) for line in lines()).encode()
    file = by.files.create(file=("in.jsonl", content), purpose="batch")
    batch = by.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    return batch.id


def until(by: openai.OpenAI, id: str, done: int) -> Any:
    """Wait until it has so many results, or is over."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        batch = by.batches.retrieve(id)
        if batch.status in OVER or batch.request_counts.completed >= done:
            return batch
        time.sleep(0.01)
    raise AssertionError(f"still {batch}")


def results(by: openai.OpenAI, id: str) -> dict[str, Any]:
    batch = until(by, id, 10**9)
    assert batch.status == "completed"
    assert batch.request_counts.completed == 36
    assert batch.error_file_id is None
    texts = by.files.content(batch.output_file_id).read().decode().splitlines()
    found = [json.loads(text) for text in texts]
    assert sorted(one["custom_id"] for one in found) == sorted(f"q{i}" for i in range(36))
    return {one["custom_id"]: one["response"]["body"] for one in found}


def test_a_server_killed_in_mid_batch_ends_it_after_the_next_start(
    smollm2_path: Path,  # noqa: ARG001
    tmp_path: Path,
) -> None:
    store = tmp_path / "store"
    flags = ("--batch-dir", str(store))
    running = start(tmp_path / "log", *flags)
    id = begun(running.client)
    kept: dict[int, bytes] = {}
    for kill in range(KILLS):
        seen = until(running.client, id, 6 * (kill + 1)).request_counts.completed
        assert seen < 36, "killed too late to show anything"
        running.process.send_signal(signal.SIGKILL)
        running.process.wait(60)
        with sqlite3.connect(store / "octavo.db") as db:
            rows = dict(db.execute("SELECT line, result FROM requests WHERE state = 1").fetchall())
        assert len(rows) >= seen, "what was told as done is lost"
        assert all(rows[line] == result for line, result in kept.items())
        kept = rows
        running = start(tmp_path / f"log{kill}", *flags)
    try:
        disturbed = results(running.client, id)
        undisturbed = results(running.client, begun(running.client))
        for q, body in undisturbed.items():
            assert disturbed[q]["choices"] == body["choices"], "bit for bit, logprobs too"
        by_line = {f"q{line - 1}": json.loads(result) for line, result in kept.items()}
        for q, body in by_line.items():
            assert disturbed[q] == body, "what was done is not done again: its id is the same"
        assert running.wait_until_idle()
    finally:
        running.process.terminate()
        assert running.process.wait(60) == 0
