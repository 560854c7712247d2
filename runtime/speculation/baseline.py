"""Growers without a paper of their own here: the drawn chain or k-ary tree, and the deterministic best-first tree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..engines.base import ForwardOutput
from ..random import RandomStream
from ..sampling import Sampler
from .token_graph import TokenGraph


class Grower(Protocol):
    """Decides which nodes the draft scores next, and which children they get."""

    def frontier(self, graph: TokenGraph) -> list[int]:
        """Nodes for the next draft pass; empty when growth has ended."""

    def expand(
        self, graph: TokenGraph, nodes: Sequence[int], output: ForwardOutput, sampler: Sampler, stream: RandomStream
    ) -> None:
        """Add children to `nodes`; row i of `output` is the draft's prediction after nodes[i]."""


class SampledTree:
    """Children drawn from the draft without replacement, branching[d] of them per node at depth d.

    (1,) * K is the chain of speculative decoding; (3, 2, 1) a k-ary tree as SpecInfer's (2305.09781) expansion
    configuration. The shape is fixed before anything is drawn, which is what keeps p/q verification exact.
    """

    def __init__(self, branching: Sequence[int]) -> None:
        self.branching = tuple(branching)

    def frontier(self, graph: TokenGraph) -> list[int]:
        depth = graph.depths[-1]
        if depth >= len(self.branching):
            return []
        return [node for node in range(len(graph)) if graph.depths[node] == depth]

    def expand(
        self, graph: TokenGraph, nodes: Sequence[int], output: ForwardOutput, sampler: Sampler, stream: RandomStream
    ) -> None:
        for row, node in enumerate(nodes):
            q = sampler.distribution(output.logits[row], graph.path(node))
            graph.draft_probs[node] = q
            remaining = q.copy()
            for _ in range(self.branching[graph.depths[node]]):
                mass = remaining.sum()
                if mass <= 0:  # fewer tokens than children have any probability
                    break
                token = stream.categorical(remaining / mass)
                graph.add(node, token, math.log(q[token]))
                remaining[token] = 0.0


class BestFirst:
    """Deterministic tree: each pass scores the `width` most probable nodes of the last layer, each of which offers its
    most probable children; `unroll` keeps the best `size` of all (EAGLE-2's expansion and rerank, 2406.16858).

    width 1 with one child per node is the greedy chain. Layer by layer, so `depth` passes whatever the size.
    """

    def __init__(self, size: int, depth: int, width: int) -> None:
        self.size, self.depth, self.width = size, depth, width

    def frontier(self, graph: TokenGraph) -> list[int]:
        depth = graph.depths[-1]
        if depth >= self.depth:
            return []
        layer = [node for node in range(len(graph)) if graph.depths[node] == depth]
        return sorted(layer, key=lambda node: -graph.values[node])[: self.width]

    def expand(
        self, graph: TokenGraph, nodes: Sequence[int], output: ForwardOutput, sampler: Sampler, stream: RandomStream
    ) -> None:
        if output.top_ids is None or output.top_logprobs is None or sampler.follows_path:
            ids, logprobs = self._ranked(graph, nodes, output, sampler)
        else:
            columns = min(self.width, output.top_ids.shape[1])
            ids = output.top_ids[: len(nodes), :columns]
            logprobs = output.top_logprobs[: len(nodes), :columns].astype(np.float64)
        values = np.asarray([graph.values[node] for node in nodes])[:, None] + logprobs
        # A candidate outside the layer's best `size` cannot be among the best `size` of the whole tree.
        for index in np.argsort(-values, axis=None, kind="stable")[: self.size].tolist():
            row, column = divmod(index, values.shape[1])
            if logprobs[row, column] > -math.inf:
                graph.add(nodes[row], int(ids[row, column]), float(logprobs[row, column]))

    def _ranked(
        self, graph: TokenGraph, nodes: Sequence[int], output: ForwardOutput, sampler: Sampler
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Top columns [nodes, width] of what the request's processors make of each node's logits."""
        ids, logprobs = [], []
        for row, node in enumerate(nodes):
            scores = sampler.log_probabilities(output.logits[row], graph.path(node))
            best = np.argsort(-scores, kind="stable")[: self.width]
            ids.append(best)
            logprobs.append(scores[best])
        return np.stack(ids), np.stack(logprobs)
