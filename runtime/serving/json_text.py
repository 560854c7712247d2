"""Parses untrusted JSON, and writes large answers as JSON in small pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from math import isfinite
from typing import Any

from ...models.errors import RequestError, shown
from ..sampling.structured import parse_decimal, unambiguous

MAX_DEPTH = 32  # levels of nested lists and objects; the deepest field of a request has 5
AT_A_TIME = 32  # items of an array that are written as one piece; 50 kB with 20 alternatives each
ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))  # llama.vim overlooks what has blanks


def parse(text: str) -> Any:
    """The value of a JSON text. Raises RequestError for invalid JSON, and for JSON that is ambiguous or that Python
    cannot represent: a duplicate name in an object, a number out of range, half of a surrogate pair, more than
    MAX_DEPTH levels."""
    try:
        content = json.loads(text, object_pairs_hook=unambiguous, parse_float=parse_decimal)
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


def too_deep() -> RequestError:
    return RequestError(f"lists and objects are nested more than {MAX_DEPTH} levels deep: no field is")


def check(content: Any) -> None:
    """Raises RequestError for values that `parse` refuses. It works level by level, without recursion."""
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
    """Whether a text can be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def pieces(value: Any) -> Iterator[str]:
    """The JSON text of a value, in pieces. An iterator becomes an array. Its items are made and written a few at a
    time, so that a large answer needs little memory and does not block the interpreter for long. Iterators may be
    values of objects, and of objects in lists."""
    if isinstance(value, dict) and value:
        before = "{"
        for name, item in value.items():
            yield f"{before}{ENCODER.encode(name)}:"
            yield from pieces(item)
            before = ","
        yield "}"
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        before = "["
        for item in value:
            yield before
            yield from pieces(item)
            before = ","
        yield "]"
    elif isinstance(value, Iterator):
        before = "["
        while some := list(islice(value, AT_A_TIME)):
            yield before + ENCODER.encode(some)[1:-1]
            before = ","
        yield "[]" if before == "[" else "]"
    else:
        yield ENCODER.encode(value)
