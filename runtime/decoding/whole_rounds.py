"""Rounds that an engine runs as a whole, on a GPU: what they are to the decoder."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..engines.passes import Works
from ..engines.rounds import DrawSettings, RoundDraws, RoundOutcome, Rounds, RoundShape
from ..sampling.params import SamplingParams
from ..sampling.random import HasUniforms, RandomStreams
from ..sampling.sampler import NEGLIGIBLE
from ..speculation.graph.token_tree import TokenTree
from ..speculation.planning.calibration import Calibration
from ..speculation.planning.controller import RoundPlan
from ..speculation.proposer import DraftProposer
from ..speculation.verifier import Acceptance
from .round import Outcome

if TYPE_CHECKING:  # state.py imports this module
    from .state import RequestState

NO_ESTIMATES = array("d")
NO_LOGITS: NDArray[np.float32] = np.zeros((0, 0), np.float32)


def run_whole(
    rounds: Rounds, proposer: DraftProposer, request: RequestState, plan: RoundPlan | None, shape: RoundShape
) -> Works[Outcome]:
    begin, draws = perf_counter(), None
    if request.draws is not None:
        draws = draws_of(shape, request.draws, request.uniforms, request.calibration)
    found: RoundOutcome = yield rounds.round(shape, proposer.pending, draws)
    if found.seconds is None:
        request.scoring.add(perf_counter() - begin)
    else:
        request.scoring.add(found.seconds[1])
        request.time_pass(len(found.token_ids))
    if draws is not None:
        use_draws(found, request.uniforms)
    proposer.follow(found)
    acceptance = acceptance_of(found)
    if plan is not None or request.calibration is not None:
        request.learn(plan, tree_of(found), acceptance, found.written)
    return Outcome(plan, len(found.token_ids) - 1, 0, NO_LOGITS, acceptance, found.written, None)


def tree_of(outcome: RoundOutcome) -> TokenTree:
    """The verified tree. Its nodes are its rows, because the engine keeps its graph to itself."""
    parents, count = outcome.parents, len(outcome.parents)
    children: list[tuple[int, ...]] = [()] * count
    for row in range(1, count):
        children[parents[row]] += (row,)
    return TokenTree(
        token_ids=outcome.token_ids,
        parents=parents,
        depths=outcome.depths,
        children=tuple(children),
        nodes=tuple(range(count)),
        merged=(False,) * count,
        shares=outcome.shares,
        draft_probs={},
        remaining={},
    )


def acceptance_of(outcome: RoundOutcome) -> Acceptance:
    return Acceptance(list(outcome.accepted), outcome.written[-1])


def uniforms_of(streams: RandomStreams) -> tuple[HasUniforms, ...]:
    """The streams, if an engine can draw with their numbers; else none."""
    uniforms = tuple(stream for stream in streams if isinstance(stream, HasUniforms))
    return uniforms if len(uniforms) == len(streams) else ()


def settings_of(params: SamplingParams) -> DrawSettings | None:
    """How rounds draw with these settings; None at temperature 0."""
    shares = max(params.min_p, NEGLIGIBLE), params.min_p
    return None if params.greedy else DrawSettings(params.temperature, *shares, params.top_p, params.top_k)


def is_cut(settings: DrawSettings | SamplingParams) -> bool:
    """Whether these settings leave tokens out by their order."""
    return settings.top_p < 1 or settings.top_k > 0


def shape_of(
    shape: RoundShape | None, settings: DrawSettings | None, tokens_left: int, may_end: bool
) -> RoundShape | None:
    """The shape of a whole round, None if there is none. may_end: whether the tree may end before its last layer."""
    if shape is None or shape.depth >= tokens_left or not (may_end or shape.fills_layers):
        return None
    return shape._replace(is_cut=True) if settings is not None and is_cut(settings) else shape


def draws_of(
    shape: RoundShape, settings: DrawSettings, uniforms: Sequence[HasUniforms], calibration: Calibration | None = None
) -> RoundDraws:
    """What a round draws with. uniforms: of draft, tests and target. calibration: the estimates of a drawn tree."""
    (draft, tests, last), (drawn, tested, chosen) = uniforms, shape.most_draws
    estimates = calibration.logs() if calibration is not None and shape.is_tree else NO_ESTIMATES
    return RoundDraws(settings, draft.ahead(drawn), tests.ahead(tested), last.ahead(chosen), estimates)


def use_draws(outcome: RoundOutcome, uniforms: Sequence[HasUniforms]) -> None:
    """Take the numbers that a round has used from the streams."""
    for stream, count in zip(uniforms, outcome.used, strict=True):
        stream.skip(count)
