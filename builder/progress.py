"""Progress of a build: its steps and their units."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Step(NamedTuple):
    """One step of a build: a description, and the number of its units; 0 for a remark."""

    title: str
    units: int


Begin = Callable[[Step], Callable[[], None]]  # announces a step; returns a function that is called after each unit


def remark(begin: Begin, text: str) -> None:
    """Tell the user something that is no step."""
    begin(Step(text, 0))
