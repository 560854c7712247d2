"""Rounds by the host's proposer and verifiers, and by the kernels, which the driver in libcuda's place executes from
their PTX."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from cuda_driver.machine import Machine
from enumeration import Distribution, ReplayedStream, outcomes
from fakes import FakeCache
from scripted_rounds import VOCABULARY, DeviceRounds, RankingEngine, Scorer
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
from draftwood.runtime.engines.rounds import BEST, RoundDraws, RoundShape
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
from draftwood.runtime.speculation.verifier import VERIFIERS, Acceptance, match_best

PROMPT = (3, 1, 4, 1, 5)
GREEDY = SamplingParams(temperature=0)
Models = tuple[Scorer, Scorer]  # target and draft


def scoring(
    seed: int = 1,
    num_logits: int = 700,
    kept_tokens: Sequence[int] = (),
    step: float = 0.0,
    share: float = 0.8,
    columns: int = 18,
    gaps: bool = False,
) -> Models:
    """See Scorer."""
    draft = Scorer(seed, len(kept_tokens) or num_logits, columns, step=step, gaps=gaps)
    return Scorer(seed + 100, num_logits, columns, draft, kept_tokens, share, step, gaps), draft


def ranking(seed: int = 1, ties: bool = False, kept_tokens: Sequence[int] = ()) -> Models:
    """For rounds at temperature 0."""
    return scoring(seed, VOCABULARY, kept_tokens, 1.0 if ties else 0.0, columns=6, gaps=True)


class HostRounds:
    """The rounds of a text by the proposer and the verifier."""

    def __init__(
        self, shape: RoundShape, models: Models, params: SamplingParams, kept_tokens: Sequence[int], text: Sequence[int]
    ) -> None:
        target, draft = models
        vocabulary = target.num_logits
        self._shape, self._target = shape, RankingEngine(target, vocabulary)
        self._cache, self._text = FakeCache(), list(text)
        self._proposer = DraftProposer(RankingEngine(draft, vocabulary, tuple(kept_tokens)), self._text)
        self._cache.committed = list(text[:-1])
        self._sampler = Sampler(params, text, (), vocabulary)
        run(self._proposer.read())
        self.calibration = Calibration()

    @property
    def pending(self) -> list[int]:
        return self._proposer.pending

    def run(self, streams: RandomStreams) -> tuple[TokenTree, Acceptance]:
        depth, size, width, verify, is_drawn, _, is_tree = self._shape
        graph, is_best = TokenGraph(self._text[-1]), verify == BEST
        grower: Grower = StaticTree(chain(depth)) if is_drawn else BestFirst(size, depth, width, NO_MERGER)
        if is_tree:
            grower = DySpecLayers(size, depth, width, self.calibration)
        run(self._proposer.propose(graph, grower, Fixed(), self._sampler, streams.draft, is_best))
        self.num_drawn = len(graph) - 1 if is_drawn else 0
        tree = unroll(graph, size, depth)
        output = self._target.score(tree.to_batch(self._target.spec, self._cache.length, is_best), self._cache)
        assert output.top_ids is not None
        rows = ScoredRows(self._sampler, output.logits)
        acceptance = match_best(tree, output.top_ids[:, 0]) if is_best else VERIFIERS[verify](tree, rows, streams)
        self._cache.commit([0, *acceptance.rows])
        self._proposer.commit(tree, acceptance.rows)
        self._text += [*(tree.token_ids[row] for row in acceptance.rows), acceptance.next_token]
        self.calibration.update(tree, acceptance.rows)
        return tree, acceptance


def numbers_of(
    shape: RoundShape, params: SamplingParams, streams: RandomStreams, calibration: Calibration | None = None
) -> RoundDraws | None:
    """What a round of this shape draws with; None at temperature 0."""
    settings = settings_of(params)
    return None if settings is None else draws_of(shape, settings, uniforms_of(streams), calibration)


def compared(
    gpu: Machine,
    shape: RoundShape,
    models: Models,
    params: SamplingParams = GREEDY,
    kept_tokens: Sequence[int] = (),
    texts: Sequence[Sequence[int]] = (PROMPT,),
    rounds: int = 6,
    seed: int = 1,
    **area: Any,
) -> int:
    """Rounds of the host, text by text, and of the device, in turn; the first one is queued, the others are replayed.
    area: see DeviceRounds. Returns the number of accepted tokens."""
    hosts = [HostRounds(shape, models, params, kept_tokens, text) for text in texts]
    device = DeviceRounds(gpu, shape, *models, texts, kept_tokens, **area)
    ours, theirs = uniform_streams(seed), uniform_streams(seed)
    accepted, learned, is_best = 0, Calibration(), shape.verify == BEST
    gpu.counts.clear()
    for _ in range(rounds):
        for host, outcome in zip(hosts, device.run(numbers_of(shape, params, theirs, learned)), strict=True):
            tree, acceptance = host.run(ours)
            found = tree_of(outcome)
            for field in ("token_ids", "parents", "depths", "children", *(("merged",) if is_best else ())):
                assert getattr(found, field) == getattr(tree, field), field
            np.testing.assert_allclose(found.shares, tree.shares, rtol=1e-7 if is_best else 1e-9)
            assert acceptance_of(outcome) == acceptance
            if not is_best:
                use_draws(outcome, uniforms_of(theirs))
                learned.update(found, acceptance.rows)
            for mine, other in zip(ours, theirs, strict=True):
                assert isinstance(mine, UniformStream) and isinstance(other, UniformStream)
                assert mine.taken == other.taken
            accepted += len(acceptance.rows)
        assert device.pending == [host.pending for host in hosts]
    assert gpu.counts["wait"] == rounds and gpu.counts["graph"] == rounds - 1
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
    device, sampler = DeviceRounds(gpu, shape, target, draft, [PROMPT]), Sampler(params, PROMPT, (), num_logits)
    cells: list[tuple[int, list[tuple[float, float]]]] = []

    def cell(streams: RandomStreams) -> tuple[int, ...]:
        host = HostRounds(shape, (target, draft), params, (), PROMPT)
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
            device.restart([PROMPT])
            (outcome,) = device.run(numbers_of(shape, params, streams, Calibration()))
            add(found, tuple(outcome.written), probability / 2)
    return found, expected


def changed(kernel: str, old: str, new: str, patch: pytest.MonkeyPatch) -> None:
    """Run another text of a kernel's PTX."""
    original = image(kernel)
    other = original._replace(text=original.text.replace(old, new))
    assert other.text != original.text
    before = vars(cuda)["image"]
    patch.setattr(cuda, "image", lambda name: other if name == kernel else before(name))
