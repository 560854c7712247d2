"""Estimates of the accepted tokens of chains and trees, by size and depth, learned while requests run.

Two numbers describe a draft: α, the probability that its first choice for a token is accepted, and ρ, the probability
that its next choice is accepted after the choices before were rejected. A chain needs only α. A tree of n tokens
consists of the n most valuable nodes. The value of a node that is reached by the choices k_1..k_d is

    v = Π a(k_i),   a(0) = α,   a(k) = (1 - α) ρ (1 - ρ)^(k - 1)

so that the values at depth d add up to the probability that depth d is reached. Real proposals differ: a draft with
good confidence estimates does better, a tree that is cut short does worse. Therefore the acceptance is learned for each
size and depth, and the two numbers only give the prior. Requests of the same kind share a long memory, from which each
of them departs as its own rounds show: a text has too few rounds to learn all of this anew, and the best of many
uncertain estimates is mostly one that is too high.
Rows of a tree stand in order of value. The first n rows are the tree that a budget of n would have given, and the first
choices are the chain. Therefore one verified round shows the acceptance of every smaller proposal, too.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...engines.base import read_only
from ..graph.token_tree import TokenTree

MEMORY = 0.96  # factor on the weight of a request's earlier rounds after each round: about 25 rounds count
LONG_MEMORY = 0.998  # the same of all requests together: about 500 rounds
FIRST_GUESS = 0.6  # α before the first observation
SAVED_GUESS = 0.3  # ρ before the first observation
PRIOR = 4.0  # weight of the prior, in observations
OWN_PRIOR = 10.0  # the same of what all requests together have shown
STEPS = 40  # resolution of α and of ρ for the prior of trees
MAX_WAITING = 64  # rounds that are counted together at most


class Shapes(NamedTuple):
    """The proposals to choose from: chains, if `chain` is true, and trees of the given `sizes` in tokens, ascending.
    depth: greatest depth. frontier: rows of a draft pass, 0 without a draft."""

    sizes: tuple[int, ...]
    depth: int
    frontier: int
    chain: bool

    @property
    def grid(self) -> tuple[int, int]:
        """The shape of arrays over all proposals: kinds and sizes (the chain first) x depths."""
        return self.chain + len(self.sizes), self.depth


class VerifierChoice(NamedTuple):
    """The choice below one row. rank: of the accepted child, None if none was. offered: number of children."""

    rank: int | None
    offered: int


def choices_of(tree: TokenTree, accepted: Sequence[int]) -> list[VerifierChoice]:
    """The verifier's choices along an accepted path."""
    return [
        VerifierChoice(None if taken is None else children.index(taken), len(children))
        for row, taken in zip((0, *accepted), (*accepted, None), strict=True)
        if (children := tree.children[row])
    ]


class Steps(NamedTuple):
    """alpha, saved: α and ρ. Arrays [kinds and sizes, depths]: model: the probability that the next depth is reached by
    α and ρ alone; step: by all that was learned. expected: accepted tokens."""

    alpha: float
    saved: float
    model: NDArray[np.float64]
    step: NDArray[np.float64]
    expected: NDArray[np.float64]


