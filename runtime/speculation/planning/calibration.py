"""Calibration: the measured acceptance rate of drawn tokens by their draft probability, learned while a request runs.

DySpec takes the draft's probability of a drawn token for the probability that the token is accepted. At high
temperature this is far too low: a token is accepted with 1 - TV(p, q) on average, for any number of other likely
tokens. The tree then grows wide where depth would pay. The correction is a table over the token's rank among its
siblings and its probability. The table is updated after each round and fixed during a round, so it does not depend on
the round's own draws.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Protocol

from ..graph.token_tree import TokenTree

RANKS, BINS = 4, 12  # later siblings share a row; bin b holds probabilities in (2^-(b+1), 2^-b]
TYPICAL = (0.6, 0.3, 0.2, 0.1)  # acceptance by rank before the first observation
PRIOR = 4.0  # weight of the more general estimate, in observations
FLOOR = 1e-3  # every estimate is between FLOOR and 1 - FLOOR


class Estimate(Protocol):
    """The probability that a token is accepted when verification reaches it."""

    def __call__(self, rank: int, share: float) -> float:
        """rank: siblings drawn before the token. share: its probability among the tokens that remained."""


def uncorrected(rank: int, share: float) -> float:
    """The paper's estimate: the draft's probability itself."""
    return share


class Calibration:
    """One request's table of estimates."""

    def __init__(self) -> None:
        # By rank: of each bin, and of all of them.
        self._accepted, self._offered = [[0] * BINS for _ in range(RANKS)], [[0] * BINS for _ in range(RANKS)]
        self._all_accepted, self._all_offered = [0] * RANKS, [0] * RANKS

    def __call__(self, rank: int, share: float) -> float:
        return self._estimate(min(rank, RANKS - 1), bin_of(share))

    def logs(self) -> array[float]:
        """log a and log (1 - a) of each estimate a, by rank and bin."""
        cells = (self._estimate(rank, cell) for rank in range(RANKS) for cell in range(BINS))
        return array("d", [each for a in cells for each in (math.log(a), math.log1p(-a))])

    def _estimate(self, rank: int, cell: int) -> float:
        """The prior of each cell is the estimate of its whole rank, whose prior is TYPICAL."""
        whole = (self._all_accepted[rank] + PRIOR * TYPICAL[rank]) / (self._all_offered[rank] + PRIOR)
        a = (self._accepted[rank][cell] + PRIOR * whole) / (self._offered[rank][cell] + PRIOR)
        return FLOOR if a < FLOOR else 1 - FLOOR if a > 1 - FLOOR else a

    def update(self, tree: TokenTree, accepted: Sequence[int]) -> None:
        """Learn from one round. accepted: the accepted rows of `tree`."""
        kept, shares = set(accepted), tree.shares
        for row in (0, *accepted):
            for rank, child in enumerate(tree.children[row]):
                counted, cell = min(rank, RANKS - 1), bin_of(shares[child])
                self._offered[counted][cell] += 1
                self._all_offered[counted] += 1
                if child in kept:
                    self._accepted[counted][cell] += 1
                    self._all_accepted[counted] += 1
                    break


def bin_of(share: float) -> int:
    return min(int(-math.log2(max(share, 1e-9))), BINS - 1)
