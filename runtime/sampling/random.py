"""Randomness through two doors, so that a test can walk through every outcome of the real algorithms."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

BLOCK = 512
AHEAD = 64


class RandomStream(Protocol):
    """Every random decision is one of these two."""

    def categorical(self, probabilities: NDArray[np.floating[Any]]) -> int:
        """An index drawn with these probabilities [V] (they sum to one)."""

    def bernoulli(self, probability: float) -> bool:
        """True with this probability."""


class SeededStream:
    """A stream of one seed: the same seed gives the same decisions."""

    def __init__(self, seed: np.random.SeedSequence) -> None:
        self._generator = np.random.Generator(np.random.PCG64(seed))
        self._uniform: list[float] = []  # drawn ahead, the next one last

    def categorical(self, probabilities: NDArray[np.floating[Any]]) -> int:
        if len(probabilities) > BLOCK:  # summing is several times faster than accumulating: first a block, then inside
            first = BLOCK * self.categorical(np.add.reduceat(probabilities, np.arange(0, len(probabilities), BLOCK)))
            return first + self.categorical(probabilities[first : first + BLOCK])
        if probabilities.dtype != np.float64:
            probabilities = probabilities.astype(np.float64)
        cumulative = probabilities.cumsum()
        # Scaling by the sum, and not by 1, keeps a rounding error from selecting an index behind the last token.
        return bisect_right(cumulative, self._next() * cumulative[-1])

    def bernoulli(self, probability: float) -> bool:
        return bool(self._next() < probability)

    def _next(self) -> float:
        """Uniform in [0, 1): one call draws for many decisions."""
        if not self._uniform:
            self._uniform = self._generator.random(AHEAD)[::-1].tolist()
        return self._uniform.pop()


class RandomStreams(NamedTuple):
    """Separate streams, so that how much one part draws never shifts what another part gets (I16 of docs/papers.md)."""

    draft: RandomStream
    accept: RandomStream
    target: RandomStream


def seeded_streams(seed: int | None) -> RandomStreams:
    """Three independent streams of `seed`; None takes entropy from the operating system."""
    children = np.random.SeedSequence(seed).spawn(3)
    return RandomStreams(*(SeededStream(child) for child in children))
