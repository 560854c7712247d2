"""Draws of tokens without replacement, one at a time, for sampled proposals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...engines.base import ForwardOutput
from ...sampling.random import RandomStream
from ...sampling.sampler import Candidates
from ..graph.token_graph import TokenGraph
from .draft_vocabulary import NodeSampler


class Drawing:
    """Successive draws from q, each token at most once. `drawn`: the number of draws so far."""

    def __init__(self, q: Candidates) -> None:
        self._ids, self._R = q
        self._last = 0  # index of the latest drawn token. R still contains it, because most nodes need only one draw
        self.drawn = 0

    @property
    def exhausted(self) -> bool:
        """Whether every token with a positive probability was drawn."""
        return self.drawn == len(self._ids)

    def draw(self, stream: RandomStream) -> tuple[int, float, NDArray[np.float64]]:
        """Draw the next token. Returns the token, its probability under R, and R [K], the distribution of this draw."""
        if self.drawn:
            self._R = self._R.copy()  # earlier draws keep their R
            self._R[self._last] = 0.0
            self._R /= np.add.reduce(self._R)
        R = self._R
        self._last = last = stream.categorical(R)
        self.drawn += 1
        return self._ids.item(last), R.item(last), R


def drawings(graph: TokenGraph, nodes: Sequence[int], output: ForwardOutput, sampler: NodeSampler) -> list[Drawing]:
    """A Drawing below each of these nodes. The graph stores each q. Row i of `output`: the draft's after nodes[i]."""
    logits, path, prepared = output.logits, graph.path, output.softmaxes
    qs = [
        sampler.candidates(logits[row], path(node), prepared[row] if row < len(prepared) else None)
        for row, node in enumerate(nodes)
    ]
    graph.draft_probs.update(zip(nodes, qs, strict=True))
    return [Drawing(q) for q in qs]
