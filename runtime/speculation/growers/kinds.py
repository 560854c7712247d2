"""The table of growers by name: the kind of their proposals, the depth, and the rows of the draft passes. A new grower
needs a row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..planning.calibration import Estimate
from .baseline import BestFirst, Grower, RankedStaticTree, StaticTree, chain, depths_of, k_ary, shallow
from .dyspec import DySpecHeap, DySpecLayers, DySpecThreshold
from .gsd import NO_MERGER, GraphMerger, Merger, UnexpandedMerger

Topology = tuple[int, ...]
DRAWN_CHAIN, DRAWN_TREE = "drawn chain", "drawn tree"
DRAWN_GRAPH = "drawn graph"  # merged branches share their draws
LOOKUP = "lookup"
CHOSEN_GRAPH = "chosen graph"  # tokens are chosen by probability, or merges by the drawn tokens


class Growth(NamedTuple):
    """The arguments of a grower. size: most tokens. depth: greatest depth. width: most nodes of a draft pass. shape:
    the topology of growers with a fixed shape. tau: n of GSD's n-grams minus one; None for no merges. head: whether the
    acceptance head gives the values of DySpec's sites. The other fields are those of SpeculativeConfig."""

    size: int
    depth: int
    width: int
    shape: Topology
    tau: int | None
    draft_threshold: float
    sibling_share: float
    leaf_share: float
    head: bool
    estimate: Estimate

    def merger(self, kind: Callable[[int], Merger] = GraphMerger) -> Merger:
        return NO_MERGER if self.tau is None else kind(self.tau)


def best_first(g: Growth) -> Grower:
    return BestFirst(g.size, g.depth, g.width, g.merger(), g.sibling_share, g.leaf_share)


@dataclass(frozen=True, slots=True)
class GrowerKind:
    """draw, choose: make the grower above temperature 0, and at temperature 0. proposal: the kind of the drawn
    proposals, a key of `config.LOSSLESS`; merged: the same with GSD. shape: makes the topology of a fixed shape from
    `branching` and `topology`. layered: whether a draft pass scores a whole layer, so that the depth can be planned.
    by_value: whether estimates of acceptance decide where to draw. drafts: whether a draft proposes; without one, draw
    and choose are never called."""

    draw: Callable[[Growth], Grower]
    choose: Callable[[Growth], Grower] = best_first
    proposal: str = DRAWN_TREE
    merged: str = CHOSEN_GRAPH
    shape: Callable[[Topology, Topology], Topology] | None = None
    layered: bool = True
    by_value: bool = False
    drafts: bool = True

    @property
    def is_chain(self) -> bool:
        return self.proposal == DRAWN_CHAIN

    def deepest(self, limits: Growth, greedy: bool) -> int:
        """The greatest depth of a proposal. Without layers only the number of drawn tokens limits the depth."""
        if self.shape is not None:
            return max(depths_of(limits.shape))
        return limits.depth if self.layered or greedy else limits.size + 1

    def rows(self, limits: Growth) -> list[int]:
        """The most nodes that the draft scores in each pass of a round."""
        if not self.drafts:
            return []
        if self.shape is not None:
            depths = depths_of(limits.shape)
            return [depths.count(depth) for depth in range(1, max(depths))]
        passes = limits.depth - 1 if self.layered else max(limits.size, limits.depth - 1)
        return [1 if self.is_chain else limits.width] * passes


def fixed_shape(shape: Callable[[Topology, Topology], Topology]) -> GrowerKind:
    """The kind of growers whose settings fix the shape of the tree."""
    return GrowerKind(
        lambda g: StaticTree(shallow(g.shape, g.depth), g.merger()),
        lambda g: RankedStaticTree(shallow(g.shape, g.depth), g.merger()),
        shape=shape,
    )


KINDS = {
    "chain": GrowerKind(
        lambda g: StaticTree(chain(g.depth)),
        lambda g: BestFirst(g.depth, g.depth, 1, NO_MERGER),  # needs no distributions
        proposal=DRAWN_CHAIN,
        merged=DRAWN_CHAIN,  # nothing can merge: all nodes are ancestors of each other
    ),
    "k-ary": fixed_shape(lambda branching, _: k_ary(branching)),
    "static": fixed_shape(lambda _, topology: topology),
    "topk": GrowerKind(best_first, proposal=CHOSEN_GRAPH),
    LOOKUP: GrowerKind(best_first, proposal=CHOSEN_GRAPH, drafts=False),  # the chain that a prompt lookup found
    "dyspec": GrowerKind(
        lambda g: DySpecLayers(g.size, g.depth, g.width, g.estimate, g.head, g.merger()), by_value=True
    ),
    "dyspec-heap": GrowerKind(
        lambda g: DySpecHeap(g.size, g.depth, g.estimate, g.head, g.merger()), by_value=True, layered=False
    ),
    "dyspec-threshold": GrowerKind(
        lambda g: DySpecThreshold(
            g.draft_threshold, g.size, g.depth, g.width, g.merger(UnexpandedMerger), g.estimate, g.head
        ),
        by_value=True,
        merged=DRAWN_GRAPH,
    ),
}
