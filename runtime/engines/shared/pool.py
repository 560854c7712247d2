"""PooledEngine: many sequences in one cache, so that one pass scores rows of several requests.

The mask of a pass says which slots each row attends to, so the slots of a sequence need not be contiguous. All
sequences share one cache of the engine, in which every row counts as speculative. A sequence is a list of its slots. A
pass appends the rows of all its requests, and only their sum is padded to a compiled width. A commit moves accepted
rows to the first slots of their pass, unless they are there. Rows to which no sequence refers are garbage. When garbage
fills the cache, the live rows are compacted.

On a CPU a pass of eight rows costs about 1.5 times a pass of one row, so requests that share passes share most of their
cost. Attention spans the slots of all requests, unless the engine's cache places rows (`sequence.py`).

Sequences may also share slots. After `share_prefixes` a sequence takes over the rows that another sequence computed of
the same text (`recall`), also of an ended sequence whose rows are not yet overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ....models.errors import EngineError
from ...sampling.softmax import Softmax, SoftmaxSettings, softmax_of
from ..base import Engine, ForwardOutput, Pass, TokenBatch, check_cache, num_fitting
from ..cache import FIRST_CAPACITY, NearRows, Storage, joined_states
from .prefix import EMPTY_TEXT, PrefixTree
from .sequence import PANEL, Placement, PooledKVCache, place
from .windows import check_windows, forget, num_usable

LIVE_SHARE = 0.6  # a full cache is compacted instead of grown if at most this share of its used slots is live
SPARE_FACTOR = 4  # a cache with more than this multiple of the needed slots shrinks, because attention spans all slots
SPARE_PASSES = 64  # number of passes before a cache shrinks, because growing again would copy all of it
PREFIX_CACHE_SLOTS = 1024  # default slots for the rows of ended requests
COMMON_TOKENS = 24  # a common prefix of this length is more than a chat template alone causes


class PooledEngine(Engine):
    """An engine whose caches share one buffer of at most `slots` rows, garbage included. The wrapped one computes."""

    def __init__(self, engine: Engine, slots: int) -> None:
        """slots: may be fewer than the engine's capacity for one sequence. Raises EngineError when they are fewer than
        the rows of the widest pass, and for an engine with caches of a fixed size."""
        if slots < engine.spec.max_width:
            raise EngineError(
                f"{slots} cache slots are too few for a pass of {engine.spec.max_width} rows: allow more memory"
            )
        storage = engine.new_cache()
        if not isinstance(storage, Storage):
            raise EngineError(f"the {engine.spec.role} engine's caches are of a fixed size: no pool can share one")
        self._engine = engine
        self._storage: Storage = storage
        self._slots = self._limit = max(slots, storage.capacity)
        self.spec = replace(engine.spec, capacity=self._slots)
        storage.limit(self._slots)
        self.caches: dict[PooledKVCache, None] = {}  # open caches, in the order in which they were opened
        self.prefixes: PrefixTree | None = None
        self._retained, self._few = 0, SPARE_FACTOR * FIRST_CAPACITY  # a cache of few slots never shrinks
        self._recalled = False  # whether two texts ever had a common prefix of COMMON_TOKENS
        self._spare_passes = 0  # consecutive passes with too many slots
        # The sequence of the rows from slot `_first` to the end of the storage.
        self._newest: PooledKVCache | None = None
        self._first = 0

    @property
    def allocated(self) -> int:  # type: ignore[override]  # of this engine it changes
        return self._storage.capacity

    def num_joint(self, passes: Sequence[Pass]) -> int:
        return num_fitting(self.spec, passes)

    def set_limit(self, slots: int | None) -> None:
        """Set the number of slots to which the buffer may grow. None: the number given to the constructor."""
        self._limit = self._slots if slots is None else max(min(slots, self._slots), self.allocated)
        self._storage.limit(self._limit)

    @property
    def softmax(self) -> Softmax:
        """The softmax of the wrapped engine, where it has one."""
        return softmax_of(self._engine)

    def share_prefixes(self, retained: int) -> None:
        """Let sequences take over the rows of equal prefixes, of open and of ended sequences.

        retained: the most rows of ended sequences that are kept, and the slots to which the buffer may grow for them
        once two texts had a common prefix. Live rows replace these rows, the least recently used first.
        """
        self.prefixes, self._retained = PrefixTree(self._slots), retained
        self._few = max(self._few, retained)

    def new_cache(self, salt: str | None = None) -> PooledKVCache:
        cache = PooledKVCache(self, salt)
        self.caches[cache] = None
        return cache

    def recall(self, work: Pass) -> Pass | None:
        """Let the pass's cache take over the rows that the pool already holds, as speculative rows. Returns the pass
        over the other rows, or None when no row is left. A row whose output is read is always computed, so this changes
        only passes over a chunk of text; every output row of a tree is read."""
        batch, cache = work.batch, check_cache(work.cache, PooledKVCache)
        unread = batch.num_tokens - work.output_read if len(batch.output_rows) == 1 else 0
        if self.prefixes is None or not unread or (batch.states_read and not work.output_read):
            return work  # a cache holds no states
        before = cache.last if cache.last >= 0 else self.prefixes.empty_text(cache.salt)
        known = self.prefixes.find(before, batch.token_ids[:unread].tolist())
        self._recalled |= bool(known) and cache.length + cache.speculative + len(known) >= COMMON_TOKENS
        if known and self._storage.near is not None:
            after = self.prefixes.find(known[-1], work.after) if len(known) == batch.num_tokens else []
            known = known[: num_usable(self._storage.near, cache, known + after)]
        if not known:
            return work
        read = cache.speculative
        cache.append(np.array(known, np.int64))
        return None if len(known) == batch.num_tokens else work.part(len(known), batch.num_tokens, read)

    def forward(self, passes: Sequence[Pass]) -> list[ForwardOutput]:
        """Score the batches of several caches in one pass. Each output is the same as from a pass by itself; it is
        empty for a pass without `output_read`.

        Raises EngineError when all rows together exceed the widest pass, when the live rows exceed the cache, and for a
        closed cache.
        """
        caches: list[PooledKVCache] = []
        counts: list[int] = []
        for each in passes:
            if each.cache not in self.caches:
                raise EngineError(
                    "this cache was closed, or belongs to another engine: open another one for the next text"
                )
            caches.append(each.cache)
            counts.append(each.batch.num_tokens)
        total = sum(counts)
        width = len(passes[0].batch.mask) if len(passes) == 1 else self.spec.width_for(total)
        new = width + len(passes) * (PANEL - 1)  # slots at most: sequences may leave the rest of a panel unused
        if not self._storage.speculative + new <= self._storage.capacity <= self._few:
            self._make_room(width, len(caches))
        if (near := self._storage.near) is not None:
            if near.lacks(new):
                self._forget(near)
                self._storage.reserve_near(new)
            check_windows(near, passes, caches)
        # The slots are found before the pass, so that a failed allocation changes neither cache nor sequences.
        placed = self._place(caches, counts, width)
        batch, parts = self._joined(passes, caches, placed, width)
        output = self._engine.score(batch, self._storage)
        if self.prefixes is not None:
            every = placed.slots[0] if len(passes) == 1 else np.concatenate(placed.slots)
            self.prefixes.record(every, batch.token_ids[:total], batch.position_ids[:total])
        for cache, slots, run in zip(caches, placed.slots, placed.runs, strict=True):
            cache.append(slots)
            cache.run = run
        if len(passes) > 1 or caches[0] is not self._newest:
            self._newest, self._first = caches[-1], int(placed.slots[-1][0])
        if len(passes) == 1:
            return [output]
        ends = np.cumsum(counts).tolist()
        rows = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
        return [output.part(*each) for each in zip(parts, rows, strict=True)]

    def _joined(
        self, passes: Sequence[Pass], caches: Sequence[PooledKVCache], placed: Placement, width: int
    ) -> tuple[TokenBatch, list[slice]]:
        """The passes as one over the storage, and the part of its output rows that belongs to each pass."""
        top, first = placed.top, 0
        mask = np.zeros((width, top), np.bool_)
        token_ids, position_ids = passes[0].batch.token_ids, passes[0].batch.position_ids
        if len(passes) > 1:
            token_ids, position_ids = np.zeros((2, width), np.int64)
        read: list[int] = []  # rows whose output is read
        parts: list[slice] = []
        settings: list[SoftmaxSettings | None] = []  # by row of `read`
        ranking_only = True
        for each, cache, slots in zip(passes, caches, placed.slots, strict=True):
            batch, output_read = each.batch, each.output_read
            count = len(slots)
            end = first + count
            own, seen = mask[first:end], cache.visible
            own[:, : len(seen)] = seen[:top]
            if cache.speculative:
                own[:, cache.speculative_slots] = batch.mask[:count, : cache.speculative]
            if slots[-1] - slots[0] < count:  # one after the other
                own[:, slots[0] : slots[-1] + 1] = batch.mask[:count, cache.speculative : cache.speculative + count]
            else:
                own[:, slots] = batch.mask[:count, cache.speculative : cache.speculative + count]
            if len(passes) > 1:
                token_ids[first:end] = batch.token_ids[:count]
                position_ids[first:end] = batch.position_ids[:count]
            begin = end - 1 if len(batch.output_rows) == 1 else first
            parts.append(slice(len(read), len(read) + (end - begin if output_read else 0)))
            if output_read:
                ranking_only = ranking_only and batch.ranking_only
                read += range(begin, end)
                settings += [*batch.settings, *[None] * (end - begin - len(batch.settings))]
            first = end
        if len(passes) == 1:
            output_rows = passes[0].batch.output_rows
        else:
            output_rows = self._pad_output_rows(read or [first - 1], width)
        every = None
        if self._storage.places:
            every = placed.slots[0] if len(passes) == 1 else np.concatenate(placed.slots)
        joined = (token_ids, position_ids, mask, output_rows, first, ranking_only, not read, every, tuple(settings))
        given = joined_states(each.batch for each in passes)
        return TokenBatch(*joined, given, any(each.batch.states_read for each in passes)), parts

    def move(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> bool:
        """Move rows of one pass to other slots of it, which follow each other, where memory allows it."""
        moved = int((rows == slots).argmin())  # the first of them
        try:
            self._storage.move(rows[moved:], int(slots[moved]))
        except MemoryError:
            return False
        if self.prefixes is not None:
            self.prefixes.move(rows[moved:], slots[moved:])
        return True

    def restore(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> bool:
        """Copy rows to equal ones, in `slots`, that layers with a window have dropped. False: no memory is left."""
        near = self._storage.near
        if near is not None and (~near.held[slots] & near.held[rows]).any():
            if near.lacks(len(slots)):
                self._forget(near)
            missing = ~near.held[slots] & near.held[rows]
            try:
                self._storage.move_near(rows[missing], slots[missing])
            except MemoryError:
                return False
        return True

    def leave(self, cache: PooledKVCache) -> None:
        """A sequence has ended. Its rows are garbage, or kept for others."""
        self.caches.pop(cache, None)
        if not self.caches and self.prefixes is None:
            self._storage.drop(0)

    def drop_rejected(self, cache: PooledKVCache, last: int) -> None:
        """Free the slots after a sequence's last accepted one, if no other sequence has rows there."""
        if cache is self._newest:
            if not self._storage.places:
                self._storage.drop(max(last + 1, self._first))
            self._newest = None

    def _place(self, caches: Sequence[PooledKVCache], counts: Sequence[int], width: int) -> Placement:
        """The slots of a pass: after all others, padding included, or in runs of each sequence's own."""
        used = self._storage.speculative
        if not self._storage.places:
            ends = np.cumsum(counts).tolist()
            slots = [used + np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]
            return Placement([cache.run for cache in caches], slots, used + width)
        placed = place(caches, counts, used, PANEL)
        return placed if placed.top <= self._limit else place(caches, counts, used, panel=1)

    def _pad_output_rows(self, read: list[int], width: int) -> NDArray[np.int64]:
        """The output rows of a pass: the `read` rows, and copies of the last one up to a compiled width. Engines keep
        buffers for each number of output rows, and some sum in another order for one row than for several."""
        missing = min(self.spec.width_for(len(read)), width) - len(read)
        return np.array([*read, *read[-1:] * missing], np.int64)

    def close(self) -> None:
        """Close the shared cache. The caller closes the wrapped engine."""
        self._storage.close()
        self.caches.clear()

    def _make_room(self, width: int, sequences: int) -> None:
        """Make sure that a pass of `width` rows of so many sequences fits. A full cache grows; it is compacted instead
        where most rows are garbage or the limit is reached. A cache with many spare slots shrinks after SPARE_PASSES
        passes."""
        used, capacity, limit = self._storage.speculative, self._storage.capacity, self._limit
        panel = PANEL if self._storage.places else 1
        new = width + (panel - 1) * sequences
        needed, spare = 0, False
        if capacity > self._few:
            needed = width + sum(each.length + each.speculative + panel - 1 for each in self.caches)
            self._spare_passes = self._spare_passes + 1 if capacity > SPARE_FACTOR * needed else 0
            spare = self._spare_passes > SPARE_PASSES
        if used + new <= capacity and not spare:
            return
        live = self._find_live()
        rows = int(live.sum())
        if spare:
            capacity = max(2 * needed, self._retained)
        mostly_garbage = rows <= LIVE_SHARE * used and not (self._recalled and used + new <= self._retained)
        if spare or used + new > limit or mostly_garbage:
            room = int(min(LIVE_SHARE * capacity, limit - new)) - rows
            # Before the first common prefix, keep only as many ended rows as its detection needs.
            self._keep_recent(live, min(room, self._retained if self._recalled else 2 * COMMON_TOKENS))
            self._compact(live)
        if spare:
            self._storage.shrink(capacity)
        if rows + width > limit:
            raise EngineError(
                f"the {rows} rows of all requests leave no room for {width} more in {limit} cache slots: "
                "run fewer requests at a time, or allow more memory"
            )

    def _forget(self, near: NearRows) -> None:
        forget(near, self.caches, self.prefixes, self._storage.speculative, self._retained)

    def _keep_recent(self, live: NDArray[np.bool_], count: int) -> None:
        """Mark at most `count` rows of ended sequences as live."""
        if self.prefixes is not None and count > 0:
            live[self.prefixes.find_recent(live, count)] = True

    def release(self) -> None:
        """Free the rows of ended sequences and unused slots, because memory is short."""
        live = self._find_live()
        if self.prefixes is not None:
            self.prefixes.clear()
        self._compact(live)
        needed = 2 * (int(live.sum()) + self._engine.spec.max_width)
        if self.allocated > needed:
            self._storage.shrink(needed)

    def _find_live(self) -> NDArray[np.bool_]:
        """bool [used slots]: whether an open sequence refers to the slot."""
        live = np.zeros(self._storage.speculative, np.bool_)
        for each in self.caches:
            live[each.slots] = live[each.speculative_slots] = True
        return live

    def _compact(self, live: NDArray[np.bool_]) -> None:
        """Move the live rows to the first slots, and update the slots of every sequence. If an allocation fails,
        nothing changes: with wrong slots a sequence would continue another sequence's text."""
        if self._storage.near is not None:
            self._forget(self._storage.near)
        kept = self._order_slots(live)
        moved = np.full(self._storage.speculative, EMPTY_TEXT)
        moved[kept] = np.arange(len(kept))
        places = [(cache, moved[cache.slots], moved[cache.speculative_slots]) for cache in self.caches]
        prefixes = None if self.prefixes is None else self.prefixes.renumber(kept, moved)
        self._storage.compact(kept)
        for cache, slots, speculative in places:
            cache.renumber(slots, speculative)
        self._newest = None
        self.prefixes = prefixes

    def _order_slots(self, live: NDArray[np.bool_]) -> NDArray[np.int64]:
        """The live slots, ordered by sequence. Shared slots come with the first sequence that refers to them, and slots
        of ended sequences come last. If the slots of a sequence would not ascend (see `prefix.py`), the order stays."""
        own = [slots for each in self.caches for slots in (each.slots, each.speculative_slots)]
        ended = np.flatnonzero(live)
        slots, firsts = np.unique(np.concatenate((*own, ended)), return_index=True)
        order = slots[np.argsort(firsts)]
        place = np.empty(len(live), np.int64)
        place[order] = np.arange(len(order))
        ascend = all(
            np.all(np.diff(place[np.concatenate((each.slots, each.speculative_slots))]) > 0) for each in self.caches
        )
        return order if ascend else ended
