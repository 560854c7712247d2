"""Controller: how deep and how wide to propose in the next round, or not at all, by what passes cost on this machine.

    speed(d, n) = (1 + E[accepted | depth d, n tokens]) / (draft passes + target pass + host)      tokens per second

The costs are a stored table (`runtime/cost.py`); the acceptance is learned while a request runs. Rows of a tree stand
in order of value, so the n best of them are the tree a budget of n would have had: one verified round tells what every
smaller budget and depth would have got.

A plan is made before its round, from the stored table, what earlier rounds of the request accepted, and how many others
share its passes; never from what this round will draw: the output keeps its distribution. How many share depends on who
else happens to be served, so a request with a seed is told that it is alone, and keeps its text as long as the table
stays the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..cost import CostModel, PassCosts

MEMORY = 0.96  # what a round counts for after the next one: about 25 rounds are remembered
FIRST_GUESS = 0.6  # acceptance of a single token before anything was seen
WIDER = 0.9  # share of the rejections that remain with the next larger budget, before it was tried
PRIOR = 8.0  # observations a guess counts for
PROBE_LOSS = 0.02  # share of plain decoding's time that looking whether speculation pays again may cost
CONTEXT_STEP = 64  # costs are looked up anew after so many tokens
PLAIN_DEPTH = 0


class Plan(NamedTuple):
    """One round's limits; depth 0 decodes plainly. tokens, seconds: what the round is expected to yield and to take.
    speed_up: expected of the best proposal over plain decoding. probe: it is made although that is less than one, to
    see whether it still is."""

    depth: int
    size: int
    tokens: float
    seconds: float
    speed_up: float
    probe: bool


class Shapes(NamedTuple):
    """The proposals to choose from. sizes: tokens, ascending. depth: of the deepest. frontier: rows of a draft pass.
    chain: whether a proposal has as many tokens as it is deep. given: tokens of a prompt lookup that come on top."""

    sizes: tuple[int, ...]
    depth: int
    frontier: int
    chain: bool
    given: int


class Controller:
    """The plans of one request."""

    def __init__(self, costs: CostModel, shapes: Shapes, greedy: bool) -> None:
        self._costs, self._shapes = costs, shapes
        self._host = costs.greedy if greedy else costs.sampled
        grid = (len(shapes.sizes), shapes.depth)
        self._offered, self._accepted = np.zeros(grid), np.zeros(grid)
        self._depths = np.arange(1, shapes.depth + 1)
        self._priced = (-1, 0)  # for which context and sharing
        self._seconds = np.zeros(grid)
        self._plain_seconds = 0.0
        self._plain_rounds = 0

    def plan(self, context: int, room: int, sharing: int = 1, unread: int = 1) -> Plan:
        """The next round's limits behind `context` committed tokens; at most `room` deep. sharing: requests whose
        passes run together: the more there are, the dearer is a row. unread: tokens the draft would read first."""
        priced = context // CONTEXT_STEP, sharing
        if priced != self._priced:
            self._priced = priced
            self._price(context, sharing)
        depth = min(room, self._shapes.depth)
        plain = Plan(PLAIN_DEPTH, 0, 1.0, self._plain_seconds, 1.0, probe=False)
        if depth < 1:
            return plain
        tokens, seconds = 1 + self._expected()[:, :depth], self._seconds[:, :depth]
        row, column = divmod(int((tokens / seconds).argmax()), depth)
        best_tokens, best_seconds = float(tokens[row, column]), float(seconds[row, column])
        speed_up = best_tokens * self._plain_seconds / best_seconds
        best = Plan(column + 1, self._shapes.sizes[row], best_tokens, best_seconds, speed_up, probe=False)
        if speed_up > 1:
            self._plain_rounds = 0
            return best
        self._plain_rounds += 1
        # Reading what it missed is part of what a probe costs the draft: perhaps the whole prompt.
        loss = best_seconds + self._costs.draft.at(unread, context) - best_tokens * self._plain_seconds
        if self._plain_rounds > loss / (PROBE_LOSS * self._plain_seconds):
            self._plain_rounds = 0
            return best._replace(probe=True)
        return plain._replace(speed_up=speed_up)

    def observe(self, plan: Plan, accepted: Sequence[int]) -> None:
        """Learn from a verified round: what it, and every smaller budget, got. accepted: rows of its tree."""
        self._offered *= MEMORY
        self._accepted *= MEMORY
        for index, size in enumerate(self._shapes.sizes):
            if size > plan.size:
                return
            rows = size + self._shapes.given
            for depth in range(min(plan.depth, rows)):
                self._offered[index, depth] += 1
                if depth >= len(accepted) or accepted[depth] > rows:
                    break
                self._accepted[index, depth] += 1

    def _expected(self) -> NDArray[np.float64]:
        """E[accepted] [sizes, depths]: the sum over depths of the chance to get so far."""
        offered, accepted = self._offered.sum(1), self._accepted.sum(1)
        guess, whole = FIRST_GUESS, []
        for row in range(len(offered)):
            estimate = float((accepted[row] + PRIOR * guess) / (offered[row] + PRIOR))
            whole.append(estimate)
            guess = 1 - (1 - estimate) * WIDER
        step = (self._accepted + PRIOR * np.array(whole)[:, None]) / (self._offered + PRIOR)
        rows = np.array(self._shapes.sizes) + self._shapes.given
        expected: NDArray[np.float64] = np.where(self._depths <= rows[:, None], step, 0.0).cumprod(1).cumsum(1)
        return expected

    def _price(self, context: int, sharing: int) -> None:
        """Seconds [sizes, depths] of every plan, and of a plain token, behind so many committed ones: this request's
        part of passes in which all have as many rows as itself, and its own time on the host."""
        shapes = self._shapes

        def part(passes: PassCosts, rows: int) -> float:
            return passes.at(rows * sharing, context) / sharing

        self._plain_seconds = part(self._costs.target, 1) + self._host.plain
        first = part(self._costs.draft, 2)  # the root, and often the last accepted token
        for row, size in enumerate(shapes.sizes):
            further = part(self._costs.draft, min(shapes.frontier, size))
            for depth in range(1, shapes.depth + 1):
                tokens = (depth if shapes.chain else size) + shapes.given
                verify = part(self._costs.target, tokens + 1) + self._host.round + self._host.token * tokens
                self._seconds[row, depth - 1] = first + (depth - 1) * further + verify
