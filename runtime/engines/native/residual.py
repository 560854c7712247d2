"""The softmax of a row and its residual in the kernels: of the whole row, only what is drawn or offered is computed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ....plugins.native.library import RUN, NativeLibrary, address
from ....plugins.native.residual import Offers, Row
from ...sampling.random import RandomStream
from ...sampling.weights import Floats


class NativeWeights:
    """See Weights. They are computed from the row's logits, which must stay as they are meanwhile."""

    __slots__ = ("_arrays", "library", "row", "total")

    def __init__(
        self,
        library: NativeLibrary,
        row: Row,
        total: float,
        arrays: tuple[Floats, NDArray[np.float64], Floats],
    ) -> None:
        """row: with the addresses of its logits and sums. arrays: these two, and a buffer [V] of float32."""
        self.library, self.row, self.total, self._arrays = library, row, total, arrays

    @property
    def values(self) -> Floats:
        logits, _, values = self._arrays
        return self.library.weigh(logits, self.row.peak, self.row.temperature, values)

    def draw(self, stream: RandomStream) -> int:
        R = np.array((1.0, self.total))  # nothing is offered
        return draw(self, Offers(None, 0, address(R)), stream)

    def residual(self, ids: NDArray[np.int64]) -> NativeResidual:
        return NativeResidual(self, ids)


class NativeResidual:
    __slots__ = ("_R", "_ids", "_offers", "_weights", "probs")

    def __init__(self, weights: NativeWeights, ids: NDArray[np.int64]) -> None:
        count = len(ids)
        R = np.empty(count + 2)
        self._weights, self._ids, self._R, self.probs = weights, ids, R, R[:count]
        self._offers = Offers(address(ids), count, address(R))
        weights.library.offer(weights.row, self._offers, weights.total)

    def reject(self, offered: NDArray[np.float64], pi: float = 1.0) -> float:
        rejected: float = self._weights.library.reject(self._offers, address(offered), pi)
        return rejected

    def draw(self, stream: RandomStream) -> int:
        return draw(self._weights, self._offers, stream)


def draw(weights: NativeWeights, offers: Offers, stream: RandomStream) -> int:
    """Draw a token: first the run of columns in which it lies, if there are several, then one of its columns."""
    library, row, run = weights.library, weights.row, 0
    if row.size > RUN:
        masses = np.empty(-(-row.size // RUN))
        library.residual_runs(row, offers, address(masses))
        run = stream.categorical(masses)
    chosen = np.empty(RUN)
    count = library.residual_run(row, offers, run, address(chosen))
    return run * RUN + stream.categorical(chosen[:count])
