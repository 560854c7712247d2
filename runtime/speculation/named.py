"""Settings of speculation as a text: `draftwood … --speculative`, the configurations of `draftwood bench`."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import Any

from ...models.errors import ConfigError, nearest, shown
from .bounds import INTEGERS
from .config import SpeculativeConfig
from .growers.kinds import LOOKUP

PLAIN = "plain"
SIZES = {"chain": "max_draft_len", LOOKUP: "lookup_len"}  # the setting that a grower's size is; else of a tree
SHAPES = {"k-ary": "branching=4-2-1", "static": "topology=0-0-1"}  # growers whose size a setting fixes, and an example
LONGEST = 1 << 14  # characters


def parse(text: str) -> SpeculativeConfig | None:
    """Read "plain" (None); or a grower or a paper's name with an optional size, and settings, such as "chain:4", "gsd",
    "dyspec:16,key=draft" or "grow=topk/merge=gsd"; or a JSON object of settings. Raises ConfigError.

    The size is the depth of a chain, the tokens of a tree, or the tokens of a prompt lookup. Every proposal has this
    size, unless budget=cost makes it a limit. Settings are SpeculativeConfig's fields; a list is written 4-2-1.
    """
    if text == PLAIN:
        return None
    try:
        values = from_json(text) if text.lstrip().startswith("{") else from_words(text[:LONGEST])
    except ValueError as error:
        raise ConfigError(
            f"configuration {shown(text)} is not understood ({error}); write for instance chain:4 or "
            "topk:16,max_draft_len=6"
        ) from error
    try:
        return SpeculativeConfig(**values)
    except ConfigError as error:
        raise ConfigError(f"configuration {shown(text)}: {error}") from error


def from_json(text: str) -> dict[str, Any]:
    """The settings of a JSON object."""
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    return dict(content)


def from_words(text: str) -> dict[str, Any]:
    """The settings of words that are separated by commas or slashes."""
    first, *settings = re.split("[,/]", text)
    values: dict[str, Any] = {}
    if "=" in first:
        settings.insert(0, first)
    else:
        grow, _, size = first.partition(":")
        if not grow:
            raise ValueError("no grower")
        if size and grow in SHAPES:
            raise ValueError(f"the size of {grow} is that of its shape: write {grow}/{SHAPES[grow]}")
        values["grow"] = grow
        if size:
            values |= {"budget": "fixed", SIZES.get(grow, "max_total_draft_tokens"): int(size)}
    types: dict[str, Any] = {field.name: type(field.default) for field in fields(SpeculativeConfig)}
    types |= dict.fromkeys(INTEGERS, int)
    for setting in settings:
        name, _, value = setting.partition("=")
        name = name.strip().replace("-", "_")
        if name not in types:
            raise ValueError(f"there is no setting {name!r}{nearest(name, types)}")
        values[name] = tuple(map(int, value.split("-"))) if types[name] is tuple else types[name](value)
    return values
