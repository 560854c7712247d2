"""The output distribution is the target's own: exact enumeration of every random outcome of the real decoder."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from enumeration import PROMPT, decoded, pair, total_variation

from draftwood.models.errors import ConfigError
from draftwood.runtime.decoder import SpeculativeDecoder
from draftwood.runtime.metrics import SpecDecodeStats
from draftwood.runtime.random import seeded_streams
from draftwood.runtime.sampling import Sampler, SamplingParams
from draftwood.runtime.speculation.config import LOSSLESS, VERIFIERS, SpeculativeConfig

SETTINGS = {
    "plain": SamplingParams(max_tokens=3),
    "greedy": SamplingParams(max_tokens=3, temperature=0),
    "cold": SamplingParams(max_tokens=3, temperature=0.6),
    "top-k": SamplingParams(max_tokens=3, top_k=2),
    "top-p": SamplingParams(max_tokens=3, top_p=0.8),
    "min-p": SamplingParams(max_tokens=3, min_p=0.3),
    "penalties": SamplingParams(max_tokens=3, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.7),
    "processor": SamplingParams(
        max_tokens=3, logits_processors=(lambda tokens, logits: logits + 0.8 * (np.arange(len(logits)) == len(tokens)),)
    ),
}
SMALL = {"max_draft_len": 2, "max_total_draft_tokens": 4, "frontier_width": 2, "branching": (2, 1)}
GROWN: dict[str, dict[str, Any]] = {
    "auto": {},
    "chain": {"grow": "chain"},
    "k-ary": {"grow": "k-ary"},
    "static": {"grow": "static", "topology": (0, 0, 2)},
    "topk": {"grow": "topk"},
    "topk merged": {"grow": "topk", "merge": "gsd", "merge_ngram": 1, "sibling_share": 0.2, "leaf_share": 0.1},
    "dyspec": {"grow": "dyspec", "key": "draft"},
    "dyspec pruned": {"grow": "dyspec", "key": "draft", "max_total_draft_tokens": 3},
    "dyspec-heap": {"grow": "dyspec-heap", "key": "draft", "max_total_draft_tokens": 3},
    "dyspec-threshold": {"grow": "dyspec-threshold", "draft_threshold": 0.2},
    "dyspec merged": {"grow": "dyspec-threshold", "merge": "gsd", "merge_ngram": 1, "draft_threshold": 0.1},
    "layers merged": {"grow": "dyspec", "merge": "gsd", "merge_ngram": 1, "key": "draft"},
    "heap merged": {"grow": "dyspec-heap", "merge": "gsd", "merge_ngram": 1, "max_total_draft_tokens": 3},
    "k-ary merged": {"grow": "k-ary", "merge": "gsd", "merge_ngram": 1},
    "dyspec calibrated": {"grow": "dyspec", "key": "calibrated", "max_total_draft_tokens": 3},
    "merged calibrated": {
        "grow": "dyspec-threshold",
        "merge": "gsd",
        "merge_ngram": 1,
        "draft_threshold": 0.1,
        "key": "calibrated",
    },
    "dyspec by head": {"grow": "dyspec", "key": "head"},
    "heap by head": {"grow": "dyspec-heap", "key": "head", "max_total_draft_tokens": 3},
    "merged by head": {
        "grow": "dyspec-threshold",
        "merge": "gsd",
        "merge_ngram": 1,
        "draft_threshold": 0.1,
        "key": "head",
    },
    "chain, specdec++": {"grow": "chain", "stop_rule": "specdec++", "rejection_threshold": 0.4},
    "chain, lagged": {"grow": "chain", "stop_rule": "specdec++-lagged", "rejection_threshold": 0.4},
    "chain, confidence": {"grow": "chain", "stop_rule": "confidence", "confidence_threshold": 0.4},
    "chain, entropy": {"grow": "chain", "stop_rule": "entropy", "entropy_threshold": 0.3},
    "dyspec, specdec++": {"grow": "dyspec", "stop_rule": "specdec++", "rejection_threshold": 0.5},
    "merged, specdec++": {
        "grow": "dyspec-threshold",
        "merge": "gsd",
        "merge_ngram": 1,
        "draft_threshold": 0.1,
        "stop_rule": "specdec++",
    },
    "chain, lookup": {"grow": "chain", "lookup_ngram": 1, "lookup_len": 2},
    "dyspec, lookup": {"grow": "dyspec", "lookup_ngram": 1, "lookup_len": 1, "max_total_draft_tokens": 3},
    "topk, lookup": {"grow": "topk", "lookup_ngram": 1},
}


def speculative(name: str, verify: str) -> SpeculativeConfig:
    return SpeculativeConfig(**{**SMALL, **GROWN[name], "verify": verify})


LEGAL = [(name, verify) for name in GROWN for verify in LOSSLESS[speculative(name, "auto").proposal]]
EVERY_SETTING = ("chain", "k-ary", "topk", "dyspec", "dyspec merged")  # the other ones share their draws with these
CASES = [
    (name, verify, setting)
    for name, verify in LEGAL
    for setting in (SETTINGS if name in EVERY_SETTING and verify != "match" else ("plain", "penalties"))
]


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
