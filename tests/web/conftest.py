"""A browser for the tests of the page; without one, or without the page, they are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import pytest

from octavo.server import page as pages
from tests.server.house import House, outside
from tests.web.acting import Actor
from tests.web.browser import Browser, Page, chromium


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = chromium()
    if path is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    if not (pages.FOLDER / "index.html").is_file():
        pytest.skip("the page was not built: make web")
    made = Browser(path)
    yield made
    made.close()


class Visit(Protocol):
    def __call__(
        self, *lines: str, view: str = ..., seconds: float = ..., width: int = ..., **config: Any
    ) -> AbstractContextManager[tuple[House, Page]]: ...


@pytest.fixture
def visit(browser: Browser) -> Visit:
    """A server whose model says `lines`, and its page in a browser.

    Whatever happens there, the page throws nothing and asks nobody else for anything.
    """

    @contextmanager
    def visiting(
        *lines: str, view: str = "both", seconds: float = 0.004, width: int = 1280, **config: Any
    ) -> Iterator[tuple[House, Page]]:
        house = House(Actor(lines or ("Yes.",), seconds), port=0, **config)
        with outside(house), browser.page(width) as page:
            page.open(f"{house.url}/#{view}")
            page.wait("!!document.querySelector('.head')")
            yield house, page
            ours = (house.url, "about:", "blob:")
            assert [url for url in page.requested if not url.startswith(ours)] == []
            refused = ("401", "503")  # of the network's lines these are expected in some tests
            thrown = [error for error in page.errors if not any(code in error for code in refused)]
            assert thrown == []

    return visiting
