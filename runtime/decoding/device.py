"""Rounds that run on the device as a whole: what their results are to the decoder."""

from __future__ import annotations

import math

from ..engines.rounds import RoundDraws, RoundOutcome, RoundShape
from ..sampling.params import SamplingParams
from ..sampling.random import HasUniforms, RandomStreams
from ..sampling.sampler import NEGLIGIBLE
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


def can_draw(params: SamplingParams, streams: RandomStreams) -> bool:
    """Whether the device draws as these settings say, and with these streams' numbers."""
    return params.top_k == 0 and all(isinstance(stream, HasUniforms) for stream in streams)


def draws_of(shape: RoundShape, params: SamplingParams, streams: RandomStreams) -> RoundDraws:
    """What a round above temperature 0 may draw with."""
    numbers = []
    for stream, count in zip(streams, shape.most_draws, strict=True):
        assert isinstance(stream, HasUniforms), "see can_draw"
        numbers.append(stream.ahead(count))
    return RoundDraws(params.temperature, max(params.min_p, NEGLIGIBLE), params.min_p, params.top_p, *numbers)


def use_draws(shape: RoundShape, acceptance: Acceptance, streams: RandomStreams) -> None:
    """Take the numbers that a round has used from the streams."""
    for stream, count in zip(streams, shape.num_draws(len(acceptance.rows)), strict=True):
        if isinstance(stream, HasUniforms):
            stream.skip(count)
