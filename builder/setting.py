"""Fields of a dataclass of options that say themselves what `--help` says of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, fields
from typing import Any, NamedTuple


class Setting(NamedTuple):
    help: str
    is_further: bool = True  # shown by --help-all only
    default: str = ""  # in words, where it is not the dataclass's
    group: str = ""  # of the options in --help


def setting(value: Any, help: str, default: str = "", *, is_further: bool = True, group: str = "") -> Any:
    """A field of a dataclass. value: its default."""
    return field(default=value, metadata={"setting": Setting(help, is_further, default, group)})


def settings_of(kind: Callable[..., Any], group: str = "") -> dict[str, Setting]:
    """The settings of a group by the names of their fields."""
    found = {each.name: each.metadata.get("setting") for each in fields(kind)}  # type: ignore[arg-type]
    return {name: each for name, each in found.items() if each is not None and each.group == group}


def flag(name: str) -> str:
    """A field as the command line writes it."""
    return "--" + name.replace("_", "-")
