"""Drawing tokens without replacement, one at a time: what every sampled proposal is made of."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..random import RandomStream


class Drawing:
    """Successive draws from q [V] float64, each token at most once. R is what remains, renormalised."""

    def __init__(self, q: NDArray[np.float64]) -> None:
        self._q, self._R = q, q
        self._last: int | None = None  # drawn, and still in R: most nodes are drawn from only once

    @property
    def exhausted(self) -> bool:
        """Whether every token with any probability was drawn."""
        return not self._remaining().any()

    def draw(self, stream: RandomStream) -> tuple[int, float]:
        """The next token and its share of what remained before it."""
        R = self._remaining()
        self._last = stream.categorical(R)
        return self._last, float(R[self._last])

    def _remaining(self) -> NDArray[np.float64]:
        if self._last is not None:
            if self._R is self._q:
                self._R = self._q.copy()  # q itself is kept by the graph
            self._R[self._last] = 0.0
            total = self._R.sum()
            if total > 0:
                self._R /= total
            self._last = None
        return self._R
