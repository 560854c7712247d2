"""TokenBans: the tokens that `allowed_token_ids` and `bad_words` of a request leave after a text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class TokenBans:
    """The rule of one request. It depends on the text alone, so the rows of draft and target have the same masks."""

    def __init__(self, allowed: Sequence[int] | None, sequences: Sequence[Sequence[int]], vocab_size: int) -> None:
        """allowed: token ids; None for all. sequences: token sequences that may not occur in the output."""
        self._always = np.full(vocab_size, allowed is None)
        self._always[list(allowed or ())] = True
        # The sequences of several tokens, by the token before their last one.
        self._unfinished: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
        for *before, last in sequences:
            if last >= vocab_size:
                continue  # a token of the tokenizer that the model does not have is never written
            if before:
                self._unfinished[before[-1]].append((before, last))
            else:
                self._always[last] = False
        self._longest = max((len(before) for each in self._unfinished.values() for before, _ in each), default=0)

    @property
    def active(self) -> bool:
        """Whether any token may be banned."""
        return bool(self._unfinished) or not self._always.all()

    def after(self, output: Sequence[int], path: Sequence[int]) -> NDArray[np.bool_]:
        """[V]: whether each token may follow the output and a path. The caller does not write into it."""
        text = [*output[max(0, len(output) - self._longest) :], *path]
        waiting = self._unfinished.get(text[-1], []) if text else []
        banned = [last for before, last in waiting if text[-len(before) :] == before]
        if not banned:
            return self._always
        mask = self._always.copy()
        mask[banned] = False
        return mask
