"""A target that shows states, and a draft that reads them: functions of what they have read, without weights.

A target's state is a number for the whole text up to its token, so a draft that gets the state of another row, round or
text says something else. `told` knows the text of every such number."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from fakes import FakeCache, FakeEngine, Predict, random_head, random_model
from numpy.typing import NDArray

from draftwood.models.config import Reading
from draftwood.runtime.engines.base import ForwardOutput, KVCache, TokenBatch
from draftwood.runtime.engines.cache import check_states

told: dict[float, tuple[int, ...]] = {}


def number(content: Sequence[object]) -> float:
    """A whole number that float32 holds, above 0."""
    return float(1 + int.from_bytes(hashlib.sha256(repr(content).encode()).digest()[:3], "little") // 2)


def slots_of(batch: TokenBatch, cache: FakeCache) -> NDArray[np.int64]:
    """Where the rows of the latest pass went."""
    after = cache.speculative - batch.num_tokens + np.arange(batch.num_tokens)
    return after if batch.slots is None else batch.slots


class ShowingEngine(FakeEngine):
    """A target with one tap. [0]: the number of a row's text; [1]: nothing."""

    def __init__(self, predict: Predict, vocab_size: int) -> None:
        super().__init__(predict, vocab_size)
        self.spec = replace(self.spec, model=replace(self.spec.model, taps=(1,)), outputs=("logits", "states"))

    def score(self, batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        output = super().score(batch, cache)
        check_states(self.spec, batch)
        if not batch.states_read:
            return output
        assert isinstance(cache, FakeCache)
        states = np.zeros((batch.num_tokens, 2), np.float32)
        for row, slot in enumerate(slots_of(batch, cache).tolist()):
            text = self._context(cache, slot)
            states[row, 0] = number(text)
            told[float(states[row, 0])] = text
        return output._replace(states=states)


class ReadingEngine(FakeEngine):
    """A draft whose rows are pairs of a token and what it was read with: a row's context is a path of these. Its own
    state is the number of this path."""

    def __init__(self, predict: Predict, vocab_size: int, kept_tokens: tuple[int, ...] = (), seed: int = 0) -> None:
        super().__init__(predict, vocab_size, "draft", accept=random_head(seed), kept_tokens=kept_tokens)
        self.spec = replace(self.spec, model=replace(self.spec.model, reads=Reading((1,), 2)))
        self._pairs = list[tuple[int, float, float]]()  # by the token that a cache holds in place of a pair

    def score(self, batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        check_states(self.spec, batch)
        assert batch.states is not None and isinstance(cache, FakeCache)
        first = len(self._pairs)
        for token, states in zip(batch.token_ids.tolist(), batch.states.tolist(), strict=False):
            assert (states[0] > 0) != (states[2] > 0), "a row has the target's state, or the draft's own"
            self._pairs.append((token, states[0], states[2]))
        numbers = np.zeros(len(batch.token_ids), np.int64)
        numbers[: batch.num_tokens] = np.arange(first, len(self._pairs))
        output = super().score(replace(batch, token_ids=numbers, states=None), cache)
        states = np.zeros((batch.num_tokens, 2), np.float32)
        for row, slot in enumerate(slots_of(batch, cache).tolist()):
            states[row, 0] = number(self._context(cache, slot))
        return output._replace(states=states if batch.states_read else None)

    def _context(self, cache: FakeCache, slot: int) -> tuple[int, ...]:
        """The tokens and numbers of a row's path, which `predict` gets."""
        pairs = [self._pairs[index] for index in super()._context(cache, slot)]
        return tuple(int(each) for pair in pairs for each in pair)


def reading_pair(seed: int, vocab_size: int, kept_tokens: tuple[int, ...] = ()) -> tuple[ShowingEngine, ReadingEngine]:
    """A target, and a draft that knows its text from its states and is right to a degree."""
    truth, noise = random_model(seed, vocab_size), random_model(seed + 1000, vocab_size)

    def predict(context: tuple[int, ...]) -> object:
        path = [context[at : at + 3] for at in range(0, len(context), 3)]
        text = tuple(token for token, _, _ in path)
        return 0.6 * truth((0, *text)) + 0.4 * noise(context)

    return ShowingEngine(truth, vocab_size), ReadingEngine(predict, vocab_size, kept_tokens, seed)  # type: ignore[arg-type]
