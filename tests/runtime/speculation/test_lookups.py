"""How much of what a prompt lookup finds is expected to be right, and whether a round proposes it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from controllers import CHAIN
from costs import table
from hypothesis import given
from hypothesis import strategies as st

from draftwood.runtime.speculation.planning.budget import DraftBudget
from draftwood.runtime.speculation.planning.controller import Controller
from draftwood.runtime.speculation.planning.drift import Drift
from draftwood.runtime.speculation.planning.lookups import DEPTHS, LookupEstimate, Match, best_lookup


@pytest.mark.parametrize("ngram", [1, 2, 5, 16])
def test_the_estimate_becomes_the_frequency(ngram: int) -> None:
    rng, general = np.random.default_rng(0), LookupEstimate()
    estimate = LookupEstimate(general)
    for _ in range(2000):
        right = int(np.cumprod(rng.random(20) < 0.6).sum())
        estimate.observe(Match(ngram, [1] * 20), [1] * right + [0])
    frequencies = np.cumsum(0.6 ** np.arange(1, 21))
    np.testing.assert_allclose(general.expected(ngram, 20), frequencies, atol=0.15)
    np.testing.assert_allclose(LookupEstimate(general).expected(ngram, 20), frequencies, atol=0.15)


def test_a_text_departs_from_all_others() -> None:
    general = LookupEstimate()
    repeating, other = LookupEstimate(general), LookupEstimate(general)
    for _ in range(50):
        repeating.observe(Match(3, [1] * 8), [1] * 8)
        other.observe(Match(3, [1] * 8), [0])
    assert repeating.expected(3, 8)[-1] > 6 > 1 > other.expected(3, 8)[-1]
    assert other.expected(3, 8)[-1] < LookupEstimate(general).expected(3, 8)[-1] < repeating.expected(3, 8)[-1]


def test_longer_n_grams_are_trusted_more_at_first() -> None:
    expected = [LookupEstimate().expected(ngram, DEPTHS + 4) for ngram in range(1, 17)]
    assert all(np.all(np.less_equal(less, more)) for less, more in pairwise(expected))
    assert all(np.all(np.diff(each) > 0) for each in expected)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 1)), min_size=1, max_size=8),
    st.floats(0.1, 10),
)
def test_the_best_number_of_tokens_is_taken(rounds: list[tuple[float, float]], speed: float) -> None:
    expected, seconds = np.cumsum([e for e, _ in rounds]), 1 + np.cumsum([s for _, s in rounds])
    best = best_lookup(expected.tolist(), seconds.tolist(), speed)
    assert best.tokens - speed * best.seconds >= (1 + expected - speed * seconds).max() - 1e-9
    assert (best.tokens, best.seconds) == (1 + expected[best.depth - 1], seconds[best.depth - 1])


@pytest.mark.parametrize(("batch_size", "row"), [(1, 0.0), (1, 0.4), (1, 2.0), (4, 0.0), (4, 0.1), (4, 0.6)])
def test_a_lookup_takes_the_place_of_a_slower_round(batch_size: int, row: float) -> None:
    """Among several requests each of them has a small part of what all rows have in common, so rows must be cheaper."""
    costs = table(1.0, 5.0, row)  # the draft is too dear
    planner = Controller(costs, CHAIN, greedy=True, looks_up=True)
    plan = planner.plan(10, 100, batch_size)
    assert not plan.depth
    assert planner.or_lookup(plan, Match(0, [])) is plan
    found = planner.or_lookup(plan, Match(8, [1] * 4))
    assert found.looked_up is planner.considers_lookups(plan) is (row < 0.5)
    if found.looked_up:
        assert found.tokens / found.seconds > plan.tokens / plan.seconds
        assert found.speed_up > 1 and 1 <= found.depth <= 4
    assert Controller(costs, CHAIN, greedy=True).or_lookup(plan, Match(8, [1] * 4)) is plan


def test_a_lookup_among_others_is_priced_by_what_their_passes_take() -> None:
    """The table says that rows cost nothing. Passes of more rows than texts have taken five times as long."""
    costs = table(1.0, 5.0, 0.0)
    budget = DraftBudget(Drift(costs))
    planner = Controller(costs, CHAIN, greedy=True, budget=budget, looks_up=True)
    match = Match(8, [1] * 4)
    assert planner.or_lookup(planner.plan(10, 100, batch_size=4), match).looked_up
    for rows, seconds in [(4, 1.0), (8, 5.0)] * 64:
        budget.observe_pass(rows, 4, 10, seconds)
    plan = planner.plan(10, 100, batch_size=4)
    assert planner.or_lookup(plan, match) is plan


def test_a_probe_is_not_replaced() -> None:
    planner = Controller(table(1.0, 0.1), CHAIN, greedy=True, looks_up=True)
    probe = planner.plan(10, 100)._replace(probe=True)
    assert planner.or_lookup(probe, Match(8, [1] * 8)) is probe
