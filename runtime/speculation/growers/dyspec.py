"""DySpec (arXiv 2410.11744): a token tree that grows where acceptance is most probable by the draft's estimate.

A *site* is a place where a token may be drawn: below a node, after the siblings drawn there before. Its value v is the
expected probability that verification reaches it. A draw of y at a site with remaining distribution R opens two sites:

    child site    v · a(y)          sibling site    v · (1 − a(y))          a(y) = R[y] in the paper (Hypothesis 1)

`estimate` gives a(y). The default is the paper's; `Calibration` corrects it by the acceptance of earlier rounds.

Only the decision *whether* to draw may depend on values, and the value of a site does not depend on the token that will
be drawn there. Under this condition recursive rejection and traversal verification are exact (section 5.1). With
`head`, the child site of a node uses the acceptance head's estimate (SpecDec++) instead of R[y]. The estimate is known
when the draft has scored the node, and only then can the site be drawn from.

A `merger` links a drawn token to an existing node with the same token (GSD). In the heap and the layers a merge may
depend on tokens drawn below the end of the new edge, so such a graph is verified by matching. The merges of
`DySpecThreshold` are exact under rejection sampling.

All values are natural logarithms. Errata of the printed Algorithm 2: `while v < t` is inverted.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

from ...engines.base import ForwardOutput
from ...sampling.random import RandomStream
from ..graph.token_graph import ROOT, Best, TokenGraph
from ..planning.calibration import Estimate, uncorrected
from .draft_vocabulary import NodeSampler
from .drawing import Drawing, drawings
from .gsd import NO_MERGER, Merger

NEVER = -math.inf


class DySpecHeap:
    """Algorithm 1: draws m tokens, each at the most valuable site of the whole tree. It needs one draft pass for each
    node whose child site becomes the most valuable, and the fewest draft rows of all forms. It is the reference for the
    static forms below. Nodes at `depth`, where the text ends, have no child site."""

    def __init__(
        self, m: int, depth: int, estimate: Estimate = uncorrected, head: bool = False, merger: Merger = NO_MERGER
    ) -> None:
        self.m, self.depth, self.estimate, self.head = m, depth, estimate, head
        self._merger = merger
        self._sites: list[tuple[float, int, int]] = [(0.0, 0, ROOT)]  # -log v, creation order, node
        self._created = 0
        self._drawings: dict[int, Drawing] = {}

    def frontier(self, graph: TokenGraph) -> list[int]:
        return [self._sites[0][2]] if self._sites and len(graph) <= self.m else []

    def expand(
        self, graph: TokenGraph, nodes: Sequence[int], output: ForwardOutput, sampler: NodeSampler, stream: RandomStream
    ) -> None:
        for node, drawing in zip(nodes, drawings(graph, nodes, output, sampler), strict=True):
            self._drawings[node] = drawing
            if self.head and node in graph.acceptance:  # the top site belongs to this node: replace its value
                heapq.heapreplace(self._sites, self._site(head_value(graph, node), node))
        while self._sites and len(graph) <= self.m:
            log_v, node = -self._sites[0][0], self._sites[0][2]
            if node not in self._drawings:
                return  # the draft must score this node before a token can be drawn below it
            heapq.heappop(self._sites)
            drawing = self._drawings[node]
            if drawing.exhausted:  # nothing may follow this node
                continue
            y, share, R = drawing.draw(stream)
            a = self.estimate(drawing.drawn - 1, share)
            gain = log_v - graph.values[node]
            match = self._merger.match(graph, node, y)
            if match is None:
                child = graph.add(node, y, gain, share, R=R)
                if graph.depths[child] < self.depth:
                    heapq.heappush(self._sites, self._site(log_v + math.log(a), child))
            else:
                graph.link(node, match, gain, R)
            if not drawing.exhausted and a < 1:
                heapq.heappush(self._sites, self._site(log_v + log1m(a), node))

    def _site(self, log_v: float, node: int) -> tuple[float, int, int]:
        self._created += 1
        return -log_v, self._created, node


class DySpecLayers:
    """The tree of Algorithm 1 in a static shape: `depth` draft passes of at most `width` nodes; `unroll` then keeps the
    `size` best tokens.

    The tree grows layer by layer. A layer's sites are drawn from in order of value, as long as a site can be among the
    best `size` of the whole tree. This count includes the first token below each node that gets children. If width and
    depth suffice, the result is the tree of Algorithm 1 for the same random numbers, in `depth` passes instead of one
    pass per node.
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
        self._reach: dict[int, float] = {ROOT: 0.0}  # node -> log-value of its child site
        self._best = Best(size)
        self._best.offer(0.0)  # the root's first child

    def frontier(self, graph: TokenGraph) -> list[int]:
        if not self._layer or graph.depths[self._layer[0]] >= self.depth:
            return []
        useful = [node for node in self._layer if self._best.holds(self._reach[node])]
        useful.sort(key=lambda node: -self._reach[node])
        for node in useful[self.width :]:  # these nodes get no children
            self._best.withdraw(self._reach[node])
        return useful[: self.width]

    def expand(
        self, graph: TokenGraph, nodes: Sequence[int], output: ForwardOutput, sampler: NodeSampler, stream: RandomStream
    ) -> None:
        self._layer = []
        for node in nodes if self.head else ():
            if node in graph.acceptance:
                self._best.withdraw(self._reach[node])
                self._reach[node] = head_value(graph, node)
                self._best.offer(self._reach[node])
        below, sites = open_sites(graph, nodes, output, sampler, self._reach)
        for node in nodes:
            if below[node].exhausted:  # the first child that was offered for this node does not exist
                self._best.withdraw(self._reach[node])
        best, reach, values, match_of = self._best, self._reach, graph.values, self._merger.match
        while sites:
            log_v, node = -sites[0][0], sites[0][1]
            drawing = below[node]
            rank = drawing.drawn
            if not (best.admits(log_v) if rank else best.holds(log_v)):
                return
            y, share, R = drawing.draw(stream)
            a = self.estimate(rank, share)
            gain = log_v - values[node]
            match = match_of(graph, node, y)
            if rank:  # the node's first child was already offered when the node was drawn
                best.offer(log_v)
            if match is None:
                child = graph.add(node, y, gain, share, R=R)
                self._layer.append(child)
                reach[child] = value = log_v + math.log(a)
                if graph.depths[child] < self.depth:
                    best.offer(value)
            else:
                graph.link(node, match, gain, R)
            replace_top(sites, drawing, log_v + log1m(a))


