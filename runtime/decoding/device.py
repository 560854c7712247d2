"""Rounds that run on the device as a whole: what their results are to the decoder."""

from __future__ import annotations

import math

from ..engines.rounds import RoundDraws, RoundOutcome, RoundShape
from ..sampling.params import SamplingParams
from ..sampling.random import HasUniforms, RandomStreams
from ..sampling.sampler import NEGLIGIBLE
from ..speculation.graph.token_tree import TokenTree
from ..speculation.planning.calibration import Calibration
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


def can_draw(streams: RandomStreams) -> bool:
    """Whether the device can draw with these streams' numbers."""
    return all(isinstance(stream, HasUniforms) for stream in streams)


def is_cut(params: SamplingParams) -> bool:
    """Whether these settings leave tokens out by their order."""
    return params.top_p < 1 or params.top_k > 0


def shape_of(shape: RoundShape | None, params: SamplingParams, tokens_left: int, is_planned: bool) -> RoundShape | None:
    """The shape of a round on the device with these settings; None if there is none for it."""
    if shape is None or shape.depth >= tokens_left:
        return None
    if not shape.fills_layers and not (is_planned and shape.is_tree):  # a tree is drawn as deep as planned
        return None
    return shape if params.greedy else shape._replace(is_cut=is_cut(params))


def draws_of(
    shape: RoundShape, params: SamplingParams, streams: RandomStreams, calibration: Calibration | None = None
) -> RoundDraws:
    """What a round above temperature 0 may draw with. calibration: the estimates of a drawn tree."""
    numbers = []
    for stream, count in zip(streams, shape.most_draws, strict=True):
        assert isinstance(stream, HasUniforms), "see can_draw"
        numbers.append(stream.ahead(count))
    draft, tests, last = numbers
    estimates = calibration.logs() if calibration is not None and shape.is_tree else ()
    shares = max(params.min_p, NEGLIGIBLE), params.min_p
    return RoundDraws(params.temperature, *shares, params.top_p, params.top_k, draft, tests, last, estimates)


def use_draws(shape: RoundShape, outcome: RoundOutcome, streams: RandomStreams) -> None:
    """Take the numbers that a round has used from the streams."""
    for stream, count in zip(streams, shape.num_draws(outcome), strict=True):
        if isinstance(stream, HasUniforms):
            stream.skip(count)
