"""The bodies of Anthropic's Messages API, and the chats that they mean."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ....models.errors import RequestError, shown
from ...text.conversation import MAX_MESSAGES
from ...text.tools import MAX_TOOLS
from ..body import FEW_STOPS, ResponseFormat, ResponseSchema, Stop, Strict, User
from ..openai.bodies import ChatBody, Message, no_many_parts
from ..openai.tool_use import Function, FunctionName, Name, NamedTool, Tool, ToolChoice
from ..openai.translated import TranslatedBody, Turns, field_of, kind_of, only, texts_of

# Fields that never change the text.
IGNORED = frozenset(("cache_control", "context_management", "diagnostics", "inference_geo", "service_tier"))
IGNORED |= {"speed", "user_profile_id", "workspace_id"}
# Fields of a tool that say how Anthropic's own servers treat it, and its type where it is a function.
OF_TOOLS = frozenset(("allowed_callers", "cache_control", "defer_loading", "eager_input_streaming", "input_examples"))
CHOICES: dict[str, Literal["none", "auto", "required"]] = {"none": "none", "auto": "auto", "any": "required"}
Parts = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_MESSAGES)]


class Turn(Message):
    """One message; `to_turns` checks its blocks."""

    role: Literal["user", "assistant", "system"]
    content: str | Parts


class OfferedTool(Strict):
    """A tool. Those of Anthropic's own servers have other types, and are refused."""

    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    @classmethod
    def _is_neutral(cls, name: str, value: Any) -> bool:
        return value is None or name in OF_TOOLS or (name == "type" and value == "custom")


Offered = Annotated[OfferedTool, only("custom")]


class Choice(Strict):
    """How the model uses tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    def chosen(self) -> ToolChoice:
        """Raises RequestError."""
        if (self.type == "tool") != (self.name is not None):
            raise RequestError("tool_choice: the type tool needs the name of one, and no other type has it")
        if self.name is None:
            return CHOICES[self.type]
        return NamedTool(type="function", function=FunctionName(name=self.name))


class Thinking(Strict):
    """Whether the model thinks."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Strict):
    """The form of the text."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    """How much the model thinks, and the form of its text."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(Strict):
    """Who asks."""

    user_id: User | None = None


class CountBody(TranslatedBody):
    """POST /v1/messages/count_tokens."""

    ignored = IGNORED
    neutral = {}  # noqa: RUF012 - as the base class declares it
    own = frozenset(("messages", "tools", "tool_choice"))

    messages: Annotated[
        list[Turn], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES), BeforeValidator(no_many_parts)
    ]
    system: str | Parts | None = None
    tools: Annotated[list[Offered], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = Field(None, description="by default as the model's chat template does")
    output_config: OutputConfig = OutputConfig()

    def chat(self, **fields: Any) -> ChatBody:
        """The chat that the body means. Raises RequestError."""
        turns = to_turns(self.system, self.messages)
        choice, thinking, config = self.tool_choice, self.thinking, self.output_config
        fields |= {"messages": turns.messages, "tools": [as_function(tool) for tool in self.tools or ()] or None}
        if choice is not None and (fields["tools"] or choice.type in ("any", "tool")):
            fields |= {"tool_choice": choice.chosen(), "parallel_tool_calls": not choice.disable_parallel_tool_use}
        if config.format is not None:
            schema = ResponseSchema.model_validate({"name": "output", "schema": config.format.schema_})
            fields["response_format"] = ResponseFormat(type="json_schema", json_schema=schema)
        if thinking is not None:
            effort = "none" if thinking.type == "disabled" else config.effort or "medium"
            fields |= {"reasoning_effort": effort, "include_reasoning": thinking.display != "omitted"}
            fields["thinking_token_budget"] = thinking.budget_tokens
        elif config.effort is not None:
            fields["reasoning_effort"] = config.effort
        if turns.last["role"] == "assistant":
            if "tool_calls" in turns.last:
                raise RequestError("messages: the last message calls a tool: send the tool_result in a further message")
            fields |= {"add_generation_prompt": False, "continue_final_message": True}
        return self.as_body(ChatBody, **fields)


class MessagesBody(CountBody):
    """POST /v1/messages."""

    stop_sequences: Annotated[list[Stop], Field(max_length=FEW_STOPS)] | None = None
    metadata: Metadata = Metadata()

    def chat(self, **fields: Any) -> ChatBody:
        return super().chat(stop=self.stop_sequences, user=self.metadata.user_id or self.user, **fields)


def as_function(tool: OfferedTool) -> Tool:
    function = Function(name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict)
    return Tool(type="function", function=function)


def to_turns(system: str | list[dict[str, Any]] | None, messages: list[Turn]) -> Turns:
    """The messages of a chat. Raises RequestError for blocks that are not supported."""
    turns = Turns()
    if system:
        turns.say("system", *texts_of("system", system, ("text",)))
    for number, message in enumerate(messages):
        place = f"messages[{number}].content"
        blocks = [{"type": "text", "text": message.content}] if isinstance(message.content, str) else message.content
        if not blocks:
            turns.say(message.role, "")
        for index, block in enumerate(blocks):
            add_block(turns, message.role, f"{place}[{index}]", block)
    return turns


def add_block(turns: Turns, role: str, place: str, block: dict[str, Any]) -> None:
    """Add one block. The signature of a thought is not needed, and whether a tool failed its result says."""
    kind = kind_of(place, block)
    if kind == "text":
        turns.say(role, field_of(place, block, "text"))
    elif kind == "thinking" and role == "assistant":
        turns.think(field_of(place, block, "thinking"))
    elif kind == "tool_use" and role == "assistant":
        called = field_of(place, block, "input", dict)
        turns.call(field_of(place, block, "id"), field_of(place, block, "name"), called)
    elif kind == "tool_result" and role == "user":
        texts = texts_of(f"{place}.content", block.get("content") or "", ("text",))
        turns.answer(f"{place}.tool_use_id", field_of(place, block, "tool_use_id"), texts)
    else:
        raise RequestError(f"{place}: {shown(kind)} is not supported in a message of this role: leave it out")
