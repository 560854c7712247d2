"""The fields of a request that all APIs of a server have: OpenAI's bodies and Triton's settings extend SamplingBody.

Names are OpenAI's, with vLLM's additions. A field that is left out or null keeps the default of SamplingParams. Unknown
or unsupported fields are refused by name, unless their value is neutral (asks for no change).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticKnownError

from ...models.errors import RequestError, shown
from ..sampling.params import (
    LARGEST_COUNT,
    LARGEST_SEED,
    MAX_ALLOWED_TOKENS,
    MAX_BIASES,
    MAX_STOP_LENGTH,
    MAX_STOP_TOKENS,
    REPETITION_PENALTIES,
    TEMPERATURES,
    SamplingParams,
)
from ..sampling.structured import StructuredOutput, at

MAX_NAME = 64  # characters of a schema's name
FEW_STOPS = 16  # stop strings or bad words; SamplingParams takes more
MAX_SALT = 1024  # characters
MAX_USER = 512  # characters
NO_OBJECT = "the body must be a JSON object, sent with Content-Type: application/json"
GUIDED = ("json", "regex", "choice", "grammar")  # vLLM's older names are guided_json, …
FIELD = re.compile(r"(?!(?:str|int|float|bool)$)[a-z_]+")  # pydantic lists the branches of a union among the fields


class Strict(BaseModel):
    """Strict JSON types: no "1" for 1, no 1 for true, no NaN. A field that is null counts as left out.

    Of several unknown fields only the first one is an error: those of a long body would take seconds, in which the
    event loop serves nobody.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        known = names_of(cls)
        if content.keys() <= known and None not in content.values():
            return content
        kept, unknown = {}, False
        for name, value in content.items():
            is_known = name in known
            if (is_known or not unknown) and not cls._is_neutral(name, value):
                kept[name] = value
                unknown = unknown or not is_known
        return kept

    @classmethod
    def _is_neutral(cls, name: str, value: Any) -> bool:
        return value is None


@cache
def names_of(model: type[BaseModel]) -> frozenset[str]:
    """The names of a model's fields in JSON."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


class ResponseSchema(Strict):
    """OpenAI's `json_schema`. The text always follows the schema, whatever `strict` says."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME)]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: ResponseSchema | None = None

    def structured(self) -> StructuredOutput | None:
        """None for any text. Raises RequestError."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise RequestError("response_format: the type json_schema needs json_schema, and no other type has it")
        if self.json_schema is not None:
            return StructuredOutput(json=self.json_schema.schema_)
        return StructuredOutput(json_object=True) if self.type == "json_object" else None


class StructuredOutputs(Strict):
    """vLLM's `structured_outputs`: one of the fields of StructuredOutput."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: bool = False
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    grammar: str | None = None

    def structured(self) -> StructuredOutput:
        """Raises RequestError."""
        choice = tuple(self.choice or ())
        return StructuredOutput(self.json_, self.json_object, self.regex, choice, self.grammar)


