"""What a model writes, on the chat page in a real browser: Markdown, the colour of drafted tokens, hostile texts at
every cut."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from browser import Browser, Page, chromium

pytest.importorskip("fastapi", reason="needs the [serve] extra")

from chat_page import REFUSED, ask, click, opened, scripted, texts

HOSTILE = "<script>hacked = 1</script><img src=x onerror='hacked = 1'></span><b id=injected>&lt;"
ATTACKS = (
    HOSTILE,
    "[link](javascript:hacked=1) [link](JaVa\tScRiPt:hacked=1) <javascript:hacked=1> ![x](javascript:hacked=1)",
    "[a](data:text/html,<script>hacked=1</script>) [a]( 'x' onclick='hacked=1') [b](/v1/models) ![i](http://x/y.png)",
    "<svg><animate onbegin=hacked=1 attributeName=x dur=1s></svg><math><mtext><style><img src=x onerror=hacked=1>",
    "<style>@import 'http://x/y.css'</style><style>*{background:url(http://x/z)}</style><link rel=stylesheet href=//x>",
    "```html\n<img src=x onerror=hacked=1>\n<script>hacked=1</script>",
    '```"><img/src=x/onerror=hacked=1>\nx\n```\n\n~~~ <svg/onload=hacked=1>\n</code></pre><script>hacked=1</script>',
    "| <img src=x onerror=hacked=1> | b |\n|---|:-:|\n| `<script>hacked=1</script>` | <iframe srcdoc='<script>'> |",
    "- <details open ontoggle=hacked=1>\n- [x] <input autofocus onfocus=hacked=1>\n\n1. <form action=javascript:x>",
    "<!--><img src=x onerror=hacked=1>--> <![CDATA[<img src=x onerror=hacked=1>]]> <?x <img src=x onerror=hacked=1>?>",
    "[a]: javascript:hacked=1 'b'\n[a] [ref]\n\n[ref]: http://x/ \"<img src=x onerror=hacked=1>\"",
    "<base href=//x/><meta http-equiv=refresh content='0;url=http://x'><object data=x><embed src=x><a name=log>",
)
MARKDOWN = (
    '# Title\n\nA *b* **c** `d` ~~e~~ [f](https://x.y/z "t") &lt;tag&gt; 1 < 2\nnext line\\\n\n> quote\n> more\n\n'
    "- one\n- two\n  - inner\n\n    loose\n\n3. three\n4. four\n\n| a | b |\n|---|--:|\n| 1 | `2` |\n| 3 | 4 |\n\n"
    "```python\ndef f(x):\n    return '<b>'  # é\n" + "x = 1\n" * 45 + "```\n\n    indented\n\nsetext\n===\n\n"
    "end\r\nof [it][r]\n\n[r]: https://r.r/\n"
)
# Draws a text in pieces of `step` characters. Returns what is wrong on the way, and against the text drawn at once.
DRAWN = r"""
(async (text, step) => {
  const { MarkdownView } = await import('./page/growing.js');
  const bad = new Set(), names = new Set((
    'A BLOCKQUOTE BR BUTTON CODE DEL DIV EM H1 H2 H3 HR LI OL P PRE SPAN STRONG TABLE TBODY TD TH THEAD TR UL'
  ).split(' '));
  const wrong = { href: /^(?!https?:\/\/|mailto:)/, 
    class: /^(?!drafted|block|code|copy|head|hljs|language|lines|scroll|$)/ };
  const drawn = (step) => {
    const box = document.createElement('div'), view = new MarkdownView(box);
    document.getElementById('log').append(box);
    for (let end = step; end < text.length + step; end += step) {
      view.update(text.slice(0, end), [end >> 1, end - (end >> 1)], end >= text.length);
      for (const each of box.querySelectorAll('*')) {
        if (!names.has(each.tagName)) bad.add(each.tagName);
        for (const { name, value } of each.attributes) {
          if (/^(on|style|src|id$|name$)/.test(name) || wrong[name]?.test(value)) bad.add(name + '=' + value);
        }
      }
    }
    box.remove();
    return box.innerHTML.replace(/<span class="drafted">|<.span>/g, '');
  };
  const [slow, whole] = [drawn(step), drawn(text.length)];
  if (slow !== whole) bad.add(slow + ' is not ' + whole);
  return [...bad];
})"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    with scripted([]) as fake:
        yield opened(browser.open(fake.address))


