"""Tools in prompts: templates that know tools write what transformers writes; others are told of them in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_tokenizer

from draftwood.runtime.text.chat_prompt import write_conversation
from draftwood.runtime.text.conversation import ChatSettings, to_template
from draftwood.runtime.text.tokenizer import Tokenizer
from draftwood.runtime.text.tools import HERMES, LLAMA, tool_format

QWEN = """{%- if tools %}{{- '<|im_start|>system\\n# Tools' }}{%- for tool in tools %}{{- "\\n" + (tool | tojson) }}
{%- endfor %}{{- '\\nanswer with <tool_call> tags<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls %}
        {{- '<|im_start|>assistant' }}{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}{%- set call = call.function %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}{{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
LLAMA3 = """{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- for t in tools %}{{- t | tojson(indent=4) }}
{%- endfor %}{%- endif %}{%- for message in messages %}{%- if 'tool_calls' in message %}
    {{- '<|assistant|>{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
    {{- message.tool_calls[0].function.arguments | tojson }}{{- "}" }}
{%- else %}{{- '<|' + message.role + '|>' + message.content }}{%- endif %}{%- endfor %}"""
PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OTHER = "{% for tool in tools or [] %}[AVAILABLE_TOOLS]{{ tool | tojson }}{% endfor %}" + PLAIN
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "how is it?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
    {"role": "assistant", "content": "It is sunny.", "tool_calls": [CALL | {"id": "c2"}, CALL | {"id": "c3"}]},
    {"role": "tool", "content": "rainy", "tool_call_id": "c3"},
    {"role": "tool", "content": [{"type": "text", "text": "windy"}], "tool_call_id": "c2"},
]
TOLD = ChatSettings(tools=[TOOL])


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def with_template(template: str) -> Tokenizer:
        write_tokenizer(tmp_path)
        (tmp_path / "chat_template.jinja").write_text(template)
        return Tokenizer.load(tmp_path)

    return with_template


@pytest.mark.parametrize("template", [QWEN, LLAMA3])
def test_a_template_that_knows_tools_writes_what_transformers_writes(load: Any, tmp_path: Path, template: str) -> None:
    from transformers import AutoTokenizer

    with load(template) as tokenizer:
        reference = AutoTokenizer.from_pretrained(tmp_path)
        cases: list[tuple[ChatSettings, Any]] = [(TOLD, [TOOL]), (ChatSettings(), None)]
        for settings, tools in cases:
            expected = reference.apply_chat_template(
                to_template(MESSAGES), tools=tools, tokenize=False, add_generation_prompt=True
            )
            assert write_conversation(tokenizer, MESSAGES, settings) == expected
        assert '{"city": "Zürich"}' in expected, "arguments are an object, not text"


def test_the_kind_of_calls_is_read_off_the_template() -> None:
    assert tool_format(QWEN) == tool_format(PLAIN) == HERMES and tool_format(LLAMA3) == LLAMA
    assert tool_format(OTHER) is None


def test_a_template_without_tools_is_told_in_words(load: Any) -> None:
    with load(PLAIN) as tokenizer:
        text = write_conversation(tokenizer, MESSAGES, TOLD)
        system, first, second, result, third, results, end = text.split("<|")[1:]
        assert system.startswith("system|>You may call functions.") and '"name": "weather"' in system
        assert first == "user|>how is it?\n" and end == "assistant|>"
        call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Z\\u00fcrich"}}\n</tool_call>'
        assert second == f"assistant|>{call}\n" and third == f"assistant|>It is sunny.\n{call}\n{call}\n"
        assert result == "user|><tool_response>\nsunny\n</tool_response>\n"
        assert results == "user|><tool_response>\nrainy\n</tool_response>\n<tool_response>\nwindy\n</tool_response>\n"
        kept = write_conversation(tokenizer, [{"role": "system", "content": "Be kind."}, *MESSAGES], TOLD)
        assert kept.startswith("<|system|>Be kind.\n\nYou may call functions.") and kept.count("<|system|>") == 1
        assert "You may call" not in write_conversation(tokenizer, MESSAGES)


@pytest.mark.parametrize("template", [PLAIN, QWEN])
def test_a_call_that_was_cut_off_may_be_sent_back(load: Any, template: str) -> None:
    cut = {"id": "c9", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zü'}}
    with load(template) as tokenizer:
        text = write_conversation(tokenizer, [MESSAGES[0], {"role": "assistant", "tool_calls": [cut]}], TOLD)
    assert "Zü" in text.split("assistant")[1]


def test_a_call_without_arguments_has_none() -> None:
    empty = {**CALL, "function": {"name": "f", "arguments": ""}}
    written = to_template([{"role": "assistant", "tool_calls": [empty]}])
    assert written == [
        {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}]}
    ]
