"""PooledEngine: many sequences in one cache, so that rows of several requests are scored in one pass.

A pass's mask says which slots each row sees, and nothing says that the slots of one sequence lie together. So all
sequences share one cache of the engine's own, in which every row counts as speculative, and a sequence is a list of
slots. A pass appends the rows of all its requests, however many each has; nothing is padded but the whole. Committing
costs nothing: it writes down slots. Rows nobody refers to any more are garbage; when the cache is full of it, the live
rows move together.

On a CPU a pass of eight rows costs about half as much again as a pass of one, so requests that share passes share most
of their cost. The price is attention, whose matrices span the slots of all requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from ...models.errors import EngineError
from .base import FIRST_CAPACITY, Engine, EngineSpec, ForwardOutput, Pass, TokenBatch

LIVE_SHARE = 0.6  # compact rather than grow while no more than this share of the used slots is live
SPARE = 4  # give slots back when there are more than so many times as could be needed: attention spans all of them
NOTHING: NDArray[np.int64] = np.zeros(0, np.int64)


class PooledKVCache:
    """One sequence: `slots` of its committed rows, in order, and `drafted`, those of its speculative ones."""

    def __init__(self, pool: PooledEngine) -> None:
        self.slots, self.drafted = NOTHING, NOTHING
        pool.caches.add(self)

    @property
    def length(self) -> int:
        return len(self.slots)

    @property
    def speculative(self) -> int:
        return len(self.drafted)

    def commit(self, slots: Sequence[int]) -> None:
        """See KVCache.commit. Raises EngineError for a slot never computed."""
        if any(not 0 <= slot < self.speculative for slot in slots):
            raise EngineError(f"slots {list(slots)} were not computed; {self.speculative} speculative rows exist")
        self.slots = np.concatenate((self.slots, self.drafted[np.asarray(slots, np.int64)]))
        self.drafted = NOTHING

    def truncate(self, length: int) -> None:
        """See KVCache.truncate."""
        self.slots, self.drafted = self.slots[:length], NOTHING


class PooledEngine:
    """An engine whose caches share one buffer of at most `slots` rows, garbage included."""

    def __init__(self, engine: Engine, slots: int) -> None:
        """Raises EngineError when not even one sequence of the engine's own length fits."""
        if slots < engine.spec.capacity:
            raise EngineError(f"{slots} cache slots hold no sequence of {engine.spec.capacity}: allow more memory")
        self._engine = engine
        self._storage: Any = engine.new_cache()
        self._storage.limit = slots
        self.spec: EngineSpec = replace(engine.spec, capacity=slots)
        self.caches: WeakSet[PooledKVCache] = WeakSet()

    def new_cache(self) -> PooledKVCache:
        return PooledKVCache(self)

    def forward(self, batch: TokenBatch, cache: PooledKVCache) -> ForwardOutput:
        """See Engine.forward."""
        return self.forward_together([Pass(self, batch, cache)])[0]

    def forward_together(self, passes: Sequence[Pass]) -> list[ForwardOutput]:
        """Score the batches of several caches in one pass; each output is as its own pass would have given it.

        Raises EngineError when all rows together exceed the widest pass, or the live ones the cache.
        """
        counts = [each.batch.num_tokens for each in passes]
        rows = sum(counts)
        width = self.spec.width_for(rows)
        self._make_room(width)
        used = int(self._storage.speculative)
        mask = np.zeros((width, used + width), np.bool_)
        token_ids, position_ids = np.zeros(width, np.int64), np.zeros(width, np.int64)
        first = 0
        for (_, batch, cache), count in zip(passes, counts, strict=True):
            new = used + np.arange(first, first + count)
            own = mask[first : first + count]
            own[:, cache.slots] = True
            own[:, np.concatenate((cache.drafted, new))] = batch.mask[:count, : cache.speculative + count]
            token_ids[first : first + count] = batch.token_ids[:count]
            position_ids[first : first + count] = batch.position_ids[:count]
            first += count
        wanted = passes[0].batch.output_rows if len(passes) == 1 else np.arange(width)
        output = self._engine.forward(TokenBatch(token_ids, position_ids, mask, wanted, rows), self._storage)
        first, outputs = 0, []
        for (_, batch, cache), count in zip(passes, counts, strict=True):
            cache.drafted = np.concatenate((cache.drafted, used + np.arange(first, first + count)))
            last_only = len(batch.output_rows) == 1 < count
            begin = first + count - 1 if last_only else first
            outputs.append(output if len(passes) == 1 else part(output, slice(begin, first + count)))
            first += count
        return outputs

    def close(self) -> None:
        """The engine stays its owner's to close; what the sequences held is free."""
        self._storage = None

    def _make_room(self, width: int) -> None:
        """Space for one more pass: it grows, unless it is mostly garbage or may not; after a burst it shrinks."""
        used, limit = int(self._storage.speculative), self.spec.capacity
        needed = width + sum(each.length + each.speculative for each in self.caches)
        spare = self._storage.capacity > SPARE * max(needed, FIRST_CAPACITY)
        if used + width <= self._storage.capacity and not spare:
            return
        live = np.unique(
            np.concatenate([NOTHING, *(rows for each in self.caches for rows in (each.slots, each.drafted))])
        )
        if spare or used + width > limit or len(live) <= LIVE_SHARE * used:
            self._compact(live)
        if spare:
            self._storage.shrink(2 * needed)
        if len(live) + width > limit:
            raise EngineError(
                f"the {len(live)} rows of all requests leave no room for {width} more in {limit} cache slots: "
                "run fewer requests at a time, or allow more memory"
            )

    def _compact(self, live: NDArray[np.int64]) -> None:
        """Move the live rows together and tell every sequence where they are now."""
        moved = np.zeros(int(self._storage.speculative), np.int64)
        moved[live] = np.arange(len(live))
        self._storage.compact(live)
        for cache in self.caches:
            cache.slots, cache.drafted = moved[cache.slots], moved[cache.drafted]


def part(output: ForwardOutput, rows: slice) -> ForwardOutput:
    """The results of neighbouring rows, not copied."""
    return ForwardOutput(
        output.logits[rows],
        None if output.top_ids is None else output.top_ids[rows],
        None if output.top_logprobs is None else output.top_logprobs[rows],
        None if output.acceptance is None else output.acceptance[rows],
    )
