"""The table that corrects the draft's probabilities: what it learns, and that it stays a probability."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.runtime.speculation.graph.token_graph import ROOT, TokenGraph
from draftwood.runtime.speculation.graph.token_tree import TokenTree, unroll
from draftwood.runtime.speculation.planning.calibration import Calibration


def siblings(shares: list[float]) -> TokenTree:
    graph = TokenGraph(0)
    for token, share in enumerate(shares):
        graph.add(ROOT, token, 0.0, share)
    return unroll(graph, len(shares), 99)


def test_it_learns_the_acceptance_of_a_rank_and_a_probability() -> None:
    calibration, rng = Calibration(), np.random.default_rng(0)
    for _ in range(2000):
        sure = rng.random() < 0.9
        calibration.update(siblings([0.6]), [1] if sure else [])
        lucky = rng.random() < 0.3
        calibration.update(siblings([0.02]), [1] if lucky else [])
    assert calibration(0, 0.7) == pytest.approx(0.9, abs=0.03)
    assert calibration(0, 0.02) == pytest.approx(0.3, abs=0.03)


def test_four_observations_weigh_as_much_as_the_prior() -> None:
    """Of a rank as a whole, whose prior is 0.6 for the first sibling, and of a cell, whose prior is its rank."""
    calibration = Calibration()
    for _ in range(4):
        calibration.update(siblings([0.6]), [])
    assert calibration(0, 0.02) == pytest.approx(0.3)  # (0.6 + 0) / 2; this cell has seen nothing
    assert calibration(0, 0.6) == pytest.approx(0.15)


def test_the_smallest_probabilities_share_the_last_cell_and_no_other() -> None:
    calibration = Calibration()
    for _ in range(9):
        calibration.update(siblings([2**-11.5]), [1])
    assert calibration(0, 2**-11.5) == calibration(0, 1e-7) == calibration(0, 0.0) > calibration(0, 2**-10.5)


def test_siblings_behind_the_accepted_one_were_never_offered() -> None:
    """Verification stops at the accepted sibling: what stands after it says nothing."""
    calibration = Calibration()
    untouched = calibration(2, 0.1)
    for _ in range(100):
        calibration.update(siblings([0.5, 0.2, 0.1]), [2])
    assert calibration(0, 0.5) < 0.1 and calibration(1, 0.2) > 0.9
    assert calibration(2, 0.1) == untouched


def test_a_path_is_judged_row_by_row() -> None:
    graph = TokenGraph(0)
    first = graph.add(ROOT, 1, 0.0, 0.5)
    second = graph.add(first, 2, 0.0, 0.5)
    graph.add(second, 3, 0.0, 0.5)
    calibration, other = Calibration(), Calibration()
    calibration.update(unroll(graph, 3, 99), [1, 2])
    other.update(siblings([0.5]), [1])
    other.update(siblings([0.5]), [1])
    other.update(siblings([0.5]), [])
    assert calibration(0, 0.5) == other(0, 0.5)


@given(rank=st.integers(0, 20), share=st.floats(0, 1), accepted=st.lists(st.booleans(), max_size=30))
def test_an_estimate_is_never_certain(rank: int, share: float, accepted: list[bool]) -> None:
    calibration = Calibration()
    for outcome in accepted:
        calibration.update(siblings([max(share, 1e-12)]), [1] if outcome else [])
    assert 0 < calibration(rank, share) < 1
