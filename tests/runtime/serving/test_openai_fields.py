"""Every field of OpenAI's and vLLM's endpoints is sent, and docs/parameters.md says what becomes of it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from bundling import ROOT

openai = pytest.importorskip("openai", reason="needs the openai package")

from draftwood.runtime.serving.openai.bodies import IGNORED, ChatBody, CompletionBody  # noqa: E402 - after the skips

SCHEMA: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "now"}}
USER = {"role": "user", "content": "hello"}
# A value of each field that asks for something. OpenAI's fields are those of the installed openai package, vLLM's those
# of its release 0.32.0, which is not installed here; the names that it had before, and llama.cpp's, are among them.
VALUES: dict[str, Any] = {
    "add_generation_prompt": False,
    "allowed_token_ids": [70, 71],
    "audio": {"voice": "alloy", "format": "wav"},
    "bad_words": ["x"],
    "best_of": 2,
    "cache_prompt": False,
    "cache_salt": "a",
    "chat_template": "x",
    "chat_template_kwargs": {"mood": "merry"},
    "continue_final_message": True,
    "documents": [{"text": "x"}],
    "early_stopping": True,
    "echo": True,
    "frequency_penalty": 0.5,
    "function_call": "auto",
    "functions": [{"name": "now"}],
    "grammar": 'root ::= "x"',
    "guided_choice": ["a", "b"],
    "guided_grammar": 'start: "x"',
    "guided_json": SCHEMA,
    "guided_regex": "[ab]",
    "id_slot": 3,
    "ignore_eos": True,
    "include_reasoning": False,
    "include_stop_str_in_output": True,
    "length_penalty": 0.5,
    "logit_bias": {"70": 5},
    "logprob_token_ids": [70],
    "max_completion_tokens": 3,
    "max_tokens": 3,
    "messages": [USER],
    "metadata": {"a": "b"},
    "min_p": 0.1,
    "min_tokens": 2,
    "mirostat": 2,
    "modalities": ["audio"],
    "model": "tiny",
    "n": 2,
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "hello"},
    "presence_penalty": 0.5,
    "priority": 1,
    "prompt": "hello",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prompt_embeds": "AAAA",
    "prompt_logprobs": 1,
    "reasoning_effort": "high",
    "repeat_penalty": 1.1,
    "repetition_penalty": 1.1,
    "request_id": "mine",
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    "safety_identifier": "me",
    "samplers": ["top_k", "infill"],
    "seed": 3,
    "service_tier": "flex",
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "speculative": {"grow": "chain"},
    "stop": ["x"],
    "stop_token_ids": [70],
    "store": True,
    "stream_interval": 3,
    "stream_options": {"include_usage": True},
    "structured_outputs": {"regex": "[ab]"},
    "suffix": "x",
    "temperature": 0.5,
    "thinking_token_budget": 5,
    "tool_choice": "auto",
    "tools": [TOOL],
    "top_k": 3,
    "top_logprobs": 1,
    "top_p": 0.5,
    "truncate_prompt_tokens": 1,
    "truncation_side": "left",
    "typical_p": 0.5,
    "user": "me",
    "verbosity": "low",
}
# Those that ask for something by being true, beside what openai's package has in addition.
ANYTHING = """add_special_tokens ec_transfer_params kv_transfer_params logits_processors logprobs media_io_kwargs
mm_payload mm_processor_kwargs repetition_detection return_mm_kwargs return_prompt_text return_token_ids stream
return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start session_id
use_beam_search vllm_xargs watermarking"""
# Fields that ask for something only together with others.
WITH: dict[str, dict[str, Any]] = {
    "continue_final_message": {"add_generation_prompt": False},
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": [TOOL]},
    "parallel_tool_calls": {"tools": [TOOL], "tool_choice": "required"},
}
ONE_OR_THE_OTHER = {"max_completion_tokens": "max_tokens"}  # the left one takes the place of the right one
# Supported fields with values that ask for nothing.
NOTHING: dict[str, Any] = {
    "bad_words": [],
    "include_stop_str_in_output": False,
    "logit_bias": None,
    "min_p": 0.0,
    "min_tokens": 0,
    "repetition_penalty": 1.0,
    "response_format": {"type": "text"},
    "safety_identifier": "me",
    "seed": -1,
    "skip_special_tokens": True,
    "stop": None,
    "top_k": -1,
    "unheard_of": None,
}
WORKS, NO_EFFECT, REFUSED = "works", "no effect", "refused"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": [USER]}, COMPLETIONS: {"prompt": "hello"}}
FIELDS = {CHAT: ChatBody.model_fields, COMPLETIONS: CompletionBody.model_fields}
Table = dict[str, tuple[str, str, str]]  # field -> what becomes of it in a chat and in a completion, and why
ROW = re.compile(r"^\| `(\w+)` \| ([a-z ]+) \| ([a-z ]+) \| (.*) \|$", re.MULTILINE)


@pytest.fixture(scope="module")
def table() -> Table:
    rows = ROW.findall((ROOT / "docs" / "parameters.md").read_text(encoding="utf-8"))
    names = [name for name, *_ in rows]
    assert names == sorted(set(names))
    return {name: (chat, completion, note) for name, chat, completion, note in rows}


def openai_fields() -> set[str]:
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_create_params

    names: set[str] = {"stream"}
    for base in (completion_create_params, chat_create_params):
        names |= set(base.CompletionCreateParamsBase.__annotations__)
    return names


def test_the_table_has_every_field(table: Table) -> None:
    supported = {*ChatBody.model_fields, *CompletionBody.model_fields}
    assert table.keys() == openai_fields() | VALUES.keys() | {*ANYTHING.split()} | supported


@pytest.mark.parametrize("path", BODIES)
def test_each_field_is_what_the_table_says(http: Any, table: Table, path: str) -> None:
    wrong = {}
    for name, row in table.items():
        companions = {other: value for other, value in WITH.get(name, {}).items() if other in FIELDS[path]}
        body = {**BODIES[path], "max_tokens": 3, **companions, name: VALUES.get(name, True)}
        body.pop(ONE_OR_THE_OTHER.get(name, ""), None)
        if path == COMPLETIONS:  # two fields have other values there
            body[name] = {"logprobs": 1, "add_special_tokens": False}.get(name, body[name])
        answer = http.post(path, json=body)
        if answer.status_code == 200:
            found = WORKS if name in FIELDS[path] else NO_EFFECT
        else:
            error = answer.json()["error"]
            assert answer.status_code == 400 and name in error["message"], (name, answer.text)
            found = REFUSED
        if found != row[path == COMPLETIONS]:
            wrong[name] = (found, answer.text[:200])
    assert not wrong


def test_what_has_no_effect_says_why(table: Table) -> None:
    without = {name for name, row in table.items() if NO_EFFECT in row[:2]}
    assert without == IGNORED | {"include_reasoning", "spaces_between_special_tokens"}
    assert all(table[name][2].strip() for name in without)


@pytest.mark.parametrize("path", BODIES)
def test_what_asks_for_nothing_changes_nothing(http: Any, table: Table, path: str) -> None:
    """Fields without effect, supported ones with neutral values, and refused ones with those that the table names."""
    body = ChatBody if path == CHAT else CompletionBody
    asked = {**BODIES[path], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    nothing = NOTHING | {name: VALUES[name] for name, row in table.items() if NO_EFFECT in row[:2]}
    for name, values in body.neutral.items():
        if name in body.model_fields:
            continue
        assert table[name][path == COMPLETIONS] in (REFUSED, NO_EFFECT)
        nothing |= {name: values[0]}
        for value in values:
            answer = http.post(path, json={**BODIES[path], "max_tokens": 1, name: value})
            assert answer.status_code == 200, (name, answer.text)
            assert f"`{json.dumps(value)}`" in table[name][2] or NO_EFFECT in table[name][:2], name
    plain, found = (http.post(path, json=asked | more).json()["choices"] for more in ({}, nothing))
    assert found == plain
