"""The kernels' softmax against numpy's, and everything that is drawn by it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from enumeration import decoded, outcomes, pair, total_variation
from fakes import FakeEngine
from hypothesis import given
from hypothesis import strategies as st
from native_parts import kernels
from numpy.typing import NDArray

from draftwood.models.errors import EngineError
from draftwood.plugins.native.library import FEW, NativeLibrary
from draftwood.plugins.native.processor import KernelError
from draftwood.runtime.engines.base import ForwardOutput, KVCache, TokenBatch
from draftwood.runtime.engines.native.softmax import NativeSoftmax
from draftwood.runtime.engines.shared.pool import PooledEngine
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import RandomStreams, seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.sampling.softmax import NumpySoftmax, softmax_of
from draftwood.runtime.sampling.weights import Weights
from draftwood.runtime.speculation.config import SpeculativeConfig

NUMPY = NumpySoftmax()
TINIEST, LARGEST = 5e-324, sys.float_info.max
temperatures = st.sampled_from([TINIEST, 1e-300, 1e-46, 1e-38, 0.05, 0.6, 1.0, 3.0, 1e6, 3.3e37, 1e39, LARGEST])
EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 255, 256, 257, 700)  # of panels of 16, and of runs of 256


@pytest.fixture(scope="module", params=["", "-march=x86-64"], ids=["native", "x86-64"])
def native(request: pytest.FixtureRequest) -> NativeSoftmax:
    return NativeSoftmax(NativeLibrary(kernels(*request.param.split())))


def parts(weights: Weights) -> tuple[NDArray[np.floating[Any]], float]:
    """The weights of all tokens, and their sum."""
    return weights.values, weights.total


def logits_of(seed: int, vocab_size: int) -> NDArray[np.float32]:
    """Some tokens banned, some alike."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(0, 4, vocab_size).round(1).astype(np.float32)
    logits[generator.random(vocab_size) < 0.1] = -np.inf
    logits[generator.integers(vocab_size)] = 9
    return logits


@given(seed=st.integers(0, 999), vocab_size=st.sampled_from(EDGES), temperature=temperatures)
def test_weights_are_numpys(native: NativeSoftmax, seed: int, vocab_size: int, temperature: float) -> None:
    """In fp32: relative to a weight's own size as long as its exponent is small, and none for what is banned."""
    logits = logits_of(seed, vocab_size)
    expected, total = parts(NUMPY.weights(logits, temperature, np.empty(vocab_size)))
    room = np.full(vocab_size + 16, 7, np.float32)
    found, found_total = parts(native.weights(logits, temperature, room[:vocab_size]))
    assert (room[vocab_size:] == 7).all()
    assert found == pytest.approx(expected, rel=2e-5, abs=1e-37)
    assert (found[np.isinf(logits)] == 0).all()
    assert found_total == pytest.approx(found.sum(dtype=np.float64), rel=1e-6)
    assert found_total == pytest.approx(total, rel=1e-6)


@given(
    seed=st.integers(0, 999),
    vocab_size=st.sampled_from((*EDGES, FEW, FEW + 1, 3 * FEW)),
    share=st.sampled_from([1.0, 0.3, 1e-4, 1e-9]),
    temperature=temperatures,
)
def test_likely_tokens_are_numpys(
    native: NativeSoftmax, seed: int, vocab_size: int, share: float, temperature: float
) -> None:
    logits = logits_of(seed, vocab_size)
    ids, weights = native.likely(logits, temperature, share)
    expected_ids, expected = NUMPY.likely(logits, temperature, share)
    assert ids.tolist() == expected_ids.tolist()
    assert weights == pytest.approx(expected, rel=2e-5)
    assert not np.isinf(logits[ids]).any(), "a token without probability is never likely"


@pytest.mark.parametrize("vocab_size", EDGES)
@pytest.mark.parametrize("level", [0.0, -3e38, 3e38, 1e-40])
def test_equal_logits_weigh_the_same(native: NativeSoftmax, vocab_size: int, level: float) -> None:
    logits = np.full(vocab_size, level, np.float32)
    for temperature in (TINIEST, 1e-46, 1.0, 3.3e37, LARGEST):
        weights, total = parts(native.weights(logits, temperature, np.empty(vocab_size, np.float32)))
        assert (weights == weights[0]).all() and total == pytest.approx(vocab_size, rel=1e-6)
        ids, likely = native.likely(logits, temperature, 0.5)
        assert ids.tolist() == list(range(vocab_size)) and (likely == 1).all()


@pytest.mark.parametrize("softmax", ["kernels", "kernels, float64", "numpy"])
def test_penalties_at_any_temperature(softmax: str, native: NativeSoftmax) -> None:
    """Penalties leave float64, whose weights go into a buffer of the kernels' type."""
    logits: NDArray[np.floating[Any]] = logits_of(5, 50)
    if softmax != "kernels":
        logits = logits.astype(np.float64)
    used: NumpySoftmax = NUMPY if softmax == "numpy" else native
    for temperature in (TINIEST, 1e-46, 1e-38, 0.5, 3.3e37, LARGEST):
        weights, total = parts(used.weights(logits, temperature, np.empty(50, used.dtype)))
        assert weights[logits.argmax()] == pytest.approx(1) and total >= 0.999
        assert (weights[np.isinf(logits)] == 0).all() and np.isfinite(weights).all()
        if temperature < 1e-30:
            assert total == pytest.approx(1)
        if temperature > 1e30:
            assert total == pytest.approx(np.isfinite(logits).sum())


