"""How many tokens of a proposal will be accepted: chains and trees of every size and depth, learned online.

Two numbers say what a draft is worth: α, the chance that its first choice for a token is accepted, and ρ, the share of
the remaining cases that its next choice saves. A chain needs α alone. A tree of n tokens is what its growers make:
the n most valuable nodes, a node of choices k_1..k_d being worth

    v = Π a(k_i),   a(0) = α,   a(k) = (1 - α) ρ (1 - ρ)^(k - 1)

so that the values at depth d add up to the chance to get so far. A draft that knows where it is sure does better, a
tree cut short does worse: that is learned for each size and depth, the two numbers being the prior.
Rows of a tree stand in order of value, so the n best of them are the tree a budget of n would have had, and its first
choices the chain: one verified round tells what every smaller proposal would have got.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..graph.token_tree import TokenTree

MEMORY = 0.96  # what a round counts for after the next one: about 25 rounds are remembered
CARRIED = 0.5  # what a request's rounds count for in the next request
FIRST_GUESS = 0.6  # α before anything was seen
SAVED_GUESS = 0.3  # ρ before anything was seen
PRIOR = 5.0  # observations a guess counts for
STEPS = 40  # the prior of trees is computed for so many values of α and of ρ


class Shapes(NamedTuple):
    """The proposals to choose from: chains, where `chain`, and trees of the given `sizes`, in tokens, ascending.
    depth: of the deepest. frontier: rows of a draft pass. given: tokens of a prompt lookup that come on top."""

    sizes: tuple[int, ...]
    depth: int
    frontier: int
    chain: bool
    given: int

    @property
    def grid(self) -> tuple[int, int]:
        """Kinds and sizes, the chain first, and depths."""
        return self.chain + len(self.sizes), self.depth


class Choice(NamedTuple):
    """What verification took below one row. rank: of the child it accepted, None for none. offered: children."""

    rank: int | None
    offered: int


def choices_of(tree: TokenTree, accepted: Sequence[int]) -> list[Choice]:
    """The verifier's choices along an accepted path, among what was drawn or chosen. A row says nothing where a token
    that was given is accepted: the others may never have been looked at."""
    choices = []
    for row, taken in zip((0, *accepted), (*accepted, None), strict=True):
        drawn = [child for child in tree.children[row] if child not in tree.certain]
        if drawn and taken not in tree.certain:
            choices.append(Choice(None if taken is None else drawn.index(taken), len(drawn)))
    return choices


class AcceptanceEstimate:
    """Counts of one request's rounds, recent ones more than old ones."""

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self._offered, self._accepted = np.zeros(shapes.grid), np.zeros(shapes.grid)
        # Rows: α, ρ. Columns: tried, succeeded.
        self._chances = np.zeros((2, 2))

    def carried(self) -> AcceptanceEstimate:
        """Where the next request starts."""
        carried = AcceptanceEstimate(self._shapes)
        carried._offered, carried._accepted = self._offered * CARRIED, self._accepted * CARRIED
        carried._chances = self._chances * CARRIED
        return carried

    def observe(self, size: int | None, depth: int, accepted: Sequence[int], choices: Sequence[Choice]) -> None:
        """One verified round of a tree of `size` tokens, None for a chain, that was at most `depth` deep."""
        for counts in (self._offered, self._accepted, self._chances):
            counts *= MEMORY
        for rank, offered in choices:
            self._chances[0] += 1, rank == 0
            if rank != 0 and offered > 1:
                self._chances[1] += 1, rank == 1
        if self._shapes.chain:
            self._observe_chain(size is None, depth, accepted, choices)
        for row, smaller in enumerate(self._shapes.sizes, start=self._shapes.chain):
            if size is None or smaller > size:
                return
            self._enter(row, depth, smaller + self._shapes.given, accepted)

    def accepted(self) -> NDArray[np.float64]:
        """E[accepted] [kinds and sizes, depths]: the sum over depths of the chance to get so far."""
        shapes = self._shapes
        alpha, saved = (
            (succeeded + PRIOR * guess) / (tried + PRIOR)
            for (tried, succeeded), guess in zip(self._chances.tolist(), (FIRST_GUESS, SAVED_GUESS), strict=True)
        )
        prior = np.full(shapes.grid, alpha)
        prior[int(shapes.chain) :] = tree_steps(round(alpha * STEPS), round(saved * STEPS), shapes)
        step = (self._accepted + PRIOR * prior) / (self._offered + PRIOR)
        expected: NDArray[np.float64] = np.where(prior > 0, step, 0.0).cumprod(1).cumsum(1)
        return expected

    def _observe_chain(self, is_chain: bool, depth: int, accepted: Sequence[int], choices: Sequence[Choice]) -> None:
        if is_chain:
            self._enter(0, depth, depth + self._shapes.given, accepted)
            return
        for column, (rank, _) in enumerate(choices[:depth]):
            self._offered[0, column] += 1
            self._accepted[0, column] += rank == 0
            if rank != 0:
                return

    def _enter(self, row: int, depth: int, rows: int, accepted: Sequence[int]) -> None:
        """What a proposal of so many rows would have got."""
        for column in range(min(depth, rows)):
            self._offered[row, column] += 1
            if column >= len(accepted) or accepted[column] > rows:
                return
            self._accepted[row, column] += 1


@lru_cache(maxsize=1024)
def tree_steps(alpha: int, saved: int, shapes: Shapes) -> NDArray[np.float64]:
    """[sizes, depths]: the chance to get one deeper in a tree; zero beyond as many tokens. alpha, saved: of STEPS."""
    a, rho = min(max(alpha, 1), STEPS - 1) / STEPS, min(max(saved, 1), STEPS - 1) / STEPS
    reached = np.zeros((len(shapes.sizes), shapes.depth))
    heap, nodes = [(-a, 1, 0, 1.0)], 0  # -v, depth, choice, v of the parent
    for row, size in enumerate(shapes.sizes):
        if row:
            reached[row] = reached[row - 1]
        while heap and nodes < size + shapes.given:
            nodes += 1
            value, depth, rank, parent = heapq.heappop(heap)
            reached[row, depth - 1] -= value
            if depth < shapes.depth:
                heapq.heappush(heap, (value * a, depth + 1, 0, -value))
            if rank + 1 < max(shapes.frontier, 1):
                heapq.heappush(heap, (-parent * (1 - a) * rho * (1 - rho) ** rank, depth, rank + 1, parent))
    before = np.concatenate([np.ones((len(shapes.sizes), 1)), reached[:, :-1]], axis=1)
    steps: NDArray[np.float64] = np.divide(reached, before, out=np.zeros_like(reached), where=before > 0)
    return steps
