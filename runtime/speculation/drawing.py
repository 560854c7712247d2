"""Drawing tokens without replacement, one at a time: what every sampled proposal is made of."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..random import RandomStream


class Drawing:
    """Successive draws from q [V] float64, each token at most once. R is what remains, renormalised."""

    def __init__(self, q: NDArray[np.float64]) -> None:
        self.R = q.copy()

    @property
    def exhausted(self) -> bool:
        """Whether every token with any probability was drawn."""
        return not self.R.any()

    def draw(self, stream: RandomStream) -> tuple[int, float]:
        """The next token and its share of what remained before it."""
        y = stream.categorical(self.R)
        share = float(self.R[y])
        self.R[y] = 0.0
        remaining = self.R.sum()
        if remaining > 0:
            self.R /= remaining
        return y, share
