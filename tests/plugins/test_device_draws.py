"""Rounds above temperature 0 by the kernels, which the driver in libcuda's place executes from their PTX, against the
host's own proposer and verifiers with the same uniform numbers."""

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
from draftwood.runtime import SamplingParams
from draftwood.runtime.decoding.whole_rounds import is_cut
from draftwood.runtime.engines.rounds import BLOCK, MATCH, RoundShape

pytestmark = pytest.mark.usefixtures("no_faults")

SHAPES = {
    "a drawn chain": RoundShape(4, 4, 1, BLOCK, True),
    "a drawn token": RoundShape(1, 1, 1, BLOCK, True),
    "a drawn chain that must match": RoundShape(3, 3, 1, MATCH, True),
    "a chosen chain": RoundShape(3, 3, 1, MATCH),
    "a chosen tree": RoundShape(3, 9, 3, MATCH),
}


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
    "top-k and top-p of a trimmed draft": (SamplingParams(temperature=1.5, top_k=12, top_p=0.8), KEPT),
    "top-k of equal logits": (SamplingParams(temperature=3.0, top_k=7), ()),
    "top-k and top-p of equal logits": (SamplingParams(temperature=3.0, top_k=21, top_p=0.7), ()),
    "top-k that needs unlikely tokens": (SamplingParams(temperature=0.2, top_k=600), ()),
    "top-k of fewer tokens": (SamplingParams(temperature=1.0, top_k=300, min_p=0.1), ()),
    "nearly uniform": (SamplingParams(temperature=100.0), ()),
}


LONG = ("top-k and top-p of equal logits", "top-k that needs unlikely tokens")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.full if each in LONG else ()) for each in SETTINGS]
)
def test_settings_of_rounds(name: str, gpu: Machine) -> None:
    params, kept = SETTINGS[name]
    shape = RoundShape(2, 2, 1, BLOCK, True, is_cut(params))
    step = 2.0 if "equal" in name else 0.0
    compared(gpu, shape, params, kept_tokens=kept, rounds=1 if "top-k" in name else 2, step=step)


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
        if rng.random() < 0.3:
            shape, params = shape._replace(is_cut=True), replace(params, top_k=int(rng.integers(1, 100)))
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
        rounds.run(numbers_of(shape, params, uniform_streams(0)))


@pytest.mark.parametrize(
    "shape",
    [
        RoundShape(1, 1, 1, BLOCK, True),
        RoundShape(1, 2, 2, MATCH),
        pytest.param(RoundShape(1, 1, 1, BLOCK, True, True), marks=pytest.mark.full),
        pytest.param(RoundShape(2, 2, 1, BLOCK, True), marks=pytest.mark.full),
        pytest.param(RoundShape(2, 2, 1, MATCH, True), marks=pytest.mark.full),
        pytest.param(RoundShape(2, 4, 2, MATCH), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_outcomes_on_the_device_have_the_targets_distribution(shape: RoundShape, gpu: Machine) -> None:
    params = SamplingParams(temperature=0.8, top_k=2 if shape.is_cut else 0)
    assert total_variation(*measured(gpu, shape, params=params)) < 1e-9


def test_a_bias_would_be_noticed(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual without its sum: rejected tokens come from the target itself."""
    changed(["excess"], "sub.rn.f64", "add.rn.f64", monkeypatch)
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
        ("cut of top-k", "setp.ge.s64", "setp.lt.s64"),  # what is counted
        ("accept", "sub.rn.f64", "add.rn.f64"),
    ],
)
def test_a_kernel_that_differs_would_be_noticed(
    kernel: str, old: str, new: str, gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed([kernel.split()[0]], old, new, monkeypatch)
    params = SamplingParams(temperature=0.7, top_p=0.8 if kernel in ("gather", "cut") else 1.0)
    params = replace(params, top_k=2 if "top-k" in kernel else 0)
    with gpu.expecting(), pytest.raises((AssertionError, EngineError, RuntimeWarning, ValueError)):
        compared(gpu, RoundShape(2, 2, 1, BLOCK, True, is_cut(params)), params, rounds=3)
