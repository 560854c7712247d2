"""Tools in a prompt: how a model of some kind writes calls, and what a template that knows no tools is told of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...models.errors import RequestError, shown

MAX_TOOLS = 128  # OpenAI's limit
Tool = Mapping[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}


class ToolFormat(NamedTuple):
    """How a call is written: `opens`, a JSON object with "name" and `arguments`, `closes`."""

    opens: str
    closes: str
    arguments: str


HERMES = ToolFormat("<tool_call>", "</tool_call>", "arguments")  # Hermes, Qwen, SmolLM
LLAMA = ToolFormat("", "", "parameters")  # Llama 3: the whole answer is a call
INSTRUCTION = """You may call functions. They are described between <tools> and </tools>, one JSON object per line.
<tools>
{tools}
</tools>
To call a function, write a JSON object with its name and arguments between <tool_call> and </tool_call>:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>
You may write several calls. The results come between <tool_response> and </tool_response>."""


def check_tools(tools: Sequence[Tool]) -> None:
    """Raises RequestError if there are too many tools, or for one that is no function with a name."""
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence) or len(tools) > MAX_TOOLS:
        raise RequestError(f"tools must be a list of at most {MAX_TOOLS} functions, not {shown(tools)}")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(
                f'tools[{index}] must be {{"type": "function", "function": {{"name": …}}}}, not {shown(tool)}'
            )
    try:
        json.dumps(tools)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"tools must consist of what JSON can express: {error}") from error


def knows_tools(template: str) -> bool:
    """Whether a chat template reads tools."""
    return re.search(r"\btools\b", template) is not None


def tool_format(template: str) -> ToolFormat | None:
    """How calls are written by the model that a chat template belongs to. None for a template with tools in another
    format; a template without tools is told of HERMES, see `explained`."""
    if "<tool_call>" in template or not knows_tools(template):
        return HERMES
    return LLAMA if "ipython" in template or "<|python_tag|>" in template else None


def explained(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """A conversation for a template without tools: INSTRUCTION stands in the system message, and calls and results are
    text, those of neighbouring tool messages one, because many templates require that user and assistant take turns."""
    written: list[dict[str, Any]] = []
    for message in messages:
        plain = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
        calls = [call_text(call["function"]) for call in message.get("tool_calls", ())]
        if calls:
            plain["content"] = "\n".join([message["content"], *calls] if message["content"] else calls)
        if message["role"] == "tool":
            plain = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
            if written and "tool_response" in written[-1]:
                plain["content"] = f"{written.pop()['content']}\n{plain['content']}"
            plain["tool_response"] = True  # no template reads it
        written.append(plain)
    if not tools:
        return written
    text = INSTRUCTION.format(tools="\n".join(map(json.dumps, tools)))
    if written[0]["role"] == "system":
        return [{**written[0], "content": f"{written[0]['content']}\n\n{text}"}, *written[1:]]
    return [{"role": "system", "content": text}, *written]


def call_text(function: Mapping[str, Any]) -> str:
    """A call in the format HERMES. function: {"name", "arguments"}, these an object, or text that is no JSON."""
    name, arguments = json.dumps(function["name"]), function["arguments"]
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'{HERMES.opens}\n{{"name": {name}, "{HERMES.arguments}": {written}}}\n{HERMES.closes}'
