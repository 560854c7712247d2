"""Baseline growers: drawn static trees (chain, k-ary, Sequoia's) and the best-first tree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...engines.base import ForwardOutput
from ...sampling.random import RandomStream
from ..graph.token_graph import ROOT, Best, TokenGraph
from .draft_vocabulary import NodeSampler
from .drawing import drawings
from .gsd import NO_MERGER, Merger


class Grower(Protocol):
    """Decides which nodes the draft scores next, and which children each node gets."""

    def frontier(self, graph: TokenGraph) -> list[int]:
        """The nodes of the next draft pass; empty when growth has ended."""

    def expand(
        self, graph: TokenGraph, nodes: Sequence[int], output: ForwardOutput, sampler: NodeSampler, stream: RandomStream
    ) -> None:
        """Add children to `nodes`. Row i of `output`: the draft's prediction after nodes[i]."""


class StaticTree:
    """A tree whose shape is fixed before anything is drawn. Children are drawn from the draft without replacement.

    topology[i] is the parent of position i + 1; position 0 is the root, and parents come first. (0, 1, 2, …) is the
    chain of speculative decoding; `k_ary` below makes wider shapes. With a merger, a position whose token
    recurs becomes an edge to the node with the recurrence.
    """

    def __init__(self, topology: Sequence[int], merger: Merger = NO_MERGER) -> None:
        self._merger = merger
        self._children: list[list[int]] = [[] for _ in range(len(topology) + 1)]
        for position, parent in enumerate(topology, start=1):
            self._children[parent].append(position)
        self._positions = {ROOT: 0}  # graph node -> position
        self._layer: list[int] = []

    def frontier(self, graph: TokenGraph) -> list[int]:
        return [node for node in self._layer if self._children[self._positions[node]]]

    def expand(
        self, graph: TokenGraph, nodes: Sequence[int], output: ForwardOutput, sampler: NodeSampler, stream: RandomStream
    ) -> None:
        self._layer = []
        for node, drawing in zip(nodes, drawings(graph, nodes, output, sampler), strict=True):
            for position in self._children[self._positions[node]]:
                if drawing.exhausted:  # fewer tokens have a positive probability than there are children
                    break
                token, share, R = drawing.draw(stream)
                self._place(graph, node, token, share, position, R)

    def _place(
        self,
        graph: TokenGraph,
        parent: int,
        token: int,
        share: float,
        position: int,
        R: NDArray[np.float64] | None = None,
    ) -> None:
        match = self._merger.match(graph, parent, token)
        if match is not None:
            graph.link(parent, match, 0.0, R)
            return
        child = graph.add(parent, token, 0.0, share, R=R)  # all values are equal, because every token is kept
        self._positions[child] = position
        self._layer.append(child)


class RankedStaticTree(StaticTree):
    """The same shape for temperature 0: the children of a node are its most probable tokens, best first."""

    def expand(
        self, graph: TokenGraph, nodes: Sequence[int], output: ForwardOutput, sampler: NodeSampler, stream: RandomStream
    ) -> None:
        self._layer = []
        most = max(len(self._children[self._positions[node]]) for node in nodes)
        ids, logprobs = rank_children(graph, nodes, output, sampler, most)
        for node, tokens, gains in zip(nodes, ids, logprobs, strict=True):
            for token, gain, position in zip(tokens, gains, self._children[self._positions[node]], strict=False):
                if gain == -math.inf:
                    break
                self._place(graph, node, token, math.exp(gain), position)


