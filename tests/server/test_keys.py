"""Keys with limits and admin keys, reloading, TLS, CORS, and the time a request may take."""

from __future__ import annotations

import asyncio
import logging
import shutil
import ssl
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from octavo.config import ServerConfig
from octavo.core.fair import Fair
from octavo.core.policies import policy_of
from octavo.errors import InvalidRequest, TenantLimit
from octavo.server.auth import Key, Keys
from octavo.server.meters import Bucket, Meters, shown_seconds
from octavo.server.serve import Shutdown, bind, serve
from tests.server.fakes import FakeExecutor
from tests.server.house import House, chat, events, inside, outside, wait_for
from tests.server.test_life import CHAT, LONG

pytestmark = pytest.mark.anyio

ALICE, BOB, ROOT = "alice-key-0123456789", "bob-key-0123456789ab", "root-key-0123456789a"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def keyed(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "keys"
    path.write_text("\n".join(lines))
    return str(path)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# ---- limits --------------------------------------------------------------------------------------


def test_a_bucket_fills_evenly_and_waits_are_true() -> None:
    bucket = Bucket(60.0, 0.0)
    assert bucket.wait(60.0, 0.0) == 0.0
    bucket.take(60.0, 0.0)
    assert bucket.wait(1.0, 0.0) == pytest.approx(1.0)
    assert bucket.wait(1.0, 1.0) == pytest.approx(0.0)
    assert bucket.wait(1000.0, 1.0) == pytest.approx(59.0), "all it can hold is enough"
    bucket.take(30.0, 60.0)  # full again, then half
    assert bucket.level(60.0) == pytest.approx(30.0)
    bucket.resize(120.0, 60.0)
    assert bucket.level(60.0) == pytest.approx(90.0)
    bucket.take(-1000.0, 60.0)
    assert bucket.level(60.0) == 120.0


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.0, "0ms"), (0.0121, "13ms"), (1.5, "1.5s"), (360.0, "6m0s")]
)
def test_resets_are_written_as_openai_does(seconds: float, shown: str) -> None:
    assert shown_seconds(seconds) == shown


async def test_requests_a_minute(tmp_path: Path) -> None:
    now = [1000.0]
    path = keyed(tmp_path, f"alice {ALICE} rpm=2", f"bob {BOB}")
    house = House(api_key_file=path)
    house.app.service.meters._clock = lambda: now[0]
    async with inside(house) as client:
        answers = [
            await client.post(CHAT, json=chat(max_tokens=1), headers=bearer(ALICE))
            for _ in range(3)
        ]
        assert [a.status_code for a in answers] == [200, 200, 429]
        assert [a.headers["x-ratelimit-remaining-requests"] for a in answers] == ["1", "0", "0"]
        assert answers[0].headers["x-ratelimit-limit-requests"] == "2"
        assert "x-ratelimit-limit-tokens" not in answers[0].headers
        refused = answers[2].json()["error"]
        assert (refused["type"], refused["code"]) == ("requests", "rate_limit_exceeded")
        assert "alice" in refused["message"]
        wait = int(answers[2].headers["retry-after"])
        assert 30 <= wait <= 37  # half a minute, and a little so that not all come at once
        other = await client.post(CHAT, json=chat(max_tokens=1), headers=bearer(BOB))
        assert other.status_code == 200
        assert not any(name.startswith("x-ratelimit") for name in other.headers)
        now[0] += wait
        again = await client.post(CHAT, json=chat(max_tokens=1), headers=bearer(ALICE))
        assert again.status_code == 200


async def test_tokens_a_minute_are_reserved_and_given_back(tmp_path: Path) -> None:
    path = keyed(tmp_path, f"alice {ALICE} tpm=1000")
    house = House(api_key_file=path)
    house.app.service.meters._clock = lambda: 5.0
    async with inside(house, **bearer(ALICE)) as client:
        first = await client.post(CHAT, json=chat("x", max_tokens=10, ignore_eos=True))
        used = first.json()["usage"]["total_tokens"]
        meter = house.app.service.meters._by_name["alice"]
        assert meter.tokens is not None
        assert meter.tokens.level(5.0) == 1000 - used
        refused = await client.post(CHAT, json=chat("x", max_tokens=1000))
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("tokens", "rate_limit_exceeded")
        assert int(refused.headers["x-ratelimit-remaining-tokens"]) == 1000 - used
        assert meter.tokens.level(5.0) == 1000 - used, "a refusal costs no tokens"
        assert meter.live == 0


