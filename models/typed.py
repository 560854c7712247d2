"""Reads values of JSON as the types that this program computes with. The values may come from an untrusted source: each
is checked, no text is converted to a number, and unexpected fields are refused."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

LARGEST = 1 << 53  # integer: what every reader of JSON can hold
HUGE = sys.float_info.max
MAX_CHARACTERS, MAX_ITEMS = 4096, 1 << 16  # of a string, of a list or object


def typed(kind: Any, value: Any, where: str) -> Any:
    """Check that a value of JSON is a `kind`, and return it: bool, int, float, str, None, a union, tuple[X, ...],
    Mapping[str, X], a dataclass or a NamedTuple. Numbers are finite, strings printable. Raises ValueError naming
    `where`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return of_union(arguments, value, where)
    if origin is tuple and isinstance(value, list) and len(value) <= MAX_ITEMS:
        return tuple(typed(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is Mapping and isinstance(value, dict) and len(value) <= MAX_ITEMS:
        return {typed(str, name, where): typed(arguments[1], item, f"{where}.{name}") for name, item in value.items()}
    if isinstance(kind, type) and isinstance(value, dict) and (is_dataclass(kind) or hasattr(kind, "_fields")):
        return of_fields(kind, value, where)
    if kind is float and type(value) in (int, float) and -HUGE <= value <= HUGE:
        return float(value)
    if kind is int and type(value) is int and abs(value) <= LARGEST:
        return value
    if kind is str and isinstance(value, str) and len(value) <= MAX_CHARACTERS and value.isprintable():
        return value
    if kind in (bool, types.NoneType) and type(value) is kind:
        return value
    name = getattr(kind, "__name__", str(kind)) if origin is None else str(kind)
    raise ValueError(f"{where} is {repr(value)[:80]}, not a sound {name}")


def of_union(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    """The value as the first kind that accepts it. Raises the error of the first kind when none does."""
    first: ValueError | None = None
    for kind in kinds:
        try:
            return typed(kind, value, where)
        except ValueError as error:
            first = first or error
    raise first or ValueError(f"{where} has no type")


def of_fields(kind: Any, value: Mapping[str, Any], where: str) -> Any:
    """An object with exactly the fields of a dataclass or NamedTuple; those with a default may be missing."""
    if is_dataclass(kind):
        optional = {field.name for field in fields(kind) if not (field.default is MISSING is field.default_factory)}
        names = [field.name for field in fields(kind)]
    else:
        names, optional = list(kind._fields), set(kind._field_defaults)
    if more := value.keys() - set(names):
        raise ValueError(f"{where} has a field {min(more)!r} that this release does not know")
    if missing := [name for name in names if name not in value and name not in optional]:
        raise ValueError(f"{where} lacks {missing[0]!r}")
    hints = get_type_hints(kind)
    return kind(**{name: typed(hints[name], item, f"{where}.{name}") for name, item in value.items()})
