"""DraftVocabulary: the only place where columns of a trimmed draft's outputs become tokens of the target.

A trimmed draft predicts the N most frequent tokens (FR-Spec, arXiv 2502.14856) and reads all V. Every other token has
q = 0. That is exact: verification uses this q, so a token that the draft never proposes comes from the residual p - q.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...engines.base import EngineSpec
from ...sampling.sampler import NO_CANDIDATES, Candidates, Sampler
from ...sampling.softmax import Softmax

# Logits processors and penalties read rows of V logits. There a token that the draft does not predict is this many nats
# less probable than the least probable one: finite, since a processor may compute a mean; and below
# `sampler.NEGLIGIBLE` at the highest temperature, so that it is drawn only if a processor wants it.
UNLIKELY = 1000.0


class NodeSampler(Protocol):
    """What growers need of a request's settings: rows of a draft's logits in, tokens of the target out. A path is the
    list of tokens from the committed text to a node."""

    @property
    def follows_path(self) -> bool:
        """See Sampler.follows_path."""

    def candidates(
        self, logits: NDArray[np.float32], path: Sequence[int], softmax: Softmax | None = None
    ) -> Candidates:
        """See Sampler.candidates."""

    def ranking(
        self, logits: NDArray[np.float32], path: Sequence[int], count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """See Sampler.ranking."""

    def named(self, columns: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens of columns of the draft's logits, such as its `top_ids`."""


class TrimmedSampler:
    """A NodeSampler for rows of N logits."""

    def __init__(self, sampler: Sampler, tokens: NDArray[np.int64], vocab_size: int) -> None:
        self._sampler, self._tokens, self._vocab_size = sampler, tokens, vocab_size

    @property
    def follows_path(self) -> bool:
        return self._sampler.follows_path

    def candidates(
        self, logits: NDArray[np.float32], path: Sequence[int], softmax: Softmax | None = None
    ) -> Candidates:
        if self._sampler.follows_path:
            found = self._sampler.candidates(self._widened(logits), path)
            return found if len(found.ids) and self._predicts_any(path) else NO_CANDIDATES
        columns, probs = self._sampler.candidates(logits, path, softmax)
        return Candidates(self._tokens[columns], probs)

    def ranking(
        self, logits: NDArray[np.float32], path: Sequence[int], count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        ids, logprobs = self._sampler.ranking(self._widened(logits), path, count)
        if logprobs[0] == -np.inf or not self._predicts_any(path):
            return ids, np.full(len(ids), -np.inf)
        return ids, logprobs

    def named(self, columns: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._tokens[columns]

    def _predicts_any(self, path: Sequence[int]) -> bool:
        """Whether a token that the draft predicts may follow a path that is no dead end."""
        return self._sampler.processing.allows_any(self._tokens, path)

    def _widened(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The row [V] of a row [N]."""
        least = logits.min() - UNLIKELY if self._sampler.processing.changes_logits else -np.inf
        wide = np.full(self._vocab_size, least, logits.dtype)
        wide[self._tokens] = logits
        return wide


class DraftVocabulary:
    """The tokens that one draft predicts."""

    def __init__(self, spec: EngineSpec) -> None:
        self._tokens = np.array(spec.kept_tokens, np.int64) if spec.kept_tokens else None
        self._vocab_size = spec.model.vocab_size

    def sampler(self, sampler: Sampler) -> NodeSampler:
        """A request's settings for the rows of this draft."""
        return sampler if self._tokens is None else TrimmedSampler(sampler, self._tokens, self._vocab_size)
