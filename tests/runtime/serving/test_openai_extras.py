"""What a server has besides completions: tokens, names of requests, its own and others' web pages, explanations."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from hashlib import sha256
from html import unescape
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from bundling import ROOT
from serving import Served, events_of, served

from draftwood.runtime import LLM

httpx = pytest.importorskip("httpx", reason="needs httpx")

from draftwood.runtime.serving.app import POSTED  # noqa: E402 - only where it is installed
from draftwood.runtime.serving.http.pages import page_files  # noqa: E402

PAGE = "http://localhost:3000"
PAGE_FILES = ROOT / "runtime" / "serving" / "http" / "page"
ASKED = {"prompt": "hello", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
WRITTEN = ASKED | {"max_tokens": 24, "temperature": 1, "seed": 5}
MESSAGES = [{"role": "user", "content": "hello"}]
KEY = {"authorization": "bearer secret"}  # the scheme's name has no case


@pytest.fixture(scope="module")
def server(chat_bundle: Path) -> Iterator[Served]:
    """With a key, for a web page, small bodies, and no pages of its own."""
    limits = ("--api-key", "secret", "--allowed-origins", PAGE, "--max-body-bytes", "50000", "--no-ui")
    with served(chat_bundle, "--speculative", "budget=fixed", *limits) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[Any]:
    with httpx.Client(base_url=server.root, headers=KEY, timeout=30) as client:
        yield client


def test_texts_become_tokens_and_back(client: Any, served_llm: LLM) -> None:
    text = "naïve café <s> 🙂"
    for special in (True, False):
        tokens = served_llm.tokenizer.encode(text, special)
        answer = client.post("/tokenize", json={"prompt": text, "add_special_tokens": special}).json()
        most = served_llm.bundle.manifest.max_length
        assert answer == {"count": len(tokens), "max_model_len": most, "tokens": tokens}
        back = client.post("/detokenize", json={"model": "tiny", "tokens": tokens}).json()
        assert back == {"prompt": served_llm.tokenizer.decode(tokens, skip_special_tokens=False)}
    texts = client.post("/tokenize", json={"prompt": "hello", "return_token_strs": True}).json()["token_strs"]
    assert "".join(texts) == "<s>hello"
    halves = client.post("/tokenize", json={"prompt": "漢", "return_token_strs": True}).json()["token_strs"]
    assert len(halves) == 4 and "\ufffd" not in "".join(halves)
    longer = "x" * (most + 1)  # than the model takes, and yet counted
    assert client.post("/tokenize", json={"prompt": longer}).json()["count"] == len(served_llm.tokenizer.encode(longer))


def test_tokens_are_guarded_like_completions(server: Served, client: Any) -> None:
    assert httpx.post(f"{server.root}/tokenize", json={"prompt": "x"}).status_code == 401
    assert httpx.post(f"{server.root}/detokenize", json={"tokens": []}).status_code == 401
    assert client.post("/tokenize", json={"prompt": "x" * 50_000}).status_code == 413
    assert client.post("/tokenize", json={"prompt": "x", "model": "other"}).status_code == 404
    assert client.post("/detokenize", json={"tokens": [1], "model": "other"}).status_code == 404


def test_a_request_has_a_name_and_the_server_the_packages_version(client: Any) -> None:
    assert client.get("/version").json() == {"version": version("draftwood")}
    named = client.post("/v1/completions", json=ASKED, headers={"X-Request-Id": "mine"})
    assert named.headers["x-request-id"] == "mine"
    others = [client.get("/v1/models").headers["x-request-id"] for _ in range(2)]
    assert len({*others, "mine"}) == 3
    assert len(client.get("/v1/models", headers={"X-Request-Id": "x" * 5000}).headers["x-request-id"]) < 100
    wrong = client.get("/v1/models", headers={"authorization": "Bearer wrong", "X-Request-Id": "mine"})
    assert (wrong.status_code, wrong.headers["x-request-id"]) == (401, "mine")


def test_a_conversation_is_counted_as_it_is_read(client: Any, served_llm: LLM) -> None:
    """A field of the other form that asks for nothing is accepted."""
    chat = client.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 1}).json()
    counted = client.post("/tokenize", json={"messages": MESSAGES}).json()
    assert counted["tokens"] == served_llm.encode_chat(MESSAGES) and counted["count"] == chat["usage"]["prompt_tokens"]
    assert client.post("/tokenize", json={"messages": MESSAGES, "add_special_tokens": False}).json() == counted
    defaults = {"add_generation_prompt": True, "continue_final_message": False, "chat_template_kwargs": {}, "tools": []}
    counts = [client.post("/tokenize", json={"prompt": "x", **extra}).json()["count"] for extra in ({}, defaults)]
    assert counts[0] == counts[1]


def test_web_pages_that_are_allowed_may_use_it(client: Any) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    with httpx.Client(base_url=client.base_url) as browser:  # which asks without a key
        allowed = browser.options("/v1/completions", headers={**asked, "origin": PAGE})
        assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        other = browser.options("/v1/completions", headers={**asked, "origin": "http://elsewhere"})
        assert other.status_code == 400 and "access-control-allow-origin" not in other.headers
        for status, headers in ((200, KEY), (401, {})):
            answer = browser.get("/v1/models", headers={**headers, "origin": PAGE})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, PAGE)


def test_no_web_page_may_use_it_by_default(http: Any) -> None:
    headers = {"origin": PAGE, "access-control-request-method": "POST"}
    assert http.options("/v1/completions", headers=headers).status_code == 405
    assert "access-control-allow-origin" not in http.get("/v1/models", headers=headers).headers
    kinds: list[dict[str, str]] = [{"origin": PAGE}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}]
    for kind in (*kinds, {**kinds[0], "content-type": "text/plain"}):  # a page may post without asking, but not as JSON
        for path in POSTED:
            refused = http.post(path, content=json.dumps(ASKED), headers=kind)
            assert refused.status_code == 400 and "JSON object" in refused.text, (path, kind)
    own = {"sec-fetch-site": "same-origin"}
    assert http.post("/v1/completions", content=json.dumps(ASKED), headers=own).status_code == 200


def test_its_own_pages_can_be_turned_off(client: Any) -> None:
    assert [client.get(path).status_code for path in ("/docs", "/page/page.js")] == [404] * 2
    assert client.get("/").json().keys() == {"version"}
    assert client.post("/v1/completions/explain", json=ASKED).status_code == 404
    assert "explain" not in client.get("/openapi.json").text


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_gets_the_text_whole_and_as_events(server: Served, client: Any) -> None:
    call = ["curl", "-sS", "-N", "--max-time", "60", f"{server.url}/completions"]
    call += ["-H", "Authorization: Bearer secret", "-d"]  # which curl calls a form

    def output(**more: Any) -> str:
        return subprocess.run([*call, json.dumps(ASKED | more)], capture_output=True, text=True, check=True).stdout

    text = json.loads(output())["choices"][0]["text"]
    *events, done = [line.removeprefix("data: ") for line in output(stream=True).splitlines() if line]
    assert done == "[DONE]" and len(events) > 1
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == text
    assert text == client.post("/v1/completions", json=ASKED).json()["choices"][0]["text"]


def policy_of(answer: Any) -> dict[str, str]:
    return dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_page_loads_nothing_of_others_and_allows_only_its_own_scripts_and_styles(http: Any, path: str) -> None:
    answer = http.get(path)
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = policy_of(answer)
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    for kind, content in re.findall(r"<(script|style)>(.*?)</\1>", answer.text, re.DOTALL):
        hashed = base64.b64encode(sha256(content.encode()).digest()).decode()
        assert f"'sha256-{hashed}'" in policy[f"{kind}-src"]
    assert "unsafe" not in str(policy) and not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", answer.text)
    assert not re.search(r" on\w+=| style=", answer.text)


def test_the_files_of_the_page_are_these_and_no_others(http: Any) -> None:
    assert policy_of(http.get("/"))["script-src"] == "'self'"
    names = {file.relative_to(PAGE_FILES).as_posix() for file in PAGE_FILES.rglob("*.*s")}
    assert names == set(page_files())
    asked = re.findall(r'(?:href|src)="page/([^"]+)"', http.get("/").text)
    for name in names:
        answer, content = http.get(f"/page/{name}"), (PAGE_FILES / name).read_text(encoding="utf-8")
        kind = "css" if name.endswith("css") else "javascript"
        assert answer.text == content and answer.headers["content-type"] == f"text/{kind}; charset=utf-8"
        assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["cache-control"] == "no-cache"
        known = http.get(f"/page/{name}", headers={"if-none-match": answer.headers["etag"]})
        assert (known.status_code, known.content, known.headers["etag"]) == (304, b"", answer.headers["etag"])
        if not name.startswith("libraries"):
            asked += [link for link in re.findall(r'(?:import|from) "\./([^"]+)"', content)]
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", content)
            assert content.count("\n") < 350 and max(map(len, content.splitlines())) <= 400
    assert set(asked) == names
    for other in ("page.html", "", "libraries/LICENSE.marked", "../pages.py", "%2e%2e/pages.py", "//etc/passwd"):
        assert http.get(f"/page/{other}").status_code == 404, other


def test_the_libraries_of_the_page_are_those_of_its_list() -> None:
    """As they were published, with their licences."""
    folder = PAGE_FILES / "libraries"
    listed = re.findall(r"^(\S+\.js) .* ([0-9a-f]{64})$", (folder / "LIBRARIES.txt").read_text(), re.MULTILINE)
    assert {file.name for file in folder.glob("*.js")} == {name for name, _ in listed} and len(listed) == 3
    for name, digest in listed:
        assert sha256((folder / name).read_bytes()).hexdigest() == digest
        assert "Copyright" in (folder / f"LICENSE.{name.split('.')[0]}").read_text()


def test_the_reference_has_every_route_and_field(http: Any) -> None:
    document, page = http.get("/openapi.json").json(), unescape(http.get("/docs").text)
    for path, operations in document["paths"].items():
        for method in operations:
            assert f'<h2><b>{method.upper()}</b> <span class="path">{path}</span></h2>' in page
    for body in ("CompletionBody", "ChatBody", "TokenizeBody"):
        for field in document["components"]["schemas"][body]["properties"]:
            assert f"<code>{field}</code>" in page
    assert "list of integer or list of string" in page and "at most 2^31 - 1" in page and "false or object" in page
    assert "at most 2^64 - 1" in page and "object of include_usage, continuous_usage_stats, include_pieces" in page


def test_pieces_are_the_text_and_tell_who_wrote_it(http: Any) -> None:
    options = {"include_pieces": True, "include_usage": True}
    body = WRITTEN | {"prompt": ["hello", "there"], "n": 2, "stream": True, "stream_options": options}
    events = events_of(http.post("/v1/completions", json=body).text)
    drafted = 0
    for choice in (choice for event in events for choice in event["choices"]):
        assert "".join(piece["text"] for piece in choice["pieces"]) == choice["text"]
        drafted += sum(piece["drafted"] for piece in choice["pieces"])
    assert 0 < drafted <= events[-1]["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    plain = body | {"stream_options": {"include_usage": True}}
    assert '"pieces"' not in http.post("/v1/completions", json=plain).text
    assert http.post("/v1/completions", json=WRITTEN | {"stream_options": options}).status_code == 400


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_explanation_is_of_the_text_with_this_seed(http: Any, path: str) -> None:
    chat = "chat" in path
    body: dict[str, Any] = WRITTEN | (
        {"messages": [{"role": "user", "content": "hello"}], "prompt": None} if chat else {}
    )
    (choice,) = http.post(path, json=body | {"logprobs": True if chat else 0}).json()["choices"]
    logprobs = choice["logprobs"]
    tokens = [item["token"] for item in logprobs["content"]] if chat else logprobs["tokens"]
    answer = http.post(f"{path}/explain", json=body)
    assert answer.status_code == 200 and "script-src 'none'" in answer.headers["content-security-policy"]
    (shown,) = re.findall(r'<p class="text"><span class="prompt">(.*?)</span>(.*?)</p>', answer.text, re.DOTALL)
    written = unescape("".join(re.findall(r"<a [^>]*>(.*?)</a>", shown[1], re.DOTALL)))
    assert "hello" in unescape(shown[0]) and written == "".join(tokens) and len(tokens) == 24
    assert len(re.findall(r"<details", answer.text)) == len(re.findall(r'<svg class="graph"', answer.text)) > 0
