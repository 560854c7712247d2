"""JSON schemas: texts never contradict them, as a strict reader reads both, and what cannot be enforced is refused with
its place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from structured_models import Model

from draftwood.models.errors import RequestError
from draftwood.runtime.sampling.structured import AnswerWithCalls, StructuredOutput
from draftwood.runtime.structured import grammars as module
from draftwood.runtime.structured.json_values import digits_between

BIG = 1234567890123456789
CALL = AnswerWithCalls(
    rules='start: TEXT "<call>" f\nTEXT: /[^<]*/', schemas=(("f", "tools[0]", '{"type": "object"}'),), opens=b"<call>"
)


@pytest.fixture(scope="module")
def model(tiny_pair: Path) -> Iterator[Model]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            module, "COMPILING", module.COMPILING._replace(seconds=600.0)
        )  # the library's own limits decide here
        opened = Model(tiny_pair / "target")
        yield opened
        opened.close()


def listed(*values: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"id": {"enum": list(values)}}, "required": ["id"], **more}


# Schemas, texts that follow them, and texts that do not, of which the library alone would write some.
LITERAL: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "enum": ({"enum": [BIG, "a"]}, [str(BIG), '"a"'], [str(BIG - 21), str(BIG)[:-1]]),
    "const": ({"const": 2**53 + 1}, [str(2**53 + 1)], [str(2**53)]),
    "a list in const": ({"const": [{"a": 2**64 - 1}]}, [f'[{{"a": {2**64 - 1}}}]'], [f'[{{"a": {2**64}}}]']),
    "one number": ({"type": "integer", "minimum": 10**19 + 1, "maximum": 10**19 + 1}, [str(10**19 + 1)], [str(10**19)]),
    "a range": (
        {"type": "integer", "exclusiveMinimum": BIG, "maximum": BIG + 9},
        [str(BIG + 1), str(BIG + 9)],
        [str(BIG), str(BIG + 10)],
    ),
    "negative": ({"type": "integer", "maximum": -BIG}, [str(-BIG), str(-BIG - 1)], [str(1 - BIG), str(BIG)]),
    "from there on": ({"type": "integer", "minimum": 10**17}, [str(10**17), str(10**18 - 1)], [str(10**17 - 1), "1"]),
    "a type beside": ({"type": "string", "enum": [BIG, "a"]}, ['"a"'], [str(BIG)]),
    "wide bounds": ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, ["0", "77"], ["-1", str(2**63)]),
    "a wide decimal": ({"type": "number", "maximum": 1e308}, ["0", "-7.5"], ["1e309"]),
    "a property": (listed(BIG, 7), [f'{{"id": {BIG}}}', '{"id": 7}'], ["{}", '{"id": 8}', f'{{"id": {BIG - 21}}}']),
    "optional ones": (
        {"properties": {"a": {"const": BIG}, "b": {}, "no": False, "c": {"const": -BIG}}},
        ["{}", f'{{"a":{BIG}}}', f'{{"b": [1],"c":{-BIG}}}', f'{{ "a": {BIG}, "b": {{}}, "c": {-BIG} }}'],
        ['{"c": 1}', f'{{"c": {-BIG}, "b": 1}}', f'{{"a": {BIG},}}'],
    ),
    "through a reference": (
        {"type": ["array", "null"], "items": {"$ref": "#/$defs/x~1%79"}, "minItems": 1, "maxItems": 2}
        | {"$defs": {"x/y": {"anyOf": [{"type": "null"}, {"allOf": [listed(BIG)]}]}}},
        ["null", f'[{{"id": {BIG}}}]', f'[null, {{"id": {BIG}}}]'],
        ["[]", "[null, null, null]", '[{"id": 1}]'],
    ),
    "in a circle": (
        {"properties": {"id": {"const": BIG}, "next": {"$ref": "#"}}, "required": ["id"]},
        [f'{{"id": {BIG}, "next": {{"id": {BIG}}}}}'],
        ['{"id": 1}', f'{{"id": {BIG}, "next": {{}}}}'],
    ),
}


@pytest.mark.parametrize("name", LITERAL)
def test_numbers_that_no_double_holds_are_kept(name: str, model: Model) -> None:
    schema, right, wrong = LITERAL[name]
    assert [text for text in right if not model.takes(schema, text)] == []
    assert [text for text in wrong if model.takes(schema, text)] == []


@pytest.mark.parametrize("most", [9, 30, 4321])
def test_ranges_of_whole_numbers(most: int) -> None:
    for low, high in ((1, most), (most // 2, most), (most - 2, most + 2), (7, 10 * most)):
        pattern = re.compile(digits_between(low, high))
        found = [number for number in range(12 * most) if pattern.fullmatch(str(number))]
        assert found == list(range(low, high + 1))
    assert len(digits_between(10**17, 10**18 - 1)) < 100


# Schemas of usual tools, with a text that follows each and one that does not.
USUAL: dict[str, tuple[dict[str, Any], str, str]] = {
    **{
        f"format {each}": ({"type": "string", "format": each}, '"x y"', "1")
        for each in ("password", "binary", "path", "byte", "ipvanyaddress", "uri-reference", "regex", "int32")
    },
    "a known format": ({"type": "string", "format": "date"}, '"2026-01-31"', '"x"'),
    "no uniqueness": ({"type": "array", "items": {"type": "boolean"}, "uniqueItems": False}, "[true, true]", "[1]"),
    "conditions without a consequence": ({"if": {"type": "null"}, "not": False, "type": "null"}, "null", "1"),
    "whole numbers and others": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "1.5", "2"),
    "tagged options": (
        {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}
        | {"$defs": {each: listed(each, additionalProperties=False) for each in "ab"}},
        '{"id": "b"}',
        '{"id": "c"}',
    ),
    "one of two names": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        '{"b": 1}',
        '{"a": 1, "b": 1}',
    ),
    "oneOf beside anyOf": (
        {"anyOf": [{"minimum": 3}, {"type": "null"}], "oneOf": [{"type": "integer"}, {"type": "null"}]},
        "4",
        "2",
    ),
    "a count as a decimal": ({"type": "string", "minLength": 2.0}, '"ab"', '"a"'),
    "a schema": ({"$ref": "http://json-schema.org/draft-07/schema#"}, '{"items": {"type": "null"}}', '{"type": 1}'),
    "a reference by the schema's own name": (
        {"$id": "https://x.y/z", "$ref": "https://x.y/z#/$defs/a"} | {"$defs": {"a": {"const": 1}}},
        "1",
        "2",
    ),
    "an older exclusive bound": ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, "4", "3"),
    "settings of the library": (
        {"type": "string", "maxLength": 1, "x-guidance": {"whitespace_pattern": "x+", "lenient": True}},
        '"a"',
        '"ab"',
    ),
    "settings of the library inside": (
        {"type": "array", "items": {"x-guidance": {"item_separator": ";"}, "type": "null"}, "lark": "start: x"},
        "[null, null]",
        "[null; null]",
    ),
}


@pytest.mark.parametrize("name", USUAL)
def test_usual_schemas(name: str, model: Model) -> None:
    schema, right, wrong = USUAL[name]
    assert model.takes(schema, right) and not model.takes(schema, wrong)


REFUSED: dict[str, tuple[Any, str]] = {
    "uniqueItems": ({"properties": {"x": {"uniqueItems": True}}}, "properties.x.uniqueItems: this keyword"),
    "a definition": ({"$ref": "#/$defs/a", "$defs": {"a": {"contains": {}}}}, "$defs.a.contains: this keyword"),
    "a condition": ({"if": {}, "else": {}}, "if: this keyword"),
    "an older keyword": ({"dependencies": {"a": ["b"]}}, "dependencies: this keyword"),
    "a place elsewhere": (
        {"anyOf": [{}, {"$ref": "https://example.org/x"}]},
        "anyOf[1].$ref: 'https://example.org/x' is not",
    ),
    "no place": ({"$ref": "#/$defs/a/b/7", "$defs": {"a": {"b": [1]}}}, "$ref: '#/$defs/a/b/7' is not present"),
    "no reference": ({"$ref": 1}, "$ref: this must be text"),
    "no schema": ({"items": 1}, "items: a schema is an object"),
    "no schemas": ({"properties": []}, "properties: this must be an object"),
    "no names": ({"required": "ab"}, "required: this must be a list of names"),
    "a literal beside a name that may not be": (
        {"properties": {"a": {"const": BIG}, "b": False}, "required": ["b"]},
        "properties.a.const: a number that no double holds needs b",
    ),
    "no list": ({"anyOf": {}}, "anyOf: this must be a list"),
    "no type": ({"type": ["null", "int"]}, "type: a type is one of"),
    "no count": ({"minLength": 1.5}, "minLength: this must be a whole number"),
    "no bound": ({"minimum": "1"}, "minimum: this must be a number"),
    "overlapping options": (
        {"properties": {"a": {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]}}},
        "properties.a.oneOf: the options may hold together",
    ),
    "many options": ({"oneOf": [{"const": number} for number in range(200)]}, "oneOf: at most 128"),
    "a literal in a pattern": (
        {"patternProperties": {"x": {"const": BIG}}},
        "patternProperties.x.const: a number that no double holds is supported in properties",
    ),
    "a literal beside a keyword": ({"enum": [1, BIG], "minimum": 2}, "enum[1]: a whole number beyond 2^53 is not"),
    "a literal of no type": ({"minimum": BIG}, 'minimum: a bound beyond 2^53 needs the "type"'),
    "a literal without its property": ({**listed(BIG), "required": ["b"]}, "properties.id.enum[0]: a number that no"),
    "an empty range": ({"type": "integer", "minimum": BIG, "maximum": 7}, "minimum: no number lies between"),
    "no value of the type": ({"type": "string", "const": BIG}, "const: no value has the demanded type"),
    "too many digits": ({"const": 10**200}, "const: a whole number of more than 100 digits"),
    "a name twice": ('{"type": "string", "type": "null"}', "'type' is given twice"),
    "a long decimal": (
        '{"properties": {"a": {"minimum": 0.12345678901234567890}}}',
        "properties.a.minimum: 0.12345678901",
    ),
    "what no text follows": ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength (3) is greater"),
    "a tool": (
        AnswerWithCalls(rules="start: a | b", schemas=(("a", "tools[0]", "{}"), ("b", "tools[1]", '{"pattern": "("}'))),
        "tools[1]: ",
    ),
    "a tool's keyword": (
        AnswerWithCalls(rules="start: a", schemas=(("a", "tools[0].function.parameters", '{"items": {"not": {}}}'),)),
        "tools[0].function.parameters.items.not: this keyword",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused_with_its_place(name: str, model: Model) -> None:
    schema, reason = REFUSED[name]
    with pytest.raises(RequestError) as caught:
        model.start(schema if isinstance(schema, StructuredOutput) else StructuredOutput(json=schema))
    message = str(caught.value)
    assert reason in message and len(message) < 500
    assert "%json" not in message and "x-guidance" not in message and "coerce" not in message


NAMES: dict[str, tuple[dict[str, Any] | StructuredOutput, list[str], list[str]]] = {
    "any object": (
        StructuredOutput(json_object=True),
        ['{"a": 1, "b": {"a": 1}, "c": [{"a": 1}, {"a": ", \\"a\\": "}]}', '{"a": "b", "b": "a"}'],
        ['{"a": 1, "a": 2}', '{"b": {"a": 1, "a": 2}}', '[{"b": 1}]', '{"b": [1, {"é": 1, "é": 2}]}', '{"": 1, "": 2}'],
    ),
    "a least number": (
        {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 2},
        ['{"a": null, "b": null}', '{"\\n": null, "\\\\": null, "\\"": null}'],
        ['{"a": null, "a": null}', '{"a": null}'],
    ),
    "names of a pattern": (
        {"patternProperties": {"^a": {"const": 1}}, "type": "object"},
        ['{"a": 1, "ab": 1, "b": 2}'],
        ['{"ab": 1, "ab": 1}', '{"b": 1, "b": 2}', '{"\\u0061": 2}', '{"b\\u0061": 2}'],
    ),
    "another spelling of a property": (
        {"type": "object", "properties": {"a": {"const": 1}, "\t\x01": {"const": 2}}},
        ['{"a": 1, "\\t\\u0001": 2}', '{"\\u007f": 3, "\\u001f": 4}'],
        ['{"\\u0061": 2}', '{"\\u0041": 2}', '{"\\u0009\\u0001": 3}', '{"\\u001F": 1}', '{"\\u00e9": 1}'],
    ),
    "a call in a text": (
        CALL,
        ['"a": 1, "a": 1 {"a": 1, "a": 12345678901234567890 <call>{"a": 1, "b": {"a": 2}}'],
        ['x <call>{"a": 1, "a": 2}', '<call>{"a": 12345678901234567890}'],
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_no_object_repeats_a_name_and_a_name_has_one_spelling(name: str, model: Model) -> None:
    schema, right, wrong = NAMES[name]
    assert [text for text in right if not model.takes(schema, text)] == []
    assert [text for text in wrong if model.takes(schema, text)] == []


def test_where_no_further_name_is_left_the_text_ends_with_an_error(model: Model) -> None:
    schema = {"patternProperties": {"^[ab]$": {}}, "additionalProperties": False, "minProperties": 3}
    constraint = model.start(schema)
    with pytest.raises(RequestError, match="demands a further name"):
        for token in model.tokenizer.encode('{"a":1,"b":2,"a', add_special_tokens=False):
            assert constraint.advance(token)
        constraint.allowed()


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "integer"}, ["-1234567890123456", "-0"], ["12345678901234567", "1.0", "1e2"]),
        (
            {"type": "number"},
            ["-12345678.123456e-99", "1E+12"],
            ["99.999999999999999", "0.123456789012345", "1e400", "1e-400", "1e100"],
        ),
        ({}, ["[1e99]"], ["[1e100]", '{"a": 12345678901234567}']),
        (
            {"type": "number", "exclusiveMinimum": 0},
            ["0.00000000000001", "0.000000000000001"],
            ["0.0000000000000001", "0.0"],
        ),
        ({"const": 1e300}, ["1" + 300 * "0"], ["1" + 299 * "0"]),
        ({"const": 1.5e-20}, ["0.000000000000000000015"], ["0.00000000000000000001"]),
        ({"const": 1.0}, ["1"], ["1.5", "2"]),
        ({"const": -0.0}, ["-0"], ["1"]),
        ({"type": "integer", "const": 1.0}, ["1"], ["2"]),
    ],
    ids=str,
)
def test_the_digits_of_a_number_are_bounded(
    schema: dict[str, Any], right: list[str], wrong: list[str], model: Model
) -> None:
    assert [text for text in right if not model.takes(schema, text)] == []
    assert [text for text in wrong if model.takes(schema, text)] == []


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    assert len(set(names)) == len(names), names
    return dict(pairs)


@pytest.mark.parametrize("name", [*LITERAL, *(each for each in USUAL if each != "a schema"), "any object"])
def test_random_texts_follow_their_schemas(name: str, model: Model) -> None:
    """Against another reader of schemas, which is exact up to 2^64."""
    tables: dict[str, Any] = {**USUAL, **LITERAL, "any object": ({"type": "object"},)}
    schema = tables[name][0]
    known = {key: value for key, value in schema.items() if key != "$id"}
    if "$id" in schema:
        known["$ref"] = "#/$defs/a"
    validator = jsonschema_rs.Draft202012Validator(known) if name != "an older exclusive bound" else None
    texts = [text for seed in range(8) if (text := model.drawn(schema, seed)) is not None]
    assert texts
    for text in texts:
        value = json.loads(text, object_pairs_hook=distinct)
        assert validator is None or validator.is_valid(value), text
