"""StaticPool: the rows of several sequences in one pass over a cache of fixed size, without padding between them.

The cache has a region of slots for each sequence, which holds its committed rows in order. One area after the regions
holds the speculative rows of all sequences. A pass writes its rows to the next slots of this area. The input
`sequences` gives the rows and the region of each sequence, so attention reads only the committed rows of a row's own
sequence. A commit copies accepted rows to the region; one launch before the next pass does this for all sequences. Rows
of ended or committed proposals in the area are garbage. The live rows are compacted when this makes the mask of a pass
narrower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ....models.errors import EngineError
from ....plugins.tree_attention.op import SequenceRow
from ..base import ForwardOutput, Pass, TokenBatch, check_cache
from ..cache import check_mask, check_states, joined_states
from ..layout import PassShape, mask_columns
from .memory import CacheMemory

if TYPE_CHECKING:  # engine.py imports this module
    from .engine import StaticEngine

NO_COLUMNS: NDArray[np.int64] = np.zeros(0, np.int64)


class SharedKVCache:
    """A sequence's rows, from `first_slot` on. speculative_columns: the mask columns of speculative ones, in order."""

    def __init__(self, pool: StaticPool, first_slot: int) -> None:
        self._pool = pool
        self.first_slot = first_slot
        self.length = 0
        self.speculative_columns = NO_COLUMNS

    @property
    def speculative(self) -> int:
        return len(self.speculative_columns)

    def commit(self, slots: Sequence[int]) -> None:
        """See KVCache.commit. Raises EngineError for a slot that was not computed, and for too many rows."""
        self._pool.commit(self, slots)

    def truncate(self, length: int) -> None:
        self._pool.truncate(self, length)

    @property
    def memory(self) -> CacheMemory:
        return self._pool.memory

    def has_room(self, first: int, rows: int) -> bool:
        """Whether `rows` rows fit after `first` speculative rows, whatever other sequences have. A round commits fewer
        of them than these."""
        return first + rows <= self._pool.share and self.length + first + rows <= self._pool.region

    def place(self, columns: int) -> tuple[int, int]:
        """The first slots of committed rows, and of `columns` speculative ones of all. The caller holds the lock."""
        return self.first_slot, self._pool.reserve(columns)

    def accept(self, length: int) -> None:
        """A round on the device has committed rows, of which there are now `length`."""
        self.length, self.speculative_columns = length, NO_COLUMNS

    def close(self) -> None:
        """See KVCache.close. Another sequence may use the region afterwards."""
        self._pool.release(self)


