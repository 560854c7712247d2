"""One budget of draft tokens for all requests that share passes: by tokens per second of all of them together.

The price of a second is a number of tokens. At a given price every request takes the proposal that is worth most to it:

    max over its choices c of   E[tokens | c] - price (rows_c s + drafted_c d + host_c)

with s seconds for another row of a target pass and d for one of a draft pass. Tokens that are worth the price are
taken, whichever request they belong to. The highest speed of all is reached at a price near to that speed itself
(Dinkelbach's method for ratios), so a few prices around the speed of plain decoding are tried. Each is judged by the
costs of the joint passes that follow from it, not by s and d.

A request's own draws never enter: its estimate is that of earlier rounds. Requests whose text depends on their plans
(`SamplingParams.is_seeded`) plan alone and are no members.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .cost import CostModel
from .drift import Drift

PRICES = np.geomspace(0.25, 6.0, 24)  # of a second, in what plain decoding yields in it
HELD, MOST_HELD = 4, 16  # plans for which a choice stays: a choice for all takes a while. Twice as long each time that
# the same is chosen again: nothing is learned while nobody drafts
PLAIN = 0  # the first choice of every offer


class Offer(NamedTuple):
    """What a request could propose: arrays [C], the first of plain decoding. tokens: expected of the round. rows: of
    its target pass. depths: its draft passes; the first has two rows, the others `frontier` rows each. host: seconds
    outside both engines."""

    tokens: NDArray[np.float64]
    rows: NDArray[np.int64]
    depths: NDArray[np.int64]
    frontier: NDArray[np.int64]
    host: NDArray[np.float64]


class Choice(NamedTuple):
    """The number of a request's choice, and the speed of all requests together over that of plain decoding."""

    number: int
    speed_up: float


class Price(NamedTuple):
    """The tokens that a second must yield, infinite where all decode plainly, and the seconds of another row of a
    target pass and of a draft pass."""

    tokens: float
    row: float
    drafted: float


class Solution(NamedTuple):
    """The numbers of all requests' choices, the price at which each is worth most, and the speed of all together over
    that of plain decoding."""

    numbers: list[int]
    price: Price
    speed_up: float


class Member(Protocol):
    """A request that takes part."""

    def offer(self) -> Offer:
        """Its choices for the next round, by what it knows at its last plan."""


class DraftBudget:
    """The requests of one loop, and what each of them proposes next. changes: how often the requests were given other
    choices than before. drift: how their passes differ from the costs at present; None where no clock may decide."""

    def __init__(self, drift: Drift | None = None) -> None:
        self.drift = drift
        self._contexts: dict[Member, int] = {}
        self._numbers: dict[Member, int] = {}  # of their choices
        self._left: dict[Member, int] = {}  # plans for which the choice still holds
        self._held = HELD
        self.changes = 0
        self._solution: Solution | None = None

    def choose(self, member: Member, context: int, sharing: int, costs: CostModel) -> Choice:
        """What `member` proposes next, behind `context` tokens. sharing: number of requests that share passes. Those
        that are no members are taken to be like the members. A new member chooses at the price of the others until
        there is a new one: requests that start together would else need as many solutions for all."""
        self._contexts[member] = context
        if self._solution is None or self._left.get(member) == 0:
            self._solution = self._solve(sharing, costs if self.drift is None else self.drift.costs())
        elif member not in self._numbers:
            price = self._solution.price
            self._numbers[member] = PLAIN if price.tokens == np.inf else worth_most(member.offer(), price)
            self._left[member] = self._held = HELD
        self._left[member] -= 1
        return Choice(self._numbers[member], self._solution.speed_up)

    def _solve(self, sharing: int, costs: CostModel) -> Solution:
        members = list(self._contexts)
        mean = sum(self._contexts.values()) // len(members)
        solution = allocate([each.offer() for each in members], sharing / len(members), costs, mean)
        numbers = dict(zip(members, solution.numbers, strict=True))
        same = numbers == self._numbers
        self._held = min(2 * self._held, MOST_HELD) if same else HELD
        self.changes += not same
        self._numbers, self._left = numbers, dict.fromkeys(members, self._held)
        return solution

    def observe_pass(self, rows: int, sharing: int, context: int, seconds: float) -> None:
        """Learn what a pass of the target took that `sharing` texts shared. context: committed tokens of each, on
        average."""
        if self.drift is not None:
            self.drift.observe_shared(rows, sharing, context, seconds)

    def leave(self, member: Member) -> None:
        """Take a request out that has ended."""
        for kept in (self._contexts, self._numbers, self._left):
            kept.pop(member, None)
        if not self._contexts:
            self._solution = None


