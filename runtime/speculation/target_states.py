"""TargetStates: what a draft that reads its target's states has yet to read of them."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...models.config import LlamaConfig, Reading

States = NDArray[np.float32]
KEPT = 64  # last tokens of a text whose states are kept, and the most that a draft leaves unread


class TargetStates:
    """The target's states of the last committed tokens of a text. A draft reads a token with the state of the token
    before it, so it never reads the first one of a text.

    end: how many tokens of the text the target has read."""

    def __init__(self, reads: Reading, model: LlamaConfig) -> None:
        self._inputs, self._width = reads.inputs, model.state_inputs
        self._parts: deque[States] = deque()
        self._begin = self.end = 0  # tokens before the first state, and before the end

    def add(self, start: int, states: States, needed: int) -> None:
        """Copies the states of tokens from `start` on. needed: the first one to stay, as the last KEPT tokens' do."""
        if start != self.end:
            self._parts.clear()
            self._begin = start
        self._parts.append(states.copy())
        self.end = start + len(states)
        while self._begin + len(self._parts[0]) <= min(needed, self.end - KEPT):
            self._begin += len(self._parts.popleft())

    def before(self, first: int, count: int) -> States:
        """The draft's input for `count` tokens from `first` on, [count, state_inputs]."""
        given, at = np.zeros((count, self._width), np.float32), self._begin
        for part in self._parts:
            low, high = max(at, first - 1), min(at + len(part), first - 1 + count)
            if low < high:
                given[low - first + 1 : high - first + 1, : self._inputs] = part[low - at : high - at]
            at += len(part)
        return given

    def after(self, own: Sequence[States]) -> States:
        """The draft's input for nodes whose parents have these states of the draft."""
        given = np.zeros((len(own), self._width), np.float32)
        given[:, self._inputs :] = own
        return given


def salt_after(salt: str | None, text: Sequence[int]) -> str:
    """The salt of a draft's cache after this text, which is in no row of the cache, but in every state."""
    return f"{salt!r} {hashlib.sha256(np.array(text, np.int64).tobytes()).hexdigest()}"
