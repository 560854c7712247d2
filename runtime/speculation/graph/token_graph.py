"""TokenGraph: one round's proposal while the draft grows it."""

from __future__ import annotations

import bisect
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...sampling.sampler import Candidates

ROOT = 0  # the last committed token


class Edge(NamedTuple):
    """One continuation. gain: log-value of the child minus its parent's, see TokenGraph. looked_up: a prompt
    lookup found the child. R [K]: the distribution from which a drawn child was drawn, which is q without the siblings
    drawn before it."""

    child: int
    gain: float
    looked_up: bool
    R: NDArray[np.float64] | None


class Best:
    """Log-values of the tokens expected so far. A token that is not among the `size` largest cannot be kept."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: list[float] = []  # ascending

    def offer(self, value: float) -> None:
        """Add an expected token of this value."""
        bisect.insort(self._values, value)

    def withdraw(self, value: float) -> None:
        del self._values[bisect.bisect_left(self._values, value)]

    def admits(self, value: float) -> bool:
        """Whether one more token of this value would be among the largest. The earlier one of equal tokens is kept."""
        return value > self._least()

    def holds(self, value: float) -> bool:
        """Whether a token that was offered with this value is among the largest."""
        return value > -math.inf and value >= self._least()

    def _least(self) -> float:
        return self._values[-self._size] if len(self._values) >= self._size else -math.inf


class TokenGraph:
    """A directed acyclic graph; nodes in creation order, node 0 is the root. The edges of a node are in draw order.

    The first edge to a node comes from its parent: `parents`, `depths` and the node's slot in the draft's KV cache
    belong to the context of this edge. Further edges are merges (GSD). Each path from the root is a separate candidate
    text when the graph is unrolled.

    A node's log-value is the sum of the gains on its path. For chosen tokens it is the path's log-probability. For
    drawn tokens it may depend only on facts known *before* the node's own token was drawn; else pruning by the value
    would be biased. `shares[n]`: the draft's probability of n's token among the tokens that remained when it was drawn
    or chosen. `draft_probs[n]`: the distribution q from which n's children were drawn. `acceptance[n]`: the probability
    that the target accepts n, given that it accepts n's parent, if a head has estimated it.
    """

    def __init__(self, root_token: int) -> None:
        self.tokens = [root_token]
        self.parents = [-1]
        self.depths = [0]
        self.values = [0.0]
        self.shares = [1.0]
        self.edges: list[list[Edge]] = [[]]
        self.nodes_of: dict[int, list[int]] = {root_token: [ROOT]}  # token -> nodes that carry it
        self.draft_probs: dict[int, Candidates] = {}
        self.acceptance: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def add(
        self,
        parent: int,
        token: int,
        gain: float,
        share: float,
        looked_up: bool = False,
        R: NDArray[np.float64] | None = None,
    ) -> int:
        """Add a child of `parent`; for the arguments see Edge and `shares`. Returns the new node."""
        node = len(self.tokens)
        self.tokens.append(token)
        self.nodes_of.setdefault(token, []).append(node)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.values.append(self.values[parent] + gain)
        self.shares.append(share)
        self.edges[parent].append(Edge(node, gain, looked_up, R))
        self.edges.append([])
        return node

    def link(self, parent: int, node: int, gain: float, R: NDArray[np.float64] | None = None) -> None:
        """Add a merge edge to an existing node. Raises ValueError if the edge would close a cycle."""
        if self.reaches(node, parent):
            raise ValueError(f"an edge from node {parent} to its ancestor {node} would close a cycle")
        self.edges[parent].append(Edge(node, gain, False, R))

    def reaches(self, start: int, goal: int) -> bool:
        stack, seen = [start], {start}
        while stack:
            node = stack.pop()
            if node == goal:
                return True
            following = {edge.child for edge in self.edges[node]} - seen
            seen |= following
            stack.extend(following)
        return False

    def rank(self, node: int) -> int:
        """The number of siblings that were drawn or chosen before `node`."""
        siblings = [edge.child for edge in self.edges[self.parents[node]]]
        return siblings.index(node) if node in siblings else 0

    def probability(self, node: int) -> float:
        """The draft's probability of a node's token after its parent."""
        parent = self.parents[node]
        if parent in self.draft_probs:
            return self.draft_probs[parent].probability(self.tokens[node])
        return self.shares[node]

    def path(self, node: int) -> list[int]:
        """Tokens from the root (exclusive) to `node` (inclusive), along parents."""
        tokens = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def ancestors(self, node: int) -> list[int]:
        """`node`, its parent, and so on up to the root."""
        nodes = [node]
        while node != ROOT:
            node = self.parents[node]
            nodes.append(node)
        return nodes
