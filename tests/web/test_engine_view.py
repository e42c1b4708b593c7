"""The live view in a real browser: what it shows is what the engine does."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from octavo.errors import InvalidRequest
from tests.server.house import House, chat, outside
from tests.web.acting import Actor
from tests.web.browser import Page
from tests.web.conftest import Visit

LIVE = "document.querySelector('.state')?.classList.contains('live')"
PREFIX = "you are kind " * 12


@contextmanager
def load(house: House, many: int) -> Iterator[list[threading.Thread]]:
    """So many streams at once, with one beginning."""

    def one(number: int) -> None:
        body = chat(PREFIX + str(number), max_tokens=60 + 5 * number)
        httpx.post(house.url + "/v1/chat/completions", json=body, timeout=60)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(many)]
    for thread in threads:
        thread.start()
    try:
        yield threads
    finally:
        for thread in threads:
            thread.join()


@contextmanager
def on_port(port: int) -> Iterator[House]:
    """Another server, as soon as the port is free."""
    for _ in range(100):
        try:
            made = outside(House(Actor(["Again."]), port=port))
            house = made.__enter__()
            break
        except InvalidRequest:
            time.sleep(0.1)
    try:
        yield house
    finally:
        made.__exit__(None, None, None)


def cell(page: Page, name: str) -> str:
    found = page.run(
        "[...document.querySelectorAll('.cell')].find(c => c.querySelector('dt').innerText"
        f" === '{name}').innerText"
    )
    return str(found)


def test_under_load_the_picture_moves_and_ends_where_the_engine_ends(visit: Visit) -> None:
    with visit("word " * 40, view="engine", seconds=0.02) as (house, page):
        page.wait(LIVE)
        with load(house, 16):
            page.wait(
                "/^1[0-6] sequences run/.test(document.querySelector('.batch canvas').ariaLabel)"
            )
            page.wait("/ [1-9]\\d* shared/.test(document.querySelector('.memory').innerText)")
            label = page.run("document.querySelector('.memory canvas').ariaLabel")
            assert "blocks held by one sequence" in label
            page.wait("document.querySelector('.verdict')?.innerText.startsWith('step ')")
        page.wait("document.querySelector('.batch canvas').ariaLabel.startsWith('0 sequences run')")
        counters = house.scheduler.stats.counters
        assert f"of {counters.prompt_tokens} tokens" in cell(page, "Prompts cached")
        assert f"{counters.cached_tokens:,} tokens not computed again" in page.text(".tree .aside")
        assert f"{house.scheduler.blocks.num_cached} cached" in page.text(".memory .legend")
        assert "p50" in cell(page, "First token")
        assert " ms" in cell(page, "Each token")


def test_pointing_at_a_lane_says_whose_it_is(visit: Visit) -> None:
    with visit("word " * 100, view="engine", seconds=0.02) as (house, page):
        page.wait(LIVE)
        with load(house, 3):
            page.wait("document.querySelector('.batch canvas').ariaLabel.startsWith('3 ')")
            page.run("document.querySelector('.batch canvas').scrollIntoView({block: 'center'})")
            box = page.run(
                "document.querySelector('.batch canvas').getBoundingClientRect().toJSON()"
            )
            page.mouse(box["x"] + 20, box["y"] + 22)
            page.wait("/prompt \\d+/.test(document.querySelector('.tip').innerText)")
            # The keyboard's cursor does the same, on the map of blocks.
            page.run("document.querySelector('.memory canvas').focus()")
            page.key("ArrowLeft")
            page.wait("document.querySelector('.tip').innerText.startsWith('block ')")


def test_it_finds_its_way_back_after_a_restart(visit: Visit) -> None:
    with visit("Yes.", view="engine") as (first, page):
        page.wait(LIVE)
        port = int(first.url.rpartition(":")[2])
        for _ in range(2):
            first.shutdown()
        page.wait("document.querySelector('.state').classList.contains('lost')")
        with on_port(port) as second:
            page.wait(LIVE)
            httpx.post(second.url + "/v1/chat/completions", json=chat("again"))
            page.wait("/of [1-9]\\d* tokens/.test(document.querySelector('.vitals').innerText)")
        page.errors.clear()  # the network's own lines about the lost connection


def test_a_key_that_may_not_watch_is_told_so_and_may_chat(visit: Visit, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("boss an-admins-key-of-length admin\nguest a-guests-key-of-length\n")
    with visit("Welcome.", view="both", api_key_file=str(keys)) as (_, page):
        page.wait("!!document.querySelector('input[name=key]')")
        page.type("a-guests-key-of-length")
        page.key("Enter")
        page.wait("document.querySelector('.state').classList.contains('lost')")
        page.wait("document.querySelector('.strip').innerText.includes('admin')")
        page.click(".composer textarea")
        page.type("Hello")
        page.key("Enter")
        page.wait("document.querySelector('.words')?.innerText === 'Welcome.'")
        page.errors.clear()  # the network's own lines about what was forbidden


def test_keys_go_everywhere(visit: Visit) -> None:
    with visit("Yes.", view="chat") as (_, page):
        page.key("3")
        page.wait("!document.querySelector('.chat') && !!document.querySelector('.engine')")
        page.key("2")
        page.wait("!!document.querySelector('.chat') && !!document.querySelector('.engine')")
        page.key("/")
        page.wait("document.activeElement.matches('.composer textarea')")
        page.key("Escape")
        page.wait("!document.activeElement.matches('textarea')")
        page.key("?", shift=True)
        page.wait("!!document.querySelector('dialog[open] kbd')")
        page.key("Escape")
        page.wait("!document.querySelector('dialog')")
        before = page.run("document.documentElement.dataset.theme")
        page.key("d")
        page.wait(f"document.documentElement.dataset.theme !== '{before}'")
        page.key("e")
        page.wait("document.documentElement.classList.contains('expert')")


def test_a_chat_alone_does_not_watch_the_engine(visit: Visit) -> None:
    with visit("Yes.", view="chat") as (_, page):
        page.wait("document.querySelector('.served').innerText.includes('fake')")
        assert not any("engine/live" in url for url in page.requested)
        page.key("3")
        page.wait(LIVE)
        page.key("1")
        page.wait("!document.querySelector('.state')")


def test_figures_have_their_units_and_a_version_its_name(visit: Visit) -> None:
    """Octavo's version is beside Octavo, not the model; each of p90 and p99 has its unit."""
    with visit("Yes.", view="engine") as (house, page):
        page.wait(LIVE)
        page.wait("document.querySelector('.served').innerText.includes('fake')")
        name, version = page.text(".brand").split()
        assert (name, re.fullmatch(r"[\d.]+", version) is not None) == ("Octavo", True)
        assert version not in page.text(".served")
        with load(house, 3):
            pass
        page.wait("document.querySelector('.vitals').innerText.includes('p99')")
        tails = re.findall(r"p9[09] (\S+) (m?s)\b", cell(page, "First token"))
        assert len(tails) == 2


