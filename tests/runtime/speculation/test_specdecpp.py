"""SpecDec++ and its training-free rivals: when a branch ends (I13)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fakes import random_head, random_model
from growth import grow

from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.speculation.graph.token_graph import ROOT, TokenGraph
from draftwood.runtime.speculation.growers.baseline import StaticTree, chain
from draftwood.runtime.speculation.growers.dyspec import DySpecLayers
from draftwood.runtime.speculation.growers.specdecpp import (
    Confidence,
    Entropy,
    SpecDecPP,
    Stopper,
    rejection,
)

LONGEST = 8


def drafted(stopper: Stopper, seed: int) -> tuple[TokenGraph, int]:
    """A chain of at most LONGEST tokens under a random head."""
    stream = seeded_streams(seed).draft
    return grow(StaticTree(chain(LONGEST)), random_model(seed, 6), stream, stopper, random_head(seed))


@pytest.mark.parametrize("h", [0.1, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("seed", range(5))
def test_drafting_stops_at_the_first_likely_rejection(h: float, seed: int) -> None:
    """k is the first at which 1 - Π a exceeds h; Y_{k+1} is then not drawn."""
    graph, _ = drafted(SpecDecPP(h, k_min=1), seed)
    *before, last = range(1, len(graph))
    assert all(rejection(graph, node) <= h for node in before)
    assert rejection(graph, last) > h or graph.depths[last] == LONGEST


@pytest.mark.parametrize("h", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("seed", range(5))
def test_no_pass_is_spent_on_a_token_already_estimated_as_rejected(h: float, seed: int) -> None:
    """The draft's probability is asked first: the tokens stay, the pass over the last one is saved."""
    stopper = SpecDecPP(h, k_min=1, estimate=lambda rank, share: share)
    graph, passes = drafted(stopper, seed)
    *before, last = range(1, len(graph))

    def survival(node: int) -> float:
        return (1 - rejection(graph, graph.parents[node])) * graph.shares[node]

    assert all(1 - survival(node) <= h for node in before)
    scored = last in graph.acceptance
    assert scored or 1 - survival(last) > h or graph.depths[last] == LONGEST
    assert passes == len(graph) - (0 if scored else 1)
    whole, _ = drafted(SpecDecPP(1.0, 1), seed)
    assert graph.tokens == whole.tokens[: len(graph)]


def test_the_bounds_hold_at_both_ends() -> None:
    """h = 0 proposes the minimum, h = 1 the maximum."""
    for seed in range(5):
        for k_min in (1, 3):
            assert len(drafted(SpecDecPP(0.0, k_min), seed)[0]) - 1 == k_min
        assert len(drafted(SpecDecPP(1.0, 1), seed)[0]) - 1 == LONGEST


def test_each_branch_of_a_tree_stops_for_itself() -> None:
    head = random_head(2)
    stopper = SpecDecPP(0.6, k_min=1)
    graph, _ = grow(DySpecLayers(24, 5, 6), random_model(2, 6), seeded_streams(2).draft, stopper, head)
    parents = [node for node in range(1, len(graph)) if graph.edges[node]]
    assert parents and all(rejection(graph, node) <= 0.6 for node in parents)
    assert any(rejection(graph, node) > 0.6 for node in graph.acceptance)


def test_confidence_keeps_the_doubtful_token_and_ends_behind_it() -> None:
    for seed in range(10):
        graph, _ = drafted(Confidence(0.4), seed)
        *before, last = range(1, len(graph))
        assert all(graph.probability(node) >= 0.4 for node in before)
        assert graph.probability(last) < 0.4 or graph.depths[last] == LONGEST


def test_entropy_is_the_bound_of_adaedl() -> None:
    graph = TokenGraph(0)
    node = graph.add(0, 1, -0.5, 0.6)
    q = np.array([0.5, 0.25, 0.25])
    bound = 1 - math.sqrt(0.5 * -(q * np.log(q)).sum())
    logits = np.log(q).astype(np.float32)
    assert Entropy(bound + 1e-4).before_draw(graph, node, logits)
    assert not Entropy(bound - 1e-4).before_draw(graph, node, logits)
    certain = np.array([50.0, -50.0, -50.0], np.float32)
    assert not Entropy(0.99).before_draw(graph, node, certain)
    assert not Entropy(1.0, gamma=0.0).before_draw(graph, node, logits), "the bound is 1, which is not below 1"
    assert not Entropy(1.0).before_draw(graph, ROOT, logits), "one token is proposed in any case"


@pytest.mark.parametrize("k_min", [1, 2, 3])
@pytest.mark.parametrize(("threshold", "likely_enough"), [(0.5, False), (0.49, True)])
def test_a_rejection_as_likely_as_the_threshold_stops_nothing(
    threshold: float, likely_enough: bool, k_min: int
) -> None:
    """Of two tokens below each other the first one is accepted with probability 0.5, the second one for certain."""
    graph, logits = TokenGraph(0), np.zeros(2, np.float32)
    first = graph.add(ROOT, 1, -0.7, 0.5)
    second = graph.add(first, 2, -0.7, 0.5)
    graph.acceptance = {first: 0.5, second: 1.0}
    rule = SpecDecPP(threshold, k_min)
    for node in (first, second):
        stops = likely_enough and graph.depths[node] >= k_min
        assert rule.before_draw(graph, node, logits) == stops
    assert rule.before_score(graph, second) == (likely_enough and k_min <= 2)
    assert Confidence(1 - threshold).before_score(graph, first) == likely_enough


def test_stopping_never_changes_what_was_drawn_before() -> None:
    """The tokens are those of the unstopped chain, cut off."""
    for seed in range(5):
        whole, _ = drafted(SpecDecPP(1.0, 1), seed)
        for stopper in (SpecDecPP(0.5, 1), Confidence(0.4), Entropy(0.3)):
            cut, _ = drafted(stopper, seed)
            assert cut.tokens == whole.tokens[: len(cut)]


def test_a_token_that_the_head_has_not_read_counts_as_accepted() -> None:
    graph = TokenGraph(1)
    last = graph.add(graph.add(0, 2, 0.0, 1.0), 3, 0.0, 1.0)
    graph.acceptance[last] = 0.75
    assert rejection(graph, last) == 0.25
