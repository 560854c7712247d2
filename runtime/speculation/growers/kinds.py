"""Growers by name: what each proposes, how deep, in how many rows of its draft passes. A new grower is a row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..planning.calibration import Estimate
from .baseline import BestFirst, Grower, RankedStaticTree, StaticTree, chain, depths_of, k_ary, shallow
from .dyspec import DySpecHeap, DySpecLayers, DySpecThreshold
from .gsd import NO_MERGER, GraphMerger, Merger, UnexpandedMerger

Shape = tuple[int, ...]
DRAWN_CHAIN, DRAWN_TREE = "drawn chain", "drawn tree"
DRAWN_GRAPH = "drawn graph"  # merged branches share their draws
CHOSEN_GRAPH = "chosen graph"  # tokens or merges are picked by what they are


class Growth(NamedTuple):
    """What a grower is made from. size, depth, width: the most tokens, their depth, and nodes of a draft pass. shape:
    where it is given beforehand. tau: tokens before one that is merged with its recurrence, see GSD; None merges none.
    head: whether the acceptance head values slots. The other fields are those of SpeculativeConfig."""

    size: int
    depth: int
    width: int
    shape: Shape
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
    """draw, choose: make the grower above temperature 0, and at it. proposal: what is drawn, a kind that verifiers are
    exact for; merged: the same with GSD. shape: makes the topology, where it is given, of `branching` and `topology`.
    layered: whether a draft pass scores a whole layer, so that a depth can be planned. by_value: whether estimates of
    acceptance say where to draw."""

    draw: Callable[[Growth], Grower]
    choose: Callable[[Growth], Grower] = best_first
    proposal: str = DRAWN_TREE
    merged: str = CHOSEN_GRAPH
    shape: Callable[[Shape, Shape], Shape] | None = None
    layered: bool = True
    by_value: bool = False

    @property
    def is_chain(self) -> bool:
        return self.proposal == DRAWN_CHAIN

    def deepest(self, limits: Growth, greedy: bool) -> int:
        """The deepest a proposal may get; without layers, drawn tokens are limited by their number alone."""
        if self.shape is not None:
            return max(depths_of(limits.shape))
        return limits.depth if self.layered or greedy else limits.size + 1

    def rows(self, limits: Growth) -> list[int]:
        """The most nodes the draft scores in each of its passes."""
        if self.shape is not None:
            depths = depths_of(limits.shape)
            return [depths.count(depth) for depth in range(1, max(depths))]
        passes = limits.depth - 1 if self.layered else max(limits.size, limits.depth - 1)
        return [1 if self.is_chain else limits.width] * passes


def shaped(shape: Callable[[Shape, Shape], Shape]) -> GrowerKind:
    """Static trees of a given shape."""
    return GrowerKind(
        lambda g: StaticTree(shallow(g.shape, g.depth), g.merger()),
        lambda g: RankedStaticTree(shallow(g.shape, g.depth), g.merger()),
        shape=shape,
    )


KINDS = {
    "chain": GrowerKind(
        lambda g: StaticTree(chain(g.depth)),
        lambda g: BestFirst(g.depth, g.depth, 1, NO_MERGER),  # without drawing from distributions
        proposal=DRAWN_CHAIN,
        merged=DRAWN_CHAIN,  # nothing can merge: its nodes are each other's ancestors
    ),
    "k-ary": shaped(lambda branching, _: k_ary(branching)),
    "static": shaped(lambda _, topology: topology),
    "topk": GrowerKind(best_first, proposal=CHOSEN_GRAPH),
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