async def test_counting_tokens_is_a_request_too(tmp_path: Path) -> None:
    path = keyed(tmp_path, f"alice {ALICE} rpm=1")
    house = House(api_key_file=path)
    house.app.service.meters._clock = lambda: 5.0
    async with inside(house, **bearer(ALICE)) as client:
        body = {"model": "fake", "prompt": "hello"}
        answers = [await client.post("/tokenize", json=body) for _ in range(2)]
        assert [a.status_code for a in answers] == [200, 429]
        assert answers[0].headers["x-ratelimit-remaining-requests"] == "0"


def test_so_many_at_once(tmp_path: Path) -> None:
    path = keyed(tmp_path, f"alice {ALICE} concurrent=2", f"bob {BOB}")
    executor = FakeExecutor()
    executor.gate.clear()
    with outside(House(executor, port=0, api_key_file=path)) as house:
        with ThreadPoolExecutor() as pool:
            post = lambda key, **more: httpx.post(  # noqa: E731
                house.url + CHAT, json=chat(**more), headers=bearer(key)
            )
            running = [pool.submit(post, ALICE, max_tokens=100, ignore_eos=True) for _ in range(2)]
            assert wait_for(lambda: len(house.driver.tickets) == 2)
            refused = post(ALICE)
            assert refused.status_code == 429
            assert refused.json()["error"]["type"] == "requests"
            assert int(refused.headers["retry-after"]) >= 1
            executor.gate.set()
            assert post(BOB, max_tokens=1).status_code == 200
            assert all(work.result().status_code == 200 for work in running)
            assert post(ALICE, max_tokens=1).status_code == 200
        meter = house.app.service.meters._by_name["alice"]
        assert wait_for(lambda: meter.live == 0), "a moment after its answer was read"


def test_a_meter_counts_nothing_it_refuses() -> None:
    meters = Meters(lambda: 0.0)
    key = Key("a", b"", rpm=1, tpm=10, concurrent=5)
    meter = meters.of(key)
    assert meter is not None
    with meters.enter(meter):
        assert meter.live == 1
    for _ in range(3):
        with pytest.raises(TenantLimit):
            meters.enter(meter)
    assert meter.live == 0
    assert meters.of(Key("b", b"")) is None


# ---- who may see ---------------------------------------------------------------------------------


async def test_an_admin_key_sees_what_others_asked_and_metrics(tmp_path: Path) -> None:
    path = keyed(tmp_path, f"alice {ALICE}", f"root {ROOT} admin")
    async with inside(House(api_key_file=path)) as client:
        own = await client.post(CHAT, json=chat(max_tokens=1), headers=bearer(ALICE))
        trace = f"/v1/requests/{own.json()['id']}/trace"
        assert (await client.get(trace, headers=bearer(ROOT))).status_code == 200
        assert (await client.get("/metrics", headers=bearer(ROOT))).status_code == 200
        refused = await client.get("/metrics", headers=bearer(ALICE))
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "admin_key_needed"
    async with inside(House(api_key_file=keyed(tmp_path, f"alice {ALICE}"))) as client:
        assert (await client.get("/metrics", headers=bearer(ALICE))).status_code == 200


# ---- reloading -----------------------------------------------------------------------------------


def test_keys_are_read_again_while_a_stream_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "octavo")
    path = keyed(tmp_path, f"alice {ALICE}")
    house = House(port=0, api_key_file=path)
    house.executor.gate.clear()
    with outside(house), ThreadPoolExecutor() as pool:
        body = chat(stream=True, max_tokens=200, ignore_eos=True)
        stream = pool.submit(httpx.post, house.url + CHAT, json=body, headers=bearer(ALICE))
        assert wait_for(lambda: house.engine.snapshot()["running"] == 1)
        keyed(tmp_path, f"bob {BOB} rpm=1")
        house.app.reload()
        ask = lambda key: httpx.get(house.url + "/v1/models", headers=bearer(key))  # noqa: E731
        assert ask(BOB).status_code == 200
        assert ask(ALICE).status_code == 401
        house.executor.gate.set()
        assert events(stream.result().text)[-1] == "[DONE]"
        for bad in ("", "short", f"bob {BOB} rpm=none"):
            keyed(tmp_path, bad)
            house.app.reload()
            assert ask(BOB).status_code == 200, "a bad file changes nothing"
        assert "stay as they were" in caplog.text


