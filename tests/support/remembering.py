"""A fake engine for pools: each row of its cache stores the text from which it was computed, like keys and values."""

from __future__ import annotations

import numpy as np
from fakes import FakeCache, FakeEngine
from numpy.typing import NDArray

from draftwood.runtime.engines.base import ForwardOutput, KVCache, TokenBatch


class RememberingCache(FakeCache):
    """It grows like a real one."""

    capacity = 64

    def __init__(self, places: bool = False) -> None:
        super().__init__(places)
        self.texts: list[tuple[int, ...]] = []

    def compact(self, slots: NDArray[np.int64]) -> None:
        super().compact(slots)
        self.texts = [self.texts[slot] for slot in slots.tolist()]

    def drop(self, slots: int) -> None:
        super().drop(slots)
        del self.texts[slots:]

    def move(self, rows: NDArray[np.int64], first: int) -> None:
        super().move(rows, first)
        self.texts[first : first + len(rows)] = [self.texts[slot] for slot in rows.tolist()]


class RememberingEngine(FakeEngine):
    """Refuses a row that sees a row of another text, even if their tokens and positions are the same. `scored` counts
    rows."""

    scored = 0

    def new_cache(self, salt: str | None = None) -> RememberingCache:
        return RememberingCache(self.places)

    def score(self, batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        assert isinstance(cache, RememberingCache)
        start = cache.speculative
        del cache.texts[start:]
        assert batch.mask.shape[1] <= cache.most, "more rows than the cache may hold"
        while cache.capacity < batch.mask.shape[1]:
            cache.capacity = min(2 * cache.capacity, cache.most)
        output = super().score(batch, cache)
        self.scored += batch.num_tokens
        cache.texts += [()] * (cache.speculative - start)
        slots = range(start, start + batch.num_tokens) if batch.slots is None else batch.slots.tolist()
        for slot in slots:
            text = self._context(cache, slot)
            cache.texts[slot] = text
            for seen in np.flatnonzero(cache.rows[slot][2]).tolist():
                assert cache.texts[seen] == text[: len(cache.texts[seen])], "a row sees another text's row"
        return output
