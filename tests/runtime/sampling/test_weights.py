"""Distributions and their residuals: of all tokens of a vocabulary, and of those alone that truncation keeps."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from draftwood.runtime.sampling.random import SeededStream
from draftwood.runtime.sampling.sampler import Candidates
from draftwood.runtime.sampling.weights import KeptWeights, NumpyWeights
from draftwood.runtime.speculation.growers.drawing import Drawing


class Scripted(SeededStream):
    """One draw, decided beforehand; `seen`: the probabilities it was asked to draw with."""

    def __init__(self, index: int) -> None:
        self.index, self.seen = index, np.zeros(0)

    def categorical(self, probabilities: NDArray[np.float64]) -> int:
        self.seen = probabilities.copy()
        return self.index


@pytest.mark.parametrize("num_kept", [1, 3, 6, 9])
@pytest.mark.parametrize("seed", range(20))
def test_a_residual_is_the_one_over_the_whole_vocabulary(seed: int, num_kept: int) -> None:
    """Rejections in a row, for offers that cover some of the tokens: R = norm(max(pi R - D, 0)) everywhere."""
    generator = np.random.default_rng(seed)
    p, ids = generator.dirichlet(np.ones(9)), generator.permutation(9)[:4]
    drawing = Drawing(Candidates(ids, generator.dirichlet(np.ones(4))))
    kept = np.sort(generator.permutation(9)[:num_kept])
    p = np.where(np.isin(np.arange(9), kept), p, 0.0) / p[kept].sum()
    every = NumpyWeights(3.0, 3 * p) if num_kept == 9 else KeptWeights(kept, p[kept], 9)
    assert every.values / every.total == pytest.approx(p)
    residual = every.residual(ids)
    R, pi, whole_pi = p, 1.0, 1.0
    for index in (2, 0, 3):
        _, _, remaining = drawing.draw(Scripted(index))
        D = np.zeros(9)
        D[ids] = remaining
        S = float(np.maximum(whole_pi * R - D, 0).sum())
        pi = residual.reject(remaining, pi)
        R, whole_pi = np.maximum(whole_pi * R - D, 0) / S, S / (S + 1 - whole_pi)
        assert pi == pytest.approx(whole_pi)
        assert residual.probs == pytest.approx(R[ids], abs=1e-12)
    final = Scripted(0)
    assert residual.draw(final) == kept[0]
    assert final.seen == pytest.approx(R[kept], abs=1e-12)
