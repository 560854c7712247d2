"""Prompt lookup without a draft: exact, planned by costs, and without a cache or a pass of a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from costs import table
from enumeration import PROMPT, decoded, pair, total_variation
from fakes import FakeEngine, random_model
from numpy.typing import NDArray
from proposals import SETTINGS

from draftwood.models.errors import ConfigError
from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.round import LOOKED_UP, NOT_WORTH_IT, Round
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation.config import SpeculativeConfig
from draftwood.runtime.speculation.planning.cost import CostModel

LOOKUP = SpeculativeConfig("lookup", lookup_ngram=1, lookup_len=3)
FREE_ROWS = replace(table(1.0, 1.0, row=0.0), draft=None)
DEAR_ROWS = replace(table(1.0, 1.0, row=1.0), draft=None)  # a pass costs as much as plain passes over its rows


@pytest.mark.parametrize("costs", [None, FREE_ROWS, DEAR_ROWS], ids=["fixed", "free", "dear"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_distribution_is_the_targets(setting: str, costs: CostModel | None) -> None:
    """I2: a plan depends on the text and on earlier rounds only."""
    target, _ = pair(2, 2)
    expected = decoded(target, None, None, SETTINGS[setting])
    assert total_variation(decoded(target, None, LOOKUP, SETTINGS[setting], costs), expected) < 1e-12


def rounds(target: FakeEngine, prompt: Sequence[int], costs: CostModel | None) -> tuple[list[Round], SpecDecodeStats]:
    seen: list[Round] = []
    sampler = Sampler(SamplingParams(max_tokens=200, temperature=0), prompt, (), 9)
    stats, decoder = SpecDecodeStats(), SpeculativeDecoder(target, None, LOOKUP, 4096, (), costs)
    for _ in decoder.generate(prompt, sampler, seeded_streams(0), stats, seen.append):
        pass
    return seen, stats


def repeat(context: tuple[int, ...]) -> NDArray[np.float64]:
    successor: NDArray[np.float64] = np.eye(9)[(context[-1] + 1) % 9]
    return successor


def test_a_text_that_repeats_itself_is_looked_up() -> None:
    found, stats = rounds(FakeEngine(repeat, 9), [*range(9), 0], FREE_ROWS)
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 140 and stats.draft_passes == 0
    assert {each.proposal.growth_end for each in found} == {LOOKED_UP}


def test_a_lookup_that_does_not_pay_is_left_out() -> None:
    target = FakeEngine(random_model(0, 9), 9)
    found, stats = rounds(target, PROMPT, DEAR_ROWS)
    assert {NOT_WORTH_IT} < {each.proposal.growth_end for each in found}
    assert stats.num_draft_tokens == 0 and stats.num_tokens == 200


def test_what_was_left_out_teaches_all_the_same() -> None:
    """Nothing needs to be tried: each round shows whether the tokens that were found follow."""
    rows = replace(table(1.0, 1.0, row=0.7), draft=None)  # pays from 0.7 on, more than is guessed at first
    found, stats = rounds(FakeEngine(repeat, 9), [*range(9), 0], rows)
    proposing = [len(each.proposal.tree) > 1 for each in found]
    assert not proposing[0] and proposing[-2] and stats.num_looked_up > 20


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lookup_ngram": 2, "merge": "gsd"}, "is for a draft's proposals"),
        ({"lookup_ngram": 2, "stop_rule": "confidence"}, "is for a draft's proposals"),
        ({"lookup_ngram": 2, "key": "head"}, "is for a draft's proposals"),
        ({"lookup_ngram": 2, "verify": "rejection"}, "not lossless"),
    ],
)
def test_settings_of_a_draft_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig("lookup", **settings)  # type: ignore[arg-type]  # each of its own type


def test_the_smaller_limit_counts() -> None:
    assert (LOOKUP.max_tokens, LOOKUP.max_draft_rows, LOOKUP.max_frontier) == (3, 0, 1)
    assert replace(LOOKUP, max_draft_len=2).max_tokens == 2
