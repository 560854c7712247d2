"""Every field of Anthropic's, OpenAI's newer and Ollama's protocols: docs/parameters.md says what becomes of it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from bundling import ROOT
from serving import Served

anthropic = pytest.importorskip("anthropic", reason="needs the anthropic package")
ollama = pytest.importorskip("ollama", reason="needs the ollama package")
openai = pytest.importorskip("openai", reason="needs the openai package")

from draftwood.runtime.serving.anthropic.bodies import MessagesBody  # noqa: E402 - after the skips
from draftwood.runtime.serving.ollama.bodies import OllamaChatBody, OllamaGenerateBody, Options  # noqa: E402
from draftwood.runtime.serving.openai.responses_body import ResponsesBody  # noqa: E402

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
CHAT, GENERATE, OPTIONS = "/api/chat", "/api/generate", "options"
BODIES: dict[str, dict[str, Any]] = {
    MESSAGES: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    RESPONSES: {"input": "x", "max_output_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "x"}], "options": {"num_predict": 2}},
    GENERATE: {"prompt": "x", "options": {"num_predict": 2}},
    OPTIONS: {"num_predict": 2},
}
TOOL = {"name": "f", "input_schema": {}}
FUNCTION = {"type": "function", "name": "f"}
# A value of each field that asks for something; True for all others.
VALUES: dict[str, dict[str, Any]] = {
    MESSAGES: {
        "max_tokens": 3,
        "messages": [{"role": "user", "content": "y"}],
        "metadata": {"user_id": "me"},
        "model": "tiny",
        "output_config": {"effort": "high"},
        "stop_sequences": ["x"],
        "system": "be kind",
        "temperature": 0.5,
        "thinking": {"type": "disabled"},
        "tool_choice": {"type": "any"},
        "tools": [TOOL],
        "top_k": 5,
        "top_p": 0.5,
    },
    RESPONSES: {
        "include": ["reasoning.encrypted_content"],
        "input": "y",
        "instructions": "be kind",
        "max_output_tokens": 3,
        "metadata": {"a": "b"},
        "model": "tiny",
        "reasoning": {"effort": "none", "summary": "auto"},
        "safety_identifier": "me",
        "temperature": 0.5,
        "text": {"format": {"type": "json_object"}},
        "tool_choice": "required",
        "tools": [FUNCTION],
        "top_logprobs": 2,
        "top_p": 0.5,
        "truncation": "auto",
        "user": "me",
    },
    CHAT: {
        "format": "json",
        "messages": [{"role": "user", "content": "y"}],
        "model": "tiny:latest",
        "options": {"num_predict": 1, "seed": 3},
        "tools": [{"type": "function", "function": {"name": "f"}}],
    },
    OPTIONS: {
        "frequency_penalty": 0.5,
        "min_p": 0.5,
        "mirostat": 2,
        "num_predict": 1,
        "penalize_newline": False,
        "presence_penalty": 0.5,
        "repeat_last_n": 64,
        "repeat_penalty": 1.1,
        "seed": 3,
        "stop": ["x"],
        "temperature": 0.5,
        "tfs_z": 0.5,
        "top_k": 5,
        "top_p": 0.5,
        "typical_p": 0.5,
    },
}
VALUES[GENERATE] = {**VALUES[CHAT], "prompt": "y", "suffix": "def", "system": "be kind"}
WITH: dict[str, dict[str, Any]] = {
    MESSAGES: {"tool_choice": {"tools": [TOOL]}},
    RESPONSES: {"tool_choice": {"tools": [FUNCTION]}},
}
# What clients send beside what their package lists: sampling, and fields of Claude Code and Codex.
FURTHER = {MESSAGES: {"context_management", "temperature", "top_k", "top_p"}, RESPONSES: {"client_metadata"}}
FURTHER[OPTIONS] = {"min_p"}
TABLE = r"^\| \| `{}` \|\n\|---\|---\|\n((?:\|.*\n)+)"


def listed(path: str) -> dict[str, str]:
    """What the page says of each field."""
    page = (ROOT / "docs" / "parameters.md").read_text(encoding="utf-8")
    (rows,) = re.findall(TABLE.format(path), page, re.MULTILINE)
    found: dict[str, str] = {}
    for kind, names in re.findall(r"^\| ([a-z ]+) \| (.*) \|$", rows, re.MULTILINE):
        plain = re.sub(r"\([^)]*\)", "", names)
        found |= dict.fromkeys(re.findall(r"`(\w+)`", plain), kind)
    return found


def fields_of(path: str) -> set[str]:
    """The fields of a protocol, by its own client."""
    if path == MESSAGES:
        from anthropic.types.message_create_params import MessageCreateParamsBase as Messages

        return {*Messages.__annotations__, "stream"} | FURTHER[path]
    if path != RESPONSES:
        from ollama._types import ChatRequest, GenerateRequest
        from ollama._types import Options as OllamaOptions

        kind: Any = {CHAT: ChatRequest, GENERATE: GenerateRequest, OPTIONS: OllamaOptions}[path]
        return {*kind.model_fields} | FURTHER.get(path, set())
    from openai.types.responses.response_create_params import ResponseCreateParamsBase as Responses

    return {*Responses.__annotations__, "stream"} | FURTHER[path]


KINDS = {MESSAGES: MessagesBody, RESPONSES: ResponsesBody}
KINDS |= {CHAT: OllamaChatBody, GENERATE: OllamaGenerateBody, OPTIONS: Options}


@pytest.mark.parametrize(("path", "body"), KINDS.items())
def test_each_field_is_what_the_page_says(thinker: Served, api: Served, path: str, body: Any) -> None:
    said, server = listed(path), api if path == GENERATE else thinker  # whose model infills
    assert said.keys() == fields_of(path)

    def ask(**fields: Any) -> tuple[int, str]:
        fields = BODIES[path] | fields
        return server.ask(CHAT, BODIES[CHAT] | {OPTIONS: fields}) if path == OPTIONS else server.ask(path, fields)

    for name, kind in said.items():
        value = VALUES[path].get(name, True)
        if name == "previous_response_id":
            value = json.loads(ask()[1])["id"]
        status, text = ask(**WITH.get(path, {}).get(name, {}), **{name: value})
        assert status == (400 if kind == "refused" else 200) and (status == 200 or name in text), (name, text)
        assert (name in body.ignored or name == "include") == (kind == "no effect"), name
    for name, values in body.neutral.items():
        assert said[name] == "refused"
        for value in values:
            assert ask(**{name: value})[0] == 200, name