def test_weights_of_every_exponent(native: NativeSoftmax) -> None:
    """As small as normal numbers of fp32 are, and nothing below."""
    exponents = np.arange(140)
    logits = (-exponents * np.log(2)).astype(np.float32)
    weights, _ = parts(native.weights(logits, 1.0, np.empty(140, np.float32)))
    assert weights[:126] == pytest.approx(0.5 ** exponents[:126].astype(np.float64), rel=2e-5, abs=0)
    assert (weights[127:] == 0).all()


def test_logits_far_apart(native: NativeSoftmax) -> None:
    """Their difference is beyond fp32."""
    logits = np.array([3e38, -3e38, -np.inf], np.float32)
    for temperature, second in ((1.0, 0.0), (1e38, np.exp(-6))):
        for used in (native, NUMPY):
            weights, _ = parts(used.weights(logits, temperature, np.empty(3, used.dtype)))
            assert weights == pytest.approx([1, second, 0], rel=1e-5)


@pytest.mark.parametrize("bad", [[np.nan], [np.inf], [np.nan, np.inf]], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 16, 17, 300])
def test_logits_that_are_no_numbers_are_an_error(bad: list[float], vocab_size: int, native: NativeSoftmax) -> None:
    """Wherever they stand: no garbage is drawn, and nothing beyond the vocabulary."""
    for first in {0, vocab_size // 2, vocab_size - 1}:
        logits = logits_of(1, vocab_size)
        logits[first : first + len(bad)] = bad[: vocab_size - first]
        assert_refused(logits, native)


@pytest.mark.parametrize("vocab_size", [1, 16, 17])
def test_logits_that_ban_every_token_are_an_error(vocab_size: int, native: NativeSoftmax) -> None:
    assert_refused(np.full(vocab_size, -np.inf, np.float32), native)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}], ids=lambda each: str(each)
)
def test_nothing_is_chosen_from_what_is_no_number(settings: dict[str, Any], bad: float, native: NativeSoftmax) -> None:
    logits = logits_of(1, 20)
    logits[7] = bad
    sampler = Sampler(SamplingParams(**settings), [1], (), 20)
    for softmax in (NUMPY, native):
        sampler.use(softmax)
        with pytest.raises(EngineError, match="a logit that is NaN or infinite"):
            sampler.choose(logits, (), seeded_streams(0).target)


def assert_refused(logits: NDArray[np.float32], native: NativeSoftmax) -> None:
    for temperature in (1e-46, 0.7, 1e300):
        for used, dtype in ((native, np.float32), (native, np.float64), (NUMPY, np.float64)):
            with pytest.raises(EngineError, match="a logit that is NaN or infinite: its weights are damaged"):
                used.weights(logits.astype(dtype), temperature, np.empty(len(logits), used.dtype))
            with pytest.raises(EngineError, match="a logit that is NaN or infinite"):
                used.likely(logits.astype(dtype), temperature, 1e-4)


def test_logits_that_lie_otherwise_are_read_right(native: NativeSoftmax) -> None:
    """float64, as penalties leave them, and every other number of a larger array."""
    wide = np.repeat(logits_of(3, 50), 2)
    for logits in (wide[::2], wide[::2].astype(np.float64)):
        weights, _ = parts(native.weights(logits, 0.7, np.empty(50, np.float32)))
        assert weights == pytest.approx(NUMPY.weights(logits, 0.7, np.empty(50)).values, rel=1e-6)
        assert native.likely(logits, 0.7, 0.01)[0].tolist() == NUMPY.likely(logits, 0.7, 0.01)[0].tolist()


SETTINGS = (SamplingParams(max_tokens=2), SamplingParams(max_tokens=2, temperature=0.7, top_p=0.8))
CONFIGS = {
    "rejection": SpeculativeConfig("chain", max_draft_len=2, verify="rejection", budget="fixed"),
    "block": SpeculativeConfig("chain", max_draft_len=2, verify="block", budget="fixed"),
    "traversal": SpeculativeConfig(
        "dyspec", max_draft_len=2, max_total_draft_tokens=3, verify="traversal", budget="fixed"
    ),
    "match": SpeculativeConfig("topk", max_draft_len=2, max_total_draft_tokens=3, frontier_width=2, budget="fixed"),
}


