"""The kernels' softmax against numpy's, and everything that is drawn by it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from enumeration import decoded, pair, total_variation
from fakes import FakeCache, FakeEngine
from hypothesis import given
from hypothesis import strategies as st
from native_parts import kernels
from numpy.typing import NDArray

from draftwood.plugins.native.library import FEW, NativeLibrary
from draftwood.runtime.engines.base import ForwardOutput, TokenBatch
from draftwood.runtime.engines.native import NativeSoftmax
from draftwood.runtime.engines.pool import PooledEngine
from draftwood.runtime.sampling import SamplingParams
from draftwood.runtime.softmax import NumpySoftmax, Weights, softmax_of
from draftwood.runtime.speculation.config import SpeculativeConfig

NUMPY = NumpySoftmax()
temperatures = st.sampled_from([1e-300, 0.05, 0.6, 1.0, 3.0])


@pytest.fixture(scope="module", params=["", "-march=x86-64"], ids=["native", "x86-64"])
def native(request: pytest.FixtureRequest) -> NativeSoftmax:
    return NativeSoftmax(NativeLibrary(kernels(*request.param.split())))


def logits_of(seed: int, vocab_size: int) -> NDArray[np.float32]:
    """Some tokens banned, some alike."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(0, 4, vocab_size).round(1).astype(np.float32)
    logits[generator.random(vocab_size) < 0.1] = -np.inf
    logits[generator.integers(vocab_size)] = 9
    return logits


@given(seed=st.integers(0, 999), vocab_size=st.integers(1, 700), temperature=temperatures)
def test_weights_are_numpys(native: NativeSoftmax, seed: int, vocab_size: int, temperature: float) -> None:
    """In fp32: relative to a weight's own size as long as its exponent is small, and none for what is banned."""
    logits = logits_of(seed, vocab_size)
    expected, total = NUMPY.weights(logits, temperature, np.empty(vocab_size))
    found, found_total = native.weights(logits, temperature, np.full(vocab_size, 7, np.float32))
    assert found == pytest.approx(expected, rel=2e-5, abs=1e-37)
    assert (found[np.isinf(logits)] == 0).all()
    assert found_total == pytest.approx(found.sum(dtype=np.float64), rel=1e-6)
    assert found_total == pytest.approx(total, rel=1e-6)


@given(seed=st.integers(0, 999), vocab_size=st.integers(1, 3 * FEW), share=st.sampled_from([1.0, 0.3, 1e-4, 1e-9]))
def test_likely_tokens_are_numpys(native: NativeSoftmax, seed: int, vocab_size: int, share: float) -> None:
    logits = logits_of(seed, vocab_size)
    for temperature in (0.6, 5.0):
        ids, weights = native.likely(logits, temperature, share)
        expected_ids, expected = NUMPY.likely(logits, temperature, share)
        assert ids.tolist() == expected_ids.tolist()
        assert weights == pytest.approx(expected)


def test_logits_that_lie_otherwise_are_read_right(native: NativeSoftmax) -> None:
    """float64, as penalties leave them, and every other number of a larger array."""
    wide = np.repeat(logits_of(3, 50), 2)
    for logits in (wide[::2], wide[::2].astype(np.float64)):
        weights, _ = native.weights(logits, 0.7, np.empty(50, np.float32))
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

    def forward(self, batch: TokenBatch, cache: FakeCache) -> ForwardOutput:
        output = super().forward(batch, cache)
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


def test_a_pool_brings_its_engines_softmax(native: NativeSoftmax) -> None:
    plain, _ = pair(0, 3)
    target = Fp32Engine(plain, native)
    assert softmax_of(PooledEngine(target, target.spec.capacity)) is native
    assert type(softmax_of(PooledEngine(plain, plain.spec.capacity))) is NumpySoftmax
