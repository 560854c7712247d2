"""No round proposes what max_tokens leaves no room for, and none hands out more: for every way to propose."""

from __future__ import annotations

import pytest
from fakes import FakeEngine, random_model
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.round import Round
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation.config import SpeculativeConfig

V, PROMPT = 4, (0, 1)
PROPOSALS = {
    "chain": SpeculativeConfig("chain", max_draft_len=6),
    "k-ary merged": SpeculativeConfig("k-ary", branching=(2, 2, 2), merge="gsd", merge_ngram=1, verify="match"),
    "topk merged": SpeculativeConfig("topk", merge="gsd", merge_ngram=1, max_total_draft_tokens=40, budget="fixed"),
    "dyspec": SpeculativeConfig("dyspec", budget="fixed"),
    "dyspec-heap": SpeculativeConfig("dyspec-heap", max_total_draft_tokens=24),
    "dyspec merged": SpeculativeConfig(
        "dyspec-threshold", merge="gsd", merge_ngram=1, draft_threshold=0.01, budget="fixed"
    ),
    "lookup": SpeculativeConfig("lookup", lookup_ngram=1, lookup_len=8),
}


@pytest.mark.parametrize("name", PROPOSALS)
@settings(max_examples=25)
@given(st.integers(0, 50), st.integers(1, 5), st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, V - 1))
def test_a_text_is_never_longer_than_asked_for(name: str, seed: int, limit: int, temperature: float, stop: int) -> None:
    model = random_model(seed, V, sharpness=3.0)
    params = SamplingParams(max_tokens=limit, temperature=temperature, stop_token_ids=(stop,))
    decoder = SpeculativeDecoder(FakeEngine(model, V), FakeEngine(model, V, "draft"), PROPOSALS[name], 4096, ())
    rounds: list[Round] = []
    tokens: list[int] = []
    sampler = Sampler(params, PROMPT, (), V)
    for chunk in decoder.generate(PROMPT, sampler, seeded_streams(seed), SpecDecodeStats(), rounds.append):
        proposal = rounds[-1].proposal
        assert max(*proposal.tree.depths, *proposal.graph.depths, 0) < max(1, limit - len(tokens))
        tokens += chunk.token_ids
    assert len(tokens) <= limit and stop not in tokens[:-1]
