"""Distributions: what a draft leaves out, the shortcuts against the plain definitions, and draws from large ones."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from enumeration import decoded, pair, total_variation
from fakes import FakeEngine, Predict
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftwood.models.errors import RequestError
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import BLOCK, SeededStream
from draftwood.runtime.sampling.sampler import LIKELY, NEGLIGIBLE, Candidates, Sampler, largest, nucleus
from draftwood.runtime.sampling.softmax import NumpySoftmax
from draftwood.runtime.sampling.weights import Weights
from draftwood.runtime.speculation.config import SpeculativeConfig

SETTINGS: tuple[dict[str, float], ...] = (
    {},
    {"top_k": 7},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"top_k": 9, "top_p": 0.7, "min_p": 0.01},
)


def scores_of(seed: int, vocab_size: int, spread: float = 4.0) -> NDArray[np.float32]:
    return (spread * np.random.default_rng(seed).standard_normal(vocab_size)).astype(np.float32)


def sampler(vocab_size: int, **changes: float) -> Sampler:
    return Sampler(SamplingParams(temperature=0.8, **changes), (), (), vocab_size)  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", SETTINGS)
@pytest.mark.parametrize("seed", range(5))
def test_a_draft_leaves_out_only_the_tail(seed: int, changes: dict[str, float]) -> None:
    scores = scores_of(seed, 300)
    p, q = sampler(300, **changes).distribution(scores, []), sampler(300, **changes).candidates(scores, [])
    assert q.probs.sum() == pytest.approx(1) and p.sum() == pytest.approx(1)
    left_out = np.delete(p, q.ids)
    assert (left_out <= NEGLIGIBLE * p.max()).all() and left_out.sum() < 0.01
    assert q.probs / p[q.ids] == pytest.approx(q.probs[0] / p[q.ids][0])


@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_ranked_tokens_have_the_log_probabilities_of_the_whole_row(spread: float) -> None:
    scores = scores_of(3, 500, spread)
    ids, logprobs = sampler(500).ranking(scores, [], 6)
    expected = scores - np.log(np.exp(scores.astype(np.float64)).sum())
    assert ids.tolist() == np.argsort(-scores)[:6].tolist()
    np.testing.assert_allclose(logprobs, expected[ids], atol=1e-4)


def plainly_truncated(scores: NDArray[np.float32], top_k: int, top_p: float, min_p: float) -> NDArray[np.float64]:
    """By the definitions: everything sorted, nothing skipped."""
    weights = np.exp((scores.astype(np.float64) - scores.max()) / 0.8)
    weights[weights < min_p] = 0.0
    if top_k:
        weights[np.argsort(-weights, kind="stable")[top_k:]] = 0.0
    weights /= weights.sum()
    order = np.argsort(-weights, kind="stable")
    weights[order[np.cumsum(weights[order]) - weights[order] >= top_p]] = 0.0
    return np.asarray(weights / weights.sum())


@settings(max_examples=80)
@given(
    seed=st.integers(0, 10_000),
    spread=st.sampled_from((0.01, 1.0, 30.0)),
    top_k=st.sampled_from((0, 1, 5, 60, 120, 121)),
    top_p=st.sampled_from((0.05, 0.5, 0.9, 0.99999)),
    min_p=st.sampled_from((0.0, 0.03, 1.0)),
)
def test_truncation_is_what_it_is_defined_as(seed: int, spread: float, top_k: int, top_p: float, min_p: float) -> None:
    scores = scores_of(seed, 120, spread)
    found = sampler(120, top_k=top_k, top_p=top_p, min_p=min_p).distribution(scores, [])
    assert found == pytest.approx(plainly_truncated(scores, top_k, top_p, min_p), abs=1e-12)


@pytest.mark.parametrize("changes", [{}, {"min_p": 1e-30}, {"top_k": 2}])
def test_top_p_of_1_keeps_tokens_too_unlikely_to_change_a_sum(changes: dict[str, float]) -> None:
    found = sampler(3, **changes).distribution(np.array([0, -40, -45], np.float32), [])
    assert found[:2] == pytest.approx([1, np.exp(-50)], rel=1e-6)
    assert (found[2] == 0) == ("top_k" in changes)


@pytest.mark.parametrize("count", [1, 3, 50])
def test_the_largest_scores_stand_in_order_however_far_apart_they_are(count: int) -> None:
    near, far = np.zeros(50, np.float32), -2 * LIKELY * np.arange(50, dtype=np.float32)[::-1]
    for scores in (near, far, scores_of(0, 50)):
        assert largest(scores, count).tolist() == np.argsort(-scores, kind="stable")[:count].tolist()


def test_a_nucleus_may_need_tokens_that_are_hardly_likely() -> None:
    probs = np.full(20_001, 0.1 / 20_000)
    probs[7] = 0.9
    assert nucleus(probs, 0.5).tolist() == [7]
    assert len(nucleus(probs, 0.95)) == pytest.approx(1 + 10_000, abs=2)


def test_top_p_may_need_tokens_that_are_hardly_likely() -> None:
    """Half of the mass is in 20,000 tokens, each of them less than NEGLIGIBLE times as probable as the first one."""
    scores = np.full(20_001, 0.8 * np.log(1 / 20_000), np.float32)
    scores[7] = 0.0
    found = sampler(20_001, top_p=0.75).distribution(scores, [])
    assert found[7] == pytest.approx(2 / 3, abs=1e-3) and (found > 0).sum() == pytest.approx(10_001, abs=2)


@pytest.mark.parametrize("changes", [{"top_k": 2}, {"top_p": 0.4}, {"top_k": 2, "min_p": 0.5}])
def test_of_equal_tokens_the_first_are_kept(changes: dict[str, float]) -> None:
    scores = np.array([1, 3, 3, 3, 3, 0], np.float32)
    every = sampler(6, **changes)
    assert every.distribution(scores, [])[[1, 2]] == pytest.approx(0.5)
    assert every.candidates(scores, []).ids.tolist() == [1, 2]


def test_weights_stay_until_a_path_of_the_same_length_is_asked_for() -> None:
    """What verifiers rely on: they hold one row of each depth."""
    one, scores = sampler(50), scores_of(0, 50)
    expected = one.distribution(scores, [])
    root = one.weights(scores, [])
    one.weights(scores_of(1, 50), [3])
    assert root.values / root.total == pytest.approx(expected)


@pytest.mark.parametrize("vocab_size", [3, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_draws_follow_their_probabilities_in_any_vocabulary(vocab_size: int) -> None:
    probabilities = np.zeros(vocab_size)
    probabilities[[0, vocab_size // 2, vocab_size - 1]] = 0.2, 0.3, 0.5
    stream, draws = SeededStream(np.random.SeedSequence(3)), 4000
    counts = np.bincount([stream.categorical(probabilities) for _ in range(draws)], minlength=vocab_size)
    assert counts[probabilities == 0].sum() == 0
    assert counts / draws == pytest.approx(probabilities, abs=5 * np.sqrt(0.25 / draws))


def test_a_stream_gives_the_numbers_of_its_decisions_ahead() -> None:
    stream, other = (SeededStream(np.random.SeedSequence(3)) for _ in range(2))
    numbers = other.ahead(400)
    assert stream.ahead(3) == numbers[:3] and not stream.ahead(0) and other.ahead(400) == numbers
    assert stream.bernoulli(numbers[0] + 1e-9) and not stream.bernoulli(numbers[1] - 1e-9)
    stream.skip(300)  # that a device has used
    assert stream.ahead(98) == numbers[302:400]


def never(token: int, predict: Predict) -> Predict:
    """A draft to which one token is as good as impossible."""

    def without(context: tuple[int, ...]) -> NDArray[np.float64]:
        probs = predict(context).copy()
        probs[token] = NEGLIGIBLE * 1e-2
        return np.asarray(probs / probs.sum())

    return without


TREES = product(("chain", "k-ary", "dyspec"), ("rejection", "traversal", "match"))


@pytest.mark.parametrize(("grow", "verify"), [*TREES, ("chain", "block")])
def test_what_a_draft_leaves_out_the_target_still_says(grow: str, verify: str) -> None:
    """I2 where the draft's support is smaller than the target's."""
    target, draft = pair(1, 3)
    narrow = FakeEngine(never(2, draft.predict), 3, "draft")
    shape: dict[str, Any] = {"branching": (2, 1)} if grow == "k-ary" else {}
    config = SpeculativeConfig(grow, verify=verify, max_draft_len=2, max_total_draft_tokens=4, **shape)
    params = SamplingParams(max_tokens=3)
    expected = decoded(target, None, None, params)
    assert any(2 in tokens for tokens in expected)
    assert total_variation(decoded(target, narrow, config, params), expected) < 1e-12


@pytest.mark.parametrize("token", [0, 4, 9])
def test_a_token_that_was_not_offered_has_no_place(token: int) -> None:
    offered = Candidates(np.array([3, 5, 8]), np.array([0.2, 0.3, 0.5]))
    assert [offered.place(each) for each in (3, 5, 8)] == [0, 1, 2]
    with pytest.raises(ValueError, match=f"token {token} is none of the 3"):
        offered.place(token)


EXTREMES: tuple[dict[str, float], ...] = (
    {}, {"top_k": 3}, {"top_k": 2**31 - 1}, {"top_p": 0.5}, {"top_p": 1e-300}, {"min_p": 1.0}, {"min_p": 1e-300},
    {"top_k": 3, "top_p": 0.9, "min_p": 0.1},
)  # fmt: skip


class NarrowSoftmax(NumpySoftmax):
    """numpy's arithmetic in the engines' dtype."""

    dtype = np.float32


@pytest.mark.parametrize("changes", EXTREMES)
@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 100.0])
@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("narrow", [False, True])
def test_extremes_give_a_distribution(
    changes: dict[str, float], temperature: float, processed: bool, narrow: bool
) -> None:
    """Large logits, masked ones and one that is the best, at the ends of every range: no NaN, no zero divided."""
    floor = float(np.finfo(np.float32).min)
    scores = np.array([500.0, 499.0, 0.0, -500.0, 499.9999, floor, -np.inf, 1e-40], np.float32)
    added = np.array([100.0, 0.0, 0.0, -100.0, 100.0, 0.0, 0.0, 0.0])
    more = {"logits_processors": (lambda output, logits: logits + added,)} if processed else {}
    params = SamplingParams(temperature=temperature, **changes, **more)  # type: ignore[arg-type]
    one = Sampler(params, (), (), 8)
    if narrow:
        one.use(NarrowSoftmax())
    found = one.distribution(scores, [])
    assert np.isfinite(found).all() and found.min() >= 0 and found.sum() == pytest.approx(1)
    assert found.argmax() == 0 and found[6] == 0
    q = one.candidates(scores, [])
    assert np.isfinite(q.probs).all() and q.probs.sum() == pytest.approx(1) and 0 in q.ids
    if temperature == 1e-6:
        assert found[0] == 1
    assert one.choose(scores, [], SeededStream(np.random.SeedSequence(1))) in np.flatnonzero(found)


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}])
def test_an_array_of_a_processor_stays_its_own(changes: dict[str, float]) -> None:
    """One that is returned again and again, or kept when it was handed over."""
    cached, seen = np.array([0.0, 1.0, 9.0, 2.0, 3.0]), []

    def constant(output: object, logits: NDArray[np.float64]) -> NDArray[np.float64]:
        seen.append((logits, logits.copy()))
        return cached

    def in_place(output: object, logits: NDArray[np.float64]) -> NDArray[np.float64]:
        logits[0] = -np.inf
        return logits

    settings = {"min_tokens": 1, "repetition_penalty": 1.5, "logits_processors": (constant, in_place), **changes}
    one = Sampler(SamplingParams(**settings), (1,), (2,), 5)  # type: ignore[arg-type]
    logits = np.array([5, 4, 3, 2, 1], np.float32)
    for path, banned in (([], True), ([4], False)):
        assert (one.distribution(logits, path)[2] == 0) == banned
        one.log_probabilities(logits, path)
        one.choose(logits, path, SeededStream(np.random.SeedSequence(1)))
        if not one.params.greedy:
            one.candidates(logits, path)
        assert cached.tolist() == [0, 1, 9, 2, 3]
    assert all((now == then).all() for now, then in seen) and logits.tolist() == [5, 4, 3, 2, 1]


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        (np.full(5, np.nan), "the largest logit became nan"),
        (np.array([0, np.nan, 1, 2, 3]), "the largest logit became nan"),
        (np.array([0, np.inf, 1, 2, 3]), "the largest logit became inf"),
        (np.array([0, 1e39, 1, 2, 3]), "numbers of fp32"),
        (np.full(5, -1e39), "numbers of fp32"),
        (np.full(5, -np.inf), "no token is left"),
        (np.zeros(4), r"returned shape \(4,\)"),
        (None, r"returned shape \(\)"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_processor_may_not_return(returned: object, named: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, logits_processors=(lambda output, logits: returned,))  # type: ignore[arg-type,return-value]
    with pytest.raises(RequestError, match=named):
        Sampler(params, (), (), 5).distribution(np.zeros(5, np.float32), [])


@pytest.mark.parametrize("edge", [np.finfo(np.float32).min, np.finfo(np.float32).max])
def test_a_processor_may_return_every_number_of_fp32(edge: float) -> None:
    one = sampler(5, logits_processors=(lambda output, logits: np.full(5, edge, np.float64),))  # type: ignore[arg-type]
    assert one.distribution(np.zeros(5, np.float32), []).tolist() == [0.2] * 5


def test_a_processor_may_mask_with_whatever_is_small() -> None:
    masked = np.array([1.0, -1e300, -np.inf, float(np.finfo(np.float64).min), 1.0])
    one = sampler(5, logits_processors=(lambda output, logits: masked,), repetition_penalty=1e6)  # type: ignore[arg-type]
    one.use(NarrowSoftmax())
    assert one.distribution(np.zeros(5, np.float32), [1, 2, 3]).tolist() == [0.5, 0, 0, 0, 0.5]


def test_nothing_is_copied_without_a_processor() -> None:
    logits, read = np.zeros(5, np.float32), []

    class Looking(NumpySoftmax):
        def weights(self, logits: NDArray[np.floating], *others: object) -> Weights:  # type: ignore[type-arg]
            read.append(logits)
            return super().weights(logits, *others)  # type: ignore[arg-type]

    one = sampler(5)
    one.use(Looking())
    one.distribution(logits, [])
    assert read[0] is logits


def test_a_token_that_ends_the_text_is_banned_until_enough_are_there() -> None:
    one = Sampler(SamplingParams(min_tokens=2, stop_token_ids=(4, 0)), (), (2,), 5)
    for output, path, banned in (([], [], True), ([], [1], True), ([], [1, 1], False), ([1], [1], False)):
        fresh = Sampler(one.params, (), (2,), 5)
        fresh.commit(output)
        assert (fresh.distribution(np.zeros(5, np.float32), path)[[0, 2, 4]] == 0).all() == banned
        assert fresh.follows_path == (len(output) < 2)


def test_penalties_count_what_they_are_defined_to_count() -> None:
    """Repetition: prompt and output. Presence and frequency: the output, this path included."""
    params = SamplingParams(repetition_penalty=2, presence_penalty=0.5, frequency_penalty=0.25)
    one = Sampler(params, (0, 1), (), 5)
    one.commit([1, 2, 2])
    logits = np.array([4, -4, 4, 4, 4], np.float32)
    expected = np.array([2, -8 - 0.5 - 0.25, 2 - 0.5 - 0.75, 2 - 0.5 - 0.25, 4])
    found = one.log_probabilities(logits, [2, 3])
    assert found - found[4] == pytest.approx(expected - expected[4])
    assert np.exp(found).sum() == pytest.approx(1)


def test_what_is_left_out_changes_nothing() -> None:
    """The defaults are those that ask for nothing: the distribution is the softmax of the logits."""
    logits = np.random.default_rng(0).normal(size=50).astype(np.float32) * 4
    one = Sampler(SamplingParams(), (1, 2), (3,), 50)
    assert not one.follows_path and not one.params.ignore_eos
    one.commit([4, 4])
    weights = np.exp(logits.astype(np.float64) - logits.max())
    assert one.distribution(logits, [5]) == pytest.approx(weights / weights.sum())
    assert not one.follows_path
