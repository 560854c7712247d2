"""Reasoning over HTTP: a thought is a field of its own, its budget ends it, and forms and tools begin after it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from serving import Served, events_of

httpx = pytest.importorskip("httpx", reason="needs httpx")

OPENS, CLOSES = 286, 287
USER = {"role": "user", "content": "hello"}
OPENED = {"chat_template_kwargs": {"opened": True}}
GREEDY = {"messages": [USER], "max_tokens": 30, "temperature": 0, "ignore_eos": True}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}], "tool_choice": "required"}
HOW: list[Any] = [False, {"grow": "dyspec"}, {"grow": "topk", "merge": "gsd"}]
FREE = {"ignore_eos": False, "max_tokens": 300}


@pytest.fixture(scope="module")
def ask(thinker: Served) -> Iterator[Any]:
    with httpx.Client(base_url=thinker.url, timeout=60) as client:

        def asked(path: str = "/chat/completions", **fields: Any) -> Any:
            answer = client.post(path, json=(GREEDY if path.startswith("/chat") else {}) | fields)
            assert answer.status_code == 200, answer.text
            return events_of(answer.text) if fields.get("stream") else answer.json()

        yield asked


def message_of(answer: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = answer["choices"][0]["message"]
    return message


@pytest.fixture(scope="module")
def raw(ask: Any) -> str:
    """What the model writes of its own accord after an opened thought."""
    tokens = httpx_tokens(ask, **OPENED)
    answer = ask("/completions", prompt=tokens, max_tokens=30, temperature=0, ignore_eos=True)
    return str(answer["choices"][0]["text"])


def httpx_tokens(ask: Any, **fields: Any) -> list[int]:
    tokens: list[int] = ask("/../tokenize", messages=[USER], **fields)["tokens"]
    return tokens


@pytest.mark.parametrize("speculative", HOW)
def test_a_budget_ends_the_thought_and_every_proposal_gives_the_same(ask: Any, raw: str, speculative: Any) -> None:
    assert message_of(ask(**OPENED, speculative=speculative))["reasoning_content"] == raw.strip(), "it has no end"
    for budget in (0, 1, 7):
        answer = ask(**OPENED, thinking_token_budget=budget, speculative=speculative)
        message, usage = message_of(answer), answer["usage"]
        assert raw.startswith(message.get("reasoning_content", "")) and message["content"]
        assert message.get("reasoning") == message.get("reasoning_content") and bool(budget) == ("reasoning" in message)
        assert usage["completion_tokens"] == 30
        assert usage["completion_tokens_details"]["reasoning_tokens"] == budget + 1, "with the mark"
        assert message == message_of(ask(**OPENED, thinking_token_budget=budget, speculative=None))
        deltas = [chunk["choices"][0]["delta"] for chunk in ask(**OPENED, thinking_token_budget=budget, stream=True)]
        for name in ("reasoning_content", "reasoning", "content"):
            assert "".join(delta.get(name) or "" for delta in deltas) == message.get(name, "")


@pytest.mark.parametrize("speculative", HOW)
@pytest.mark.parametrize("begins", [OPENED, {"logit_bias": {str(OPENS): 5}}], ids=["opened", "by itself"])
def test_forms_and_calls_begin_behind_the_thought(ask: Any, begins: dict[str, Any], speculative: Any) -> None:
    options = {**begins, **FREE, "speculative": speculative, "thinking_token_budget": 6, "temperature": 1, "seed": 4}
    formed = ask(**options, **FORM)
    assert json.loads(message_of(formed)["content"])["a"] in (1, 2) and message_of(formed)["reasoning_content"]
    called = ask(**options, **TOOLS, parallel_tool_calls=False)
    (call,) = message_of(called)["tool_calls"]
    assert json.loads(call["function"]["arguments"])["a"] in (1, 2) and message_of(called)["reasoning_content"]
    assert called["choices"][0]["finish_reason"] == "tool_calls"


def test_a_text_with_a_form_does_not_end_inside_its_thought(ask: Any) -> None:
    biased = {"logit_bias": {"2": 100, str(OPENS): 100}, **FREE, "thinking_token_budget": 3}
    assert message_of(ask(**biased, **OPENED, **FORM))["content"].startswith("{")
    assert message_of(ask(**biased, **OPENED))["content"] == "", "it may end without a form"


def test_effort_none_turns_thinking_off(ask: Any) -> None:
    closed = httpx_tokens(ask, chat_template_kwargs={"enable_thinking": False})
    plain = ask("/completions", prompt=closed, max_tokens=30, temperature=0, ignore_eos=True)["choices"][0]["text"]
    for fields in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        answer = ask(**fields)
        assert message_of(answer) == {"role": "assistant", "content": plain, "refusal": None}
        assert "reasoning_tokens" not in answer["usage"]["completion_tokens_details"]
    told = {"opened": True, "enable_thinking": True}
    assert "reasoning" in message_of(ask(reasoning_effort="none", chat_template_kwargs=told)), "the template's own wins"
    wanted = {"logit_bias": {str(OPENS): 100}, "max_tokens": 3}
    assert "reasoning" in message_of(ask(**wanted)) and "reasoning" not in message_of(
        ask(**wanted, thinking_token_budget=0)
    )
    assert ask(reasoning_effort="high")["usage"]["prompt_tokens"] == ask()["usage"]["prompt_tokens"]


def test_a_thought_may_be_left_out_and_pieces_show_the_text_as_it_is(ask: Any, raw: str) -> None:
    budget = {**OPENED, "thinking_token_budget": 7}
    shown, hidden = message_of(ask(**budget)), message_of(ask(**budget, include_reasoning=False))
    assert hidden == {name: value for name, value in shown.items() if not name.startswith("reasoning")}
    chunks = ask(**OPENED, stream=True, stream_options={"include_pieces": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == raw


def test_a_thought_goes_back_to_the_template_and_an_unfinished_one_goes_on(ask: Any) -> None:
    answer = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    tokens = ask("/../tokenize", messages=[USER, answer, USER])["tokens"]
    assert OPENS in tokens and CLOSES in tokens
    prefix = {"role": "assistant", "content": "<think>hm"}
    going = {"messages": [USER, prefix], "add_generation_prompt": False, "continue_final_message": True}
    assert message_of(ask(**going, thinking_token_budget=2))["reasoning_content"]
