"""The server's web pages and explanations, as a client without a browser sees them."""

from __future__ import annotations

import base64
import re
from hashlib import sha256
from html import unescape
from typing import Any

import pytest
from serving import events_of

pytest.importorskip("fastapi", reason="needs the [serve] extra")
httpx = pytest.importorskip("httpx", reason="needs httpx")

ASKED = {"prompt": "hello", "max_tokens": 24, "temperature": 1, "seed": 5, "ignore_eos": True}


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_page_loads_nothing_and_allows_only_its_own_script_and_style(http: Any, path: str) -> None:
    answer = http.get(path)
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    inline = re.findall(r"<(script|style)[^>]*>(.*?)</\1>", answer.text, re.DOTALL)
    for kind, content in inline:
        hashed = base64.b64encode(sha256(content.encode()).digest()).decode()
        assert f"'sha256-{hashed}'" in policy[f"{kind}-src"]
    assert "unsafe" not in str(policy) and not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", answer.text)
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(| on\w+=| style="
    assert not re.search(forbidden, answer.text)


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
    body = ASKED | {"prompt": ["hello", "there"], "n": 2, "stream": True, "stream_options": options}
    events = events_of(http.post("/v1/completions", json=body).text)
    drafted = 0
    for choice in (choice for event in events for choice in event["choices"]):
        assert "".join(piece["text"] for piece in choice["pieces"]) == choice["text"]
        drafted += sum(piece["drafted"] for piece in choice["pieces"])
    assert 0 < drafted <= events[-1]["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    plain = body | {"stream_options": {"include_usage": True}}
    assert '"pieces"' not in http.post("/v1/completions", json=plain).text
    assert http.post("/v1/completions", json=ASKED | {"stream_options": options}).status_code == 400


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_explanation_is_of_the_text_with_this_seed(http: Any, path: str) -> None:
    chat = "chat" in path
    body: dict[str, Any] = ASKED | (
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
