"""Verifiers: which rows of a token tree the target accepts, and the token it adds itself.

p is the target's distribution at a row, q the draft's (`tree.draft_probs`); both are the request's own, for that
row's path. Each verifier is lossless for the proposals that `config.LOSSLESS` lists beside its name, and for no other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..random import RandomStreams
from ..sampling import Sampler
from .token_tree import TokenTree


class Acceptance(NamedTuple):
    """rows: accepted rows below the root, a path. next_token: the target's own token after them."""

    rows: list[int]
    next_token: int


class Verifier(Protocol):
    def __call__(
        self, tree: TokenTree, logits: NDArray[np.float32], sampler: Sampler, streams: RandomStreams
    ) -> Acceptance:
        """Judge `tree` by the target's logits [rows, V]."""


def sample_and_match(
    tree: TokenTree, logits: NDArray[np.float32], sampler: Sampler, streams: RandomStreams
) -> Acceptance:
    """Draw the target's token at each row and follow the child that carries it, as long as there is one.

    Exact for any tree, however it was chosen: the tree only decides how far the target's own draws can be followed.
    (SpecExec, OPT-Tree, EAGLE-2; papers.md section 0, rule b.)
    """
    return matched(tree, lambda row, path: sampler.choose(logits[row], path, streams.target))


def match_best(tree: TokenTree, best: NDArray[np.int64]) -> Acceptance:
    """The same at temperature 0, from the target's most probable token at each row, [rows]."""
    return matched(tree, lambda row, path: int(best[row]))


def matched(tree: TokenTree, choose: Callable[[int, list[int]], int]) -> Acceptance:
    """Follow the child that carries the token chosen at a row, as long as there is one."""
    children = tree.children()
    row = 0
    rows: list[int] = []
    path: list[int] = []
    while True:
        token = choose(row, path)
        match = next((child for child in children[row] if tree.token_ids[child] == token), None)
        if match is None:
            return Acceptance(rows, token)
        row = match
        rows.append(row)
        path.append(token)


def recursive_rejection(
    tree: TokenTree, logits: NDArray[np.float32], sampler: Sampler, streams: RandomStreams
) -> Acceptance:
    """Recursive rejection sampling: DySpec (2410.11744) Algorithm 3, SpecInfer's and Sequoia's loop.

    For children drawn without replacement, in draw order. R is the residual target distribution, D the draft's.
    Differs from the printed algorithm where that is in error: the threshold is uniform, not normal, and an accepted
    row without children ends with a draw from the target there. On a chain this is Leviathan's rejection sampling.
    """
    children = tree.children()
    row = 0
    rows: list[int] = []
    path: list[int] = []
    while True:
        R = sampler.distribution(logits[row], path)
        D = tree.draft_probs.get(row)
        accepted = None
        for child in children[row]:
            y = tree.token_ids[child]
            offered, D = split(tree, child, D, len(R))
            if streams.accept.bernoulli(min(1.0, R[y] / offered[y])):
                accepted = child
                break
            R = normalised(np.maximum(R - offered, 0.0), R)
        if accepted is None:
            return Acceptance(rows, streams.target.categorical(R))
        row = accepted
        rows.append(row)
        path.append(tree.token_ids[row])


def traversal_verification(
    tree: TokenTree, logits: NDArray[np.float32], sampler: Sampler, streams: RandomStreams
) -> Acceptance:
    """Traversal verification (2505.12398): as above, but from the leaves up, so that a token rejected on its own may
    still be accepted with what follows it. Not for merged graphs, whose branches share their draws.

    π: probability that the path to a row is accepted. Child y is reached with min(1, π R[y] / D[y]); once its subtree
    is rejected, R' = norm(max(πR - D, 0)) and π' = S / (S + 1 - π), where S is the sum before normalising. On a chain
    this is block verification. (No code was released; the rule was reconstructed and checked by enumeration.)
    """
    children = tree.children()

    def visit(row: int, pi: float, path: list[int]) -> Acceptance | None:
        R = sampler.distribution(logits[row], path)
        D = tree.draft_probs.get(row)
        for child in children[row]:
            y = tree.token_ids[child]
            offered, D = split(tree, child, D, len(R))
            found = visit(child, min(1.0, pi * R[y] / offered[y]), [*path, y])
            if found is not None:
                return Acceptance([child, *found.rows], found.next_token)
            excess = np.maximum(pi * R - offered, 0.0)
            S = float(excess.sum())
            R = normalised(excess, R)
            pi = S / (S + (1.0 - pi)) if S + (1.0 - pi) > 0 else 1.0
        if row and not streams.accept.bernoulli(pi):
            return None
        return Acceptance([], streams.target.categorical(R))

    found = visit(0, 1.0, [])
    assert found is not None, "the root is always accepted"
    return found


def split(
    tree: TokenTree, child: int, D: NDArray[np.float64] | None, vocab_size: int
) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
    """The distribution a child was offered from, and the one its next sibling is drawn from.

    A child that was given and not drawn is a draw from a point mass of its own.
    """
    y = tree.token_ids[child]
    if child in tree.certain:
        point = np.zeros(vocab_size)
        point[y] = 1.0
        return point, D
    assert D is not None, "a drawn row without its distribution"
    following = D.copy()
    following[y] = 0.0
    return D, normalised(following, following)


def block_verification(
    tree: TokenTree, logits: NDArray[np.float32], sampler: Sampler, streams: RandomStreams
) -> Acceptance:
    """Block verification (2403.10444, Algorithm 2) of a drawn chain x_1..x_γ; never accepts less than rejection.

    p_i = min(1, p_{i-1} P(x_i)/Q(x_i)); S_i = Σ max(p_i P - Q, 0) at the position after x_i;
    h_i = S_i / (S_i + 1 - p_i), h_γ = p_γ.
    The longest i whose own test succeeds is kept; the next token is drawn from norm(max(p_i P - Q, 0)).
    """
    gamma = len(tree) - 1
    path: list[int] = []
    p, tau = 1.0, 0
    P = Q = residual = sampler.distribution(logits[0], path)
    for i in range(gamma + 1):
        if i > 0:
            x = tree.token_ids[i]
            p = min(1.0, p * P[x] / Q[x])
            path.append(x)
            P = sampler.distribution(logits[i], path)
        if i == gamma:
            h, candidate = p, P
        else:
            Q = tree.draft_probs[i]
            excess = np.maximum(p * P - Q, 0.0)
            S = float(excess.sum())
            h = S / (S + (1.0 - p)) if S + (1.0 - p) > 0 else 1.0
            candidate = normalised(excess, P)
        if i == 0:
            residual = candidate
        elif streams.accept.bernoulli(h):
            tau, residual = i, candidate
    return Acceptance(list(range(1, tau + 1)), streams.target.categorical(residual))


def normalised(weights: NDArray[np.float64], fallback: NDArray[np.float64]) -> NDArray[np.float64]:
    """weights / sum. Zero weights mean that p = q, so that this branch has probability zero up to rounding."""
    total = weights.sum()
    return weights / total if total > 0 else fallback