def test_nothing_of_a_hostile_text_runs_at_any_cut(page: Page) -> None:
    for text in ATTACKS:
        assert page.run(f"{DRAWN}({json.dumps(text)}, 1)") == [], text
    assert page.run(f"{DRAWN}('> '.repeat(8000), 16000)") == [
        "class=plain"
    ]  # too deep for the parser: the text as it is
    page.run("new Promise(resolve => setTimeout(resolve, 50))")  # an image that failed to load would run by now
    assert page.run("typeof hacked") == "undefined" and not page.complaints()
    assert all(url.startswith(("http://127.0.0.1", "data:")) for url in page.requested())


@pytest.mark.parametrize("step", [1, 7])
def test_a_text_that_grows_is_drawn_as_when_it_is_whole(page: Page, step: int) -> None:
    assert page.run(f"{DRAWN}({json.dumps(MARKDOWN)}, {step})") == []


@pytest.mark.parametrize(
    "text, settled",
    [
        ("word\n\n" * 9, ".block"),
        ("- *item*\n" * 9, "li"),
        ("| a |\n|---|\n" + "| cell |\n" * 9, "tbody"),
        ("```js\n" + "let x = 1;\n" * 90, ".lines"),
    ],
)
def test_what_is_settled_is_not_drawn_again(page: Page, text: str, settled: str) -> None:
    """Else each frame of a long answer would take longer than the one before."""
    drawn = """(async (text, settled) => {
      const { MarkdownView } = await import('./page/growing.js');
      const box = document.createElement('div'), view = new MarkdownView(box), size = text.length;
      view.update(text.slice(0, size - 6), [size - 6]);
      const before = [...box.querySelectorAll(settled)];
      view.update(text, [size]);
      return [before.length, before.filter((node) => !box.contains(node)).length];
    })"""
    count, anew = page.run(f"{drawn}({json.dumps(text)}, {json.dumps(settled)})")
    assert count > 2 and anew <= 2


def test_markdown_code_and_drafted_tokens(browser: Browser) -> None:
    pieces = [("A **bo", True), ("ld** `co", False), ("de` &lt; *i*", True), (" end\n\n| a |\n|---|\n| ", False)]
    pieces += [("b", True), (" |\n\n```python\nx =", False), (" None", True), ("\n```\n- i", False), ("tem\n", True)]
    with scripted(pieces) as fake:
        page = opened(browser.open(fake.address))
        ask(page, "hello")
        assert texts(page, ".text .drafted") == ["A ", "bo", "de", " < ", "i", "b", " ", "None", "tem"]
        assert texts(page, ".text strong, .text td, .text pre code, .text li") == ["bold", "b", "x = None", "item"]
        assert (
            texts(page, ".hljs-literal") == ["None"]
            and page.run("document.querySelector('.head').dataset.language") == "python"
        )
        page.run("Object.defineProperty(navigator, 'clipboard', { value: { writeText: async (it) => copied = it } })")
        whole = "".join(text for text, _ in pieces)
        for button, text in ((".code button", "x = None"), (".assistant footer .copy", whole)):
            click(page, button)
            page.wait(f"window.copied === {json.dumps(text)}")


def test_no_text_becomes_markup_or_code(browser: Browser) -> None:
    """And even if one became markup, the policy lets no script or style of it count."""
    with scripted([(HOSTILE, True), (HOSTILE, False)], model=HOSTILE, error=HOSTILE) as fake:
        page = opened(browser.open(fake.address))
        ask(page, HOSTILE)
        assert texts(page, ".assistant > .text") == [2 * HOSTILE.replace("&lt;", "<")]
        assert texts(page, "#model, .user > .text, .facts > span:first-child") == [HOSTILE] * 3
        click(page, ".explain")
        page.wait("document.querySelector('#rounds [role=status]').textContent.includes('<b id')")
        click(page, "#rounds button")
        ask(page, REFUSED)
        assert texts(page, "#error span") == [HOSTILE + "."]
        assert page.run("document.getElementById('injected') === null && typeof hacked") == "undefined"
        assert not [url for url in page.requested() if url.endswith("/x")]
        markup = f"document.body.innerHTML = {json.dumps(HOSTILE)}"
        assert "TrustedHTML" in page.run(f"(() => {{ try {{ {markup} }} catch (error) {{ return error.message }} }})()")
        for kind, more in (("style", "textContent: 'body { opacity: 0 }'"), ("img", "src: 'http://127.0.0.2:9/'")):
            page.run(f"document.body.append(Object.assign(document.createElement('{kind}'), {{ {more} }}))")
        assert page.run("getComputedStyle(document.body).opacity") == "1"
        assert page.run("fetch('http://127.0.0.2:9/').catch(error => 'refused')") == "refused"
        policies = [each["entry"]["text"] for each in page.events("Log.entryAdded")]
        for kind in ("style-src", "img-src", "connect-src"):
            assert any("Content Security Policy" in text and kind in text for text in policies), policies
