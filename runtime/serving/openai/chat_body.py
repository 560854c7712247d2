"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticKnownError

from ....models.errors import RequestError
from ...sampling.params import LARGEST_COUNT, MAX_LOGPROBS
from ...text.conversation import MAX_MESSAGES, ChatSettings, Role, text_of
from ...text.tools import MAX_TOOLS
from .protocol import NEUTRAL, GenerationBody
from .tool_use import Tool, ToolChoice, Tools

MAX_PARTS = 4 * MAX_MESSAGES  # parts and tool calls of all messages of a body together


class Message(BaseModel):
    """One message. `conversation.to_template` checks what is in it: clients send answers back with further fields."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    role: Role
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None


def no_many_parts(messages: Any) -> Any:
    """Refuse too many parts and calls of all messages together before any is checked: a body has room for 140,000,
    which take half a second of the event loop."""
    given = [each for each in messages if isinstance(each, dict)] if isinstance(messages, list) else ()
    lists = (message.get(name) for message in given for name in ("content", "tool_calls"))
    count = sum(len(each) for each in lists if isinstance(each, list))
    if count > MAX_PARTS:
        limits = {"field_type": "All content and tool_calls together", "max_length": MAX_PARTS, "actual_length": count}
        raise PydanticKnownError("too_long", limits)
    return messages


Messages = Annotated[
    list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES), BeforeValidator(no_many_parts)
]


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    neutral = {**NEUTRAL, "add_special_tokens": (False,)}  # noqa: RUF012 - as the base class declares it

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1, le=LARGEST_COUNT)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = Field(False, description="the answer begins with the last message, if it is the assistant's")
    add_generation_prompt: bool = Field(True, description="add the beginning of an answer")
    continue_final_message: bool = Field(False, description="continue the last message; needs no generation prompt")
    chat_template_kwargs: dict[str, Any] = Field({}, description="further variables of the chat template")
    tools: Tools | None = None
    tool_choice: ToolChoice | None = Field(None, description="by default auto, if there are tools")
    parallel_tool_calls: bool = Field(True, description="false: at most one call")

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def differs(self) -> bool:
        return self.echo or bool(self.tools)

    def settings(self, told: bool) -> ChatSettings:
        """told: whether the model is told of the tools. Raises RequestError."""
        tools = tools_for_template(self.tools) if told else ()
        return ChatSettings(self.add_generation_prompt, self.continue_final_message, self.chat_template_kwargs, tools)

    @property
    def echoed(self) -> str | None:
        """The text before the answer's own."""
        if not self.echo or self.messages[-1].role != "assistant":
            return None
        (last,) = conversation(self.messages[-1:])
        return text_of("messages[-1]", last.get("content", ""))

    @property
    def conversation(self) -> list[dict[str, Any]]:
        return conversation(self.messages)

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise RequestError("max_completion_tokens is max_tokens by another name: send one of them")

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def tools_for_template(tools: list[Tool] | None) -> list[dict[str, Any]]:
    """The tools as chat templates read them; `strict` is meant for the server."""
    hidden = {"function": {"strict"}}
    return [tool.model_dump(exclude=hidden, exclude_none=True) for tool in tools or ()]


def conversation(messages: list[Message]) -> list[dict[str, Any]]:
    """The messages as Python dictionaries."""
    return [message.model_dump(exclude_none=True) for message in messages]
