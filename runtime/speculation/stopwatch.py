"""Stopwatch: the time that an activity took, without pauses."""

from __future__ import annotations

from time import perf_counter


class Stopwatch:
    """Adds up the seconds spent inside its `with` blocks. latest: those of the last block."""

    __slots__ = ("_lapped", "_start", "latest", "seconds")

    def __init__(self) -> None:
        self.seconds = self.latest = self._lapped = 0.0

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(self, *raised: object) -> None:
        self.latest = perf_counter() - self._start
        self.seconds += self.latest

    def add(self, seconds: float) -> None:
        """Add the seconds of a block that somebody else has timed."""
        self.latest = seconds
        self.seconds += seconds

    def lap(self) -> float:
        """Seconds that were added since the last lap."""
        before, self._lapped = self._lapped, self.seconds
        return self._lapped - before
