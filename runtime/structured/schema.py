"""Checks a client's JSON schema and brings it into the form that llguidance reads: the one place between the two.

llguidance reads numbers as doubles, an unknown `format` as an error and its own settings out of a schema. So a schema
is read here first: what the standard calls an annotation is left out, what the library cannot enforce is refused with
its place, references lead to a list of definitions of our own, and whole numbers that no double holds are written
literally. An answer may be narrower than its schema, never wider.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple
from urllib.parse import unquote

from ...models.errors import RequestError, shown
from ..sampling.structured import at, numbers_in
from .json_values import EXACT, HIGH, LOW, TYPES, bound, digits_between, exclude, fits, is_large, names_of

MIN_DIGITS = 16  # of a number without a longer one in its schema: enough for EXACT
MAX_DIGITS = 100  # of a literal number
MAX_OPTIONS = 128  # of a oneOf: its options are compared in pairs
SCHEMA, SCHEMAS = ("additionalItems", "additionalProperties", "items"), ("allOf", "anyOf", "oneOf", "prefixItems")
NAMED_SCHEMAS = ("patternProperties", "properties")
COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
OTHERS = ("$ref", "const", "enum", "format", "multipleOf", "pattern", "required", "type")
SUPPORTED = {*SCHEMA, *SCHEMAS, *NAMED_SCHEMAS, *COUNTS, *LOW, *HIGH, *OTHERS}
# Keywords that the library does not enforce, with the values that ask for nothing. All further names are annotations.
REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("$dynamicRef", "$recursiveRef", "contains", "if"), ()),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), ({},)),
    **dict.fromkeys(("propertyNames", "unevaluatedItems", "unevaluatedProperties"), (True, {})),
    "not": (False,),
    "uniqueItems": (False,),
}
FORMATS = {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
FRACTION = r"/-?(0|[1-9][0-9]{0,8})\.[0-9]{0,4}[1-9]/"  # a number that is no whole one, nor is its double
# The schema of schemas, at the address of any draft: such a text is a schema of this kind.
METASCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "description": {"type": "string"},
        "type": {"enum": sorted(TYPES)},
        "properties": {"type": "object", "additionalProperties": {"$ref": "https://json-schema.org/schema"}},
        "items": {"$ref": "https://json-schema.org/schema"},
    },
    "additionalProperties": False,
}


class Literal(NamedTuple):
    """A node of a schema that the library cannot express."""

    rule: str  # its texts in Lark's notation
    place: str


class Schema(NamedTuple):
    """A schema that was read."""

    node: Any  # a reference leads to a number of the definitions
    definitions: list[Any]
    digits: int  # the most that a part of a number may have
    doubtful: str  # the place of a oneOf whose options were not shown to exclude each other; empty without one


def read_schema(schema: Mapping[str, Any], place: str) -> Schema:
    """place: of the schema in the request, for messages. Raises RequestError for what cannot be enforced."""
    return SchemaReader(schema, place).read()


def refused(place: str, reason: str) -> RequestError:
    return RequestError(
        f"the structured output cannot be used: {place}: {reason}"
        if place
        else f"the structured output cannot be used: {reason}"
    )


def lark_text(text: str) -> str:
    """A text as a literal of Lark's notation."""
    return json.dumps(text, ensure_ascii=False)


