"""How a build tells what it is doing."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Step(NamedTuple):
    """One step of a build: what is done, and the number of units it consists of."""

    title: str
    units: int


Begin = Callable[[Step], Callable[[], None]]  # announces a step; what it returns is called once per unit done
