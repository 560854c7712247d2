"""Rounds above temperature 0 by the kernels, which the driver in libcuda's place executes from their PTX, against the
host's own proposer and verifiers with the same uniform numbers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from cuda_driver.machine import Machine
from enumeration import Distribution, ReplayedStream, outcomes, total_variation
from fakes import FakeCache
from scripted_rounds import DeviceRounds, RankingEngine, Scorer
from uniforms import UniformStream, uniform_streams

from draftwood.models.errors import EngineError
from draftwood.plugins.device_round.images import image
from draftwood.runtime import SamplingParams
from draftwood.runtime.decoding.device import acceptance_of, draws_of, tree_of, use_draws
from draftwood.runtime.engines.passes import run
from draftwood.runtime.engines.rounds import BLOCK, MATCH, RoundShape
from draftwood.runtime.engines.static import cuda
from draftwood.runtime.sampling.random import RandomStreams
from draftwood.runtime.sampling.sampler import Sampler, ScoredRows
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
        depth, size, width, verify, is_drawn, _ = self._shape
        graph = TokenGraph(self._root)
        grower: Grower = StaticTree(chain(depth)) if is_drawn else BestFirst(size, depth, width, NO_MERGER)
        run(self._proposer.propose(graph, grower, Fixed(), self._sampler, streams.draft))
        tree = unroll(graph, size, depth)
        output = self._target.score(tree.to_batch(self._target.spec, self._cache.length, False), self._cache)
        acceptance = VERIFIERS[verify](tree, ScoredRows(self._sampler, output.logits), streams)
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
    step: float = 0.0,
) -> int:
    """Rounds of the host and of the device, in turn. step: see Scorer. Returns the number of accepted tokens."""
    draft = Scorer(seed, len(kept_tokens) or num_logits, 18, step=step)
    target = Scorer(seed + 100, num_logits, 18, draft, kept_tokens, step=step)
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
    assert compared(gpu, SHAPES[name], SamplingParams(temperature=0.7)) > 0


KEPT = tuple(range(1, 700, 2))
SETTINGS = {
    "a trimmed draft": (SamplingParams(temperature=0.7), KEPT),
    "few likely tokens": (SamplingParams(temperature=1.0, min_p=0.2), ()),
    "nearly greedy": (SamplingParams(temperature=1e-6), ()),
    "top-p": (SamplingParams(temperature=0.6, top_p=0.9), ()),
    "top-p of a trimmed draft": (SamplingParams(temperature=0.8, top_p=0.5, min_p=0.01), KEPT),
    "top-p that needs unlikely tokens": (SamplingParams(temperature=1.0, top_p=1 - 1e-6), ()),
    "top-p of equal logits": (SamplingParams(temperature=1.0, top_p=0.6), ()),
    "nearly uniform": (SamplingParams(temperature=100.0), ()),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_rounds(name: str, gpu: Machine) -> None:
    params, kept = SETTINGS[name]
    shape = RoundShape(2, 2, 1, BLOCK, True, params.top_p < 1)
    step = 2.0 if "equal" in name else 0.0
    compared(gpu, shape, params, kept_tokens=kept, rounds=2, step=step)


@pytest.mark.full
def test_rounds_of_many_shapes(gpu: Machine) -> None:
    rng = np.random.default_rng(0)
    for seed in range(40):
        depth, params = int(rng.integers(1, 6)), SamplingParams(temperature=float(rng.uniform(0.2, 2.0)))
        verify = str(rng.choice([BLOCK, MATCH]))
        drawn = RoundShape(depth, depth, 1, verify, True)
        chosen = RoundShape(depth, int(rng.integers(1, 12)), int(rng.integers(1, 4)), MATCH)
        shape = chosen if rng.random() < 0.3 else drawn
        if rng.random() < 0.5:
            shape, params = shape._replace(is_cut=True), replace(params, top_p=float(rng.uniform(0.1, 1)))
        compared(gpu, shape, params, int(rng.integers(20, 2500)), seed=seed, step=float(rng.choice([0, 1])))


@pytest.mark.parametrize("damage", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_logits_that_are_no_numbers_are_an_error(role: str, damage: float, gpu: Machine) -> None:
    shape, params = SHAPES["a drawn token"], SamplingParams(temperature=1.0)
    target, draft = Scorer(1, 20, 18), Scorer(2, 20, 18)
    damaged = np.full(20, damage if damage < 0 else 1.0, np.float32)
    damaged[7] = damage
    broken = target if role == "target" else draft
    broken.logits, broken.after = lambda context: damaged, lambda context: (np.arange(18), np.zeros(18, np.float32))
    rounds = DeviceRounds(gpu, shape, target, draft, PROMPT)
    with pytest.raises(EngineError, match="NaN or infinite"):
        rounds.run(draws_of(shape, params, uniform_streams(0)))


# Less than this share of a cell of uniform numbers lies between its border and the nearest number that is tried.
EDGE = 1e-7
TOY = SamplingParams(temperature=0.8)


def measured(gpu: Machine, shape: RoundShape, num_logits: int = 3) -> tuple[Distribution, Distribution]:
    """The distribution of the first depth + 1 tokens, by rounds on the device followed by the target's own tokens; and
    the target's. The host's verifier divides the cube of uniform numbers into cells with one outcome each. The device
    runs near the two opposite corners of each cell: since every decision is a comparison with one uniform number, its
    cells are then the same but for EDGE."""
    draft = Scorer(5, num_logits, num_logits)
    target = Scorer(6, num_logits, num_logits, draft, share=0.5)
    device = DeviceRounds(gpu, shape, target, draft, PROMPT)
    cells: list[list[tuple[float, float]]] = []

    def cell(streams: RandomStreams) -> tuple[int, ...]:
        tree, acceptance = HostRounds(shape, target, draft, TOY, ()).run(streams)
        assert isinstance(streams.draft, ReplayedStream)
        cells.append(streams.draft.bounds)
        return (*(tree.token_ids[row] for row in acceptance.rows), acceptance.next_token)

    def probabilities(text: tuple[int, ...]) -> list[float]:
        weights = np.exp(target.logits((*PROMPT, *text)).astype(np.float64) / TOY.temperature)
        return [float(weight) for weight in weights / weights.sum()]

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
        bounds = cells[-1]
        tests = len(bounds) - most[0] - 1 if most[1] else 0
        for side in (EDGE, 1 - EDGE):
            numbers = [least + side * (greatest - least) for least, greatest in bounds]
            parts = numbers[: most[0]], numbers[most[0] : most[0] + tests], numbers[most[0] + tests :]
            unused = ([0.5] * (count - len(part)) for part, count in zip(parts, most, strict=True))
            streams = RandomStreams(*(UniformStream([*part, *more]) for part, more in zip(parts, unused, strict=True)))
            device.restart(PROMPT)
            outcome = device.run(draws_of(shape, TOY, streams))
            tokens = (*(outcome.token_ids[row] for row in outcome.accepted), outcome.next_token)
            add(found, tokens, probability / 2)
    return found, expected


@pytest.mark.parametrize(
    "shape",
    [
        RoundShape(1, 1, 1, BLOCK, True),
        RoundShape(1, 2, 2, MATCH),
        pytest.param(RoundShape(2, 2, 1, BLOCK, True), marks=pytest.mark.full),
        pytest.param(RoundShape(2, 2, 1, MATCH, True), marks=pytest.mark.full),
        pytest.param(RoundShape(2, 4, 2, MATCH), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_outcomes_on_the_device_have_the_targets_distribution(shape: RoundShape, gpu: Machine) -> None:
    assert total_variation(*measured(gpu, shape)) < 1e-9


def changed(kernel: str, old: str, new: str, patch: pytest.MonkeyPatch) -> None:
    original = image(kernel)
    text = original._replace(text=original.text.replace(old, new))
    assert text.text != original.text
    patch.setattr(cuda, "image", lambda name: text if name == kernel else image(name))


def test_a_bias_would_be_noticed(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual without its sum: rejected tokens come from the target itself."""
    changed("excess", "sub.rn.f64", "add.rn.f64", monkeypatch)
    assert total_variation(*measured(gpu, RoundShape(1, 1, 1, BLOCK, True))) > 1e-3


@pytest.mark.parametrize(
    ("kernel", "old", "new"),
    [
        ("peaks", "max.f32", "min.f32"),
        ("weigh", "div.rn.f64", "mul.rn.f64"),  # the temperature
        ("extend", "setp.gt.f64", "setp.lt.f64"),  # the token of a uniform number
        ("chances", "min.f64", "max.f64"),
        ("excess", "max.f64", "min.f64"),
        ("gather", "setp.ge.f64", "setp.lt.f64"),
        ("cut", "setp.eq.b64", "setp.ne.b64"),
        ("accept", "sub.rn.f64", "add.rn.f64"),
    ],
)
def test_a_kernel_that_differs_would_be_noticed(
    kernel: str, old: str, new: str, gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(kernel, old, new, monkeypatch)
    with gpu.expecting(), pytest.raises((AssertionError, EngineError, RuntimeWarning)):
        params = SamplingParams(temperature=0.7, top_p=0.8 if kernel in ("gather", "cut") else 1.0)
        compared(gpu, RoundShape(2, 2, 1, BLOCK, True, params.top_p < 1), params, rounds=3)
