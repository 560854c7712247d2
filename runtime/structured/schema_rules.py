"""Writes a JSON schema as rules of a grammar in llguidance's notation, most of all as `%json`. Around numbers that the
library cannot express the rules are our own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from .grammar_worker import WHITESPACE
from .schema import NAMED_SCHEMAS, SCHEMA, SCHEMAS, Literal, Schema, lark_text, read_schema, refused

MAX_RULES = 1 << 20  # characters of all rules of a schema
SPACE = f"SP: /{WHITESPACE}/"  # the terminal between the parts of our own rules


class Rules(NamedTuple):
    """The rules of a schema."""

    lines: list[str]
    digits: int  # see Schema, as for the next
    doubtful: str


def schema_rules(schema: Mapping[str, Any], rule: str, place: str) -> Rules:
    """The rules of a schema. rule: the name of the first one. place: of the schema in the request, for messages. Raises
    RequestError for what cannot be enforced."""
    try:
        read = read_schema(schema, place)
        lines = SchemaWriter(read, rule, place).lines
    except RecursionError as error:
        raise refused(place, "the schema is nested too deeply") from error
    return Rules(lines, read.digits, read.doubtful)


class SchemaWriter:
    """Writes one schema. lines: its rules."""

    def __init__(self, schema: Schema, rule: str, place: str) -> None:
        """See `schema_rules`."""
        self._definitions, self._rule, self._place = schema.definitions, rule, place
        self._written: set[int] = set()  # definitions with a rule of their own
        self._size = 0
        self.lines: list[str] = []
        self._write(schema.node, rule)

    def _write(self, node: Any, rule: str) -> None:
        """Add the rules of a schema as it was read."""
        literal = self._first_literal(node, set())
        alone = next(iter(node)) if isinstance(node, dict) and len(node) == 1 else ""
        if isinstance(node, Literal):
            self._add(f"{rule}: {node.rule}")
        elif literal is None:
            self._add(f"{rule}: %json {self._library_text(node)}")
        elif alone == "$ref":
            self._add(f"{rule}: {self._definition(int(node['$ref'].rsplit('/', 1)[1]))}")
        elif alone == "anyOf" or (alone == "allOf" and len(node["allOf"]) == 1):
            self._add(f"{rule}: " + " | ".join(f"{rule}_{index}" for index in range(len(node[alone]))))
            for index, option in enumerate(node[alone]):
                self._write(option, f"{rule}_{index}")
        elif set(node) <= {"type", "properties", "required", "additionalProperties"} and "properties" in node:
            self._write_object(node, rule, literal)
        elif set(node) <= {"type", "items", "minItems", "maxItems"} and "items" in node:
            self._write_array(node, rule)
        else:
            raise refused(
                literal.place,
                "a number that no double holds is supported in properties, items, anyOf and $ref, not inside or beside "
                + ", ".join(sorted(set(node) - {"type", "properties", "required", "items", "anyOf"})),
            )

    def _add(self, line: str) -> None:
        self.lines.append(line)
        self._size += len(line)
        if self._size > MAX_RULES:
            raise refused(self._place, "the schema is too large: simplify it")

    def _definition(self, index: int) -> str:
        """The rule of a definition."""
        rule = f"{self._rule}_d{index}"
        if index not in self._written:
            self._written.add(index)
            self._write(self._definitions[index], rule)
        return rule

    def _write_object(self, node: Mapping[str, Any], rule: str, literal: Literal) -> None:
        """An object with its properties in their order, and no others: rule_{i} and rule_{i}c are what follows from
        property i on, the latter after a comma's place."""
        names = [name for name, each in node["properties"].items() if each is not False]
        required = set(node.get("required", ()))
        if unknown := sorted(required.difference(names)):
            raise refused(literal.place, f"a number that no double holds needs {unknown[0]:.100} in properties, too")
        self._others(node, rule, "object", f'"{{" SP? {rule}_0')
        for index, name in enumerate(names):
            pair = f'{lark_text(json.dumps(name, ensure_ascii=False))} SP? ":" SP? {rule}_{index}v {rule}_{index + 1}c'
            for comma, suffix in (("", ""), ('SP? "," SP? ', "c")):
                skipped = "" if name in required else f" | {rule}_{index + 1}{suffix}"
                self._add(f"{rule}_{index}{suffix}: {comma}{pair}{skipped}")
            self._write(node["properties"][name], f"{rule}_{index}v")
        self._add(f'{rule}_{len(names)}: "}}"')
        self._add(f'{rule}_{len(names)}c: SP? "}}"')

    def _write_array(self, node: Mapping[str, Any], rule: str) -> None:
        least, most = node.get("minItems", 0), node.get("maxItems")
        more = f'(SP? "," SP? {rule}_v){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
        more = "" if most in (0, 1) else more
        items = f"{rule}_v {more}" if least else f"({rule}_v {more})?"
        self._others(node, rule, "array", f'"[" SP? {items if most != 0 else ""} SP? "]"')
        self._write(node["items"], f"{rule}_v")

    def _others(self, node: Mapping[str, Any], rule: str, kind: str, body: str) -> None:
        """The rule of an object or array, beside the other types that the schema allows."""
        types = node.get("type", kind)
        others = [each for each in types if each != kind] if isinstance(types, list) else []
        self._add(f"{rule}: {body}" + (f" | {rule}_o" if others else ""))
        if others:
            self._add(f"{rule}_o: %json {self._library_text({'type': others})}")

    def _first_literal(self, node: Any, seen: set[int]) -> Literal | None:
        """A Literal in a schema or in what it refers to."""
        if isinstance(node, Literal):
            return node
        for index in references_of(node):
            if index not in seen:
                seen.add(index)
                if (found := self._first_literal(self._definitions[index], seen)) is not None:
                    return found
        return next((found for each in children(node) if (found := self._first_literal(each, seen)) is not None), None)

    def _library_text(self, node: Any) -> str:
        """A schema without a Literal, with the definitions that it refers to and our settings of the library."""
        needed, waiting = set[int](), [node]
        while waiting:
            each = waiting.pop()
            new = set(references_of(each)) - needed
            needed |= new
            waiting += [*children(each), *(self._definitions[index] for index in new)]
        definitions = {str(index): self._definitions[index] for index in sorted(needed)}
        content = dict(node) if isinstance(node, dict) else ({} if node else {"type": []})
        settings = {"whitespace_pattern": WHITESPACE, "lenient": False}
        return json.dumps({**content, "$defs": definitions, "x-guidance": settings})


def children(node: Any) -> list[Any]:
    """The schemas directly inside a schema as it was read."""
    if not isinstance(node, dict):
        return []
    lists = [node.get(key, []) for key in SCHEMAS] + [list(node.get(key, {}).values()) for key in NAMED_SCHEMAS]
    single = [node[key] for key in SCHEMA if key in node and not isinstance(node[key], list)]
    tuples = [each for key in SCHEMA if isinstance(node.get(key), list) for each in node[key]]
    return [each for group in (*lists, single, tuples) for each in group]


def references_of(node: Any) -> list[int]:
    return [int(node["$ref"].rsplit("/", 1)[1])] if isinstance(node, dict) and "$ref" in node else []
