"""Round: everything that one round of decoding decided, for whoever wants to look on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..sampling.sampler import Sampler
from ..speculation.config import SpeculativeConfig
from ..speculation.graph.token_graph import TokenGraph
from ..speculation.graph.token_tree import TokenTree
from ..speculation.planning.controller import RoundPlan
from ..speculation.verifier import Acceptance

NO_SPECULATION = "no speculation"
NOT_WORTH_IT = "plain decoding is faster"
END_OF_ROOM = "end of room"  # max_tokens or the context limit leaves no place for deeper tokens
DEPTH_LIMIT = "depth limit"
TOKEN_BUDGET = "token budget"
NOTHING_LEFT = "nothing left worth drafting"
PLANNED = "more would not pay"  # by the cost model


class Proposal(NamedTuple):
    """What the draft offered. graph: as it grew. tree: what of it the target scored. growth_end: why it grew no
    further, one of the reasons above or "stop rule <name>"."""

    graph: TokenGraph
    tree: TokenTree
    growth_end: str


class Outcome(NamedTuple):
    """What a round came to. plan: its limits, where it was planned. logits: the target's, float32 [rows, V], valid
    until its next pass. token_ids: of the accepted path, and the target's own; the end of a text may cut them."""

    plan: RoundPlan | None
    proposal: Proposal
    logits: NDArray[np.float32]
    acceptance: Acceptance
    token_ids: list[int]


class Round(NamedTuple):
    """One round, before its tokens are committed. An observer may keep it: nothing in it changes later.

    target_probs: the target's distribution [V] after a row of the tree, by row: for every row that has children, and
    for the row whose next token is the target's own. At temperature 0 it is the one arg-max is taken of, since one-hot
    vectors say nothing. token_ids: what the round emits; finish_reason as in TokenChunk (a stop string ends a text
    later, where there is text). Seconds: inside the draft, inside the target, and outside of both.
    """

    proposal: Proposal
    target_probs: dict[int, NDArray[np.float64]]
    acceptance: Acceptance
    token_ids: list[int]
    finish_reason: str | None
    draft_seconds: float
    target_seconds: float
    host_seconds: float


Observer = Callable[[Round], None]


def target_probabilities(
    tree: TokenTree, logits: NDArray[np.float32], acceptance: Acceptance, sampler: Sampler
) -> dict[int, NDArray[np.float64]]:
    """Round.target_probs, from the target's logits [rows, V]."""
    rows = {*tree.parents[1:], acceptance.rows[-1] if acceptance.rows else 0}
    paths: list[list[int]] = [[]]
    for row in range(1, len(tree)):
        paths.append([*paths[tree.parents[row]], tree.token_ids[row]])
    if sampler.params.greedy:
        return {row: np.exp(sampler.log_probabilities(logits[row], paths[row])) for row in sorted(rows)}
    return {row: sampler.distribution(logits[row], paths[row]) for row in sorted(rows)}


def growth_end(
    graph: TokenGraph,
    tree: TokenTree,
    config: SpeculativeConfig,
    greedy: bool,
    room: int,
    plan: RoundPlan | None,
    by_rule: bool,
) -> str:
    """Why `graph` grew no further. config: the request's. room: the depth it had room for. plan: limits of this round
    alone, where it was planned. by_rule: the stop rule ended it."""
    if by_rule:
        return f"stop rule {config.stop_rule}"
    given = {edge.child for edges in graph.edges for edge in edges if edge.certain}
    deepest = max(depth for node, depth in enumerate(graph.depths) if node not in given)
    own, planned = config.deepest(greedy), room if plan is None else plan.depth
    if deepest >= min(own, room, planned):
        return PLANNED if planned < min(own, room) else END_OF_ROOM if room < own else DEPTH_LIMIT
    # A drawn graph pays for every copy that merging will make of a node.
    drafted = max(len(graph), len(tree)) - 1 - len(given)
    size = config.max_total_draft_tokens if plan is None or config.shaped else plan.size
    if drafted < size:
        return NOTHING_LEFT
    return PLANNED if size < config.max_total_draft_tokens else TOKEN_BUDGET
