"""What people used to OpenAI's, vLLM's and llama.cpp's servers try besides completions, against a real server."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from serving import Served, served, with_chat_template

from draftwood.runtime import LLM

pytest.importorskip("fastapi", reason="needs the [serve] extra")
httpx = pytest.importorskip("httpx", reason="needs httpx")

PAGE = "http://localhost:3000"
ASKED = {"prompt": "hello", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "look_up"}}
KEY = {"authorization": "bearer secret"}  # the scheme's name has no case


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_chat_template(tiny_bundle, tmp_path_factory.mktemp("extras"))


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Served]:
    options = (
        "--speculative",
        "budget=fixed",
        "--api-key",
        "secret",
        "--allowed-origins",
        PAGE,
        "--max-body-bytes",
        "50000",
    )
    with served(bundle, *options) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[Any]:
    with httpx.Client(base_url=server.root, headers=KEY, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def llm(bundle: Path) -> Iterator[LLM]:
    with LLM(bundle, None) as llm:
        yield llm


def complete(client: Any, **more: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json=ASKED | more)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


def refused(client: Any, path: str, body: Any) -> str:
    answer = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    message: str = answer.json()["error"]["message"]
    return message


def test_the_model_may_be_left_out(client: Any) -> None:
    plain = complete(client)
    assert plain["model"] == "tiny" and plain["choices"] == complete(client, model="tiny")["choices"]
    chat = client.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 2})
    assert chat.status_code == 200 and chat.json()["model"] == "tiny"
    assert client.post("/v1/completions", json={**ASKED, "model": ""}).status_code == 404


DEFAULTS: dict[str, dict[str, Any]] = {
    "vllm": {
        "add_generation_prompt": True, "continue_final_message": False, "include_stop_str_in_output": False,
        "length_penalty": 1.0, "early_stopping": False, "priority": 0, "repetition_penalty": 1.0, "bad_words": [],
        "return_token_ids": False, "skip_special_tokens": True, "spaces_between_special_tokens": True, "top_k": -1,
        "chat_template_kwargs": {}, "min_p": 0.0, "request_id": "mine", "include_reasoning": True, "min_tokens": 0,
    },
    "llama.cpp": {"cache_prompt": True, "mirostat": 0, "typical_p": 1.0, "repeat_penalty": 1.0, "seed": -1},
    "openai": {
        "prediction": {"type": "content", "content": "hello"}, "verbosity": "medium", "service_tier": "auto",
        "prompt_cache_retention": "24h", "prompt_cache_key": "k", "safety_identifier": "me",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_defaults_of_other_servers_change_nothing(client: Any, name: str) -> None:
    assert complete(client, **DEFAULTS[name])["choices"] == complete(client)["choices"]


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ({"use_beam_search": True}, "use_beam_search"),
        ({"mirostat": 2}, "mirostat"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"seed": -2}, "seed"),
        ({"stop": ["x"] * 17}, "stop: List should have at most 16 items"),
    ],
)
def test_what_they_cannot_have_is_named(client: Any, field: dict[str, Any], named: str) -> None:
    assert named in refused(client, "/v1/completions", ASKED | field)


def test_a_seed_of_minus_one_is_none(client: Any) -> None:
    drawn = {complete(client, seed=-1, temperature=1.5)["choices"][0]["text"] for _ in range(5)}
    assert len(drawn) > 1


def test_usage_counts_the_drafts_tokens_as_predicted(client: Any) -> None:
    answer = complete(client, max_tokens=40, n=2)
    done, predicted = answer["metrics"]["speculative_decoding"], answer["usage"]["completion_tokens_details"]
    assert predicted["accepted_prediction_tokens"] == done["num_accepted_draft_tokens"] > 0
    assert sum(predicted.values()) == done["num_draft_tokens"]
    assert "completion_tokens_details" not in complete(client, speculative=None)["usage"]


def test_a_stream_may_count_on_every_chunk(client: Any) -> None:
    body = {**ASKED, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    lines = client.post("/v1/completions", json=body).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] < counts[-2] == counts[-1] == 12
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {complete(client)["usage"]["prompt_tokens"]}
    body["stream_options"] = {"continuous_usage_stats": True}  # without the other it asks for nothing, as in vLLM
    assert "usage" not in client.post("/v1/completions", json=body).text


def test_texts_become_tokens_and_back(client: Any, llm: LLM) -> None:
    text = "naïve café <s> 🙂"
    for special in (True, False):
        tokens = llm.tokenizer.encode(text, special)
        answer = client.post("/tokenize", json={"prompt": text, "add_special_tokens": special}).json()
        assert answer == {"count": len(tokens), "max_model_len": llm.bundle.manifest.max_length, "tokens": tokens}
        back = client.post("/detokenize", json={"model": "tiny", "tokens": tokens}).json()
        assert back == {"prompt": llm.tokenizer.decode(tokens, skip_special_tokens=False)}
    texts = client.post("/tokenize", json={"prompt": "hello", "return_token_strs": True}).json()["token_strs"]
    assert "".join(texts) == "<s>hello"
    halves = client.post("/tokenize", json={"prompt": "漢", "return_token_strs": True}).json()["token_strs"]
    assert len(halves) == 4 and "\ufffd" not in "".join(halves)
    longer = "x" * (llm.bundle.manifest.max_length + 1)  # than the model takes, and yet counted
    assert client.post("/tokenize", json={"prompt": longer}).json()["count"] == len(llm.tokenizer.encode(longer))


def test_a_conversation_is_counted_as_it_is_read(client: Any, llm: LLM) -> None:
    chat = client.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 1}).json()
    counted = client.post("/tokenize", json={"messages": MESSAGES}).json()
    assert counted["tokens"] == llm.encode_chat(MESSAGES) and counted["count"] == chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/tokenize", {}, "either a prompt or messages"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "either a prompt or messages"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": False}, "add_generation_prompt is for a conversation"),
        ("/tokenize", {"prompt": "x", "chat_template_kwargs": {"mood": "merry"}}, "chat_template_kwargs is for a conv"),
        ("/tokenize", {"prompt": "x", "tools": [TOOL]}, "tools is for a conversation: send messages"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens is for a prompt"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"prompt": "x" * 20_000}, "shorten it"),
        ("/detokenize", {"tokens": [1] * 2000}, "shorten it"),
        ("/tokenize", {"prompt": "\ud800"}, "surrogate"),
        ("/tokenize", {"messages": [{"role": "user", "content": 3}]}, "messages"),
        ("/detokenize", {"tokens": [-1]}, "-1 is not a token id"),
        ("/detokenize", {"tokens": [10**30]}, "is not a token id"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_what_is_no_text_and_no_token(client: Any, path: str, body: dict[str, Any], named: str) -> None:
    assert named in refused(client, path, body)


def test_tokens_are_guarded_like_completions(server: Served, client: Any) -> None:
    assert httpx.post(f"{server.root}/tokenize", json={"prompt": "x"}).status_code == 401
    assert httpx.post(f"{server.root}/detokenize", json={"tokens": []}).status_code == 401
    assert client.post("/tokenize", json={"prompt": "x" * 50_000}).status_code == 413
    assert client.post("/tokenize", json={"prompt": "x", "model": "other"}).status_code == 404
    assert client.post("/detokenize", json={"tokens": [1], "model": "other"}).status_code == 404


def test_the_version_is_the_packages(client: Any) -> None:
    assert client.get("/version").json() == {"version": version("draftwood")}


def test_a_request_has_a_name(client: Any) -> None:
    named = client.post("/v1/completions", json=ASKED, headers={"X-Request-Id": "mine"})
    assert named.headers["x-request-id"] == "mine"
    others = [client.get("/v1/models").headers["x-request-id"] for _ in range(2)]
    assert len({*others, "mine"}) == 3
    assert len(client.get("/v1/models", headers={"X-Request-Id": "x" * 5000}).headers["x-request-id"]) < 100
    wrong = client.get("/v1/models", headers={"authorization": "Bearer wrong", "X-Request-Id": "mine"})
    assert (wrong.status_code, wrong.headers["x-request-id"]) == (401, "mine")


@pytest.mark.parametrize("path", ["/v2", "/v1", "/chat/completions", "/v1/embeddings"])
def test_a_wrong_address_says_what_there_is(client: Any, path: str) -> None:
    answer = client.post(path, json={})
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert f"POST {path};" in message and "/v1/chat/completions" in message


def test_a_wrong_method_names_the_right_one(client: Any) -> None:
    for method, path, allowed in (("GET", "/v1/completions", "POST"), ("DELETE", "/v1/models", "GET")):
        answer = client.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


def test_a_field_of_the_other_form_that_asks_for_nothing_is_accepted(client: Any) -> None:
    defaults = {"add_generation_prompt": True, "continue_final_message": False, "chat_template_kwargs": {}, "tools": []}
    counts = [client.post("/tokenize", json={"prompt": "x", **extra}).json()["count"] for extra in ({}, defaults)]
    assert counts[0] == counts[1]
    given = {"messages": MESSAGES, "add_special_tokens": False}
    assert client.post("/tokenize", json=given).json() == client.post("/tokenize", json={"messages": MESSAGES}).json()


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


def test_no_web_page_may_use_it_by_default(tiny_bundle: Path) -> None:
    with served(tiny_bundle, "--no-speculation") as running:
        headers = {"origin": PAGE, "access-control-request-method": "POST"}
        assert httpx.options(f"{running.url}/completions", headers=headers).status_code == 405
        assert "access-control-allow-origin" not in httpx.get(f"{running.url}/models", headers=headers).headers
        # A page may post without asking, but not as JSON.
        for kind in ({"content-type": "text/plain"}, {}):
            asked = {"origin": PAGE, **kind}
            refused = httpx.post(f"{running.url}/completions", content=json.dumps(ASKED), headers=asked)
            assert refused.status_code == 400, kind


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_gets_the_text_whole_and_as_events(server: Served, client: Any) -> None:
    call = ["curl", "-sS", "-N", "--max-time", "60", f"{server.url}/completions"]
    call += ["-H", "Content-Type: application/json", "-H", "Authorization: Bearer secret", "-d"]

    def output(**more: Any) -> str:
        return subprocess.run([*call, json.dumps(ASKED | more)], capture_output=True, text=True, check=True).stdout

    text = json.loads(output())["choices"][0]["text"]
    *events, done = [line.removeprefix("data: ") for line in output(stream=True).splitlines() if line]
    assert done == "[DONE]" and len(events) > 1
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == text
    assert text == complete(client)["choices"][0]["text"]
