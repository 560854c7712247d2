"""Structured outputs over HTTP: OpenAI's and vLLM's fields, with the real openai client."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

openai = pytest.importorskip("openai", reason="needs the openai package")

MESSAGES: list[Any] = [{"role": "user", "content": "an order"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
SLOW = {"type": "integer", "multipleOf": 99999989}  # takes longer than a grammar may


class Size(BaseModel):
    kind: Literal["small", "large"]
    count: int = Field(ge=0, le=9)


class Order(BaseModel):
    name: str = Field(max_length=5)
    sizes: list[Size] = Field(min_length=1, max_length=2)


@pytest.mark.parametrize("speculative", [False, {"grow": "dyspec"}, {"grow": "topk", "merge": "gsd"}])
def test_parse_returns_the_pydantic_object(client: Any, speculative: object) -> None:
    for seed in range(2):
        asked = {"messages": MESSAGES, "response_format": Order, "seed": seed, "max_tokens": 400}
        answer = client.chat.completions.parse(model="tiny", **asked, extra_body={"speculative": speculative})
        order = answer.choices[0].message.parsed
        assert isinstance(order, Order) and answer.choices[0].finish_reason == "stop"


OBJECT = r'\{\s*"a"\s*:\s*[12]\s*\}'
BIASED = {"repetition_penalty": 1.3, "logit_bias": {"70": 50}, "top_p": 0.9}
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        OBJECT,
    ),
    "json": ({"structured_outputs": {"json": SCHEMA}}, OBJECT),
    "json text": ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, OBJECT),
    "regex": ({"structured_outputs": {"regex": "[ab]{3}c"}}, "[ab]{3}c"),
    "choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    "grammar": ({"structured_outputs": {"grammar": 'root ::= "x" ("y" | "z") "!"'}}, "x[yz]!"),
    "guided_json": ({"guided_json": SCHEMA}, OBJECT),
    "guided_regex": ({"guided_regex": "[ab]{3}c"}, "[ab]{3}c"),
    "guided_choice": ({"guided_choice": ["yes", "no"]}, "yes|no"),
    "guided_grammar": ({"guided_grammar": 'start: "x" "y"'}, "xy"),
    "with penalties and a bias": ({"structured_outputs": {"regex": "[ab]{9}c"}} | BIASED, "[ab]{9}c"),
    "with a longer minimum": ({"structured_outputs": {"regex": "[ab]{3}"}, "min_tokens": 50}, "[ab]{3}"),
}


@pytest.mark.parametrize("name", FORMS)
def test_each_field_gives_texts_of_its_form(client: Any, name: str) -> None:
    fields, form = FORMS[name]
    answer = client.completions.create(
        model="tiny", prompt="x", max_tokens=200, n=3, logprobs=2, seed=5, extra_body=fields
    )
    for choice in answer.choices:
        assert re.fullmatch(form, choice.text) and choice.finish_reason == "stop"
        assert len(choice.logprobs.tokens) >= 1
    chunks = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=200, stream=True, extra_body=fields
    )
    assert re.fullmatch(form, "".join(chunk.choices[0].delta.content or "" for chunk in chunks))


def test_any_object(client: Any) -> None:
    """The text may be cut by max_tokens, but it begins as an object."""
    form = {"type": "json_object"}
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=30, response_format=form)
    text = answer.choices[0].message.content
    assert text.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        json.loads(text)


def test_a_stop_string_ends_a_text_before_its_form_is_complete(client: Any) -> None:
    fields = {"structured_outputs": {"regex": "ab{5}c"}}
    answer = client.completions.create(model="tiny", prompt="x", max_tokens=50, stop="bb", extra_body=fields)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("a", "stop")


def test_a_form_that_takes_too_long_disturbs_nobody(client: Any) -> None:
    """Several at once, more than there are processes; other requests are answered, also those with forms."""

    def ask(fields: dict[str, Any]) -> str:
        try:
            answer = client.completions.create(model="tiny", prompt="x", max_tokens=9, extra_body=fields)
        except openai.BadRequestError as error:
            return str(error)
        return str(answer.choices[0].text)

    with ThreadPoolExecutor(8) as threads:
        hostile = [threads.submit(ask, {"guided_json": {**SLOW, "title": str(number)}}) for number in range(3)]
        others = [threads.submit(ask, {"guided_choice": ["yes", "no"]}), threads.submit(ask, {"min_tokens": 9})]
        assert others[0].result() in ("yes", "no") and others[1].result()
        assert all("did not finish within" in each.result() or "ended" in each.result() for each in hostile)
