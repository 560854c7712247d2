"""What the keywords of a JSON schema say about values: bounds of numbers, types, and which schemas exclude each
other."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import ceil, floor
from typing import Any

EXACT = 2**53 - 1  # the largest whole number up to which doubles hold all
LOW, HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
TYPES: dict[str, tuple[type, ...]] = {
    "array": (list,),
    "boolean": (bool,),
    "integer": (int,),
    "null": (type(None),),
    "number": (int, float),
    "object": (dict,),
    "string": (str,),
}


def is_large(number: int | float) -> bool:
    return isinstance(number, int) and abs(number) > EXACT


def bound(kept: Mapping[str, Any], names: tuple[str, str]) -> int | None:
    """The smallest or largest whole number that a schema allows; None without a bound. names: of the bound, and of an
    exclusive one, which is true or false in older drafts."""
    plain, exclusive = (kept.get(name) for name in names)
    step, nearest = (1, ceil) if names == LOW else (-1, floor)
    if isinstance(exclusive, bool):
        plain, exclusive = (None, plain) if exclusive else (plain, None)
    found = [] if plain is None else [nearest(plain)]
    if exclusive is not None:
        found.append(nearest(exclusive) + step if nearest(exclusive) == exclusive else nearest(exclusive))
    return (max if step == 1 else min)(found, default=None)


def digits_between(low: int, high: int) -> str:
    """A regular expression of the whole numbers in a range of positive ones."""
    parts = []
    for length in range(len(str(low)), len(str(high)) + 1):
        least, most = max(low, 10 ** (length - 1)), min(high, 10**length - 1)
        parts.append(same_length(str(least), str(most)))
    return "|".join(parts)


def same_length(low: str, high: str) -> str:
    """The numbers in a range, of as many digits, with leading zeros."""
    if low == high:
        return low
    if set(low) == {"0"} and set(high) == {"9"}:
        return f"[0-9]{{{len(low)}}}"
    if low[0] == high[0]:
        return low[0] + same_length(low[1:], high[1:])
    if (rest := len(low) - 1) == 0:
        return f"[{low}-{high}]"
    parts = [low[0] + same_length(low[1:], "9" * rest), high[0] + same_length("0" * rest, high[1:])]
    if int(high[0]) - int(low[0]) > 1:
        parts.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}][0-9]{{{rest}}}")
    return f"({'|'.join(parts)})"


def fits(value: Any, types: Any) -> bool:
    """Whether a value has one of a schema's types."""
    if types is None:
        return True
    for each in types if isinstance(types, list) else [types]:
        whole = each == "integer" and isinstance(value, float) and value.is_integer()
        if whole or (isinstance(value, TYPES[each]) and (each == "boolean" or not isinstance(value, bool))):
            return True
    return False


def exclude(one: Mapping[str, Any], other: Mapping[str, Any], resolved: Callable[[Any], Mapping[str, Any]]) -> bool:
    """Whether no value follows both schemas, as far as their types, values and tags show it."""
    kinds = [kinds_of(each) for each in (one, other)]
    if not kinds[0] & kinds[1]:
        return True
    values = [values_of(each) for each in (one, other)]
    if values[0] is not None and values[1] is not None and not set(values[0]) & set(values[1]):
        return True
    if kinds[0] & kinds[1] != {"object"}:
        return False
    tags = [tags_of(each, resolved) for each in (one, other)]
    return any(not set(tags[0][name]) & set(tags[1][name]) for name in tags[0] if name in tags[1])


def kinds_of(schema: Mapping[str, Any]) -> set[str]:
    """The types of a schema's values; a whole number counts as a number."""
    types = schema.get("type", list(TYPES))
    found = {kind for kind in (types if isinstance(types, list) else [types]) if isinstance(kind, str)}
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(listed, list):
        found &= {kind for value in listed for kind in TYPES if fits(value, kind)}
    return {"number" if kind == "integer" else kind for kind in found}


def values_of(schema: Mapping[str, Any]) -> list[str] | None:
    """The values that a schema lists, as texts that are equal for equal values; None if it lists none."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(listed, list):
        return None
    return [canonical(each) for each in listed]


def canonical(value: Any) -> str:
    """A JSON value as text, in which 1 and 1.0 are the same."""
    if isinstance(value, (list, Mapping)):
        pairs = sorted(value.items()) if isinstance(value, Mapping) else enumerate(value)
        return f"{type(value).__name__}({','.join(f'{json.dumps(key)}:{canonical(each)}' for key, each in pairs)})"
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)


def names_of(schema: Mapping[str, Any]) -> set[str]:
    """The properties that a schema of objects demands."""
    required = schema.get("required", ())
    return {each for each in required if isinstance(each, str)} if isinstance(required, list) else set()


def tags_of(schema: Mapping[str, Any], resolved: Callable[[Any], Mapping[str, Any]]) -> dict[str, list[str]]:
    """The listed values of the properties that a schema demands."""
    properties = schema.get("properties")
    given = properties if isinstance(properties, Mapping) else {}
    found = {name: values_of(resolved(given[name])) for name in names_of(schema) if name in given}
    return {name: values for name, values in found.items() if values is not None}
