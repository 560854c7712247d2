"""The table of growers by name. A new grower needs a row here."""

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

WHY = {  # what a rule of acceptance would have to assume of a proposal
    DRAWN_CHAIN: "tokens are drawn one after the other",
    DRAWN_TREE: "siblings are drawn without replacement, where block verification assumes a chain",
    DRAWN_GRAPH: "merged branches share their draws, where traversal and block verification assume independent ones",
    CHOSEN_GRAPH: "tokens are chosen or linked by probability and not drawn from q, as rules with p/q assume",
}


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


# The most nodes that the draft scores in each pass of one round, by the rule that ends a frontier. Their sum is reached
# by some draft (`tests/runtime/speculation/test_draft_rows.py`).


def chain_rows(g: Growth) -> list[int]:
    return [1] * (g.depth - 1)


def best_first_rows(g: Growth) -> list[int]:
    """A scored node and its ancestors, one of each depth, are among the best `size` - 1 tokens."""
    return [min(g.width, g.size - depth) for depth in range(1, min(g.depth, g.size))]


def layers_rows(g: Growth) -> list[int]:
    """Between n scored nodes of a layer lie n - 1 branches. At each of them the earlier sibling is better than the
    worst child site of the layer, and the last branch was drawn only because it was better than one more token. Values
    do not fall behind certain tokens, so the depth does not count."""
    return [max(1, min(g.width, g.size - 1))] * (g.depth - 1)


def threshold_rows(g: Growth) -> list[int]:
    """The budget affords a token below each scored node, which is one of the tokens before."""
    left, rows = g.size - 1, list[int]()
    while left and len(rows) < g.depth - 1:
        rows.append(min(g.width, left))
        left -= rows[-1]
    return rows


def heap_rows(g: Growth) -> list[int]:
    """One pass for each token but the last one."""
    return [1] * (g.size - 1)


@dataclass(frozen=True, slots=True)
class GrowerKind:
    """draw, choose: make the grower above temperature 0, and at temperature 0. proposal: the kind of the drawn
    proposals, a key of `config.LOSSLESS`; merged: the same with GSD. shape: makes the topology of a fixed shape from
    `branching` and `topology`. drawn_rows: the rows of draft passes above temperature 0, see `rows`; a fixed shape has
    its own. layered: whether a draft pass scores a whole layer, so that the depth can be planned.
    by_value: whether estimates of acceptance decide where to draw. drafts: whether a draft proposes; without one, draw
    and choose are never called."""

    draw: Callable[[Growth], Grower]
    choose: Callable[[Growth], Grower] = best_first
    proposal: str = DRAWN_TREE
    merged: str = CHOSEN_GRAPH
    shape: Callable[[Topology, Topology], Topology] | None = None
    drawn_rows: Callable[[Growth], list[int]] = best_first_rows
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

    def rows(self, limits: Growth, greedy: bool) -> list[int]:
        """The most nodes that the draft scores in each pass of a round after the first one, which scores the root."""
        if not self.drafts:
            return []
        if self.shape is not None:  # of these, nodes without children are not scored
            depths = depths_of(limits.shape)
            scored = [depths[position] for position in set(limits.shape)]
            return [scored.count(depth) for depth in range(1, max(depths))]
        return best_first_rows(limits) if greedy and not self.is_chain else self.drawn_rows(limits)


def fixed_shape(shape: Callable[[Topology, Topology], Topology]) -> GrowerKind:
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
        drawn_rows=chain_rows,
        merged=DRAWN_CHAIN,  # nothing can merge: all nodes are ancestors of each other
    ),
    "k-ary": fixed_shape(lambda branching, _: k_ary(branching)),
    "static": fixed_shape(lambda _, topology: topology),
    "topk": GrowerKind(best_first, proposal=CHOSEN_GRAPH),
    LOOKUP: GrowerKind(best_first, proposal=CHOSEN_GRAPH, drafts=False),  # the chain that a prompt lookup found
    "dyspec": GrowerKind(
        lambda g: DySpecLayers(g.size, g.depth, g.width, g.estimate, g.head, g.merger()),
        drawn_rows=layers_rows,
        by_value=True,
    ),
    "dyspec-heap": GrowerKind(
        lambda g: DySpecHeap(g.size, g.depth, g.estimate, g.head, g.merger()),
        drawn_rows=heap_rows,
        by_value=True,
        layered=False,
    ),
    "dyspec-threshold": GrowerKind(
        lambda g: DySpecThreshold(
            g.draft_threshold, g.size, g.depth, g.width, g.merger(UnexpandedMerger), g.estimate, g.head
        ),
        drawn_rows=threshold_rows,
        by_value=True,
        merged=DRAWN_GRAPH,
    ),
}
