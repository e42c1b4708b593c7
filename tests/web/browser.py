"""A real Chromium without a window, spoken to over a pipe in the DevTools protocol.

https://chromedevtools.github.io/devtools-protocol/: messages of JSON, each ended by a zero byte, on
file descriptors 3 and 4. No driver and no socket are needed.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--hide-scrollbars",
    "--font-render-hinting=none",
)
KEYS = {"Enter": 13, "Escape": 27, "ArrowUp": 38, "ArrowLeft": 37, "ArrowRight": 39, "Tab": 9}
WAIT = 60.0


def chromium() -> str | None:
    """The browser's path, if there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class PageError(AssertionError):
    """What the page threw, or what did not come to pass in it."""


class Browser:
    """One process; pages share nothing with each other."""

    def __init__(self, path: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="octavo-browser-")
        # Above 9, so that neither end is in the way of 3 and 4.
        pipes = (os.pipe(), os.pipe())
        (ours_in, theirs_out), (theirs_in, ours_out) = (
            tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in pipe) for pipe in pipes
        )
        for end in (*pipes[0], *pipes[1]):
            os.close(end)

        def place() -> None:
            os.dup2(theirs_in, 3)
            os.dup2(theirs_out, 4)

        flags = [*FLAGS, f"--user-data-dir={self._profile}"]
        if os.getuid() == 0:
            flags.append("--no-sandbox")  # it does not start as root with one
        self._process = subprocess.Popen(
            [path, *flags, "about:blank"],
            preexec_fn=place,
            pass_fds=(3, 4),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = os.fdopen(ours_in, "rb", 0), os.fdopen(ours_out, "wb", 0)
        self._number = 0
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.call("Browser.close", {}, None, 5.0)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(
        self, method: str, params: dict[str, Any], session: str | None, seconds: float = WAIT
    ) -> dict[str, Any]:
        """One command and its result."""
        self._number += 1
        number = self._number
        answer = self._answers[number] = queue.SimpleQueue()
        message = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        self._out.write(json.dumps(message).encode() + b"\0")
        try:
            found = answer.get(timeout=seconds)
        except queue.Empty:
            raise PageError(f"{method} was not answered within {seconds:g} s") from None
        finally:
            del self._answers[number]
        if "error" in found:
            raise PageError(f"{method}: {found['error'].get('message')}")
        result: dict[str, Any] = found["result"]
        return result

    def _listen(self) -> None:
        rest = b""
        while data := self._in.read(1 << 16):
            *whole, rest = (rest + data).split(b"\0")
            for text in whole:
                message = json.loads(text)
                if "id" in message:
                    if message["id"] in self._answers:
                        self._answers[message["id"]].put(message)
                elif message.get("sessionId") in self._pages:
                    self._pages[message["sessionId"]].heard(message["method"], message["params"])

    @contextlib.contextmanager
    def page(self, width: int = 1280, height: int = 800, scale: float = 1) -> Iterator[Page]:
        """A page with storage of its own."""
        context = self.call("Target.createBrowserContext", {}, None)["browserContextId"]
        target = self.call(
            "Target.createTarget",
            {"url": "about:blank", "browserContextId": context, "width": width, "height": height},
            None,
        )["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True}, None)[
            "sessionId"
        ]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.size(width, height, scale)
        try:
            yield page
        finally:
            with contextlib.suppress(PageError):
                self.call("Target.disposeBrowserContext", {"browserContextId": context}, None)
            self._pages.pop(session, None)


class Page:
    """One tab. `errors`: what it threw or was refused; `requested`: every address it asked for."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.errors: list[str] = []
        self.requested: list[str] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, params, self._session)

    def heard(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])

    def size(self, width: int, height: int, scale: float = 1) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )

    def scheme(self, name: str) -> None:
        """light or dark, as the system would say."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        found = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise PageError(details.get("exception", {}).get("description") or details["text"])
        return found["result"].get("value")

    def wait(self, condition: str, seconds: float = WAIT) -> Any:
        """Until an expression is true; its value."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(PageError):  # between two documents
                if value := self.run(condition):
                    return value
            time.sleep(0.05)
        raise PageError(
            f"not within {seconds:g} s: {condition}\n{self.run('document.body.innerText')}"
        )

    def text(self, selector: str) -> str:
        """What all that match show, a line each."""
        chosen = json.dumps(selector)
        found = self.run(
            f"[...document.querySelectorAll({chosen})].map(e => e.innerText).join('\\n')"
        )
        return str(found)

    def click(self, selector: str) -> None:
        """The first that matches, in its middle, with the mouse, once it stands still."""
        chosen = json.dumps(selector)
        place = (
            "(e => { e.scrollIntoView({block: 'nearest'}); const b = e.getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })"
            f"(document.querySelector({chosen}))"
        )
        self.wait(f"!!document.querySelector({chosen})")
        frames = "new Promise(d => requestAnimationFrame(() => requestAnimationFrame(() => d(1))))"
        at: list[float] | None = None
        while (now := self.run(place)) != at:
            at = now
            self.run(frames)
        self.mouse(*now, press=True)

    def mouse(self, x: float, y: float, press: bool = False) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased") if press else ():
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """As if typed into what has the focus."""
        self.call("Input.insertText", text=text)

    def key(self, name: str, shift: bool = False) -> None:
        """One key of the keyboard."""
        code = KEYS.get(name, ord(name[0].upper()))
        params: dict[str, Any] = {
            "key": name,
            "windowsVirtualKeyCode": code,
            "modifiers": 8 if shift else 0,
        }
        text = "\r" if name == "Enter" else name if len(name) == 1 else ""
        if text:
            params["text"] = text
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **params)
        params.pop("text", None)
        self.call("Input.dispatchKeyEvent", type="keyUp", **params)

    def picture(self, path: Path) -> None:
        """A PNG of what is seen."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))
