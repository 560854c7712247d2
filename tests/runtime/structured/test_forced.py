"""What a grammar forces is what usual texts have next, and no proposal changes the grammar's own state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structured_models import Model

from draftwood.runtime.sampling.structured import StructuredOutput

NAMED = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
CALL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"const": "get_weather"},
        "places": {"type": "array", "items": {**NAMED, "additionalProperties": False}, "minItems": 1},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["name", "places", "unit"],
    "additionalProperties": False,
}
ANSWER = {"name": "get_weather", "places": [{"name": "Ulm, Bonn"}], "unit": "celsius"}
STYLES = {
    "usual": json.dumps(ANSWER),
    "dense": json.dumps(ANSWER, separators=(",", ":")),
    "indented": json.dumps(ANSWER, indent=4),
    "by tabs": json.dumps(ANSWER, indent="\t"),
}


@pytest.fixture(scope="module")
def model(tiny_pair: Path) -> Iterator[Model]:
    model = Model(tiny_pair / "target")
    yield model
    model.close()


def foreseen(model: Model, form: dict[str, Any] | StructuredOutput, text: str, begun: str) -> str:
    """What is foreseen after the beginning of a text, which must be left as it was."""
    constraint = model.start(form)
    for token in model.tokenizer.encode(begun, add_special_tokens=False):
        assert constraint.advance(token)
    found = model.tokenizer.decode(constraint.forced())
    for token in model.tokenizer.encode(text[len(begun) :], add_special_tokens=False):
        assert constraint.allowed()[token] and constraint.advance(token)
    return found


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("after", "next_choice"),
    [('"name": "get', "Ulm"), ('Bonn"', '"'), ('"unit"', "celsius"), ('"c', "\0")],
)
def test_the_run_goes_on_with_the_blanks_of_the_text(model: Model, style: str, after: str, next_choice: str) -> None:
    """It ends where a value is free, or where an array may go on."""
    text = STYLES[style]
    if style == "dense":
        after = after.replace(" ", "")
    begun = text[: text.index(after) + len(after)]
    rest = text[len(begun) :]
    expected = rest.split(next_choice)[0] if next_choice != '"' else rest[: rest.index("}") + 1]
    found = foreseen(model, CALL, text, begun)
    assert found and (expected.startswith(found))
    assert len(found) >= min(len(expected), 100)


def test_a_choice_has_no_run(model: Model) -> None:
    text = STYLES["usual"]
    for begun in ("", text[: text.index("lm, B")], text[: text.index(", Bonn") + 1], text[: text.index("celsius")]):
        assert foreseen(model, CALL, text, begun) == ""


def test_forms_that_are_no_json(model: Model) -> None:
    number = StructuredOutput(regex="order number: [0-9]+")
    assert foreseen(model, number, "order number: 7", "ord").startswith("er number:")
    several = StructuredOutput(choice=["positively", "possibly", "no"])
    assert foreseen(model, several, "possibly", "poss") == "ibly"
    assert foreseen(model, several, "possibly", "pos") == ""
