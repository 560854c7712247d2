"""Calibration of predicted probabilities: binary KL, reliability, expected calibration error, temperature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BINS = 10
COLDEST, HOTTEST = 0.05, 20.0
GOLDEN = (5**0.5 - 1) / 2
Floats = NDArray[np.float64]


class Bin(NamedTuple):
    """Predictions in one tenth of [0, 1]: their number, their mean, and the mean of the labels."""

    tokens: int
    predicted: float
    observed: float


class CalibrationFigures(NamedTuple):
    """Figures of one set of predictions."""

    nll: float  # cross-entropy with the soft labels, in nats per token
    binary_kl: float  # its part above the labels' own entropy
    ece: float  # mean distance of predicted and observed over the bins, by tokens
    bins: tuple[Bin, ...]


def calibration(logits: Floats, labels: Floats) -> CalibrationFigures:
    """Compare log-odds [N] with soft labels [N]."""
    nll = negative_log_likelihood(logits, labels)
    bins = reliability(sigmoid(logits), labels)
    ece = sum(each.tokens * abs(each.predicted - each.observed) for each in bins) / len(labels)
    return CalibrationFigures(nll, max(0.0, nll - entropy(labels)), ece, tuple(bins))


def reliability(predicted: Floats, labels: Floats) -> Sequence[Bin]:
    """Bins of equal width, empty ones left out."""
    index = np.minimum((predicted * BINS).astype(np.int64), BINS - 1)
    members = [index == number for number in range(BINS)]
    return [
        Bin(int(each.sum()), float(predicted[each].mean()), float(labels[each].mean()))
        for each in members
        if each.any()
    ]


def fit_temperature(logits: Floats, labels: Floats) -> float:
    """The temperature T that minimises the NLL of logits / T (Guo et al., 1706.04599).

    The NLL is convex in 1/T, so golden-section search over log T finds it. Never worse than T = 1.
    """

    def nll(log_temperature: float) -> float:
        return negative_log_likelihood(logits / np.exp(log_temperature), labels)

    low, high = np.log(COLDEST), np.log(HOTTEST)
    while high - low > 1e-4:
        left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        if nll(left) < nll(right):
            high = right
        else:
            low = left
    best = float((low + high) / 2)
    return float(np.exp(best)) if nll(best) < nll(0.0) else 1.0


def negative_log_likelihood(logits: Floats, labels: Floats) -> float:
    """-mean[y log σ(z) + (1 - y) log(1 - σ(z))], computed without overflow."""
    return float((np.logaddexp(0.0, logits) - labels * logits).mean())


def entropy(labels: Floats) -> float:
    """Mean entropy of soft labels, in nats."""
    total = np.zeros_like(labels)
    for side in (labels, 1 - labels):
        total -= side * np.log(np.where(side > 0, side, 1.0))
    return float(total.mean())


def sigmoid(logits: Floats) -> Floats:
    probability: Floats = np.exp(-np.logaddexp(0.0, -logits))
    return probability
