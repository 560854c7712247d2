"""Drawing tokens without replacement, one at a time: what every sampled proposal is made of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...engines.base import ForwardOutput
from ...sampling.random import RandomStream
from ...sampling.sampler import Candidates, Sampler
from ..graph.token_graph import TokenGraph


class Drawing:
    """Successive draws from q, each token at most once. `drawn`: how many so far."""

    def __init__(self, q: Candidates) -> None:
        self._ids, self._R = q
        self._last = 0  # where the latest token drawn is, which is still in R: most nodes are drawn from only once
        self.drawn = 0

    @property
    def exhausted(self) -> bool:
        """Whether every token with any probability was drawn."""
        return self.drawn == len(self._ids)

    def draw(self, stream: RandomStream) -> tuple[int, float, NDArray[np.float64]]:
        """The next token, its share of what remained before it, and all that remained, R [K]."""
        if self.drawn:
            self._R = self._R.copy()  # the draws before keep theirs
            self._R[self._last] = 0.0
            self._R /= self._R.sum()
        self._last = stream.categorical(self._R)
        self.drawn += 1
        return int(self._ids[self._last]), float(self._R[self._last]), self._R


def drawings(graph: TokenGraph, nodes: Sequence[int], output: ForwardOutput, sampler: Sampler) -> list[Drawing]:
    """From q below each of these nodes, which the graph keeps; row i of `output` is the draft's after nodes[i]."""
    qs = [sampler.candidates(output.logits[row], graph.path(node)) for row, node in enumerate(nodes)]
    graph.draft_probs.update(zip(nodes, qs, strict=True))
    return [Drawing(q) for q in qs]
