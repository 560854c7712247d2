"""Round: the decisions of one round of decoding, for an observer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..sampling.processing import DeadEndError
from ..sampling.sampler import Sampler
from ..speculation.config import SpeculativeConfig
from ..speculation.graph.token_graph import TokenGraph
from ..speculation.graph.token_tree import TokenTree, unroll
from ..speculation.growers.lookup import path_of
from ..speculation.planning.controller import RoundPlan
from ..speculation.verifier import Acceptance

NO_SPECULATION = "no speculation"
NOT_WORTH_IT = "plain decoding is faster"
NO_STATE = "no state of the target yet"  # the root is the first token of the text
END_OF_ROOM = "end of room"  # max_tokens or the context limit allows no deeper tokens
DEPTH_LIMIT = "depth limit"
TOKEN_BUDGET = "token budget"
NOTHING_LEFT = "nothing left worth drafting"
LOOKED_UP = "no more was looked up"
PLANNED = "more would not pay"  # according to the cost model


class Proposal(NamedTuple):
    """The proposal of a round. graph: the proposed tokens. tree: the rows of the graph that the target scores.
    growth_end: the reason why the graph stopped growing, one of the constants above or "stop rule <name>"."""

    graph: TokenGraph
    tree: TokenTree
    growth_end: str


class Outcome(NamedTuple):
    """The result of a round. plan: the plan of the round; None where rounds are not planned. num_drafted: verified
    tokens. num_merged: those of them that were merged. logits: of the target, float32 [rows, V], valid until its next
    pass. token_ids: the accepted path, followed by one token of the target; the end of a text may cut them. proposal:
    None where an engine ran the round as a whole."""

    plan: RoundPlan | None
    num_drafted: int
    num_merged: int
    logits: NDArray[np.float32]
    acceptance: Acceptance
    token_ids: list[int]
    proposal: Proposal | None


class Round(NamedTuple):
    """One round, before its tokens are committed. An observer may keep it, because it does not change later.

    target_probs: the target's distribution [V] after a row of the tree, by row, for every row with children and for the
    last accepted row (the root if no token was accepted), except where nothing may follow. At temperature 0 it is the
    distribution before the arg-max, not a one-hot vector. token_ids: the output tokens of the round. finish_reason: as
    in TokenChunk; stop strings are not applied yet. draft_seconds, target_seconds: time inside each engine.
    host_seconds: the rest of the round's time.
    """

    proposal: Proposal
    target_probs: dict[int, NDArray[np.float64]]
    acceptance: Acceptance
    token_ids: list[int]
    finish_reason: str | None
    draft_seconds: float
    target_seconds: float
    host_seconds: float


Observer = Callable[[Round], bool | None]  # True if it needs no further round of this text


def target_probabilities(
    tree: TokenTree, logits: NDArray[np.float32], acceptance: Acceptance, sampler: Sampler
) -> dict[int, NDArray[np.float64]]:
    """Round.target_probs, from the target's logits [rows, V]."""
    rows = {*tree.parents[1:], acceptance.rows[-1] if acceptance.rows else 0}
    paths: list[list[int]] = [[]]
    for row in range(1, len(tree)):
        paths.append([*paths[tree.parents[row]], tree.token_ids[row]])
    found: dict[int, NDArray[np.float64]] = {}
    for row in sorted(rows):
        with suppress(DeadEndError):
            if sampler.params.greedy:
                found[row] = np.exp(sampler.log_probabilities(logits[row], paths[row]))
            else:
                found[row] = sampler.distribution(logits[row], paths[row])
    return found


def describe_round(
    outcome: Outcome, sampler: Sampler, kept: int, finish_reason: str | None, seconds: tuple[float, float, float]
) -> Round:
    """The round as an observer receives it. kept: tokens that the text keeps. seconds: in draft, target and host."""
    _, _, _, logits, acceptance, token_ids, proposal = outcome
    assert proposal is not None, "the host runs the rounds that are observed"
    probs = target_probabilities(proposal.tree, logits, acceptance, sampler)
    return Round(proposal, probs, acceptance, token_ids[:kept], finish_reason, *seconds)


def propose_found(root: int, found: Sequence[int], plan: RoundPlan | None) -> Proposal:
    """The proposal of a prompt lookup alone, as far as it is planned."""
    kept = found if plan is None else found[: plan.depth]
    graph = path_of(root, kept)
    end = LOOKED_UP if len(kept) == len(found) else PLANNED if kept else NOT_WORTH_IT
    return Proposal(graph, unroll(graph, len(kept), len(kept)), end)


def growth_end(
    graph: TokenGraph,
    tree: TokenTree,
    config: SpeculativeConfig,
    greedy: bool,
    max_depth: int,
    plan: RoundPlan | None,
    by_rule: bool,
) -> str:
    """The reason why `graph` stopped growing, see Proposal. config: of the request. max_depth: the largest depth that
    the text still allows. plan: the plan of this round, if any. by_rule: whether the stop rule ended the growth."""
    if by_rule:
        return f"stop rule {config.stop_rule}"
    deepest = max(graph.depths)
    own, planned = config.deepest(greedy), max_depth if plan is None else plan.depth
    if deepest >= min(own, max_depth, planned):
        return PLANNED if planned < min(own, max_depth) else END_OF_ROOM if max_depth < own else DEPTH_LIMIT
    # Each copy of a merged node counts: unrolling a drawn graph repeats the node once per path.
    drafted = max(len(graph), len(tree)) - 1
    size = config.max_total_draft_tokens if plan is None or config.shaped else plan.size
    if drafted < size:
        return NOTHING_LEFT
    return PLANNED if size < config.max_total_draft_tokens else TOKEN_BUDGET
