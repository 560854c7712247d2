"""Rounds above temperature 0 by the kernels, which the driver in libcuda's place executes from their PTX, against the
host's own proposer and verifiers with the same uniform numbers."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_driver.machine import Machine
from fakes import FakeCache
from scripted_rounds import DeviceRounds, RankingEngine, Scorer
from uniforms import UniformStream, uniform_streams

from draftwood.runtime import SamplingParams
from draftwood.runtime.decoding.device import acceptance_of, draws_of, tree_of, use_draws
from draftwood.runtime.engines.passes import run
from draftwood.runtime.engines.rounds import BLOCK, MATCH, RoundShape
from draftwood.runtime.sampling.random import RandomStreams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation.config import VERIFIERS
from draftwood.runtime.speculation.graph.token_graph import TokenGraph
from draftwood.runtime.speculation.graph.token_tree import TokenTree, unroll
from draftwood.runtime.speculation.growers.baseline import BestFirst, Grower, StaticTree, chain
from draftwood.runtime.speculation.growers.gsd import NO_MERGER
from draftwood.runtime.speculation.growers.specdecpp import Fixed
from draftwood.runtime.speculation.proposer import DraftProposer
from draftwood.runtime.speculation.verifier import Acceptance

pytestmark = pytest.mark.usefixtures("no_faults")

PROMPT = (3, 1, 4, 1, 5)
SHAPES = {
    "a drawn chain": RoundShape(4, 4, 1, BLOCK, True),
    "a drawn token": RoundShape(1, 1, 1, BLOCK, True),
    "a drawn chain that must match": RoundShape(3, 3, 1, MATCH, True),
    "a chosen chain": RoundShape(3, 3, 1, MATCH),
    "a chosen tree": RoundShape(3, 9, 3, MATCH),
}


class HostRounds:
    """The same rounds by the proposer and the verifier."""

    def __init__(
        self, shape: RoundShape, target: Scorer, draft: Scorer, params: SamplingParams, kept_tokens: tuple[int, ...]
    ) -> None:
        vocabulary = target.num_logits
        self._shape, self._target = shape, RankingEngine(target, vocabulary)
        self._cache, self._proposer = FakeCache(), DraftProposer(RankingEngine(draft, vocabulary, kept_tokens))
        self._cache.committed = list(PROMPT[:-1])
        self._root = PROMPT[-1]
        self._sampler = Sampler(params, PROMPT, (), vocabulary)
        run(self._proposer.start(PROMPT))

    @property
    def pending(self) -> list[int]:
        return self._proposer.pending

    def run(self, streams: RandomStreams) -> tuple[TokenTree, Acceptance]:
        depth, size, width, verify, is_drawn = self._shape
        graph = TokenGraph(self._root)
        grower: Grower = StaticTree(chain(depth)) if is_drawn else BestFirst(size, depth, width, NO_MERGER)
        run(self._proposer.propose(graph, grower, Fixed(), self._sampler, streams.draft))
        tree = unroll(graph, size, depth)
        output = self._target.score(tree.to_batch(self._target.spec, self._cache.length, False), self._cache)
        acceptance = VERIFIERS[verify](tree, output.logits, self._sampler, streams)
        self._cache.commit([0, *acceptance.rows])
        self._proposer.commit(tree, acceptance.rows, acceptance.next_token)
        self._root = acceptance.next_token
        return tree, acceptance


def compared(
    gpu: Machine,
    shape: RoundShape,
    params: SamplingParams,
    num_logits: int = 700,
    kept_tokens: tuple[int, ...] = (),
    seed: int = 1,
    rounds: int = 5,
) -> int:
    """Rounds of the host and of the device, in turn. Returns the number of accepted tokens."""
    draft = Scorer(seed, len(kept_tokens) or num_logits, 18)
    target = Scorer(seed + 100, num_logits, 18, draft, kept_tokens)
    host = HostRounds(shape, target, draft, params, kept_tokens)
    device = DeviceRounds(gpu, shape, target, draft, PROMPT, kept_tokens)
    ours, theirs = uniform_streams(seed), uniform_streams(seed)
    accepted = 0
    for _ in range(rounds):
        tree, acceptance = host.run(ours)
        outcome = device.run(draws_of(shape, params, theirs))
        found = tree_of(outcome)
        for field in ("token_ids", "parents", "depths", "children"):
            assert getattr(found, field) == getattr(tree, field), field
        np.testing.assert_allclose(found.shares, tree.shares, rtol=1e-9)
        assert acceptance_of(outcome) == acceptance
        assert device.pending == host.pending
        use_draws(shape, acceptance, theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert isinstance(mine, UniformStream) and isinstance(other, UniformStream)
            assert mine.taken == other.taken
        accepted += len(acceptance.rows)
    return accepted


@pytest.mark.parametrize("name", SHAPES)
def test_rounds_are_those_of_the_host(name: str, gpu: Machine) -> None:
    """Trees, probabilities, accepted paths, caches, and how many uniform numbers were used."""
    assert compared(gpu, SHAPES[name], SamplingParams(temperature=0.7)) > 1
