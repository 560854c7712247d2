"""The distribution of a token after a row of logits, up to a factor, and its residual after rejections: what sampling
and verification draw from. Here with numpy; an engine may compute both itself."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .random import RandomStream

Floats = NDArray[np.floating[Any]]  # of any size
NOTHING = -1  # in place of a token: nothing may follow
CANCELLED = 1e-6  # a difference below this share of its operands has lost too many digits


class Residual(Protocol):
    """R: the residual of the target's distribution p at a row, after rejections of the tokens offered there.

    probs: R [K] of all tokens that may be offered. The others keep their proportions.
    """

    @property
    def probs(self) -> NDArray[np.float64]: ...

    def reject(self, offered: NDArray[np.float64], pi: float = 1.0) -> float:
        """Replace R by R' = norm(max(πR - offered, 0)), for `offered` [K]. Returns π' = S / (S + 1 - π), where S is the
        sum before normalising. S = 0 means that p = q; a rejection then has probability zero up to rounding."""

    def draw(self, stream: RandomStream) -> int:
        """Draw a token from R. The object cannot be used afterwards."""


class Weights(Protocol):
    """Probabilities of V tokens up to a factor. total: their sum."""

    @property
    def total(self) -> float: ...

    @property
    def values(self) -> Floats:
        """Those of all tokens [V], in a buffer that the next call overwrites."""

    def draw(self, stream: RandomStream) -> int:
        """Draw a token; the values are then overwritten."""

    def residual(self, ids: NDArray[np.int64]) -> Residual:
        """R before any rejection. ids int64 [K], ascending: what may be offered. Overwrites the values."""


class NumpyWeights(NamedTuple):
    """Weights whose values [V] are known."""

    total: float
    values: Floats

    def draw(self, stream: RandomStream) -> int:
        values = self.values
        values /= self.total
        return stream.categorical(values)

    def residual(self, ids: NDArray[np.int64]) -> Residual:
        return NumpyResidual(self, ids)


class NumpyResidual:
    """R, computed for the tokens alone that may be offered."""

    def __init__(self, weights: NumpyWeights, ids: NDArray[np.int64]) -> None:
        self._ids, self._values, total = ids, weights.values, weights.total
        offered = self._values[ids].astype(np.float64)
        weight = float(offered.sum())
        rest = total - weight
        if rest < CANCELLED * total:
            rest = float(self._others().sum(dtype=np.float64))
        self._weight = rest
        self.probs = offered / (weight + rest)  # R [K] of `ids`
        self._R_others = rest / (weight + rest)  # R of all other tokens together

    def reject(self, offered: NDArray[np.float64], pi: float = 1.0) -> float:
        excess = np.maximum(pi * self.probs - offered, 0.0)
        others = pi * self._R_others
        S = float(excess.sum()) + others
        if S == 0:
            return float(pi == 1)
        self.probs, self._R_others = excess / S, others / S
        return S / (S + (1.0 - pi))

    def draw(self, stream: RandomStream) -> int:
        R = self._others()
        if self._weight > 0:
            R *= self._R_others / self._weight
        R[self._ids] = self.probs
        return stream.categorical(R)

    def _others(self) -> Floats:
        """The weights of all tokens [V] that are not offered, zero at the others."""
        self._values[self._ids] = 0.0
        return self._values


class KeptWeights(NamedTuple):
    """The tokens that truncation keeps: ids int64 [K], ascending, and probs float64 [K]. size: of the vocabulary, V."""

    ids: NDArray[np.int64]
    probs: NDArray[np.float64]
    size: int

    @property
    def total(self) -> float:
        return 1.0

    @property
    def values(self) -> Floats:
        values = np.zeros(self.size)
        values[self.ids] = self.probs
        return values

    def draw(self, stream: RandomStream) -> int:
        return self.ids.item(stream.categorical(self.probs))

    def residual(self, ids: NDArray[np.int64]) -> KeptResidual:
        return KeptResidual(self, ids)


class KeptResidual:
    """R over the tokens that were kept; of all others it is zero."""

    def __init__(self, weights: KeptWeights, ids: NDArray[np.int64]) -> None:
        self._ids = weights.ids
        places = self._ids.searchsorted(ids)
        self._offered = np.take(self._ids, places, mode="clip") == ids  # [K] of `ids`: whether it was kept
        self._R = NumpyResidual(NumpyWeights(weights.total, weights.probs), places[self._offered])
        self._update()

    def reject(self, offered: NDArray[np.float64], pi: float = 1.0) -> float:
        pi = self._R.reject(offered[self._offered], pi)
        self._update()
        return pi

    def draw(self, stream: RandomStream) -> int:
        return self._ids.item(self._R.draw(stream))

    def _update(self) -> None:
        self.probs = np.zeros(len(self._offered))
        self.probs[self._offered] = self._R.probs


class DeadEnd:
    """Weights and their residual where NOTHING follows: of every token they are zero, and they stay so."""

    total = 1.0

    def __init__(self, count: int = 0) -> None:
        """count: of the tokens that may be offered."""
        self.values = self.probs = np.zeros(count)

    def draw(self, stream: RandomStream) -> int:
        return NOTHING

    def residual(self, ids: NDArray[np.int64]) -> DeadEnd:
        return DeadEnd(len(ids))

    def reject(self, offered: NDArray[np.float64], pi: float = 1.0) -> float:
        """See Residual.reject: S = π."""
        return pi