async def test_weights_that_a_reload_changes_hold_from_then_on(tmp_path: Path) -> None:
    """For the turn of the tenants, and for who has more than its share. No clock: every token
    that is served costs its tenant 1 / weight of what it costs at weight 1."""
    path = keyed(tmp_path, f"alice {ALICE}", f"bob {BOB} weight=4")
    keys = Keys.read(path)
    policy = policy_of("fair", keys.weights)
    house = House(policy=policy, api_key_file=path, keys=keys)
    order = house.scheduler._order
    assert isinstance(order, Fair)

    async def cost(key: str, name: str) -> float:
        before = order._entrance.place(name, order._orders)  # who comes anew begins there
        body = chat("the same", max_tokens=8, ignore_eos=True)
        assert (await by.post(CHAT, json=body, headers=bearer(key))).status_code == 200
        return order.counters[name] - before

    async with inside(house) as by:
        await cost(ALICE, "alice"), await cost(BOB, "bob")  # the prefix cache is warm from here
        full, quarter = await cost(ALICE, "alice"), await cost(BOB, "bob")
        assert full == pytest.approx(4 * quarter)
        keyed(tmp_path, f"alice {ALICE} weight=2", f"bob {BOB}")
        house.app.reload()
        assert await cost(ALICE, "alice") == pytest.approx(full / 2)
        assert await cost(BOB, "bob") == pytest.approx(full)
        assert house.admission.limits.weights == {"alice": 2.0}
        keyed(tmp_path, f"alice {ALICE} weight=none")
        house.app.reload()
        assert house.admission.limits.weights == {"alice": 2.0}, "a bad file changes nothing"


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (f"a {ALICE} rpm=0", "rpm=0"),
        (f"a {ALICE} tpm=many", "tpm=many"),
        (f"a {ALICE} concurrent=-1", "concurrent=-1"),
        (f"a {ALICE} admin=yes", "admin=yes"),
        (f"a {ALICE}\na {BOB}", "'a'"),
    ],
)
def test_a_wrong_limit_is_named(tmp_path: Path, line: str, wrong: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        Keys.read(keyed(tmp_path, line))
    assert wrong in str(error.value)


# ---- TLS -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate with")
    room = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", "key.pem", "-out", "cert.pem", "-days", "3650", "-subj",
         "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        cwd=room, check=True, capture_output=True,
    )  # fmt: skip
    return str(room / "cert.pem"), str(room / "key.pem")


def test_https(certificate: tuple[str, str]) -> None:
    cert, key = certificate
    with outside(House(port=0, tls_cert=cert, tls_key=key)) as house:
        url = house.url.replace("http://", "https://")
        trusted = ssl.create_default_context(cafile=cert)
        with httpx.Client(base_url=url, verify=trusted) as client:
            answer = client.post(CHAT, json=chat(stream=True, max_tokens=5))
            assert events(answer.text)[-1] == "[DONE]"
            house.app.reload()
            assert client.get("/health").status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(house.url + "/health")


def test_a_bad_certificate_is_one_line(tmp_path: Path, certificate: tuple[str, str]) -> None:
    (tmp_path / "bad.pem").write_text("nonsense")
    house = House(port=0, tls_cert=str(tmp_path / "bad.pem"), tls_key=certificate[1])
    bound = bind(house.app.config)
    with pytest.raises(InvalidRequest, match="--tls-cert"):
        asyncio.run(serve(house.app, bound, Shutdown(), lambda: None))
    bound.close()
    with pytest.raises(InvalidRequest, match="--tls-key"):
        ServerConfig(tls_cert="x.pem")


