"""SpecDec++ (arXiv 2405.19715): stop drafting when a rejection has become likely enough; and its training-free rivals.

A head on the draft's last hidden state estimates, for each token the draft has read, the probability a that the target
accepts it, given that everything before it was accepted. Theorem 3.1: drafting on is no longer worth its cost once

    P(some token among Y_1..Y_k is rejected) = 1 - Π a(Y_i)  >  h

Here the product runs along a path of the graph, so that each branch stops for itself. A stopper sees only what is drawn
already: it may forbid further draws, never drop a token because of its own score, which is biased (TV 0.15 measured).

What the paper leaves out is the price of asking: a(Y_k) is known only after the draft pass over Y_k, and that pass
serves nothing else when the answer is to stop. `SpecDecPP` therefore asks a cheaper estimate first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..graph.token_graph import ROOT, TokenGraph
from ..planning.calibration import Estimate


class Stopper(Protocol):
    """Ends growth below a node, before its children are drawn or before the draft scores it."""

    def before_draw(self, graph: TokenGraph, node: int, logits: NDArray[np.float32]) -> bool:
        """Whether to draw nothing below `node`, which was just scored: `logits` [V] are the draft's after it."""

    def before_score(self, graph: TokenGraph, node: int) -> bool:
        """Whether to spend no draft pass on `node`, which stays proposed."""


class Fixed:
    """Grow to the limits of the configuration."""

    def before_draw(self, graph: TokenGraph, node: int, logits: NDArray[np.float32]) -> bool:
        return False

    def before_score(self, graph: TokenGraph, node: int) -> bool:
        return False


def hopeful(rank: int, share: float) -> float:
    """No estimate before the draft has read a token: it is as good as accepted."""
    return 1.0


@dataclass(frozen=True, slots=True)
class SpecDecPP:
    """The paper's rule with two improvements. a(Y_k) is known once Y_k is scored: stop *before* Y_{k+1} is drawn. And
    where `estimate`, which knows only the draft's probability of Y_k, already makes a rejection likely enough, Y_k
    stays proposed but is not scored, which saves the round's last draft pass.

    h: threshold on the probability of a rejection. k_min: tokens proposed in any case.
    """

    h: float
    k_min: int
    estimate: Estimate = hopeful

    def before_draw(self, graph: TokenGraph, node: int, logits: NDArray[np.float32]) -> bool:
        return graph.depths[node] >= self.k_min and rejection(graph, node) > self.h

    def before_score(self, graph: TokenGraph, node: int) -> bool:
        if graph.depths[node] < self.k_min:
            return False
        survival = 1 - rejection(graph, graph.parents[node])
        return 1 - survival * self.estimate(graph.rank(node), graph.shares[node]) > self.h


@dataclass(frozen=True, slots=True)
class SpecDecPPLagged:
    """The rule as released: the decision comes one token late. Y_{k+1} is drawn and submitted, unscored."""

    h: float
    k_min: int

    def before_draw(self, graph: TokenGraph, node: int, logits: NDArray[np.float32]) -> bool:
        return False

    def before_score(self, graph: TokenGraph, node: int) -> bool:
        return graph.depths[node] >= self.k_min and rejection(graph, graph.parents[node]) > self.h


@dataclass(frozen=True, slots=True)
class Confidence:
    """Hugging Face's assistant threshold (DISCO): stop after a token the draft gave less than `threshold`."""

    threshold: float

    def before_draw(self, graph: TokenGraph, node: int, logits: NDArray[np.float32]) -> bool:
        return False

    def before_score(self, graph: TokenGraph, node: int) -> bool:
        return graph.probability(node) < self.threshold


@dataclass(frozen=True, slots=True)
class Entropy:
    """AdaEDL (2410.18351): stop where 1 - √(γ H(q)), a lower bound on acceptance, falls below `threshold`."""

    threshold: float
    gamma: float = 0.5

    def before_draw(self, graph: TokenGraph, node: int, logits: NDArray[np.float32]) -> bool:
        if node == ROOT:
            return False
        weights = np.exp(logits - logits.max())
        q = weights / weights.sum()
        entropy = -float((q * np.log(np.maximum(q, np.finfo(np.float32).tiny))).sum())  # BLAS would spin
        return 1 - math.sqrt(self.gamma * max(0.0, entropy)) < self.threshold

    def before_score(self, graph: TokenGraph, node: int) -> bool:
        return False


def rejection(graph: TokenGraph, node: int) -> float:
    """1 - Π a over the path to `node`, by the head's estimates."""
    survival = 1.0
    for ancestor in graph.ancestors(node)[:-1]:
        survival *= graph.acceptance.get(ancestor, 1.0)
    return 1 - survival
