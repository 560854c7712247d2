"""SamplingParams, and Sampler: logits of a node -> the distribution, or the token, of that node's own path.

The order is vLLM's: logits processors, min_tokens, penalties, (greedy: arg-max) temperature, min-p, top-k, top-p.
Draft and target go through the same Sampler, so p and q at a node are what the request's settings make of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..models.errors import RequestError
from .random import RandomStream

LogitsProcessor = Callable[[Sequence[int], NDArray[np.float64]], NDArray[np.float64]]
REPETITION_PENALTIES = (1e-6, 1e6)  # beyond that, logits overflow
NEGLIGIBLE = 1e-4  # of the most probable token's probability: a draft without such tokens is accepted as often
LIKELY = 12.0  # nats below the best: sorting so much of a vocabulary is nearly always enough


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """vLLM's names and meanings. Raises RequestError when a value is out of range.

    temperature 0 is greedy. top_k 0 and top_p 1 keep everything. min_p is relative to the most probable token. The
    repetition penalty (1 = none) counts prompt and output, presence and frequency count the output alone. stop
    strings end the text before themselves. logprobs: how many alternatives to report per token; None reports nothing.
    A logits processor gets the output so far, this path included, and float64 logits [V]; it returns logits [V].
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)  # the one place a frozen field is normalised
        require("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1")
        require("temperature", self.temperature, 0 <= self.temperature < math.inf, "0 (greedy) or positive")
        require("top_k", self.top_k, self.top_k >= 0, "0 (off) or positive")
        require("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        require("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]")
        least, most = REPETITION_PENALTIES
        in_range = least <= self.repetition_penalty <= most
        require("repetition_penalty", self.repetition_penalty, in_range, f"between {least:g} and {most:g}")
        require("presence_penalty", self.presence_penalty, -2 <= self.presence_penalty <= 2, "in [-2, 2]")
        require("frequency_penalty", self.frequency_penalty, -2 <= self.frequency_penalty <= 2, "in [-2, 2]")
        require("min_tokens", self.min_tokens, 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens")
        require("stop", self.stop, all(self.stop), "non-empty strings")
        require("stop_token_ids", self.stop_token_ids, all(t >= 0 for t in self.stop_token_ids), "token ids")
        require("seed", self.seed, self.seed is None or self.seed >= 0, "None or a non-negative integer")
        require("logprobs", self.logprobs, self.logprobs is None or 0 <= self.logprobs <= 20, "None or in [0, 20]")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def require(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise RequestError(f"{name} must be {expected}, not {value!r}")


class Candidates(NamedTuple):
    """A distribution without its zeros: token ids int64 [K] and their probabilities float64 [K]."""

    ids: NDArray[np.int64]
    probs: NDArray[np.float64]

    def place(self, token: int) -> int:
        """Where a token is that these probabilities allow."""
        return int((self.ids == token).argmax())

    def probability(self, token: int) -> float:
        """Of any token of the vocabulary."""
        return float(self.probs[self.ids == token].sum())


class Sampler:
    """One request's settings over its history. A path is the tokens between the committed text and a node."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], eos: Sequence[int], vocab_size: int) -> None:
        for token in params.stop_token_ids:
            require("stop_token_ids", token, token < vocab_size, f"below the vocabulary size {vocab_size}")
        self.params = params
        self.output: list[int] = []
        self._ending = np.array(sorted({*eos, *params.stop_token_ids}), np.int64)
        self._prompt = np.array(sorted(set(prompt)), np.int64)
        self._counts = np.zeros(vocab_size, np.int64)
        self._truncates = params.top_k > 0 or params.min_p > 0 or params.top_p < 1
        self._penalises = (
            params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )

    @property
    def follows_path(self) -> bool:
        """Whether logits are changed depending on the tokens before them."""
        return self._penalises or bool(self.params.logits_processors) or self.params.min_tokens > len(self.output)

    def commit(self, tokens: Sequence[int]) -> None:
        """Tokens that became output."""
        self.output.extend(tokens)
        for token in tokens:
            self._counts[token] += 1

    def choose(self, logits: NDArray[np.float32], path: Sequence[int], stream: RandomStream) -> int:
        """The next token after `path`, from logits [V]."""
        if not self.params.greedy:
            return stream.categorical(self.distribution(logits, path))
        return int(self._processed(logits, path).argmax() if self.follows_path else logits.argmax())

    def distribution(self, logits: NDArray[np.float32], path: Sequence[int]) -> NDArray[np.float64]:
        """Probabilities [V] float64 of the token after `path`; one-hot when greedy."""
        scores = self._processed(logits, path) if self.follows_path else logits
        if not (self.params.greedy or self._truncates):
            return softmax(scores, self.params.temperature)
        probabilities = np.zeros(len(scores))
        if self.params.greedy:
            probabilities[scores.argmax()] = 1.0
        else:
            kept = self._truncated(scores, self.params.min_p)
            probabilities[kept.ids] = kept.probs
        return probabilities

    def candidates(self, logits: NDArray[np.float32], path: Sequence[int]) -> Candidates:
        """What a draft draws the token after `path` from, above temperature 0: the same distribution without its tail.
        Drafts may draw from whatever they like, as long as verification knows what it was."""
        scores = self._processed(logits, path) if self.follows_path else logits
        return self._truncated(scores, max(self.params.min_p, NEGLIGIBLE))

    def log_probabilities(self, logits: NDArray[np.float32], path: Sequence[int]) -> NDArray[np.float64]:
        """Log-probabilities [V] after processors and penalties, before temperature and truncation."""
        scores = self._processed(logits, path)
        scores -= scores.max()
        return np.asarray(scores - np.log(np.exp(scores).sum()))

    def _truncated(self, scores: NDArray[np.floating[Any]], min_p: float) -> Candidates:
        """The distribution of processed scores [V] after temperature, min-p, top-k and top-p."""
        params = self.params
        if min_p > 0:
            ids = (scores >= float(scores.max()) + params.temperature * math.log(min_p)).nonzero()[0]
            scores = scores[ids]
        else:
            ids = np.arange(len(scores))
        if 0 < params.top_k < len(ids):
            best = np.sort(largest(scores, params.top_k))
            ids, scores = ids[best], scores[best]
        probs = softmax(scores, params.temperature)
        if params.top_p < 1:
            kept = np.sort(nucleus(probs, params.top_p))
            ids, probs = ids[kept], probs[kept] / probs[kept].sum()
        return Candidates(ids, probs)

    def _processed(self, logits: NDArray[np.float32], path: Sequence[int]) -> NDArray[np.float64]:
        """Logits [V] in float64 after processors, min_tokens and penalties."""
        params = self.params
        scores: NDArray[np.float64] = logits.astype(np.float64)
        for processor in params.logits_processors:
            scores = np.asarray(processor([*self.output, *path], scores), np.float64)
            if scores.shape != logits.shape:
                raise RequestError(f"a logits processor returned shape {scores.shape} instead of {logits.shape}")
        if len(self.output) + len(path) < params.min_tokens:
            scores[self._ending] = -np.inf
        if self._penalises:
            scores = self._penalised(scores, path)
        highest = scores.max()
        if highest == -np.inf:
            raise RequestError("no token is left to choose from: logits processors or min_tokens removed all of them")
        if not highest < np.inf:
            raise RequestError(f"a logit became {highest}: logits processors must return finite numbers or -inf")
        return scores

    def _penalised(self, scores: NDArray[np.float64], path: Sequence[int]) -> NDArray[np.float64]:
        params = self.params
        counts = self._counts
        if path:
            counts = counts + np.bincount(path, minlength=len(counts))
        if params.repetition_penalty != 1:
            seen = counts > 0
            seen[self._prompt] = True
            penalised = np.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
            scores = np.where(seen, penalised, scores)
        charge = params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        return np.asarray(scores - charge)


def softmax(scores: NDArray[np.floating[Any]], temperature: float) -> NDArray[np.float64]:
    """Probabilities of scores, in float64."""
    weights: NDArray[np.float64] = scores.astype(np.float64)
    weights -= weights.max()
    weights /= temperature
    np.exp(weights, out=weights)
    weights *= 1 / weights.sum()
    return weights


def largest(scores: NDArray[np.floating[Any]], count: int) -> NDArray[np.int64]:
    """Where the `count` largest scores are, best first; equal ones in their order."""
    likely = (scores > scores.max() - LIKELY).nonzero()[0]
    if len(likely) < count:
        likely = np.arange(len(scores))
    return np.asarray(likely[np.argsort(-scores[likely], kind="stable")[:count]])


def nucleus(probs: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """Where the most probable tokens are that together reach `top_p`, best first."""
    likely = (probs > NEGLIGIBLE * probs.max()).nonzero()[0]
    if probs[likely].sum() < top_p:
        likely = np.arange(len(probs))
    order = likely[np.argsort(-probs[likely], kind="stable")]
    return np.asarray(order[np.cumsum(probs[order]) - probs[order] < top_p])