class BestFirst:
    """A tree of chosen tokens. Each pass scores the `width` most probable nodes of the last layer, and each of these
    nodes gets its `width` most probable children. `unroll` keeps the best `size` tokens of all (EAGLE-2's expansion and
    rerank, 2406.16858).

    width 1 is the greedy chain. The tree grows by layers, so it takes `depth` passes for any size. With a merger this
    is GSD's deterministic draft: children whose probability is below `sibling_share` of their best sibling's are
    pruned, nodes whose probability after their parent is below `leaf_share` get no children, and recurring sequences
    are linked.
    """

    def __init__(
        self,
        size: int,
        depth: int,
        width: int,
        merger: Merger,
        sibling_share: float = 0.0,
        leaf_share: float = 0.0,
    ) -> None:
        self.depth, self.width = depth, width
        self._best = Best(size)
        self._merger = merger
        self._log_sibling, self._log_leaf = log(sibling_share), log(leaf_share)
        self._layer: list[int] = []

    def frontier(self, graph: TokenGraph) -> list[int]:
        if not self._layer or graph.depths[self._layer[0]] >= self.depth:
            return []
        useful = [node for node in self._layer if self._best.admits(graph.values[node])]
        return sorted(useful, key=lambda node: -graph.values[node])[: self.width]

    def expand(
        self, graph: TokenGraph, nodes: Sequence[int], output: ForwardOutput, sampler: NodeSampler, stream: RandomStream
    ) -> None:
        ids, logprobs = rank_children(graph, nodes, output, sampler, self.width)
        offered = []
        for node, tokens, gains in zip(nodes, ids, logprobs, strict=True):
            value, least = graph.values[node], gains[0] + self._log_sibling
            offered += [
                (value + gain, node, token, gain) for token, gain in zip(tokens, gains, strict=True) if gain >= least
            ]
        offered.sort(key=itemgetter(0), reverse=True)
        self._layer = []
        for value, node, token, gain in offered:
            if not self._best.admits(value):
                break  # all later ones have lower values
            self._best.offer(value)
            match = self._merger.match(graph, node, token)
            if match is not None:
                graph.link(node, match, gain)
                continue
            child = graph.add(node, token, gain, math.exp(gain))
            if gain >= self._log_leaf:
                self._layer.append(child)


def rank_children(
    graph: TokenGraph, nodes: Sequence[int], output: ForwardOutput, sampler: NodeSampler, width: int
) -> tuple[list[list[int]], list[list[float]]]:
    """The most probable tokens after each node and their log-probabilities, each [nodes, <= width], best first. The
    engine's ranking is used unless the request changes logits. A token that may not follow has -inf."""
    columns = 0 if output.top_ids is None else output.top_ids.shape[1]
    if output.top_ids is not None and output.top_logprobs is not None and not sampler.follows_path and width <= columns:
        tokens = sampler.named(output.top_ids[: len(nodes), :width])
        return tokens.tolist(), output.top_logprobs[: len(nodes), :width].tolist()
    ranked = [sampler.ranking(output.logits[row], graph.path(node), width) for row, node in enumerate(nodes)]
    return [ids.tolist() for ids, _ in ranked], [logprobs.tolist() for _, logprobs in ranked]


def chain(length: int) -> tuple[int, ...]:
    """Topology of a single path."""
    return tuple(range(length))


def k_ary(branching: Sequence[int]) -> tuple[int, ...]:
    """Topology with branching[d] children per node at depth d (SpecInfer's expansion configuration, 2305.09781)."""
    topology: list[int] = []
    layer = [0]
    for children in branching:
        parents = [parent for parent in layer for _ in range(children)]
        layer = list(range(len(topology) + 1, len(topology) + 1 + len(parents)))
        topology += parents
    return tuple(topology)


def depths_of(topology: tuple[int, ...]) -> list[int]:
    """Depth of every position, the root first."""
    depths = [0]
    for parent in topology:
        depths.append(depths[parent] + 1)
    return depths


def shallow(topology: tuple[int, ...], max_depth: int) -> tuple[int, ...]:
    """The part of a shape that is at most `max_depth` deep; positions are renumbered."""
    depths = depths_of(topology)
    kept = [position for position, depth in enumerate(depths) if depth <= max_depth]
    number = {position: index for index, position in enumerate(kept)}
    return tuple(number[topology[position - 1]] for position in kept[1:])


def log(share: float) -> float:
    """Natural logarithm; -inf for zero."""
    return math.log(share) if share > 0 else -math.inf
