"""Sampler: from the logits of a node to the distribution, or to the token, after the node's path.

The order of operations is vLLM's: `processing.py`, (greedy: arg-max) temperature, min-p, top-k, top-p. The logits of
draft and target go through the same Sampler, so the request's settings apply to p and q.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .constraint import Constraint
from .params import SamplingParams, require
from .processing import DeadEndError, Processing
from .random import RandomStream
from .softmax import NumpySoftmax, Softmax, SoftmaxSettings, best
from .weights import NOTHING, DeadEnd, Floats, KeptWeights, Weights

NEGLIGIBLE = 1e-4  # share of the most probable token's probability; drafts without these tokens are accepted as often
LIKELY = 12.0  # nats below the most probable token; sorting only these tokens is nearly always enough


class Candidates(NamedTuple):
    """A distribution without its zeros: token ids int64 [K], ascending, and their probabilities float64 [K]."""

    ids: NDArray[np.int64]
    probs: NDArray[np.float64]

    def place(self, token: int) -> int:
        """The index of a token in `ids`. Raises ValueError if the token is not in `ids`: a token that was not drawn
        from this distribution must not be verified by another token's probability."""
        place = bisect_left(self.ids, token)
        if place == len(self.ids) or self.ids[place] != token:
            raise ValueError(f"token {token} is none of the {len(self.ids)} that may be drawn here")
        return place

    def probability(self, token: int) -> float:
        """The probability of any token of the vocabulary."""
        return float(self.probs[self.ids == token].sum())


NO_CANDIDATES = Candidates(np.zeros(0, np.int64), np.zeros(0))


