"""Speed of planned rounds against plain decoding and every fixed chain, replayed from real proposals in the time of a
cost table.

    python -m benchmarks.planning.replay build/smollm2.trace.json bundles/smollm2 --output benchmarks/results

No engine runs and no clock is read: `traces.py` has recorded what the draft proposes before every token of real texts,
and how much of it the target accepts. Requests that share passes run in step: all draft passes before the target's, as
in `decoding/loop.py`. The time is divided into its parts, so that a loss has a name.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.planning.traces import LIMITS, Trace, read_traces
from benchmarks.tools.record import add_output, write_results
from draftwood.models.errors import ConfigError
from draftwood.runtime.bundle.costs import read_costs
from draftwood.runtime.speculation.config import SpeculativeConfig
from draftwood.runtime.speculation.planning.budget import DraftBudget
from draftwood.runtime.speculation.planning.controller import Controller, Experience, RoundPlan
from draftwood.runtime.speculation.planning.cost import CostModel, PassCosts

CLIENTS = (1, 4, 16, 32, 64)
CHAINS = (1, 2, 3, 4)
PLAN, OFFER = 25e-6, 60e-6  # seconds of processor time of a new plan, and of an offer with its part of a choice for all
PLAIN = RoundPlan(0, 0, 1.0, 0.0, 1.0, probe=False)


class Planner(NamedTuple):
    """What a request asks for its plans. plan: by context, remaining, sharing and unread tokens."""

    plan: Callable[[int, int, int, int], RoundPlan]
    reads: Callable[[int, int, int, int], bool]
    controller: Controller | None


class Timed(Controller):
    """Adds up what its plans take on the host."""

    planning = 0.0

    def _new_plan(self, context: int, remaining: int, sharing: int, unread: int) -> RoundPlan:
        self.planning += PLAN
        return super()._new_plan(context, remaining, sharing, unread)

    def offer(self):  # type: ignore[no-untyped-def]
        self.planning += OFFER
        return super().offer()


def chain_of(length: int) -> Callable[[], Planner]:
    """Always a chain of this length; plain decoding for 0."""

    def plan(context: int, remaining: int, sharing: int, unread: int) -> RoundPlan:
        depth = min(length, remaining)
        return PLAIN._replace(depth=depth, size=depth, chain=True) if depth > 0 else PLAIN

    return lambda: Planner(plan, lambda *_: length > 0, None)


def by_cost(costs: CostModel, widths: Sequence[int], draft_context: int | None) -> Callable[[], Planner]:
    """The controllers of requests of one engine."""
    experience, budget = Experience(), DraftBudget()
    shapes = LIMITS._shapes(widths)

    def make() -> Planner:
        controller = Timed(costs, shapes, True, experience, budget, draft_context)


        def plan(context: int, remaining: int, sharing: int, unread: int) -> RoundPlan:
            held = controller.held(remaining, sharing)
            return held or controller.plan(context, remaining, sharing, unread)

        return Planner(plan, controller.worth_reading, controller)

    return make


@dataclass
class Account:
    """Seconds by part. prompts: the target's passes over prompts; reading: the draft's. plain, verifying: host and
    target of plain rounds, and of those with proposals."""

    tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    rounds: dict[str, int] = field(default_factory=dict)
    accepted: int = 0
    drafted: int = 0

    def add(self, part: str, seconds: float) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    def count(self, kind: str) -> None:
        self.rounds[kind] = self.rounds.get(kind, 0) + 1

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


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


def replay(
    traces: Sequence[Trace], make: Callable[[], Planner], costs: CostModel, clients: int, each: int
) -> Account:
    """So many clients ask for `each` texts one after the other."""
    assert costs.draft is not None, "a pair is replayed"
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
        begin(new, len(texts), costs, account)
        step(texts, costs, account)
        for number, text in enumerate(running):
            if text is not None and not text.left:
                if text.planner.controller is not None:
                    text.planner.controller.leave()
                    account.add("planning", text.planner.controller.planning)
                running[number] = None


def begin(new: Sequence[Text], sharing: int, costs: CostModel, account: Account) -> None:
    """Read the prompts of new texts."""
    if not new:
        return
    assert costs.draft is not None
    rows = sum(text.trace.prompt - 1 for text in new)
    account.add("prompts", costs.target.at(max(1, rows), 0))
    read = 0
    for text in new:
        length = text.trace.prompt
        text.unread = length
        if text.planner.reads(length, text.left - 1, sharing, length):
            read += length - 1
            text.unread = 1
    if read:
        account.add("reading", costs.draft.at(read, 0))


def step(texts: Sequence[Text], costs: CostModel, account: Account) -> None:
    """A round of all texts, whose passes are joint."""
    assert costs.draft is not None
    sharing, context = len(texts), sum(text.context for text in texts) // len(texts)
    plans = [
        text.planner.plan(text.context, text.left - 1, sharing, text.unread) if text.left > 1 else PLAIN
        for text in texts
    ]
    drafting = [(text, plan) for text, plan in zip(texts, plans, strict=True) if plan.depth]
    for depth in range(1, max((plan.depth for plan in plans), default=0) + 1):
        if depth == 1:
            late = sum(text.unread for text, _ in drafting if text.unread > 2)
            rows = sum(text.unread for text, _ in drafting)
            whole = costs.draft.at(rows, context)
            usual = costs.draft.at(rows - late, context) if rows > late else 0.0
            account.add("catching up", whole - usual)
            account.add("draft", usual)
        else:
            rows = sum(1 if plan.chain else min(LIMITS.frontier_width, plan.size) for _, plan in drafting if plan.depth >= depth)
            account.add("draft", costs.draft.at(rows, context))
    tokens = [min(plan.size, LIMITS.frontier_width) if plan.depth == 1 else plan.size for plan in plans]
    passes = costs.target.shared(context, sharing)
    extra = sum(tokens) if drafting else 0
    account.add("target", float(passes(np.array(sharing))))
    account.add("rows", float(passes(np.array(sharing + extra)) - passes(np.array(sharing))))
    account.add("host plain", costs.greedy.plain * sharing)
    for text, plan, size in zip(texts, plans, tokens, strict=True):
        account.count("probe" if plan.probe else "speculative" if plan.depth else "plain")
        taken = 0
        if plan.depth:
            account.add("host", costs.greedy.round + costs.greedy.token * size - costs.greedy.plain)
            found = text.trace.places[text.position].verify(plan.depth, plan.size, plan.chain)
            taken = len(found.rows)
            account.accepted += taken
            account.drafted += size
            if text.planner.controller is not None:
                text.planner.controller.observe(plan, found.rows, found.choices)
            text.unread = 1 + (taken == plan.depth)
        else:
            text.unread += 1
        kept = min(taken + 1, text.left)
        account.tokens += kept
        text.position += kept


def scaled(passes: PassCosts, first: float) -> PassCosts:
    """A target whose narrow passes cost less: the time that memory takes, not arithmetic."""
    return replace(passes, seconds=tuple(
        tuple(max(cost - (1 - first) * row[0] * max(0, 1 - (w - 1) / 15), 1e-9) for w, cost in zip(passes.widths, row))
        for row in passes.seconds
    ))
