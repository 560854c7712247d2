"""DySpec's tree: Algorithm 1, its static forms, and what a decision may depend on (I6, I11)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
from fakes import Predict, random_head, random_model
from growth import PROMPT, grow
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftwood.runtime.speculation.graph.token_graph import TokenGraph
from draftwood.runtime.speculation.graph.token_tree import unroll
from draftwood.runtime.speculation.growers.baseline import Grower, StaticTree, chain, k_ary
from draftwood.runtime.speculation.growers.dyspec import DySpecHeap, DySpecLayers, DySpecThreshold
from draftwood.runtime.speculation.growers.gsd import NoMerger
from draftwood.runtime.speculation.growers.specdecpp import SpecDecPP

Shape = set[tuple[tuple[int, ...], int]]  # (path, rank among its siblings) of every node


class SlotStream:
    """One uniform per slot: whoever draws from the same remaining distribution draws the same token."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def categorical(self, probabilities: NDArray[np.float64]) -> int:
        digest = hashlib.sha256(np.round(probabilities, 12).tobytes() + bytes([self.seed])).digest()
        uniform = int.from_bytes(digest[:8], "big") / 2**64
        return min(int(np.searchsorted(np.cumsum(probabilities), uniform)), len(probabilities) - 1)

    def bernoulli(self, probability: float) -> bool:
        raise AssertionError("growing a tree decides nothing else")


def shape_of(graph: TokenGraph, size: int) -> Shape:
    tree = unroll(graph, size, 99)
    paths: list[tuple[int, ...]] = [()]
    for row in range(1, len(tree)):
        paths.append((*paths[tree.parents[row]], tree.token_ids[row]))
    ranks = {child: rank for children in tree.children for rank, child in enumerate(children)}
    return {(paths[row], ranks[row]) for row in range(1, len(tree))}


def tree_of(grower: Grower, seed: int, size: int, predict: Predict | None = None) -> Shape:
    return shape_of(grow(grower, predict or random_model(seed, 8), SlotStream(seed))[0], size)


@pytest.mark.parametrize("seed", range(25))
def test_the_static_forms_give_the_tree_of_algorithm_1(seed: int) -> None:
    """I11: with enough width and depth, the same random numbers give the same tree in fewer passes."""
    m = 12
    heap, heap_passes = grow(DySpecHeap(m, m), random_model(seed, 8), SlotStream(seed))
    layers, layer_passes = grow(DySpecLayers(m, depth=12, width=12), random_model(seed, 8), SlotStream(seed))
    assert shape_of(heap, m) == shape_of(layers, m)
    assert layer_passes <= heap_passes
    t = math.exp(min(heap.values))  # the m-th value: Algorithm 2 then draws the same slots
    threshold = DySpecThreshold(t * (1 - 1e-9), m, depth=12, width=12, merger=NoMerger())
    assert tree_of(threshold, seed, m) == shape_of(heap, m)


@pytest.mark.parametrize("seed", range(10))
def test_values_fall_along_the_order_of_drawing(seed: int) -> None:
    """I11: the popped values of Algorithm 1 never rise."""
    graph, _ = grow(DySpecHeap(16, 16), random_model(seed, 8), SlotStream(seed))
    values = graph.values[1:]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(values))


@pytest.mark.parametrize("seed", range(10))
def test_a_slot_is_shared_between_child_and_sibling(seed: int) -> None:
    """I11: v of the child slot + v of the sibling slot = v of the slot itself."""
    graph, _ = grow(DySpecHeap(16, 16), random_model(seed, 8), SlotStream(seed))
    checked = 0
    for edges in graph.edges:
        for edge, sibling in pairwise(edges):
            if graph.edges[edge.child]:
                first_child = graph.edges[edge.child][0].child
                parts = math.exp(graph.values[first_child]) + math.exp(graph.values[sibling.child])
                assert parts == pytest.approx(math.exp(graph.values[edge.child]))
                checked += 1
    assert checked


