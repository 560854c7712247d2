"""Sequoia (2402.12374): the best fixed tree for a measured acceptance, beside which dynamic trees are measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def sequoia(acceptance: Sequence[float], size: int, depth: int) -> tuple[int, ...]:
    """Sequoia's optimal topology for a measured acceptance vector.

    acceptance[b]: the share of rounds that accept child b of a node. T[l][n]: the largest expected number of accepted
    nodes in a tree of n nodes and depth at most l, counting its root. Dynamic programming over the last child's
    subtree: T[l][n, b] = max over m of T[l][n - m, b - 1] + acceptance[b] · max_b' T[l-1][m, b'].
    """
    ranks = len(acceptance)
    best = np.full((depth + 1, size + 2), -np.inf)  # best[l, n]: over all numbers of children
    last: dict[tuple[int, int, int], int] = {}  # (l, n, children) -> nodes in the last child's subtree
    chosen: dict[tuple[int, int], int] = {}  # (l, n) -> children of the root
    best[:, 1] = 1.0
    for level in range(1, depth + 1):
        with_children = np.full((size + 2, ranks + 1), -np.inf)
        with_children[1, 0] = 1.0
        for nodes in range(2, size + 2):
            for children in range(1, min(ranks, nodes - 1) + 1):
                for m in range(1, nodes):
                    if best[level - 1, m] == -np.inf:  # no tree of this depth has so many nodes
                        continue
                    value = with_children[nodes - m, children - 1] + acceptance[children - 1] * best[level - 1, m]
                    if value > with_children[nodes, children]:
                        with_children[nodes, children] = value
                        last[level, nodes, children] = m
            chosen[level, nodes] = int(with_children[nodes].argmax())
            best[level, nodes] = with_children[nodes].max()
    total = int(best[depth].argmax())
    topology: list[int] = []

    def build(position: int, level: int, nodes: int) -> None:
        subtrees = []
        children = chosen.get((level, nodes), 0) if nodes > 1 else 0
        while children:
            m = last[level, nodes, children]
            subtrees.append(m)
            nodes, children = nodes - m, children - 1
        positions = []
        for _ in subtrees:
            topology.append(position)
            positions.append(len(topology))
        for child, m in zip(positions, reversed(subtrees), strict=True):
            build(child, level - 1, m)

    build(0, depth, total)
    return tuple(topology)
