"""Deadlines over HTTP: what may be asked, how a refusal looks, and what is told of a promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.core.slo import slo
from octavo.core.steptime import Coefficients
from octavo.errors import EngineError, InvalidRequest
from octavo.server.deadlines import parse_slo
from tests.server.house import House, chat, completion, inside

pytestmark = pytest.mark.anyio


def timed(**config: object) -> House:
    """A house that thinks a step takes at least a second."""
    house = House(policy=slo(), **config)
    return house


def slow(house: House) -> House:
    model = house.scheduler.model
    for fit in (model._decode, model._mixed):
        fit.solved, fit.pace = Coefficients(1.0, 0.01), 1.0
        fit._ratios.clear()  # the steps so far were not slow
    model._now = None
    return house


async def post(house: House, body: dict, **headers: str):
    async with inside(house, **headers) as client:
        return await client.post("/v1/chat/completions", json=body)


async def test_a_deadline_that_can_be_kept_is_told_back_with_a_forecast() -> None:
    headers = {"x-slo-ttft-ms": "30000", "x-slo-tpot-ms": "5000"}
    answer = await post(timed(), chat(), **headers)
    assert answer.status_code == 200
    assert answer.headers["x-octavo-slo"] == "ttft-ms=30000, tpot-ms=5000"
    assert float(answer.headers["x-octavo-predicted-ttft-ms"]) >= 0.0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_that_cannot_be_kept_is_refused_before_any_header(stream: bool) -> None:
    house = slow(timed())
    house.scheduler.expected["others"] = (0.0, 60.0)  # let in, and not added yet
    answer = await post(house, chat(stream=stream), **{"x-slo-ttft-ms": "9000"})
    assert answer.status_code == 503
    error = answer.json()["error"]
    assert error["code"] == "slo_unattainable"
    assert error["type"] == "server_error"
    assert error["predicted_ttft_ms"] > 900
    assert int(answer.headers["retry-after"]) >= 1
    assert int(answer.headers["retry-after-ms"]) >= 1000
    assert house.admission.by_tenant == {}
    assert error["queue_ms"] == 60_000
    assert list(house.scheduler.expected) == ["others"]


@pytest.mark.parametrize("early", [True, False], ids=["by its head", "by its body"])
async def test_the_same_body_under_the_same_key_has_one_place_at_either_gate(early: bool) -> None:
    house = slow(timed())
    house.scheduler.expected["others"] = (0.0, 0.5)
    headers = {"x-slo-ttft-ms": "30000"} if early else {}
    wanted = {} if early else {"slo": {"ttft_ms": 30_000}}
    async with inside(house, **headers) as client:
        told = []
        for temperature in (0.5, 0.5, 0.6):
            body = chat(temperature=temperature, **wanted)
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 503
            told.append(int(answer.headers["retry-after"]))
            assert answer.headers["retry-after-ms"] == str(1000 * told[-1])  # a place: not a guess
    assert len(house.admission.kept) == 2
    assert told[0] == told[1]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_that_no_waiting_would_help_invites_no_retry(stream: bool) -> None:
    house = slow(timed())
    answer = await post(house, chat(stream=stream), **{"x-slo-ttft-ms": "200"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("slo_unattainable", "invalid_request_error")
    assert "even when it is idle" in error["message"]
    assert error["predicted_ttft_ms"] > 900
    assert not {"retry-after", "retry-after-ms"} & answer.headers.keys()
    assert house.admission.by_tenant == {}
    assert not house.scheduler.expected


async def test_best_effort_is_served_and_said() -> None:
    headers = {"x-slo-ttft-ms": "200", "x-slo-fallback": "best-effort"}
    answer = await post(slow(timed()), chat(), **headers)
    assert answer.status_code == 200
    assert answer.headers["x-octavo-slo"] == "degraded"


async def test_the_body_and_the_tier_say_it_too() -> None:
    house = timed(slo=("ttft=60", "priority:ttft=20,tpot=9"))
    async with inside(house) as client:
        for body, words in (
            (chat(), "ttft-ms=60000"),
            (chat(service_tier="priority"), "ttft-ms=20000, tpot-ms=9000"),
            (chat(slo={"ttft_ms": 31000}), "ttft-ms=31000"),
            (completion(slo={"e2e_ms": 45000}), "ttft-ms=60000, e2e-ms=45000"),
        ):
            path = "completions" if "prompt" in body else "chat/completions"
            answer = await client.post(f"/v1/{path}", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-octavo-slo"] == words
        flex = await client.post("/v1/chat/completions", json=chat(service_tier="flex"))
        assert "x-octavo-slo" not in flex.headers


@pytest.mark.parametrize(
    ("headers", "body", "param"),
    [
        ({"x-slo-ttft-ms": "soon"}, {}, "x-slo-ttft-ms"),
        ({"x-slo-tpot-ms": "-1"}, {}, "x-slo-tpot-ms"),
        ({"x-slo-ttft-ms": "1_000"}, {}, "x-slo-ttft-ms"),
        ({"x-slo-e2e-ms": "nan"}, {}, "x-slo-e2e-ms"),
        ({"x-slo-fallback": "maybe"}, {}, "x-slo-fallback"),
        ({}, {"slo": {"ttft_ms": 0}}, "slo.ttft_ms"),
        ({}, {"slo": {"fallback": "x"}}, "slo.fallback"),
        ({}, {"slo": {"speed": 1}}, "slo.speed"),
        ({}, {"service_tier": "urgent"}, "service_tier"),
        ({}, {"service_tier": ""}, "service_tier"),
        ({"x-slo-ttft-ms": ""}, {}, "x-slo-ttft-ms"),
        ({"x-slo-fallback": ""}, {}, "x-slo-fallback"),
        ({"x-slo-ttft": "100"}, {}, "x-slo-ttft"),
        ({"x-slo-ttft-ms": "100"}, {"slo": {"ttft_ms": 200}}, "slo.ttft_ms"),
    ],
)
async def test_a_deadline_that_is_none_is_refused_by_name(headers, body, param) -> None:
    answer = await post(timed(), chat(**body), **headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("word", ["0", "-1", "nan", "inf", "1e400", "86400001"])
async def test_a_number_that_is_no_deadline_is_told_the_range(word: str) -> None:
    answer = await post(timed(), chat(), **{"x-slo-e2e-ms": word})
    assert answer.status_code == 400
    assert "above 0 and at most 86400000" in answer.json()["error"]["message"]


@pytest.mark.parametrize("second", ["60000", "1", ""])
async def test_a_deadline_given_twice_is_refused(second: str) -> None:
    head = [("x-slo-ttft-ms", "60000"), ("x-slo-ttft-ms", second)]
    async with inside(timed()) as client:
        answer = await client.post("/v1/chat/completions", json=chat(), headers=head)
    assert answer.status_code == 400
    assert "x-slo-ttft-ms is given twice" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "body"), [({"x-slo-ttft-ms": "9000"}, {}), ({}, {"slo": {"e2e_ms": 9000}})]
)
async def test_without_a_policy_that_keeps_them_deadlines_are_refused(headers, body) -> None:
    answer = await post(House(), chat(**body), **headers)
    assert answer.status_code == 400
    assert "--policy slo" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("tier", "served"),
    [("auto", "default"), ("scale", "default"), ("flex", "flex"), ("priority", "priority")],
)
async def test_where_the_policy_has_tiers_the_answer_says_which_one_it_was(
    tier: str, served: str
) -> None:
    answer = await post(House(policy=slo()), chat(service_tier=tier))
    assert answer.json()["service_tier"] == served


async def test_who_is_let_in_without_promises_is_told_the_tier_that_is_left() -> None:
    house = House(policy=slo())
    head = {"x-slo-ttft-ms": "0.001", "x-slo-fallback": "best-effort"}
    answer = await post(house, chat(service_tier="priority"), **head)
    assert answer.headers["x-octavo-slo"] == "degraded"
    assert answer.json()["service_tier"] == "flex"


async def test_a_key_is_held_to_its_tier_and_its_deadlines(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"gold {'g' * 16}\nplain {'p' * 16} tier=default ttft=20 weight=2\n")
    house = timed(api_key_file=str(keys), slo=("ttft=60", "priority:ttft=10"))
    async with inside(house) as client:
        for key, words in (("g", "ttft-ms=10000"), ("p", "clamped, ttft-ms=60000")):
            head = {"authorization": f"Bearer {key * 16}"}
            answer = await client.post(
                "/v1/chat/completions", json=chat(service_tier="priority"), headers=head
            )
            assert answer.headers["x-octavo-slo"] == words
        head |= {"x-slo-ttft-ms": "5000"}
        answer = await client.post("/v1/chat/completions", json=chat(), headers=head)
        assert answer.headers["x-octavo-slo"] == "clamped, ttft-ms=20000"
        head |= {"x-slo-ttft-ms": "1"}  # which no server could
        answer = await client.post("/v1/chat/completions", json=chat(), headers=head)
        assert answer.headers["x-octavo-slo"] == "clamped, ttft-ms=20000"
    assert house.app.keys.weights == {"plain": 2.0}


@pytest.mark.parametrize("prompts", [2, 3, 9])
async def test_nothing_is_expected_of_a_body_whose_prompts_found_no_room(prompts: int) -> None:
    """The queue is full after the first of them: what the door let in and nobody added must not be
    counted as work that waits, for good."""
    house = timed()
    house.scheduler.max_waiting = 1
    async with inside(house, **{"x-slo-ttft-ms": "60000"}) as client:
        answer = await client.post("/v1/completions", json=completion(["a"] * prompts))
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "server_overloaded"
        assert house.idle()
        assert house.scheduler.expected == {}
        assert house.scheduler.backlog() == []


@pytest.mark.parametrize("asked", [{}, {"x-slo-ttft-ms": "9000"}, {"x-slo-ttft-ms": "20"}])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_lost_engine_is_said_to_be_lost_whatever_was_asked(
    stream: bool, asked: dict[str, str]
) -> None:
    """What it was at when it was lost forecasts nothing."""
    house = timed()
    async with inside(house) as client:
        house.executor.fail = RuntimeError("the device is gone")
        lost = await client.post("/v1/chat/completions", json=chat("first"), headers=asked)
        slow(house)
        house.scheduler.expected["others"] = (0.0, 60.0)
        for path, body in (("chat/", chat(stream=stream)), ("", completion(stream=stream))):
            answer = await client.post(f"/v1/{path}completions", json=body, headers=asked)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (500, "engine_error")
            assert "the device is gone" in error["message"]
            assert "predicted_ttft_ms" not in error
    assert lost.status_code == 500
    assert list(house.scheduler.expected) == ["others"]
    assert house.admission.by_tenant == {}


@pytest.mark.parametrize("when", ["before it is judged", "before it is handed over"])
async def test_nothing_is_expected_of_what_a_lost_engine_never_took(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be lost while a body is parsed, or a moment after its requests were let in."""
    house = timed()
    gates = type(house.admission)
    judge = gates.judge_all

    def lose() -> None:
        house.driver.failed = EngineError("the device is gone")

    def judged(self, *given):
        admitted = judge(self, *given)
        lose()
        return admitted

    if when == "before it is handed over":
        monkeypatch.setattr(gates, "judge_all", judged)
    else:
        learn = gates.learn
        monkeypatch.setattr(gates, "learn", lambda *given: (lose(), learn(*given)))
    answer = await post(house, chat(), **{"x-slo-ttft-ms": "30000"})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "engine_error"
    assert house.scheduler.expected == {}
    assert house.admission.queued_tokens == 0.0


