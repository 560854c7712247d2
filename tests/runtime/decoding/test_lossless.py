"""The output distribution is the target's own: exact enumeration of every random outcome of the real decoder."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from enumeration import PROMPT, decoded, pair, total_variation
from proposals import GROWN, LEGAL, SETTINGS, speculative

from draftwood.models.errors import ConfigError
from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation.config import SpeculativeConfig
from draftwood.runtime.speculation.verifier import VERIFIERS

EVERY_SETTING = ("chain", "k-ary", "topk", "dyspec", "dyspec merged")  # the other ones share their draws with these
CASES = [
    (name, verify, setting)
    for name, verify in LEGAL
    for setting in (SETTINGS if name in EVERY_SETTING and verify != "match" else ("plain", "penalties"))
]

CASES += [(name, "match", "dead ends") for name in ("topk", "lookup", "dyspec")]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize(("name", "verify", "setting"), CASES)
def test_every_legal_pair_is_exact(name: str, verify: str, setting: str, seed: int) -> None:
    """I2: total variation from plain decoding below 1e-12, every verifier with every proposal it is allowed for."""
    params = SETTINGS[setting]
    target, draft = pair(seed, 3)
    expected = decoded(target, None, None, params)
    found = decoded(target, draft, speculative(name, verify), params)
    assert total_variation(found, expected) < 1e-12


@pytest.mark.parametrize(("name", "verify"), [each for each in LEGAL if "merge" in GROWN[each[0]]])
def test_copies_deeper_than_what_was_drafted_are_exact(name: str, verify: str) -> None:
    """I2: a merged graph's copies need longer texts than the above, which two tokens leave time for."""
    params = SamplingParams(max_tokens=4)
    for seed in range(6):
        target, draft = pair(seed, 2)
        found = decoded(target, draft, speculative(name, verify), params)
        assert total_variation(found, decoded(target, None, None, params)) < 1e-12


ILLEGAL = [pair for pair in product(GROWN, VERIFIERS) if pair not in LEGAL]


@pytest.mark.parametrize(("name", "verify"), ILLEGAL)
def test_the_config_refuses_every_other_pair(name: str, verify: str) -> None:
    with pytest.raises(ConfigError, match="not lossless"):
        speculative(name, verify)


def sample(prompt: Sequence[int], seed: int, config: SpeculativeConfig) -> list[int]:
    target, draft = pair(5, 8)
    sampler = Sampler(SamplingParams(max_tokens=20), prompt, (), 8)
    decoder = SpeculativeDecoder(target, draft, config, 4096, ())
    chunks = decoder.generate(prompt, sampler, seeded_streams(seed), SpecDecodeStats())
    return [token for chunk in chunks for token in chunk.token_ids]


@pytest.mark.parametrize(("name", "verify"), LEGAL)
def test_a_seed_gives_the_same_text_every_time(name: str, verify: str) -> None:
    config = speculative(name, verify)
    assert sample(PROMPT, 7, config) == sample(PROMPT, 7, config)
    assert sample(PROMPT, 7, config) != sample(PROMPT, 8, config)
