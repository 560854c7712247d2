"""The chat page over a server in this process, whose answers a test writes; and what a user does on it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from threading import Event
from typing import Any, NamedTuple

from answering import QuietHandler, answering
from browser import Page

from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.serving.http.pages import FOLDER, chat_page, page_files

MODEL = "document.getElementById('model').textContent"
IDLE = "document.getElementById('stop').hidden"
STORED = "Object.keys(localStorage).filter(name => name.startsWith('draftwood.conversation.'))"
ENDLESS, BROKEN, BUSY, REFUSED = "does not end", "breaks off", "gets 429", "gets 400"  # messages with such answers
Pieces = Sequence[tuple[str, bool]]  # texts, and whether they were drafted


class Scripted(NamedTuple):
    """left: set when the browser has ended the answer to ENDLESS. asked: the messages of each request. pieces: what is
    answered, which tests may change."""

    address: str
    left: Event
    asked: list[list[dict[str, str]]]
    pieces: list[tuple[str, bool]]


@contextmanager
def scripted(pieces: Pieces, model: str = "scripted", error: str = "no", chats: bool = True) -> Iterator[Scripted]:
    """error: the message of errors. chats: whether the model has a chat template."""
    left, asked, answers = Event(), list[list[dict[str, str]]](), list(pieces)
    files, page = page_files(), chat_page(SamplingParams())

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            found = files.get(self.path.removeprefix(f"/{FOLDER}/")) or (page if self.path == "/" else None)
            if found is None:
                return self.reply(json.dumps({"data": [{"id": model}]}).encode())
            self.reply(
                bytes(found.body), headers=[each for each in found.headers.items() if each[0] != "content-length"]
            )

        def do_POST(self) -> None:
            body = json.loads(self.body())
            if self.path == "/tokenize":
                return self.reply(b"{}", 200 if chats else 400)
            said, refusal = body["messages"][-1]["content"], json.dumps({"error": {"message": error}}).encode()
            if said == BUSY:
                return self.reply(refusal, 429, [("retry-after", "1")])
            if said == REFUSED or "stream" not in body:
                return self.reply(refusal, 400)
            asked.append(body["messages"])
            choice = {"pieces": [{"text": text, "drafted": drafted} for text, drafted in answers]}
            event = {"model": model, "choices": [choice], "usage": {"completion_tokens": len(answers)}}
            events = f"data: {json.dumps(event)}\n\n".encode()
            if said != ENDLESS:
                return self.reply(events + b"data: [DONE]\n\n" * (said != BROKEN))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(events)
            if not self.rfile.read(1):  # returns when the browser has closed the connection
                left.set()

    with answering(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as address:
        yield Scripted(f"{address}/", left, asked, answers)


def opened(page: Page) -> Page:
    """A page that has asked for the model."""
    page.wait(MODEL)
    return page


def reload(page: Page) -> None:
    page.run("window.old = 1")
    page.browser.send("Page.reload", page.session)
    page.wait(f"!window.old && document.readyState === 'complete' && {MODEL}")


def fill(page: Page, **values: str) -> None:
    for name, value in values.items():
        page.run(f"document.getElementById('{name}').value = {json.dumps(value)}")


def submit(page: Page, form: str) -> None:
    page.run(f"document.getElementById('{form}').requestSubmit()")


def click(page: Page, selector: str) -> None:
    page.run(f"[...document.querySelectorAll({json.dumps(selector)})].at(-1).click()")


def ask(page: Page, prompt: str) -> None:
    """Send a message, and wait for the end of its answer."""
    fill(page, prompt=prompt)
    submit(page, "ask")
    page.wait(IDLE)


def texts(page: Page, selector: str) -> list[str]:
    found: list[str] = page.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(each => each.textContent)")
    return found


def messages(page: Page) -> list[dict[str, Any]]:
    """Those of the conversation that is open, as the browser keeps them."""
    kept: list[dict[str, Any]] = page.run(
        "JSON.parse(localStorage['draftwood.conversation.' + location.hash.slice(1)]).messages"
    )
    return kept


def press(page: Page, key: str, shift: bool = False) -> None:
    """A key in the element that has the focus."""
    text = "\r" if key == "Enter" else key if len(key) == 1 else ""
    code = {"Enter": 13, "Escape": 27}.get(key, 0)
    for kind in ("keyDown", "keyUp"):
        more = {"text": text} if text and kind == "keyDown" else {}
        page.browser.send(
            "Input.dispatchKeyEvent",
            page.session,
            type=kind,
            key=key,
            windowsVirtualKeyCode=code,
            modifiers=8 * shift,
            **more,
        )