class AcceptanceEstimate:
    """Acceptance counts of one request's rounds, or of many requests'; recent rounds have more weight."""

    def __init__(self, shapes: Shapes, general: AcceptanceEstimate | None = None) -> None:
        """general: the estimate of all requests, from which this departs, learning from the same rounds; else None."""
        self._shapes, self._general = shapes, general
        self._memory = LONG_MEMORY if general is None else MEMORY
        self._offered, self._accepted = np.zeros(shapes.grid), np.zeros(shapes.grid)
        # Rows: α, ρ. Columns: tried, succeeded.
        self._chances = np.zeros((2, 2))
        self._known: Steps | None = None  # until the next observation
        self._waiting: list[tuple[int | None, int, Sequence[int], Sequence[VerifierChoice]]] = []  # rounds, not counted

    def observe(self, size: int | None, depth: int, accepted: Sequence[int], choices: Sequence[VerifierChoice]) -> None:
        """Learn from one verified round. size: tokens of its tree, None for a chain. depth: its greatest depth. Rounds
        are counted together when an estimate is wanted, since a lone one finds nothing in the caches."""
        if self._general is not None:
            self._general.observe(size, depth, accepted, choices)
        self._known = None
        self._waiting.append((size, depth, accepted, choices))
        if len(self._waiting) == MAX_WAITING:
            self._count_waiting()

    def _count_waiting(self) -> None:
        for each in self._waiting:
            self._count(*each)
        self._waiting.clear()

    def _count(self, size: int | None, depth: int, accepted: Sequence[int], choices: Sequence[VerifierChoice]) -> None:
        for counts in (self._offered, self._accepted, self._chances):
            counts *= self._memory
        for rank, offered in choices:
            self._chances[0] += 1, rank == 0
            if rank != 0 and offered > 1:
                self._chances[1] += 1, rank == 1
        if self._shapes.chain:
            self._observe_chain(size is None, depth, accepted, choices)
        for row, smaller in enumerate(self._shapes.sizes, start=self._shapes.chain):
            if size is None or smaller > size:
                return
            self._enter(row, depth, smaller, accepted)

    def expected_accepted(self) -> NDArray[np.float64]:
        """E[accepted] [kinds and sizes, depths]: the sum over depths of the probability that the depth is reached."""
        return self._steps().expected

    def _steps(self) -> Steps:
        """What the counts say at present, together with the prior."""
        self._count_waiting()
        if self._general is not None and not self._chances.any():
            return self._general._steps()
        if self._known is None:
            general = None if self._general is None else self._general._steps()
            guesses = (FIRST_GUESS, SAVED_GUESS) if general is None else (general.alpha, general.saved)
            weight = PRIOR if general is None else OWN_PRIOR
            alpha, saved = (
                (succeeded + weight * guess) / (tried + weight)
                for (tried, succeeded), guess in zip(self._chances.tolist(), guesses, strict=True)
            )
            prior = model = self._model(alpha, saved)
            if general is not None:  # what all requests have shown, moved by the difference in α and ρ
                prior = np.minimum(1.0, general.step * model / np.maximum(general.model, 1e-9))
            step = np.where(model > 0, (self._accepted + weight * prior) / (self._offered + weight), 0.0)
            self._known = Steps(alpha, saved, model, step, step.cumprod(1).cumsum(1))
        return self._known

    def _model(self, alpha: float, saved: float) -> NDArray[np.float64]:
        """What α and ρ alone say: the probability of every step to the next depth."""
        steps = np.full(self._shapes.grid, alpha)
        steps[int(self._shapes.chain) :] = tree_steps(round(alpha * STEPS), round(saved * STEPS), self._shapes)
        return steps

    def _observe_chain(
        self, is_chain: bool, depth: int, accepted: Sequence[int], choices: Sequence[VerifierChoice]
    ) -> None:
        if is_chain:
            self._enter(0, depth, depth, accepted)
            return
        for column, (rank, _) in enumerate(choices[:depth]):
            self._offered[0, column] += 1
            self._accepted[0, column] += rank == 0
            if rank != 0:
                return

    def _enter(self, row: int, depth: int, rows: int, accepted: Sequence[int]) -> None:
        """Count the result that a proposal of the first `rows` rows would have had."""
        for column in range(min(depth, rows)):
            self._offered[row, column] += 1
            if column >= len(accepted) or accepted[column] > rows:
                return
            self._accepted[row, column] += 1


@lru_cache(maxsize=1024)
def tree_steps(alpha: int, saved: int, shapes: Shapes) -> NDArray[np.float64]:
    """[sizes, depths]: the probability that the next depth of a tree is reached, given the depth before; zero where a
    tree has no node. alpha, saved: α and ρ times STEPS."""
    a, rho = min(max(alpha, 1), STEPS - 1) / STEPS, min(max(saved, 1), STEPS - 1) / STEPS
    reached = np.zeros((len(shapes.sizes), shapes.depth))
    heap, nodes = [(-a, 1, 0, 1.0)], 0  # -v, depth, choice, v of the parent
    for row, size in enumerate(shapes.sizes):
        if row:
            reached[row] = reached[row - 1]
        while heap and nodes < size:
            nodes += 1
            value, depth, rank, parent = heapq.heappop(heap)
            reached[row, depth - 1] -= value
            if depth < shapes.depth:
                heapq.heappush(heap, (value * a, depth + 1, 0, -value))
            if rank + 1 < max(shapes.frontier, 1):
                heapq.heappush(heap, (-parent * (1 - a) * rho * (1 - rho) ** rank, depth, rank + 1, parent))
    before = np.concatenate([np.ones((len(shapes.sizes), 1)), reached[:, :-1]], axis=1)
    steps: NDArray[np.float64] = np.divide(reached, before, out=np.zeros_like(reached), where=before > 0)
    return read_only(steps)
