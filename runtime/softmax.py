"""Softmax of a row of logits, up to a factor: what tokens are drawn from, before truncation.

Verification needs it for every row of an accepted path, over the whole vocabulary, so an engine may bring a faster one
than numpy's (`BringsSoftmax`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


class Weights(NamedTuple):
    """Probabilities [V] up to a factor, and their sum."""

    values: NDArray[np.floating[Any]]
    total: float


class Softmax(Protocol):
    """Of logits [V], at a positive temperature. dtype: of all weights that are written."""

    dtype: type[np.floating[Any]]

    def weights(
        self, logits: NDArray[np.floating[Any]], temperature: float, values: NDArray[np.floating[Any]]
    ) -> Weights:
        """exp((logits - max) / temperature), written to `values` [V]."""

    def likely(
        self, logits: NDArray[np.floating[Any]], temperature: float, share: float
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Tokens at least `share` times as probable as the best one: ids [K], ascending, and their weights [K]."""


@runtime_checkable
class BringsSoftmax(Protocol):
    """An engine with a softmax of its own."""

    @property
    def softmax(self) -> Softmax: ...


class NumpySoftmax:
    """In float64."""

    dtype: type[np.floating[Any]] = np.float64

    def weights(
        self, logits: NDArray[np.floating[Any]], temperature: float, values: NDArray[np.floating[Any]]
    ) -> Weights:
        """See Softmax.weights."""
        np.copyto(values, logits)
        with np.errstate(over="ignore"):  # in fp32, what is that far below the best becomes -inf: probability 0
            values -= values.max()
            values /= temperature
        np.exp(values, out=values)
        return Weights(values, float(values.sum(dtype=np.float64)))

    def likely(
        self, logits: NDArray[np.floating[Any]], temperature: float, share: float
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """See Softmax.likely."""
        highest = float(logits[logits.argmax()])
        ids = (logits >= highest + temperature * math.log(share)).nonzero()[0]
        return ids, np.exp((logits[ids].astype(np.float64) - highest) / temperature)


def softmax_of(engine: object) -> Softmax:
    """The fastest one beside this engine."""
    return engine.softmax if isinstance(engine, BringsSoftmax) else NumpySoftmax()