async def test_a_fallback_in_the_body_is_one_for_the_headers_deadline() -> None:
    wish = {"x-slo-ttft-ms": "1"}
    assert (await post(timed(), chat(), **wish)).status_code == 400
    answer = await post(timed(), chat(slo={"fallback": "best-effort"}), **wish)
    assert answer.headers["x-octavo-slo"] == "degraded"


@pytest.mark.parametrize(
    "option",
    ["tier=best", *(f"weight={n}" for n in ("0", "1e-9", "1e9", "nan", "1_0")), "ttft=soon",
     "ttft=1_0", "speed=9"],
)  # fmt: skip
def test_a_key_s_options_are_checked(tmp_path: Path, option: str) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"name {'k' * 16} {option}\n")
    with pytest.raises(InvalidRequest, match=option):
        House(api_key_file=str(keys))


@pytest.mark.parametrize(
    "text",
    ["", "ttft", "ttft=x", "speed=1", "best:ttft=1", "ttft=0", "ttft=-1", "flex:e2e=nan"],
)
def test_a_default_that_is_none_is_refused_by_the_name_of_its_flag(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"--slo\b"):
        parse_slo(text)


async def test_what_was_promised_and_what_came_is_in_the_metrics() -> None:
    house = timed()
    async with inside(house) as client:
        good = {"x-slo-ttft-ms": "30000"}
        await client.post("/v1/chat/completions", json=chat(), headers=good)
        slow(house)
        bad = {"x-slo-ttft-ms": "200"}
        await client.post("/v1/chat/completions", json=chat(), headers=bad)
        assert house.idle()
        page = (await client.get("/metrics")).text
    assert 'octavo_deadline_sequences_total{met="true"} 1.0' in page
    assert "octavo_requests_unattainable_total 1.0" in page
    assert "octavo_ttft_forecast_ratio_count 1.0" in page
    assert "octavo_step_time_error_ratio " in page
