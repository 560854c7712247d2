"""The bodies of the HTTP endpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator
from pydantic_core import PydanticKnownError

from ....models.errors import ConfigError, RequestError
from ...llm import Speculation
from ...prompt import Prompt, is_batch
from ...sampling.params import LARGEST_COUNT, MAX_LOGPROBS, SamplingParams
from ...speculation.config import SpeculativeConfig
from ...text.conversation import MAX_MESSAGES, ChatSettings, Role, text_of
from ...text.infill import Infill
from ...text.tools import MAX_TOOLS
from ..body import Body, SamplingBody, Strict, TokenIds, User
from .tool_use import Tool, ToolChoice, Tools

# Known fields that never change the text.
IGNORED = frozenset(("cache_prompt", "id_slot", "metadata", "prediction", "request_id", "samplers", "service_tier"))
IGNORED |= {"prompt_cache_key", "prompt_cache_retention", "store"}
# Unsupported fields with their neutral values: the defaults of OpenAI, vLLM and llama.cpp, which many clients send.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "early_stopping": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "grammar": ("",),
    "length_penalty": (1,),
    "mirostat": (0,),
    "modalities": (["text"],),
    "priority": (0,),
    "repeat_penalty": (1,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True, False),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
}
MAX_CHOICES = 128  # OpenAI's limit of n
MAX_PROMPTS = 4096  # as many as a conversation may have messages
MAX_PARTS = 4 * MAX_MESSAGES  # parts and tool calls of all messages of a body together
COMPLETION_TOKENS = 16  # the default max_tokens of OpenAI's /v1/completions
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
SWITCHES = ("enable_thinking", "thinking")  # variables of chat templates: Qwen's and SmolLM's, DeepSeek's


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


class StreamOptions(Strict):
    """What the chunks of a stream have beside the text."""

    include_usage: bool = False  # a last chunk has usage and metrics
    continuous_usage_stats: bool = False  # with include_usage: every chunk has the usage so far
    include_pieces: bool = False  # of this server: the text in pieces, and which of them the draft proposed
    include_obfuscation: bool = False  # no effect; it pads the events of OpenAI's own servers


class ModelBody(Body):
    """A body that may name the model."""

    ignored = IGNORED
    neutral = NEUTRAL

    model: Annotated[str | None, AfterValidator(lambda name: name or None)] = Field(
        None, description='default, also of "" as llama.vim sends it: this server\'s model'
    )


class GenerationBody(SamplingBody, ModelBody, ABC):
    """The fields that both endpoints share."""

    null_counts = frozenset({"speculative"})  # null turns speculation off

    n: int = Field(1, ge=1, le=MAX_CHOICES, description="choices per prompt; choice i uses seed + i")
    stream_options: StreamOptions = StreamOptions()
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="alternatives per token of the prompt; not in streams"
    )
    safety_identifier: User | None = Field(None, description="OpenAI's newer name for user")
    # Of this server only.
    speculative: Literal[False] | dict[str, Any] | None = Field(
        None, description="SpeculativeConfig's fields for this request; false or null for plain decoding"
    )

    @field_validator("speculative", mode="before")
    @classmethod
    def _false_alone_is_false(cls, value: Any) -> Any:
        if value == 0 and value is not False:  # Literal[False] accepts 0, too
            raise ValueError("send false, null, or an object of SpeculativeConfig's fields")
        return value

    @property
    def token_limit(self) -> int | None:
        """The most tokens to generate; None for the API's default."""
        return self.max_tokens

    @property
    def num_choices(self) -> int:
        """The number of choices to generate for each prompt; the answer has the `n` best ones."""
        return self.n

    @property
    @abstractmethod
    def differs(self) -> bool:
        """Whether the answer's text is not the generated text."""

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """SamplingParams.logprobs."""

    @property
    def num_prompt_logprobs(self) -> int | None:
        """SamplingParams.prompt_logprobs."""
        return self.prompt_logprobs

    @property
    def client(self) -> str | None:
        """The client that the body names, if any."""
        return self.user or self.safety_identifier

    def check(self) -> None:
        """Raises RequestError for fields that contradict each other."""
        if not self.stream and self.stream_options != StreamOptions():
            raise RequestError("stream_options needs stream to be true")
        if self.stream_options.include_pieces and self.differs:
            raise RequestError("include_pieces shows generated text as it is: leave out echo and tools")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs cannot be streamed: leave out one of them")

    def sampling_params(self, default_max_tokens: int) -> SamplingParams:
        """Raises RequestError for values out of range."""
        limit = default_max_tokens if self.token_limit is None else self.token_limit
        logprobs, prompt_logprobs = self.num_logprobs, self.num_prompt_logprobs
        return SamplingParams(**self.sampling(), max_tokens=limit, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def speculation(self) -> Speculation:
        """The request's settings of speculation. Raises RequestError or ConfigError."""
        if "speculative" not in self.model_fields_set:
            return "own"
        return speculative_config(self.speculative) if isinstance(self.speculative, dict) else None


class CompletionBody(GenerationBody):
    """POST /v1/completions. prompt: one or several texts or lists of token ids."""

    ignored = IGNORED | {"include_reasoning"}
    neutral = {**NEUTRAL, "add_special_tokens": (True,)}  # noqa: RUF012 - as the base class declares it
    default_tokens: ClassVar[int | None] = COMPLETION_TOKENS  # None: as many as there is room for

    suffix: str = Field("", description="the text stands between the prompt and this, for models that infill")
    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
    )
    max_tokens: int | None = Field(
        None, ge=0, le=LARGEST_COUNT, description="default 16, as OpenAI's; 0 reads the prompt alone"
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = Field(False, description="the text begins with the prompt, whose tokens then have logprobs, too")
    best_of: int | None = Field(
        None, ge=1, le=MAX_CHOICES, description="generate this many choices and return the n most probable ones"
    )

    @property
    def differs(self) -> bool:
        return self.echo

    @property
    def num_logprobs(self) -> int | None:
        return 0 if self.logprobs is None and self.num_choices > self.n else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        if self.prompt_logprobs is not None:
            return self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            return self.logprobs
        return 0 if self.max_tokens == 0 else None

    @property
    def num_choices(self) -> int:
        return max(self.best_of or 1, self.n)

    @property
    def prompts(self) -> list[Prompt | Infill]:
        prompt = cast(Prompt | list[Prompt], self.prompt)
        prompts = cast(list[Prompt], prompt) if prompt and is_batch(prompt) else [cast(Prompt, prompt)]
        return [Infill(each, self.suffix) if self.suffix and isinstance(each, str) else each for each in prompts]

    def check(self) -> None:
        super().check()
        if self.suffix and (self.echo or not all(isinstance(prompt, Infill) for prompt in self.prompts)):
            raise RequestError("suffix is for a prompt of text, without echo: leave one of them out")
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError(f"best_of must be at least n, which is {self.n}, not {self.best_of}")
        if self.echo and None not in (self.logprobs, self.prompt_logprobs) and self.logprobs != self.prompt_logprobs:
            raise RequestError(
                "echo shows the prompt with logprobs alternatives: send prompt_logprobs with this number"
            )
        if self.stream and self.num_choices > self.n:
            raise RequestError("best_of cannot be streamed, because the best choices are known at the end")


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
    reasoning_effort: Effort | None = Field(
        None, description="none: the model does not think; others turn thinking on, and the chat template reads them"
    )
    thinking_token_budget: int | None = Field(
        None, ge=0, le=LARGEST_COUNT, description="after so many tokens the thought ends; 0: there is none"
    )
    include_reasoning: bool = Field(True, description="false: the thought is left out of the answer")
    tools: Tools | None = None
    tool_choice: ToolChoice | None = Field(None, description="by default auto, if there are tools")
    parallel_tool_calls: bool = Field(True, description="false: at most one call")

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def differs(self) -> bool:
        return self.echo or bool(self.tools)

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def conversation(self) -> list[dict[str, Any]]:
        return conversation(self.messages)

    @property
    def echoed(self) -> str | None:
        """The text before the answer's own."""
        if not self.echo or self.messages[-1].role != "assistant":
            return None
        (last,) = conversation(self.messages[-1:])
        return text_of("messages[-1]", last.get("content", ""))

    def settings(self, told: bool) -> ChatSettings:
        """told: whether the model is told of the tools. Raises RequestError."""
        effort = self.reasoning_effort
        thinks = {} if effort is None else {"reasoning_effort": effort, **dict.fromkeys(SWITCHES, effort != "none")}
        variables = {**thinks, **self.chat_template_kwargs}
        tools = self.tools if told else None
        return chat_settings(self.add_generation_prompt, self.continue_final_message, variables, tools)

    @property
    def thought_budget(self) -> int | None:
        """The most tokens of a thought; None for any number."""
        told = any(self.chat_template_kwargs.get(name) for name in SWITCHES)
        return 0 if self.reasoning_effort == "none" and not told else self.thinking_token_budget

    @property
    def continued(self) -> str | None:
        """The text that the answer continues, if it continues a message."""
        return text_of("messages[-1]", self.messages[-1].content or "") if self.continue_final_message else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise RequestError("max_completion_tokens is max_tokens by another name: send one of them")


def chat_settings(
    begins: bool, continues: bool, variables: Mapping[str, Any], tools: list[Tool] | None
) -> ChatSettings:
    """How a conversation becomes a prompt that tells of these tools, by the fields of a body. Raises RequestError."""
    hidden = {"function": {"strict"}}  # it is meant for the server
    told = [tool.model_dump(exclude=hidden, exclude_none=True) for tool in tools or ()]
    return ChatSettings(begins, continues, variables, told)


def conversation(messages: list[Message]) -> list[dict[str, Any]]:
    """The messages as Python dictionaries."""
    return [message.model_dump(exclude_none=True) for message in messages]


def speculative_config(values: Mapping[str, Any]) -> SpeculativeConfig:
    """A SpeculativeConfig from JSON. Raises RequestError."""
    try:
        return SpeculativeConfig(**values)
    except ConfigError as error:
        raise RequestError(f"speculative: {error}") from error
