"""Checks a conversation, and converts it to the form that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard, get_args

from ...models.errors import RequestError, shown
from .tools import Tool, check_tools

Role = Literal["system", "developer", "user", "assistant", "tool"]
ROLES: tuple[str, ...] = get_args(Role)
Conversation = Sequence[Mapping[str, Any]]  # messages {"role", "content"}, perhaps with a "name"
MAX_MESSAGES = 4096  # of a conversation, and parts of a message
# Fields of messages that would change the prompt, and the only role whose messages may have them, if any. Clients send
# answers back with many others, which change nothing.
MEANT = {
    **dict.fromkeys(("audio", "files", "function_call", "images", "prefix", "refusal", "videos")),
    "tool_calls": "assistant",
    "tool_call_id": "tool",
}

# Names that are no further variables of a template: they have a setting of their own, or an argument.
OWN_NAMES = (
    *("self", "messages", "add_generation_prompt", "given_up"),
    *("continue_final_message", "tools", "documents", "chat_template"),
)


@dataclass(frozen=True)
class ChatSettings:
    """How a conversation becomes a prompt. Raises RequestError for settings that contradict each other."""

    add_generation_prompt: bool = True  # the prompt ends with the beginning of an answer
    continue_final_message: bool = False  # it ends inside the last message instead, which the answer continues
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # further variables of the chat template
    tools: Sequence[Tool] = ()  # that the model is told of

    def __post_init__(self) -> None:
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestError("continue_final_message needs add_generation_prompt to be false")
        if not isinstance(self.template_kwargs, Mapping):
            raise RequestError(f"chat_template_kwargs must be variables by name, not {shown(self.template_kwargs)}")
        if taken := sorted(set(OWN_NAMES).intersection(self.template_kwargs)):
            raise RequestError(f"chat_template_kwargs may not hold {taken[0]}: a conversation's own fields set it")
        check_tools(self.tools)


ASKED = ChatSettings()


def is_conversations(messages: object) -> TypeGuard[list[Conversation]]:
    """Whether `messages` is a list of conversations. An empty list counts as a conversation without messages."""
    return isinstance(messages, list) and bool(messages) and all(isinstance(item, (list, tuple)) for item in messages)


def to_template(messages: Conversation) -> list[dict[str, Any]]:
    """The messages, each with a single text as content. Raises RequestError if `messages` is no conversation, or if a
    message has a field that is not supported and would change the prompt."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(f"a conversation is a list of messages with role and content, not {shown(messages)}")
    if not messages:
        raise RequestError("the conversation has no messages: send at least one")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"the conversation has {len(messages)} messages: send at most {MAX_MESSAGES}")
    called: dict[str, str] = {}  # the function of each call so far, by the call's id
    return [message_to_template(f"messages[{index}]", message, called) for index, message in enumerate(messages)]


def message_to_template(place: str, message: Mapping[str, Any], called: dict[str, str]) -> dict[str, Any]:
    """One message. Fields that ask for nothing are ignored.

    "developer", OpenAI's newer name for "system", becomes "system", the role that LLaMA's templates know. An assistant
    may call tools, and then needs no content. Its reasoning is for the template to write or to leave out. The message
    of a tool gets the name of the function that was called. called: the functions by the ids of calls; this message's
    calls are added.
    """
    if not isinstance(message, Mapping):
        raise RequestError(f"{place} must be a message with role and content, not {shown(message)}")
    given = {
        str(name): value for name, value in message.items() if value is not None and value is not False and value != []
    }
    role, name = given.get("role"), given.get("name")
    if role not in ROLES:
        raise RequestError(f"{place}.role must be one of {', '.join(ROLES)}, not {shown(role)}")
    for each in given:
        if each in MEANT and MEANT[each] != role:
            raise RequestError(f"{place}.{each} is not supported in a message of this role: leave it out")
    if name is not None and not isinstance(name, str):
        raise RequestError(f"{place}.name must be text, not {shown(name)}")
    written: dict[str, Any] = {"role": "system" if role == "developer" else role}
    written["content"] = (
        "" if "tool_calls" in given and "content" not in given else text_of(place, given.get("content"))
    )
    if role == "tool":
        written["tool_call_id"] = answered(place, given.get("tool_call_id"), called)
        name = name or called[written["tool_call_id"]]
    if name is not None:
        written["name"] = name
    for thoughts in ("reasoning", "reasoning_content"):
        if role == "assistant" and isinstance(given.get(thoughts), str):
            written["reasoning_content"] = given[thoughts]
    if "tool_calls" in given:
        written["tool_calls"] = calls_to_template(f"{place}.tool_calls", given["tool_calls"])
        called |= {call["id"]: call["function"]["name"] for call in written["tool_calls"]}
    return written


def answered(place: str, call: Any, called: Mapping[str, str]) -> str:
    """The id of the call that a tool's message answers."""
    if not isinstance(call, str) or call not in called:
        raise RequestError(f"{place}.tool_call_id must be the id of an earlier message's tool call, not {shown(call)}")
    return call


def calls_to_template(place: str, calls: Any) -> list[dict[str, Any]]:
    """Calls with their arguments as objects, which templates write as JSON."""
    if not isinstance(calls, (list, tuple)):
        raise RequestError(f"{place} must be a list of calls, not {shown(calls)}")
    return [call_to_template(f"{place}[{index}]", call) for index, call in enumerate(calls)]


def call_to_template(place: str, call: Any) -> dict[str, Any]:
    """One call. Its arguments come as the JSON text of an object, or as an object. Text that is no JSON stays text: a
    model may write such arguments, or be cut off in them, and a client sends its answer back. Other fields, such as the
    index of a streamed call, change nothing."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type") not in (None, "function"):
        raise RequestError(f'{place} must be a call with id, "type": "function" and function, not {shown(call)}')
    if not isinstance(call.get("id"), str):
        raise RequestError(f"{place}.id must be text, not {shown(call.get('id'))}")
    if not isinstance(function.get("name"), str) or "arguments" not in function:
        raise RequestError(f"{place}.function must have a name and arguments, not {shown(function)}")
    arguments = function["arguments"]
    content: Any = arguments
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            content = json.loads(arguments or "{}")
    if not isinstance(content, Mapping) and (content is not arguments or not isinstance(arguments, str)):
        raise RequestError(f"{place}.function.arguments must be the JSON text of an object, not {shown(arguments)}")
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": content}}


def text_of(place: str, content: Any) -> str:
    """The content as one text. The parts of a list become lines."""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise RequestError(f"{place}.content must be text, not {shown(content)}")
    if len(content) > MAX_MESSAGES:
        raise RequestError(f"{place}.content has {len(content)} parts: send at most {MAX_MESSAGES}")
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f'{place}.content[{index}] must be a part {{"type": "text", "text"}}, not {shown(part)}: other parts '
                "are not supported"
            )
    return "\n".join(part["text"] for part in content)
