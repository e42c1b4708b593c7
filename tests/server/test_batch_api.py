"""Laws of files and batches, over the fake model: the openai client drives them."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from octavo.config import ServerConfig
from octavo.core.offline import behind
from octavo.core.policy import fcfs
from octavo.server.ledger import Ledger
from octavo.server.shift import Shift
from octavo.server.store import Batch, Page, Row, Settled, Store, StoredFile
from tests.server.fakes import FakeExecutor
from tests.server.house import PATIENCE, House, chat, completion, outside, wait_for

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
OVER = ("completed", "failed", "expired", "cancelled")


@contextlib.contextmanager
def house(folder: Path, executor: FakeExecutor | None = None, **config: Any) -> Iterator[House]:
    made = House(executor, policy=behind(fcfs()), port=0, batch_dir=str(folder), **config)
    with outside(made) as standing:
        yield standing


def client(standing: House, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(
        base_url=standing.url + "/v1", api_key=key, max_retries=0, timeout=PATIENCE
    )


def line(id: str, body: dict[str, Any], url: str = CHAT) -> dict[str, Any]:
    return {"custom_id": id, "method": "POST", "url": url, "body": body}


def jsonl(lines: list[Any]) -> bytes:
    return "\n".join(json.dumps(one) for one in lines).encode()


def started(by: openai.OpenAI, lines: list[Any], url: str = CHAT, **more: Any) -> Any:
    file = by.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    return by.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h", **more)


def followed(by: openai.OpenAI, id: str, until: Callable[[Any], bool] | None = None) -> Any:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        batch = by.batches.retrieve(id)
        if batch.status in OVER or (until is not None and until(batch)):
            return batch
        time.sleep(0.01)
    raise AssertionError(f"the batch is still {batch.status}")


def stands_still(standing: House, ended: int) -> None:
    """No step ends any more, once so many sequences have, until the gate is opened."""
    counted = standing.scheduler.stats.counters
    standing.executor.halt = lambda: counted.length >= ended


def results(by: openai.OpenAI, file: str | None) -> dict[str, Any]:
    if file is None:
        return {}
    found = [json.loads(text) for text in by.files.content(file).read().decode().splitlines()]
    ids = [one["custom_id"] for one in found]
    assert len(set(ids)) == len(ids), "a custom_id is there twice"
    return {one["custom_id"]: one for one in found}


def choice(answer: Any) -> Any:
    return answer["choices"][0].get("message") or answer["choices"][0]["text"]


# ---- batches ----


def test_a_batch_gives_what_http_gives_each_request_once(tmp_path: Path) -> None:
    bodies = {f"q{i}": chat(f"question {i}", max_tokens=12) for i in range(20)}
    bodies |= {f"s{i}": chat("warm", temperature=1.0, seed=i, logprobs=True) for i in range(5)}
    bodies["n"] = chat("several", n=3, temperature=0.9, seed=4)
    with house(tmp_path) as standing:
        by = client(standing)
        batch = started(by, [line(id, body) for id, body in bodies.items()], metadata={"a": "b"})
        assert batch.object == "batch"
        assert batch.metadata == {"a": "b"}
        batch = followed(by, batch.id)
        assert batch.status == "completed"
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (26, 26, 0)
        assert batch.error_file_id is None
        found = results(by, batch.output_file_id)
        assert set(found) == set(bodies)
        tokens = 0
        for id, body in bodies.items():
            reply = found[id]["response"]
            alone = httpx.post(standing.url + CHAT, json=body).json()
            assert reply["status_code"] == 200
            assert reply["body"]["choices"] == alone["choices"]
            assert found[id]["error"] is None
            tokens += reply["body"]["usage"]["completion_tokens"]
        assert batch.usage.output_tokens == tokens
        assert standing.idle()


def test_completions_have_batches_too(tmp_path: Path) -> None:
    with house(tmp_path) as standing:
        by = client(standing)
        body = completion(["one", "two"], max_tokens=6, echo=True)
        batch = followed(by, started(by, [line("c", body, COMPLETIONS)], COMPLETIONS).id)
        found = results(by, batch.output_file_id)["c"]["response"]["body"]
        alone = httpx.post(standing.url + COMPLETIONS, json=body).json()
        assert found["choices"] == alone["choices"]


def test_embeddings_and_responses_have_batches_too(tmp_path: Path) -> None:
    asked = {
        "/v1/embeddings": ({"model": "fake", "input": ["one", "two"]}, "data"),
        "/v1/responses": ({"model": "fake", "input": "one", "temperature": 0}, "output"),
    }
    with house(tmp_path) as standing:
        by = client(standing)
        for url, (body, what) in asked.items():
            batch = followed(by, started(by, [line("c", body, url)], url).id)
            found = results(by, batch.output_file_id)["c"]["response"]["body"]
            alone = httpx.post(standing.url + url, json=body).json()
            assert batch.usage.input_tokens > 0
            if what == "output":
                assert found["store"] is False
                found, alone = found["output"][0], alone["output"][0]
                what = "content"
            assert found[what] == alone[what]


def test_a_request_that_is_wrong_fails_alone_and_says_what_http_says(tmp_path: Path) -> None:
    wrong = {
        "model": chat("x") | {"model": "other"},
        "temperature": chat("x", temperature="hot"),
        "stream": chat("x", stream=True),
        "template": chat("raise"),
        "long": chat("y" * 5000),
    }
    with house(tmp_path) as standing:
        by = client(standing)
        lines = [line(id, body) for id, body in wrong.items()] + [line("good", chat("fine"))]
        batch = followed(by, started(by, lines).id)
        assert batch.status == "completed"
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 5)
        assert set(results(by, batch.output_file_id)) == {"good"}
        failed = results(by, batch.error_file_id)
        for id, body in wrong.items():
            reply = failed[id]["response"]
            if id == "stream":
                assert reply["body"]["error"]["param"] == "stream"
                continue
            alone = httpx.post(standing.url + CHAT, json=body)
            assert (reply["status_code"], reply["body"]) == (alone.status_code, alone.json())


@pytest.mark.parametrize(
    ("content", "code", "number"),
    [
        (b"", "empty_file", None),
        (b"\n \n", "empty_file", None),
        (b"{", "invalid_json_line", 1),
        (b"\xff\xfe", "invalid_json_line", 1),
        (b"[" * 8000, "invalid_json_line", 1),
        (jsonl([line("a", {}), line("a", {})]), "duplicate_custom_id", 2),
        (jsonl([line("a", {}, COMPLETIONS)]), "invalid_url", 1),
        (jsonl([line("a", {}) | {"method": "GET"}]), "invalid_method", 1),
        (jsonl([line("a", {}) | {"body": []}]), "invalid_request", 1),
        (jsonl([line("", {})]), "invalid_custom_id", 1),
        (jsonl([line("x" * 600, {})]), "invalid_custom_id", 1),
        (jsonl([line("a", {}) | {"more": 1}]), "invalid_json_line", 1),
        (jsonl([line(str(i), {}) for i in range(9)]), "too_many_tasks", 9),
        (jsonl([line("a", {"x": "y" * 9000})]), "line_too_long", 1),
    ],
    ids=range(14),
)
def test_a_file_that_is_wrong_fails_its_batch_and_names_the_line(
    tmp_path: Path, content: bytes, code: str, number: int | None
) -> None:
    with house(tmp_path, max_batch_requests=8, max_body=8192) as standing:
        by = client(standing)
        file = by.files.create(file=("in.jsonl", content or b" "), purpose="batch")
        batch = by.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        batch = followed(by, batch.id)
        assert batch.status == "failed"
        first = batch.errors.data[0]
        assert (first.code, first.line) == (code, number)
        assert batch.output_file_id is batch.error_file_id is None


def test_a_byte_order_mark_at_the_head_of_a_file_means_nothing(tmp_path: Path) -> None:
    mark, lines = b"\xef\xbb\xbf", [line(f"q{i}", chat(max_tokens=2)) for i in range(2)]
    with house(tmp_path) as standing:
        by = client(standing)
        for content, status, where in (
            (mark + jsonl(lines), "completed", None),
            (mark + b"\r\n" + jsonl(lines).replace(b"\n", b"\r\n"), "completed", None),
            (mark, "failed", None),
            (mark[:2] + jsonl(lines), "failed", 1),
            (mark + mark + jsonl(lines), "failed", 1),
            (jsonl(lines[:1]) + b"\n" + mark + jsonl(lines[1:]), "failed", 2),
        ):
            file = by.files.create(file=("in.jsonl", content), purpose="batch")
            batch = by.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
            batch = followed(by, batch.id)
            assert batch.status == status, content
            if status == "failed":
                assert batch.errors.data[0].line == where
            else:
                assert batch.request_counts.completed == 2


def test_every_line_that_is_wrong_is_told_up_to_a_hundred(tmp_path: Path) -> None:
    with house(tmp_path) as standing:
        by = client(standing)
        file = by.files.create(file=("in.jsonl", b"{\n" * 500), purpose="batch")
        made = by.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="1h")
        errors = followed(by, made.id).errors.data
        assert [error.line for error in errors] == list(range(1, 101))


def test_a_cancelled_batch_keeps_what_is_done_and_lets_go_of_the_rest(tmp_path: Path) -> None:
    with house(tmp_path) as standing:
        stands_still(standing, 4)
        by = client(standing)
        lines = [line(f"q{i}", chat(f"{i}", max_tokens=60, ignore_eos=True)) for i in range(120)]
        batch = started(by, lines)
        followed(by, batch.id, lambda b: b.request_counts.completed >= 4)
        assert by.batches.cancel(batch.id).status == "cancelling"
        standing.executor.gate.set()
        batch = followed(by, batch.id)
        assert batch.status == "cancelled"
        assert batch.cancelled_at >= batch.cancelling_at
        done, rest = (results(by, id) for id in (batch.output_file_id, batch.error_file_id))
        assert len(done) == batch.request_counts.completed >= 4
        assert set(done) | set(rest) == {f"q{i}" for i in range(120)}
        assert not set(done) & set(rest)
        assert {one["error"]["code"] for one in rest.values()} == {"batch_cancelled"}
        assert standing.idle()
        assert by.batches.cancel(batch.id).status == "cancelled", "again changes nothing"


def test_a_batch_past_its_window_expires_with_what_is_done(tmp_path: Path) -> None:
    with house(tmp_path) as standing:
        stands_still(standing, 2)
        by = client(standing)
        lines = [line(f"q{i}", chat(f"{i}", max_tokens=60, ignore_eos=True)) for i in range(200)]
        batch = started(by, lines)
        followed(by, batch.id, lambda b: b.request_counts.completed >= 2)
        (shift,) = standing.app.service.lives
        assert isinstance(shift, Shift)
        shift._clock = shift._ledger._clock = lambda: time.time() + 25 * 3600
        standing.executor.gate.set()
        batch = followed(by, batch.id)
        assert batch.status == "expired"
        rest = results(by, batch.error_file_id)
        assert {one["error"]["code"] for one in rest.values()} == {"batch_expired"}
        assert len(rest) + batch.request_counts.completed == 200


def test_a_server_that_stops_puts_its_batches_aside_and_the_next_one_ends_them(
    tmp_path: Path,
) -> None:
    lines = [line(f"q{i}", chat(f"{i}", temperature=1.0, max_tokens=30)) for i in range(60)]
    with house(tmp_path / "a") as undisturbed:
        by = client(undisturbed)
        whole = results(by, followed(by, started(by, lines).id).output_file_id)
    with house(tmp_path / "b", FakeExecutor(seconds=0.002)) as standing:
        by = client(standing)
        batch = started(by, lines)
        followed(by, batch.id, lambda b: b.request_counts.completed >= 5)
    for _ in range(2):
        with house(tmp_path / "b", FakeExecutor(seconds=0.002)) as standing:
            by = client(standing)
            seen = by.batches.retrieve(batch.id).request_counts.completed
            assert seen >= 5, "what was done stays done"
            followed(by, batch.id, lambda b, seen=seen: b.request_counts.completed > seen)
    with house(tmp_path / "b") as standing:
        by = client(standing)
        ended = followed(by, batch.id)
        assert ended.status == "completed"
        found = results(by, ended.output_file_id)
        assert set(found) == set(whole)
    # No line names a seed: it comes of the batch and the line, so two batches differ ...
    assert any(choice(whole[id]["response"]["body"]) != choice(one["response"]["body"])
               for id, one in found.items())  # fmt: skip


def test_a_request_without_a_seed_gives_the_same_text_after_a_restart(tmp_path: Path) -> None:
    """The same batch, its results thrown away: it is served again, bit for bit."""
    with house(tmp_path) as standing:
        by = client(standing)
        lines = [line(f"q{i}", chat(f"{i}", temperature=1.0)) for i in range(12)]
        batch = followed(by, started(by, lines).id)
        first = results(by, batch.output_file_id)
    store = Store(tmp_path)
    store._db.execute(
        "UPDATE batches SET status = 'validating', num_done = 0, output = NULL WHERE id = ?",
        (batch.id,),
    )
    store.close()
    with house(tmp_path) as standing:
        by = client(standing)
        again = results(by, followed(by, batch.id).output_file_id)
    for id, one in first.items():
        assert one["response"]["body"]["choices"] == again[id]["response"]["body"]["choices"]


def test_batches_hold_at_most_half_of_the_rows_and_others_go_first(tmp_path: Path) -> None:
    executor = FakeExecutor(seconds=0.005)
    with house(tmp_path, executor) as standing:
        by = client(standing)
        lines = [line(f"q{i}", chat(f"{i}", max_tokens=200, ignore_eos=True)) for i in range(150)]
        batch = started(by, lines)
        followed(by, batch.id, lambda _: standing.scheduler.num_running >= 8)
        before = by.batches.retrieve(batch.id).request_counts.completed
        for _ in range(3):
            answer = httpx.post(standing.url + CHAT, json=chat("now", max_tokens=8))
            assert answer.status_code == 200
        after = by.batches.retrieve(batch.id)
        assert after.status == "in_progress"
        assert before <= after.request_counts.completed < 150
        assert standing.scheduler.num_running <= executor.capacity.max_rows // 2
        by.batches.cancel(batch.id)
        followed(by, batch.id)


def test_a_keys_limits_hold_for_its_batches_and_hold_up_no_other_key(tmp_path: Path) -> None:
    keys, names = tmp_path / "keys", ("ann", "bob", "cat", "dan")
    limits = dict(zip(names, ("rpm=2", "", "tpm=100000", "concurrent=1"), strict=True))
    keys.write_text("\n".join(f"{n} key-of-{n}-0123456789 {limits[n]}" for n in names))
    lines = [line(f"q{i}", chat(f"{i}", max_tokens=12)) for i in range(6)]
    slow = FakeExecutor(seconds=0.001)
    with house(tmp_path / "store", slow, api_key_file=str(keys)) as standing:
        meters = standing.app.service.meters
        meters._clock = lambda: 0.0  # no bucket fills
        ann, bob, cat, dan = (client(standing, f"key-of-{who}-0123456789") for who in names)
        limited = started(ann, lines)
        followed(ann, limited.id, lambda b: b.request_counts.completed == 2)
        for other in (bob, cat):
            ended = followed(other, started(other, lines).id)
            assert (ended.status, ended.request_counts.completed) == ("completed", 6)
        tokens = meters._by_name["cat"].tokens
        assert tokens is not None
        assert tokens.level(0.0) == 100_000 - ended.usage.total_tokens, "the rest is given back"
        counts = ann.batches.retrieve(limited.id).request_counts
        assert (counts.completed, counts.failed) == (2, 0)
        with pytest.raises(openai.RateLimitError):
            ann.chat.completions.create(**chat("over HTTP neither"))
        assert ann.batches.cancel(limited.id).status == "cancelling"
        assert followed(ann, limited.id).status == "cancelled", "a limit does not hold this up"
        most, single = 0, started(dan, lines)

        def alone(_: Any) -> bool:
            nonlocal most
            most = max(most, standing.scheduler.num_running)
            return False

        assert followed(dan, single.id, alone).status == "completed"
        assert most <= 1
        assert wait_for(lambda: {meter.live for meter in meters._by_name.values()} == {0})
        assert standing.idle()


def test_a_key_that_is_removed_has_its_batches_cancelled_and_no_others(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    ann, bob = "ann key-of-ann-0123456789\n", "bob key-of-bob-0123456789\n"
    keys.write_text(ann + bob)
    lines = [line(f"q{i}", chat(f"{i}", max_tokens=40, ignore_eos=True)) for i in range(60)]
    with house(tmp_path / "store", api_key_file=str(keys)) as standing:
        stands_still(standing, 41)  # bob has 40: one of ann's at least, and not all of hers
        by = {who: client(standing, f"key-of-{who}-0123456789") for who in ("ann", "bob")}
        run = {who: started(by[who], lines[:n]).id for who, n in (("ann", 60), ("bob", 40))}
        unread = started(by["ann"], lines[:3]).id
        followed(by["ann"], run["ann"], lambda b: b.request_counts.completed >= 1)
        keys.write_text(bob)
        standing.app.reload()
        with pytest.raises(openai.AuthenticationError):
            by["ann"].batches.retrieve(run["ann"])
        standing.executor.gate.set()
        assert followed(by["bob"], run["bob"]).request_counts.completed == 40
        keys.write_text(ann + bob)
        standing.app.reload()
        for id in (run["ann"], unread):
            over = by["ann"].batches.retrieve(id)
            assert (over.status, over.errors.data[0].code) == ("cancelled", "api_key_removed")
        over = by["ann"].batches.retrieve(run["ann"])
        assert 1 <= over.request_counts.completed < 60
        assert len(results(by["ann"], over.output_file_id)) == over.request_counts.completed
        left = results(by["ann"], over.error_file_id)
        assert len(left) == 60 - over.request_counts.completed
        assert {one["error"]["code"] for one in left.values()} == {"batch_cancelled"}
        assert standing.idle()


def test_a_row_that_comes_again_is_no_request_twice(tmp_path: Path) -> None:
    """Refused for its tokens, after it was let in as a request."""
    keys = tmp_path / "keys"
    keys.write_text("ann key-of-ann-0123456789 rpm=100 tpm=100\n")
    with house(tmp_path / "store", api_key_file=str(keys)) as standing:
        meters = standing.app.service.meters
        meters._clock = lambda: 0.0
        ann = client(standing, "key-of-ann-0123456789")
        body = chat("a", max_tokens=95, ignore_eos=True)
        batch = started(ann, [line(f"q{i}", body) for i in range(5)])
        followed(ann, batch.id, lambda b: b.request_counts.completed == 1)
        assert standing.idle()
        time.sleep(0.3)
        assert ann.batches.retrieve(batch.id).request_counts.completed == 1
        requests = meters._by_name["ann"].requests
        assert requests is not None
        assert requests.level(0.0) == 99
        ann.batches.cancel(batch.id)
        followed(ann, batch.id)


@pytest.mark.parametrize("where", ["conclude", "settle", "waiting", "fill"])
def test_what_fails_of_one_batch_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr("octavo.server.shift.TRY_AGAIN", 0.2)
    with house(tmp_path) as standing:
        by = client(standing)
        (shift,) = standing.app.service.lives
        assert isinstance(shift, Shift)
        real, broken, failed = getattr(shift._store, where), [""], [0]

        def fault(id: str, *more: Any, **values: Any) -> Any:
            broken[0] = broken[0] or id  # the first one that comes
            if id == broken[0] and failed[0] < 4:
                failed[0] += 1
                raise OSError("the disk says no")
            return real(id, *more, **values)

        monkeypatch.setattr(shift._store, where, fault)
        lines = [line(f"q{i}", chat(f"{i}", max_tokens=4)) for i in range(3)]
        first = started(by, lines)
        assert wait_for(lambda: failed[0])
        other = followed(by, started(by, lines).id)
        assert other.request_counts.completed == 3
        ended = followed(by, first.id)
        assert (ended.status, ended.request_counts.completed) == ("completed", 3)
        assert broken == [first.id]
        assert failed == [4]
        assert len(results(by, ended.output_file_id)) == 3


# ---- files ----


def test_files_are_listed_paged_and_deleted(tmp_path: Path) -> None:
    with house(tmp_path) as standing:
        by = client(standing)
        made = [by.files.create(file=(f"{i}.jsonl", b"x"), purpose="batch") for i in range(5)]
        ids = {file.id for file in made}
        assert {file.id for file in by.files.list(limit=2)} == ids, "the client pages"
        page = httpx.get(standing.url + "/v1/files?limit=2&order=asc").json()
        assert page["has_more"]
        assert page["last_id"] == page["data"][1]["id"]
        assert not by.files.list(purpose="batch_output").data
        for limit in ("0", "1" + "0" * 30, "000000001" + "0" * 30):
            assert httpx.get(f"{standing.url}/v1/files?limit={limit}").status_code == 400
        assert by.files.delete(made[0].id).deleted
        with pytest.raises(openai.NotFoundError):
            by.files.retrieve(made[0].id)
        assert len(list((tmp_path / "files").iterdir())) == 4


def test_keys_see_their_own_files_and_batches_alone(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann key-of-ann-0123456789\nbob key-of-bob-0123456789\n")
    with house(tmp_path / "store", api_key_file=str(keys)) as standing:
        ann, bob = (client(standing, f"key-of-{who}-0123456789") for who in ("ann", "bob"))
        batch = followed(ann, started(ann, [line("q", chat("secret"))]).id)
        assert batch.status == "completed"
        assert not bob.files.list().data
        assert not bob.batches.list().data
        for ask in (
            lambda: bob.files.retrieve(batch.output_file_id),
            lambda: bob.files.content(batch.output_file_id),
            lambda: bob.files.delete(batch.input_file_id),
            lambda: bob.batches.retrieve(batch.id),
            lambda: bob.batches.cancel(batch.id),
            lambda: bob.batches.create(
                input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                ask()
        assert len(ann.files.list().data) == 2
        assert httpx.get(standing.url + "/v1/files").status_code == 401


FORM = {"Content-Type": "multipart/form-data; boundary=b"}


def form(name: str = "in.jsonl", content: bytes = b"x", purpose: str = "batch") -> bytes:
    head = f'--b\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
    tail = f'\r\n--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n--b--'
    return head.encode() + content + tail.encode()


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"{}", {"Content-Type": "application/json"}, 400),
        (b"", FORM, 400),
        (form()[:-20], FORM, 400),
        (form(purpose="assistants"), FORM, 400),
        (form(purpose="x" * 5000), FORM, 400),
        (form(purpose=""), FORM, 400),
        (form(content=b"x" * 5000), FORM, 413),
        (form().replace(b'name="file"', b'name="fiel"'), FORM, 400),
        (form().replace(b'name="purpose"', b'name="porpoise"'), FORM, 400),
        (form()[:-2] + b"\r\nContent-Disposition: form-data; name=file\r\n\r\nz", FORM, 400),
        (b"--b\r\n" * 100, FORM, 400),
    ],
)  # fmt: skip
def test_a_hostile_upload_is_refused_and_leaves_nothing(
    tmp_path: Path, body: bytes, headers: dict[str, str], status: int
) -> None:
    with house(tmp_path, max_file=4096) as standing:
        answer = httpx.post(standing.url + "/v1/files", content=body, headers=headers)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
        assert not list((tmp_path / "files").iterdir())
        assert httpx.post(standing.url + "/v1/files", content=form(), headers=FORM).is_success


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a\\..\\b", "\x01\x02"])
def test_a_file_name_is_never_a_path(tmp_path: Path, name: str) -> None:
    with house(tmp_path / "store") as standing:
        made = httpx.post(standing.url + "/v1/files", content=form(name), headers=FORM).json()
        assert "/" not in made["filename"]
        assert "\\" not in made["filename"]
        assert [p.name for p in (tmp_path / "store" / "files").iterdir()] == [made["id"]]
        for path in ("../octavo.db", "..%2Foctavo.db", "%2e%2e/lock"):
            answer = httpx.get(f"{standing.url}/v1/files/{path}/content")
            assert answer.status_code in (404, 405)


def test_a_client_that_leaves_in_mid_upload_leaves_nothing(tmp_path: Path) -> None:
    with house(tmp_path) as standing:
        host, port = standing.url.removeprefix("http://").split(":")
        head = f"POST /v1/files HTTP/1.1\r\nHost: {host}\r\n"
        head += f"Content-Type: {FORM['Content-Type']}\r\nContent-Length: 100000\r\n\r\n"
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + form()[:80])
            assert wait_for(lambda: list((tmp_path / "files").iterdir()))
        assert wait_for(lambda: not list((tmp_path / "files").iterdir()))


def test_files_of_one_key_have_caps(tmp_path: Path) -> None:
    with house(tmp_path, max_files=2, max_file_storage=100) as standing:
        post = lambda content: httpx.post(  # noqa: E731
            standing.url + "/v1/files", content=form(content=content), headers=FORM
        )
        assert post(b"x" * 101).status_code == 413
        assert post(b"x" * 60).is_success
        assert post(b"x" * 60).status_code == 413, "only 40 bytes are left"
        assert post(b"x" * 10).is_success
        refused = post(b"x")
        assert refused.status_code == 429
        assert "retry-after" in refused.headers


@pytest.mark.parametrize("days", [1, 30])
def test_files_go_when_they_are_old(tmp_path: Path, days: int) -> None:
    store = Store(tmp_path)
    part = store.part()
    part.write_bytes(b"x")
    store.add_file(StoredFile("file-1", "", "x", "batch", 1, 0, days * 86400), part)
    store.expire_files(days * 86400 - 1)
    assert store.file("file-1", "") is not None
    store.expire_files(days * 86400)
    assert store.file("file-1", "") is None
    assert not store.path("file-1").exists()
    store.close()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/nothing"}, "endpoint"),
        ({"completion_window": "24 hours"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": "999h"}, "completion_window"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"input_file_id": 7}, "input_file_id"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "seconds"),
    ],
)
def test_a_batch_that_is_asked_for_badly_names_the_field(
    tmp_path: Path, fields: dict[str, Any], param: str
) -> None:
    with house(tmp_path) as standing:
        file = client(standing).files.create(file=("x", b"x"), purpose="batch")
        body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | fields
        answer = httpx.post(standing.url + "/v1/batches", json=body)
        assert answer.status_code == 400
        assert param in answer.json()["error"]["param"]


def test_without_a_directory_both_say_how_to_get_them() -> None:
    with outside(House(port=0)) as standing:
        for method, path in (
            ("GET", "/v1/files"),
            ("POST", "/v1/files"),
            ("GET", "/v1/batches/batch_1"),
            ("POST", "/v1/batches"),
        ):
            answer = httpx.request(method, standing.url + path)
            assert answer.status_code == 501
            assert "--batch-dir" in answer.json()["error"]["message"]


def test_what_is_not_offered_is_not_asked_for_again() -> None:
    with outside(House(port=0)) as standing:
        sent: list[str] = []
        hooks = {"request": [lambda request: sent.append(request.url.path)]}
        with httpx.Client(event_hooks=hooks) as counted:
            caller = client(standing).with_options(http_client=counted, max_retries=2)
            with pytest.raises(openai.InternalServerError):
                caller.files.list()
        assert sent == ["/v1/files"]


# ---- the store ----


def test_two_servers_do_not_share_a_directory(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(Exception, match="another server"):
        Store(tmp_path)
    store.close()
    Store(tmp_path).close()


def test_what_is_no_database_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "octavo.db").write_bytes(b"not a database, and long enough to be read as one" * 99)
    with pytest.raises(Exception, match=r"octavo\.db"):
        Store(tmp_path)


def test_bytes_that_no_row_knows_are_swept_at_the_start(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.part().write_bytes(b"x")
    store.path("file-orphan").write_bytes(b"x")
    store.close()
    store = Store(tmp_path)
    assert not list(store.bytes.iterdir())
    store.close()


def test_a_result_is_kept_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add_batch(Batch("batch_1", "", "", CHAT, "file-1", "24h", None, 0, 1, num_total=1))
    store.fill("batch_1", [Row(1, "a", b"{}")])
    assert store.settle("batch_1", 1, Settled(200, b"first", 1, 0, 2))
    assert not store.settle("batch_1", 1, Settled(200, b"second", 1, 0, 2))
    (row,) = store.rows("batch_1", (1,))
    assert row.result == b"first"
    batch = store.batch("batch_1", "")
    assert batch is not None
    assert (batch.num_done, batch.output_tokens) == (1, 2)
    store.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
@pytest.mark.parametrize("size", [10, 500_000])
def test_an_upload_that_finds_the_disk_full_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    def full(store: Store) -> Path:
        part = store.bytes / "part-full"
        part.symlink_to("/dev/full")
        return part

    with house(tmp_path) as standing:
        by = client(standing)
        before = started(by, [line("q", chat(max_tokens=2))])
        with monkeypatch.context() as patched:
            patched.setattr(Store, "part", full)
            with pytest.raises(openai.InternalServerError) as told:
                by.files.create(file=("in.jsonl", b"x" * size), purpose="batch")
        assert told.value.status_code == 507
        assert told.value.code == "insufficient_storage"
        assert "disk is full" in told.value.message
        assert "part-full" not in [path.name for path in standing.app.service.store.bytes.iterdir()]
        assert followed(by, before.id).status == "completed"
        assert by.files.create(file=("in.jsonl", b"x"), purpose="batch").bytes == 1


def test_a_database_that_finds_the_disk_full_is_told_so(tmp_path: Path) -> None:
    with house(tmp_path, max_files=5000) as standing:
        by = client(standing)
        db = standing.app.service.store._db
        pages = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA max_page_count = {pages}")  # SQLite says then what a full disk makes it
        many = (by.files.create(file=("a" * 255, b"x"), purpose="batch") for _ in range(2000))
        with pytest.raises(openai.InternalServerError) as told:
            list(many)
        assert (told.value.status_code, told.value.code) == (507, "insufficient_storage")
        db.execute("PRAGMA max_page_count = 1000000")
        assert by.files.create(file=("in.jsonl", b"x"), purpose="batch").bytes == 1


def test_a_full_disk_loses_nothing_and_is_not_filled_further(tmp_path: Path) -> None:
    """Files may not grow beyond a limit: SQLite and writes fail as they do on a full disk."""
    store = Store(tmp_path)
    batch = Batch("b1", "", "", CHAT, "f1", "24h", None, 0, 10**10, status="in_progress")
    store.add_batch(batch)
    rows = [Row(i, f"r{i}", b"{}") for i in range(1, 65)]
    store.fill("b1", rows)
    result = b'"' + b"x" * 10_000 + b'"'
    for row in rows[:32]:
        assert store.settle("b1", row.line, Settled(200, result))
    ledger = Ledger(store, ServerConfig())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        for _ in range(3):
            with pytest.raises((OSError, sqlite3.OperationalError)):
                ledger._conclude(batch, "completed")
            with pytest.raises(sqlite3.OperationalError):
                store.settle("b1", 40, Settled(200, result))
        assert not list(store.bytes.iterdir())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for row in rows[32:]:
        assert store.settle("b1", row.line, Settled(200, result))
    ledger._conclude(batch, "completed")
    (over,) = store.batches("", Page())
    assert over.status == "completed"
    assert over.num_done == 64
    assert len(list(store.bytes.iterdir())) == 1
    store.close()


def test_the_cap_on_tokens_of_an_answer_holds_in_batches_too(tmp_path: Path) -> None:
    endless = {"ignore_eos": True, "max_tokens": None}
    with house(tmp_path, max_output_tokens=9) as standing:
        by = client(standing)
        lines = [line("open", chat(**endless)), line("more", chat(max_tokens=10))]
        batch = followed(by, started(by, lines).id)
        done = results(by, batch.output_file_id)["open"]
        assert done["response"]["body"]["usage"]["completion_tokens"] == 9
        refused = results(by, batch.error_file_id)["more"]
        assert "at most 9 on this server" in json.dumps(refused)
