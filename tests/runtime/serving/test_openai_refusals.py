"""What the HTTP server refuses: each field by its name, with what to do, in the form of OpenAI's errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from serving import served, with_chat_template

httpx = pytest.importorskip("httpx", reason="needs httpx")

USER: dict[str, Any] = {"role": "user", "content": "hello"}
CONTINUED = {"add_generation_prompt": False, "continue_final_message": True}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
NOW = {"type": "function", "function": {"name": "now"}}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("/v1/completions", {"prompt": "x", "max_tokens": 5}),
    "chat": ("/v1/chat/completions", {"messages": [USER], "max_tokens": 5}),
    "tools": ("/v1/chat/completions", {"messages": [USER], "max_tokens": 5, "tools": [WEATHER, NOW]}),
    "tokenize": ("/tokenize", {}),
    "detokenize": ("/detokenize", {}),
    "explain": ("/v1/completions/explain", {"prompt": "x", "max_tokens": 5}),
}


def function(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "text": [
        ({"prompt": "x" * 5000}, "shorten it"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1.5] * 4000}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"n": 129}, "n: "),
        ({"n": 100}, "100 choices"),
        ({"seed": -2}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop: List should have at most 16 items"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x"] * 17}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [0] * 16385}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids must be below the vocabulary size"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias must be below the vocabulary size"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"5": 100, "05": -100}}, "token 5 is given twice: send it once"),
        ({"skip_special_tokens": 0}, "skip_special_tokens"),
        *(({"cache_salt": salt}, "cache_salt") for salt in ("", "x" * 1025, 5)),
        ({"user": 5}, "user"),
        ({"best_of": 1, "n": 2}, "best_of must be at least n"),
        ({"best_of": 2, "stream": True}, "best_of cannot be streamed"),
        ({"best_of": 129}, "best_of"),
        ({"stream_options": {"include_usage": True}}, "stream_options needs stream"),
        ({"stream": True, "echo": True, "stream_options": {"include_pieces": True}}, "include_pieces"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs cannot be streamed"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": 2}, "prompt_logprobs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"mirostat": 2}, "mirostat"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"speculative": {"grow": "topk", "verify": "block"}}, "not lossless"),
        ({"speculative": {"max_total_draft_tokens": 500}}, "widest pass"),
        ({"speculative": {"key": "head"}}, "acceptance head"),
        ({"speculative": {"branching": [2] * 901}}, "1024"),
        ({"speculative": {"max_draft_len": 10**9}}, "1024"),
        ({"speculative": {"grow": 5}}, "speculative: grow"),
        ({"speculative": {"budgets": 5}}, "speculative: SpeculativeConfig has no 'budgets'"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"json_schema": {"name": "x", "schema": {}}}}, "type"),
        ({"response_format": {"type": "json_schema"}}, "needs json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "x", "schema": {}}}}, "needs json_schema"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "whitespace_pattern"),
        ({"structured_outputs": {}}, "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "exactly one"),
        ({"structured_outputs": {"regex": "a"}, "guided_json": {}}, "two forms"),
        ({"structured_outputs": {"choice": "yes"}}, "choice"),
        ({"structured_outputs": {"regex": "a" * 70000}}, "shorten it"),
        ({"structured_outputs": {"regex": "(a"}}, "unclosed group"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ({"guided_json": {"$ref": "https://example.org/x"}}, "not present"),
        ({"guided_json": {"not": {}}}, "not: this keyword"),
        ({"guided_grammar": 'start: "a" <[2]> "b"'}, "demands the token 2"),
        ({"guided_grammar": "start: <[2]>"}, "demands the token 2"),
        ({"guided_decoding_backend": "xgrammar", "guided_regex": "a"}, "guided_decoding_backend is not supported"),
    ],
    "chat": [
        ({"messages": []}, "messages"),
        ({"messages": [USER] * 4097}, "messages"),
        ({"messages": [{**USER, "content": [{"type": "text", "text": "a"}] * 4097}]}, "content"),
        ({"messages": [{**USER, "content": "x" * 5000}]}, "shorten it"),
        ({"messages": [{**USER, "content": [{"type": "image_url", "image_url": {"url": ""}}]}]}, "content[0]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 3}, "max_tokens by another name"),
        ({"best_of": 2}, "best_of"),
        ({"top_logprobs": 3}, "logprobs to be true"),
        ({"continue_final_message": True}, "add_generation_prompt"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        *(({"chat_template_kwargs": {name: 1}}, f"chat_template_kwargs may not hold {name}")
          for name in ("messages", "chat_template", "given_up", "self")),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tools": [], "tool_choice": "auto"}, "tool_choice needs tools"),
    ],
    "tools": [
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "none of the tools is named other"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [WEATHER, NOW, WEATHER]}, "two functions have the name weather"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools"),
        ({"tools": function(name="a b")}, "name"),
        ({"tools": function(parameters={"type": "array"})}, "of an object"),
        ({"tools": [NOW] * 129}, "tools"),
        ({"tool_choice": "required", "guided_regex": "a"}, "response_format only"),
        ({"tool_choice": "required", "tools": function(parameters={"not": {}})}, "not: this keyword"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
    "tokenize": [
        ({}, "either a prompt or messages"),
        ({"prompt": "x", "messages": [USER]}, "either a prompt or messages"),
        ({"prompt": "x", "add_generation_prompt": False}, "add_generation_prompt is for a conversation"),
        ({"prompt": "x", "chat_template_kwargs": {"mood": "merry"}}, "chat_template_kwargs is for a conv"),
        ({"prompt": "x", "tools": [NOW]}, "tools is for a conversation: send messages"),
        ({"messages": [USER], "add_special_tokens": True}, "add_special_tokens is for a prompt"),
        ({"prompt": ["x"]}, "prompt"),
        ({"prompt": "x" * 20_000}, "shorten it"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages"),
    ],
    "detokenize": [
        ({"tokens": [1] * 2000}, "shorten it"),
        ({"tokens": [-1]}, "-1 is not a token id"),
        ({"tokens": [10**30]}, "is not a token id"),
        ({"tokens": "x"}, "tokens"),
    ],
    "explain": [
        ({"max_tokens": 513}, "an explanation has at least one and at most 512 tokens"),
        ({"max_tokens": 0, "echo": True}, "an explanation has at least one"),
        ({"best_of": 2}, "one page about one text"),
        ({"n": 2}, "one page about one text"),
        ({"stream": True}, "one page about one text"),
        ({"prompt": ["a", "b"]}, "one prompt"),
        ({"temperature": -1}, "temperature"),
    ],
}  # fmt: skip
CASES = [
    pytest.param(kind, fields, named, id=f"{kind} {json.dumps(fields)[:60]}")
    for kind, cases in REFUSED.items()
    for fields, named in cases
]


def message_of(answer: Any, status: int = 400) -> str:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


@pytest.mark.parametrize(("kind", "fields", "named"), CASES)
def test_a_field_that_cannot_be_is_refused_by_name(http: Any, kind: str, fields: dict[str, Any], named: str) -> None:
    path, body = BODIES[kind]
    assert named in message_of(http.post(path, json=body | fields))
    if kind in ("chat", "tools"):  # before the first event of a stream, too
        assert named in message_of(http.post(path, json=body | {"stream": True} | fields))


@pytest.mark.parametrize("kind", ["text", "chat", "explain"])
def test_another_model_is_named(http: Any, kind: str) -> None:
    path, body = BODIES[kind]
    assert "this server has 'tiny'" in message_of(http.post(path, json=body | {"model": "gpt-4"}), 404)


RAW: list[tuple[bytes, str]] = [
    (b"", "JSON object"),
    (b"{", "not valid JSON"),
    (b"[]", "JSON object"),
    (b'{"model": "tiny"}', "prompt"),
    (b'{"prompt": "x", "max_tokens": NaN}', "max_tokens"),
    (b'{"prompt": "x", "temperature": Infinity}', "temperature"),
    (b'{"model": "\\ud800", "prompt": "x"}', "surrogate"),
]


@pytest.mark.parametrize(("body", "named"), RAW)
def test_what_is_no_body_is_refused(http: Any, body: bytes, named: str) -> None:
    answer = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert named in message_of(answer)


def test_a_wrong_address_says_what_there_is_and_a_wrong_method_which_one(http: Any) -> None:
    for path in ("/v2", "/v1", "/chat/completions", "/v1/embeddings", "/v1/responses/x/y"):
        message = message_of(http.post(path, json={"input": "hello"}), 404)
        assert f"POST {path};" in message and "/v1/chat/completions" in message
    allow = {"/v1/completions": "POST", "/v1/models": "GET", "/v1/responses/x": "DELETE, GET", "/health": "GET, HEAD"}
    for path, allowed in allow.items():
        answer = http.put(path)
        assert message_of(answer, 405) and answer.headers["allow"] == allowed


def test_what_a_bundle_lacks_is_named(tiny_bundle: Path, tmp_path: Path) -> None:
    with served(tiny_bundle, "--served-model-name", "plain", "--no-speculation") as running:
        chat = httpx.post(f"{running.url}/chat/completions", json={"messages": [USER]}, timeout=60)
        assert "no chat template" in message_of(chat)
        drafted = httpx.post(f"{running.url}/completions", json={"prompt": "x", "speculative": {}}, timeout=60)
        assert "without its draft" in message_of(drafted)
    shouting = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    with served(with_chat_template(tiny_bundle, tmp_path, shouting), "--no-speculation") as running:
        answer = httpx.post(f"{running.url}/chat/completions", json={"messages": [USER], **CONTINUED}, timeout=60)
        assert "does not write the last message" in message_of(answer)
