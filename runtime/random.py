"""Randomness through two doors, so that a test can walk through every outcome of the real algorithms."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

BLOCK = 2048


class RandomStream(Protocol):
    """Every random decision is one of these two."""

    def categorical(self, probabilities: NDArray[np.float64]) -> int:
        """An index drawn with these probabilities [V] (they sum to one)."""

    def bernoulli(self, probability: float) -> bool:
        """True with this probability."""


class SeededStream:
    """A stream of one seed: the same seed gives the same decisions."""

    def __init__(self, seed: np.random.SeedSequence) -> None:
        self._generator = np.random.Generator(np.random.PCG64(seed))

    def categorical(self, probabilities: NDArray[np.float64]) -> int:
        if len(probabilities) > BLOCK:  # summing is several times faster than accumulating: first a block, then inside
            first = BLOCK * self.categorical(np.add.reduceat(probabilities, np.arange(0, len(probabilities), BLOCK)))
            return first + self.categorical(probabilities[first : first + BLOCK])
        cumulative = probabilities.cumsum()
        # Scaling by the sum, and not by 1, keeps a rounding error from selecting an index behind the last token.
        return int(cumulative.searchsorted(self._generator.random() * cumulative[-1], side="right"))

    def bernoulli(self, probability: float) -> bool:
        return bool(self._generator.random() < probability)


class RandomStreams(NamedTuple):
    """Separate streams, so that how much one part draws never shifts what another part gets (papers.md I16)."""

    draft: RandomStream
    accept: RandomStream
    target: RandomStream


def seeded_streams(seed: int | None) -> RandomStreams:
    """Three independent streams of `seed`; None takes entropy from the operating system."""
    children = np.random.SeedSequence(seed).spawn(3)
    return RandomStreams(*(SeededStream(child) for child in children))