def test_a_narrow_shape_spends_its_passes_on_the_best_nodes() -> None:
    """A width of 8 and a depth of 6 recover nearly all of what Algorithm 1 expects, in 6 passes instead of 16."""
    shares = []
    for seed in range(30):
        predict = random_model(seed, 8)
        heap, _ = grow(DySpecHeap(16, 16), predict, SlotStream(seed))
        layers, passes = grow(DySpecLayers(16, depth=6, width=8), predict, SlotStream(seed))
        best = sorted((math.exp(value) for value in layers.values[1:]), reverse=True)[:16]
        shares.append(sum(best) / sum(math.exp(value) for value in heap.values[1:]))
        assert passes <= 6
    assert np.mean(shares) > 0.95


def test_an_estimate_of_acceptance_replaces_the_drawn_probability() -> None:
    """The fusion with SpecDec++: below a node the head believes in, the tree grows deeper."""
    predict = random_model(3, 8)
    sure, _ = grow(DySpecLayers(8, 8, 4, head=True), predict, SlotStream(3), accept=lambda context: 0.99)
    doubtful, _ = grow(DySpecLayers(8, 8, 4, head=True), predict, SlotStream(3), accept=lambda context: 0.01)
    assert max(unroll(sure, 8, 99).depths) > max(unroll(doubtful, 8, 99).depths)


@pytest.mark.parametrize("seed", range(6))
def test_a_head_that_agrees_with_the_draft_changes_no_draw(seed: int) -> None:
    """Its values replace equal ones, so that as many tokens are worth a draw as before."""
    predict = random_model(seed, 8)
    plain, _ = grow(DySpecLayers(8, 4, 3), predict, SlotStream(seed))
    paths: list[tuple[int, ...]] = [PROMPT]
    for node in range(1, len(plain.values)):
        paths.append((*paths[plain.parents[node]], plain.tokens[node]))
    shares = dict(zip(paths, plain.shares, strict=True))
    same, _ = grow(
        DySpecLayers(8, 4, 3, head=True), predict, SlotStream(seed), accept=lambda seen: shares.get(seen, 0.5)
    )
    assert (same.tokens, same.parents) == (plain.tokens, plain.parents)


class RedrawnStream(SlotStream):
    """Like SlotStream, but the `at`-th draw takes its second choice."""

    def __init__(self, seed: int, at: int) -> None:
        super().__init__(seed)
        self.at, self.draws = at, list[list[float]]()

    def categorical(self, probabilities: NDArray[np.float64]) -> int:
        self.draws.append(probabilities.tolist())
        token = super().categorical(probabilities)
        if len(self.draws) - 1 == self.at:
            others = probabilities.copy()
            others[token] = 0.0
            token = int(others.argmax()) if others.any() else token
        return token


GROWERS: dict[str, Callable[[], Grower]] = {
    "chain": lambda: StaticTree(chain(4)),
    "k-ary": lambda: StaticTree(k_ary((2, 2))),
    "dyspec-heap": lambda: DySpecHeap(8, 8),
    "dyspec": lambda: DySpecLayers(8, 4, 3),
    "dyspec-threshold": lambda: DySpecThreshold(0.05, 8, 4, 3, NoMerger()),
}


@pytest.mark.parametrize("name", GROWERS)
@settings(max_examples=30)
@given(seed=st.integers(0, 200), at=st.integers(0, 7))
def test_no_decision_depends_on_a_later_draw(name: str, seed: int, at: int) -> None:
    """I6: redraw a token; every draw decided before it is decided in the same way."""
    runs = []
    for redrawn in (-1, at):
        stream = RedrawnStream(seed, redrawn)
        grow(GROWERS[name](), random_model(seed, 6), stream, SpecDecPP(0.8, 1), random_head(seed))
        runs.append(stream.draws)
    plain, changed = runs
    assert plain[: at + 1] == changed[: at + 1]


def paths_of(graph: TokenGraph) -> Sequence[list[int]]:
    return [graph.path(node) for node in range(1, len(graph))]


def test_no_two_siblings_carry_the_same_token() -> None:
    for name, grower in GROWERS.items():
        graph, _ = grow(grower(), random_model(5, 6), SlotStream(5))
        paths = [tuple(path) for path in paths_of(graph)]
        assert len(set(paths)) == len(paths), name
