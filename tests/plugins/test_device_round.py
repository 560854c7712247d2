"""Rounds by the kernels, executed from their PTX, against the host's own code."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import FakeCache
from scripted_rounds import DeviceRounds, Ranker, RankingEngine

from draftwood.runtime import SamplingParams
from draftwood.runtime.decoding.device import acceptance_of, tree_of
from draftwood.runtime.engines.passes import run
from draftwood.runtime.engines.rounds import RoundShape
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation.graph.token_graph import TokenGraph
from draftwood.runtime.speculation.graph.token_tree import TokenTree, unroll
from draftwood.runtime.speculation.growers.baseline import BestFirst
from draftwood.runtime.speculation.growers.gsd import NO_MERGER
from draftwood.runtime.speculation.growers.specdecpp import Fixed
from draftwood.runtime.speculation.proposer import DraftProposer
from draftwood.runtime.speculation.verifier import Acceptance, match_best

SHAPES = [RoundShape(1, 1, 1), RoundShape(4, 4, 1), RoundShape(3, 5, 2), RoundShape(5, 15, 4), RoundShape(4, 6, 3)]
PROMPT = (3, 1, 4, 1, 5)


class HostRounds:
    """The same rounds by the proposer and the verifier."""

    def __init__(self, shape: RoundShape, target: Ranker, draft: Ranker) -> None:
        self._shape, self._target = shape, RankingEngine(target)
        self._cache, self._proposer = FakeCache(), DraftProposer(RankingEngine(draft))
        self._cache.committed = list(PROMPT[:-1])
        self._root = PROMPT[-1]
        self._sampler = Sampler(SamplingParams(temperature=0), PROMPT, (), 3 * draft.columns)
        run(self._proposer.start(PROMPT))

    @property
    def pending(self) -> list[int]:
        return self._proposer.pending

    def run(self) -> tuple[TokenTree, Acceptance]:
        depth, size, width = self._shape
        graph, grower = TokenGraph(self._root), BestFirst(size, depth, width, NO_MERGER)
        run(self._proposer.propose(graph, grower, Fixed(), self._sampler, seeded_streams(0).draft, True))
        tree = unroll(graph, size, depth)
        output = self._target.score(tree.to_batch(self._target.spec, self._cache.length, True), self._cache)
        assert output.top_ids is not None
        acceptance = match_best(tree, output.top_ids[:, 0])
        self._cache.commit([0, *acceptance.rows])
        self._proposer.commit(tree, acceptance.rows, acceptance.next_token)
        self._root = acceptance.next_token
        return tree, acceptance


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("ties", [False, True], ids=["", "ties"])
def test_rounds_are_those_of_the_host(shape: RoundShape, ties: bool) -> None:
    """Trees, accepted paths, caches, and what the draft has not read: equal round after round, the first one queued,
    the others replayed. Equal values are ordered as the host orders them."""
    draft = Ranker(1, 6, ties)
    target = Ranker(2, 6, ties, draft)
    host, device = HostRounds(shape, target, draft), DeviceRounds(shape, target, draft, PROMPT)
    accepted = 0
    for _ in range(6):
        tree, acceptance = host.run()
        outcome = device.run()
        found = tree_of(outcome)
        for field in ("token_ids", "parents", "depths", "children", "merged", "certain"):
            assert getattr(found, field) == getattr(tree, field), field
        np.testing.assert_allclose(found.shares, tree.shares)
        assert acceptance_of(outcome) == acceptance
        assert device.pending == host.pending
        accepted += len(acceptance.rows)
    assert accepted > 3
    assert device.device.launches["synchronize"] == 6 and device.device.launches["replay"] == 5
