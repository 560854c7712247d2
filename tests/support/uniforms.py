"""A stream that takes one uniform number for each decision, as kernels of rounds do: whatever the number of tokens."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftwood.runtime.sampling.random import HasUniforms, RandomStreams


class UniformStream(HasUniforms):
    """numbers: the uniform numbers. taken: how many of them were used."""

    def __init__(self, numbers: Sequence[float]) -> None:
        self.numbers, self.taken = numbers, 0

    def categorical(self, probabilities: NDArray[np.floating[Any]]) -> int:
        cumulative = np.asarray(probabilities, np.float64).cumsum()
        return bisect_right(cumulative, self._next() * cumulative[-1])

    def bernoulli(self, probability: float) -> bool:
        return bool(self._next() < probability)

    def ahead(self, count: int) -> array[float]:
        """See HasUniforms."""
        return array("d", self.numbers[self.taken : self.taken + count])

    def skip(self, count: int) -> None:
        """See HasUniforms."""
        self.taken += count

    def _next(self) -> float:
        self.skip(1)
        return self.numbers[self.taken - 1]


def uniform_streams(seed: int, count: int = 4096) -> RandomStreams:
    rng = np.random.default_rng(seed)
    return RandomStreams(*(UniformStream(rng.random(count).tolist()) for _ in range(3)))