def no_long_dictionary(value: Any) -> Any:
    """Refuse too many biases before any is checked: a dictionary has no fail_fast."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        limits = {"field_type": "Dictionary", "max_length": MAX_BIASES, "actual_length": len(value)}
        raise PydanticKnownError("too_long", limits)
    return value


Stop = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_LENGTH)]
User = Annotated[str, StringConstraints(max_length=MAX_USER)]
Salt = Annotated[str, StringConstraints(min_length=1, max_length=MAX_SALT)]
Biases = Annotated[dict[str, float], BeforeValidator(no_long_dictionary), Field(max_length=MAX_BIASES)]
# Without fail_fast a wrong list would produce one error message per item.
TokenIds = Annotated[list[int], Field(fail_fast=True)]
AllowedTokens = Annotated[list[int], Field(fail_fast=True, min_length=1, max_length=MAX_ALLOWED_TOKENS)]
StopTokens = Annotated[list[int], Field(fail_fast=True, max_length=MAX_STOP_TOKENS)]


class Body(Strict):
    """A body; fields with neutral values count as left out."""

    ignored: ClassVar[frozenset[str]] = frozenset()  # known fields that never change the text
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # unsupported fields with the values that ask for nothing
    null_counts: ClassVar[frozenset[str]] = frozenset()  # fields of which null is a value

    @classmethod
    def _is_neutral(cls, name: str, value: Any) -> bool:
        if name in cls.model_fields:
            return value is None and name not in cls.null_counts
        return value is None or name in cls.ignored or any(same(value, each) for each in cls.neutral.get(name, ()))


class SamplingBody(Body):
    """The fields of every API."""

    stream: bool = False
    max_tokens: int | None = Field(None, ge=1, le=LARGEST_COUNT)
    temperature: float | None = Field(
        None, ge=0, le=TEMPERATURES[1], description=f"0 is greedy, else at least {TEMPERATURES[0]:g}"
    )
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-1, le=LARGEST_SEED, description="-1 means no seed")
    stop: Stop | Annotated[list[Stop], Field(max_length=FEW_STOPS)] | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Biases | None = Field(None, description="token id -> bias added to its logit, -100 to 100")
    # Fields that OpenAI's API does not have, with vLLM's names.
    allowed_token_ids: AllowedTokens | None = Field(None, description="all other tokens are never chosen")
    bad_words: Annotated[list[Stop], Field(max_length=FEW_STOPS)] | None = Field(None, description="never generated")
    include_stop_str_in_output: bool = Field(False, description="the text keeps the stop string that ended it")
    skip_special_tokens: bool = Field(True, description="special tokens have no text")
    top_k: int | None = Field(None, ge=-1, le=LARGEST_COUNT, description="0 or -1 keeps all tokens")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1])
    min_tokens: int | None = Field(None, ge=0, le=LARGEST_COUNT)
    stop_token_ids: StopTokens | None = None
    ignore_eos: bool | None = None
    user: User | None = Field(None, description="the user of the request; waiting users are taken in turn")
    cache_salt: Salt | None = Field(None, description="cache rows are shared only among requests with an equal salt")
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = Field(None, description="structured_outputs.json by an older name")
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None

    def sampling(self) -> dict[str, Any]:
        """The fields of SamplingParams that the body sets, but those about amounts. Raises RequestError."""
        names = {field.name for field in fields(SamplingParams)} & self.model_fields_set
        values = {name: getattr(self, name) for name in names - {"logprobs", "max_tokens", "n", "prompt_logprobs"}}
        if values.get("top_k") == -1:
            values["top_k"] = 0
        if values.get("seed") == -1:
            values["seed"] = None
        return values | {"logit_bias": biases(self.logit_bias or {}) or None, "structured": self.structured()}

    def structured(self) -> StructuredOutput | None:
        """The form that the body demands, by any of its names. Raises RequestError."""
        given = {name: getattr(self, f"guided_{name}") for name in GUIDED}
        older = StructuredOutputs(**given) if any(value is not None for value in given.values()) else None
        forms = [each.structured() for each in (self.response_format, self.structured_outputs, older) if each]
        demanded = [form for form in forms if form is not None]
        if len(demanded) > 1:
            raise RequestError("response_format, structured_outputs and guided_… demand two forms: send one of them")
        return demanded[0] if demanded else None


def same(value: Any, neutral: Any) -> bool:
    """Whether two values are equal in JSON, where true is not 1."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def biases(given: Mapping[str, float]) -> dict[int, float]:
    """The biases by token id. Raises RequestError for names that are no token ids, and for two names of one token."""
    found: dict[int, float] = {}
    for name, bias in given.items():
        if not name.isascii() or not name.isdigit() or len(name) > 9:
            raise RequestError(f"logit_bias: {shown(name)} is not a token id")
        if (token := int(name)) in found:
            raise RequestError(f"logit_bias: token {token} is given twice: send it once")
        found[token] = bias
    return found


class Problem(NamedTuple):
    """Why a body is refused."""

    message: str
    param: str | None = None  # the field


def problem_of(errors: Sequence[Mapping[str, Any]]) -> Problem:
    """The problem of a body, by pydantic's errors. Of several, and of the branches of a union, the most specific one is
    reported: an error of a present value of the right type. What is too long was not read to its end."""
    worst = max(errors, key=lambda it: (it["type"] == "too_long", len(it["loc"]), specific(it["type"])))
    if not worst["loc"]:
        return Problem(NO_OBJECT)
    *outer, last = worst["loc"]
    names = [name for name in outer if isinstance(name, int) or FIELD.fullmatch(name)]
    if worst["type"] == "extra_forbidden":
        unknown = at("", *names, last)
        return Problem(f"{unknown} is not supported by this server: leave it out", unknown)
    if isinstance(last, int) or FIELD.fullmatch(last):
        names.append(last)
    if not names:
        return Problem(NO_OBJECT)
    return Problem(f"{at('', *names)}: {worst['msg']}", str(names[0]))


def specific(kind: str) -> int:
    """How specific a kind of pydantic's errors is; greater is more specific."""
    return 0 if kind.endswith("_type") else 1 if kind == "missing" else 2
