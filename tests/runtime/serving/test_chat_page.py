"""The chat page in a real headless browser: a conversation over a real server, and what a user does over a scripted
one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, Page, chromium
from serving import Served, served, with_chat_template

httpx = pytest.importorskip("httpx", reason="needs httpx")

from chat_page import (  # noqa: E402 - only where the server is installed
    BROKEN,
    BUSY,
    ENDLESS,
    IDLE,
    MODEL,
    REFUSED,
    STORED,
    Scripted,
    ask,
    click,
    fill,
    messages,
    opened,
    press,
    reload,
    scripted,
    submit,
    texts,
)

KEY = "secret"
FAILED = "!document.getElementById('error').hidden"
WRITTEN = "document.getElementById('prompt').value"


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


@pytest.fixture
def fake() -> Iterator[Scripted]:
    with scripted([("a", True), ("b", False)], error="that cannot be") as running:
        yield running


@pytest.fixture
def page(fake: Scripted, browser: Browser) -> Page:
    return opened(browser.open(fake.address))


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
    fill(page, seed="7", temperature="1", top_p="1", limit="24", system="be brief")
    said = [{"role": "system", "content": "be brief"}]
    for text in ("hello", "again"):
        said.append({"role": "user", "content": text})
        expected = answered(server, "/chat/completions", messages=said, seed=7, temperature=1, max_tokens=24)
        ask(page, text)
        said.append({"role": "assistant", "content": messages(page)[-1]["content"]})
        assert said[-1]["content"] == expected["message"]["content"] != ""
    assert KEY not in page.run("JSON.stringify(localStorage) + JSON.stringify(sessionStorage) + document.cookie")
    model, tokens, _, a_pass, drafted = messages(page)[1]["facts"]
    assert (model, tokens) == ("tiny", "24 tokens") and a_pass.endswith(" tokens a pass")
    accepted, of_all = (int(word) for word in drafted.split() if word.isdigit())
    assert 0 < accepted <= of_all and float(a_pass.split()[0]) == round(24 / (24 - accepted), 2)
    assert messages(page)[1]["runs"][1::2] and texts(page, ".drafted") and texts(page, ".legend")

    click(page, ".explain")
    page.wait("!document.querySelector('#rounds iframe').hidden")
    before = {target["targetId"] for target in browser.pages()}
    click(page, "#rounds a")
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
    page.run("document.getElementById('mode').dispatchEvent(new Event('change'))")
    plain = answered(server, "/completions", prompt="hello", max_tokens=16, temperature=0)
    ask(page, "hello")
    assert texts(page, ".assistant > .text") == [plain["text"]]


def test_a_model_without_a_chat_template_continues_texts(browser: Browser) -> None:
    with scripted([], chats=False) as fake:
        page = opened(browser.open(fake.address))
        page.wait("document.getElementById('mode').value === 'text'")
        assert texts(page, ".welcome h2") == ["Begin a text"]


def test_an_answer_that_does_not_end_is_stopped_and_what_came_stays(fake: Scripted, page: Page) -> None:
    for end in ("stop", "Escape", "new", "delete"):
        fake.left.clear()
        fill(page, prompt=ENDLESS)
        submit(page, "ask")
        page.wait("document.querySelector('.assistant > .text')?.textContent === 'ab'")
        if end == "Escape":
            press(page, end)
        elif end == "delete":
            click(page, "#list li.open button")
        else:
            page.run(f"document.getElementById('{end}').click()")
        assert fake.left.wait(60)
        page.wait(IDLE)
        if end in ("stop", "Escape"):
            assert texts(page, ".facts > span")[-1] == "stopped"
            ask(page, "the server still answers")
            assert [each["content"] for each in fake.asked[-1]] == [ENDLESS, "ab", "the server still answers"]
            page.run("document.getElementById('new').click()")
    assert texts(page, ".welcome h2") == ["Ask something"]
    assert texts(page, "#list a") == [ENDLESS] * 3


def test_an_answer_is_regenerated_and_a_message_edited(fake: Scripted, page: Page) -> None:
    click(page, ".example")
    page.wait(f"{IDLE} && document.querySelector('.assistant .again')")
    ask(page, "second")
    assert texts(page, ".user > .text")[1] == "second"
    fake.pieces[:] = [("new", False)]
    click(page, ".again")
    page.wait(f"{IDLE} && document.querySelectorAll('.assistant .again').length === 2")
    assert [each["content"] for each in messages(page)][1:] == ["ab", "second", "new"] and len(fake.asked[-1]) == 3
    page.run("document.querySelector('.user .edit').click()")
    assert page.run("document.activeElement.value") == fake.asked[0][0]["content"]
    page.run("document.activeElement.value = 'first'")
    press(page, "Enter")
    page.wait(f"{IDLE} && document.querySelectorAll('.assistant .again').length === 1")
    assert [each["content"] for each in messages(page)] == ["first", "new"]


def test_conversations_are_kept_switched_and_deleted(fake: Scripted, page: Page) -> None:
    page.run("localStorage.clear()")
    for text in ("one", "two"):
        page.run("document.getElementById('new').click()")
        ask(page, text)
    assert texts(page, "#list a") == ["two", "one"]
    click(page, "#list a")
    page.wait("document.querySelector('.user > .text').textContent === 'one'")
    reload(page)
    assert texts(page, ".user > .text") == ["one"] and texts(page, ".assistant > .text") == ["ab"]
    click(page, "#list li.open button")
    assert texts(page, "#list a") == ["two"] and texts(page, ".turn") == []
    broken = {"{": "not JSON", '{"messages": [{"role": "system", "content": 1}]}': "no message"}
    for index, text in enumerate(broken):
        page.run(f"localStorage['draftwood.conversation.{index}'] = {text!r}")
    kept = "import('./page/storage.js').then(({ fresh, save, list }) => { const "
    page.run(
        kept + "one = () => ({ ...fresh('chat'), messages: [{ role: 'user', content: 'x'.repeat(90000) }] });"
        " for (let i = 0; i < 60; i++) save(one()); })"
    )
    assert page.run(f"{STORED}.length") <= 52 and page.run("JSON.stringify(localStorage).length") < 2_200_000
    page.run("localStorage.clear()")


@pytest.mark.parametrize(
    "said, error",
    [(BUSY, "The server is busy. That cannot be. Try again in 1 s."), (REFUSED, "That cannot be.")],
)
def test_a_refused_message_is_not_lost(page: Page, said: str, error: str) -> None:
    ask(page, "before")
    ask(page, said)
    page.wait(FAILED)
    assert texts(page, "#error span") == [error] and page.run(WRITTEN) == said
    assert [each["content"] for each in messages(page)] == texts(page, ".turn > .text") == ["before", "ab"]
    reload(page)
    assert page.run(WRITTEN) == said
    fill(page, prompt="")
    ask(page, "after")
    assert not page.run(FAILED) and page.run(WRITTEN) == ""


def test_a_wrong_setting_is_shown_and_the_message_stays(fake: Scripted, page: Page) -> None:
    fill(page, temperature="-1")
    ask(page, "hello")
    assert page.run(WRITTEN) == "hello" and not page.run("document.getElementById('options').hidden")
    assert not fake.asked


def test_a_lost_connection_is_told_and_what_came_stays(browser: Browser) -> None:
    with scripted([("ab", False)]) as fake:
        page = opened(browser.open(fake.address))
        ask(page, BROKEN)
        page.wait(FAILED)
        assert texts(page, "#error span") == ["The connection was lost before the end of the answer."]
        assert texts(page, ".assistant > .text") == ["ab"] and texts(page, ".facts > span")[-1] == "broken off"
    ask(page, "hello")
    page.wait(f"{WRITTEN} === 'hello'")
    assert texts(page, "#error span") == ["The server cannot be reached: is `draftwood serve` still running?"]


def test_it_fits_a_phone_and_has_a_dark_side(page: Page) -> None:
    page.browser.send(
        "Emulation.setDeviceMetricsOverride", page.session, width=390, height=800, deviceScaleFactor=1, mobile=True
    )
    page.run("document.getElementById('prompt').focus()")
    press(page, "h")
    press(page, "Enter", shift=True)
    assert page.run(WRITTEN) == "h\n"
    press(page, "Enter")
    page.wait(f"{IDLE} && document.querySelector('.again')")
    assert page.run("document.documentElement.scrollWidth") == 390
    shown = "document.elementFromPoint(10, 400).closest('#side') !== null"
    page.wait(f"!({shown})")
    page.run("document.getElementById('menu').click()")
    page.wait(shown)
    before = page.run("getComputedStyle(document.body).backgroundColor")
    page.run("document.getElementById('theme').click()")
    assert page.run("getComputedStyle(document.body).backgroundColor") != before
    nameless = "[...document.querySelectorAll('button, input, textarea, select')].filter(each => "
    nameless += "!each.textContent.trim() && !each.ariaLabel && !each.labels?.length).length"
    assert page.run(nameless) == 0
