"""Every cap at the door: configurable, kept, and named when it is met."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import socket
import subprocess
import sys
import time
from typing import Any

import httpx
import pytest

from octavo.config import ServerConfig
from octavo.core.admission import Admission, Limits
from octavo.core.request import NO_SLO
from octavo.core.scheduler import Scheduler
from octavo.core.steptime import Coefficients, StepModel
from octavo.errors import InvalidRequest, Overloaded
from octavo.server import wire
from octavo.server.wire import most_files
from tests.server.fakes import FakeExecutor
from tests.server.house import PATIENCE, House, chat, completion, inside, outside, wait_for
from tests.server.test_life import CHAT, LONG, raw, running

pytestmark = pytest.mark.anyio
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"


def response(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "input": "hello", "temperature": 0} | fields


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize(
    ("caps", "path", "fine", "over", "param"),
    [
        ({"max_n": 2}, CHAT, chat(n=2), chat(n=3), "n"),
        ({"max_n": 2}, COMPLETIONS, completion(n=2), completion(n=3), "n"),
        ({"max_prompts": 2}, COMPLETIONS, completion(["a"] * 2), completion(["a"] * 3), "prompt"),
        ({"max_stops": 2}, CHAT, chat(stop=["a"] * 2), chat(stop=["a"] * 3), "stop"),
        ({"max_stops": 9}, CHAT, chat(stop=["a"] * 9), chat(stop=["a"] * 10), "stop"),
        ({}, CHAT, chat(stop=["a"] * 4), chat(stop=["a"] * 5), "stop"),
        (
            {"max_logprobs": 3},
            CHAT,
            chat(logprobs=True, top_logprobs=3),
            chat(logprobs=True, top_logprobs=4),
            "top_logprobs",
        ),
        ({"max_logprobs": 3}, COMPLETIONS, completion(logprobs=3), completion(logprobs=4),
         "logprobs"),
        ({}, CHAT, chat(logprobs=True, top_logprobs=20), chat(logprobs=True, top_logprobs=21),
         "top_logprobs"),
        ({"max_output_tokens": 9}, CHAT, chat(max_tokens=9), chat(max_tokens=10), "max_tokens"),
        ({"max_output_tokens": 9}, CHAT, chat(max_tokens=None, max_completion_tokens=9),
         chat(max_tokens=None, max_completion_tokens=10), "max_completion_tokens"),
        ({"max_output_tokens": 9}, COMPLETIONS, completion(max_tokens=9), completion(max_tokens=10),
         "max_tokens"),
        ({"max_output_tokens": 9}, RESPONSES, response(max_output_tokens=9),
         response(max_output_tokens=10), "max_output_tokens"),
    ],
)  # fmt: skip
async def test_a_cap_on_a_request_is_kept_and_named(
    caps: dict[str, Any], path: str, fine: dict[str, Any], over: dict[str, Any], param: str
) -> None:
    async with inside(House(**caps)) as client:
        assert (await client.post(path, json=fine)).status_code == 200
        refused = await client.post(path, json=over)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == param
        assert re.search(r"at most \d+", refused.json()["error"]["message"])


@pytest.mark.parametrize(
    ("caps", "field", "most"),
    [
        ({"max_n": 3}, "n", 3),
        ({"max_output_tokens": 9}, "max_tokens", 9),
        ({"max_output_tokens": 9}, "max_completion_tokens", 9),
        ({"max_logprobs": 4}, "top_logprobs", 4),
    ],
)
async def test_too_little_and_too_much_are_told_the_same_bounds(
    caps: dict[str, Any], field: str, most: int
) -> None:
    low = 0 if "logprobs" in field else 1
    fields = {"max_tokens": None, "logprobs": True} if "max" in field or not low else {}
    async with inside(House(**caps)) as client:
        for wrong in (low - 1, most + 1, 10**6):
            refused = await client.post(CHAT, json=chat(**(fields | {field: wrong})))
            said = refused.json()["error"]
            assert (refused.status_code, said["param"]) == (400, field)
            bounds = f"{field} must be at least {low} and at most {most} on this server"
            assert said["message"] == f"{bounds}, got {wrong}"


def written(answer: dict[str, Any]) -> int:
    usage = answer["usage"]
    return usage["output_tokens"] if "output_tokens" in usage else usage["completion_tokens"]


async def test_who_asks_for_no_number_of_tokens_gets_what_the_server_lets_one_have() -> None:
    endless = {"ignore_eos": True, "max_tokens": None}
    hello = [{"role": "user", "content": "hello"}]
    asked = {
        CHAT: chat(**endless),
        RESPONSES: response(ignore_eos=True),
        COMPLETIONS: completion(**endless),
    }
    house = House(max_output_tokens=9)
    async with inside(house) as client:
        for path, body in asked.items():
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert written(answer.json()) == 9, path
        both = await client.post(CHAT, json=chat(n=2, **endless))
        assert written(both.json()) == 18
        assert [c["finish_reason"] for c in both.json()["choices"]] == ["length"] * 2
        messages = {"model": "fake", "messages": hello, "max_tokens": 10}
        refused = await client.post("/v1/messages", json=messages)
        assert refused.status_code == 400
        assert "max_tokens must be at least 1 and at most 9" in refused.json()["error"]["message"]
        room = house.app.service.served.door.room
        prompt = (await client.post(CHAT, json=chat(**endless))).json()["usage"]["prompt_tokens"]
        fill = room - prompt + len("hello") - 3  # of the prompt, so that three tokens are left
        nearly = await client.post(CHAT, json=chat("x" * fill, **endless))
        assert nearly.status_code == 200, nearly.text
        assert written(nearly.json()) == 3
        full = await client.post(CHAT, json=chat("x" * (fill + 3), **endless))
        assert full.json()["error"]["code"] == "context_length_exceeded"
        assert "max_tokens" not in full.json()["error"]["message"]
    async with inside(House(max_output_tokens=30)) as client:  # OpenAI's own default stays
        assert written((await client.post(COMPLETIONS, json=completion(**endless))).json()) == 16
    async with inside(House()) as client:
        whole = await client.post(CHAT, json=chat(**endless))
        assert whole.json()["usage"]["total_tokens"] == room


async def test_a_full_house_says_which_flag_it_is() -> None:
    async with inside(House(max_queue=1)) as client:
        client._transport.app.service.occupancy.enter()  # type: ignore[attr-defined]
        refused = await client.post(CHAT, json=chat())
        assert refused.status_code == 503
        assert "--max-queue" in refused.json()["error"]["message"]


async def test_bytes_of_a_body_and_of_all_bodies() -> None:
    async with inside(House(max_body=500)) as client:
        assert (await client.post(CHAT, json=chat("x" * 1000))).status_code == 413
    house = House(max_bodies=2000)
    async with inside(house) as client:
        assert (await client.post(CHAT, json=chat("x" * 1000))).status_code == 200
        refused = await client.post(CHAT, json=chat("x" * 2000))
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert house.app.service.bodies.held == 0


def test_prompts_that_wait_are_capped_by_the_time_they_would_take() -> None:
    scheduler = Scheduler(FakeExecutor().capacity, model=StepModel(Coefficients(1e-6, 0.01)))
    admission = Admission(scheduler, Limits(queued_seconds=10.0))
    first = admission.enter("a", 3600, NO_SLO, 0.0)  # about 900 tokens: 9 s
    with pytest.raises(Overloaded, match="the cap is 10 s") as error:
        admission.enter("b", 800, NO_SLO, 0.0)
    assert error.value.retry_after == pytest.approx(1.0)
    admission.first_token(first)
    alone = admission.enter("b", 80_000, NO_SLO, 0.0)  # alone it may, or it never could
    admission.leave(alone)
    admission.leave(first)
    assert not admission.by_tenant


def test_a_body_of_megabytes_that_is_still_parsed_keeps_no_others_out() -> None:
    scheduler = Scheduler(FakeExecutor().capacity, model=StepModel(Coefficients(1e-6, 0.01)))
    admission = Admission(scheduler, Limits(queued_seconds=60.0))
    huge = admission.enter("a", 8 << 20, NO_SLO, 0.0)  # it would be 21,000 s, as one prompt
    other = admission.enter("b", 3600, NO_SLO, 0.0)
    admission.leave(huge)
    assert admission.queued_tokens == pytest.approx(900.0)
    admission.leave(other)
    assert not admission.by_tenant


# ---- on the wire ---------------------------------------------------------------------------------


def connect(house: House) -> socket.socket:
    host, port = house.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes came at a time into the server, and have been dealt with."""
    sizes: list[int] = []
    real = wire._Wire.data_received

    def data_received(self: wire._Wire, data: bytes) -> None:
        real(self, data)
        sizes.append(len(data))

    monkeypatch.setattr(wire._Wire, "data_received", data_received)
    return sizes


