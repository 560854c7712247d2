"""TokenTree: what the target scores in one pass, unrolled from a TokenGraph."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..engines.base import EngineSpec, TokenBatch
from .token_graph import TokenGraph


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Rows of one verification pass, parents first; row 0 is the root.

    token_ids, parents, depths: one entry per row (the root's parent is -1). nodes: the graph node of each row.
    draft_probs: q [V] that a row's children were drawn from, by row; empty when they were not drawn.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    nodes: tuple[int, ...]
    draft_probs: dict[int, NDArray[np.float64]]

    def __len__(self) -> int:
        return len(self.token_ids)

    def children(self) -> list[list[int]]:
        """Child rows of every row, in draw order."""
        rows: list[list[int]] = [[] for _ in self.token_ids]
        for row in range(1, len(self)):
            rows[self.parents[row]].append(row)
        return rows

    def to_batch(self, spec: EngineSpec, committed: int) -> TokenBatch:
        """The pass that scores every row behind `committed` cache rows."""
        rows = len(self)
        mask = np.eye(rows, dtype=np.bool_)
        for row in range(1, rows):
            mask[row] |= mask[self.parents[row]]
        positions = committed + np.asarray(self.depths)
        return TokenBatch.padded(self.token_ids, positions, mask, spec.width_for(rows))


def unroll(graph: TokenGraph, max_tokens: int) -> TokenTree:
    """The tree to verify: everything drawn, or, of hypotheses that were not drawn at random, the best `max_tokens`.

    A node's value never exceeds its parent's, so the best nodes are closed under ancestors; equal values keep
    creation order. Drawn nodes are never dropped: a choice by a drawn token's own score would be biased.
    """
    if len(graph) > max_tokens + 1:
        if graph.draft_probs:
            raise AssertionError(f"{len(graph) - 1} tokens were drawn for a budget of {max_tokens}")
        best = np.argsort(-np.asarray(graph.values), kind="stable")[: max_tokens + 1]
        nodes = tuple(np.sort(best).tolist())
    else:
        nodes = tuple(range(len(graph)))
    row_of = {node: row for row, node in enumerate(nodes)}
    return TokenTree(
        token_ids=tuple(graph.tokens[node] for node in nodes),
        parents=tuple(row_of.get(graph.parents[node], -1) for node in nodes),
        depths=tuple(graph.depths[node] for node in nodes),
        nodes=nodes,
        draft_probs={row_of[node]: probs for node, probs in graph.draft_probs.items() if node in row_of},
    )
