"""Comparison: how long passes over one layer take with a backend, beside another backend on the same machine."""

from __future__ import annotations

import math
from dataclasses import dataclass

MARGIN = 1.15  # a backend this many times as slow is slower; less may be the work of other programs


@dataclass(frozen=True, slots=True)
class Comparison:
    """The least seconds of passes over a layer of random weights, measured in turn. backend, other: names with
    precisions. rows: of the passes. seconds, other_seconds: by number of rows."""

    backend: str
    other: str
    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    other_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not (self.rows and len(self.rows) == len(self.seconds) == len(self.other_seconds)):
            raise ValueError("a comparison needs seconds of both backends for each number of rows")
        if not all(0 < value < math.inf for value in (*self.rows, *self.seconds, *self.other_seconds)):
            raise ValueError("rows and seconds of a comparison must be numbers above 0")

    @property
    def ratios(self) -> tuple[float, ...]:
        """Seconds / seconds of the other backend, by number of rows."""
        return tuple(own / other for own, other in zip(self.seconds, self.other_seconds, strict=True))

    @property
    def is_slower(self) -> bool:
        """Whether the backend is slower than the other one for any number of rows."""
        return max(self.ratios) > MARGIN

    @property
    def described(self) -> str:
        found = zip(self.rows, self.ratios, strict=True)
        ratios = ", ".join(f"{ratio:.2f} at {rows} row{'s' * (rows > 1)}" for rows, ratio in found)
        return f"the time of {self.backend} for a layer, over that of {self.other}, is {ratios}"
