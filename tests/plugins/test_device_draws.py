"""Rounds above temperature 0 by the kernels, which the driver in libcuda's place executes from their PTX, against the
host's own proposer and verifiers with the same uniform numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from compared_rounds import PROMPT, changed, compared, measured, numbers_of, scoring
from cuda_driver.machine import Machine
from enumeration import total_variation
from scripted_rounds import DeviceRounds, Scorer
from uniforms import uniform_streams

from draftwood.models.errors import EngineError
from draftwood.plugins.device_round import images
from draftwood.runtime import SamplingParams
from draftwood.runtime.decoding.whole_rounds import is_cut
from draftwood.runtime.engines.rounds import BLOCK, MATCH, REJECTION, TRAVERSAL, RoundShape
from draftwood.runtime.speculation.planning import calibration

pytestmark = pytest.mark.usefixtures("no_faults")

WARM, KEPT = SamplingParams(temperature=0.7), tuple(range(1, 700, 2))
EXACT = (TRAVERSAL, REJECTION, MATCH)  # of drawn trees


def chain(depth: int, verify: str = BLOCK, is_cut: bool = False) -> RoundShape:
    """Of drawn tokens."""
    return RoundShape(depth, depth, 1, verify, True, is_cut)


def tree(depth: int, size: int, width: int, verify: str = TRAVERSAL, is_cut: bool = False) -> RoundShape:
    """Of drawn tokens."""
    return RoundShape(depth, size, width, verify, True, is_cut, True)


def chosen(depth: int, size: int, width: int) -> RoundShape:
    return RoundShape(depth, size, width, MATCH)


def full(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.full)


# Shape, settings, the tokens that a trimmed draft keeps, and rounds.
CASES = {
    "a drawn chain": (chain(4), WARM, (), 5),
    "a drawn token": (chain(1), WARM, (), 5),
    "a drawn chain that must match": (chain(3, MATCH), WARM, (), 5),
    "a chosen chain": (chosen(3, 3, 1), WARM, (), 5),
    "a chosen tree": (chosen(3, 9, 3), WARM, (), 5),
    "a trimmed draft": (chain(2), WARM, KEPT, 2),
    "few likely tokens": (chain(2), SamplingParams(temperature=1.0, min_p=0.2), (), 2),
    "nearly greedy": (chain(2), SamplingParams(temperature=1e-6), (), 2),
    "nearly uniform": (chain(2), SamplingParams(temperature=100.0), (), 2),
    "top-p": (chain(2), SamplingParams(temperature=0.6, top_p=0.9), (), 2),
    "top-p of a trimmed draft": (chain(2), SamplingParams(temperature=0.8, top_p=0.5, min_p=0.01), KEPT, 2),
    "top-p that needs unlikely tokens": (chain(2), SamplingParams(temperature=1.0, top_p=1 - 1e-6), (), 2),
    "top-p of equal logits": (chain(2), SamplingParams(temperature=1.0, top_p=0.6), (), 2),
    "top-k and top-p of a trimmed draft": (chain(2), SamplingParams(temperature=1.5, top_k=12, top_p=0.8), KEPT, 1),
    "top-k of equal logits": (chain(2), SamplingParams(temperature=3.0, top_k=7), (), 1),
    "top-k of fewer tokens": (chain(2), SamplingParams(temperature=1.0, top_k=300, min_p=0.1), (), 1),
    "a drawn tree by traversal": (tree(3, 9, 3), WARM, (), 2),
    "a drawn tree by rejection, of a trimmed draft": (tree(2, 5, 2, REJECTION), WARM, KEPT, 2),
}
LONG = {
    "top-k and top-p of equal logits": (chain(2), SamplingParams(temperature=3.0, top_k=21, top_p=0.7), (), 1),
    "top-k that needs unlikely tokens": (chain(2), SamplingParams(temperature=0.2, top_k=600), (), 1),
    "a drawn tree by matching": (tree(2, 5, 2, MATCH), WARM, (), 2),
    "a drawn tree, top-k and top-p": (tree(2, 4, 2), SamplingParams(temperature=1.0, top_k=9, top_p=0.9), KEPT, 2),
    "a drawn tree, nearly greedy": (tree(2, 4, 2), SamplingParams(temperature=1e-6), (), 2),
    "a drawn tree, nearly uniform": (tree(2, 4, 2, REJECTION), SamplingParams(temperature=100.0), (), 2),
}


@pytest.mark.parametrize("name", [*CASES, *map(full, LONG)])
def test_rounds_are_those_of_the_host(name: str, gpu: Machine) -> None:
    """Trees, probabilities, accepted paths, caches, what is learned of acceptance, and how many uniform numbers were
    used. Before the first observation, estimates are equal and so are many values."""
    shape, params, kept, rounds = (CASES | LONG)[name]
    models = scoring(kept_tokens=kept, step=2.0 if "equal" in name else 0.0)
    accepted = compared(gpu, shape._replace(is_cut=is_cut(params)), models, params, kept, rounds=rounds)
    assert accepted or (rounds < 5 and not shape.is_tree) or params.temperature == 100


@pytest.mark.full
@pytest.mark.parametrize("of_trees", [False, True], ids=["chains and chosen trees", "drawn trees"])
def test_rounds_of_many_shapes(of_trees: bool, gpu: Machine) -> None:
    rng = np.random.default_rng(of_trees)
    for seed in range(40):
        depth, params = int(rng.integers(1, 6)), SamplingParams(temperature=float(rng.uniform(0.2, 2)))
        if rng.random() < 0.5:
            params = replace(params, top_p=float(rng.uniform(0.1, 1)))
        if rng.random() < 0.4:
            params = replace(params, top_k=int(rng.integers(1, 100)))
        size, width = int(rng.integers(1, 12)), int(rng.integers(1, 4))
        shape = chosen(depth, size, width) if rng.random() < 0.3 else chain(depth, str(rng.choice([BLOCK, MATCH])))
        if of_trees:
            shape = tree(min(depth, 4), size, width, str(rng.choice(EXACT)))
        share, step = float(rng.choice([0.2, 0.8, 1.0])), float(rng.choice([0, 1]))
        models = scoring(seed, int(rng.integers(20, 2500)), step=0.0 if of_trees else step, share=share)
        compared(gpu, shape._replace(is_cut=is_cut(params)), models, params, rounds=4, seed=seed)


@pytest.mark.parametrize("damage", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("shape", [chain(1), tree(1, 2, 2)], ids=["chain", "tree"])
def test_logits_that_are_no_numbers_are_an_error(shape: RoundShape, role: str, damage: float, gpu: Machine) -> None:
    target, draft = Scorer(1, 20, 18), Scorer(2, 20, 18)
    damaged = np.full(20, damage if damage < 0 else 1.0, np.float32)
    damaged[7] = damage
    broken = target if role == "target" else draft
    broken.logits, broken.after = lambda context: damaged, lambda context: (np.arange(18), np.zeros(18, np.float32))
    rounds = DeviceRounds(gpu, shape, target, draft, [PROMPT])
    with pytest.raises(EngineError, match="NaN or infinite"):
        rounds.run(numbers_of(shape, WARM, uniform_streams(0), calibration.Calibration()))


def test_the_estimates_have_the_form_that_the_kernel_reads() -> None:
    assert (images.RANKS, images.BINS) == (calibration.RANKS, calibration.BINS)
    assert len(calibration.Calibration().logs()) == 2 * images.RANKS * images.BINS


@pytest.mark.parametrize(
    ("shape", "tokens", "top_k"),
    [
        (chain(1), 3, 0),
        (chosen(1, 2, 2), 3, 0),
        (tree(1, 2, 2), 2, 0),
        full(chain(1, is_cut=True), 3, 2),
        full(chain(2), 3, 0),
        full(chain(2, MATCH), 3, 0),
        full(chosen(2, 4, 2), 3, 0),
        full(tree(1, 2, 2), 3, 0),
        full(tree(1, 2, 2, REJECTION), 3, 0),
        full(tree(1, 2, 2, MATCH), 3, 0),
        full(tree(1, 2, 2, is_cut=True), 4, 3),
        full(tree(2, 3, 2), 2, 0),
        full(tree(2, 3, 2, REJECTION), 2, 0),
    ],
    ids=str,
)
def test_outcomes_on_the_device_have_the_targets_distribution(
    shape: RoundShape, tokens: int, top_k: int, gpu: Machine
) -> None:
    """Of a vocabulary of so many tokens."""
    found, expected = measured(gpu, shape, tokens, SamplingParams(temperature=0.8, top_k=top_k))
    assert total_variation(found, expected) < 1e-9


@pytest.mark.parametrize(
    ("kernels", "shape", "tokens"),
    [(["excess"], chain(1), 3), full(["remainder", "settle"], tree(1, 1, 1, REJECTION), 2)],
    ids=["chain", "tree"],
)
def test_a_bias_would_be_noticed(
    kernels: list[str], shape: RoundShape, tokens: int, gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The residual without the draft's share: rejected tokens come from the target itself."""
    for kernel in kernels:
        changed(kernel, "sub.rn.f64", "add.rn.f64", monkeypatch)
    assert total_variation(*measured(gpu, shape, tokens)) > 1e-3


