"""SpecDec++ (arXiv 2405.19715): drafting stops when a rejection is likely enough. Also two rules without training.

A head on the draft's last hidden state estimates, for each token that the draft has read, the probability a that the
target accepts it, given that all tokens before it are accepted. Theorem 3.1: further drafting costs more than it brings
once

    P(some token among Y_1..Y_k is rejected) = 1 - Π a(Y_i)  >  h

Here the product runs along a path of the graph, so each branch stops separately. A stopper may forbid further draws.
It must never drop a drawn token because of the token's own score: that is biased (docs/papers.md, What is biased).

The paper ignores the cost of the estimate: a(Y_k) is known only after the draft pass over Y_k, and this pass is wasted
if the decision is to stop. Therefore `SpecDecPP` first tests a cheaper estimate.
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
        """Whether to draw nothing below `node`, which was just scored. logits [V]: the draft's after `node`."""

    def before_score(self, graph: TokenGraph, node: int) -> bool:
        """Whether the draft shall not score `node`. The node stays in the proposal."""


class Fixed:
    """Grow to the limits of the configuration."""

    def before_draw(self, graph: TokenGraph, node: int, logits: NDArray[np.float32]) -> bool:
        return False

    def before_score(self, graph: TokenGraph, node: int) -> bool:
        return False


def assume_accepted(rank: int, share: float) -> float:
    """The estimate that every token is accepted, so that nothing stops before the draft has read a token."""
    return 1.0


@dataclass(frozen=True, slots=True)
class SpecDecPP:
    """The paper's rule with two improvements. First, a(Y_k) is known once Y_k is scored, so growth stops *before*
    Y_{k+1} is drawn. Second, `estimate` needs only the draft's probability of Y_k. If `estimate` already makes a
    rejection likely enough, Y_k stays in the proposal but is not scored. This saves the round's last draft pass.

    h: threshold on the probability of a rejection. k_min: tokens proposed in any case.
    """

    h: float
    k_min: int
    estimate: Estimate = assume_accepted

    def before_draw(self, graph: TokenGraph, node: int, logits: NDArray[np.float32]) -> bool:
        return graph.depths[node] >= self.k_min and rejection(graph, node) > self.h

    def before_score(self, graph: TokenGraph, node: int) -> bool:
        if graph.depths[node] < self.k_min:
            return False
        survival = 1 - rejection(graph, graph.parents[node])
        return 1 - survival * self.estimate(graph.rank(node), graph.shares[node]) > self.h


@dataclass(frozen=True, slots=True)
class Confidence:
    """Hugging Face's assistant threshold (DISCO): stop after a token whose draft probability is below `threshold`."""

    threshold: float

    def before_draw(self, graph: TokenGraph, node: int, logits: NDArray[np.float32]) -> bool:
        return False

    def before_score(self, graph: TokenGraph, node: int) -> bool:
        return graph.probability(node) < self.threshold


@dataclass(frozen=True, slots=True)
class Entropy:
    """AdaEDL (2410.18351): stop where 1 - √(γ H(q)), a lower bound on acceptance, is below `threshold`."""

    threshold: float
    gamma: float = 0.5

    def before_draw(self, graph: TokenGraph, node: int, logits: NDArray[np.float32]) -> bool:
        if node == ROOT:
            return False
        weights = np.exp(logits - logits.max())
        q = weights / weights.sum()
        # Not a BLAS product, because the threads of BLAS would spin.
        entropy = -float((q * np.log(np.maximum(q, np.finfo(np.float32).tiny))).sum())
        return 1 - math.sqrt(self.gamma * max(0.0, entropy)) < self.threshold

    def before_score(self, graph: TokenGraph, node: int) -> bool:
        return False


def rejection(graph: TokenGraph, node: int) -> float:
    """1 - Π a over the path to `node`, by the head's estimates."""
    survival = 1.0
    for ancestor in graph.ancestors(node)[:-1]:
        survival *= graph.acceptance.get(ancestor, 1.0)
    return 1 - survival
