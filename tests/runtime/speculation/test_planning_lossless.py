"""Planning changes no distribution: proof by enumeration of every random outcome of the real decoder."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from controllers import CHAIN, choices, plan_each_round
from costs import table
from enumeration import decoded, pair, total_variation

from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.speculation.config import SpeculativeConfig
from draftwood.runtime.speculation.planning.controller import Controller
from draftwood.runtime.speculation.planning.cost import HostCosts

LOSSLESS = {
    "auto": SpeculativeConfig(max_draft_len=2, max_total_draft_tokens=3, frontier_width=2),
    "chain": SpeculativeConfig("chain", max_draft_len=2),
    "topk": SpeculativeConfig("topk", max_draft_len=2, max_total_draft_tokens=3, frontier_width=2),
    "k-ary": SpeculativeConfig("k-ary", branching=(2, 1), max_total_draft_tokens=4),
    "dyspec-threshold": SpeculativeConfig("dyspec-threshold", max_draft_len=2, max_total_draft_tokens=3),
}
# Prices at which one accepted or rejected token changes the next plan.
NEAR = (table(1.0, 0.45), table(1.0, 0.4, 0.05), table(1.0, 0.45, host=HostCosts(0.0, 0.0, 0.01)))


@pytest.mark.parametrize("name", LOSSLESS)
def test_planning_changes_no_distribution(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """I2 with plans made from what earlier rounds accepted: every random outcome, as without speculation. Plans that
    hold for some rounds hardly change within so few tokens, so the later texts have a new one for each round."""
    params = SamplingParams(max_tokens=4)
    for seed, costs in enumerate(NEAR):
        if seed:
            plan_each_round(monkeypatch)
        target, draft = pair(seed, 2)
        expected = decoded(target, None, None, params)
        found = decoded(target, draft, LOSSLESS[name], params, costs)
        assert total_variation(found, expected) < 1e-12


def test_these_prices_do_make_plans_differ() -> None:
    """Without that the proof above would prove nothing."""
    first = Controller(NEAR[0], CHAIN, greedy=False).plan(10, 100)
    later: list[Sequence[int]] = []
    for accepted in ([], list(range(1, first.depth + 1))):
        planner = Controller(NEAR[0], CHAIN, greedy=False)
        planner.observe(planner.plan(10, 100), accepted, choices(first, len(accepted)))
        later.append(planner.plan(10, 100)[:2])
    assert later[0] != later[1]
