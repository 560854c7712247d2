"""A headless Chromium, driven over its DevTools protocol by a pipe: no driver program and no further package."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
SECONDS = 60.0


class Browser:
    """Chromium after its two pipes. Messages are JSON and end with a zero byte."""

    def __init__(self, process: subprocess.Popen[bytes], commands: BinaryIO, messages: int) -> None:
        self.process, self.events = process, list[dict[str, Any]]()
        self._commands, self._messages, self._rest, self._last = commands, messages, b"", 0

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of a command. Events that arrive meanwhile are appended to `events`."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        self._commands.write(json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        self._commands.flush()
        while (answer := self._next()).get("id") != self._last:
            self.events.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, url: str) -> Page:
        return self.attach(self.send("Target.createTarget", url="about:blank")["targetId"]).go(url)

    def attach(self, target: str) -> Page:
        """A page by its target's id, such as one that another page has opened."""
        page = Page(self, self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable", page.session)
        return page

    def pages(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.send("Target.getTargets")["targetInfos"]
        return [target for target in found if target["type"] == "page"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._messages], [], [], SECONDS)[0], "the browser does not answer"
            part = os.read(self._messages, 1 << 16)
            assert part, "the browser has ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        content: dict[str, Any] = json.loads(message)
        return content


class Page:
    """A tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser, self.session = browser, session

    def go(self, url: str) -> Page:
        self.browser.send("Page.navigate", self.session, url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")
        return self

    def run(self, script: str) -> Any:
        """The value of an expression in the page, as JSON."""
        done = self.browser.send(
            "Runtime.evaluate", self.session, expression=script, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true in JavaScript's sense."""
        end = time.monotonic() + SECONDS
        while not self.run(f"!!({condition})"):
            assert time.monotonic() < end, f"waited in vain for {condition}; {self.complaints()}"
            time.sleep(0.02)

    def events(self, method: str) -> list[Any]:
        mine = [event for event in self.browser.events if event.get("sessionId") == self.session]
        return [event["params"] for event in mine if event["method"] == method]

    def complaints(self) -> list[Any]:
        """Exceptions, and what the browser logged: refused requests, and what a policy forbade."""
        logged = [event["entry"] for event in self.events("Log.entryAdded") if event["entry"]["level"] != "info"]
        return [*self.events("Runtime.exceptionThrown"), *logged]

    def requested(self) -> list[str]:
        """Every address that the page has asked for."""
        return [event["request"]["url"] for event in self.events("Network.requestWillBeSent")]


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """A browser with an empty profile in `folder`; skips the test where none is installed."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip("needs a browser: apt-get install chromium")
    its_input, our_output = os.pipe()
    our_input, its_output = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (its_input, its_output)]

    def place() -> None:  # the browser reads commands from 3 and writes messages to 4
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    command = [program, *OPTIONS, f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank"]
    with subprocess.Popen(
        command, pass_fds=(3, 4), preexec_fn=place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        for end in (its_input, its_output, *high):
            os.close(end)
        with os.fdopen(our_output, "wb") as commands:
            try:
                yield Browser(process, commands, our_input)
            finally:
                process.kill()
                os.close(our_input)
