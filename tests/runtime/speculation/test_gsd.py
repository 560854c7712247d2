"""GSD: what is merged, what a merge may not do, and what it saves (I12)."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from fakes import random_model
from growth import grow
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.speculation.graph.token_graph import ROOT, Best, TokenGraph
from draftwood.runtime.speculation.graph.token_tree import TokenTree, unroll
from draftwood.runtime.speculation.growers.baseline import BestFirst, Grower, StaticTree, k_ary
from draftwood.runtime.speculation.growers.dyspec import DySpecHeap, DySpecLayers, DySpecThreshold
from draftwood.runtime.speculation.growers.gsd import GraphMerger, NoMerger, UnexpandedMerger


def chosen(seed: int, tau: int, size: int = 24, vocab_size: int = 5) -> tuple[TokenGraph, int]:
    """GSD's deterministic draft on a small vocabulary, where sequences recur often."""
    grower = BestFirst(size, depth=5, width=4, merger=GraphMerger(tau))
    return grow(grower, random_model(seed, vocab_size), seeded_streams(seed).draft)


def drawn(seed: int, tau: int, size: int = 20) -> TokenGraph:
    """The sampled form."""
    grower = DySpecThreshold(0.02, size, depth=5, width=4, merger=UnexpandedMerger(tau))
    return grow(grower, random_model(seed, 4), seeded_streams(seed).draft)[0]


def paths(tree: TokenTree) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for row in range(1, len(tree)):
        found.append((*found[tree.parents[row]], tree.token_ids[row]))
    return found


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), tau=st.integers(0, 2), sampled=st.booleans())
def test_the_graph_has_no_cycle(seed: int, tau: int, sampled: bool) -> None:
    graph = drawn(seed, tau) if sampled else chosen(seed, tau)[0]
    for node in range(len(graph)):
        assert not any(graph.reaches(edge.child, node) for edge in graph.edges[node])


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), tau=st.integers(0, 2), sampled=st.booleans())
def test_a_merge_joins_equal_sequences_of_tau_plus_one_tokens(seed: int, tau: int, sampled: bool) -> None:
    graph = drawn(seed, tau) if sampled else chosen(seed, tau)[0]
    for node, edges in enumerate(graph.edges):
        for edge in edges:
            if graph.parents[edge.child] != node:
                ours = [graph.tokens[n] for n in graph.ancestors(node)[:tau]]
                theirs = [graph.tokens[n] for n in graph.ancestors(graph.parents[edge.child])[:tau]]
                assert ours == theirs and len(ours) == tau


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), tau=st.integers(0, 2))
def test_the_unroll_is_a_tree_of_distinct_paths_within_its_budget(seed: int, tau: int) -> None:
    graph, _ = chosen(seed, tau, size=12)
    tree = unroll(graph, 12, 99)
    found = paths(tree)
    assert len(tree) <= 13 and len(set(found)) == len(found)
    assert all(tree.parents[row] < row for row in range(1, len(tree)))
    assert all(tree.depths[row] == len(found[row]) for row in range(len(tree)))
    for row in range(1, len(tree)):
        assert tree.merged[row] == (graph.path(tree.nodes[row]) != list(found[row]))


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), tau=st.integers(0, 1), size=st.integers(1, 20))
def test_a_sampled_graph_never_outgrows_its_budget(seed: int, tau: int, size: int) -> None:
    """I12: growth stops before a draw, so that nothing drawn is dropped."""
    graph = drawn(seed, tau, size)
    tree = unroll(graph, size, 99)
    assert tree == unroll(graph, 10_000, 99) and len(tree) <= size + 1


def test_merging_saves_draft_tokens_for_the_same_hypotheses() -> None:
    """The point of the paper: fewer nodes are drafted than tokens are proposed."""
    drafted, proposed = 0, 0
    for seed in range(20):
        graph, _ = chosen(seed, tau=1)
        tree = unroll(graph, 24, 99)
        drafted += len({node for node in tree.nodes[1:]})
        proposed += len(tree) - 1
    assert drafted < 0.85 * proposed


@pytest.mark.parametrize(
    "grower",
    [
        lambda: DySpecLayers(30, 4, 6, merger=GraphMerger(0)),
        lambda: DySpecHeap(30, 30, merger=GraphMerger(0)),
        lambda: StaticTree(k_ary((3, 2, 2)), GraphMerger(0)),
    ],
    ids=["layers", "heap", "k-ary"],
)
def test_merging_goes_on_top_of_any_grower(grower: Callable[[], Grower]) -> None:
    """Recurring tokens become merge edges, so that fewer nodes carry at least as many hypotheses."""
    graph, _ = grow(grower(), random_model(1, 6), seeded_streams(0).draft)
    edges = sum(map(len, graph.edges))
    assert edges > len(graph) - 1
    assert sum(unroll(graph, 1000, 99).merged) > 0


def test_every_node_is_drafted_once() -> None:
    """Draft rows are distinct nodes, however many copies the unroll makes."""
    for seed in range(10):
        graph, _ = chosen(seed, tau=0)
        assert len(unroll(graph, 1000, 99).nodes) >= len(graph)


def test_a_node_may_have_several_merge_edges() -> None:
    """The release keeps one slot per node and overwrites it."""
    graph = TokenGraph(9)
    a, b = graph.add(ROOT, 1, -0.1, 0.9), graph.add(ROOT, 2, -0.2, 0.9)
    c = graph.add(a, 3, -0.1, 0.9)
    d = graph.add(a, 4, -0.2, 0.9)
    graph.link(b, c, -0.3)
    graph.link(b, d, -0.4)
    assert paths(unroll(graph, 100, 99))[1:].count((2, 3)) == 1 and (2, 4) in paths(unroll(graph, 100, 99))


def test_a_token_may_be_kept_while_its_value_is_among_the_largest() -> None:
    best = Best(2)
    best.offer(-1.0)
    assert best.admits(-9.0) and best.holds(-9.0) and not best.holds(-math.inf)
    best.offer(-2.0)
    assert best.admits(-1.5) and best.holds(-2.0) and not best.holds(-2.5)
    assert not best.admits(-2.0), "of equal tokens the earlier one is kept"
    best.withdraw(-1.0)
    assert best.admits(-9.0) and best.holds(-9.0)


def test_a_cycle_is_refused() -> None:
    graph = TokenGraph(9)
    a = graph.add(ROOT, 1, -0.1, 0.9)
    b = graph.add(a, 2, -0.1, 0.9)
    with pytest.raises(ValueError, match="cycle"):
        graph.link(b, a, -0.1)


def test_pruned_siblings_and_leaves_are_not_drafted() -> None:
    predict = random_model(4, 6)
    whole = BestFirst(30, depth=4, width=4, merger=NoMerger())
    pruned = BestFirst(30, depth=4, width=4, merger=NoMerger(), sibling_share=0.5, leaf_share=0.4)
    (all_nodes, _), (few, _) = (grow(grower, predict, seeded_streams(0).draft) for grower in (whole, pruned))
    assert len(few) < len(all_nodes)
    for node in range(len(few)):
        probabilities = [few.probability(edge.child) for edge in few.edges[node]]
        assert all(p >= 0.5 * max(probabilities) - 1e-9 for p in probabilities)
        if node != ROOT and few.probability(node) < 0.4:
            assert not few.edges[node]
