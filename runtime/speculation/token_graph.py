"""TokenGraph: the hypotheses of one round, while they grow."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROOT = 0  # the last committed token


class TokenGraph:
    """Nodes in creation order, parents first; node 0 is the root. Children keep the order in which they were drawn.

    `values[n]` ranks nodes: the log-probability of the path from the root under the draft. `draft_probs[n]` is the
    distribution q [V] that the children of n were drawn from, for the nodes whose children were drawn at all.
    """

    def __init__(self, root_token: int) -> None:
        self.tokens = [root_token]
        self.parents = [-1]
        self.depths = [0]
        self.values = [0.0]
        self.draft_probs: dict[int, NDArray[np.float64]] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, log_prob: float) -> int:
        """A new child of `parent`, with the draft's log-probability of `token` there. Returns the node."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.values.append(self.values[parent] + log_prob)
        return len(self.tokens) - 1

    def path(self, node: int) -> list[int]:
        """Tokens from the root (exclusive) to `node` (inclusive)."""
        tokens = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]
