"""Costs follow what passes really take, but for texts that must not depend on a clock."""

from __future__ import annotations

import enumeration
import pytest
from controllers import plan_each_round
from costs import table
from enumeration import PROMPT, decoded, pair, total_variation

from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation.config import SpeculativeConfig
from draftwood.runtime.speculation.planning.controller import Controller
from draftwood.runtime.speculation.planning.cost import HostCosts
from draftwood.runtime.speculation.planning.drift import STALE, Drift
from draftwood.runtime.speculation.planning.estimate import Shapes, VerifierChoice
from draftwood.runtime.speculation.planning.history import History

TREES = Shapes((1, 3, 7, 15), 4, 4, True)
SMALL = SpeculativeConfig(max_draft_len=2, max_total_draft_tokens=3, frontier_width=2)
NEAR = table(1.0, 0.45, host=HostCosts(0.0, 0.0, 0.01))  # one rejected token changes the next plan


def test_wide_passes_that_take_longer_make_proposals_smaller() -> None:
    """The draft's first choice is right in half of all cases, its second one mostly else. A tree of many rows is free
    by the table; then passes of more than four rows take ten times as long; then the table holds again."""
    history, costs = History(Drift(table(1.0, 0.02))), table(1.0, 0.02)
    planner, sizes = Controller(costs, TREES, True, history), []
    for slower in (1.0, 10.0, 1.0):
        for _ in range(400):
            plan = planner.held(1000, 1) or planner.plan(100, 1000)
            rows = 1 + plan.size
            planner.observe_pass(rows, slower if rows > 4 else 1.0)
            hits = [VerifierChoice(0, 1), VerifierChoice(None, 1)] if plan.chain else [VerifierChoice(1, 3)] * 2
            planner.observe(plan, [1] if plan.chain else list(range(2, 2 + min(plan.depth, plan.size // 2))), hits)
            sizes.append(plan.size)
    for first, tree in ((200, True), (600, False), (1000, True)):
        later = sorted(sizes[first : first + 200])
        assert (later[100] > 3) == tree


def test_what_narrow_passes_show_moves_all_widths() -> None:
    stored = table(1.0, 0.1, row=0.02)
    drift = Drift(stored)
    assert drift.is_stale(1000.0)  # nothing was seen
    for _ in range(60):
        drift.observe(1, 1.0, 2.0)
    assert drift.costs().target.at(16, 0) == pytest.approx(2 * stored.target.at(16, 0), rel=0.1)
    assert drift.costs().following is not None and drift.costs().draft == drift.costs().following
    for _ in range(60):  # the draft's passes have a difference of their own
        drift.observe_draft(0.1, 0.05)
    costs, before = drift.costs(), stored.draft
    assert costs.draft is not None and before is not None
    assert costs.draft.at(1, 0) == pytest.approx(before.at(1, 0) / 2, rel=0.1)
    assert costs.target.at(16, 0) == pytest.approx(2 * stored.target.at(16, 0), rel=0.15)
    for _ in range(STALE):
        assert not drift.is_stale(1.0)
        drift.observe(8, 1.14, 1.14)
    assert drift.is_stale(1.1) and not drift.is_stale(2.0)
    for _ in range(20 * STALE):
        drift.observe(8, 1.14, 1.14)
    plans = [Controller(stored, TREES, True, History(drift)).plan(0, 100) for _ in range(2)]
    assert [(plan.probe, plan.depth > 0) for plan in plans] == [(True, False), (False, True)]
    drift.observe(1, 1.0, 0.0)  # a coarse clock
    assert drift.costs().target.at(1, 0) > 0


def test_plans_by_what_passes_took_change_no_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """I2, where passes seem to take longer with each accepted token: every random outcome."""

    class Fresh(SpeculativeDecoder):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, history=History(Drift(NEAR)))  # type: ignore[arg-type, misc]

    sizes: set[int] = set()
    observe = Controller.observe_pass

    def timed(self: Controller, rows: int, seconds: float) -> None:
        sizes.add(rows)
        observe(self, rows, 1.0 + self._plan.tokens * rows)

    monkeypatch.setattr(enumeration, "SpeculativeDecoder", Fresh)
    monkeypatch.setattr(Controller, "observe_pass", timed)
    plan_each_round(monkeypatch)
    target, draft = pair(1, 2)
    params = SamplingParams(max_tokens=4)
    found = decoded(target, draft, SMALL, params, NEAR)
    assert total_variation(found, decoded(target, None, None, params)) < 1e-12
    assert len(sizes) > 1


@pytest.mark.parametrize(("seed", "learns"), [(3, False), (None, True)])
def test_a_seeded_text_depends_on_no_clock(seed: int | None, learns: bool) -> None:
    drift = Drift(NEAR)
    target, draft = pair(0, 3)
    params = SamplingParams(max_tokens=8, seed=seed)
    decoder = SpeculativeDecoder(target, draft, SMALL, 4096, (), NEAR, history=History(drift))
    sampler = Sampler(params, PROMPT, (), target.spec.model.vocab_size)
    assert [chunk.token_ids for chunk in decoder.generate(PROMPT, sampler, seeded_streams(0), SpecDecodeStats())]
    assert drift.is_stale(1.0) != learns