CUT, TOP_K = SamplingParams(temperature=0.7, top_p=0.8), SamplingParams(temperature=0.7, top_k=2)
CHAIN, TREE = (chain(2), 700, 3), (tree(2, 4, 2), 40, 8)  # with their vocabulary and rounds


@pytest.mark.parametrize(
    ("kernel", "old", "new", "params", "case"),
    [
        ("peaks", "max.f32", "min.f32", WARM, CHAIN),
        ("weigh", "div.rn.f64", "mul.rn.f64", WARM, CHAIN),  # the temperature
        ("extend", "setp.gt.f64", "setp.lt.f64", WARM, CHAIN),  # the token of a uniform number
        ("chances", "min.f64", "max.f64", WARM, CHAIN),
        ("excess", "max.f64", "min.f64", WARM, CHAIN),
        ("gather", "setp.ge.f64", "setp.lt.f64", CUT, CHAIN),
        ("cut", "setp.eq.b64", "setp.ne.b64", CUT, CHAIN),
        ("cut", "setp.ge.s64", "setp.lt.s64", TOP_K, CHAIN),  # what is counted
        ("accept", "sub.rn.f64", "add.rn.f64", WARM, CHAIN),
        ("grow", "setp.gt.f64", "setp.lt.f64", WARM, TREE),  # the token of a uniform number
        ("grow", "setp.le.f64", "setp.ge.f64", WARM, TREE),  # the bin of a probability
        ("grow", "-9223372036854775808", "0", WARM, TREE),  # a token may be drawn again
        ("grow", "setp.ge.f64", "setp.lt.f64", WARM, TREE),  # expected tokens of at least this value
        ("prepare", "setp.eq.b64", "setp.ne.b64", WARM, TREE),  # the tokens that the draft cannot draw
        ("refuse", "sub.rn.f64", "add.rn.f64", WARM, TREE),
        ("refuse", "min.f64", "max.f64", WARM, TREE),
        ("traverse", "setp.lt.f64", "setp.gt.f64", WARM, TREE),
        ("reject", "setp.lt.f64", "setp.gt.f64", WARM, (tree(2, 4, 2, REJECTION), 40, 8)),
        ("remainder", "max.f64", "min.f64", WARM, TREE),
        ("settle", "max.f64", "min.f64", WARM, TREE),
    ],
)
def test_a_kernel_that_differs_would_be_noticed(
    kernel: str,
    old: str,
    new: str,
    params: SamplingParams,
    case: tuple[RoundShape, int, int],
    gpu: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changed(kernel, old, new, monkeypatch)
    shape, tokens, rounds = case
    with gpu.expecting(), pytest.raises((AssertionError, EngineError, RuntimeWarning, ValueError)):
        compared(gpu, shape._replace(is_cut=is_cut(params)), scoring(num_logits=tokens), params, rounds=rounds)
