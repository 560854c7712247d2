"""The errors a user can cause, with what to do about it: exit code 2, a server's 4xx answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from reprlib import Repr
from typing import Any, TypeVar, cast

from .printable import printable


class DraftwoodError(ValueError):
    """Bad input of any kind; the base of the errors below."""

    def __str__(self) -> str:
        return printable(super().__str__())


class CheckpointError(DraftwoodError):
    """A checkpoint that is missing, damaged, or of a model that is not supported."""


class BundleError(DraftwoodError):
    """A bundle that is missing, damaged, of another format, or not for this machine."""


class EngineError(DraftwoodError):
    """An engine that cannot be opened, or cannot be used the way it was asked to."""


class RequestError(DraftwoodError):
    """A request that cannot be served: its prompt, its parameters or its length."""


class ConfigError(DraftwoodError):
    """Settings that contradict each other, or that would change the output distribution."""


class NoRoomError(ConfigError):
    """There is too little memory for a model just now."""


T = TypeVar("T")


def known_names(error: type[DraftwoodError]) -> Callable[[type[T]], type[T]]:
    """A decorator of a dataclass: a keyword that is no field raises `error`, which names the nearest one."""

    def wrap(cls: type[T]) -> type[T]:
        init_of, names = cast(Any, cls), {field.name: None for field in fields(cast(Any, cls))}  # in their order
        own, known = init_of.__init__, names.keys()

        @wraps(own)
        def init(self: T, /, *args: Any, **given: Any) -> None:
            if not given.keys() <= known:
                unknown = next(name for name in given if name not in names)
                near = nearest(unknown, names) or f": it has {', '.join(names)}"
                raise error(f"{cls.__name__} has no {shown(unknown)}{near}")
            own(self, *args, **given)

        init_of.__init__ = init
        return cls

    return wrap


QUOTED = Repr()
QUOTED.maxstring = QUOTED.maxother = 120  # characters


def nearest(given: str, choices: Iterable[str], prefix: str = "") -> str:
    """The end of an error message that names the choice most like `given`, if any. prefix: left out of all of them."""
    found = get_close_matches(given[: QUOTED.maxstring], list(choices), 1)
    return f"; did you mean {prefix}{found[0]}?" if found else ""


def shown(value: object) -> str:
    """A value as an error message quotes it: a short text, however long, deep or large the value is."""
    try:
        return QUOTED.repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return "a number of thousands of digits"
