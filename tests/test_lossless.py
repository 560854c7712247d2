"""The output distribution is the target's own: exact enumeration of every random outcome of the real decoder."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from fakes import FakeEngine, mixture, random_head, random_model
from numpy.typing import NDArray

from draftwood.models.errors import ConfigError
from draftwood.runtime.decoder import SpeculativeDecoder
from draftwood.runtime.metrics import SpecDecodeStats
from draftwood.runtime.random import RandomStreams, seeded_streams
from draftwood.runtime.sampling import Sampler, SamplingParams
from draftwood.runtime.speculation.baseline import StaticTree
from draftwood.runtime.speculation.config import LOSSLESS, VERIFIERS, SpeculativeConfig

PROMPT = (0, 1)
Distribution = dict[tuple[int, ...], float]


class ReplayedStream:
    """Follows a script of decisions and then takes the first possible one, noting the alternatives."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.taken, self.options = script, 0, list[list[int]]()
        self.probability = 1.0

    def categorical(self, probabilities: NDArray[np.float64]) -> int:
        assert abs(probabilities.sum() - 1) < 1e-9, "a draw from something that is no distribution"
        return self._decide([(index, p) for index, p in enumerate(probabilities.tolist()) if p > 0])

    def bernoulli(self, probability: float) -> bool:
        assert -1e-12 <= probability <= 1 + 1e-12
        return bool(self._decide([(i, p) for i, p in ((1, probability), (0, 1 - probability)) if p > 0]))

    def _decide(self, choices: list[tuple[int, float]]) -> int:
        chosen = self.script[self.taken] if self.taken < len(self.script) else 0
        self.options.append(list(range(len(choices))))
        self.taken += 1
        self.probability *= choices[chosen][1]
        return choices[chosen][0]


def outcomes(run: Callable[[RandomStreams], tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every outcome of `run` with its probability: depth-first over all decisions."""
    scripts: list[list[int]] = [[]]
    while scripts:
        script = scripts.pop()
        stream = ReplayedStream(script)
        result = run(RandomStreams(stream, stream, stream))
        yield result, stream.probability
        for position in range(len(script), stream.taken):
            for choice in stream.options[position][1:]:
                scripts.append(script + [0] * (position - len(script)) + [choice])


def decoded(
    target: FakeEngine, draft: FakeEngine | None, config: SpeculativeConfig | None, params: SamplingParams
) -> Distribution:
    """The exact distribution of the decoder's output."""

    def run(streams: RandomStreams) -> tuple[int, ...]:
        sampler = Sampler(params, PROMPT, (), target.spec.model.vocab_size)
        decoder = SpeculativeDecoder(target, draft, config, 4096, ())
        chunks = decoder.generate(PROMPT, sampler, streams, SpecDecodeStats())
        return tuple(token for chunk in chunks for token in chunk.token_ids)

    distribution: Distribution = defaultdict(float)
    for tokens, probability in outcomes(run):
        distribution[tokens] += probability
    assert abs(sum(distribution.values()) - 1) < 1e-9
    return distribution


def total_variation(a: Distribution, b: Distribution) -> float:
    return 0.5 * sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in {*a, *b})


def pair(seed: int, vocab_size: int) -> tuple[FakeEngine, FakeEngine]:
    truth = random_model(seed, vocab_size)
    guess = mixture(truth, random_model(seed + 1000, vocab_size), 0.6)
    draft = FakeEngine(guess, vocab_size, "draft", accept=random_head(seed))
    return FakeEngine(truth, vocab_size), draft


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
    "chain": {"grow": "chain"},
    "k-ary": {"grow": "k-ary"},
    "static": {"grow": "static", "topology": (0, 0, 2)},
    "topk": {"grow": "topk"},
    "topk merged": {"grow": "topk", "merge": "gsd", "merge_ngram": 1, "sibling_share": 0.2, "leaf_share": 0.1},
    "dyspec": {"grow": "dyspec"},
    "dyspec pruned": {"grow": "dyspec", "max_total_draft_tokens": 3},
    "dyspec-heap": {"grow": "dyspec-heap", "max_total_draft_tokens": 3},
    "dyspec-threshold": {"grow": "dyspec-threshold", "draft_threshold": 0.2},
    "dyspec merged": {"grow": "dyspec-threshold", "merge": "gsd", "merge_ngram": 1, "draft_threshold": 0.1},
    "chain, specdec++": {"grow": "chain", "stop_rule": "specdec++", "stop_threshold": 0.4},
    "chain, lagged": {"grow": "chain", "stop_rule": "specdec++-lagged", "stop_threshold": 0.4},
    "chain, confidence": {"grow": "chain", "stop_rule": "confidence", "stop_threshold": 0.4},
    "chain, entropy": {"grow": "chain", "stop_rule": "entropy", "stop_threshold": 0.3},
    "dyspec, specdec++": {"grow": "dyspec", "stop_rule": "specdec++", "stop_threshold": 0.5},
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


@pytest.mark.parametrize(("name", "verify", "setting"), CASES)
def test_every_legal_pair_is_exact(name: str, verify: str, setting: str) -> None:
    """I2: total variation from plain decoding below 1e-12, every verifier with every proposal it is allowed for."""
    params = SETTINGS[setting]
    for seed in range(2):
        target, draft = pair(seed, 3)
        expected = decoded(target, None, None, params)
        found = decoded(target, draft, speculative(name, verify), params)
        assert total_variation(found, expected) < 1e-12


ILLEGAL = [pair for pair in product(GROWN, VERIFIERS) if pair not in LEGAL]


@pytest.mark.parametrize(("name", "verify"), ILLEGAL)
def test_the_config_refuses_every_other_pair(name: str, verify: str) -> None:
    with pytest.raises(ConfigError, match="not lossless"):
        speculative(name, verify)


def test_negative_control_rejection_of_chosen_tokens_is_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    """p/q verification of tokens that were ranked, not drawn: the enumeration must see the bias."""
    grow_drawn = StaticTree.expand

    def greedy_expand(self, graph, nodes, output, sampler, stream):  # type: ignore[no-untyped-def]
        class ArgMax:
            def categorical(self, probabilities: NDArray[np.float64]) -> int:
                return int(probabilities.argmax())

        grow_drawn(self, graph, nodes, output, sampler, ArgMax())  # type: ignore[arg-type]

    monkeypatch.setattr(StaticTree, "expand", greedy_expand)
    target, draft = pair(0, 3)
    params = SETTINGS["plain"]
    found = decoded(target, draft, speculative("chain", "rejection"), params)
    assert total_variation(found, decoded(target, None, None, params)) > 1e-3


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
