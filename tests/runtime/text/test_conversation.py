"""Conversations: one, several, and what only looks like one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import with_chat_template

from draftwood.runtime import LLM, RequestError, SamplingParams
from draftwood.runtime.text.conversation import ChatSettings, to_template

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
MESSAGES: Any = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello", "name": "me"}]
PARTS: Any = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
CALL: Any = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED: Any = {"role": "assistant", "tool_calls": [CALL]}


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    template = (
        "{{ tools | tojson if tools else '' }}{{ mood }}"
        "{% for m in messages %}<{{ m.role }}|{{ m.name }}>{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    bundle = with_chat_template(tiny_bundle, tmp_path_factory.mktemp("chat"), template)
    with LLM(bundle) as llm:
        yield llm


def test_a_list_of_conversations_gives_a_list_of_results(llm: LLM) -> None:
    other = [{"role": "user", "content": "hi"}]
    both = llm.chat([MESSAGES, other], GREEDY)
    assert [result.token_ids for result in both] == [
        llm.chat(MESSAGES, GREEDY)[0].token_ids,
        llm.chat(other, GREEDY)[0].token_ids,
    ]
    assert [result.token_ids for result in llm.chat([other], GREEDY)] == [both[1].token_ids]
    assert llm.chat(tuple(other), GREEDY)[0].token_ids == both[1].token_ids


def test_what_reaches_the_template(llm: LLM) -> None:
    text = llm.tokenizer.decode(llm.encode_chat(MESSAGES))
    assert text == "<system|>be kind\n<user|me>hello\n<assistant>"
    renamed = [{**MESSAGES[0], "role": "developer", "tool_calls": None}, {**MESSAGES[1], "x": []}]
    assert llm.encode_chat(renamed) == llm.encode_chat(MESSAGES)
    parts = [{"role": "user", "content": PARTS}]
    assert llm.encode_chat(parts) == llm.encode_chat([{"role": "user", "content": "one\ntwo"}])
    cached = [{**part, "cache_control": {"type": "ephemeral"}, "annotations": [1]} for part in PARTS]
    assert llm.encode_chat([{"role": "user", "content": cached, "id": "m", "mood": 1}]) == llm.encode_chat(parts)
    assert "|>\n" in llm.tokenizer.decode(llm.encode_chat([{"role": "assistant", "content": ""}]))


def test_what_clients_add_to_answers_changes_nothing(llm: LLM) -> None:
    """But a template may write the reasoning that belongs to an answer."""
    call = {**CALL, "type": None, "index": 0, "function": {**CALL["function"], "parsed_arguments": {"a": 1}}}
    added: dict[str, Any] = {
        "parsed": {"a": 1},
        "audio": None,
        "refusal": None,
        "function_call": None,
        "annotations": [{}],
        "id": "m",
    }
    answer = {"role": "assistant", "content": "x", "tool_calls": [CALL]}
    sent = {**answer, "tool_calls": [call], "prefix": False, "reasoning_details": [1], **added}
    result = {"role": "tool", "tool_call_id": "c", "content": "ok"}
    plain = to_template([answer, result])
    assert to_template([sent, {**result, "is_error": True}]) == plain and "reasoning_content" not in plain[0]
    for name in ("reasoning", "reasoning_content"):
        assert to_template([{**sent, name: "hm"}, result]) == [{**plain[0], "reasoning_content": "hm"}, plain[1]]
        assert to_template([{**sent, name: {"text": "hm"}}, result]) == plain


TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "a day's", "strict": True}}


def test_chat_takes_what_vllms_takes(llm: LLM) -> None:
    result = llm.chat(MESSAGES, GREEDY, tools=[TOOL], chat_template_kwargs={"mood": "calm"})[0]
    settings = ChatSettings(template_kwargs={"mood": "calm"}, tools=[TOOL])
    assert result.prompt_token_ids == llm.encode_chat(MESSAGES, settings)
    told = json.dumps([TOOL])
    assert result.prompt == f"{told}calm<system|>be kind\n<user|me>hello\n<assistant>"
    last = [*MESSAGES, {"role": "assistant", "content": "I am"}]
    continued = llm.chat([last], GREEDY, add_generation_prompt=False, continue_final_message=True)[0]
    assert str(continued.prompt).endswith("<assistant|>I am")
    assert llm.chat(MESSAGES, GREEDY, tools=[])[0].prompt == llm.chat(MESSAGES, GREEDY)[0].prompt


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tools": TOOL}, "tools must be a list of at most 128 functions"),
        ({"tools": "weather"}, "tools must be a list"),
        ({"tools": [TOOL] * 129}, "at most 128"),
        ({"tools": [TOOL, len]}, r"tools\[1\] must be"),
        ({"tools": [TOOL["function"]]}, r"tools\[0\] must be"),
        ({"tools": [{"type": "function", "function": {"name": 3}}]}, r"tools\[0\] must be"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {1, 2}}}]}, "what JSON can express"),
        ({"chat_template_kwargs": "mood"}, "chat_template_kwargs must be variables by name"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs may not hold tools"),
        ({"continue_final_message": True}, "needs add_generation_prompt to be false"),
    ],
)
def test_what_is_no_setting_of_a_chat_is_refused(llm: LLM, options: Any, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        llm.chat(MESSAGES, GREEDY, **options)


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "the conversation has no messages"),
        ((), "the conversation has no messages"),
        ([[]], "the conversation has no messages"),
        ("hello", "a conversation is a list of messages"),
        (b"hello", "a conversation is a list of messages"),
        (None, "a conversation is a list of messages"),
        ({"role": "user", "content": "x"}, "a conversation is a list of messages"),
        (["hello"], r"messages\[0\] must be a message"),
        ([MESSAGES[0], MESSAGES], r"messages\[1\] must be a message"),
        ([{"content": "x"}], r"messages\[0\]\.role must be one of system, developer, user, assistant, tool, not None"),
        ([{"role": "bogus", "content": "x"}], "not 'bogus'"),
        ([{"role": "function", "content": "x"}], "not 'function'"),
        ([{"role": "tool", "content": "x"}], "tool_call_id must be the id of an earlier message's tool call, not None"),
        ([{"role": ["user"], "content": "x"}], r"not \['user'\]"),
        ([{"role": "user", "content": None}], r"messages\[0\]\.content must be text, not None"),
        ([{"role": "user", "content": 3}], "content must be text, not 3"),
        ([{"role": "user", "content": []}], "content must be text"),
        ([{"role": "user", "content": ["x"]}], "parts"),
        ([{"role": "user", "content": [*PARTS, {"type": "image_url"}]}], r"messages\[0\]\.content\[2\] must be a part"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "parts"),
        ([{"role": "user", "content": [{"type": "input_audio", "text": "x"}]}], r"content\[0\] must be"),
        *(
            ([{"role": "assistant", "content": "x", each: {"id": "x"}}], rf"messages\[0\]\.{each} is not supported in")
            for each in ("audio", "images", "function_call", "refusal", "prefix", "tool_call_id")
        ),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], r"messages\[0\]\.tool_calls is not supported in"),
        ([{"role": "assistant", "tool_calls": [{}]}], r"tool_calls\[0\] must be a call with id"),
        ([{"role": "assistant", "tool_calls": [CALL, {**CALL, "type": "custom"}]}], r"tool_calls\[1\] must be a call"),
        ([{"role": "assistant", "tool_calls": [{**CALL, "id": None}]}], r"tool_calls\[0\].id must be text"),
        ([{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f"}}]}], "must have a name and argument"),
        ([{"role": "user", "content": "x", "name": 3}], "name must be text"),
        ([{"role": "user", "content": "x", "tool_call_id": "c"}], "tool_call_id is not supported"),
        ([CALLED, {"role": "tool", "content": "x", "tool_call_id": "other"}], r"messages\[1\].tool_call_id .* 'other'"),
        ([CALLED, {"role": "tool", "content": None, "tool_call_id": "c"}], r"messages\[1\].content must be text"),
        ([{**CALLED, "tool_calls": "x"}], "tool_calls must be a list of calls"),
        *(
            ([{**CALLED, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": text}}]}], "JSON text of an")
            for text in ("[1]", "3", 3)
        ),
    ],
)
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any, named: str) -> None:
    for call in (llm.chat, llm.encode_chat):
        with pytest.raises(RequestError, match=named):
            call(messages if call == llm.chat or messages != [[]] else [])
    with pytest.raises(RequestError):
        llm.chat([MESSAGES, messages])
