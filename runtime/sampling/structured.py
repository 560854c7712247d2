"""StructuredOutput: the form that a request demands of its text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from math import isfinite
from typing import Any

from ...models.errors import RequestError, shown

MAX_FORM = 1 << 16  # characters of a schema, a regular expression, a grammar, or all choices
MAX_CHOICES = 1024
SURE_DIGITS = 15  # a decimal of so many characters is the double that is nearest to it, as repr writes it


class LongDecimal(float):
    """A decimal of a JSON text with more digits than a double holds. text: as it was written."""

    text: str


def parse_decimal(text: str) -> float:
    """A decimal of a JSON text; a LongDecimal if the double is another number."""
    value = float(text)
    if len(text) > SURE_DIGITS and isfinite(value) and Decimal(text) != Decimal(repr(value)):
        value = LongDecimal(value)
        value.text = text
    return value


def unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. Raises RequestError for a duplicate name, because parsers disagree which value counts."""
    content = dict(pairs)
    if len(content) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise RequestError(f"{shown(twice)} is given twice: send it once")
    return content


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form of a text, with vLLM's names. Exactly one field is set. Raises RequestError otherwise, and for a field
    of a wrong type or size.

    json: a JSON schema, as an object or as text; kept as text. json_object: any JSON object. regex: a regular
    expression that the whole text matches. choice: the text is one of these. grammar: a grammar in Lark's or GBNF's
    notation. docs/structured.md says which schemas, expressions and grammars are supported.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] = ()
    grammar: str | None = None

    def __post_init__(self) -> None:
        if type(self.json_object) is not bool:
            raise RequestError(f"json_object must be True or False, not {shown(self.json_object)}")
        if isinstance(self.choice, list):
            object.__setattr__(self, "choice", tuple(self.choice))  # only here are frozen fields normalised
        given = [field.name for field in fields(self) if getattr(self, field.name) not in (None, False, ())]
        if len(given) != 1:
            names = ", ".join(field.name for field in fields(self))
            raise RequestError(f"a structured output needs exactly one of {names}, not {', '.join(given) or 'none'}")
        if self.json is not None:
            object.__setattr__(self, "json", schema_text(self.json))
        if isinstance(self.choice, tuple) and len(self.choice) > MAX_CHOICES:
            raise RequestError(f"choice has {len(self.choice)} texts and may have {MAX_CHOICES}")
        if not isinstance(self.choice, tuple) or not all(isinstance(each, str) and each for each in self.choice):
            raise RequestError(f"choice must be a list of texts that are not empty, not {shown(self.choice)}")
        if (size := sum(map(len, self.choice))) > MAX_FORM:
            raise too_long_error("choice", size)
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise RequestError(f"{name} must be text, not {shown(getattr(self, name))}")
        if not (text := self.text):
            raise RequestError(f"{self.kind} must not be empty")
        if len(text) > MAX_FORM:
            raise too_long_error(self.kind, len(text))
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise RequestError(f"{self.kind} holds half of a surrogate pair, which is no character: send valid Unicode")

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return next(field.name for field in fields(self) if getattr(self, field.name) not in (None, False, ()))

    @property
    def text(self) -> str:
        """The field as text: choices as a JSON array, `json_object` as the schema of any object."""
        if self.choice:
            return json.dumps(self.choice)
        return '{"type": "object"}' if self.json_object else str(self.json or self.regex or self.grammar or "")


@dataclass(frozen=True, slots=True)
class AnswerWithCalls(StructuredOutput):
    """The form of an answer that calls tools, made by this server.

    rules: in Lark's notation. schemas: the name of a rule, the place of its schema in the request, and the schema as
    text. begins, opens: where JSON stands in the text, see JsonGuard.
    """

    rules: str = ""
    schemas: tuple[tuple[str, str, str], ...] = ()
    begins: bytes = b""
    opens: bytes = b""

    def __post_init__(self) -> None:
        if len(self.text) > MAX_FORM:
            raise too_long_error("tools and response_format together", len(self.text))

    @property
    def kind(self) -> str:
        return "tools"

    @property
    def text(self) -> str:
        return "\n".join([self.rules, *(schema for _, _, schema in self.schemas)])


def too_long_error(kind: str, size: int) -> RequestError:
    return RequestError(f"{kind} has {size} characters and may have {MAX_FORM}: shorten it")


def schema_text(schema: Any, place: str = "") -> str:
    """A JSON schema as text. place: of the schema in the request. Raises RequestError if it is no JSON object, and for
    a number that was changed when it was read."""
    if isinstance(schema, str) and len(schema) > MAX_FORM:
        raise too_long_error("json", len(schema))
    try:
        content = schema
        if isinstance(schema, str):
            content = json.loads(schema, object_pairs_hook=unambiguous, parse_float=parse_decimal)
        if not isinstance(content, Mapping):
            raise RequestError(f"json must be a JSON schema, an object, not {shown(content)}")
        for inside, number in numbers_in(content, place):
            if isinstance(number, LongDecimal):
                raise RequestError(f"{inside}: {number.text:.60} has more digits than a double holds: shorten it")
        return json.dumps(content, allow_nan=False)
    except RequestError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"json must be a JSON schema, but is no valid JSON ({shown(str(error))})") from error


def numbers_in(value: Any, place: str) -> Iterator[tuple[str, int | float]]:
    """The numbers of a JSON value, with their places."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield place, value
    elif isinstance(value, (list, Mapping)):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from numbers_in(each, at(place, key))


def at(place: str, *keys: str | int) -> str:
    """The place of a value inside another, as in a program: `properties.id.enum[0]`."""
    for key in keys:
        place += f"[{key}]" if isinstance(key, int) else f"{'.' if place else ''}{key:.100}"
    return place
