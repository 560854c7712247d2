"""DySpec (arXiv 2410.11744): a token tree grown greedily where the draft expects acceptance.

A *slot* is a place where a token may be drawn: below a node, after the siblings drawn there before. Its value v is the
expected probability that verification reaches it. Drawing y from a slot with remaining distribution R opens two more:

    child slot    v · a(y)          sibling slot    v · (1 − a(y))          a(y) = R[y] in the paper (Hypothesis 1)

`estimate` gives a(y); the default is the paper's, `Calibration` corrects it by what was accepted in earlier rounds.

Only the decision *whether* to draw may depend on values, and a value holds nothing about the token its own slot will
yield; that is the condition under which recursive rejection and traversal verification stay exact (section 5.1).
With `head`, where a head has estimated the acceptance of a node (SpecDec++), the child slot of that node uses the
estimate instead of R[y]: it is known as soon as the draft has scored the node, when the slot can first be drawn from.

A `merger` links a drawn token to a node that carries it already (GSD). In the heap and the layers a merge may depend
on what was drawn below its end: such a graph is verified by matching. `DySpecThreshold` merges as rejection sampling
asks.

All values are natural logarithms. Errata of the printed Algorithm 2: `while v < t` is inverted.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

from ...engines.base import ForwardOutput
from ...sampling.random import RandomStream
from ...sampling.sampler import Sampler
from ..graph.token_graph import ROOT, Best, TokenGraph
from ..planning.calibration import Estimate, uncorrected
from .drawing import Drawing, drawings
from .gsd import NO_MERGER, Merger

NEVER = -math.inf


class DySpecHeap:
    """Algorithm 1: m tokens, always from the most valuable slot of the whole tree. One draft pass per node whose child
    slot reaches the top: the reference for the static forms below, and the fewest draft rows. Nodes at `depth`, where
    the text ends, have no child slot."""

    def __init__(
        self, m: int, depth: int, estimate: Estimate = uncorrected, head: bool = False, merger: Merger = NO_MERGER
    ) -> None:
        self.m, self.depth, self.estimate, self.head = m, depth, estimate, head
        self._merger = merger
        self._slots: list[tuple[float, int, int]] = [(0.0, 0, ROOT)]  # -log v, creation order, node
        self._created = 0
        self._drawings: dict[int, Drawing] = {}

    def frontier(self, graph: TokenGraph) -> list[int]:
        return [self._slots[0][2]] if self._slots and len(graph) <= self.m else []

    def expand(
        self, graph: TokenGraph, nodes: Sequence[int], output: ForwardOutput, sampler: Sampler, stream: RandomStream
    ) -> None:
        for node, drawing in zip(nodes, drawings(graph, nodes, output, sampler), strict=True):
            self._drawings[node] = drawing
            if self.head and node in graph.acceptance:  # the slot on top is this node's: value it anew
                heapq.heapreplace(self._slots, self._slot(estimated(graph, node), node))
        while self._slots and len(graph) <= self.m:
            log_v, node = -self._slots[0][0], self._slots[0][2]
            if node not in self._drawings:
                return  # the draft has to score this node before anything can be drawn below it
            heapq.heappop(self._slots)
            drawing = self._drawings[node]
            y, share, R = drawing.draw(stream)
            a = self.estimate(drawing.drawn - 1, share)
            gain = log_v - graph.values[node]
            match = self._merger.match(graph, node, y)
            if match is None:
                child = graph.add(node, y, gain, share, R=R)
                if graph.depths[child] < self.depth:
                    heapq.heappush(self._slots, self._slot(log_v + math.log(a), child))
            else:
                graph.link(node, match, gain, R)
            if not drawing.exhausted and a < 1:
                heapq.heappush(self._slots, self._slot(log_v + log1m(a), node))

    def _slot(self, log_v: float, node: int) -> tuple[float, int, int]:
        self._created += 1
        return -log_v, self._created, node


class DySpecLayers:
    """The tree of Algorithm 1 in a static shape: `depth` draft passes of at most `width` nodes, then the `size` best.

    Layer by layer, each layer's slots are drawn from in order of value, as long as a slot can still be among the best
    `size` of the whole tree, counting the first token below each node that goes on; `unroll` keeps the best. With
    enough width and depth this is the tree of Algorithm 1 for the same random numbers, in `depth` passes instead of one
    per node.
    """

    def __init__(
        self,
        size: int,
        depth: int,
        width: int,
        estimate: Estimate = uncorrected,
        head: bool = False,
        merger: Merger = NO_MERGER,
    ) -> None:
        self.depth, self.width, self.estimate, self.head = depth, width, estimate, head
        self._merger = merger
        self._layer: list[int] = []
        self._reach: dict[int, float] = {ROOT: 0.0}  # node -> log-value of its child slot
        self._best = Best(size)
        self._best.offer(0.0)  # the root's first child

    def frontier(self, graph: TokenGraph) -> list[int]:
        if not self._layer or graph.depths[self._layer[0]] >= self.depth:
            return []
        useful = [node for node in self._layer if self._best.holds(self._reach[node])]
        useful.sort(key=lambda node: -self._reach[node])
        for node in useful[self.width :]:  # nothing will be drawn below them
            self._best.withdraw(self._reach[node])
        return useful[: self.width]

    def expand(
        self, graph: TokenGraph, nodes: Sequence[int], output: ForwardOutput, sampler: Sampler, stream: RandomStream
    ) -> None:
        self._layer = []
        for node in nodes if self.head else ():
            if node in graph.acceptance:
                self._best.withdraw(self._reach[node])
                self._reach[node] = estimated(graph, node)
                self._best.offer(self._reach[node])
        below, slots = open_slots(graph, nodes, output, sampler, self._reach)
        while slots:
            log_v, node = -slots[0][0], slots[0][1]
            drawing = below[node]
            rank = drawing.drawn
            if not (self._best.admits(log_v) if rank else self._best.holds(log_v)):
                return
            y, share, R = drawing.draw(stream)
            a = self.estimate(rank, share)
            gain = log_v - graph.values[node]
            match = self._merger.match(graph, node, y)
            if rank:  # a node's first child was counted on when the node was drawn
                self._best.offer(log_v)
            if match is None:
                child = graph.add(node, y, gain, share, R=R)
                self._layer.append(child)
                self._reach[child] = log_v + math.log(a)
                if graph.depths[child] < self.depth:
                    self._best.offer(self._reach[child])
            else:
                graph.link(node, match, gain, R)
            next_slot(slots, drawing, log_v + log1m(a))


class DySpecThreshold:
    """Algorithm 2: every slot worth at least t, layer by layer; at most `size` tokens when unrolled.

    The budget is checked before each draw, so nothing drawn is ever dropped, and recurring sequences may be merged as
    they are drawn (GSD): a draw below a node costs one token per path that reaches the node.
    """

    def __init__(
        self,
        t: float,
        size: int,
        depth: int,
        width: int,
        merger: Merger,
        estimate: Estimate = uncorrected,
        head: bool = False,
    ) -> None:
        self.log_t, self.size, self.depth, self.width = math.log(t), size, depth, width
        self.estimate, self.head = estimate, head
        self._merger = merger
        self._layer: list[int] = []
        self._reach: dict[int, float] = {ROOT: 0.0}
        self._paths: dict[int, int] = {ROOT: 1}  # node -> paths from the root: its copies when unrolled
        self._spent = 0

    def frontier(self, graph: TokenGraph) -> list[int]:
        if not self._layer or graph.depths[self._layer[0]] >= self.depth:
            return []
        useful = [node for node in self._layer if self._reach[node] >= self.log_t and self._affords(node)]
        return sorted(useful, key=lambda node: -self._reach[node])[: self.width]

    def expand(
        self, graph: TokenGraph, nodes: Sequence[int], output: ForwardOutput, sampler: Sampler, stream: RandomStream
    ) -> None:
        self._layer = []
        if self.head:
            self._reach.update((node, estimated(graph, node)) for node in nodes if node in graph.acceptance)
        below, slots = open_slots(graph, nodes, output, sampler, self._reach)
        while slots and -slots[0][0] >= self.log_t:
            log_v, node = -slots[0][0], slots[0][1]
            if not self._affords(node):
                heapq.heappop(slots)
                continue
            drawing = below[node]
            y, share, R = drawing.draw(stream)
            a = self.estimate(drawing.drawn - 1, share)
            gain = log_v - graph.values[node]
            match = self._merger.match(graph, node, y)
            if match is None:
                child = graph.add(node, y, gain, share, R=R)
                self._layer.append(child)
                self._reach[child] = log_v + math.log(a)
                self._paths[child] = self._paths[node]
            else:
                graph.link(node, match, gain, R)
                self._paths[match] += self._paths[node]
            self._spent += self._paths[node]
            next_slot(slots, drawing, log_v + log1m(a))

    def _affords(self, node: int) -> bool:
        return self._spent + self._paths[node] <= self.size


def open_slots(
    graph: TokenGraph, nodes: Sequence[int], output: ForwardOutput, sampler: Sampler, reach: Mapping[int, float]
) -> tuple[dict[int, Drawing], list[tuple[float, int]]]:
    """The first slot below each node of a layer, as a heap of (-log v, node): equal values keep creation order."""
    slots = [(-reach[node], node) for node in nodes]
    heapq.heapify(slots)
    return dict(zip(nodes, drawings(graph, nodes, output, sampler), strict=True)), slots


def next_slot(slots: list[tuple[float, int]], drawing: Drawing, log_v: float) -> None:
    """Replace the slot on top, which was just drawn from, by its sibling slot."""
    if drawing.exhausted or log_v == NEVER:
        heapq.heappop(slots)
    else:
        heapq.heapreplace(slots, (-log_v, slots[0][1]))


def estimated(graph: TokenGraph, node: int) -> float:
    """Log-value of a scored node's child slot by the head's estimate, in place of R[y]."""
    acceptance = graph.acceptance[node]
    return graph.values[node] + math.log(acceptance) if acceptance > 0 else NEVER


def log1m(a: float) -> float:
    """log(1 - a); -inf for one."""
    return math.log1p(-a) if a < 1 else NEVER
