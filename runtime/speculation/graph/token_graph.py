"""TokenGraph: the hypotheses of one round, while they grow."""

from __future__ import annotations

import bisect
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...sampling.sampler import Candidates

ROOT = 0  # the last committed token


class Edge(NamedTuple):
    """One continuation. gain: log-value of the child minus its parent's, see TokenGraph. certain: the child was not
    drawn from the parent's q but given, with probability one. R [K]: what a drawn child was drawn from, q
    without the siblings drawn before it."""

    child: int
    gain: float
    certain: bool
    R: NDArray[np.float64] | None


class Best:
    """Log-values of the tokens counted on so far: what is not among the `size` largest of them cannot be kept."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: list[float] = []  # ascending

    def offer(self, value: float) -> None:
        """Count on a token of this value."""
        bisect.insort(self._values, value)

    def withdraw(self, value: float) -> None:
        """No longer count on a token that was offered."""
        del self._values[bisect.bisect_left(self._values, value)]

    def admits(self, value: float) -> bool:
        """Whether one more token of this value would be among the largest. Ties go to the earlier token."""
        return value > self._least()

    def holds(self, value: float) -> bool:
        """Whether a token that was offered with this value is among the largest."""
        return value > -math.inf and value >= self._least()

    def _least(self) -> float:
        return self._values[-self._size] if len(self._values) >= self._size else -math.inf


class TokenGraph:
    """A directed acyclic graph; nodes in creation order, node 0 is the root. Edges keep the order they were drawn in.

    The first edge that reached a node is its parent: `parents`, `depths`, and the one draft cache entry, belong to that
    context. Further edges are merges (GSD); each path from the root is a hypothesis of its own when it is unrolled.

    A node's log-value is the sum of the gains on its path. Of chosen tokens it is the path's log-probability; of drawn
    ones it may hold only what was known *before* the node's own token was drawn, or pruning by it would be biased.
    `shares[n]`: the draft's probability of n's token among what remained when it was drawn or chosen.
    `draft_probs[n]` is the distribution q that n's children were drawn from. `acceptance[n]`: the probability that
    the target accepts n, given its parent, where a head has estimated it.
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
        certain: bool = False,
        R: NDArray[np.float64] | None = None,
    ) -> int:
        """A new child of `parent`; for the arguments see Edge and `shares`. Returns the node."""
        node = len(self.tokens)
        self.tokens.append(token)
        self.nodes_of.setdefault(token, []).append(node)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.values.append(self.values[parent] + gain)
        self.shares.append(share)
        self.edges[parent].append(Edge(node, gain, certain, R))
        self.edges.append([])
        return node

    def link(self, parent: int, node: int, gain: float, R: NDArray[np.float64] | None = None) -> None:
        """A merge edge to a node that exists. Raises ValueError when it would close a cycle."""
        if self.reaches(node, parent):
            raise ValueError(f"an edge from node {parent} to its ancestor {node} would close a cycle")
        self.edges[parent].append(Edge(node, gain, False, R))

    def reaches(self, start: int, goal: int) -> bool:
        """Whether a path leads from `start` to `goal`."""
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
        """Siblings that were drawn or chosen before `node`."""
        siblings = [edge.child for edge in self.edges[self.parents[node]] if not edge.certain]
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