def test_on_a_phone_nothing_sticks_out(visit: Visit) -> None:
    with visit("A " + "long" * 60 + " word, and\n\n```\n" + "x" * 300 + "\n```\n", width=390) as (
        house,
        page,
    ):
        wide = "document.documentElement.scrollWidth"
        assert page.run(wide) == 390
        below = "document.querySelector('.head').getBoundingClientRect().bottom"
        assert (
            page.run(f"document.querySelector('.chat').getBoundingClientRect().top - {below}") == 0
        )
        page.click(".composer textarea")
        page.type("?")
        page.key("Enter")
        page.wait(
            "!!document.querySelector('.answer') && !document.querySelector('[aria-busy=true]')"
        )
        assert page.run(wide) == 390
        page.click(".views button:last-child")
        with load(house, 4):
            page.wait("!!document.querySelector('.cell')")
        assert page.run(wide) == 390
        assert page.run("document.querySelector('.engine').scrollWidth") <= 390


@pytest.mark.parametrize("width", [1024, 1400, 1700])
def test_beside_a_chat_no_caption_is_cut_and_no_button_is_broken(visit: Visit, width: int) -> None:
    with visit("word " * 30, "Yes.", width=width, seconds=0.02) as (house, page):
        page.wait(LIVE)
        page.click(".composer textarea")
        page.type("A question that is long enough to be written on several lines of a chat.")
        page.key("Enter")
        page.wait("document.querySelector('.question button')?.innerText === 'edit'")
        with load(house, 12):
            page.wait("/\\d+ waiting|nobody/.test(document.querySelector('.vitals').innerText)")
            page.wait("document.querySelector('.vitals').innerText.includes('p99')")
            cut = "filter(p => p.scrollWidth > p.clientWidth).map(p => p.innerText)"
            assert page.run(f"[...document.querySelectorAll('.cell p')].{cut}") == []
        assert page.run("document.querySelector('.question button').offsetHeight") < 30
        right = "document.querySelector('{}').getBoundingClientRect().right"
        chat, send = (
            page.run(right.format(".chat")),
            page.run(right.format(".composer button.main")),
        )
        assert send < page.run(right.format(".composer")) < chat


def test_the_sample_conversations_fill_the_batch(visit: Visit) -> None:
    with visit("some words " * 8, view="engine", seconds=0.03) as (house, page):
        page.wait(LIVE)
        page.click("button.demo")
        page.wait(
            "/^([4-9]|1\\d) sequences run/.test(document.querySelector('.batch canvas').ariaLabel)"
        )
        page.click("button.demo")
        page.wait("document.querySelector('button.demo').innerText.startsWith('Start')")
        assert house.idle()
        assert house.scheduler.stats.counters.cached_tokens > 0