def answer(made: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and JSON of what comes until the server closes."""
    got = b""
    while True:
        try:
            part = made.recv(65536)
        except ConnectionResetError:
            break
        if not part:
            break
        got += part
    head, _, body = got.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body) if body else {}


def test_a_head_without_end_is_closed() -> None:
    with outside(House(port=0, max_head=4000)) as house:
        for piece in (b"x-a: b\r\n", b"x", b"x-a: " + b"b" * 200 + b"\r\n"):
            with connect(house) as made:
                made.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n")
                sent = 0
                while sent < 200_000:
                    try:
                        made.sendall(piece * (1000 // len(piece)))
                    except OSError:
                        break
                    sent += 1000
                assert answer(made)[0] == 431
        with connect(house) as made:  # in one piece, and whole
            made.sendall(b"GET /health HTTP/1.1\r\nx-a: " + b"b" * 4000 + b"\r\n\r\n")
            status, body = answer(made)
            assert (status, body["error"]["code"]) == (431, "head_too_large")
        with connect(house) as made:
            made.sendall(b"GET /" + b"b" * 5000 + b" HTTP/1.1\r\n\r\n")
            assert answer(made)[0] == 431
        fine = httpx.get(house.url + "/health", headers={"x-a": "b" * 3000})
        assert fine.status_code == 200
        big = chat("x" * 30_000, max_tokens=1)  # a body is no head
        assert httpx.post(house.url + CHAT, json=big).status_code == 400


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nno header\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=range(6),
)
def test_what_is_no_http_is_told_so_in_the_apis_shape(sent: bytes) -> None:
    with outside(House(port=0)) as house:
        with connect(house) as made:
            made.sendall(sent)
            status, body = answer(made)
        assert (status, body["error"]["code"]) == (400, "invalid_http")
        assert body["error"]["type"] == "invalid_request_error"
        assert httpx.get(house.url + "/health").status_code == 200


def filled(size: int, more: str = "") -> bytes:
    """A head of so many bytes, most of them white space, which a parser does not hand on."""
    start = f"GET /health HTTP/1.1\r\nhost: x\r\n{more}x-a:".encode()
    return start + b" " * (size - len(start) - 5) + b"a\r\n\r\n"


def replied(made: socket.socket) -> int:
    """The status of one answer, of which nothing is left unread."""
    with made.makefile("rb") as file:
        status, length = int(file.readline().split()[1]), 0
        while (line := file.readline().lower()) not in (b"\r\n", b""):
            if line.startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        assert len(file.read(length)) == length
    return status


@pytest.mark.parametrize("piece", [100_000, 3999, 2000, 50])
def test_a_head_is_counted_to_the_byte_in_whatever_pieces_it_comes(piece: int) -> None:
    most = 4000

    def sent(made: socket.socket, head: bytes) -> int:
        for at in range(0, len(head), piece):
            made.sendall(head[at : at + piece])
        return replied(made)

    with outside(House(port=0, max_head=most)) as house:
        with connect(house) as made:  # the second of a connection is measured like the first
            assert sent(made, filled(most)) == 200
            assert sent(made, filled(most)) == 200
            assert sent(made, filled(most + 1)) == 431
        with connect(house) as made:
            assert sent(made, b"\r\n" * 10 + filled(most - 20)) == 200
            assert sent(made, filled(2 * most)) == 431
        with connect(house) as made:
            assert sent(made, filled(most + 1)) == 431


def test_a_body_beside_a_head_is_no_part_of_it() -> None:
    with outside(House(port=0, max_head=4000)) as house, connect(house) as made:
        body = json.dumps(chat("x" * 30_000, max_tokens=1)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        for _ in range(3):
            made.sendall(head + body)
            assert replied(made) == 400  # a prompt so long


CHUNKED = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n".encode()


@pytest.mark.parametrize(
    "begun",
    [b"0\r\n", b"0\r\nx:", b"0\r\nx: 1\r\n", b"5;", b"1\r\na\r\n0\r\ny:", b"1\r\na\r\n2;x="],
)
def test_what_has_no_end_beside_a_body_is_refused(begun: bytes, taken: list[int]) -> None:
    """A trailer's name or value, a chunk's extension: a parser keeps, or waits, as long as it
    comes."""
    with outside(House(port=0, max_head=4000)) as house, connect(house) as made:
        sent = 0
        for piece in (CHUNKED + b"\r\n" + begun + b"a" * 4001, b"a" * 4001):
            made.sendall(piece)
            sent += len(piece)
            # Or all of it comes in one piece, that has the body's end in it.
            assert wait_for(lambda sent=sent: sum(taken) == sent)
        status, told = answer(made)
        assert (status, told["error"]["code"]) == (431, "head_too_large")


def test_a_trailer_is_no_header() -> None:
    body = json.dumps(chat(max_tokens=1)).encode()
    sent = b"%s\r\n%x\r\n%s\r\n0\r\n" % (CHUNKED, len(body), body)
    bad = b"x-octavo-timeout-ms: never\r\n"
    with outside(House(port=0)) as house, connect(house) as made:
        for trailer in (b"", b"x-a: 1\r\n", bad):
            made.sendall(sent + trailer + b"\r\n")
            assert replied(made) == 200
        made.sendall(sent.replace(b"host: x\r\n", b"host: x\r\n" + bad) + b"\r\n")
        assert replied(made) == 400


def test_a_head_that_does_not_come_is_closed(taken: list[int]) -> None:
    with outside(House(port=0, head_timeout=30.0)) as house:
        silent, slow = connect(house), connect(house)
        slow.sendall(b"GET /health HT")
        assert httpx.get(house.url + "/health").status_code == 200  # they were let in before it
        house.later(30.0)
        for made in (silent, slow):
            status, body = answer(made)
            assert (status, body["error"]["code"]) == (408, "head_timeout")
            made.close()
        with httpx.Client(base_url=house.url) as client:
            assert client.get("/health").status_code == 200
            house.later(40.0)  # between two requests it may be silent for longer
            assert client.get("/health").status_code == 200
        with connect(house) as made:  # a second head on the same connection has its time too
            made.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            got = made.recv(65536)
            taken.clear()
            made.sendall(b"GET /he")
            assert wait_for(lambda: taken)
            house.later(30.0)
            while b"408" not in got:
                part = made.recv(65536)
                assert part, got
                got += part
            assert got.startswith(b"HTTP/1.1 200")


def test_a_body_that_does_not_come_is_closed() -> None:
    with outside(House(port=0, body_timeout=0.3)) as house, connect(house) as made:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{{"
        made.sendall(head.encode())
        got = b""
        while b"body_timeout" not in got:
            part = made.recv(65536)
            assert part, got
            got += part
        assert got.startswith(b"HTTP/1.1 408")


MANY = 6 << 20  # bytes: more than all buffers between two sockets hold
EARLY = {
    "too large": (CHAT, f"content-length: {MANY}\r\n", b"x" * MANY, 413, "body_too_large"),
    "too large, in chunks": (
        CHAT, "transfer-encoding: chunked\r\n", b"10000\r\n" + b"x" * 65536 + b"\r\n", 413,
        "body_too_large",
    ),
    "too large for Anthropic's": (
        "/v1/messages", f"content-length: {MANY}\r\n", b"x" * MANY, 413, "body_too_large",
    ),
    "to nowhere": ("/v1/none", f"content-length: {MANY}\r\n", b"x" * MANY, 404, "not_found"),
    "a head without end": (CHAT, "", b"x-a: b\r\n", 431, "head_too_large"),
    "no chunks": (CHAT, "transfer-encoding: chunked\r\n", b"zz\r\n", 400, "invalid_http"),
}  # fmt: skip


@pytest.mark.parametrize("closing", ["connection: close\r\n", ""], ids=["close", "keep"])
@pytest.mark.parametrize("name", EARLY)
def test_a_refusal_is_read_by_a_client_that_goes_on_sending(name: str, closing: str) -> None:
    """RFC 9112, 9.6: closing with bytes unread would reset the connection, and the answer go."""
    path, length, body, status, code = EARLY[name]
    caps = {"max_body": 1000, "max_head": 4000}
    with outside(House(port=0, **caps)) as house, connect(house) as made:
        end = "" if status == 431 else "\r\n"
        made.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\n{closing}{length}{end}".encode())
        time.sleep(0.05)  # the refusal is on its way before the most of the body is
        block = body * max(1, 65536 // len(body))
        for _ in range(0, MANY, len(block)):
            made.sendall(block)
        got = b""
        while b"}}" not in got:
            part = made.recv(65536)
            assert part, got
            got += part
        head, _, said = got.partition(b"\r\n\r\n")
        assert int(head.split()[1]) == status
        assert json.loads(said)["error"].get("code") == code
        if closing or status in (400, 431):
            assert made.recv(65536) == b""  # its end is an end, not a reset


def test_a_client_that_goes_on_sending_does_not_do_so_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "LINGER", 0.3)
    for closing in ("connection: close\r\n", ""):
        with outside(House(port=0, max_body=1000)) as house, connect(house) as made:
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{closing}content-length: 99999999\r\n\r\n"
            made.sendall(head.encode())
            end = time.monotonic() + PATIENCE
            with contextlib.suppress(OSError):  # a reset, or a broken pipe
                while time.monotonic() < end:
                    made.sendall(b"x" * 1000)
                    time.sleep(0.01)
            assert time.monotonic() < end
            assert httpx.get(house.url + "/health").status_code == 200


def test_an_early_answer_leaves_a_connection_that_can_be_used_again() -> None:
    small = House(port=0, max_body=1000)
    with outside(small) as house, httpx.Client(base_url=house.url) as client:
        for _ in range(3):
            assert client.post(CHAT, content=b"x" * MANY).status_code == 413
            assert client.get("/health").status_code == 200


NONSENSE = {
    "no HTTP": b"\0\r\n\r\n",
    "a head without end": b"GET / HTTP/1.1\r\n" + b"x-a: b\r\n" * 3000,
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("sent", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_behind_a_request_ends_it_and_disturbs_nobody(
    stream: bool, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing can be written to that client any more: nobody may try, and none computes for it."""
    with outside(House(FakeExecutor(seconds=0.003), port=0, max_head=4000)) as house:
        made = raw(house, chat(stream=stream, **LONG))
        assert wait_for(lambda: running(house) == 1)
        if stream:
            assert b"200 OK" in made.recv(1000)
        made.sendall(sent)
        with httpx.Client(base_url=house.url) as client:
            text = client.post(CHAT, json=chat(stream=True, max_tokens=50, ignore_eos=True)).text
        assert "[DONE]" in text
        assert house.idle()
        made.close()
    assert not [one for one in caplog.records if one.exc_info], caplog.text


@pytest.mark.parametrize("rest", ["an empty line", "the rest of a body"])
def test_an_idle_connection_is_closed_whatever_came_last(rest: str, taken: list[int]) -> None:
    length = 2000 if "body" in rest else 0
    head = f"POST /v1/none HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n"
    with outside(House(port=0)) as house, connect(house) as made:
        made.sendall(head.encode())
        assert b"404" in made.recv(65536)
        taken.clear()
        made.sendall(b"x" * length or b"\r\n")
        assert wait_for(lambda: sum(taken) == (length or 2))
        house.later(76.0)  # than which serve.py lets none be idle longer
        while made.recv(65536):
            pass  # its answer may come in two parts


def test_one_connection_too_many_is_told_to_come_back() -> None:
    with outside(House(port=0, max_connections=3)) as house:
        held = [connect(house) for _ in range(3)]
        for made in held:
            made.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert made.recv(65536).startswith(b"HTTP/1.1 200")
        with connect(house) as made:
            status, body = answer(made)
            assert (status, body["error"]["code"]) == (503, "server_overloaded")
        held.pop().close()

        def let_in() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(house.url + "/health").status_code == 200
            return False

        assert wait_for(let_in), "the place was not free again"
        for made in held:
            made.close()


def test_the_files_that_may_be_open_are_raised_as_far_as_may_be() -> None:
    most = most_files()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == most or soft == resource.RLIM_INFINITY
    assert most == min(65536, hard) or hard == resource.RLIM_INFINITY or most >= 65536


def test_malloc_takes_our_settings_where_it_is_glibcs() -> None:
    code = "import platform; from octavo.server.memory import steady; " \
           "assert steady() or platform.libc_ver()[0] != 'glibc'"  # fmt: skip
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_stops": 0},
        {"max_output_tokens": 0},
        {"max_logprobs": 21},
        {"max_head": 0},
        {"max_connections": 0},
        {"max_bodies": 0},
        {"head_timeout": 0.0},
        {"body_timeout": -1.0},
        {"send_timeout": 0.0},
        {"max_queued_seconds": 0.0},
    ],
)
def test_a_cap_that_makes_no_sense_is_named(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(InvalidRequest, match=name.replace("_", "-")):
        ServerConfig(**wrong)
