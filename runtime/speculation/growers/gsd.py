"""GSD, graph-structured speculative decoding (arXiv 2407.16207): recurring token sequences are merged.

When the token y drafted after `parent` ends an n-gram of τ + 1 tokens that the graph already holds elsewhere, a merge
edge leads to the node that ends it there and no node is created: whatever follows is drafted once, in the context of
its first parent, and copied under every path when the graph is unrolled.

Differs from the authors' release where that is in error: a merge never closes a cycle (the release excludes only the
parent's own ancestors, which leaves cycles on most graphs), a node may have several merge edges (a second one used to
overwrite the first), pruned candidates are not merged, and the unroll keeps the most probable copies, not the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..graph.token_graph import ROOT, TokenGraph


class Merger(Protocol):
    """Where a drafted token may continue instead of becoming a node of its own."""

    def match(self, graph: TokenGraph, parent: int, token: int) -> int | None:
        """The node to merge with, or None."""


class NoMerger:
    """A tree."""

    def match(self, graph: TokenGraph, parent: int, token: int) -> int | None:
        return None


NO_MERGER = NoMerger()


@dataclass(frozen=True, slots=True)
class GraphMerger:
    """For any tokens, verified by matching: any recurrence of tau + 1 tokens that keeps the graph acyclic."""

    tau: int

    def match(self, graph: TokenGraph, parent: int, token: int) -> int | None:
        for z in graph.nodes_of.get(token, ()):
            if z != ROOT and recurs(graph, z, parent, self.tau) and not graph.reaches(z, parent):
                return z
        return None


@dataclass(frozen=True, slots=True)
class UnexpandedMerger:
    """For drawn tokens, verified by recursive rejection: only into a node created after the parent and still without
    children. Whether an edge exists must not depend on what was drawn below its end (docs/papers.md,
    What is biased)."""

    tau: int

    def match(self, graph: TokenGraph, parent: int, token: int) -> int | None:
        for z in graph.nodes_of.get(token, ()):
            if z > parent and not graph.edges[z] and recurs(graph, z, parent, self.tau):
                return z
        return None


def recurs(graph: TokenGraph, z: int, parent: int, tau: int) -> bool:
    """Whether the tau tokens before z are those that end in `parent`."""
    before, behind = graph.parents[z], parent
    for _ in range(tau):
        if before < ROOT or behind < ROOT or graph.tokens[before] != graph.tokens[behind]:
            return False
        before, behind = graph.parents[before], graph.parents[behind]
    return True
