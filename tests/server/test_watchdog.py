"""A step that does not come back is said once, with what stands still; readiness follows."""

from __future__ import annotations

import faulthandler
import logging
import threading
from array import array
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from octavo.core.batch import StepResult
from octavo.core.request import Request, SamplingParams
from octavo.server.driver import Ticket
from octavo.server.watchdog import Watchdog
from tests.server.fakes import FakeExecutor
from tests.server.house import House, chat, outside, wait_for
from tests.server.test_life import CHAT, raw


class Hanging(FakeExecutor):
    """Its step comes back only while `free` is set; `hangs` is set once one is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()
        self.hangs = threading.Event()

    def collect(self) -> StepResult:
        self.hangs.set()
        self.free.wait(60)
        return super().collect()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "octavo.watchdog"]


def test_a_stall_is_reported_once_and_readiness_comes_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By a clock of the test's: a slow machine makes no stall, and no second one."""
    executor, now = Hanging(), [100.0]
    caplog.set_level(logging.INFO, "octavo")
    house = House(executor, clock=lambda: now[0], port=0, stall=0.3)
    with outside(house), ThreadPoolExecutor() as pool:
        assert httpx.get(house.url + "/ready").status_code == 200
        work = pool.submit(httpx.post, house.url + CHAT, json=chat("secret", max_tokens=3))
        assert executor.hangs.wait(60)
        now[0] += 0.25
        assert httpx.get(house.url + "/ready").status_code == 200, "not yet"
        now[0] += 0.25
        assert httpx.get(house.url + "/ready").json() == {"status": "stalled"}
        assert httpx.get(house.url + "/ready").status_code == 503
        assert httpx.get(house.url + "/health").status_code == 200
        assert wait_for(lambda: said(caplog))
        (report,) = said(caplog)
        assert report.startswith("no step finished for 0.5 s (--stall 0.3): ")
        assert "1 running, 0 waiting" in report
        assert "running: chatcmpl-" in report
        assert "thread octavo-engine:" in report
        assert "in collect" in report
        assert "secret" not in report
        now[0] += 100.0  # it goes on, and has been told of
        executor.free.set()
        assert work.result().status_code == 200
        assert wait_for(lambda: len(said(caplog)) > 1)
        assert httpx.get(house.url + "/ready").status_code == 200
    assert said(caplog) == [report, "steps finish again, after 100.5 s without one"]


def test_the_machines_own_clock_tells_a_stall_too(caplog: pytest.LogCaptureFixture) -> None:
    executor = Hanging()
    caplog.set_level(logging.INFO, "octavo")
    with outside(House(executor, port=0, stall=0.05)) as house, ThreadPoolExecutor() as pool:
        work = pool.submit(httpx.post, house.url + CHAT, json=chat(max_tokens=3))
        assert executor.hangs.wait(60)
        assert wait_for(lambda: httpx.get(house.url + "/ready").status_code == 503)
        assert wait_for(lambda: any(line.startswith("no step") for line in said(caplog)))
        executor.free.set()
        assert work.result().status_code == 200
        assert wait_for(lambda: httpx.get(house.url + "/ready").status_code == 200)
        assert wait_for(lambda: said(caplog)[-1].startswith("steps finish again"))


def test_an_idle_house_never_stalls() -> None:
    now = [0.0]
    house = House(clock=lambda: now[0])
    dog = Watchdog(house.driver, house.scheduler, 1.0)
    now[0] = 1e6
    dog.look()
    assert dog.stalled_since is None


def test_what_an_idle_house_has_not_taken_yet_is_no_stall_before_its_time() -> None:
    """Its thread sleeps, and on a busy machine it takes a while to wake."""
    now = [0.0]
    driver = House(clock=lambda: now[0]).driver  # its thread never begins: so slow is it
    now[0] = 1e6
    driver.add(Ticket([Request("a", array("i", (1, 2)), SamplingParams(), 0.0, 1)]))
    assert driver.busy
    assert not driver.stalled(1.0, now[0])
    now[0] += 1.5
    assert driver.stalled(1.0, now[0])


def test_callers_that_come_and_go_do_not_hide_a_stall() -> None:
    executor, now = Hanging(), [100.0]
    with outside(House(executor, clock=lambda: now[0], port=0, stall=0.3)) as house:
        for _ in range(2):
            client = raw(house, chat(max_tokens=3))
            assert executor.hangs.wait(60)
            assert wait_for(lambda: house.driver.busy)
            now[0] += 0.5
            assert house.driver.stalled(0.3, now[0])
            client.close()
            assert wait_for(lambda: not house.driver.busy)
        with raw(house, chat(max_tokens=3)):
            assert wait_for(lambda: house.driver.busy)
            assert house.driver.stalled(0.3, now[0]), "since the first of them"
            executor.free.set()
    assert not house.driver.busy


def test_a_step_that_has_nothing_to_do_is_no_progress() -> None:
    """Work that never gets anywhere is a stall too, though the thread goes round."""
    house = House()
    before = house.driver.progress
    house.scheduler.schedule = lambda _: None  # type: ignore[method-assign, assignment]
    house.scheduler._live[0] = None  # type: ignore[assignment]
    house.driver._step()
    assert house.driver.progress == before


def test_the_timer_that_needs_no_interpreter_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    wound: list[float] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda s, **_: wound.append(s))
    with outside(House(port=0, stall=0.2)):
        assert wait_for(lambda: len(wound) > 2)
    assert min(wound) > 0.2
