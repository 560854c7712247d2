"""TokenTree: what the target scores in one pass, unrolled from a TokenGraph."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from ..engines.base import EngineSpec, TokenBatch
from ..sampling import Candidates
from .token_graph import ROOT, TokenGraph


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Rows of one verification pass, parents first and siblings in draw order; row 0 is the root.

    token_ids, parents, depths: one entry per row (the root's parent is -1). nodes: the graph node of each row. merged:
    whether the row's path differs from the context its node was drafted in. certain: rows whose token was given, not
    drawn. shares: the draft's probability of each row's token, see TokenGraph. draft_probs: q that a row's other
    children were drawn from, by row; empty when nothing was drawn.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    nodes: tuple[int, ...]
    merged: tuple[bool, ...]
    certain: frozenset[int]
    shares: tuple[float, ...]
    draft_probs: dict[int, Candidates]

    def __len__(self) -> int:
        return len(self.token_ids)

    def children(self) -> list[list[int]]:
        """Child rows of every row, in draw order."""
        rows: list[list[int]] = [[] for _ in self.token_ids]
        for row in range(1, len(self)):
            rows[self.parents[row]].append(row)
        return rows

    def to_batch(self, spec: EngineSpec, committed: int, ranking_only: bool = False) -> TokenBatch:
        """The pass that scores every row behind `committed` cache rows; ranking_only: see TokenBatch."""
        rows = len(self)
        mask = np.eye(rows, dtype=np.bool_)
        for row in range(1, rows):
            mask[row] |= mask[self.parents[row]]
        positions = committed + np.asarray(self.depths)
        return TokenBatch.padded(self.token_ids, positions, mask, spec.width_for(rows), ranking_only=ranking_only)


def unroll(graph: TokenGraph, max_tokens: int) -> TokenTree:
    """Every path of the graph, or the best `max_tokens` of all tokens by log-value: best-first from the root.

    A token's value never exceeds its parent's, nor a later sibling's an earlier one's, so what is kept is closed under
    ancestors and holds each node's first draws. Equal values keep creation order: an order by token would look at what
    was drawn. A merged node is copied once per path that reaches it, with its whole continuation.
    """
    rows: list[tuple[int, int, bool, bool]] = []  # node, parent row, merged, certain
    draft_probs = {}
    heap: list[tuple[float, int, int, int, bool, bool]] = [(0.0, ROOT, 0, -1, False, False)]
    pushed = 0
    while heap and len(rows) <= max_tokens:
        negative, node, _, parent, merged, certain = heapq.heappop(heap)
        row = len(rows)
        rows.append((node, parent, merged, certain))
        if node in graph.draft_probs:
            draft_probs[row] = graph.draft_probs[node]
        for edge in graph.edges[node]:
            pushed += 1
            copied = merged or graph.parents[edge.child] != node
            heapq.heappush(heap, (negative - edge.gain, edge.child, pushed, row, copied, edge.certain))
    depths = [0]
    for _, parent, _, _ in rows[1:]:
        depths.append(depths[parent] + 1)
    return TokenTree(
        token_ids=tuple(graph.tokens[node] for node, _, _, _ in rows),
        parents=tuple(parent for _, parent, _, _ in rows),
        depths=tuple(depths),
        nodes=tuple(node for node, _, _, _ in rows),
        merged=tuple(merged for _, _, merged, _ in rows),
        certain=frozenset(row for row, (_, _, _, certain) in enumerate(rows) if certain),
        shares=tuple(graph.shares[node] for node, _, _, _ in rows),
        draft_probs=draft_probs,
    )
