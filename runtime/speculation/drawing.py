"""Drawing tokens without replacement, one at a time: what every sampled proposal is made of."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..random import RandomStream
from ..sampling import Candidates


class Drawing:
    """Successive draws from q, each token at most once. `drawn`: how many so far."""

    def __init__(self, q: Candidates) -> None:
        self._ids, self._R = q
        self._last: int | None = None  # taken, and still in R: most nodes are drawn from only once
        self.drawn = 0

    @property
    def exhausted(self) -> bool:
        """Whether every token with any probability was drawn."""
        return self.drawn == len(self._ids)

    def draw(self, stream: RandomStream) -> tuple[int, float]:
        """The next token and its share of what remained before it."""
        R = self.remaining()
        index = stream.categorical(R)
        self.take(index)
        return int(self._ids[index]), float(R[index])

    def remaining(self) -> NDArray[np.float64]:
        """R [K]: q without the tokens taken, renormalised."""
        if self._last is not None:
            self._R = self._R.copy()  # the first R is q itself, which the graph keeps
            self._R[self._last] = 0.0
            self._R /= self._R.sum()
            self._last = None
        return self._R

    def take(self, index: int) -> None:
        """The token at this place of q was drawn."""
        self._last = index
        self.drawn += 1
