"""Verifiers: they decide which rows of a token tree the target accepts, and which token follows the accepted rows.

p is the target's distribution at a row, q the draft's (`tree.draft_probs`). Both are computed for the row's path and
with the settings of the request. Each verifier is lossless only for the kinds of proposal under which
`config.LOSSLESS` lists its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..sampling.random import RandomStreams
from ..sampling.sampler import NO_CANDIDATES, ScoredRows
from ..sampling.weights import NOTHING, Residual
from .graph.token_tree import TokenTree


class Acceptance(NamedTuple):
    """rows: accepted rows below the root, a path. next_token: the target's own token after them."""

    rows: list[int]
    next_token: int


class Verifier(Protocol):
    def __call__(self, tree: TokenTree, target: ScoredRows, streams: RandomStreams) -> Acceptance:
        """Accept rows of `tree` by the rows that the target has scored."""


def sample_and_match(tree: TokenTree, target: ScoredRows, streams: RandomStreams) -> Acceptance:
    """Draw a token from the target at each row, and go to the child with this token, as long as there is one.

    Exact for every tree: all tokens are the target's own draws; the tree only decides how many of them one pass finds.
    (SpecExec, OPT-Tree, EAGLE-2.)
    """
    return match_path(tree, lambda row, path: target.choose(row, path, streams.target))


def match_best(tree: TokenTree, best: NDArray[np.int64]) -> Acceptance:
    """The same at temperature 0. best [rows]: the target's most probable token at each row."""
    return match_path(tree, lambda row, path: int(best[row]))


def match_path(tree: TokenTree, choose: Callable[[int, list[int]], int]) -> Acceptance:
    """Choose a token at each row, and go to the child with this token, as long as there is one."""
    children = tree.children
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


def recursive_rejection(tree: TokenTree, target: ScoredRows, streams: RandomStreams) -> Acceptance:
    """Recursive rejection sampling: DySpec (2410.11744) Algorithm 3, SpecInfer's and Sequoia's loop.

    For children drawn without replacement, in draw order. R is the residual distribution of the target, D the draft's.
    The printed algorithm has two errors, which are corrected here: the threshold is uniform, not normal, and after an
    accepted row without children a token is drawn from the target. On a chain this is Leviathan's rejection sampling.
    """
    children = tree.children
    row = 0
    rows: list[int] = []
    path: list[int] = []
    while children[row]:
        ids, offers = offers_at(tree, row, children[row])
        R = target.weights(row, path).residual(ids)
        for child, y, D in offers:
            if streams.accept.bernoulli(min(1.0, R.probs[y] / D[y])):
                row = child
                break
            R.reject(D)
        else:
            return Acceptance(rows, R.draw(streams.target))
        rows.append(row)
        path.append(tree.token_ids[row])
    return Acceptance(rows, target.choose(row, path, streams.target))


def traversal_verification(tree: TokenTree, target: ScoredRows, streams: RandomStreams) -> Acceptance:
    """Traversal verification (2505.12398): as above, but from the leaves up. A token that would be rejected alone may
    still be accepted together with the tokens below it. Not for merged graphs, whose branches share their draws.

    π: probability that the path to a row is accepted. Child y is reached with min(1, π R[y] / D[y]); once its subtree
    is rejected, R' = norm(max(πR - D, 0)) and π' = S / (S + 1 - π), where S is the sum before normalising. On a chain
    this is block verification. (The authors released no code. This rule is reconstructed and checked by enumeration.)
    """
    children = tree.children

    def visit(row: int, pi: float, path: list[int]) -> Acceptance | None:
        if not children[row]:
            if row and not streams.accept.bernoulli(pi):
                return None
            return Acceptance([], target.choose(row, path, streams.target))
        ids, offers = offers_at(tree, row, children[row])
        R = target.weights(row, path).residual(ids)
        for child, y, D in offers:
            found = visit(child, min(1.0, pi * R.probs[y] / D[y]), [*path, tree.token_ids[child]])
            if found is not None:
                return Acceptance([child, *found.rows], found.next_token)
            pi = R.reject(D, pi)
        if row and not streams.accept.bernoulli(pi):
            return None
        return Acceptance([], R.draw(streams.target))

    found = visit(0, 1.0, [])
    assert found is not None, "the root is always accepted"
    return found


def block_verification(tree: TokenTree, target: ScoredRows, streams: RandomStreams) -> Acceptance:
    """Block verification (2403.10444, Algorithm 2) of a drawn chain x_1..x_γ. On average it accepts at least as many
    tokens as rejection sampling.

    p_i = min(1, p_{i-1} P(x_i)/Q(x_i)); S_i = Σ max(p_i P - Q, 0) at the position after x_i;
    h_i = S_i / (S_i + 1 - p_i), h_γ = p_γ.
    The greatest i whose test succeeds is kept, so the tests run from the last token to the first. The next token is
    drawn from norm(max(p_i P - Q, 0)).
    """
    gamma, path = len(tree) - 1, list(tree.token_ids[1:])
    p = [1.0]
    residuals: list[Residual] = []
    for i, x in enumerate(path):
        Q = tree.draft_probs[i]
        P, at = target.weights(i, path[:i]).residual(Q.ids), Q.place(x)
        p.append(min(1.0, p[i] * P.probs.item(at) / Q.probs.item(at)))
        residuals.append(P)
    if streams.accept.bernoulli(p[gamma]):
        return Acceptance(list(range(1, gamma + 1)), target.choose(gamma, path, streams.target))
    tau = gamma - 1
    while not streams.accept.bernoulli(residuals[tau].reject(tree.draft_probs[tau].probs, p[tau])):  # h_0 = 1
        tau -= 1
    return Acceptance(list(range(1, tau + 1)), residuals[tau].draw(streams.target))


def end_before_nothing(tree: TokenTree, acceptance: Acceptance) -> Acceptance:
    """Where NOTHING follows the accepted rows, the last of them is the token after the others: the text may end there,
    and if it does not, the next round finds the same dead end at its root. A dead end is one more token of the
    vocabulary, whose probability is 1, so every verifier is as exact as elsewhere."""
    rows, token = acceptance
    return acceptance if token != NOTHING else Acceptance(rows[:-1], tree.token_ids[rows[-1]])


def offers_at(
    tree: TokenTree, row: int, children: Sequence[int]
) -> tuple[NDArray[np.int64], list[tuple[int, int, NDArray[np.float64]]]]:
    """The ids [K] of all tokens that may be offered at a row; and for each child the row number, its token's index in
    the ids, and D [K], the distribution it was drawn from, its remaining q."""
    q = tree.draft_probs.get(row, NO_CANDIDATES)
    return q.ids, [(child, q.place(tree.token_ids[child]), tree.remaining[child]) for child in children]


VERIFIERS: dict[str, Verifier] = {
    "match": sample_and_match,
    "rejection": recursive_rejection,
    "block": block_verification,
    "traversal": traversal_verification,
}