class DySpecThreshold:
    """Algorithm 2: draws at every site of value t or more, layer by layer; at most `size` tokens when unrolled.

    The budget is checked before each draw, so no drawn token is ever dropped. Therefore recurring sequences may be
    merged as they are drawn (GSD). A draw below a node costs one token for each path that reaches the node.
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
        self._paths: dict[int, int] = {ROOT: 1}  # node -> number of paths from the root, which is its copies unrolled
        self._spent = 0

    def frontier(self, graph: TokenGraph) -> list[int]:
        if not self._layer or graph.depths[self._layer[0]] >= self.depth:
            return []
        useful = [node for node in self._layer if self._reach[node] >= self.log_t and self._affords(node)]
        return sorted(useful, key=lambda node: -self._reach[node])[: self.width]

    def expand(
        self, graph: TokenGraph, nodes: Sequence[int], output: ForwardOutput, sampler: NodeSampler, stream: RandomStream
    ) -> None:
        self._layer = []
        if self.head:
            self._reach.update((node, head_value(graph, node)) for node in nodes if node in graph.acceptance)
        below, sites = open_sites(graph, nodes, output, sampler, self._reach)
        while sites and -sites[0][0] >= self.log_t:
            log_v, node = -sites[0][0], sites[0][1]
            if not self._affords(node):
                heapq.heappop(sites)
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
            replace_top(sites, drawing, log_v + log1m(a))

    def _affords(self, node: int) -> bool:
        return self._spent + self._paths[node] <= self.size


def open_sites(
    graph: TokenGraph, nodes: Sequence[int], output: ForwardOutput, sampler: NodeSampler, reach: Mapping[int, float]
) -> tuple[dict[int, Drawing], list[tuple[float, int]]]:
    """The Drawing of each node of a layer, and the first site below each node that anything may follow, as a heap of
    (-log v, node); sites of equal value are in creation order."""
    below = dict(zip(nodes, drawings(graph, nodes, output, sampler), strict=True))
    sites = [(-reach[node], node) for node in nodes if not below[node].exhausted]
    heapq.heapify(sites)
    return below, sites


def replace_top(sites: list[tuple[float, int]], drawing: Drawing, log_v: float) -> None:
    """Replace the top site, which was just drawn from, by its sibling site."""
    if drawing.exhausted or log_v == NEVER:
        heapq.heappop(sites)
    else:
        heapq.heapreplace(sites, (-log_v, sites[0][1]))


def head_value(graph: TokenGraph, node: int) -> float:
    """Log-value of a scored node's child site, by the head's estimate instead of R[y]."""
    acceptance = graph.acceptance[node]
    return graph.values[node] + math.log(acceptance) if acceptance > 0 else NEVER


def log1m(a: float) -> float:
    """log(1 - a); -inf for one."""
    return math.log1p(-a) if a < 1 else NEVER
