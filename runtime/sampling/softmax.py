"""Softmax of a row of logits, up to a factor: the distribution of a token before truncation.

Verification needs a softmax over the whole vocabulary for every row of an accepted path. Therefore an engine may
provide a faster one than numpy's (`HasSoftmax`), and may compute what a request will ask of it (`SoftmaxSettings`) in
the pass that scores the row.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ...models.errors import EngineError
from .weights import Floats, NumpyWeights, Weights

Likely = tuple[NDArray[np.int64], NDArray[np.float64]]  # ids [K], ascending, and weights [K]

NO_NUMBERS = (
    "the model computed a logit that is NaN or infinite: its weights are damaged, or too large for their type; build "
    "it again, from another copy or with --precision fp32"
)


class SoftmaxSettings(NamedTuple):
    """What a request asks of a row's softmax: at this temperature the weights of all tokens, if `weights`, and those at
    least `share` times as probable as the best one, if `share` is above 0; at temperature 0 the best token."""

    temperature: float
    weights: bool
    share: float


class Softmax(Protocol):
    """Softmax of logits [V] at a positive temperature. dtype: type of the weights. Raises EngineError if a logit is NaN
    or +inf, or if all are -inf."""

    dtype: type[np.floating[Any]]

    def best(self, logits: Floats) -> int:
        """The most probable token, the first of equal ones."""

    def weights(self, logits: Floats, temperature: float, values: Floats) -> Weights:
        """exp((logits - max) / temperature). values: a buffer [V] for them."""

    def likely(self, logits: Floats, temperature: float, share: float) -> Likely:
        """The tokens that are at least `share` times as probable as the most probable one: ids [K], ascending, and
        their weights [K], which may be a view that is valid until the engine's next pass."""


@runtime_checkable
class HasSoftmax(Protocol):
    @property
    def softmax(self) -> Softmax: ...


class NumpySoftmax:
    """Softmax in float64."""

    dtype: type[np.floating[Any]] = np.float64

    def best(self, logits: Floats) -> int:
        return best(logits)

    def weights(self, logits: Floats, temperature: float, values: Floats) -> Weights:
        peak = float(logits[best(logits)])
        with np.errstate(over="ignore"):  # a difference may become -inf; its weight is then 0
            # In float64 for any dtype of `values`, because 0 / 1e-46 is 0 / 0 in float32.
            np.subtract(logits, peak, out=values, dtype=np.float64, casting="same_kind")
            np.divide(values, temperature, out=values, dtype=np.float64, casting="same_kind")
        np.exp(values, out=values)
        return NumpyWeights(float(values.sum(dtype=np.float64)), values)

    def likely(self, logits: Floats, temperature: float, share: float) -> Likely:
        peak = float(logits[best(logits)])
        lowest = -float(np.finfo(logits.dtype).max)  # a token at -inf is never likely
        ids = (logits >= max(peak + temperature * math.log(share), lowest)).nonzero()[0]
        with np.errstate(over="ignore"):
            return ids, np.exp((logits[ids].astype(np.float64) - peak) / temperature)


def best(logits: Floats) -> int:
    """The first largest logit's index. Raises EngineError if this logit is infinite, or if any logit is NaN."""
    place = int(logits.argmax())  # the index of the first NaN, if there is one
    if not math.isfinite(logits[place]):
        raise EngineError(NO_NUMBERS)
    return place


def softmax_of(engine: object) -> Softmax:
    """The engine's own softmax, or numpy's."""
    return engine.softmax if isinstance(engine, HasSoftmax) else NumpySoftmax()
