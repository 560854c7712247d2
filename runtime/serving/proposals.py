"""The size of a proposal that a client asks for, looked at before anything is computed from it."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from ...models.errors import RequestError

MAX_PROPOSAL = 1024  # of any size: nothing that large fits an engine, and some grow exponentially
MAX_LEVELS = 16  # of a tree's branching that are multiplied: 2 per level exceed MAX_PROPOSAL before


def refuse_endless(settings: Mapping[str, Any]) -> None:
    """settings: fields of SpeculativeConfig, of their types. Raises RequestError for sizes that no engine takes."""
    branching, topology = settings.get("branching", ()), settings.get("topology", ())
    levels = [prod(branching[: depth + 1]) for depth in range(min(len(branching), MAX_LEVELS))]
    sizes = [value for value in settings.values() if isinstance(value, int)]
    if max((*sizes, *branching, *levels, len(branching), len(topology)), default=0) > MAX_PROPOSAL:
        raise RequestError(f"speculation asks for more than {MAX_PROPOSAL} tokens or rows: no engine takes that many")