def worth_most(offer: Offer, price: Price) -> int:
    """The number of the choice that is worth most at a finite price."""
    return int((offer.tokens - price.tokens * seconds_of(offer, price.row, price.drafted)).argmax())


def seconds_of(offer: Offer, row: float, drafted: float) -> NDArray[np.float64]:
    """Of every choice, by the seconds of another row of either engine's pass."""
    further = np.maximum(offer.depths - 1, 0) * offer.frontier
    seconds: NDArray[np.float64] = offer.rows * row + (2 * (offer.depths > 0) + further) * drafted + offer.host
    return seconds


def allocate(offers: Sequence[Offer], weight: float, costs: CostModel, context: int) -> Solution:
    """A choice for every request, so that all together yield the most tokens per second.

    weight: requests for which each offer stands. context: mean of committed tokens. Costs are those of joint passes, in
    which all requests draft side by side."""
    number = weight * len(offers)
    target = costs.target.shared(context, number)
    draft = None if costs.draft is None else costs.draft.shared(context, number)
    following = None if costs.following is None else costs.following.shared(context, number)
    once, again = target(np.array([number, 2 * number]))
    s = (again - once) / number
    d = 0.0 if draft is None else float(np.diff(draft(np.array([number, 2 * number])))[0]) / number
    plain_host = weight * sum(float(offer.host[PLAIN]) for offer in offers)
    plain_speed = number / (once + plain_host)
    prices = np.concatenate(([np.inf], plain_speed * PRICES))

    alike: dict[int, list[int]] = {}  # members with the same offer, which are mostly those that do not draft
    for index, offer in enumerate(offers):
        alike.setdefault(id(offer), []).append(index)
    deepest = max(int(offers[members[0]].depths.max()) for members in alike.values())
    passes = np.arange(1, deepest + 1)
    chosen = np.zeros((len(offers), len(prices)), np.int64)
    tokens, rows, host = np.zeros(len(prices)), np.zeros(len(prices)), np.zeros(len(prices))
    drafted = np.zeros((len(prices), deepest))
    for members in alike.values():
        offer, all_of_them = offers[members[0]], weight * len(members)
        found = np.zeros(len(prices), np.int64)
        found[1:] = (offer.tokens - prices[1:, None] * seconds_of(offer, s, d)).argmax(1)
        chosen[members] = found
        tokens += all_of_them * offer.tokens[found]
        rows += all_of_them * offer.rows[found]
        host += all_of_them * offer.host[found]
        width = np.where(passes == 1, 2, offer.frontier[found][:, None])
        drafted += all_of_them * width * (offer.depths[found][:, None] >= passes)
    seconds = target(rows) + host
    if draft is not None and following is not None and deepest:
        least = np.maximum(drafted, 1)
        each = np.concatenate((draft(least[:, :1]), following(least[:, 1:])), axis=1)
        seconds = seconds + np.where(drafted > 0, each, 0.0).sum(1)
    speeds = tokens / seconds
    best = int(speeds.argmax())
    return Solution(
        chosen[:, best].tolist(), Price(float(prices[best]), float(s), d), float(speeds[best] / plain_speed)
    )