class Fp32Engine(FakeEngine):
    """Logits as real engines give them, and a softmax of its own."""

    def __init__(self, engine: FakeEngine, softmax: NumpySoftmax) -> None:
        super().__init__(engine.predict, engine.spec.model.vocab_size)
        self.softmax = softmax

    def score(self, batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        output = super().score(batch, cache)
        return output._replace(logits=output.logits.astype(np.float32))


@pytest.mark.parametrize("params", SETTINGS, ids=["plain", "top_p"])
@pytest.mark.parametrize("name", CONFIGS)
def test_speculation_by_the_kernels_softmax_is_exact(name: str, params: SamplingParams, native: NativeSoftmax) -> None:
    """I2 again, by enumeration: only fp32's rounding is between it and plain decoding in float64."""
    for seed in range(2):
        plain, draft = pair(seed, 3)
        target = Fp32Engine(plain, native)
        expected = decoded(plain, None, None, params)
        assert total_variation(decoded(target, draft, CONFIGS[name], params), expected) < 1e-6
        assert total_variation(decoded(target, None, None, params), expected) < 1e-6


class Warmer(NumpySoftmax):
    def weights(
        self, logits: NDArray[np.floating[Any]], temperature: float, values: NDArray[np.floating[Any]]
    ) -> Weights:
        return super().weights(logits, 1.001 * temperature, values)


def test_a_softmax_that_is_a_little_off_shows() -> None:
    """The control: a temperature one in a thousand too high is far outside of fp32's rounding."""
    plain, draft = pair(0, 3)
    expected = decoded(plain, None, None, SETTINGS[0])
    found = decoded(Fp32Engine(plain, Warmer()), draft, CONFIGS["rejection"], SETTINGS[0])
    assert 1e-5 < total_variation(found, expected) < 1e-2


@pytest.mark.parametrize("vocab_size", [255, 256, 257, 600])
def test_a_draw_by_runs_has_the_probabilities_of_a_draw_from_all(native: NativeSoftmax, vocab_size: int) -> None:
    """And so has one from what rejections leave."""
    logits = logits_of(7, vocab_size)
    logits[256:300] = -np.inf  # a run may be short, and all of it impossible
    p = np.asarray(NUMPY.weights(logits, 0.7, np.empty(vocab_size)).values)
    p /= p.sum()
    ids = np.array([0, 7, *range(100, 120), 254])
    offered = np.random.default_rng(vocab_size).dirichlet(np.ones(len(ids)))
    D = np.zeros(vocab_size)
    D[ids] = offered
    rest = np.maximum(0.9 * p - D, 0)
    for rejected, expected in ((False, p), (True, rest / rest.sum())):
        found = np.zeros(vocab_size)

        def run(streams: RandomStreams, rejected: bool = rejected) -> tuple[int, ...]:
            weights = native.weights(logits, 0.7, np.empty(vocab_size, np.float32))
            if not rejected:
                return (weights.draw(streams.target),)
            residual = weights.residual(ids)
            residual.reject(offered, 0.9)
            return (residual.draw(streams.target),)

        for (token,), probability in outcomes(run):
            found[token] += probability
        np.testing.assert_allclose(found, expected, atol=1e-6)


@given(
    seed=st.integers(0, 999),
    vocab_size=st.sampled_from(EDGES),
    count=st.integers(1, 40),
    rejections=st.integers(0, 3),
    covered=st.booleans(),
)
def test_a_residual_is_numpys(
    native: NativeSoftmax, seed: int, vocab_size: int, count: int, rejections: int, covered: bool
) -> None:
    """Before and after rejections; where the offered tokens have nearly all of the mass, too."""
    generator, logits = np.random.default_rng(seed), logits_of(seed, vocab_size)
    ids = np.sort(generator.permutation(vocab_size)[:count])
    if covered:
        logits[ids] += 30
    weights = [each.weights(logits, 0.7, np.empty(vocab_size, each.dtype)) for each in (native, NUMPY)]
    found, expected = (each.residual(ids) for each in weights)
    pi, expected_pi = 1.0, 1.0
    for _ in range(rejections):
        np.testing.assert_allclose(found.probs, expected.probs, rtol=1e-4, atol=1e-6)
        offered = generator.dirichlet(np.ones(len(ids)))
        pi, expected_pi = found.reject(offered, pi), expected.reject(offered, expected_pi)
        assert pi == pytest.approx(expected_pi, rel=1e-3, abs=1e-5)
    assert pi or rejections


@pytest.mark.parametrize("ids", [[3, 3], [4, 2], [-1, 2], [1, 300]], ids=str)
def test_tokens_that_are_none_of_a_row_are_refused(native: NativeSoftmax, ids: list[int]) -> None:
    weights = native.weights(logits_of(1, 300), 0.7, np.empty(300, np.float32))
    with pytest.raises(KernelError, match="ascending columns"):
        weights.residual(np.array(ids))


def test_a_pool_brings_its_engines_softmax(native: NativeSoftmax) -> None:
    plain, _ = pair(0, 3)
    target = Fp32Engine(plain, native)
    assert softmax_of(PooledEngine(target, target.spec.capacity)) is native
    assert type(softmax_of(PooledEngine(plain, plain.spec.capacity))) is NumpySoftmax
