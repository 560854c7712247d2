"""Checks a conversation, and converts it to the form that chat templates read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeGuard, get_args

from ...models.errors import RequestError, shown

Role = Literal["system", "developer", "user", "assistant"]
ROLES: tuple[str, ...] = get_args(Role)
Conversation = Sequence[Mapping[str, Any]]  # messages {"role", "content"}, perhaps with a "name"
FIELDS = ("role", "content", "name")


def is_conversations(messages: object) -> TypeGuard[list[Conversation]]:
    """Whether `messages` is a list of conversations. An empty list counts as a conversation without messages."""
    return isinstance(messages, list) and bool(messages) and all(isinstance(item, (list, tuple)) for item in messages)


def to_template(messages: Conversation) -> list[dict[str, str]]:
    """The messages, each with a single text as content. Raises RequestError if `messages` is no conversation, or if a
    message has a field that would be ignored."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(f"a conversation is a list of messages with role and content, not {shown(messages)}")
    if not messages:
        raise RequestError("the conversation has no messages: send at least one")
    return [message_to_template(f"messages[{index}]", message) for index, message in enumerate(messages)]


def message_to_template(place: str, message: Mapping[str, Any]) -> dict[str, str]:
    """One message. Fields that are None or empty lists are ignored, because clients send answers back with them.

    "developer", OpenAI's newer name for "system", becomes "system", the role that LLaMA's templates know. Tools are not
    supported, so no message calls a tool or contains a tool's answer.
    """
    if not isinstance(message, Mapping):
        raise RequestError(f"{place} must be a message with role and content, not {shown(message)}")
    given = {str(name): value for name, value in message.items() if value is not None and value != []}
    for field in given:
        if field not in FIELDS:
            raise RequestError(f"{place}.{field:.100} is not supported: a message has {', '.join(FIELDS)}")
    role, name = given.get("role"), given.get("name")
    if role not in ROLES:
        raise RequestError(f"{place}.role must be one of {', '.join(ROLES)}, not {shown(role)}")
    written = {"role": "system" if role == "developer" else str(role), "content": text_of(place, given.get("content"))}
    if name is None:
        return written
    if not isinstance(name, str):
        raise RequestError(f"{place}.name must be text, not {shown(name)}")
    return {**written, "name": name}


def text_of(place: str, content: Any) -> str:
    """The content as one text. The parts of a list become lines."""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise RequestError(f"{place}.content must be text, not {shown(content)}")
    for part in content:
        alone = isinstance(part, Mapping) and set(part) == {"type", "text"} and part["type"] == "text"
        if not alone or not isinstance(part["text"], str):
            raise RequestError(f'{place}.content holds parts {{"type": "text", "text"}} only, not {shown(part)}')
    return "\n".join(part["text"] for part in content)
