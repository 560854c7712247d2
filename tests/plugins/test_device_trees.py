"""Rounds of drawn trees by the kernels, which the driver in libcuda's place executes from their PTX, against the host's
own proposer and verifiers with the same uniform numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cuda_driver.machine import Machine
from drawn_rounds import PROMPT, changed, compared, measured, numbers_of
from enumeration import total_variation
from scripted_rounds import DeviceRounds, Scorer
from uniforms import uniform_streams

from draftwood.models.errors import EngineError
from draftwood.plugins.device_round import images
from draftwood.runtime import SamplingParams
from draftwood.runtime.decoding.whole_rounds import is_cut
from draftwood.runtime.engines.rounds import MATCH, REJECTION, TRAVERSAL, RoundShape
from draftwood.runtime.speculation.planning import calibration

pytestmark = pytest.mark.usefixtures("no_faults")

WARM, KEPT = SamplingParams(temperature=0.7), tuple(range(1, 700, 2))
EXACT = (TRAVERSAL, REJECTION, MATCH)


def tree(depth: int, size: int, width: int, verify: str = TRAVERSAL, is_cut: bool = False) -> RoundShape:
    return RoundShape(depth, size, width, verify, True, is_cut, True)


CASES = {
    "by traversal": (tree(3, 9, 3), WARM, ()),
    "by rejection, of a trimmed draft": (tree(2, 5, 2, REJECTION), WARM, KEPT),
    "by matching": (tree(2, 5, 2, MATCH), WARM, ()),
    "top-k and top-p": (tree(2, 4, 2), SamplingParams(temperature=1.0, top_k=9, top_p=0.9), KEPT),
    "nearly greedy": (tree(2, 4, 2), SamplingParams(temperature=1e-6), ()),
    "nearly uniform": (tree(2, 4, 2, REJECTION), SamplingParams(temperature=100.0), ()),
}
LONG = ("by matching", "top-k and top-p", "nearly greedy", "nearly uniform")


@pytest.mark.parametrize("name", [pytest.param(each, marks=pytest.mark.full if each in LONG else ()) for each in CASES])
def test_trees_are_those_of_the_host(name: str, gpu: Machine) -> None:
    """Their tokens and probabilities, accepted paths, caches, what is learned of acceptance, and how many uniform
    numbers were used. Before the first observation, estimates are equal and so are many values."""
    shape, params, kept = CASES[name]
    shape = shape._replace(is_cut=is_cut(params))
    accepted = compared(gpu, shape, params, kept_tokens=kept, rounds=2)
    assert accepted or params.temperature == 100


@pytest.mark.full
def test_trees_of_many_shapes(gpu: Machine) -> None:
    rng = np.random.default_rng(0)
    for seed in range(40):
        depth, size, width = (int(rng.integers(1, most)) for most in (5, 13, 5))
        params = SamplingParams(temperature=float(rng.uniform(0.2, 2)))
        if rng.random() < 0.4:
            params = replace(params, top_k=int(rng.integers(1, 60)), top_p=float(rng.uniform(0.3, 1)))
        shape = tree(depth, size, width, str(rng.choice(EXACT)), is_cut(params))
        share = float(rng.choice([0.2, 0.8, 1.0]))
        compared(gpu, shape, params, int(rng.integers(20, 2500)), seed=seed, rounds=4, share=share)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_logits_that_are_no_numbers_are_an_error(role: str, gpu: Machine) -> None:
    target, draft = Scorer(1, 20, 18), Scorer(2, 20, 18)
    damaged = np.full(20, 1, np.float32)
    damaged[7] = np.nan
    broken = target if role == "target" else draft
    broken.logits, broken.after = lambda context: damaged, lambda context: (np.arange(18), np.zeros(18, np.float32))
    shape = tree(1, 2, 2)
    rounds = DeviceRounds(gpu, shape, target, draft, PROMPT)
    with pytest.raises(EngineError, match="NaN or infinite"):
        rounds.run(numbers_of(shape, WARM, uniform_streams(0), calibration.Calibration()))


def test_the_estimates_have_the_form_that_the_kernel_reads() -> None:
    assert (images.RANKS, images.BINS) == (calibration.RANKS, calibration.BINS)
    assert len(calibration.Calibration().logs()) == 2 * images.RANKS * images.BINS


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [
        (tree(1, 2, 2), 2),
        pytest.param(tree(1, 2, 2), 3, marks=pytest.mark.full),
        pytest.param(tree(1, 2, 2, REJECTION), 3, marks=pytest.mark.full),
        pytest.param(tree(1, 2, 2, MATCH), 3, marks=pytest.mark.full),
        pytest.param(tree(1, 2, 2, is_cut=True), 4, marks=pytest.mark.full),
        pytest.param(tree(2, 3, 2), 2, marks=pytest.mark.full),
        pytest.param(tree(2, 3, 2, REJECTION), 2, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_outcomes_on_the_device_have_the_targets_distribution(shape: RoundShape, tokens: int, gpu: Machine) -> None:
    """Of a vocabulary of so many tokens, of which top-k keeps three."""
    params = SamplingParams(temperature=0.8, top_k=3 if shape.is_cut else 0)
    assert total_variation(*measured(gpu, shape, tokens, params)) < 1e-9


@pytest.mark.full
def test_a_bias_would_be_noticed(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual without the draft's share: rejected tokens come from the target itself."""
    changed(["remainder", "settle"], "sub.rn.f64", "add.rn.f64", monkeypatch)
    assert total_variation(*measured(gpu, tree(1, 1, 1, REJECTION), 2)) > 1e-3


@pytest.mark.parametrize(
    ("kernel", "old", "new"),
    [
        ("grow", "setp.gt.f64", "setp.lt.f64"),  # the token of a uniform number
        ("grow", "setp.le.f64", "setp.ge.f64"),  # the bin of a probability
        ("grow", "-9223372036854775808", "0"),  # a token may be drawn again
        ("grow", "setp.ge.f64", "setp.lt.f64"),  # expected tokens of at least this value
        ("prepare", "setp.eq.b64", "setp.ne.b64"),  # the tokens that the draft cannot draw
        ("refuse", "sub.rn.f64", "add.rn.f64"),
        ("refuse", "min.f64", "max.f64"),
        ("traverse", "setp.lt.f64", "setp.gt.f64"),
        ("reject", "setp.lt.f64", "setp.gt.f64"),
        ("remainder", "max.f64", "min.f64"),
        ("settle", "max.f64", "min.f64"),
    ],
)
def test_a_kernel_that_differs_would_be_noticed(
    kernel: str, old: str, new: str, gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed([kernel], old, new, monkeypatch)
    verify = REJECTION if kernel == "reject" else TRAVERSAL
    with gpu.expecting(), pytest.raises((AssertionError, EngineError, RuntimeWarning, ValueError)):
        compared(gpu, tree(2, 4, 2, verify), WARM, 40, rounds=8)
