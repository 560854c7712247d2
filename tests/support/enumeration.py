"""Exact distributions: every random outcome of the real decoder, with its probability."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from fakes import FakeEngine, mixture, random_head, random_model
from numpy.typing import NDArray

from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.sampling.constraint import Constraint
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import RandomStreams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation.config import SpeculativeConfig
from draftwood.runtime.speculation.planning.cost import CostModel

PROMPT = (0, 1)
Distribution = dict[tuple[int, ...], float]


class ReplayedStream:
    """Follows a script of decisions and then takes the first possible one, noting the alternatives. bounds: between
    which uniform numbers each decision lies, if the first of its choices has the least numbers."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.taken, self.options = script, 0, list[list[int]]()
        self.bounds = list[tuple[float, float]]()
        self.probability = 1.0

    def categorical(self, probabilities: NDArray[np.floating[Any]]) -> int:
        total = float(probabilities.sum(dtype=np.float64))
        rounding = 1e-9 if probabilities.dtype == np.float64 else 1e-6
        assert abs(total - 1) < rounding, "a draw from something that is no distribution"
        return self._decide([(index, p / total) for index, p in enumerate(probabilities.tolist()) if p > 0])

    def bernoulli(self, probability: float) -> bool:
        assert -1e-12 <= probability <= 1 + 1e-12
        return bool(self._decide([(i, p) for i, p in ((1, probability), (0, 1 - probability)) if p > 0]))

    def _decide(self, choices: list[tuple[int, float]]) -> int:
        chosen = self.script[self.taken] if self.taken < len(self.script) else 0
        self.options.append(list(range(len(choices))))
        self.taken += 1
        self.probability *= choices[chosen][1]
        least = sum(probability for _, probability in choices[:chosen])
        self.bounds.append((least, least + choices[chosen][1]))
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
    target: FakeEngine,
    draft: FakeEngine | None,
    config: SpeculativeConfig | None,
    params: SamplingParams,
    costs: CostModel | None = None,
    constraint: Callable[[], Constraint] | None = None,
    eos: tuple[int, ...] = (),
    bad_words: Sequence[Sequence[int]] = (),
    prompt: Sequence[int] = PROMPT,
) -> Distribution:
    """The exact distribution of the decoder's output. constraint: makes the grammar of each text. bad_words: their
    tokens."""

    def run(streams: RandomStreams) -> tuple[int, ...]:
        grammar = None if constraint is None else constraint()
        sampler = Sampler(params, prompt, eos, target.spec.model.vocab_size, grammar, bad_words)
        decoder = SpeculativeDecoder(target, draft, config, 4096, eos, costs)
        chunks = decoder.generate(prompt, sampler, streams, SpecDecodeStats())
        return tuple(token for chunk in chunks for token in chunk.token_ids)

    distribution: Distribution = defaultdict(float)
    for tokens, probability in outcomes(run):
        distribution[tokens] += probability
    assert abs(sum(distribution.values()) - 1) < 1e-9
    return distribution


def total_variation(a: Distribution, b: Distribution) -> float:
    return 0.5 * sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in {*a, *b})


def pair(seed: int, vocab_size: int, kept_tokens: tuple[int, ...] = ()) -> tuple[FakeEngine, FakeEngine]:
    """A target and a draft; kept_tokens: those that a trimmed draft predicts."""
    truth = random_model(seed, vocab_size)
    guess = mixture(truth, random_model(seed + 1000, vocab_size), 0.6)
    draft = FakeEngine(guess, vocab_size, "draft", accept=random_head(seed), kept_tokens=kept_tokens)
    return FakeEngine(truth, vocab_size), draft
