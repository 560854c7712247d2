"""The fields that the bodies of /v1/completions and /v1/chat/completions share.

Names are OpenAI's, with vLLM's additions. A field that is left out or null keeps the default of SamplingParams. Unknown
or unsupported fields are refused by name, unless their value is neutral (asks for no change).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, StringConstraints, field_validator
from pydantic_core import PydanticKnownError

from ....models.errors import RequestError, shown
from ...llm import Speculation
from ...sampling.params import (
    LARGEST_COUNT,
    LARGEST_SEED,
    MAX_ALLOWED_TOKENS,
    MAX_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_LENGTH,
    MAX_STOP_TOKENS,
    REPETITION_PENALTIES,
    TEMPERATURES,
    SamplingParams,
)
from ...sampling.structured import StructuredOutput
from ...speculation.bounds import check_bounds
from ...speculation.config import SpeculativeConfig
from .forms import ResponseFormat, Strict, StructuredOutputs

# Known fields that never change the text.
IGNORED = {
    "cache_prompt",
    "include_reasoning",
    "metadata",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "service_tier",
    "store",
}
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
MAX_STOPS = 16
MAX_SALT = 1024
GUIDED = ("json", "regex", "choice", "grammar")  # vLLM's older names are guided_json, …

MAX_USER = 512  # characters

Stop = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_LENGTH)]
User = Annotated[str, StringConstraints(max_length=MAX_USER)]


def no_long_dictionary(value: Any) -> Any:
    """Refuse too many biases before any is checked: a dictionary has no fail_fast."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        limits = {"field_type": "Dictionary", "max_length": MAX_BIASES, "actual_length": len(value)}
        raise PydanticKnownError("too_long", limits)
    return value


Biases = Annotated[dict[str, float], BeforeValidator(no_long_dictionary), Field(max_length=MAX_BIASES)]
# Without fail_fast a wrong list would produce one error message per item.
TokenIds = Annotated[list[int], Field(fail_fast=True)]
AllowedTokens = Annotated[list[int], Field(fail_fast=True, min_length=1, max_length=MAX_ALLOWED_TOKENS)]


class Body(Strict):
    """A body; fields with neutral values count as left out. neutral: unsupported fields with these values."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL

    @classmethod
    def _is_neutral(cls, name: str, value: Any) -> bool:
        if name == "speculative":
            return False  # null is not neutral: it turns speculation off
        if value is None or name in cls.model_fields:
            return value is None
        return name in IGNORED or any(same(value, each) for each in cls.neutral.get(name, ()))


class StreamOptions(Strict):
    """include_usage: send a last chunk with usage and metrics. continuous_usage_stats: additionally, the usage so far
    in every other chunk. include_pieces, of this server only: a chunk's text in pieces, and which of them the draft
    proposed. include_obfuscation has no effect; it pads the events of OpenAI's own servers."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_pieces: bool = False
    include_obfuscation: bool = False


class GenerationBody(Body, ABC):
    """The fields that both APIs share."""

    model: str | None = Field(None, description="default: this server's model")
    n: int = Field(1, ge=1, le=MAX_CHOICES, description="choices per prompt; choice i uses seed + i")
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = Field(None, ge=1, le=LARGEST_COUNT)
    temperature: float | None = Field(
        None, ge=0, le=TEMPERATURES[1], description=f"0 is greedy, else at least {TEMPERATURES[0]:g}"
    )
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-1, le=LARGEST_SEED, description="-1 means no seed")
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Biases | None = Field(None, description="token id -> bias added to its logit, -100 to 100")
    # Fields that OpenAI's API does not have, with vLLM's names.
    allowed_token_ids: AllowedTokens | None = Field(None, description="all other tokens are never chosen")
    bad_words: Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = Field(None, description="never generated")
    include_stop_str_in_output: bool = Field(False, description="the text keeps the stop string that ended it")
    skip_special_tokens: bool = Field(True, description="special tokens have no text")
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="alternatives per token of the prompt; not in streams"
    )
    top_k: int | None = Field(None, ge=-1, le=LARGEST_COUNT, description="0 or -1 keeps all tokens")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1])
    min_tokens: int | None = Field(None, ge=0, le=LARGEST_COUNT)
    stop_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None
    user: User | None = Field(None, description="the user of the request; waiting users are taken in turn")
    safety_identifier: User | None = Field(None, description="OpenAI's newer name for user")
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=MAX_SALT)] | None = Field(
        None, description="cache rows are shared only among requests with an equal salt"
    )
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = Field(None, description="structured_outputs.json by an older name")
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None
    # Fields of this server only.
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
    def client(self) -> str | None:
        """The client that the body names, if any."""
        return self.user or self.safety_identifier

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """SamplingParams.logprobs."""

    @property
    def num_prompt_logprobs(self) -> int | None:
        """SamplingParams.prompt_logprobs."""
        return self.prompt_logprobs

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
        names = {field.name for field in fields(SamplingParams)} & self.model_fields_set
        values = {name: getattr(self, name) for name in names - {"logprobs", "max_tokens", "n"}}
        limit = default_max_tokens if self.token_limit is None else self.token_limit
        if values.get("top_k") == -1:
            values["top_k"] = 0
        if values.get("seed") == -1:
            values["seed"] = None
        values["logit_bias"] = biases(self.logit_bias or {}) or None
        values["structured"] = self.structured()
        values["prompt_logprobs"] = self.num_prompt_logprobs
        return SamplingParams(**values, max_tokens=limit, logprobs=self.num_logprobs)

    def structured(self) -> StructuredOutput | None:
        """The form that the body demands, by any of its names. Raises RequestError."""
        given = {name: getattr(self, f"guided_{name}") for name in GUIDED}
        older = StructuredOutputs(**given) if any(value is not None for value in given.values()) else None
        forms = [each.structured() for each in (self.response_format, self.structured_outputs, older) if each]
        demanded = [form for form in forms if form is not None]
        if len(demanded) > 1:
            raise RequestError("response_format, structured_outputs and guided_… demand two forms: send one of them")
        return demanded[0] if demanded else None

    def speculation(self) -> Speculation:
        """The request's settings of speculation. Raises RequestError or ConfigError."""
        if "speculative" not in self.model_fields_set:
            return "own"
        return speculative_config(self.speculative) if isinstance(self.speculative, dict) else None


def same(value: Any, neutral: Any) -> bool:
    """Whether two values are equal in JSON, where true is not 1."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def speculative_config(values: Mapping[str, Any]) -> SpeculativeConfig:
    """A SpeculativeConfig from JSON. Raises RequestError, or ConfigError if it is not lossless."""
    known = {field.name for field in fields(SpeculativeConfig)}
    unknown = next((name for name in values if name not in known), None)
    if unknown is not None:
        name = f"speculative.{unknown:.100}"
        raise RequestError(f"{name} is unknown: it takes the fields of SpeculativeConfig")
    check_bounds(values, RequestError, "speculative.")
    return SpeculativeConfig(**values)


def biases(given: Mapping[str, float]) -> dict[int, float]:
    """The biases by token id. Raises RequestError for names that are no token ids, and for two names of one token."""
    found: dict[int, float] = {}
    for name, bias in given.items():
        token = named_token(name)
        if token in found:
            raise RequestError(f"logit_bias: token {token} is given twice: send it once")
        found[token] = bias
    return found


def named_token(name: str) -> int:
    """The token id that is a name in a JSON object. Raises RequestError."""
    if not name.isascii() or not name.isdigit() or len(name) > 9:
        raise RequestError(f"logit_bias: {shown(name)} is not a token id")
    return int(name)
