"""Controller: plans the next round: a chain, a tree or no proposal, of drawn or of chosen tokens, and the depth and
size, by the costs of passes.

    speed(kind, d, n) = (1 + E[accepted | kind, depth d, n tokens]) / (draft passes + target pass + host)

The costs are a stored table (`cost.py`). The acceptance is learned while requests run, see `estimate.py`. Rounds with
drawn tokens say nothing about chosen ones, so the controller tries the other of the two from time to time.

A plan is made before its round. It depends on the stored table, on what passes took since (`drift.py`), the acceptance
of earlier rounds and the number of requests that share the passes, but never on the draws of its round, so the output
keeps its distribution. The time of passes, the number of sharing requests and the acceptance of other requests depend
on the load of the machine. Therefore the plans of a sampled request with a seed assume that it runs alone and that the
table holds, and it has an `History` of its own: its text stays the same as long as the table does.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .budget import DraftBudget, even_rates
from .cost import CostModel
from .drift import UNCHANGED, Factors
from .estimate import Shapes, VerifierChoice
from .history import History
from .lookups import LONGEST, LookupEstimate, Match, best_lookup
from .prices import CONTEXT_STEP, PLAIN, Candidates, costs_at, prices_of, stored_seconds, table_of

LOST = 0.5  # plain tokens that wrong proposals may lose before a plan no longer holds
PROBE_LOSS = 0.01  # share of plain decoding's time that probes (rounds that test speculation again) may cost
SHARED_PROBE_LOSS = 0.004  # the same when requests share passes: they learn from each other's probes
SHARED_SPEED_UP = 1.1  # least expected speed-up of a proposal when requests share passes
# The same of a text whose draft must read it first, and of a lookup's round over the plan. Texts that start together
# mostly end with the slowest one, and few rounds promise too much: with 1.1 groups of four ran at 0.82 to 1.03.
SHARED_BEGIN = 1.3
READING_DIGITS = 2  # decimals of the time that a draft reads first, per token of the rest and in plain tokens
# Further rounds for which a plan stays: at first, and the most. Twice as long each time that the same is planned again.
HELD_PLAIN, HELD_ALONE, HELD_SHARED = (15, 63), (7, 7), (3, 15)  # a proposal of a request alone, and of one of several
MIN_PATIENCE = 16  # proposals before one of the other source is tried, at least
FEW = 1 / 4  # share of the requests that may come or go meanwhile


Limits = tuple[int, int, bool, bool]


class RoundPlan(NamedTuple):
    """One round's limits; depth 0 means plain decoding. tokens, seconds: expected tokens and duration of the round.
    speed_up: expected speed-up of the best proposal over plain decoding. probe: whether the round tests speculation,
    plain decoding or the other source of tokens although it is expected to be slower. chain: whether to propose a chain
    of `depth` tokens instead of the configured tree. chosen: whether its tokens are chosen where the configuration
    would draw them. looked_up: whether a prompt lookup found them, without a draft. reason: for a plain round, the
    figures that decided."""

    depth: int
    size: int
    tokens: float
    seconds: float
    speed_up: float
    probe: bool
    chain: bool = False
    chosen: bool = False
    looked_up: bool = False
    reason: str = ""

    @property
    def limits(self) -> Limits:
        return self.depth, self.size, self.chain, self.chosen


class Controller:
    def __init__(
        self,
        costs: CostModel,
        shapes: Shapes,
        greedy: bool,
        history: History | None = None,
        budget: DraftBudget | None = None,
        draft_context: int | None = None,
        chooses: bool = False,
        looks_up: bool = False,
    ) -> None:
        """history: of earlier requests; budget: of those that share passes with it. None for a request that must not
        depend on them. draft_context: the most tokens that the draft attends to; None: all. chooses: whether proposals
        may also consist of chosen tokens, where the configuration draws them. looks_up: whether a prompt lookup may
        give them."""
        self._draft_context = draft_context
        self._budget = DraftBudget(draft_context=draft_context) if budget is None else budget
        self._held = self._hold = 0  # rounds for which the last plan still stays, and for which it was to stay
        # The plan holds while batch_size and remaining tokens are within these, and this is the state of the budget.
        self._batch_sizes, self._room, self._changes = (0, 0), (0, 0), 0
        self._patience = 0.0  # plain rounds before a probe
        self._lost = 0.0  # what proposals of the last plan have cost beyond their tokens, in plain tokens
        self._plan = RoundPlan(0, 0, 1.0, 0.0, 1.0, probe=False)
        self._costs, self._shapes, self._greedy = costs, shapes, greedy
        self._history = History() if history is None else history
        # Of every source of tokens, the configuration's own first: RoundPlan.chosen is the index. Times on the host of
        # a request alone, and what is accepted.
        self._alone = (costs.greedy,) if greedy else (costs.sampled, costs.chosen) if chooses else (costs.sampled,)
        self._estimates = [self._history.estimate_for(shapes, greedy, chosen > 0) for chosen in range(len(self._alone))]
        self._lookups = LookupEstimate(self._history.lookups[greedy]) if looks_up else None
        self._lookup_host = costs.greedy if greedy else costs.chosen
        # The context (in steps), the batch_size and the drift of the prices below.
        self._priced: tuple[int, int, Factors] | None = None
        self._present, self._at = costs, costs_at(costs, 0, 1)
        self._hosts = [*self._alone]
        self._stored: tuple[float, ...] = ()  # by the table: seconds of a pass of 1, 2, ... rows
        self._plain_seconds = 0.0
        self._draft_alone: tuple[float, ...] = ()  # see Prices
        self._longer: tuple[float, ...] = ()
        self._lookup_seconds: list[float] = []  # of rounds with 1, 2, ... tokens that a prompt lookup gives
        self._lookup_speed = 0.0  # most tokens per second that these rounds promise, see `considers_lookups`

    def plan(self, context: int, remaining: int, batch_size: int = 1, unread: int = 1) -> RoundPlan:
        """The next round's limits after `context` committed tokens. remaining: tokens that may still follow, which
        limit the depth. batch_size: number of requests whose passes run together; the more there are, the more a row
        costs. unread: committed tokens that the draft would have to read first."""
        before, self._plan = self._plan, self._new_plan(context, remaining, batch_size, unread)
        self._lost = 0.0
        first, longest = HELD_PLAIN if not self._plan.depth else HELD_ALONE if batch_size == 1 else HELD_SHARED
        again = self._hold and self._plan.limits == before.limits
        self._hold = 0 if self._plan.probe else min(2 * self._hold + 1, longest) if again else first
        self._held = self._hold
        most, few = self._shapes.depth, int(FEW * batch_size)
        self._batch_sizes = batch_size - few, batch_size + few
        self._room = self._plan.depth, remaining if remaining < most else sys.maxsize
        self._changes = self._budget.changes
        return self._plan

    def held(self, remaining: int, batch_size: int) -> RoundPlan | None:
        """The last plan, if it holds for this round as well: a round must not pay for a new plan each time. It holds
        while nearly as many requests share the passes, there is no more room than there was and enough for its
        proposal, no other proposals were chosen for all together, its own have not lost much, and no probe is due."""
        if not self._held or self._changes != self._budget.changes or self._lost > LOST:
            return None
        (fewest, most), (least, longest), history = self._batch_sizes, self._room, self._history
        if not (fewest <= batch_size <= most and least <= remaining <= longest):
            return None
        if not self._plan.depth:
            if history.plain_rounds + 1 > self._patience:
                return None
            history.plain_rounds += 1
        self._held -= 1
        return self._plan

    def considers_lookups(self, plan: RoundPlan) -> bool:
        """Whether a prompt lookup might be faster than the plan of this round: if all its tokens were right, or, where
        requests share passes, if it were one of those that are right most often. Looking up takes time each round."""
        return self._lookups is not None and not plan.probe and self._lookup_speed > self._least_speed(plan)

    def _least_speed(self, plan: RoundPlan) -> float:
        """Tokens per second of a lookup that takes the plan's place."""
        return plan.tokens / plan.seconds * (SHARED_BEGIN if self._batch_sizes[1] > 1 else 1.0)

    def or_lookup(self, plan: RoundPlan, match: Match) -> RoundPlan:
        """The plan of this round, or what a prompt lookup found, where that is expected to be faster."""
        most = min(len(match.tokens), len(self._lookup_seconds))
        if self._lookups is None or most < 1 or not self.considers_lookups(plan):
            return plan
        speed, least = plan.tokens / plan.seconds, self._least_speed(plan)
        best = best_lookup(self._lookups.expected(match.ngram, most), self._lookup_seconds[:most], speed)
        promised = best.tokens / best.seconds
        if promised <= least:
            return plan
        speed_up = promised * self._plain_seconds
        return RoundPlan(best.depth, best.depth, *best[1:], speed_up, probe=False, chosen=True, looked_up=True)

    def observe_match(self, match: Match, following: Sequence[int]) -> None:
        """Learn how much of what a prompt lookup found did follow, proposed or not."""
        if self._lookups is not None:
            self._lookups.observe(match, following)

    def _new_plan(self, context: int, remaining: int, batch_size: int, unread: int) -> RoundPlan:
        self._price(context, batch_size)
        plain = RoundPlan(0, 0, 1.0, self._plain_seconds, 1.0, probe=False)
        if remaining < 1:
            return plain
        reading_time = self._reading_time(unread)
        planned = self._joint(context, remaining, batch_size, reading_time)
        if planned.depth and self._pays(planned, remaining, reading_time, batch_size):
            drift = self._history.drift if batch_size == 1 else None
            if drift is not None and drift.is_stale(planned.speed_up) and not reading_time:
                drift.look()
                return plain._replace(probe=True)
            return planned if len(self._estimates) == 1 else self._from_either(planned, remaining)
        best = self._best(remaining)
        self._history.plain_rounds += 1
        # When one request probes, the others do not draft, so it shares its draft passes with none.
        loss = reading_time + best.depth * self._draft_alone[min(self._shapes.frontier, len(self._draft_alone)) - 1]
        loss += self._delay(best)
        allowed = PROBE_LOSS if batch_size == 1 else SHARED_PROBE_LOSS
        if reading_time and remaining <= self._shapes.depth:
            loss = math.inf  # too few tokens are left to learn from, for a draft that reads the whole text
        self._patience = loss / (allowed * self._plain_seconds)
        if self._history.plain_rounds > self._patience:
            self._history.plain_rounds = 0
            return best._replace(probe=True)
        reason = self._reason_for_plain(best, remaining, unread, batch_size)
        return plain._replace(speed_up=best.speed_up, reason=reason)

    def _candidates(self, remaining: int, reading_time: float = 0.0) -> Candidates:
        """What the request could propose. What the draft has to read first, each proposal pays its part of."""
        reading = round(reading_time / (remaining * self._plain_seconds), READING_DIGITS) * self._plain_seconds
        most = min(remaining, self._shapes.depth)
        return self._history.candidates(self._estimates, self._shapes, most, self._hosts, reading)

    def leave(self) -> None:
        """End the request's part in plans for all requests."""
        self._budget.leave(self)

    def _joint(self, context: int, remaining: int, batch_size: int, reading_time: float) -> RoundPlan:
        """The request's part of a plan for all requests that share passes; depth 0 where others gain more from rows."""
        own = self._candidates(remaining, reading_time)
        candidates, number, speed_up = self._budget.choose(self, own, context, batch_size, self._present)
        if number == PLAIN:
            return RoundPlan(0, 0, 1.0, self._plain_seconds, speed_up, probe=False)
        row, column = divmod(number - 1, candidates.table.most)
        column = min(column, own.table.most - 1)  # there may be less room than when the choice was made
        tokens = float(own.tokens[1 + row * own.table.most + column])
        return self._described(row, column, tokens, tokens * self._plain_seconds / speed_up, speed_up)

    def worth_reading(self, context: int, remaining: int, batch_size: int, unread: int) -> bool:
        """Whether the draft shall read `unread` tokens of the prompt of `context` tokens, if `remaining` may follow."""
        self._price(context, batch_size)
        return remaining > 0 and self._pays(self._best(remaining), remaining, self._reading_time(unread), batch_size)

    def observe(self, plan: RoundPlan, accepted: Sequence[int], choices: Sequence[VerifierChoice]) -> None:
        """Learn from a verified round the acceptance of its proposal and of every smaller one. accepted: accepted rows
        of the tree. choices: the verifier's choices along these rows."""
        self._estimates[plan.chosen].observe(None if plan.chain else plan.size, plan.depth, accepted, choices)
        self._history.untried_rounds += 1
        self._lost += plan.tokens / plan.speed_up - 1 - len(accepted)

    def observe_pass(self, rows: int, seconds: float) -> None:
        """Learn what the target's pass over the root and the proposal took, where a clock may decide about plans."""
        drift = self._history.drift
        if drift is not None and rows <= len(self._stored):
            drift.observe(rows, self._stored[rows - 1], seconds)

    def observe_draft(self, rows: Sequence[int], seconds: float) -> None:
        """Learn what a round's passes of the draft took, of so many rows each, where a clock may decide about plans."""
        drift, draft, following = self._history.drift, self._costs.draft, self._costs.following
        if drift is None or not self._stored or draft is None or following is None:
            return
        first, *others = rows
        stored = draft.at(first, self._at.read) + sum(following.at(each, self._at.read) for each in others)
        drift.observe_draft(stored, seconds)

    def _pays(self, plan: RoundPlan, remaining: int, reading_time: float, batch_size: int) -> bool:
        """Whether the text is expected to end sooner with rounds like `plan`, the draft's reading included; clearly
        sooner where requests share passes, because the cost table was measured with a single request's rows."""
        spent = plan.seconds / plan.tokens * remaining + reading_time
        return needed(batch_size, reading_time) * spent < self._plain_seconds * remaining

    def _reason_for_plain(self, plan: RoundPlan, remaining: int, unread: int, batch_size: int) -> str:
        """The reason why `_pays` is false. Times are counted in plain tokens, because the costs may be assumed ones."""
        promise = f"a proposal promises {plan.speed_up:.2f} times plain speed"
        reading = self._reading_time(unread) / self._plain_seconds
        first = f"the draft would first read {unread} tokens, in the time of {reading:.1f}"
        if batch_size > 1:
            least = f"more than {needed(batch_size, reading):.2f} is needed when {batch_size} requests share the passes"
            return f"{promise}, but {least}" + (f", and {first}" if reading else "")
        if not reading:
            return promise
        saved = (1 - plan.seconds / plan.tokens / self._plain_seconds) * remaining
        saving = f"{promise}, which saves the time of {max(0.0, saved):.1f} tokens over the {remaining} that may follow"
        return f"{saving}, but {first}"

    def _delay(self, plan: RoundPlan) -> float:
        """Seconds that one request's proposal adds to a shared pass of plain rows, minus the seconds that it saves."""
        tokens, host = plan.size, self._hosts[plan.chosen]
        longer: float = self._longer[tokens] + host.round + host.token * tokens - host.plain
        return max(0.0, longer - (plan.tokens - 1) * self._plain_seconds)

    def _reading_time(self, unread: int) -> float:
        """Seconds for the draft to read its `unread` tokens, perhaps the whole prompt, in passes of their own. A few
        tokens are part of every round and count as zero."""
        widest = len(self._draft_alone)
        missed = self._draft_alone[min(unread, widest) - 1] * max(1.0, unread / widest)
        return missed if unread > self._shapes.depth else 0.0

    def _best(self, remaining: int) -> RoundPlan:
        """The proposal with the most expected tokens per second where all requests make the same one."""
        candidates = self._candidates(remaining)
        rates = even_rates(candidates, self._at)
        return self._rated(candidates, rates, 1 + int(rates[1:].argmax()))

    def _rated(self, candidates: Candidates, rates: NDArray[np.float64], number: int) -> RoundPlan:
        """The plan of a choice, by the tokens per second [C] of all choices."""
        tokens, rate = float(candidates.tokens[number]), float(rates[number])
        row, column = divmod(number - 1, candidates.table.most)
        return self._described(row, column, tokens, tokens / rate, rate * self._plain_seconds)

    def _from_either(self, plan: RoundPlan, remaining: int) -> RoundPlan:
        """The plan, or from time to time one of the same shape from the other source, to learn what that yields. The
        slower it is expected to be, the less often."""
        candidates = self._candidates(remaining)
        rates, shapes = even_rates(candidates, self._at), self._shapes
        kind = 0 if plan.chain else shapes.chain + shapes.sizes.index(plan.size)
        own, other = (candidates.table.number(source, kind, plan.depth) for source in (plan.chosen, not plan.chosen))
        lost = 1 - float(rates[other] / rates[own])  # share of the round
        if self._history.untried_rounds <= max(MIN_PATIENCE, lost / PROBE_LOSS):
            return plan
        self._history.untried_rounds = 0
        return self._rated(candidates, rates, other)._replace(probe=True)

    def _described(self, row: int, column: int, tokens: float, seconds: float, speed_up: float) -> RoundPlan:
        """The plan of a source, kind and size (`row`) and depth."""
        chosen, kind = divmod(row, self._shapes.grid[0])
        depth, chain = column + 1, self._shapes.chain and kind == 0
        size = depth if chain else self._shapes.sizes[kind - self._shapes.chain]
        return RoundPlan(depth, size, tokens, seconds, speed_up, probe=False, chain=chain, chosen=bool(chosen))

    def _price(self, context: int, batch_size: int) -> None:
        """Look up what passes cost after `context` committed tokens, and so what a plain token does, and a round with
        each number of tokens that a prompt lookup gives."""
        drift = self._history.drift if batch_size == 1 else self._budget.drift
        priced = context // CONTEXT_STEP, batch_size, UNCHANGED if drift is None else drift.factors
        if priced == self._priced:
            return
        self._priced = priced
        self._present = self._costs if drift is None else drift.costs()
        self._at = at = costs_at(self._present, context, batch_size, self._draft_context)
        *self._hosts, host = (each if batch_size == 1 else each.shared for each in (*self._alone, self._lookup_host))
        most = int(table_of(self._shapes, self._shapes.depth, 1).tokens.max())
        plain, self._draft_alone, self._longer, even = prices_of(at, most, self._shapes.frontier > 0)
        self._plain_seconds = plain + self._hosts[0].plain
        follows = drift is not None and batch_size == 1
        self._stored = stored_seconds(self._costs.target, at.context, len(self._longer)) if follows else ()
        shared = self._plain_seconds - host.plain + host.round
        self._lookup_seconds = [shared + even[k] + k * host.token for k in range(1, len(even))]
        right: Sequence[float] = range(1, len(self._lookup_seconds) + 1)
        if self._lookups is not None and batch_size > 1:
            right = self._lookups.expected(LONGEST, len(right))
        self._lookup_speed = max(
            ((1 + k) / each for k, each in zip(right, self._lookup_seconds, strict=True)), default=0.0
        )


def needed(batch_size: int, reading_time: float) -> float:
    """The speed-up from which on a text with proposals pays."""
    return 1.0 if batch_size == 1 else SHARED_BEGIN if reading_time else SHARED_SPEED_UP