class SchemaReader:
    """Reads one schema. See `read_schema`."""

    def __init__(self, root: Mapping[str, Any], place: str) -> None:
        self._root, self._place = root, place
        self._references: list[str] = []
        self._targets: dict[str, int] = {}  # their places in this list, which are the numbers of definitions
        self._digits = MIN_DIGITS
        self._doubtful = ""

    def read(self) -> Schema:
        node = self._read(self._root, self._place)
        definitions: list[Any] = []
        for reference in self._references:  # to which reading one may add
            definitions.append(self._read(self._raw(reference), self._where(reference)))
        return Schema(node, definitions, self._digits, self._doubtful)

    def _read(self, node: Any, place: str) -> Any:
        """A schema as the library may see it; a Literal for one that it cannot express."""
        if isinstance(node, bool):
            return node
        if not isinstance(node, Mapping):
            raise refused(place, f"a schema is an object, true or false, not {shown(node)}")
        kept: dict[str, Any] = {}
        for key, value in node.items():
            if key in REFUSED and not any(value == each and type(value) is type(each) for each in REFUSED[key]):
                if key != "if" or "then" in node or "else" in node:
                    raise refused(at(place, key), "this keyword is not supported")
            elif key in SUPPORTED and not (key == "format" and shown(value)[1:-1] not in FORMATS):
                kept[key] = self._value(key, value, place)
        self._check_types(kept, place)
        if "oneOf" in kept:
            self._make_exclusive(kept, node, place)
        literal = self._literal(kept, place)
        return kept if literal is None else literal

    def _value(self, key: str, value: Any, place: str) -> Any:
        """The value of a keyword, with the schemas in it as they were read."""
        inside = at(place, key)
        if key in SCHEMAS or (key == "items" and isinstance(value, list)):
            if not isinstance(value, list):
                raise refused(inside, f"this must be a list of schemas, not {shown(value)}")
            return [self._read(each, at(inside, index)) for index, each in enumerate(value)]
        if key in SCHEMA:
            return self._read(value, inside)
        if key in NAMED_SCHEMAS:
            if not isinstance(value, Mapping):
                raise refused(inside, f"this must be an object of schemas, not {shown(value)}")
            return {name: self._read(each, at(inside, name)) for name, each in value.items()}
        if key == "$ref":
            return f"#/$defs/{self._target(value, inside)}"
        if key in COUNTS:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < 0:
                raise refused(inside, f"this must be a whole number from 0 on, not {shown(value)}")
            return int(value)
        is_number = isinstance(value, (int, float)) and (not isinstance(value, bool) or key.startswith("exclusive"))
        if key in (*LOW, *HIGH, "multipleOf") and not is_number:
            raise refused(inside, f"this must be a number, not {shown(value)}")
        if key == "required" and not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
            raise refused(inside, f"this must be a list of names, not {shown(value)}")
        self._check_numbers(value, inside)
        return value

    def _check_numbers(self, value: Any, place: str) -> None:
        """Note how many digits the numbers have. Refuse those with too many."""
        for inside, number in numbers_in(value, place):
            digits = len(format(Decimal(repr(number)), "f").lstrip("-"))
            if isinstance(number, int) and digits > MAX_DIGITS:
                raise refused(inside, f"a whole number of more than {MAX_DIGITS} digits is not supported")
            self._digits = max(self._digits, digits)

    def _check_types(self, kept: Mapping[str, Any], place: str) -> None:
        types = kept.get("type", [])
        for each in types if isinstance(types, list) else [types]:
            if not isinstance(each, str) or each not in TYPES:
                raise refused(at(place, "type"), f"a type is one of {', '.join(sorted(TYPES))}, not {shown(each)}")

    def _target(self, reference: Any, place: str) -> int:
        """The number of the definition that a reference leads to."""
        if not isinstance(reference, str):
            raise refused(place, f"this must be text, not {shown(reference)}")
        own = self._root.get("$id")
        if isinstance(own, str) and reference.startswith(own):
            reference = reference[len(own) :] or "#"
        if reference not in self._targets:
            if self._raw(reference) is None:
                raise refused(place, f"{shown(reference)} is not present: a reference leads to a place of its schema")
            self._targets[reference] = len(self._references)
            self._references.append(reference)
        return self._targets[reference]

    def _raw(self, reference: str) -> Any:
        """The schema, as the client wrote it, that a reference leads to; None if there is none."""
        if reference.split("://")[-1].startswith("json-schema.org/") and reference.rstrip("#").endswith("/schema"):
            return METASCHEMA
        node: Any = self._root
        start, *steps = unquote(reference).split("/")
        for step in steps:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(node, Mapping):
                node = node.get(step)
            else:
                inside = isinstance(node, list) and step.isdecimal() and int(step[:9]) < len(node)
                node = node[int(step[:9])] if inside else None
        return node if start == "#" else None

    def _where(self, reference: str) -> str:
        return at(self._place, *reference.split("/")[1:]) if reference.startswith("#") else reference

    def _make_exclusive(self, kept: dict[str, Any], node: Mapping[str, Any], place: str) -> None:
        """Replace oneOf by anyOf, where its options exclude each other or can be made to. Otherwise the library may
        still see that they do."""
        options, raws = kept["oneOf"], [self._resolved(each) for each in node["oneOf"]]
        if len(options) > MAX_OPTIONS:
            raise refused(at(place, "oneOf"), f"at most {MAX_OPTIONS} options are supported")
        bare = [set(each) & SUPPORTED <= {"type", "format"} and each.get("type") for each in raws]
        if "integer" in bare and "number" in bare:  # then a whole number is both, and the other numbers are one
            rest = [index for index, each in enumerate(bare) if each not in ("integer", "number")]
            options = [*(options[index] for index in rest), Literal(FRACTION, at(place, "oneOf"))]
            raws = [*(raws[index] for index in rest), {"type": "number"}]
        absent: list[set[str]] = [set() for _ in raws]
        for first, one in enumerate(raws):
            for second, other in enumerate(raws[:first]):
                if exclude(one, other, self._resolved):
                    continue
                without, with_ = names_of(other) - names_of(one), names_of(one) - names_of(other)
                if not (without and with_ and all(isinstance(options[each], dict) for each in (first, second))):
                    self._doubtful = self._doubtful or at(place, "oneOf")
                    return
                absent[first] |= without
                absent[second] |= with_
        for index, names in enumerate(absent):
            if names:  # an option without what another one demands
                never = {"type": "object", "properties": dict.fromkeys(sorted(names), False)}
                options[index] = {"allOf": [options[index], never]}
        del kept["oneOf"]
        if "anyOf" in kept:
            kept["allOf"] = [*kept.get("allOf", []), {"anyOf": options}]
        else:
            kept["anyOf"] = options

    def _resolved(self, node: Any) -> Mapping[str, Any]:
        """The schema that references lead to, as far as they stand alone; empty for true and false."""
        for _ in range(MAX_OPTIONS):
            if not isinstance(node, Mapping) or set(node) & SUPPORTED != {"$ref"}:
                break
            node = self._raw(node["$ref"]) if isinstance(node["$ref"], str) else None
        return node if isinstance(node, Mapping) else {}

    def _literal(self, kept: dict[str, Any], place: str) -> Literal | None:
        """The Literal that takes the place of a schema with whole numbers beyond EXACT. Other bounds are moved to
        EXACT: an answer need not use all that its schema allows."""
        for key in ("const", "enum"):
            found = next(
                (inside for inside, number in numbers_in(kept.get(key), at(place, key)) if is_large(number)), ""
            )
            if found:
                self._check_alone(kept, (key, "type"), found)
                values = kept[key] if isinstance(kept[key], list) and key == "enum" else [kept[key]]
                texts = [json.dumps(value, ensure_ascii=False) for value in values if fits(value, kept.get("type"))]
                if not texts:
                    raise refused(found, "no value has the demanded type")
                return Literal(" | ".join(map(lark_text, texts)), found)
        low, high = bound(kept, LOW), bound(kept, HIGH)
        mirrored = high is not None and high < -EXACT
        if mirrored or (low is not None and low > EXACT):
            inside = at(place, next(key for key in (*LOW, *HIGH) if key in kept))
            self._check_alone(kept, (*LOW, *HIGH, "type"), inside)
            if kept.get("type") not in ("integer", "number"):
                raise refused(inside, 'a bound beyond 2^53 needs the "type": "integer"')
            near, far = (high, low) if mirrored else (low, high)
            least = abs(near or 0)
            most = 10 ** len(str(least)) - 1 if far is None else abs(far)
            self._digits = max(self._digits, len(str(most)))
            if least > most:
                raise refused(inside, "no number lies between these bounds")
            return Literal(f"/{'-' if mirrored else ''}({digits_between(least, most)})/", inside)
        for names, nearest, most in ((LOW, low, -EXACT), (HIGH, high, EXACT)):
            if nearest is not None and abs(nearest) > EXACT:
                kept.update({name: most for name in names[:1]})
                kept.pop(names[1], None)
        return None

    def _check_alone(self, kept: Mapping[str, Any], allowed: Sequence[str], place: str) -> None:
        if others := sorted(set(kept) - set(allowed)):
            raise refused(place, f"a whole number beyond 2^53 is not supported beside {others[0]}")
