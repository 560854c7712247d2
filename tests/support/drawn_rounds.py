"""Rounds above temperature 0, by the host's proposer and verifiers, and by the kernels, which the driver in libcuda's
place executes from their PTX."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
from cuda_driver.machine import Machine
from enumeration import Distribution, ReplayedStream, outcomes
from fakes import FakeCache
from scripted_rounds import DeviceRounds, RankingEngine, Scorer
from uniforms import UniformStream, uniform_streams

from draftwood.plugins.device_round.images import image
from draftwood.runtime import SamplingParams
from draftwood.runtime.decoding.whole_rounds import (
    acceptance_of,
    draws_of,
    settings_of,
    tree_of,
    uniforms_of,
    use_draws,
)
from draftwood.runtime.engines.passes import run
from draftwood.runtime.engines.rounds import RoundDraws, RoundShape
from draftwood.runtime.engines.static import cuda
from draftwood.runtime.sampling.random import RandomStreams
from draftwood.runtime.sampling.sampler import Sampler, ScoredRows
from draftwood.runtime.speculation.graph.token_graph import TokenGraph
from draftwood.runtime.speculation.graph.token_tree import TokenTree, unroll
from draftwood.runtime.speculation.growers.baseline import BestFirst, Grower, StaticTree, chain
from draftwood.runtime.speculation.growers.dyspec import DySpecLayers
from draftwood.runtime.speculation.growers.gsd import NO_MERGER
from draftwood.runtime.speculation.growers.specdecpp import Fixed
from draftwood.runtime.speculation.planning.calibration import Calibration
from draftwood.runtime.speculation.proposer import DraftProposer
from draftwood.runtime.speculation.verifier import VERIFIERS, Acceptance

PROMPT = (3, 1, 4, 1, 5)


class HostRounds:
    """The same rounds by the proposer and the verifier."""

    def __init__(
        self, shape: RoundShape, target: Scorer, draft: Scorer, params: SamplingParams, kept_tokens: tuple[int, ...]
    ) -> None:
        vocabulary = target.num_logits
        self._shape, self._target = shape, RankingEngine(target, vocabulary)
        self._cache, self._text = FakeCache(), list(PROMPT)
        self._proposer = DraftProposer(RankingEngine(draft, vocabulary, kept_tokens), self._text)
        self._cache.committed = list(PROMPT[:-1])
        self._sampler = Sampler(params, PROMPT, (), vocabulary)
        run(self._proposer.read())
        self.calibration = Calibration()

    @property
    def pending(self) -> list[int]:
        return self._proposer.pending

    def run(self, streams: RandomStreams) -> tuple[TokenTree, Acceptance]:
        depth, size, width, verify, is_drawn, _, is_tree = self._shape
        graph = TokenGraph(self._text[-1])
        grower: Grower = StaticTree(chain(depth)) if is_drawn else BestFirst(size, depth, width, NO_MERGER)
        if is_tree:
            grower = DySpecLayers(size, depth, width, self.calibration)
        run(self._proposer.propose(graph, grower, Fixed(), self._sampler, streams.draft))
        self.num_drawn = len(graph) - 1 if is_drawn else 0
        tree = unroll(graph, size, depth)
        output = self._target.score(tree.to_batch(self._target.spec, self._cache.length, False), self._cache)
        acceptance = VERIFIERS[verify](tree, ScoredRows(self._sampler, output.logits), streams)
        self._cache.commit([0, *acceptance.rows])
        self._proposer.commit(tree, acceptance.rows)
        self._text += [*(tree.token_ids[row] for row in acceptance.rows), acceptance.next_token]
        self.calibration.update(tree, acceptance.rows)
        return tree, acceptance


def numbers_of(
    shape: RoundShape, params: SamplingParams, streams: RandomStreams, calibration: Calibration | None = None
) -> RoundDraws:
    """What a round of this shape draws with."""
    settings = settings_of(params)
    assert settings is not None, "at temperature 0 nothing is drawn"
    return draws_of(shape, shape.most_draws, settings, uniforms_of(streams), calibration)


def compared(
    gpu: Machine,
    shape: RoundShape,
    params: SamplingParams,
    num_logits: int = 700,
    kept_tokens: tuple[int, ...] = (),
    seed: int = 1,
    rounds: int = 5,
    step: float = 0.0,
    share: float = 0.8,
) -> int:
    """Rounds of the host and of the device, in turn. step, share: see Scorer. Returns the number of accepted tokens."""
    draft = Scorer(seed, len(kept_tokens) or num_logits, 18, step=step)
    target = Scorer(seed + 100, num_logits, 18, draft, kept_tokens, share, step)
    host = HostRounds(shape, target, draft, params, kept_tokens)
    device = DeviceRounds(gpu, shape, target, draft, PROMPT, kept_tokens)
    ours, theirs = uniform_streams(seed), uniform_streams(seed)
    accepted = 0
    learned = Calibration()
    for _ in range(rounds):
        tree, acceptance = host.run(ours)
        outcome = device.run(numbers_of(shape, params, theirs, learned))
        found = tree_of(outcome)
        for field in ("token_ids", "parents", "depths", "children"):
            assert getattr(found, field) == getattr(tree, field), field
        np.testing.assert_allclose(found.shares, tree.shares, rtol=1e-9)
        assert acceptance_of(outcome) == acceptance
        assert device.pending == host.pending
        use_draws(outcome, uniforms_of(theirs))
        for mine, other in zip(ours, theirs, strict=True):
            assert isinstance(mine, UniformStream) and isinstance(other, UniformStream)
            assert mine.taken == other.taken
        learned.update(found, acceptance.rows)
        accepted += len(acceptance.rows)
    return accepted


# Less than this share of a cell of uniform numbers lies between its border and the nearest number that is tried.
EDGE = 1e-7
TOY = SamplingParams(temperature=0.8)


def measured(
    gpu: Machine, shape: RoundShape, num_logits: int = 3, params: SamplingParams = TOY
) -> tuple[Distribution, Distribution]:
    """The distribution of the first depth + 1 tokens, by rounds on the device followed by the target's own tokens; and
    the target's. The host's verifier divides the cube of uniform numbers into cells with one outcome each. The device
    runs near the two opposite corners of each cell: since every decision is a comparison with one uniform number, its
    cells are then the same but for EDGE."""
    draft = Scorer(5, num_logits, num_logits)
    target = Scorer(6, num_logits, num_logits, draft, share=0.5)
    device, sampler = DeviceRounds(gpu, shape, target, draft, PROMPT), Sampler(params, PROMPT, (), num_logits)
    cells: list[tuple[int, list[tuple[float, float]]]] = []

    def cell(streams: RandomStreams) -> tuple[int, ...]:
        host = HostRounds(shape, target, draft, params, ())
        tree, acceptance = host.run(streams)
        assert isinstance(streams.draft, ReplayedStream)
        cells.append((host.num_drawn, streams.draft.bounds))
        return (*(tree.token_ids[row] for row in acceptance.rows), acceptance.next_token)

    def probabilities(text: tuple[int, ...]) -> list[float]:
        return [float(each) for each in sampler.distribution(target.logits((*PROMPT, *text)), ())]

    found, expected = defaultdict[tuple[int, ...], float](float), defaultdict[tuple[int, ...], float](float)

    def add(into: Distribution, text: tuple[int, ...], share: float) -> None:
        """With what the target says after `text`."""
        if len(text) == shape.depth + 1:
            into[text] += share
            return
        for token, probability in enumerate(probabilities(text)):
            add(into, (*text, token), share * probability)

    add(expected, (), 1.0)
    most = shape.most_draws
    for _, probability in outcomes(cell):
        drawn, bounds = cells[-1]
        tests = len(bounds) - drawn - 1 if most[1] else 0
        for side in (EDGE, 1 - EDGE):
            numbers = [least + side * (greatest - least) for least, greatest in bounds]
            parts = numbers[:drawn], numbers[drawn : drawn + tests], numbers[drawn + tests :]
            unused = ([0.5] * (count - len(part)) for part, count in zip(parts, most, strict=True))
            streams = RandomStreams(*(UniformStream([*part, *more]) for part, more in zip(parts, unused, strict=True)))
            device.restart(PROMPT)
            outcome = device.run(numbers_of(shape, params, streams, Calibration()))
            add(found, tuple(outcome.written), probability / 2)
    return found, expected


def changed(kernels: Sequence[str], old: str, new: str, patch: pytest.MonkeyPatch) -> None:
    """Run another text of these kernels' PTX."""
    texts = {name: image(name)._replace(text=image(name).text.replace(old, new)) for name in kernels}
    assert all(text.text != image(name).text for name, text in texts.items())
    patch.setattr(cuda, "image", lambda name: texts.get(name) or image(name))