def test_a_certificate_that_is_gone_is_named_and_the_old_one_stays(
    tmp_path: Path, certificate: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = (str(shutil.copy(path, tmp_path)) for path in certificate)
    with outside(House(port=0, tls_cert=cert, tls_key=key)) as house:
        Path(key).unlink()
        house.app.reload()
        assert f"--tls-key {key}: No such file" in caplog.text
        trusting = ssl.create_default_context(cafile=cert)
        url = house.url.replace("http://", "https://")
        assert httpx.get(url + "/health", verify=trusting).status_code == 200


# ---- CORS ----------------------------------------------------------------------------------------

PAGE = "https://chat.example.com"
ASK = {"origin": PAGE, "access-control-request-method": "POST"}


async def test_pages_are_kept_out_unless_their_origin_is_named() -> None:
    async with inside(House()) as client:
        for asked in (
            await client.options(CHAT, headers=ASK),
            await client.post(CHAT, json=chat(max_tokens=1), headers={"origin": PAGE}),
        ):
            assert asked.status_code == 403
            assert not any(name.startswith("access-control") for name in asked.headers)


async def test_a_named_page_may_ask_and_read(tmp_path: Path) -> None:
    path = keyed(tmp_path, f"alice {ALICE}")
    async with inside(House(cors_origin=(PAGE,), api_key_file=path)) as client:
        wanted = "authorization,content-type,x-stainless-lang,x-evil"
        before = await client.options(
            CHAT, headers=ASK | {"access-control-request-headers": wanted}
        )
        assert before.status_code == 204
        assert before.headers["access-control-allow-origin"] == PAGE
        allowed = before.headers["access-control-allow-headers"].replace(" ", "").split(",")
        assert {"authorization", "content-type", "x-stainless-lang"} <= set(allowed)
        assert "x-evil" not in allowed
        assert "POST" in before.headers["access-control-allow-methods"]
        assert before.headers["vary"] == "origin"
        answer = await client.post(
            CHAT, json=chat(max_tokens=1), headers={"origin": PAGE} | bearer(ALICE)
        )
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        refused = await client.post(CHAT, json=chat(), headers={"origin": PAGE})
        assert refused.status_code == 401, "a preflight is no key"
        assert refused.headers["access-control-allow-origin"] == PAGE, "or the page sees no error"
        other = await client.options(CHAT, headers=ASK | {"origin": "https://evil.example"})
        assert other.status_code == 403
        assert "access-control-allow-origin" not in other.headers
        assert other.headers["vary"] == "origin"


@pytest.mark.parametrize(
    ("origins", "keys"), [(("*",), None), (("example.com",), "k"), (("https://a/b",), "k")]
)
def test_an_origin_that_is_none_is_refused(origins: tuple[str, ...], keys: str | None) -> None:
    with pytest.raises(InvalidRequest, match="cors-origin"):
        ServerConfig(cors_origin=origins, api_key_file=keys)


# ---- the time a request may take -----------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_ends_at_its_time(stream: bool) -> None:
    house = House(FakeExecutor(seconds=0.01), port=0, timeout=60.5)
    with outside(house), ThreadPoolExecutor() as pool:
        asking = pool.submit(httpx.post, house.url + CHAT, json=chat(stream=stream, **LONG))
        assert wait_for(lambda: house.engine.snapshot()["output_tokens"] > 4)
        house.later(60.5)
        answer = asking.result()
        if stream:
            last = events(answer.text)[-1]
            assert last["error"]["code"] == "request_timeout"
            assert len(events(answer.text)) > 2
        else:
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] == "request_timeout"
            assert "60.5 s" in answer.json()["error"]["message"]
        assert house.engine.snapshot()["output_tokens"] < LONG["max_tokens"]
        assert house.idle()
        quick = httpx.post(house.url + CHAT, json=chat(max_tokens=2))
        assert quick.status_code == 200


async def test_a_header_asks_for_less_never_for_more() -> None:
    house = House(FakeExecutor(seconds=0.005), timeout=0.3)
    async with inside(house) as client:
        for given in ("100", "99999999"):
            late = await client.post(
                CHAT, json=chat(**LONG), headers={"x-octavo-timeout-ms": given}
            )
            assert late.status_code == 504
            said = late.json()["error"]["message"]
            assert ("0.1 s" if given == "100" else "0.3 s") in said
            assert ("x-octavo-timeout-ms" in said) == (given == "100")
            assert ("--timeout" in said) == (given != "100")
        for given in ("0", "-1", "1e3", "soon"):
            bad = await client.post(CHAT, json=chat(), headers={"x-octavo-timeout-ms": given})
            assert bad.status_code == 400
            assert bad.json()["error"]["param"] == "x-octavo-timeout-ms"


@pytest.mark.parametrize("name", ["timeout", "head_timeout", "send_timeout", "keepalive", "stall"])
@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_a_time_that_is_none_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=f"--{name.replace('_', '-')} must be a number"):
        ServerConfig(**{name: value})


def test_no_end_of_draining_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="--drain"):
        ServerConfig(drain=float("inf"))


async def test_a_nameless_key_is_no_other_one_after_a_line_is_added(tmp_path: Path) -> None:
    """Keys by their lines' numbers would inherit what another key kept."""
    path = keyed(tmp_path, ALICE, BOB)
    house = House(api_key_file=path)
    async with inside(house) as by:
        body = {"model": "fake", "input": "mine"}
        kept = (await by.post("/v1/responses", json=body, headers=bearer(BOB))).json()["id"]
        keyed(tmp_path, ROOT, ALICE, BOB)
        house.app.reload()
        for key, status in ((ALICE, 404), (BOB, 200), (ROOT, 404)):
            for url in (f"/v1/responses/{kept}", f"/v1/requests/{kept}/trace"):
                assert (await by.get(url, headers=bearer(key))).status_code == status


async def test_a_long_user_is_a_tenant_of_its_own_and_takes_no_memory() -> None:
    house = House(policy=policy_of("fair", {}))
    users = ["a" * 100_000, "a" * 99_999 + "b", "short", "a" * 100_000]
    async with inside(house) as client:
        for user, field in zip(users, ("user", "safety_identifier", "user", "user"), strict=True):
            answer = await client.post(CHAT, json=chat(max_tokens=2) | {field: user})
            assert answer.status_code == 200
    order = house.scheduler._order
    assert isinstance(order, Fair)
    assert len(order.counters) == 3
    assert max(map(len, order.counters)) <= 64
