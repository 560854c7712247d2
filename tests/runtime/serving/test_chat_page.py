"""The chat page in a real headless browser, over a real server; and over one that sends hostile texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import pytest
from answering import QuietHandler, answering
from browser import Browser, Page, chromium
from serving import Served, served, with_chat_template

httpx = pytest.importorskip("httpx", reason="needs httpx")

from draftwood.runtime.sampling.params import SamplingParams  # noqa: E402
from draftwood.runtime.serving.http.pages import chat_page  # noqa: E402 - only where it is installed

KEY = "secret"
MODEL = "document.getElementById('model').textContent"
ENDLESS = "the answer to this does not end"
HOSTILE = "<script>hacked = 1</script><img src=x onerror='hacked = 1'></span><b id=injected>&lt;"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_chat_template(tiny_bundle, tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def server(bundle: Path, browser: Browser) -> Iterator[Served]:
    with served(bundle, "--api-key", KEY, "--speculative", "budget=fixed") as running:
        yield running


def fill(page: Page, **values: str) -> None:
    for name, value in values.items():
        page.run(f"document.getElementById('{name}').value = {json.dumps(value)}")


def submit(page: Page, form: str) -> None:
    page.run(f"document.getElementById('{form}').requestSubmit()")


def ask(page: Page, prompt: str) -> str:
    """Send a message; returns the answer's text when it is complete."""
    asked = page.run("document.querySelectorAll('.assistant').length")
    fill(page, prompt=prompt)
    submit(page, "ask")
    page.wait(f"document.querySelectorAll('.assistant').length > {asked}")
    page.wait("document.getElementById('stop').hidden && document.querySelector('button.explain')")
    answers: list[str] = page.run("[...document.querySelectorAll('.assistant')].map(box => box.textContent)")
    return answers[-1]


def unlocked(server: Served, browser: Browser) -> Page:
    """The page, after a wrong key and the right one."""
    page = browser.open(server.root + "/")
    page.wait("!document.getElementById('unlock').hidden")
    for key, condition in (("wrong", "!document.getElementById('refused').hidden"), (KEY, f"{MODEL} === 'tiny'")):
        assert page.run(MODEL) == ""
        fill(page, key=key)
        submit(page, "unlock")
        page.wait(condition)
    return page


def answered(server: Served, path: str, **body: Any) -> Any:
    """The first choice of the server's answer to a client of its own."""
    answer = httpx.post(f"{server.url}{path}", json=body, headers={"authorization": f"Bearer {KEY}"}, timeout=60)
    return answer.json()["choices"][0]


def test_a_conversation_from_the_key_to_the_rounds(server: Served, browser: Browser) -> None:
    page = unlocked(server, browser)
    assert page.run("document.getElementById('unlock').hidden && document.getElementById('mode').value") == "chat"
    assert page.run("[document.cookie, localStorage.length, sessionStorage.length].join()") == ",0,0"

    fill(page, seed="7", temperature="1", top_p="1", limit="24", system="be brief")
    messages = [{"role": "system", "content": "be brief"}]
    for said in ("hello", "again"):
        messages.append({"role": "user", "content": said})
        expected = answered(server, "/chat/completions", messages=messages, seed=7, temperature=1, max_tokens=24)
        messages.append({"role": "assistant", "content": ask(page, said)})
        assert messages[-1]["content"] == expected["message"]["content"] != ""
    assert "tokens/s" in page.run("document.querySelector('.facts').textContent")
    accepted = page.run("/(\\d+) of (\\d+) drafted tokens accepted/.exec(document.querySelector('.facts').textContent)")
    drafted = page.run("document.querySelector('.assistant').querySelectorAll('.drafted').length")
    assert drafted <= int(accepted[1]) <= int(accepted[2]) and int(accepted[2]) > 0

    page.run("document.querySelector('button.explain').click()")
    page.wait("document.querySelector('a.explained')")
    before = {target["targetId"] for target in browser.pages()}
    page.run("document.querySelector('a.explained').click()")
    opened = wait_for_page(browser, before)
    opened.wait("document.readyState === 'complete' && document.querySelector('details')")
    rounds = opened.run("document.querySelectorAll('details').length")
    assert opened.run("document.querySelectorAll('svg.graph').length") == rounds
    assert opened.run("getComputedStyle(document.querySelector('.text')).whiteSpace") == "pre-wrap"
    assert not opened.complaints()
    assert all(url.startswith((server.root, "data:", "blob:")) for url in page.requested())
    assert [complaint["url"] for complaint in page.complaints()] == [f"{server.url}/models"] * 2  # the 401s