class Sampler:
    """Applies one request's settings to logits. A path is the list of tokens from the committed text to a node."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        eos: Sequence[int],
        vocab_size: int,
        constraint: Constraint | None = None,
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        """constraint: `params.structured`, at its beginning. bad_words: the token sequences of `params.bad_words`."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            largest_id = max(map(int, getattr(params, name) or ()), default=0)
            require(name, largest_id, largest_id < vocab_size, f"below the vocabulary size {vocab_size}")
        self.params = params
        self.processing = Processing(params, prompt, eos, vocab_size, constraint, bad_words)
        self.follows_path = self.processing.follows_path  # whether logits change depending on earlier tokens
        self._vocab_size = vocab_size
        self._softmax: Softmax = NumpySoftmax()
        self._buffers: list[Floats] = []  # [V], one for each path length
        # Asked for every row: whether tokens are left out, whether by their order, and the least share of likely ones.
        self._top_k = params.top_k if params.top_k < vocab_size else 0  # 0: every token
        self.truncates_by_order = self._top_k > 0 or params.top_p < 1
        self.truncates = self.truncates_by_order or params.min_p > 0
        self._least = max(params.min_p, NEGLIGIBLE)
        self._settings = settings_by(params.temperature, params.top_p, self._top_k, params.min_p)
        self._drawn = None if params.greedy else SoftmaxSettings(params.temperature, False, self._least)

    @property
    def output(self) -> list[int]:
        """The committed tokens."""
        return self.processing.output

    def use(self, softmax: Softmax) -> None:
        """Use this softmax from now on, instead of numpy's."""
        self._softmax, self._buffers = softmax, []

    def commit(self, tokens: Sequence[int]) -> None:
        self.processing.commit(tokens)
        if self.follows_path:  # it may end with `min_tokens`, and never begins later
            self.follows_path = self.processing.follows_path

    @property
    def settings(self) -> SoftmaxSettings | None:
        """What `choose` and `weights` will ask of a row's softmax; None if the request changes the logits first."""
        return None if self.follows_path else self._settings

    @property
    def drawn(self) -> SoftmaxSettings | None:
        """The same of `candidates`; None at temperature 0, too."""
        return None if self.follows_path else self._drawn

    def choose(
        self,
        logits: NDArray[np.float32],
        path: Sequence[int],
        stream: RandomStream,
        softmax: Softmax | None = None,
    ) -> int:
        """The next token after `path`, from logits [V]. softmax: see `weights`."""
        if self.params.greedy:
            scores, known = self._scored(logits, path, softmax)
            return known.best(scores)
        return self.weights(logits, path, softmax).draw(stream)

    def distribution(self, logits: NDArray[np.float32], path: Sequence[int]) -> NDArray[np.float64]:
        """Probabilities [V] float64 of the token after `path`; one-hot when greedy."""
        weights = self.weights(logits, path)
        return np.asarray(weights.values, np.float64) / weights.total

    def weights(self, logits: NDArray[np.float32], path: Sequence[int], softmax: Softmax | None = None) -> Weights:
        """The same up to a factor, maybe in a buffer that the next call with a path of this length overwrites.
        softmax: of this row, which its engine has prepared for the `settings`."""
        scores, known = self._scored(logits, path, softmax)
        if not (self.params.greedy or self.truncates):
            return known.weights(scores, self.params.temperature, self._buffer(path))
        return KeptWeights(*self._truncate(scores, known, path), self._vocab_size)

    def candidates(
        self, logits: NDArray[np.float32], path: Sequence[int], softmax: Softmax | None = None
    ) -> Candidates:
        """The distribution from which the draft draws the token after `path`, above temperature 0: `distribution`
        without its tail. The draft may draw from any distribution, as long as verification uses the same one as q.
        Empty where the constraint allows none of the tokens that the draft predicts: the branch ends there. softmax:
        see `weights`."""
        temperature, least = self.params.temperature, self._least
        if not self.follows_path:
            return self._cut(*(softmax or self._softmax).likely(logits, temperature, least))
        scores = self.processing.apply_open(logits, path)
        return NO_CANDIDATES if scores is None else self._cut(*self._softmax.likely(scores, temperature, least))

    def ranking(
        self, logits: NDArray[np.float32], path: Sequence[int], count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The `count` most probable tokens after `path`, best first, and their log-probabilities before temperature and
        truncation; the mass of unlikely tokens is neglected. A token that may not follow has -inf; where `candidates`
        is empty, every token has."""
        scores = self.processing.apply_open(logits, path)
        if scores is None:
            return np.arange(min(count, len(logits))), np.full(min(count, len(logits)), -np.inf)
        ids = largest(scores, count)
        peak = scores[best(scores)]
        total = float(np.exp(scores[scores > peak - LIKELY] - peak).sum(dtype=np.float64))
        return ids, scores[ids].astype(np.float64) - float(peak) - math.log(total)

    @staticmethod
    def named(columns: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens of columns of a row [V]: the same numbers."""
        return columns

    def log_probabilities(self, logits: NDArray[np.float32], path: Sequence[int]) -> NDArray[np.float64]:
        """Log-probabilities [V] after processors, penalties and constraint, before temperature and truncation."""
        return log_softmax(self._scored(logits, path)[0])

    def _scored(
        self, logits: NDArray[np.float32], path: Sequence[int], softmax: Softmax | None = None
    ) -> tuple[Floats, Softmax]:
        """Logits [V] after processing, if the request has any, and the softmax to use on them: the one that `weights`
        was given, unless they have changed. Raises RequestError if no token is left, DeadEndError after a path."""
        if self.follows_path:
            return self.processing.apply_checked(logits, path), self._softmax
        return logits, softmax or self._softmax

    def _buffer(self, path: Sequence[int]) -> Floats:
        """A buffer [V] for the row after `path`. Verifiers use at most one row of each path length at a time."""
        while len(self._buffers) <= len(path):
            self._buffers.append(np.empty(self._vocab_size, self._softmax.dtype))
        return self._buffers[len(path)]

    def _truncate(self, scores: Floats, softmax: Softmax, path: Sequence[int]) -> Candidates:
        """The distribution of processed scores [V] after temperature, min-p, top-k and top-p; if greedy, the best token
        alone. Only likely tokens are sorted, which is nearly always enough. softmax: of these scores."""
        params = self.params
        if params.greedy:
            return Candidates(np.array([best(scores)]), np.ones(1))
        if params.min_p > 0:
            return self._cut(*softmax.likely(scores, params.temperature, params.min_p))
        ids, weights = softmax.likely(scores, params.temperature, NEGLIGIBLE)
        if self._top_k > 0:
            if len(ids) < self._top_k:
                ids, _ = softmax.likely(scores, params.temperature, NEGLIGIBLE**2)
            ids = top(scores, ids, self._top_k)
            return self._cut(ids, np.exp((scores[ids].astype(np.float64) - scores[ids].max()) / params.temperature))
        every = softmax.weights(scores, params.temperature, self._buffer(path))
        if weights.sum() < params.top_p * every.total:
            ids, weights = np.arange(len(scores)), np.asarray(every.values, np.float64)
        kept = nucleus(weights, params.top_p * every.total)
        return Candidates(ids[kept], weights[kept] / weights[kept].sum())

    def _cut(self, ids: NDArray[np.int64], weights: NDArray[np.float64]) -> Candidates:
        """The distribution over only these tokens [K], after top-k and top-p."""
        if self.truncates_by_order:
            params = self.params
            if 0 < self._top_k < len(ids):
                kept = at_least(weights, np.sort(weights)[-self._top_k], self._top_k)
                ids, weights = ids[kept], weights[kept]
            if params.top_p < 1:
                kept = nucleus(weights, params.top_p * weights.sum())
                ids, weights = ids[kept], weights[kept]
        return Candidates(ids, weights / np.add.reduce(weights))  # the method `sum` would be Python


class ScoredRows:
    """A request's settings for the rows of one pass. `Sampler.weights` and `Sampler.choose` by row. Behind a row that
    is a dead end NOTHING follows, as if it were one more token."""

    def __init__(self, sampler: Sampler, logits: NDArray[np.float32], softmaxes: Sequence[Softmax | None] = ()) -> None:
        """logits: [rows, V]. softmaxes: of rows which the engine has prepared; there may be fewer than rows."""
        self._sampler, self._logits = sampler, logits
        self._softmaxes = (*softmaxes, *(None,) * (len(logits) - len(softmaxes)))

    def weights(self, row: int, path: Sequence[int]) -> Weights:
        try:
            return self._sampler.weights(self._logits[row], path, self._softmaxes[row])
        except DeadEndError:
            return DeadEnd()

    def choose(self, row: int, path: Sequence[int], stream: RandomStream) -> int:
        try:
            return self._sampler.choose(self._logits[row], path, stream, self._softmaxes[row])
        except DeadEndError:
            return NOTHING


def settings_by(temperature: float, top_p: float, top_k: int, min_p: float) -> SoftmaxSettings:
    """What these settings ask of the softmax of a row. top_k: 0 where it keeps all tokens."""
    if not temperature:
        return SoftmaxSettings(0.0, False, 0.0)
    share = min_p or (NEGLIGIBLE if top_k > 0 or top_p < 1 else 0.0)
    return SoftmaxSettings(temperature, not (min_p > 0 or top_k > 0), share)


def top(scores: Floats, likely: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Indices, ascending, of the `count` largest scores; the first of equal scores are taken. likely: ascending, of
    scores that are larger than all others; those of all others are looked at only where these are too few."""
    if len(likely) < count:
        return np.sort(largest(scores, count))
    values = scores[likely]
    return likely[at_least(values, np.partition(values, -count)[-count], count)]


def log_softmax(scores: Floats) -> NDArray[np.float64]:
    """Log-probabilities [V]."""
    logprobs: NDArray[np.float64] = scores.astype(np.float64)
    logprobs -= logprobs.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    return logprobs


def largest(scores: Floats, count: int) -> NDArray[np.int64]:
    """Indices of the `count` largest scores, best first; the earlier of equal scores comes first."""
    if not count:
        return np.zeros(0, np.int64)
    likely = (scores > scores.max() - LIKELY).nonzero()[0]
    if len(likely) < count:
        likely = (scores > -np.inf).nonzero()[0]
    if len(likely) > count:
        values = scores[likely]
        likely = likely[at_least(values, np.partition(values, -count)[-count], count)]
    found = likely[np.argsort(-scores[likely], kind="stable")[:count]]
    if len(found) < min(count, len(scores)):
        found = np.concatenate((found, (scores == -np.inf).nonzero()[0][: count - len(found)]))
    return np.asarray(found)


def nucleus(weights: NDArray[np.float64], mass: float) -> NDArray[np.int64]:
    """Indices, ascending, of the largest weights whose sum reaches `mass`; the first of equal weights are taken."""
    descending = np.sort(weights)[::-1]
    count = 1 + int(descending[:-1].cumsum().searchsorted(mass))
    return at_least(weights, descending[count - 1], count)


def at_least(weights: Floats, least: np.floating[Any], count: int) -> NDArray[np.int64]:
    """Indices, ascending, of the `count` largest weights that are at least `least`; of equal ones the first."""
    places = (weights >= least).nonzero()[0]
    surplus = len(places) - count
    return np.delete(places, (weights[places] == least).nonzero()[0][-surplus:]) if surplus else places
