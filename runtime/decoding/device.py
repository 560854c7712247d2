"""Rounds that run on the device as a whole: what their results are to the decoder."""

from __future__ import annotations

import math

from ..engines.rounds import RoundOutcome
from ..speculation.graph.token_tree import TokenTree
from ..speculation.verifier import Acceptance


def tree_of(outcome: RoundOutcome) -> TokenTree:
    """The verified tree. Its nodes are its rows, because the device keeps its graph to itself."""
    rows = range(len(outcome.token_ids))
    children: list[list[int]] = [[] for _ in rows]
    for row in rows[1:]:
        children[outcome.parents[row]].append(row)
    return TokenTree(
        token_ids=outcome.token_ids,
        parents=outcome.parents,
        depths=outcome.depths,
        children=tuple(map(tuple, children)),
        nodes=tuple(rows),
        merged=(False,) * len(rows),
        certain=frozenset(),
        shares=(1.0, *(share_of(outcome, row) for row in rows[1:])),
        draft_probs={},
        remaining={},
    )


def share_of(outcome: RoundOutcome, row: int) -> float:
    """The draft's probability of a row's token after its parent."""
    return math.exp(outcome.values[row] - outcome.values[outcome.parents[row]])


def acceptance_of(outcome: RoundOutcome) -> Acceptance:
    return Acceptance(list(outcome.accepted), outcome.next_token)
