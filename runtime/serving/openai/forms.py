"""The fields of a body that demand the form of the text: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from ....models.errors import RequestError
from ...sampling.structured import StructuredOutput

MAX_NAME = 64  # characters of a schema's name


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
