"""GSD, graph-structured speculative decoding (arXiv 2407.16207): recurring token sequences are merged.

If the token y drafted after `parent` ends an n-gram of τ + 1 tokens that also ends at another node z of the graph, a
merge edge leads from `parent` to z and no node is created. The tokens below z are drafted once, in the context of z's
first parent, and copied under every path to z when the graph is unrolled.

The authors' release has errors that are corrected here: a merge never closes a cycle (the release excludes only the
parent's own ancestors, which leaves cycles on most graphs), a node may have several merge edges (in the release a
second edge overwrites the first), pruned candidates are not merged, and the unroll keeps the most probable copies, not
the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..graph.token_graph import ROOT, TokenGraph


class Merger(Protocol):
    """Finds an existing node that replaces a drafted token's own node."""

    def match(self, graph: TokenGraph, parent: int, token: int) -> int | None:
        """The node to merge with, or None."""


class NoMerger:
    """Never merges: the graph stays a tree."""

    def match(self, graph: TokenGraph, parent: int, token: int) -> int | None:
        return None


NO_MERGER = NoMerger()


@dataclass(frozen=True, slots=True)
class GraphMerger:
    """For any tokens, verified by matching: merges every recurrence of tau + 1 tokens that keeps the graph acyclic. A
    child of the parent itself, which was given with the token that is now drawn, is no recurrence."""

    tau: int

    def match(self, graph: TokenGraph, parent: int, token: int) -> int | None:
        for z in graph.nodes_of.get(token, ()):
            elsewhere = z != ROOT and graph.parents[z] != parent
            if elsewhere and recurs(graph, z, parent, self.tau) and not graph.reaches(z, parent):
                return z
        return None


@dataclass(frozen=True, slots=True)
class UnexpandedMerger:
    """For drawn tokens, verified by recursive rejection: merges only into a node created after the parent, without
    children yet. An edge must not depend on tokens drawn below its end (docs/papers.md, What is biased)."""

    tau: int

    def match(self, graph: TokenGraph, parent: int, token: int) -> int | None:
        for z in graph.nodes_of.get(token, ()):
            if z > parent and not graph.edges[z] and recurs(graph, z, parent, self.tau):
                return z
        return None


def recurs(graph: TokenGraph, z: int, parent: int, tau: int) -> bool:
    """Whether the tau tokens before z equal the tau tokens that end with `parent`."""
    earlier, later = graph.parents[z], parent
    for _ in range(tau):
        if earlier < ROOT or later < ROOT or graph.tokens[earlier] != graph.tokens[later]:
            return False
        earlier, later = graph.parents[earlier], graph.parents[later]
    return True
