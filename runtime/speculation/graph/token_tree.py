"""TokenTree: the rows that the target scores in one pass, unrolled from a TokenGraph."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...engines.base import EngineSpec, TokenBatch, causal_mask
from ...sampling.sampler import Candidates
from ...sampling.softmax import SoftmaxSettings
from .token_graph import ROOT, Edge, TokenGraph


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Rows of one verification pass, parents first and siblings in draw order; row 0 is the root.

    token_ids, parents, depths: one entry per row (the root's parent is -1). children: rows below each row, in draw
    order. nodes: the graph node of each row. merged: whether the row's path differs from the context in which its node
    was drafted. shares: the draft's probability of each row's token, see TokenGraph. draft_probs: by row, the
    distribution q from which its drawn children were drawn; empty if none was. remaining: by drawn row, the
    distribution R [K] of its Edge, from which the row's token was drawn.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    children: tuple[tuple[int, ...], ...]
    nodes: tuple[int, ...]
    merged: tuple[bool, ...]
    shares: tuple[float, ...]
    draft_probs: dict[int, Candidates]
    remaining: dict[int, NDArray[np.float64]]

    def __len__(self) -> int:
        return len(self.token_ids)

    def to_batch(
        self,
        spec: EngineSpec,
        committed: int,
        ranking_only: bool = False,
        settings: SoftmaxSettings | None = None,
        states_read: bool = False,
    ) -> TokenBatch:
        """The pass that scores every row after `committed` cache rows; ranking_only, states_read: see TokenBatch.
        settings: what verification needs of a row's softmax. The pass computes it on the path of first children, with
        which most verifiers begin; the host computes it for any other row."""
        rows = len(self.token_ids)
        on_path: tuple[SoftmaxSettings | None, ...] = ()
        if self.parents == tuple(range(-1, rows - 1)):  # a chain, or the root alone
            mask, positions = causal_mask(rows), np.arange(committed, committed + rows)
            on_path = () if settings is None else (settings,) * rows
        else:
            mask, positions = self._mask(), committed + np.asarray(self.depths)
            on_path = () if settings is None else self._on_first_path(settings)
        width, ids = spec.width_for(rows), self.token_ids
        return TokenBatch.pad(ids, positions, mask, width, False, ranking_only, on_path, states_read=states_read)

    def _mask(self) -> NDArray[np.bool_]:
        """[rows, rows]: a row attends to the rows of its parent, and to itself."""
        rows = len(self)
        lines: list[bytes] = []
        for row, parent in enumerate(self.parents):
            above = lines[parent][:row] if row else b""
            lines.append((above + b"\1").ljust(rows, b"\0"))
        return np.frombuffer(bytearray().join(lines), np.bool_).reshape(rows, rows)

    def _on_first_path(self, settings: SoftmaxSettings) -> tuple[SoftmaxSettings | None, ...]:
        """By row, up to the end of the path of first children: `settings` on this path."""
        path = [0]
        while below := self.children[path[-1]]:
            path.append(below[0])
        asked: list[SoftmaxSettings | None] = [None] * (path[-1] + 1)
        for row in path:
            asked[row] = settings
        return tuple(asked)


def root_alone(token: int) -> TokenTree:
    """The tree without a proposal."""
    return TokenTree((token,), (-1,), (0,), ((),), (ROOT,), (False,), (1.0,), {}, {})


def unroll(graph: TokenGraph, max_tokens: int, max_depth: int) -> TokenTree:
    """Turn every path of the graph, down to `max_depth`, into a path of a tree. If the tree would have more than
    `max_tokens` tokens below its root, only the tokens with the greatest log-values are kept.

    The value of a token never exceeds its parent's value, and the value of a later sibling never exceeds an earlier
    sibling's. Therefore the kept tokens include all their ancestors, and the first draws below each node. Tokens of
    equal value keep creation order: an order by token would depend on the drawn tokens. A merged node is copied once
    per path that reaches it, with all nodes below it. Only copies can be deeper than the grower's limit; at
    `max_depth` a row loses all of its children.
    """
    nodes: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    children: list[list[int]] = []
    merged: list[bool] = []
    draft_probs, remaining = {}, {}
    heap: list[tuple[float, int, int, int, bool, Edge]] = [(0.0, ROOT, 0, -1, False, Edge(ROOT, 0.0, False, None))]
    pushed = 0
    while heap and len(nodes) <= max_tokens:
        negative, node, _, parent, copied, edge = heapq.heappop(heap)
        row = len(nodes)
        nodes.append(node)
        parents.append(parent)
        depths.append(depths[parent] + 1 if row else 0)
        children.append([])
        if row:
            children[parent].append(row)
        merged.append(copied)
        if edge.R is not None:
            remaining[row] = edge.R
        if node in graph.draft_probs:
            draft_probs[row] = graph.draft_probs[node]
        for following in graph.edges[node] if depths[row] < max_depth else ():
            pushed += 1
            elsewhere = copied or graph.parents[following.child] != node
            heapq.heappush(heap, (negative - following.gain, following.child, pushed, row, elsewhere, following))
    return TokenTree(
        token_ids=tuple(map(graph.tokens.__getitem__, nodes)),
        parents=tuple(parents),
        depths=tuple(depths),
        children=tuple(map(tuple, children)),
        nodes=tuple(nodes),
        merged=tuple(merged),
        shares=tuple(map(graph.shares.__getitem__, nodes)),
        draft_probs=draft_probs,
        remaining=remaining,
    )
