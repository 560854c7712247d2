"""JSON from strangers to Python, and large answers to JSON in small pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from math import isfinite
from typing import Any

from ...models.errors import RequestError, shown

MAX_DEPTH = 32  # of lists and objects in each other; the deepest field that is served has 5
AT_A_TIME = 32  # items of an array that are written without a pause; with 20 alternatives each, 50 kB
ENCODER = json.JSONEncoder(allow_nan=False)


def parsed(text: str) -> Any:
    """What a JSON text says. Raises RequestError for what is no JSON, and for JSON whose meaning is not certain or that
    Python cannot hold or write: a name that an object has twice, numbers beyond all bounds, half of a surrogate pair,
    more than MAX_DEPTH levels."""
    try:
        content = json.loads(text, object_pairs_hook=unambiguous)
    except json.JSONDecodeError as error:
        raise RequestError(str(error)) from error
    except RecursionError as error:
        raise too_deep() from error
    except ValueError as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError("a number has thousands of digits") from error
    check(content)
    return content


def unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. Raises RequestError where a name stands twice: readers disagree which of them counts."""
    content = dict(pairs)
    if len(content) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise RequestError(f"{shown(twice)} is given twice: send it once")
    return content


def too_deep() -> RequestError:
    return RequestError(f"lists and objects are nested more than {MAX_DEPTH} levels deep: no field is")


def check(content: Any) -> None:
    """Raises RequestError for values that `parsed` refuses. Level by level: nothing here recurses."""
    level = [content]
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for value in level:
            if isinstance(value, str):
                if not value.isascii() and not is_unicode(value):
                    raise RequestError(
                        f"{shown(value)} holds half of a surrogate pair, which is no character: send valid Unicode"
                    )
            elif isinstance(value, dict):
                for name, item in value.items():
                    refuse_no_number(name, item)
                below += value
                below += value.values()
            elif isinstance(value, list):
                below += value
            else:
                refuse_no_number("a list", value)
        if not below:
            return
        level = below
    raise too_deep()


def refuse_no_number(name: str, value: Any) -> None:
    if isinstance(value, float) and not isfinite(value):
        raise RequestError(f"{shown(name)} holds {value}, which is no number of JSON")


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can carry a text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def pieces(value: Any) -> Iterator[str]:
    """The JSON text of a value. An iterator is written as an array: its items are made, written and forgotten a few at
    a time, so that a large answer needs neither much memory nor the interpreter for long. Iterators may stand in
    objects, and in objects of lists."""
    if isinstance(value, dict) and value:
        before = "{"
        for name, item in value.items():
            yield f"{before}{ENCODER.encode(name)}: "
            yield from pieces(item)
            before = ", "
        yield "}"
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        before = "["
        for item in value:
            yield before
            yield from pieces(item)
            before = ", "
        yield "]"
    elif isinstance(value, Iterator):
        before = "["
        while some := list(islice(value, AT_A_TIME)):
            yield before + ENCODER.encode(some)[1:-1]
            before = ", "
        yield "[]" if before == "[" else "]"
    else:
        yield ENCODER.encode(value)
