"""The bodies of other protocols, which become the body of a chat: what they share, and the conversation that they
mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from ....models.errors import RequestError, shown
from ..body import SamplingBody, problem_of
from .bodies import ChatBody, GenerationBody, ModelBody

B = TypeVar("B", bound=GenerationBody)


class TranslatedBody(SamplingBody, ModelBody):
    """A body that becomes a ChatBody. Fields with the name of one of a chat's mean the same."""

    null_counts = ChatBody.null_counts
    own: ClassVar[frozenset[str]] = frozenset()  # fields that mean something else than a chat's field of the same name

    # Of this server and of vLLM, checked by ChatBody.
    speculative: Any = Field(None, description="as in /v1/chat/completions, which has all fields that are not listed")
    chat_template_kwargs: Any = None
    thinking_token_budget: Any = None

    def as_body(self, kind: type[B], **fields: Any) -> B:
        """The body of this kind with these fields; those that are None count as left out. Raises RequestError."""
        names = (self.model_fields_set & kind.model_fields.keys()) - self.own
        given = {name: value for name, value in fields.items() if value is not None}
        for name in names & given.keys() & TranslatedBody.model_fields.keys():
            if getattr(self, name) not in (None, given[name]):
                raise RequestError(f"{name} is said by another field, too: leave one of them out")
        try:
            return kind(**{**{name: getattr(self, name) for name in names}, **given})
        except ValidationError as error:
            raise RequestError(problem_of(error.errors()).message) from error


class Turns:
    """Builds the messages of a chat. Neighbouring texts, thoughts and calls of one role are one message, because many
    templates require that roles take turns. The texts become parts, which cost no copies."""

    def __init__(self, messages: Sequence[Mapping[str, Any]] = ()) -> None:
        """messages: of earlier turns, which stay as they are."""
        self._messages = [
            {name: [*value] if isinstance(value, list) else value for name, value in message.items()}
            for message in messages
        ]
        self._called = {call["id"] for message in messages for call in message.get("tool_calls", ())}

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages so far."""
        return [{**message, "content": message["content"] or ""} for message in self._messages]

    @property
    def last(self) -> Mapping[str, Any]:
        """The last message; empty if there is none."""
        return self._messages[-1] if self._messages else {}

    def say(self, role: str, *texts: str) -> None:
        """Texts of a role."""
        parts = [{"type": "text", "text": text} for text in texts]
        self._last(role)["content"] += parts

    def think(self, text: str) -> None:
        """A thought of the assistant, which no text or call has followed yet."""
        message = self._last("assistant", new=bool(self.last.get("content") or "tool_calls" in self.last))
        message["reasoning_content"] = message.get("reasoning_content", "") + text

    def call(self, call_id: str, name: str, arguments: Any) -> None:
        """A call of the assistant. arguments: an object, or its JSON text."""
        function = {"name": name, "arguments": arguments}
        calls = self._last("assistant").setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})
        self._called.add(call_id)

    def answer(self, place: str, call_id: str, texts: Sequence[str]) -> None:
        """The result of a call. Raises RequestError if there was no such call."""
        if call_id not in self._called:
            raise RequestError(f"{place} must be the id of an earlier call, not {shown(call_id)}")
        message = self._last("tool", new=True)
        message |= {"content": [{"type": "text", "text": text} for text in texts], "tool_call_id": call_id}

    def extend(self, others: Turns) -> None:
        """Add all messages of other turns."""
        for message in others._messages:
            if message["role"] == "system":
                self._last("system")["content"] += message["content"]
            else:
                self._messages.append(message)

    def _last(self, role: str, new: bool = False) -> dict[str, Any]:
        """The last message, if it has this role; else, or if it is to be a new one, an empty one of the role."""
        if new or self.last.get("role") != role:
            self._messages.append({"role": role, "content": []})
        return self._messages[-1]


def only(*kinds: str) -> BeforeValidator:
    """Refuses tools of other types by their name."""

    def check(tool: Any) -> Any:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            message = "{kind} is a tool that this server does not have: leave it out"
            raise PydanticCustomError("unknown_tool", message, {"kind": shown(kind)})
        return tool

    return BeforeValidator(check)


def texts_of(place: str, content: Any, kinds: Sequence[str]) -> list[str]:
    """The texts of a content: a text, or a list of parts of these kinds. Raises RequestError for other parts."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise RequestError(f"{place} must be text, or a list of parts, not {shown(content)}")
    return [text_in(f"{place}[{index}]", part, kinds) for index, part in enumerate(content)]


def text_in(place: str, part: Any, kinds: Sequence[str]) -> str:
    """The text of a part. Raises RequestError if it is none."""
    kind = kind_of(place, part)
    if kind not in kinds:
        raise RequestError(f"{place}: {shown(kind)} is not supported here: send {' or '.join(kinds)}")
    return str(field_of(place, part, "text"))


def kind_of(place: str, part: Any) -> str:
    """The type of a part. Raises RequestError."""
    if not isinstance(part, Mapping):
        raise RequestError(f"{place} must be an object with a type, not {shown(part)}")
    return str(field_of(place, part, "type"))


def field_of(place: str, part: Mapping[str, Any], name: str, kind: type = str) -> Any:
    """A field that a part needs. Raises RequestError."""
    value = part.get(name)
    if not isinstance(value, kind):
        raise RequestError(f"{place}.{name} must be {'text' if kind is str else 'an object'}, not {shown(value)}")
    return value
