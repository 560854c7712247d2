"""The forms that a Triton request may demand are those of the HTTP server."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from draftwood.models.errors import RequestError
from draftwood.runtime.sampling.structured import StructuredOutput
from draftwood.runtime.serving.triton.request import parse_request

bodies = pytest.importorskip("draftwood.runtime.serving.openai.completion_body", reason="needs the [serve] extra")


SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMS: list[dict[str, Any]] = [
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}},
    {"structured_outputs": {"json_object": True}, "guided_json": None},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"structured_outputs": {"grammar": "start: /a+/"}, "response_format": {"type": "text"}},
    {"guided_json": SCHEMA},
    {"guided_regex": "a|b"},
    {"guided_choice": ["yes", "no"]},
    {"guided_grammar": "start: /a+/"},
]
NO_FORMS: list[dict[str, Any]] = [
    {"response_format": {"type": "yaml"}},
    {"response_format": {}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "text", "json_schema": {"name": "a", "schema": SCHEMA}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "", "schema": SCHEMA}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a" * 65, "schema": SCHEMA}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": "{}"}}},
    {"response_format": {"type": "json_object", "backend": "x"}},
    {"structured_outputs": {}},
    {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    {"structured_outputs": {"regex": 1}},
    {"structured_outputs": {"json_object": 1}},
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"choice": ["a", 1]}},
    {"structured_outputs": {"whitespace_pattern": " "}},
    {"guided_json": [1]},
    {"guided_json": "{"},
    {"structured_outputs": {"json": "[1]"}},
    {"guided_regex": "a", "guided_choice": ["a"]},
    {"guided_regex": "a", "response_format": {"type": "json_object"}},
    {"guided_choice": "a"},
    {"guided_grammar": ""},
]


def sent_as(way: str, settings: dict[str, Any]) -> StructuredOutput | None:
    """The form of a request with these settings."""
    tensors = {"text_input": np.array([[b"x"]], np.object_)}
    if way == "sampling_parameters":
        tensors[way] = np.array([[json.dumps(settings).encode()]], np.object_)
        settings = {}
    if way == "texts":
        settings = {
            name: json.dumps(value) if isinstance(value, dict | list) else value for name, value in settings.items()
        }
    return parse_request(tensors, settings, None).params.structured


@pytest.mark.parametrize("way", ["parameters", "texts", "sampling_parameters"])
@pytest.mark.parametrize("settings", FORMS, ids=lambda each: json.dumps(each)[:70])
def test_a_form_is_the_one_of_the_http_server(settings: dict[str, Any], way: str) -> None:
    assert sent_as(way, settings) == bodies.CompletionBody(prompt="x", **settings).structured()


@pytest.mark.parametrize("way", ["parameters", "texts", "sampling_parameters"])
@pytest.mark.parametrize("settings", NO_FORMS, ids=lambda each: json.dumps(each)[:70])
def test_what_the_http_server_refuses_is_refused(settings: dict[str, Any], way: str) -> None:
    with pytest.raises(ValueError):
        bodies.CompletionBody(prompt="x", **settings).structured()
    with pytest.raises(RequestError):
        sent_as(way, settings)
