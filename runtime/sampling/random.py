"""All randomness comes from two methods, so that a test can enumerate every outcome of the real algorithms. A device
that draws by itself gets the uniform numbers (`HasUniforms`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

BLOCK = 512
FEW = 32
AHEAD = 256  # numbers that one call of numpy draws: one for each call would take longer


class RandomStream(Protocol):
    """A source of random decisions, with one method for each of the two kinds."""

    def categorical(self, probabilities: NDArray[np.floating[Any]]) -> int:
        """Draw an index. probabilities [V]: they sum to one."""

    def bernoulli(self, probability: float) -> bool:
        """True with this probability."""


class HasUniforms(ABC):
    """A stream whose decisions are made with uniform numbers in [0, 1). No protocol: every round asks whether a stream
    is one, and a protocol takes 30 µs to answer."""

    @abstractmethod
    def ahead(self, count: int) -> array[float]:
        """The next numbers, which stay the next ones."""

    @abstractmethod
    def skip(self, count: int) -> None:
        """The next numbers were used elsewhere."""


class SeededStream(HasUniforms):
    """A stream with a seed: the same seed gives the same decisions."""

    def __init__(self, seed: np.random.SeedSequence) -> None:
        self._generator = np.random.Generator(np.random.PCG64(seed))
        self._numbers, self._used = array("d"), 0  # drawn in advance, and how many of them were used

    def categorical(self, probabilities: NDArray[np.floating[Any]]) -> int:
        count = len(probabilities)
        if count <= FEW:  # the same sums, in less time than numpy needs to begin
            sums = [*accumulate(probabilities.tolist())]
            return bisect_right(sums, self._next() * sums[-1], 0, count)
        if count > BLOCK:  # sums are much faster than cumulative sums: first the block, then the index
            first = BLOCK * self.categorical(np.add.reduceat(probabilities, np.arange(0, len(probabilities), BLOCK)))
            return first + self.categorical(probabilities[first : first + BLOCK])
        cumulative = np.add.accumulate(probabilities, dtype=np.float64)
        # The number is scaled by the sum, not by 1: a rounding error must not select an index beyond the last token.
        return int(cumulative.searchsorted(self._next() * cumulative.item(-1), "right"))

    def bernoulli(self, probability: float) -> bool:
        return bool(self._next() < probability)

    def ahead(self, count: int) -> array[float]:
        end = self._used + count
        if end > len(self._numbers):
            del self._numbers[: self._used]
            self._numbers.frombytes(self._generator.random(max(count, AHEAD)).tobytes())
            self._used, end = 0, count
        return self._numbers[self._used : end]

    def skip(self, count: int) -> None:
        if self._used + count > len(self._numbers):
            self.ahead(count)
        self._used += count

    def _next(self) -> float:
        """A uniform number in [0, 1)."""
        if self._used == len(self._numbers):
            self.ahead(1)
        self._used += 1
        return self._numbers[self._used - 1]


class RandomStreams(NamedTuple):
    """The draws of one part never change those of another part (I16 of docs/papers.md)."""

    draft: RandomStream
    accept: RandomStream
    target: RandomStream


def seeded_streams(seed: int | None) -> RandomStreams:
    """Three independent streams of `seed`; None takes entropy from the operating system."""
    children = np.random.SeedSequence(seed).spawn(3)
    return RandomStreams(*(SeededStream(child) for child in children))