class StaticPool:
    """The shared cache of several sequences. Several threads may use it. region: the slots of a sequence."""

    def __init__(self, engine: StaticEngine) -> None:
        self.spec = engine.spec
        self._engine = engine
        self._columns = engine.program.max_columns
        self._tree_slot = self.spec.max_batch * self.spec.capacity - self._columns
        self.region = self._tree_slot // self.spec.max_batch
        self.memory = CacheMemory(engine)
        self._caches: dict[int, SharedKVCache] = {}  # open caches, by the first slot of their regions
        self._used = 0  # columns in use, garbage included
        self._moves: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []  # source and target slots of pending copies

    @property
    def share(self) -> int:
        """The speculative rows that each sequence may have, whatever the others have, and however wide a pass is."""
        return (self._columns - self.spec.pass_widths[-1]) // self.spec.max_batch

    def new_cache(self) -> SharedKVCache:
        """Open a cache. Raises EngineError when all regions are in use."""
        with self._engine.lock:
            regions = (number * self.region for number in range(self.spec.max_batch))
            first_slot = next((first for first in regions if first not in self._caches), None)
            if first_slot is None:
                raise EngineError(
                    f"all {self.spec.max_batch} sequences that the {self.spec.role} engine was built for are in use: "
                    "run fewer requests at a time, or rebuild with a larger --max-batch"
                )
            cache = SharedKVCache(self, first_slot)
            self._caches[first_slot] = cache
            return cache

    def release(self, cache: SharedKVCache) -> None:
        with self._engine.lock:
            if self._caches.get(cache.first_slot) is cache:
                del self._caches[cache.first_slot]
            cache.length, cache.speculative_columns = 0, NO_COLUMNS

    def forward(self, passes: Sequence[Pass]) -> list[ForwardOutput]:
        """Score the batches of several caches in one pass. Each output is the same as from a pass by itself.

        Raises EngineError when all rows together exceed the widest pass, when the rows of a sequence exceed its region
        or its share, and for a closed cache.
        """
        caches = [check_cache(each.cache, SharedKVCache) for each in passes]
        for each, cache in zip(passes, caches, strict=True):
            self._check(each.batch, cache)
        counts = [each.batch.num_tokens for each in passes]
        width = self.spec.width_for(sum(counts))
        with self._engine.lock:
            first = self._make_room(width)
            batch, sequences, wanted = self._join([each.batch for each in passes], caches, width, first)
            self._queue_moves()
            shape = PassShape.of(batch, self._columns)
            output = self.memory.bind_pass(shape).run(batch, sequences, self._tree_slot + first, sum(wanted))
            outputs, scored, read = [], 0, 0
            for cache, count, rows in zip(caches, counts, wanted, strict=True):
                cache.speculative_columns = np.concatenate((cache.speculative_columns, self._used + np.arange(count)))
                self._used += count
                scored += rows
                read += count
                outputs.append(copied(output.part(slice(scored - rows, scored), slice(read - count, read)), batch))
        return outputs

    def commit(self, cache: SharedKVCache, slots: Sequence[int]) -> None:
        if any(not 0 <= slot < cache.speculative for slot in slots):
            raise EngineError(f"slots {list(slots)} were not computed; {cache.speculative} speculative rows exist")
        length = cache.length + len(slots)
        if length > self.region:
            raise too_long_error(length, self.region)
        with self._engine.lock:
            sources = self._tree_slot + cache.speculative_columns[np.asarray(slots, np.int64)]
            self._moves.append((sources, cache.first_slot + np.arange(cache.length, length)))
            cache.length, cache.speculative_columns = length, NO_COLUMNS

    def truncate(self, cache: SharedKVCache, length: int) -> None:
        with self._engine.lock:  # a pass of another thread may be compacting rows
            cache.length, cache.speculative_columns = min(cache.length, length), NO_COLUMNS

    def _check(self, batch: TokenBatch, cache: SharedKVCache) -> None:
        """Raises EngineError for a batch that would overwrite rows of other sequences, or that fits no pass."""
        if self._caches.get(cache.first_slot) is not cache:
            raise EngineError("this cache was closed: open another one for the next text")
        check_states(self.spec, batch)
        check_mask(self.spec, batch.mask, cache.speculative)
        # A row is committed to the slot of its position, so every position must be within the region.
        last = int(batch.position_ids[: batch.num_tokens].max())
        if last >= self.region:
            raise too_long_error(last + 1, self.region)
        if (rows := cache.speculative + batch.num_tokens) > self.share:
            raise EngineError(
                f"{rows} speculative rows exceed the {self.share} that the {self.spec.role}'s plan has for each of "
                f"{self.spec.max_batch} sequences: propose fewer tokens, or rebuild with larger --widths"
            )

    def _make_room(self, width: int) -> int:
        """The column of the first row of the next pass. The live rows are compacted if this makes the mask of the pass
        narrower: a launch costs less than a wide mask, and passes have fewer shapes. `share` ensures that the columns
        suffice."""
        live = sum(cache.speculative for cache in self._caches.values())
        needed = mask_columns(width, live + width, self._columns)
        if self._used + width > needed:
            self._compact()
        return self._used

    def reserve(self, columns: int) -> int:
        """The slot of the first of `columns` columns after those in use, for a round on the device, which leaves them
        unused. All moves before it are queued. The caller holds the lock."""
        if self._used + columns > self._columns:
            self._compact()
        self._queue_moves()
        return self._tree_slot + self._used

    def _compact(self) -> None:
        """Move live speculative rows to the first columns, in their order."""
        live = np.sort(np.concatenate([NO_COLUMNS, *(cache.speculative_columns for cache in self._caches.values())]))
        columns = np.arange(len(live))
        stay = live == columns
        self._moves.append((self._tree_slot + live[~stay], self._tree_slot + columns[~stay]))
        for cache in self._caches.values():
            cache.speculative_columns = np.searchsorted(live, cache.speculative_columns)
        self._used = len(live)

    def _queue_moves(self) -> None:
        """Queue the copies of all commits and compactions since the last pass, in one launch."""
        if self._moves:
            sources, targets = map(np.concatenate, zip(*self._moves, strict=True))
            if len(sources):
                self.memory.move(sources, targets)
            self._moves.clear()

    def _join(
        self, batches: Sequence[TokenBatch], caches: Sequence[SharedKVCache], width: int, first: int
    ) -> tuple[TokenBatch, list[SequenceRow], list[int]]:
        """Join the batches into one whose first row gets column `first`. Returns the batch, the rows and region of each
        sequence, and the number of each sequence's output rows. The needed output rows come first, so that only they
        are copied to the host."""
        token_ids, position_ids = np.zeros(width, np.int64), np.zeros(width, np.int64)
        mask = np.zeros((width, first + width), np.bool_)
        sequences: list[SequenceRow] = []
        scored: list[NDArray[np.int64]] = []
        row = 0
        for batch, cache in zip(batches, caches, strict=True):
            count = batch.num_tokens
            rows = slice(row, row + count)
            seen = np.concatenate((cache.speculative_columns, first + np.arange(row, row + count)))
            mask[rows, seen] = batch.mask[:count, : len(seen)]
            token_ids[rows], position_ids[rows] = batch.token_ids[:count], batch.position_ids[:count]
            sequences.append(SequenceRow(row, cache.first_slot, cache.length, self._tree_slot))
            scored.append(np.arange(row + count - 1 if len(batch.output_rows) == 1 else row, row + count))
            row += count
        wanted = np.concatenate(scored)
        output_rows = wanted if len(wanted) == 1 else np.resize(wanted, width)
        ranking_only = all(batch.ranking_only for batch in batches)
        states, shows = joined_states(batches), any(batch.states_read for batch in batches)
        joined = TokenBatch(
            token_ids, position_ids, mask, output_rows, row, ranking_only, states=states, states_read=shows
        )
        return joined, sequences, [len(each) for each in scored]


def copied(output: ForwardOutput, batch: TokenBatch) -> ForwardOutput:
    """A copy of a part of a batch's results. All sequences share the buffers, and a pass of another thread may
    overwrite them. Logits that nobody reads, because there is a ranking, are not copied."""

    def own(array: NDArray[Any] | None) -> NDArray[Any] | None:
        return None if array is None else array.copy()

    logits, ids, logprobs, acceptance, _, states = output
    unread = batch.ranking_only and ids is not None
    kept = logits if unread else logits.copy()
    return ForwardOutput(kept, own(ids), own(logprobs), own(acceptance), (), own(states))


def too_long_error(rows: int, slots: int) -> EngineError:
    return EngineError(
        f"{rows} rows exceed the {slots} cache slots that this engine has for a sequence: "
        "shorten the request or rebuild with a larger --max-length"
    )
