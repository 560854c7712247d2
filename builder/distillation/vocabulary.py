"""The trimmed output vocabulary of a draft (FR-Spec, arXiv 2502.14856): the tokens that its target writes most."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ...models.errors import ConfigError
from .shards import GIVEN, WrittenText


def expected_counts(texts: Iterable[WrittenText], vocab_size: int) -> NDArray[np.float64]:
    """How often the target writes each token [V]: the sum of its recorded probabilities, which is less noisy than the
    counts of written tokens, and above 0 for tokens that were probable but not drawn."""
    counts = np.zeros(vocab_size)
    for text in texts:
        own = text.kinds != GIVEN
        weights = np.exp(text.logprobs[own].astype(np.float64))
        counts += np.bincount(text.ids[own].ravel().astype(np.int64), weights.ravel(), vocab_size)
    return counts


def kept_tokens(counts: NDArray[np.float64], size: int, always: Iterable[int]) -> NDArray[np.int64]:
    """The ids of the `size` most frequent tokens, ascending. always: special tokens and those that end a text, which
    are kept however rare they are. The lower id comes first among equal counts. Raises ConfigError where `size` has no
    room for those of `always`."""
    size = min(size, len(counts))
    special = np.array(sorted({token for token in always if 0 <= token < len(counts)}), np.int64)
    if len(special) > size:
        raise ConfigError(
            f"a draft of {size} tokens has no room for the {len(special)} special tokens of its target, which it must "
            f"be able to write: ask for at least --vocabulary {len(special) + 1}"
        )
    order = np.argsort(-counts, kind="stable")
    others = order[~np.isin(order, special)][: size - len(special)]
    return np.sort(np.concatenate((special, others)))


def offsets(kept: NDArray[np.int64]) -> NDArray[np.int64]:
    """`d2t` [N] of a trimmed draft: the target's id of output i is i + d2t[i]."""
    return kept - np.arange(len(kept))
