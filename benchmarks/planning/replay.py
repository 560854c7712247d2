"""Speed of planned rounds against plain decoding and fixed chains, replayed from real proposals in the time of a cost
table.

No engine runs and no clock is read: `traces.py` says what the draft proposes before every token of real texts, and how
much of it the target accepts. Requests that share passes run in step: all draft passes before the target's.
`tests/benchmarks/test_planning.py` replays right costs, wrong ones, and those of a machine whose speed changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.planning.traces import LIMITS, Place, Trace
from draftwood.runtime.speculation.planning.budget import DraftBudget, Offer
from draftwood.runtime.speculation.planning.controller import Controller, RoundPlan
from draftwood.runtime.speculation.planning.cost import CostModel, PassCosts
from draftwood.runtime.speculation.planning.drift import Drift, scaled
from draftwood.runtime.speculation.planning.experience import Experience

TRACE = Path(__file__).with_name("smollm2_trace.json")
DRAWN_TRACE = Path(__file__).with_name("smollm2_trace_drawn.json")  # at temperature 0.7
CHAINS = (1, 2, 3, 4)
# Seconds of processor time: of a new plan, of an offer with its part of a choice for all, and of a round of a request
# that may draft but does not, beyond that of a request without a draft.
PLAN, OFFER, HELD = 35e-6, 20e-6, 5e-6
PLAIN = RoundPlan(0, 0, 1.0, 0.0, 1.0, probe=False)
# Of real over stored seconds, one pair after the other: factors of reading weights, and of rows' products.
PHASES = ((1.0, 1.0), (1.0, 2.0), (2.0, 1.0), (0.6, 1.0), (2.0, 2.7))
PHASE_SECONDS = 2.0
SETTLED = 16  # rows from which on a pass takes the table's time in any case


class Machine(NamedTuple):
    """The real costs, which hold for so many seconds one after the other."""

    phases: tuple[CostModel, ...]
    seconds: float = 1.0

    def at(self, time: float) -> CostModel:
        return self.phases[int(time / self.seconds) % len(self.phases)]


class Timed(Controller):
    """Adds up what its plans take on the host."""

    planning = 0.0

    def held(self, remaining: int, sharing: int) -> RoundPlan | None:
        self.planning += HELD
        return super().held(remaining, sharing)

    def _new_plan(self, context: int, remaining: int, sharing: int, unread: int) -> RoundPlan:
        self.planning += PLAN
        return super()._new_plan(context, remaining, sharing, unread)

    def offer(self) -> Offer:
        self.planning += OFFER
        return super().offer()


class Planner(NamedTuple):
    """What a request asks for its plans. plan: by context, remaining, sharing and unread tokens. reads: whether the
    draft reads the prompt at once, by the same. controller, budget: None for fixed proposals."""

    plan: Callable[[int, int, int, int], RoundPlan]
    reads: Callable[[int, int, int, int], bool]
    controller: Timed | None
    budget: DraftBudget | None = None


def chain_of(length: int) -> Callable[[], Planner]:
    """Always a chain of this length; plain decoding for 0."""

    def plan(context: int, remaining: int, sharing: int, unread: int) -> RoundPlan:
        depth = min(length, remaining)
        return PLAIN._replace(depth=depth, size=depth, chain=True) if depth > 0 else PLAIN

    return lambda: Planner(plan, lambda *_: length > 0, None)


def by_cost(costs: CostModel, greedy: bool = True, draft_context: int | None = None) -> Callable[[], Planner]:
    """The default settings: the requests of one engine, which learn from each other."""
    experience, budget = Experience(Drift(costs)), DraftBudget(Drift(costs))
    widths = [width for width in costs.target.widths if width <= LIMITS.max_total_draft_tokens + 1]

    def make() -> Planner:
        controller = Timed(costs, LIMITS._shapes(widths), greedy, experience, budget, draft_context)

        def plan(context: int, remaining: int, sharing: int, unread: int) -> RoundPlan:
            held = controller.held(remaining, sharing)
            return held or controller.plan(context, remaining, sharing, unread)

        return Planner(plan, controller.worth_reading, controller, budget)

    return make


@dataclass
class Account:
    """Tokens and seconds of a replay."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass
class Text:
    """A request in the middle of its text. unread: committed tokens that the draft has not read, the root included."""

    trace: Trace
    planner: Planner
    position: int = 0
    unread: int = 1

    @property
    def context(self) -> int:
        return self.trace.prompt + self.position

    @property
    def left(self) -> int:
        return len(self.trace.places) - self.position


