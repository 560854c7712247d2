"""Explained texts of small random models, decoded with every kind of proposal."""

from __future__ import annotations

import math

from fakes import FakeEngine, mixture, random_head, random_model

from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.round import Observer, Round
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.inspection.explain import Explanation, RoundRecorder
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation.config import SpeculativeConfig
from draftwood.runtime.speculation.planning.cost import CostModel

V, PROMPT = 6, (0, 1, 2)
GREEDY = SamplingParams(max_tokens=24, temperature=0)
WARM = SamplingParams(max_tokens=24, temperature=0.8)
EVIL = "<script>alert(\"1\")</script> & 'x'"
MERGED = SpeculativeConfig("topk", merge="gsd", max_total_draft_tokens=20, max_draft_len=6, frontier_width=4)
CONFIGS = {
    "chain": SpeculativeConfig("chain"),
    "topk": SpeculativeConfig("topk"),
    "gsd": MERGED,
    "k-ary": SpeculativeConfig("k-ary"),
    "dyspec": SpeculativeConfig("dyspec"),
    "heap": SpeculativeConfig("dyspec-heap"),
    "drawn gsd": SpeculativeConfig("dyspec-threshold", merge="gsd", draft_threshold=0.02, max_total_draft_tokens=30),
    "specdec++": SpeculativeConfig("chain", stop_rule="specdec++", rejection_threshold=0.5),
    "lookup": SpeculativeConfig("lookup", lookup_ngram=1),
    "plain": None,
}


def decode(
    config: SpeculativeConfig | None,
    params: SamplingParams,
    observe: Observer | None = None,
    costs: CostModel | None = None,
) -> list[int]:
    """The tokens that a decoder over two random models generates."""
    model = random_model(1, V)
    target = FakeEngine(model, V)
    draft = FakeEngine(mixture(model, random_model(2, V), 0.7), V, "draft", accept=random_head(3))
    decoder = SpeculativeDecoder(target, draft, config, 4096, (), costs)
    sampler = Sampler(params, PROMPT, (), V)
    chunks = list(decoder.generate(PROMPT, sampler, seeded_streams(7), SpecDecodeStats(), observe))
    return [token for chunk in chunks for token in chunk.token_ids]


def explained(
    config: SpeculativeConfig | None,
    params: SamplingParams,
    costs: CostModel | None = None,
    max_nodes: float = math.inf,
) -> tuple[Explanation, list[Round]]:
    """The explanation of such a text, and the rounds that the recorder observed."""
    recorder, rounds = RoundRecorder(lambda token: EVIL if token == 0 else f"w{token} ", max_nodes), list[Round]()

    def observe(round: Round) -> bool:
        rounds.append(round)
        return recorder.observe(round)

    decode(config, params, observe, costs)
    return recorder.explanation("a < b", config, params, SpecDecodeStats()), rounds
