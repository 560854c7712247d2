"""Processing: what a request changes in logits, depending on the tokens before: logits processors, min_tokens,
penalties, and the constraint of a structured output, in this order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...models.errors import RequestError
from .constraint import Constraint, PathMasks
from .params import SamplingParams

LARGEST_LOGIT = float(np.finfo(np.float32).max)  # the softmax of engines reads fp32
F = TypeVar("F", bound=np.floating[Any])


class Processing:
    """The state of one request. A path is the list of tokens from the committed text to a node. output: the committed
    tokens."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        eos: Sequence[int],
        vocab_size: int,
        constraint: Constraint | None,
    ) -> None:
        """constraint: at its beginning; None allows every text."""
        self.output: list[int] = []
        self._params = params
        self._masks = None if constraint is None else PathMasks(constraint)
        ending = {token for token in (*eos, *params.stop_token_ids) if 0 <= token < vocab_size}
        self._ending = np.array(sorted(ending), np.int64)
        self._prompt = np.array(sorted(set(prompt)), np.int64)
        self._counts = np.zeros(vocab_size, np.int64)
        self._penalises = (
            params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )

    @property
    def follows_path(self) -> bool:
        """Whether there is anything to change now."""
        return self._masks is not None or self.changes_logits

    @property
    def changes_logits(self) -> bool:
        """Whether processors, min_tokens or penalties change logits now; a constraint only removes tokens."""
        params = self._params
        return self._penalises or bool(params.logits_processors) or params.min_tokens > len(self.output)

    def commit(self, tokens: Sequence[int]) -> None:
        """Append tokens to the output."""
        if self._masks is not None:
            self._masks.commit(tokens)
        self.output.extend(tokens)
        for token in tokens:
            self._counts[token] += 1

    def apply(self, logits: NDArray[np.float32], path: Sequence[int]) -> NDArray[np.floating[Any]]:
        """The changed logits [V] after `path`; float64 unless only the constraint changes them. All may be -inf, see
        `checked`."""
        return self.constrain(self._changed(logits, path) if self.changes_logits else logits, path)

    def constrain(self, logits: NDArray[F], path: Sequence[int]) -> NDArray[F]:
        """The logits [V] with -inf for each token that the constraint does not allow after `path`. The same array
        without a constraint, and where `PathMasks.after` is None: a text that goes there is cut before."""
        mask = None if self._masks is None else self._masks.after(path)
        if mask is None:
            return logits
        allowed = np.full_like(logits, -np.inf)
        np.copyto(allowed, logits, where=mask)
        return allowed

    def is_closed(self, scores: NDArray[np.floating[Any]], path: Sequence[int]) -> bool:
        """Whether the constraint ends a branch of the proposal behind `path`: no token can follow, or none that the
        draft predicts. scores [V]: what `apply` made of the draft's logits."""
        return self._masks is not None and (self._masks.after(path) is None or scores.max() == -np.inf)

    def allows_any(self, tokens: NDArray[np.int64], path: Sequence[int]) -> bool:
        """Whether one of these tokens [N] may follow `path`."""
        if self._masks is None:
            return True
        mask = self._masks.after(path)
        return mask is not None and bool(mask[tokens].any())

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """How many tokens of a continuation the constraint allows, counted from the first one."""
        if self._masks is None:
            return len(tokens)
        for index, token in enumerate(tokens):
            mask = self._masks.after(tokens[:index])
            if mask is None or not mask[token]:
                return index
        return len(tokens)

    def completes(self, path: Sequence[int]) -> bool:
        """Whether the text is complete behind `path`, which the constraint allows."""
        return self._masks is not None and self._masks.ends(path)

    def _changed(self, logits: NDArray[np.float32], path: Sequence[int]) -> NDArray[np.float64]:
        """Logits [V] in float64 after processors, min_tokens and penalties."""
        params = self._params
        scores: NDArray[np.float64] = logits.astype(np.float64)
        for processor in params.logits_processors:
            # A copy, because the processor may keep the array that it returned, and the code below writes into it.
            scores = np.array(processor([*self.output, *path], scores), np.float64)
            if scores.shape != logits.shape:
                raise RequestError(f"a logits processor returned shape {scores.shape} instead of {logits.shape}")
        if len(self.output) + len(path) < params.min_tokens and not self._must_end(path):
            scores[self._ending] = -np.inf
        if self._penalises:
            with np.errstate(over="ignore"):  # the check below refuses overflows
                scores = self._penalise(scores, path)
        highest = scores.max()
        if highest != -np.inf and not abs(highest) <= LARGEST_LOGIT:
            raise RequestError(
                f"the largest logit became {highest}: logits processors must return numbers of fp32, or -inf"
            )
        scores[scores < -LARGEST_LOGIT] = -np.inf  # as in fp32
        return scores

    def _must_end(self, path: Sequence[int]) -> bool:
        """Whether the constraint allows only tokens that end the text; min_tokens cannot prevent this end."""
        mask = None if self._masks is None else self._masks.after(path)
        return mask is not None and np.count_nonzero(mask) == np.count_nonzero(mask[self._ending])

    def _penalise(self, scores: NDArray[np.float64], path: Sequence[int]) -> NDArray[np.float64]:
        params = self._params
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


def checked(scores: NDArray[F]) -> NDArray[F]:
    """The same scores [V]. Raises RequestError if all are -inf."""
    if scores.max() == -np.inf:
        raise RequestError(
            "no token is left to choose from: logits processors, min_tokens or the structured output removed all"
        )
    return scores
