"""The loss of a draft, the estimate of its acceptance, and its vocabulary, each against a computation by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from distilling import written
from hypothesis import given
from hypothesis import strategies as st

from draftwood.builder.distillation.batches import pack
from draftwood.builder.distillation.loss import distillation_loss, overlap, reachable
from draftwood.builder.kept_tokens import expected_counts, kept_tokens, offsets
from draftwood.models.errors import ConfigError

# Loss


def test_divergence_by_hand() -> None:
    """Known tokens 7, 8 and 9 of p; the draft lacks 9. q is (0.5, 0.3, 0.2) over 7, 8 and 5."""
    place_of = torch.full((12,), -1)
    place_of[torch.tensor([7, 8, 5])] = torch.arange(3)
    ids, p = torch.tensor([[7, 9, 8]]), torch.tensor([[0.4, 0.3, 0.2]])
    target = reachable(ids, p.log(), torch.tensor([0.1]), torch.tensor([9]), place_of)
    parts = distillation_loss(torch.tensor([[0.5, 0.3, 0.2]]).log() + 3, target)
    exact = 0.4 * np.log((0.4 / 0.7) / 0.5) + 0.2 * np.log((0.2 / 0.7) / 0.3) + 0.1 * np.log((0.1 / 0.7) / 0.2)
    assert parts.divergence.item() == pytest.approx(exact, rel=1e-5)
    assert parts.entropy.item() == 0  # the draft lacks the written token
    written_seven = target._replace(written=place_of[torch.tensor([7])])
    assert distillation_loss(torch.tensor([[0.5, 0.3, 0.2]]).log(), written_seven).entropy.item() == pytest.approx(
        -np.log(0.5), rel=1e-5
    )


@given(st.integers(0, 2**31), st.integers(3, 30))
def test_divergence_is_least_at_the_target(seed: int, size: int) -> None:
    """It is 0 where the draft has the target's distribution, and nowhere negative."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, 2, (1, size)).astype(np.float32))
    logprobs, ids = logits.log_softmax(-1).sort(descending=True)
    known = max(1, size - 2)
    tails = logprobs[:, known:].exp().sum(-1)
    target = reachable(ids[:, :known], logprobs[:, :known], tails, ids[:, 0], torch.arange(size))
    assert abs(distillation_loss(logits, target).divergence.item()) < 1e-4
    other = torch.from_numpy(rng.normal(0, 2, (1, size)).astype(np.float32))
    assert distillation_loss(other, target).divergence.item() > -1e-5


def test_gradient_of_the_divergence_is_that_of_differences() -> None:
    batch = next(pack([written(number, number) for number in range(10)], 2, 32))
    scored = batch.scored
    kept = torch.full((320,), -1)
    kept[:200] = torch.arange(200)
    target = reachable(
        batch.ids[scored], batch.logprobs[scored].double(), batch.tails[scored], batch.written[scored], kept
    )
    logits = torch.randn(len(target.tails), 200, generator=torch.Generator().manual_seed(0)).requires_grad_()
    distillation_loss(logits, target).divergence.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    step = 1e-2
    with torch.no_grad():
        high, low = (distillation_loss(logits + sign * step * direction, target).divergence for sign in (1, -1))
    slope = ((high - low) / (2 * step)).item()
    assert slope == pytest.approx((logits.grad * direction).sum().item(), rel=0.02, abs=1e-4)


@given(st.integers(0, 2**31), st.sampled_from([0.7, 1.0]))
def test_overlap_is_exact_where_all_tokens_are_known_and_otherwise_lower(seed: int, temperature: float) -> None:
    rng = np.random.default_rng(seed)
    p, q = (torch.from_numpy(rng.normal(0, 2, (1, 20))) for _ in range(2))
    exact = torch.minimum((p / temperature).softmax(-1), (q / temperature).softmax(-1)).sum().item()
    logprobs, ids = p.log_softmax(-1).sort(descending=True)
    for known in (20, 8):
        tails = logprobs[:, known:].exp().sum(-1)
        target = reachable(ids[:, :known], logprobs[:, :known], tails, ids[:, 0], torch.arange(20))
        found = overlap(q, target, logprobs[:, :known], tails, temperature).item()
        assert found == pytest.approx(exact, abs=1e-6) if known == 20 else found <= exact + 1e-6


# Vocabulary


def test_the_most_frequent_tokens_and_the_special_ones_are_kept() -> None:
    assert kept_tokens(np.array([3, 5, 1, 4, 2, 0]), 3, {0, 77}, "--x").tolist() == [0, 3, 5]
    assert kept_tokens(np.arange(4), 9, (), "--x").tolist() == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match=r"--x 2 leaves no room .* beside the 3 special ones: ask for at least 4"):
        kept_tokens(np.arange(9), 2, {1, 5, 7}, "--x")


def test_counts_are_the_targets_probabilities() -> None:
    text = written(0, 1)
    counts = expected_counts([text], 320)
    expected = np.zeros(320)
    for place in range(len(text.tokens)):
        if text.kinds[place]:
            np.add.at(expected, text.ids[place].astype(int), np.exp(text.logprobs[place].astype(float)))
    np.testing.assert_allclose(counts, expected)


@given(st.sets(st.integers(0, 400), min_size=1))
def test_offsets_give_the_kept_tokens(tokens: set[int]) -> None:
    kept = np.array(sorted(tokens))
    assert (np.arange(len(kept)) + offsets(kept) == kept).all()
