"""The rows that the draft scores in a round, which bundles are checked against: exact bounds for every grower."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from fakes import FakeEngine, Predict
from growth import PROMPT
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftwood.runtime.engines.base import ForwardOutput, KVCache, TokenBatch
from draftwood.runtime.engines.passes import run
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation.config import SpeculativeConfig
from draftwood.runtime.speculation.graph.token_graph import TokenGraph
from draftwood.runtime.speculation.graph.token_tree import unroll
from draftwood.runtime.speculation.planning.calibration import Calibration, Estimate, uncorrected
from draftwood.runtime.speculation.proposer import DraftProposer

VOCABULARY = 6
CERTAIN, HALVES, EVEN = np.eye(VOCABULARY)[3], np.array([0.5, 0, 0, 0.5, 0, 0]), np.full(VOCABULARY, 1 / VOCABULARY)
DISTRIBUTIONS = (CERTAIN, HALVES, EVEN, np.array([0.6, 0.2, 0.1, 0.05, 0.03, 0.02]))


class Scored(NamedTuple):
    """The nodes that a draft scored in one round: in its widest pass, and in all."""

    widest: int
    total: int


class Watched(FakeEngine):
    """A draft that notes the rows of each pass since its list was set."""

    rows: list[int]

    def score(self, batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        self.rows.append(batch.num_tokens)
        return super().score(batch, cache)


def scored(
    config: SpeculativeConfig, predict: Predict, greedy: bool, seed: int = 0, estimate: Estimate = uncorrected
) -> Scored:
    """One round of a configuration's proposals. Also checks the number of their tokens."""
    draft = Watched(predict, VOCABULARY, "draft", accept=(lambda context: 0.7) if config.key == "head" else None)
    draft.rows = []
    proposer = DraftProposer(draft, list(PROMPT))
    graph, params = TokenGraph(PROMPT[-1]), SamplingParams(temperature=0 if greedy else 1)
    sampler = Sampler(params, PROMPT, (), VOCABULARY)
    grower, stream = config.rules(greedy).grower(64, estimate), seeded_streams(seed).draft
    run(proposer.propose(graph, grower, config.stopper(), sampler, stream))
    assert len(unroll(graph, config.max_tokens, 99)) - 1 <= config.max_tokens
    after = draft.rows[1:]  # the first pass scores the root
    return Scored(max(after, default=0), sum(after))


@settings(max_examples=60)
@given(
    grow=st.sampled_from(["chain", "topk", "dyspec", "dyspec-heap", "dyspec-threshold"]),
    merge=st.sampled_from(["none", "gsd"]),
    key=st.sampled_from(["draft", "head"]),
    limits=st.tuples(st.integers(1, 7), st.integers(1, 7), st.integers(1, 7)),
    rows=st.lists(st.sampled_from(range(len(DISTRIBUTIONS))), min_size=1, max_size=5),
    greedy=st.booleans(),
    calibrated=st.booleans(),
    seed=st.integers(0, 3),
)
def test_no_grower_scores_more_rows_than_its_configuration_says(
    grow: str,
    merge: str,
    key: str,
    limits: tuple[int, int, int],
    rows: list[int],
    greedy: bool,
    calibrated: bool,
    seed: int,
) -> None:
    """Drafts whose values are often equal: certain tokens, and tokens of equal probability."""
    names = ("max_draft_len", "max_total_draft_tokens", "frontier_width")
    sizes: dict[str, Any] = dict(zip(names, limits, strict=True))
    sizes |= {"merge_ngram": 1} if merge == "gsd" else {}
    sizes |= {"draft_threshold": 0.01} if grow == "dyspec-threshold" else {}
    config = SpeculativeConfig(grow, merge, key=key, **sizes)

    def predict(context: tuple[int, ...]) -> NDArray[np.float64]:
        return DISTRIBUTIONS[rows[sum(place * token for place, token in enumerate(context)) % len(rows)]]

    found = scored(config, predict, greedy, seed, Calibration() if calibrated else uncorrected)
    assert found.widest <= config.max_frontier and found.total <= config.max_draft_rows


def late_branches(context: tuple[int, ...]) -> NDArray[np.float64]:
    """Token 0 is nearly certain after itself, and the other tokens there are the more probable the later they come."""
    depth = len(context) - len(PROMPT)
    if any(context[len(PROMPT) :]):
        return EVEN
    others = 1e-7 * 4**depth * (1 - 0.01 * np.arange(1, VOCABULARY))
    return np.array([1 - others.sum(), *others])


@pytest.mark.parametrize(
    ("config", "predict", "greedy", "rows"),
    [
        (SpeculativeConfig("chain", max_draft_len=6), lambda _: EVEN, False, 5),
        (SpeculativeConfig("chain", max_draft_len=6), lambda _: EVEN, True, 5),
        (SpeculativeConfig("k-ary", branching=(2, 2, 1), max_total_draft_tokens=10), lambda _: EVEN, False, 6),
        (SpeculativeConfig("static", topology=(0, 0, 0, 2, 2)), lambda _: EVEN, False, 1),
        (SpeculativeConfig("static", topology=(0, 0, 0, 2, 2)), lambda _: EVEN, True, 1),
        (
            SpeculativeConfig("topk", max_draft_len=9, max_total_draft_tokens=6, frontier_width=4),
            late_branches,
            True,
            4 + 4 + 3 + 2 + 1,
        ),
        (
            SpeculativeConfig("dyspec", max_draft_len=9, max_total_draft_tokens=3, frontier_width=4),
            lambda context: HALVES if context == PROMPT else CERTAIN,
            False,
            8 * 2,
        ),
        (SpeculativeConfig("dyspec", max_draft_len=9, max_total_draft_tokens=1), lambda _: CERTAIN, False, 8),
    ],
)
def test_the_rows_of_draft_passes_are_reached(
    config: SpeculativeConfig, predict: Callable[[tuple[int, ...]], NDArray[np.float64]], greedy: bool, rows: int
) -> None:
    assert scored(config, predict, greedy).total == config.max_draft_rows == rows


@pytest.mark.parametrize("grow", ["dyspec-threshold", "dyspec-heap"])
def test_drawn_tokens_of_a_budget_are_all_scored_but_the_last(grow: str) -> None:
    """At temperature 0 these growers choose like "topk", which takes more rows."""
    config = SpeculativeConfig(grow, max_draft_len=9, max_total_draft_tokens=5, frontier_width=3)
    assert scored(config, lambda _: CERTAIN, False).total == 4
    assert scored(config, late_branches, True).total == config.max_draft_rows == 3 + 3 + 2 + 1
    alone = SpeculativeConfig(grow, max_draft_len=2, max_total_draft_tokens=5, frontier_width=3)
    assert alone.max_draft_rows == (4 if grow == "dyspec-heap" else 3) and alone.max_frontier == 3


def test_a_pass_is_as_wide_as_the_best_tokens_allow() -> None:
    wide: dict[str, Any] = {"max_total_draft_tokens": 4, "frontier_width": 100, "max_draft_len": 3}
    for grow in ("topk", "dyspec", "dyspec-threshold", "dyspec-heap"):
        assert SpeculativeConfig(grow, **wide).max_frontier == 3
    assert scored(SpeculativeConfig("topk", **wide), late_branches, True).widest == 3