def replay(traces: Sequence[Trace], make: Callable[[], Planner], real: Machine, clients: int, each: int) -> Account:
    """So many clients ask for `each` texts one after the other."""
    account = Account()
    waiting = [[traces[(number + turn) % len(traces)] for turn in range(each)] for number in range(clients)]
    running: list[Text | None] = [None] * clients
    while True:
        new = []
        for number, queue in enumerate(waiting):
            if running[number] is None and queue:
                new.append(Text(queue.pop(0), make()))
                running[number] = new[-1]
        texts = [text for text in running if text is not None]
        if not texts:
            return account
        costs = real.at(account.seconds)
        begin(new, len(texts), costs, account)
        step(texts, costs, account)
        for number, text in enumerate(running):
            if text is not None and not text.left:
                if text.planner.controller is not None:
                    text.planner.controller.leave()
                    account.seconds += text.planner.controller.planning
                running[number] = None


def begin(new: Sequence[Text], sharing: int, costs: CostModel, account: Account) -> None:
    """Read the prompts of new texts."""
    if not new:
        return
    assert costs.draft is not None
    rows = sum(text.trace.prompt - 1 for text in new)
    account.seconds += costs.target.at(max(1, rows), 0)
    read = 0
    for text in new:
        length = text.trace.prompt
        text.unread = length
        if text.planner.reads(length, text.left - 1, sharing, length):
            read += length - 1
            text.unread = 1
    if read:
        account.seconds += costs.draft.at(read, 0)


def step(texts: Sequence[Text], costs: CostModel, account: Account) -> None:
    """A round of all texts, whose passes are joint."""
    assert costs.draft is not None and costs.following is not None, "a pair is replayed"
    host = costs.greedy if isinstance(texts[0].trace.places[0], Place) else costs.sampled
    sharing, context = len(texts), sum(text.context for text in texts) // len(texts)
    plans = [
        text.planner.plan(text.context, text.left - 1, sharing, text.unread) if text.left > 1 else PLAIN
        for text in texts
    ]
    drafting = [(text, plan) for text, plan in zip(texts, plans, strict=True) if plan.depth]
    for depth in range(1, max((plan.depth for plan in plans), default=0) + 1):
        if depth == 1:
            account.seconds += costs.draft.at(sum(text.unread for text, _ in drafting), context)
        else:
            rows = sum(
                1 if plan.chain else min(LIMITS.frontier_width, plan.size)
                for _, plan in drafting
                if plan.depth >= depth
            )
            account.seconds += costs.following.at(rows, context)
    tokens = [min(plan.size, LIMITS.frontier_width) if plan.depth == 1 else plan.size for plan in plans]
    extra = sum(tokens) if drafting else 0
    planner, seconds = texts[0].planner, float(costs.target.shared(context, sharing)(np.array(sharing + extra)))
    account.seconds += seconds + host.plain * sharing
    if sharing == 1 and planner.controller is not None:
        planner.controller.observe_pass(1 + extra, seconds)
    elif planner.budget is not None:
        planner.budget.observe_pass(sharing + extra, sharing, context, seconds)
    for text, plan, size in zip(texts, plans, tokens, strict=True):
        taken = 0
        if plan.depth:
            account.seconds += host.round + host.token * size - host.plain
            found = text.trace.places[text.position].verify(plan.depth, plan.size, plan.chain)
            taken = len(found.rows)
            if text.planner.controller is not None:
                text.planner.controller.observe(plan, found.rows, found.choices)
            text.unread = 1 + (taken == plan.depth)
        else:
            text.unread += 1
        kept = min(taken + 1, text.left)
        account.tokens += kept
        text.position += kept


def drifting(costs: CostModel) -> Machine:
    """A machine whose speed changes. A pass takes the longer one of two times: of reading all weights, as its narrowest
    one does, and of its rows' products, of which its widest one consists."""

    def phase(memory: float, rows: float) -> CostModel:
        target = costs.target
        wide = np.asarray(target.widths) * (target.seconds[0][-1] / target.widths[-1] / target.seconds[0][0])
        slower = np.maximum(memory, rows * wide) / np.maximum(1.0, wide)
        draft, further = (
            None if each is None else scaled(each, np.array([memory])) for each in (costs.draft, costs.further)
        )
        return replace(costs, target=scaled(target, slower), draft=draft, further=further)

    return Machine(tuple(phase(*factors) for factors in PHASES), PHASE_SECONDS)


def distorted(costs: CostModel, slower: float, faster: float) -> Machine:
    """What a round really takes. slower: seconds of every round with a proposal. faster: share of the time of the
    narrowest pass; that of wider ones approaches the table's."""

    def narrow(passes: PassCosts) -> PassCosts:
        saved = (1 - faster) * np.maximum(0.0, 1 - (np.asarray(passes.widths) - 1) / SETTLED)
        rows = np.asarray(passes.seconds)
        return replace(passes, seconds=tuple(map(tuple, (rows - saved * rows[:, :1]).tolist())))

    greedy = replace(costs.greedy, round=costs.greedy.round + slower)
    sampled = replace(costs.sampled, round=costs.sampled.round + slower)
    return Machine((replace(costs, target=narrow(costs.target), greedy=greedy, sampled=sampled),))
