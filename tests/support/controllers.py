"""Controllers of planning for tests: shapes of proposals, and requests whose draft is accepted at a known rate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from draftwood.runtime.speculation.planning import controller
from draftwood.runtime.speculation.planning.controller import Controller, RoundPlan
from draftwood.runtime.speculation.planning.cost import CostModel, HostCosts, PassCosts
from draftwood.runtime.speculation.planning.estimate import Shapes, VerifierChoice

CHAIN = Shapes((), 12, 1, True)
TREES = Shapes((1, 3, 7, 15), 8, 4, False)
DEAR_DRAFT = 3.0  # passes of the target


def plan_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan stays for further rounds."""
    for name in ("HELD_PLAIN", "HELD_ALONE", "HELD_SHARED"):
        monkeypatch.setattr(controller, name, (0, 0))


def choices(plan: RoundPlan, accepted: int) -> list[VerifierChoice]:
    """The verifier's choices along a chain of which `accepted` tokens were accepted."""
    return [*[VerifierChoice(0, 1)] * accepted, *[VerifierChoice(None, 1)] * (accepted < plan.depth)]


def settled(costs: CostModel, shapes: Shapes, alpha: float, rounds: int = 400) -> list[RoundPlan]:
    """The plans of a request whose drafted tokens are accepted at random, each with probability alpha."""
    planner, rng = Controller(costs, shapes, greedy=True), np.random.default_rng(0)
    plans = []
    for _ in range(rounds):
        plan = planner.plan(100, 1000)
        plans.append(plan)
        if plan.depth:
            accepted = int((np.cumprod(rng.random(plan.depth) < alpha)).sum())
            planner.observe(plan, list(range(1, accepted + 1)), choices(plan, accepted))
    return plans


def scaled(costs: CostModel, factor: float) -> CostModel:
    """The same costs in another unit of time: every time is multiplied by `factor`."""

    def passes(each: PassCosts) -> PassCosts:
        return replace(each, seconds=tuple(tuple(cost * factor for cost in row) for row in each.seconds))

    greedy, sampled = (
        HostCosts(host.plain * factor, host.round * factor, host.token * factor)
        for host in (costs.greedy, costs.sampled)
    )
    assert costs.draft is not None
    return CostModel(passes(costs.target), passes(costs.draft), greedy, sampled, {})
