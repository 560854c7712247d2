"""Processing: what a request changes in logits, depending on the tokens before: biases, logits processors, min_tokens,
penalties, and the masks of banned tokens and of a structured output, in this order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...models.errors import RequestError
from .bans import TokenBans
from .constraint import Constraint, PathMasks
from .params import SamplingParams

LARGEST_LOGIT = float(np.finfo(np.float32).max)  # the softmax of engines reads fp32
F = TypeVar("F", bound=np.floating[Any])


class DeadEndError(RequestError):
    """Nothing may follow a path of tokens that are only proposed. The text may end before it comes there; if it does
    not, its next round begins there and raises the error."""


class Processing:
    """A path is the list of tokens from the committed text to a node. output: the committed tokens."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        eos: Sequence[int],
        vocab_size: int,
        constraint: Constraint | None,
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        """constraint: at its beginning; None allows every text. bad_words: see Sampler."""
        self.output: list[int] = []
        self._params = params
        self._masks = None if constraint is None else PathMasks(constraint)
        self.is_constrained = constraint is not None
        bans = TokenBans(params.allowed_token_ids, bad_words, vocab_size)
        self._bans = bans if bans.active else None
        biased = params.logit_bias or {}
        self._biased = np.fromiter(biased, np.int64, len(biased))
        self._biases = np.fromiter(biased.values(), np.float64, len(biased))
        ending = {token for token in (*eos, *params.stop_token_ids) if 0 <= token < vocab_size}
        self._ending = np.array(sorted(ending), np.int64)
        self._prompt = np.array(sorted(set(prompt)), np.int64)
        self._counts = np.zeros(vocab_size, np.int64)
        self._penalises = (
            params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )
        # Asked for every row: whether masks may remove tokens, and whether something changes logits in the whole text.
        self._removes = self._masks is not None or self._bans is not None
        self._changes = self._penalises or bool(params.logits_processors) or bool(params.logit_bias)
        self._min_tokens = params.min_tokens

    @property
    def follows_path(self) -> bool:
        """Whether there is anything to change now."""
        return self._removes or self._changes or self._min_tokens > len(self.output)

    @property
    def changes_logits(self) -> bool:
        """Whether biases, processors, min_tokens or penalties change logits now; masks only remove tokens."""
        return self._changes or self._min_tokens > len(self.output)

    def commit(self, tokens: Sequence[int]) -> None:
        if self._masks is not None:
            self._masks.commit(tokens)
        self.output.extend(tokens)
        for token in tokens if self._penalises else ():
            self._counts[token] += 1

    def apply(self, logits: NDArray[np.float32], path: Sequence[int]) -> NDArray[np.floating[Any]]:
        """The changed logits [V] after `path`; float64 unless only masks change them. All may be -inf."""
        changed = self._changed(logits, path) if self.changes_logits else logits
        return masked(changed, self._mask(path))

    def constrain(self, logits: NDArray[F], path: Sequence[int]) -> NDArray[F]:
        """The logits [V] with -inf for each token that the constraint does not allow after `path`. The same array
        without a constraint, and where `PathMasks.after` is None: a text that goes there is cut before."""
        return masked(logits, None if self._masks is None else self._masks.after(path))

    def apply_checked(self, logits: NDArray[np.float32], path: Sequence[int]) -> NDArray[np.floating[Any]]:
        """The same, of which one is a number. Raises RequestError if no token is left. Behind a path that is not empty
        this, and any error of a processor or of the constraint, is a DeadEndError."""
        try:
            return checked(self.apply(logits, path))
        except Exception as error:  # a processor is the caller's code
            if not path:
                raise
            raise DeadEndError(f"nothing follows the tokens {list(path)} of a proposal") from error

    def apply_open(self, logits: NDArray[np.float32], path: Sequence[int]) -> NDArray[np.floating[Any]] | None:
        """What `apply` makes of the draft's logits; None if a branch of the proposal ends after `path`: at a dead end,
        where the text has ended or has left the grammar, or where the draft predicts none of the tokens that may
        follow."""
        try:
            scores = self.apply(logits, path)
        except Exception:
            if not path:
                raise
            return None
        return None if self._is_left(path) or scores.max() == -np.inf else scores

    def allows_any(self, tokens: NDArray[np.int64], path: Sequence[int]) -> bool:
        """Whether one of these tokens [N] may follow `path`, after which a branch has not ended."""
        mask = self._mask(path)
        return mask is None or bool(mask[tokens].any())

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """How many tokens of a continuation are allowed, counted from the first one."""
        for index, token in enumerate(tokens if self._removes else ()):
            try:
                mask, is_left = self._mask(tokens[:index]), self._is_left(tokens[:index])
            except RequestError:  # the grammar exceeds a limit here
                return index
            if is_left or (mask is not None and not mask[token]):
                return index
        return len(tokens)

    def forced(self) -> list[int]:
        """The tokens that probably follow the output by the constraint alone."""
        return [] if self._masks is None else self._masks.forced()

    def _is_left(self, path: Sequence[int]) -> bool:
        """Whether the text has ended, or has left the grammar, after `path`."""
        return self._masks is not None and self._masks.after(path) is None

    def _mask(self, path: Sequence[int]) -> NDArray[np.bool_] | None:
        """[V]: whether each token may follow `path` by the constraint and the bans; None if neither says anything."""
        lawful = None if self._masks is None else self._masks.after(path)
        if self._bans is None:
            return lawful
        free = self._bans.after(self.output, path)
        return free if lawful is None else lawful & free

    def completes(self, path: Sequence[int]) -> bool:
        """Whether the text is complete after `path`, which the constraint allows."""
        return self._masks is not None and self._masks.ends(path)

    def _changed(self, logits: NDArray[np.float32], path: Sequence[int]) -> NDArray[np.float64]:
        """Logits [V] in float64 after biases, processors, min_tokens and penalties."""
        params = self._params
        scores: NDArray[np.float64] = logits.astype(np.float64)
        scores[self._biased] += self._biases
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
        """Whether the masks leave only tokens that end the text; min_tokens cannot prevent this end."""
        mask = self._mask(path)
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


def masked(logits: NDArray[F], mask: NDArray[np.bool_] | None) -> NDArray[F]:
    """The logits [V] with -inf where `mask` [V] is False. The same array if there is no mask."""
    if mask is None:
        return logits
    allowed = np.full_like(logits, -np.inf)
    np.copyto(allowed, logits, where=mask)
    return allowed


def checked(scores: NDArray[F]) -> NDArray[F]:
    """The same scores [V]. Raises RequestError if all are -inf."""
    if scores.max() == -np.inf:
        raise RequestError(
            "no token is left to choose from: logits processors, min_tokens, allowed_token_ids, bad_words or the "
            "structured output removed all"
        )
    return scores
