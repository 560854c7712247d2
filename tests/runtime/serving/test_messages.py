"""Anthropic's Messages API with the real anthropic client: what it gets is what a chat gives, in blocks and events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from serving import CITY, USER, Served

anthropic = pytest.importorskip("anthropic", reason="needs the anthropic package")

from draftwood.runtime.serving.openai.content import CALL, Block  # noqa: E402 - after the skip

TOOLS = [{"name": "weather", "description": "of a city", "input_schema": CITY}, {"name": "now", "input_schema": {}}]
GREEDY: dict[str, Any] = {"model": "tiny", "max_tokens": 24, "messages": [USER]}
FORCED: dict[str, Any] = {
    **GREEDY,
    "max_tokens": 300,
    "tools": TOOLS,
    "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    "extra_body": {"thinking_token_budget": 5, "logit_bias": {"286": 100}, "temperature": 0},
}


@pytest.fixture(scope="module")
def client(thinker: Served) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=thinker.root, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def create(client: Any, more: Any = {}, **fields: Any) -> Any:  # noqa: B006
    """The client has no arguments of its own for sampling."""
    return client.messages.create(**GREEDY | fields, extra_body={"temperature": 0, **more})


def test_a_message_is_the_answer_of_the_chat_that_it_means(client: Any, post: Any) -> None:
    called = {"id": "a", "type": "function", "function": {"name": "now", "arguments": {}}}
    result = {"role": "tool", "tool_call_id": "a"}
    asked = [
        USER,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "a", "name": "now", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "noon"}]},
            {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}},
        ]},
        {"role": "user", "content": "So?"},
        {"role": "system", "content": "Hurry."},
    ]  # fmt: skip
    meant = [
        {"role": "system", "content": "be kind\nand brief"},
        USER,
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [called]},
        {**result, "content": "noon"},
        {"role": "user", "content": "and?\nSo?"},
        {"role": "system", "content": "Hurry."},
    ]
    system = [{"type": "text", "text": "be kind"}, {"type": "text", "text": "and brief"}]
    message = create(client, messages=asked, system=system, more={"ignore_eos": True})
    options = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    chat = post("/v1/chat/completions", messages=meant, **options).json()
    (block,) = message.content
    assert block.text == chat["choices"][0]["message"]["content"] and message.stop_reason == "max_tokens"
    used = message.usage
    assert used.input_tokens + used.cache_read_input_tokens == chat["usage"]["prompt_tokens"]
    assert used.output_tokens == 24 and used.cache_creation_input_tokens == 0
    counted = client.messages.count_tokens(model="tiny", messages=asked, system=system)
    assert counted.input_tokens == chat["usage"]["prompt_tokens"]
    drawn = {"temperature": 0.8, "top_p": 0.9, "top_k": 9, "seed": 5, "speculative": {"grow": "chain"}}
    first, second = (create(client, drawn).content for _ in range(2))
    assert first == second != create(client).content


def test_a_stream_is_the_message_in_events(client: Any) -> None:
    whole = client.messages.create(**FORCED)
    thinking, called = whole.content
    assert (thinking.type, called.type, called.name) == ("thinking", "tool_use", "weather") and thinking.thinking
    assert called.input["city"] in ("Bern", "Oslo") and whole.stop_reason == "tool_use"
    assert whole.usage.output_tokens_details.thinking_tokens == 7
    kinds, pieces = list[str](), ""
    for event in client.messages.create(**FORCED, stream=True):
        kinds += [event.type] if event.type not in kinds[-1:] else []
        if event.type == "content_block_delta" and event.delta.type == "input_json_delta":
            pieces += event.delta.partial_json
        if event.type == "message_start":
            assert event.message.content == [] and event.message.usage.input_tokens
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert kinds == ["message_start", *block, *block, "message_delta", "message_stop"]
    assert json.loads(pieces) == called.input
    with client.messages.stream(**FORCED) as stream:
        final = stream.get_final_message()
    assert [each.type for each in final.content] == ["thinking", "tool_use"]
    assert final.content[0] == thinking and final.content[1].input == called.input
    assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)
    back = [USER, {"role": "assistant", "content": final.content}]
    result = {"type": "tool_result", "tool_use_id": final.content[1].id, "content": "sunny", "is_error": False}
    assert create(client, messages=[*back, {"role": "user", "content": [result]}], tools=TOOLS).content


def test_thinking_is_turned_on_and_off(client: Any) -> None:
    wanted: dict[str, Any] = {"more": {"logit_bias": {"286": 100}}, "max_tokens": 3}
    assert create(client, **wanted).content[0].type == "thinking"
    assert create(client, **wanted, thinking={"type": "adaptive"}).content[0].type == "thinking"
    assert create(client, **wanted, thinking={"type": "disabled"}).content[0].type == "text"
    hidden = create(client, **wanted, thinking={"type": "enabled", "budget_tokens": 1, "display": "omitted"})
    assert [block.type for block in hidden.content] == []


def test_stop_sequences_choices_and_forms(client: Any) -> None:
    free = create(client, {"ignore_eos": True}).content[0].text
    stopped = create(client, {"ignore_eos": True}, stop_sequences=["never there", free[5:8]])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", free[5:8])
    assert stopped.content[0].text == free[: free.index(free[5:8])]
    unthinking = {"logit_bias": {"286": -100}}
    for choice in ("any", "auto", "none"):
        answer = create(client, unthinking, tools=TOOLS[:1], tool_choice={"type": choice}, max_tokens=300)
        assert any(block.type == "tool_use" for block in answer.content) == (choice == "any")
    ended = create(client, {"logit_bias": {"2": 100}})
    assert (ended.stop_reason, ended.content) == ("end_turn", [])
    form = {"format": {"type": "json_schema", "schema": CITY}}
    formed = create(client, unthinking, output_config=form, max_tokens=200)
    assert json.loads(formed.content[0].text)["city"] in ("Bern", "Oslo")
    prefix = {"role": "assistant", "content": "Once upon"}
    assert create(client, messages=[USER, prefix]).usage.output_tokens


def block(kind: str, role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [{"type": kind, **fields}]}, USER]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [USER] * 4097}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
    ({"messages": [{"role": "user", "content": 5}]}, "content"),
    ({"messages": [{"role": "user", "content": [5]}]}, "content"),
    (block("image", source={}), "messages[0].content[0]: 'image'"),
    (block("document", source={}), "'document'"),
    (block("redacted_thinking", "assistant", data="x"), "'redacted_thinking'"),
    (block("thinking", thinking="x"), "'thinking' is not supported in a message of this role"),
    (block("tool_use", id="a", name="now", input={}), "'tool_use' is not supported in a message of this role"),
    (block("tool_use", "assistant", id="a", name="now", input="{}"), "input must be an object"),
    (block("text", text=5), "messages[0].content[0].text must be text"),
    (block("tool_result", tool_use_id="a", content="x"), "tool_use_id must be the id of an earlier call"),
    ({"messages": [{"role": "user", "content": [{}]}]}, "type must be text"),
    ({"messages": [USER, block("tool_use", "assistant", id="a", name="now", input={})["messages"][0]]}, "tool_result"),
    ({"system": [{"type": "image"}]}, "system[0]: 'image'"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]: 'web_search_20250305'"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "a"}]}, "input_schema"),
    ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "of an object"),
    ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "needs the name of one"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "none of the tools is named x"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "budget_tokens"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "not: this keyword"),
    ({"speculative": {"grow": "topk", "verify": "block"}}, "not lossless"),
    ({"speculative": 0}, "speculative"),
    ({"unknown": 1}, "unknown is not supported"),
]


@pytest.mark.parametrize(("fields", "named"), REFUSED, ids=[named[:40] for _, named in REFUSED])
def test_what_cannot_be_is_refused_by_name_in_anthropics_form(post: Any, fields: dict[str, Any], named: str) -> None:
    for path, more in (("/v1/messages", {"stream": True}), ("/v1/messages/count_tokens", {})):
        answer = post(path, **{**GREEDY, **more, **fields})
        assert answer.status_code == 400 and answer.headers["content-type"] == "application/json"
        content = answer.json()
        assert content.keys() == {"type", "error"} and content["type"] == "error"
        assert content["error"].keys() == {"type", "message"} and content["error"]["type"] == "invalid_request_error"
        assert named in content["error"]["message"], content


def test_other_errors_are_the_clients_own(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="this server has 'tiny'"):
        create(client, model="claude")
    with pytest.raises(anthropic.BadRequestError, match="JSON object"):
        client.post("/v1/messages", cast_to=object, body=None, options={"headers": {}})
    with pytest.raises(anthropic.NotFoundError, match="/v1/messages/batches"):
        client.messages.batches.list()


CUT = {'{"a": "b': {"a": "b"}, '{"a": [1, {"b": nul': {"a": [1, {}]}, "[1]": {}, "x": {}, '{"a": NaN}': {}, "": {}}


@pytest.mark.parametrize("text", CUT)
def test_arguments_that_were_cut_are_kept_as_far_as_they_go(text: str) -> None:
    assert Block(CALL, 0, pieces=[text]).object == CUT[text]
