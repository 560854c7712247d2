"""One budget of draft tokens for all requests that share passes: by tokens per second of all of them together. A
request alone is a budget with one member.

Requests that could propose the same all make the same choice: the one with the most tokens per second. Else the price
of a second is a number of tokens. At a given price every request takes the proposal that is worth most to it:

    max over its choices c of   E[tokens | c] - price (rows_c s + drafted_c d + host_c)

with s seconds for another row of a target pass and d for one of a draft pass. Tokens that are worth the price are
taken, whichever request they belong to. The highest speed of all is reached at a price near to that speed itself
(Dinkelbach's method for ratios), so a few prices around the speed of plain decoding are tried. Each is judged by the
costs of the joint passes that follow from it, not by s and d.

A request's own draws never enter: its estimate is that of earlier rounds. Requests whose text depends on their plans
(`SamplingParams.is_seeded`) plan alone, each in a budget of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .cost import CostModel
from .drift import Drift
from .prices import PLAIN, Candidates, Costs, costs_at, even_seconds, row_seconds

PRICES = np.geomspace(0.25, 6.0, 24)  # of a second, in what plain decoding yields in it


class Decision(NamedTuple):
    """The number of a choice among `candidates`, and the speed of all requests together over plain decoding's."""

    candidates: Candidates
    number: int
    speed_up: float


class Solution(NamedTuple):
    """The numbers of all requests' choices, the tokens that a second must yield, infinite where all decode plainly, and
    the speed of all together over that of plain decoding."""

    numbers: list[int]
    price: float
    speed_up: float


class DraftBudget:
    """The requests of one scheduler, and what each of them proposes next."""

    def __init__(self, drift: Drift | None = None, draft_context: int | None = None) -> None:
        """drift: of passes from the costs; None where no clock may decide. draft_context: see LlamaConfig."""
        self.drift = drift
        # How often the requests were given other choices than before.
        self.changes = 0
        self._draft_context = draft_context
        self._candidates: dict[Hashable, tuple[Candidates, int]] = {}  # the latest of every member, and its context
        self._choices: dict[Hashable, Decision] = {}  # the present solution
        self._price = np.inf
        self._served: set[Hashable] = set()  # members that have taken their choice

    def choose(
        self, member: Hashable, candidates: Candidates, context: int, batch_size: int, costs: CostModel
    ) -> Decision:
        """What `member` proposes next, after `context` tokens. batch_size: number of requests that share passes. Those
        that are no members are taken to be like the members. A member that has its choice already gets another one, and
        so do all others. A new member chooses at the price of the others: requests that start together would else need
        as many solutions for all."""
        self._candidates[member] = candidates, context
        if not self._choices or member in self._served:
            self._solve(batch_size, costs)
        elif member not in self._choices:
            at = costs_at(costs, context, batch_size, self._draft_context)
            number = int(worth_most(candidates, np.array([self._price]), at)[0])
            self._choices[member] = Decision(candidates, number, next(iter(self._choices.values())).speed_up)
        self._served.add(member)
        return self._choices[member]

    def _solve(self, batch_size: int, costs: CostModel) -> None:
        members, contexts = zip(*self._candidates.values(), strict=True)
        solution = allocate(members, costs_at(costs, sum(contexts) // len(contexts), batch_size, self._draft_context))
        before = {member: choice.number for member, choice in self._choices.items()}
        numbers = dict(zip(self._candidates, solution.numbers, strict=True))
        self._choices = {
            member: Decision(candidates, numbers[member], solution.speed_up)
            for member, (candidates, _) in self._candidates.items()
        }
        self._price = solution.price
        self.changes += numbers != before
        self._served.clear()

    def observe_pass(self, rows: int, batch_size: int, context: int, seconds: float) -> None:
        """Learn what a pass took that `batch_size` texts shared. context: committed tokens of each, on average."""
        if self.drift is not None:
            self.drift.observe_shared(rows, batch_size, context, seconds)

    def leave(self, member: Hashable) -> None:
        self._candidates.pop(member, None)
        self._choices.pop(member, None)
        self._served.discard(member)


def worth_most(candidates: Candidates, prices: NDArray[np.float64], costs: Costs) -> NDArray[np.int64]:
    """The number [K] of the choice that is worth most at each price."""
    s, d = row_seconds(costs)
    seconds = (1 + candidates.table.tokens) * s + candidates.table.drafted.sum(1) * d + candidates.host
    finite = np.isfinite(prices)
    worth = candidates.tokens - np.where(finite, prices, 0.0)[:, None] * seconds
    return np.where(finite, worth.argmax(1), PLAIN)


def even_rates(candidates: Candidates, costs: Costs) -> NDArray[np.float64]:
    """Tokens per second [C] of a request where all requests make the same choice."""
    rates: NDArray[np.float64] = candidates.tokens / (even_seconds(costs, *candidates.table[2:]) + candidates.host)
    return rates


def allocate(members: Sequence[Candidates], costs: Costs) -> Solution:
    """The choices that yield the most tokens per second together. Each member stands for as many of the requests that
    share passes. Costs are those of joint passes, in which all requests draft side by side."""
    if all(candidates is members[0] for candidates in members):
        rates = even_rates(members[0], costs)
        best = int(rates.argmax())
        price = np.inf if best == PLAIN else float(rates[best])
        return Solution([best] * len(members), price, float(rates[best] / rates[PLAIN]))

    number, weight = costs.batch_size, costs.batch_size / len(members)
    plain_host = weight * sum(float(candidates.host[PLAIN]) for candidates in members)
    plain_speed = number / (float(costs.seconds(np.array([number]), np.zeros((1, 0)))[0]) + plain_host)
    prices = np.concatenate(([np.inf], plain_speed * PRICES))
    alike: dict[int, list[int]] = {}  # members with the same candidates, which are mostly those that do not draft
    for index, candidates in enumerate(members):
        alike.setdefault(id(candidates), []).append(index)
    chosen = np.zeros((len(members), len(prices)), np.int64)
    tokens, rows, host = np.zeros((3, len(prices)))
    drafted = np.zeros((len(prices), max(candidates.table.most for candidates in members)))
    for group in alike.values():
        candidates, all_of_them = members[group[0]], weight * len(group)
        chosen[group] = found = worth_most(candidates, prices, costs)
        tokens += all_of_them * candidates.tokens[found]
        rows += all_of_them * (1 + candidates.table.tokens[found])
        host += all_of_them * candidates.host[found]
        drafted[:, : candidates.table.most] += all_of_them * candidates.table.drafted[found]
    speeds = tokens / (costs.seconds(rows, drafted) + host)
    best = int(speeds.argmax())
    return Solution(chosen[:, best].tolist(), float(prices[best]), float(speeds[best] / plain_speed))
