"""The body of OpenAI's Responses API, and the chat that it means."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from ....models.errors import RequestError, shown
from ...sampling.params import LARGEST_COUNT
from ...text.tools import MAX_TOOLS
from ..body import MAX_NAME, ResponseFormat, ResponseSchema, Strict
from .bodies import MAX_PARTS, ChatBody, Effort
from .tool_use import Function, FunctionName, Name, NamedTool, Tool
from .translated import TranslatedBody, Turns, field_of, kind_of, only, texts_of

# Known fields that never change the text.
IGNORED = frozenset(("client_metadata", "max_tool_calls", "prompt_cache_key", "prompt_cache_retention"))
IGNORED |= {"service_tier", "stream_options"}
NEUTRAL: dict[str, tuple[Any, ...]] = {"background": (False,), "top_logprobs": (0,), "truncation": ("disabled",)}
TEXTS = ("input_text", "output_text", "text")
MAX_METADATA = 16  # OpenAI's limits
LOGPROBS = "message.output_text.logprobs"
Value = Annotated[str, StringConstraints(max_length=512)]


class OfferedFunction(Strict):
    """A tool that is a function. Built-in ones run on OpenAI's own servers."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


Offered = Annotated[OfferedFunction, only("function")]


class ChosenFunction(Strict):
    """A `tool_choice` that names a function."""

    type: Literal["function"]
    name: str


class TextFormat(Strict):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME)] | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(Strict):
    """How the text is written."""

    format: TextFormat = TextFormat(type="text")
    verbosity: Literal["medium"] | None = None

    def response_format(self) -> ResponseFormat:
        """The form, as a chat's body has it. Raises RequestError."""
        form = self.format
        if (form.type == "json_schema") != (form.schema_ is not None and form.name is not None):
            raise RequestError("text.format: the type json_schema needs name and schema, and no other type has them")
        named = (
            None if form.schema_ is None else ResponseSchema.model_validate({"name": form.name, "schema": form.schema_})
        )
        return ResponseFormat(type=form.type, json_schema=named)


class ReasoningConfig(Strict):
    """How much the model thinks."""

    effort: Effort | None = None

    @classmethod
    def _is_neutral(cls, name: str, value: Any) -> bool:
        return value is None or name in ("context", "generate_summary", "mode", "summary")


class ResponsesBody(TranslatedBody):
    """POST /v1/responses."""

    ignored = IGNORED
    neutral = NEUTRAL
    own = frozenset(("tools", "tool_choice"))

    input: str | Annotated[list[dict[str, Any]], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=LARGEST_COUNT)
    tools: Annotated[list[Offered], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    reasoning: ReasoningConfig = ReasoningConfig()
    include: Annotated[list[str], Field(max_length=MAX_TOOLS)] | None = Field(None, description="no effect")
    previous_response_id: str | None = Field(None, description="needs a server that stores responses")
    store: bool = Field(True, description="if the server stores responses")
    metadata: Annotated[dict[str, Value], Field(max_length=MAX_METADATA)] = Field({}, description="comes back")
    safety_identifier: str | None = None

    def chat(self, before: Turns) -> ChatBody:
        """The chat that the body means, after the turns of earlier responses. Raises RequestError."""
        if LOGPROBS in (self.include or ()):
            raise RequestError(f"include: {LOGPROBS} is not supported here: send logprobs to /v1/chat/completions")
        add_items(before, self.input)
        turns = Turns()
        if self.instructions:
            turns.say("system", self.instructions)
        turns.extend(before)
        choice: Any = self.tool_choice
        if isinstance(choice, ChosenFunction):
            choice = NamedTool(type="function", function=FunctionName(name=choice.name))
        tools = [as_tool(each) for each in self.tools or ()]
        return self.as_body(
            ChatBody,
            messages=turns.messages,
            max_tokens=self.max_output_tokens,
            tools=tools or None,
            tool_choice=choice if tools or choice != "auto" else None,
            response_format=self.text.response_format() if "text" in self.model_fields_set else None,
            reasoning_effort=self.reasoning.effort,
        )


def as_tool(offered: OfferedFunction) -> Tool:
    fields = offered.model_dump(exclude={"type"}, exclude_none=True)
    return Tool(type="function", function=Function(**fields))


def add_items(turns: Turns, items: str | list[dict[str, Any]]) -> None:
    """Add the items of an input. Raises RequestError for those that are not supported."""
    if isinstance(items, str):
        turns.say("user", items)
        return
    for index, item in enumerate(items):
        place = f"input[{index}]"
        kind = kind_of(place, {"type": "message", **item})
        if kind == "message":
            role = item.get("role")
            if role not in ("user", "assistant", "system", "developer"):
                raise RequestError(f"{place}.role must be user, assistant, system or developer, not {shown(role)}")
            texts = texts_of(f"{place}.content", item.get("content"), TEXTS)
            turns.say("system" if role == "developer" else role, *texts)
        elif kind == "function_call":
            given = [field_of(place, item, name) for name in ("call_id", "name", "arguments")]
            turns.call(*given)
        elif kind == "function_call_output":
            texts = texts_of(f"{place}.output", item.get("output"), TEXTS)
            turns.answer(f"{place}.call_id", field_of(place, item, "call_id"), texts)
        elif kind == "reasoning":
            for text in texts_of(f"{place}.content", item.get("content") or [], ("reasoning_text",)):
                turns.think(text)
        else:
            raise RequestError(f"{place}: items of the type {shown(kind)} are not supported here: leave it out")
