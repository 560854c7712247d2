"""The depth of planned trees: rounds on the device rely on it, since a captured graph has a fixed depth."""

from __future__ import annotations

import pytest
from fakes import FakeEngine, mixture, random_model

from draftwood.runtime import SamplingParams, SpecDecodeStats, SpeculativeConfig
from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.round import Proposal
from draftwood.runtime.decoding.state import RequestState
from draftwood.runtime.engines.passes import Works
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation.config import Rules
from draftwood.runtime.speculation.planning.controller import RoundPlan
from draftwood.runtime.speculation.planning.predicted import GPUS, PassSizes, predicted

COSTS = predicted(GPUS[0], PassSizes(8e9, 16e9, 131072), PassSizes(1.2e9, 2.5e9, 32768))
VOCABULARY, PROMPT = 24, (0, 1)


class NotingDecoder(SpeculativeDecoder):
    """depths: of each round with a tree, the planned depth and that of what the draft drew."""

    depths: list[tuple[int, int]]

    def _propose(self, request: RequestState, plan: RoundPlan | None, rules: Rules | None) -> Works[Proposal]:
        proposal = yield from super()._propose(request, plan, rules)
        if plan is not None and plan.depth:
            self.depths.append((plan.depth, max(proposal.graph.depths)))
        return proposal


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("share", [0.5, 0.65, 0.8, 0.9])
def test_a_planned_tree_reaches_its_depth(share: float, temperature: float) -> None:
    """share: of what draft and target have in common."""
    truth = random_model(1, VOCABULARY)
    draft = FakeEngine(mixture(truth, random_model(2, VOCABULARY), share), VOCABULARY, "draft")
    decoder = NotingDecoder(FakeEngine(truth, VOCABULARY), draft, SpeculativeConfig("dyspec"), 4096, (), COSTS)
    decoder.depths = []
    sampler = Sampler(SamplingParams(temperature=temperature, max_tokens=200), PROMPT, (), VOCABULARY)
    for _ in decoder.generate(PROMPT, sampler, seeded_streams(1), SpecDecodeStats()):
        pass
    planned, reached = (sum(each) for each in zip(*decoder.depths, strict=True))
    assert planned > 100 and reached > 0.95 * planned