def wait_for_page(browser: Browser, before: set[str]) -> Page:
    while not (new := [target["targetId"] for target in browser.pages() if target["targetId"] not in before]):
        pass
    return browser.attach(new[0])


def test_a_text_is_continued(server: Served, browser: Browser) -> None:
    page = unlocked(server, browser)
    fill(page, mode="text", seed="3", limit="16", temperature="0")
    plain = answered(server, "/completions", prompt="hello", max_tokens=16, temperature=0)
    assert ask(page, "hello") == plain["text"]
    page.run("document.getElementById('clear').click()")
    assert page.run("document.getElementById('log').children.length") == 0


class Hostile(NamedTuple):
    """left: set when the browser has ended the answer to ENDLESS. asked: the messages of each request."""

    address: str
    left: Event
    asked: list[list[dict[str, str]]]


@contextmanager
def hostile(piece: str) -> Iterator[Hostile]:
    """A server with the real page, whose model, answers and errors are `piece`."""
    left, asked = Event(), list[list[dict[str, str]]]()

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            page = chat_page(SamplingParams())
            content = bytes(page.body) if self.path == "/" else json.dumps({"data": [{"id": piece}]}).encode()
            headers = [each for each in page.headers.items() if each[0] != "content-length"]
            self.reply(content, headers=headers if self.path == "/" else ())

        def do_POST(self) -> None:
            body = json.loads(self.body())
            if self.path == "/tokenize":  # there is a chat template
                return self.reply(b"{}")
            if "stream" not in body:
                return self.reply(json.dumps({"error": {"message": piece}}).encode(), 400)
            asked.append(body["messages"])
            choice = {"pieces": [{"text": piece, "drafted": True}, {"text": piece, "drafted": False}]}
            event = {"model": piece, "choices": [choice], "usage": {"completion_tokens": 1}}
            events = f"data: {json.dumps(event)}\n\n".encode()
            if body["messages"][-1]["content"] != ENDLESS:
                return self.reply(events + b"data: [DONE]\n\n")
            self.send_response(200)
            self.end_headers()
            self.wfile.write(events)
            if not self.rfile.read(1):  # returns when the browser has closed the connection
                left.set()

    with answering(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as address:
        yield Hostile(f"{address}/", left, asked)


def test_an_answer_that_does_not_end_is_stopped_and_leaves_nothing(browser: Browser) -> None:
    with hostile("a") as server:
        page = browser.open(server.address)
        for button in ("stop", "clear"):
            server.left.clear()
            fill(page, prompt=ENDLESS)
            submit(page, "ask")
            page.wait("document.querySelector('.assistant')?.textContent === 'aa'")
            page.run(f"document.getElementById('{button}').click()")
            assert server.left.wait(60)
            page.wait("document.getElementById('stop').hidden")
            if button == "stop":
                assert ask(page, "the server still answers") == "aa"
                page.run("document.getElementById('clear').click()")
        assert ask(page, "hello") == "aa" and server.asked[-1] == [{"role": "user", "content": "hello"}]
        assert ask(page, "again") == "aa" and [each["content"] for each in server.asked[-1]] == ["hello", "aa", "again"]


def test_no_text_becomes_markup_or_code(browser: Browser) -> None:
    """And even if one became markup, the policy lets no script or style of it count."""
    with hostile(HOSTILE) as server:
        page = browser.open(server.address)
        page.wait("document.getElementById('model').textContent")
        assert ask(page, HOSTILE) == 2 * HOSTILE
        page.run("document.querySelector('button.explain').click()")
        page.wait("document.querySelector('.error')")
        texts = page.run("[...document.querySelectorAll('#model, .user, .error')].map(each => each.textContent)")
        assert texts == [HOSTILE] * 3
        assert page.run("document.getElementById('injected') === null && typeof hacked") == "undefined"
        assert not [url for url in page.requested() if url.endswith("/x")]
        page.run(f"document.body.insertAdjacentHTML('beforeend', {json.dumps(HOSTILE)})")
        page.run("document.body.append(Object.assign(document.createElement('script'), {textContent: 'hacked = 1'}))")
        page.wait("document.getElementById('injected')")
        assert page.run("fetch('http://127.0.0.2:9/').catch(error => 'refused')") == "refused"
        assert page.run("typeof hacked") == "undefined"
        assert any("Content Security Policy" in each["entry"]["text"] for each in page.events("Log.entryAdded"))
