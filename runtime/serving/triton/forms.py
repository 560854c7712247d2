"""The settings of a Triton request that demand the form of its text: those of the HTTP server.

`serving/openai/forms.py` checks the same fields for HTTP, with a library that Triton's Python need not have. A test
compares both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....models.errors import RequestError, shown
from ...sampling.structured import StructuredOutput
from ..json_text import parse

GUIDED = ("json", "regex", "choice", "grammar")  # vLLM's older names of these fields, with "guided_" before them
MAX_NAME = 64  # characters of a schema's name
SCHEMA_FIELDS: dict[str, type] = {"name": str, "schema": dict, "description": str, "strict": bool}
TYPES = ("text", "json_object", "json_schema")


def whole_object(value: Any) -> dict[str, Any] | None:
    """null, or an object or its JSON text"""
    content = parse(value) if isinstance(value, str) else value
    if not isinstance(content, dict | None):
        raise ValueError(value)
    return content


def schema(value: Any) -> dict[str, Any] | str | None:
    """null, or a JSON schema or its text"""
    if not isinstance(value, dict | str | None):
        raise ValueError(value)
    return value


def choices(value: Any) -> list[str] | None:
    """null, or a list of texts or its JSON text"""
    content = parse(value) if isinstance(value, str) else value
    if not isinstance(content, list | None) or not all(isinstance(each, str) for each in content or ()):
        raise ValueError(value)
    return content


def pattern(value: Any) -> str | None:
    """null or text"""
    if not isinstance(value, str | None):
        raise ValueError(value)
    return value


FORMS = {
    "response_format": whole_object,
    "structured_outputs": whole_object,
    "guided_json": schema,
    "guided_regex": pattern,
    "guided_choice": choices,
    "guided_grammar": pattern,
}


def demanded_form(values: Mapping[str, Any]) -> StructuredOutput | None:
    """The form that these settings demand, by any of its names. Raises RequestError."""
    given = {name: values[f"guided_{name}"] for name in GUIDED if values.get(f"guided_{name}") is not None}
    outputs, form = values.get("structured_outputs"), values.get("response_format")
    demanded = [] if outputs is None else [structured_outputs(outputs)]
    demanded += [structured_outputs(given)] if given else []
    if form is not None and (of_format := response_format(form)) is not None:
        demanded.append(of_format)
    if len(demanded) > 1:
        raise RequestError("response_format, structured_outputs and guided_… demand two forms: send one of them")
    return demanded[0] if demanded else None


def structured_outputs(content: Mapping[str, Any]) -> StructuredOutput:
    """vLLM's `structured_outputs`."""
    kinds: dict[str, type | tuple[type, ...]] = {"json": (dict, str), "json_object": bool, "choice": list}
    given = only("structured_outputs", content, kinds | {"regex": str, "grammar": str})
    return StructuredOutput(**given)


def response_format(content: Mapping[str, Any]) -> StructuredOutput | None:
    """OpenAI's `response_format`; None for any text."""
    given = only("response_format", content, {"type": str, "json_schema": dict})
    kind, described = given.get("type"), given.get("json_schema")
    if kind not in TYPES:
        raise RequestError(f"response_format.type must be one of {', '.join(TYPES)}, not {shown(kind)}")
    if (kind == "json_schema") != (described is not None):
        raise RequestError("response_format: the type json_schema needs json_schema, and no other type has it")
    if described is None:
        return StructuredOutput(json_object=True) if kind == "json_object" else None
    wanted = only("response_format.json_schema", described, SCHEMA_FIELDS)
    if not 1 <= len(wanted.get("name", "")) <= MAX_NAME or "schema" not in wanted:
        raise RequestError(f"response_format.json_schema needs a name of at most {MAX_NAME} characters, and a schema")
    return StructuredOutput(json=wanted["schema"])


def only(where: str, content: Mapping[str, Any], kinds: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any]:
    """The fields of an object that are not null. Raises RequestError for a field of another name or type."""
    given = {name: value for name, value in content.items() if value is not None}
    for name, value in given.items():
        if name not in kinds:
            raise RequestError(f"{where}: {shown(name)} is no field of it; it has {', '.join(kinds)}")
        if not isinstance(value, kinds[name]):
            raise RequestError(f"{where}.{name} has a wrong type: {shown(value)}")
    return given
