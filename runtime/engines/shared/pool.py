"""PooledEngine: many sequences in one cache, so that rows of several requests are scored in one pass.

A pass's mask says which slots each row sees, and nothing says that the slots of one sequence lie together. So all
sequences share one cache of the engine's own, in which every row counts as speculative, and a sequence is a list of
slots. A pass appends the rows of all its requests, however many each has; nothing is padded but the whole. Committing
costs nothing: it writes down slots. Rows nobody refers to any more are garbage; when the cache is full of it, the live
rows move together.

On a CPU a pass of eight rows costs about half as much again as a pass of one, so requests that share passes share most
of their cost. The price is attention, whose matrices span the slots of all requests.

Sequences may also share slots: `share_prefixes` lets one take over the rows that another computed of the same text,
live or not yet collected (`recall`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ....models.errors import EngineError
from ...sampling.softmax import Softmax, softmax_of
from ..backends import describe_backend
from ..base import Engine, ForwardOutput, Pass, TokenBatch, check_cache, num_fitting
from ..cache import FIRST_CAPACITY, Storage
from .prefix import EMPTY_TEXT, PrefixTree

LIVE_SHARE = 0.6  # compact rather than grow while no more than this share of the used slots is live
SPARE_FACTOR = (
    4  # give slots back when there are more than so many times as could be needed: attention spans all of them
)
SPARE_PASSES = 64  # passes before that: the next burst may be near, and growing again copies everything
COMMON_TOKENS = 24  # tokens that two texts begin with alike beyond what any template makes them
SCATTERED_ROWS = 256  # rows between the others' that cost less than to gather them
NO_SLOTS: NDArray[np.int64] = np.zeros(0, np.int64)


class PooledKVCache:
    """One sequence: `slots` of its committed rows, in order, and `drafted`, those of its speculative ones."""

    def __init__(self, pool: PooledEngine) -> None:
        self.slots, self.speculative_slots = NO_SLOTS, NO_SLOTS
        self.salt: str | None = None  # rows are shared with sequences of an equal one only; set before the first pass
        self._pool = pool

    @property
    def length(self) -> int:
        return len(self.slots)

    @property
    def speculative(self) -> int:
        return len(self.speculative_slots)

    def commit(self, slots: Sequence[int]) -> None:
        """See KVCache.commit. Raises EngineError for a slot never computed."""
        if any(not 0 <= slot < self.speculative for slot in slots):
            raise EngineError(f"slots {list(slots)} were not computed; {self.speculative} speculative rows exist")
        accepted, prefixes = self.speculative_slots[np.asarray(slots, np.int64)], self._pool.prefixes
        if prefixes is None:
            self.slots = np.concatenate((self.slots, accepted))
        else:
            self.slots = prefixes.commit(self.slots, accepted, prefixes.empty_text(self.salt))
        self.speculative_slots = NO_SLOTS

    def truncate(self, length: int) -> None:
        """See KVCache.truncate."""
        self.slots, self.speculative_slots = self.slots[:length], NO_SLOTS

    def close(self) -> None:
        """See KVCache.close: its rows may be given to others from now on."""
        self._pool.caches.pop(self, None)
        self.truncate(0)


class PooledEngine(Engine):
    """An engine whose caches share one buffer of at most `slots` rows, garbage included."""

    def __init__(self, engine: Engine, slots: int) -> None:
        """slots: may be fewer than the engine's longest sequence has. Raises EngineError when they hold no pass, and
        for an engine whose caches are of a fixed size."""
        if slots < engine.spec.max_width:
            raise EngineError(f"{slots} cache slots hold no pass of {engine.spec.max_width} rows: allow more memory")
        storage = engine.new_cache()
        if not isinstance(storage, Storage):
            raise EngineError(f"the {engine.spec.role} engine's caches are of a fixed size: no pool can share one")
        self._engine = engine
        self._storage: Storage = storage
        self._slots = self._limit = max(slots, storage.capacity)
        self.spec = replace(engine.spec, capacity=self._slots)
        storage.limit(self._slots)
        self.caches: dict[PooledKVCache, None] = {}  # open ones, the first to be opened first
        self.prefixes: PrefixTree | None = None
        self._retained = 0
        self._recalled = False  # whether texts ever began alike
        self._spare_passes = 0
        self._gathered = 0  # slots up to which the rows of each sequence lie together

    @property
    def allocated(self) -> int:
        """Slots that there are now."""
        return self._storage.capacity

    def chunk_size(self, left: int) -> int:
        """See Engine.chunk. Every sequence waits for each pass: where there are several, a chunk of a prompt is no
        wider than a round's pass."""
        return self.spec.chunk_size(left) if len(self.caches) == 1 else min(left, self.spec.max_width)

    def num_joint(self, passes: Sequence[Pass]) -> int:
        """See Engine.num_joint."""
        return num_fitting(self.spec, passes)

    def set_limit(self, slots: int | None) -> None:
        """Let the buffer grow to so many slots, or to as many as in the beginning."""
        self._limit = self._slots if slots is None else max(min(slots, self._slots), self.allocated)
        self._storage.limit(self._limit)

    @property
    def softmax(self) -> Softmax:
        """The engine's own, where it brings one."""
        return softmax_of(self._engine)

    def share_prefixes(self, retained: int) -> None:
        """From now on a text that is here is not read again, be it of a live sequence or of an ended one.

        retained: slots that the buffer may grow to for the sake of ended ones, once texts do begin alike, and the most
        it keeps of their rows; they give way to live rows, those unused for longest first.
        """
        self.prefixes, self._retained = PrefixTree(self._slots), retained

    def new_cache(self) -> PooledKVCache:
        cache = PooledKVCache(self)
        self.caches[cache] = None
        return cache

    def recall(self, wanted: Pass) -> Pass | None:
        """What is left of a pass when its cache takes over the rows that are here already, as speculative ones; None
        when nothing is, and nobody reads the output. Only of a chunk of text: in trees every row's output is read."""
        batch, cache = wanted.batch, check_cache(wanted.cache, PooledKVCache)
        unread = batch.num_tokens - wanted.output_read if len(batch.output_rows) == 1 else 0
        if self.prefixes is None or not unread:
            return wanted
        path = cache.speculative_slots if cache.speculative else cache.slots
        before = int(path[-1]) if len(path) else self.prefixes.empty_text(cache.salt)
        known = self.prefixes.find(before, batch.token_ids[:unread].tolist())
        if not known:
            return wanted
        columns = cache.speculative + batch.num_tokens
        cache.speculative_slots = np.concatenate((cache.speculative_slots, np.array(known, np.int64)))
        self._recalled |= cache.length + cache.speculative >= COMMON_TOKENS
        left = slice(len(known), batch.num_tokens)
        count = batch.num_tokens - len(known)
        if not count:
            return None
        ids, positions, mask = batch.token_ids[left], batch.position_ids[left], batch.mask[left, :columns]
        rest = TokenBatch.pad(ids, positions, mask, self.spec.width_for(count), True, batch.ranking_only)
        return wanted._replace(batch=rest)

    def forward(self, passes: Sequence[Pass]) -> list[ForwardOutput]:
        """Score the batches of several caches in one pass; each output is as its own pass would have given it, or empty
        where nobody reads it.

        Raises EngineError when all rows together exceed the widest pass, or the live ones the cache; and for a cache
        that was closed.
        """
        caches = [check_cache(each.cache, PooledKVCache) for each in passes]
        if any(cache not in self.caches for cache in caches):
            raise EngineError("this cache was closed, or belongs to another pool: open another one for the next text")
        counts = [each.batch.num_tokens for each in passes]
        rows = sum(counts)
        width = self.spec.width_for(rows)
        self._make_room(width)
        used = self._storage.speculative
        mask = np.zeros((width, used + width), np.bool_)
        token_ids, position_ids = np.zeros(width, np.int64), np.zeros(width, np.int64)
        first = 0
        wanted: list[int] = []  # rows whose output somebody reads
        parts: list[slice] = []  # of it, by pass
        for (_, batch, _, output_read), cache, count in zip(passes, caches, counts, strict=True):
            new = used + np.arange(first, first + count)
            own = mask[first : first + count]
            own[:, cache.slots] = True
            own[:, np.concatenate((cache.speculative_slots, new))] = batch.mask[:count, : cache.speculative + count]
            token_ids[first : first + count] = batch.token_ids[:count]
            position_ids[first : first + count] = batch.position_ids[:count]
            begin = first + count - 1 if len(batch.output_rows) == 1 else first
            first += count
            parts.append(slice(len(wanted), len(wanted) + (first - begin if output_read else 0)))
            wanted += range(begin, first) if output_read else ()
        # Known before the pass: it happens with all that follows from it, or, where memory is short, not at all.
        ends = used + np.cumsum(counts)
        drafted = [
            np.concatenate((cache.speculative_slots, np.arange(end - count, end)))
            for cache, count, end in zip(caches, counts, ends.tolist(), strict=True)
        ]
        output_rows = passes[0].batch.output_rows if len(passes) == 1 else self._scored(wanted or [rows - 1], width)
        together = TokenBatch(token_ids, position_ids, mask, output_rows, rows, cache_only=not wanted)
        output = self._engine.score(together, self._storage)
        if self.prefixes is not None:
            self.prefixes.record(used, token_ids[:rows], position_ids[:rows])
        outputs = [output] if len(passes) == 1 else [part(output, rows) for rows in parts]
        for cache, slots in zip(caches, drafted, strict=True):
            cache.speculative_slots = slots
        return outputs

    def _scored(self, wanted: list[int], width: int) -> NDArray[np.int64]:
        """The rows of a pass to score, for those somebody reads: filled up to a compiled width by the last one, since
        engines keep buffers for each number of rows, and some add in another order for one row than for more."""
        missing = min(self.spec.width_for(len(wanted)), width) - len(wanted)
        return np.array([*wanted, *wanted[-1:] * missing], np.int64)

    def close(self) -> None:
        """The engine stays its owner's to close; what the sequences held is free."""
        self._storage.close()
        self.caches.clear()

    def _make_room(self, width: int) -> None:
        """Space for one more pass: it grows, unless it is mostly garbage or may not; after a burst it shrinks. Where
        neighbouring slots are read together, the rows of each sequence are gathered now and then."""
        used, capacity, limit = self._storage.speculative, self._storage.capacity, self._limit
        needed = width + sum(each.length + each.speculative for each in self.caches)
        self._spare_passes += 1
        if capacity <= max(SPARE_FACTOR * max(needed, FIRST_CAPACITY), self._retained):
            self._spare_passes = 0
        spare = self._spare_passes > SPARE_PASSES
        full = used + width > capacity
        if not full and not spare and not self._is_scattered(used, needed):
            return
        live = self._live()
        rows = int(live.sum())
        if not full and not spare:  # what is here may stay
            self._remember(live, used - rows)
            self._compact(live)
            return
        if spare:
            capacity = max(2 * needed, self._retained)
        mostly_garbage = rows <= LIVE_SHARE * used and not (self._recalled and used + width <= self._retained)
        if spare or used + width > limit or mostly_garbage:
            room = int(min(LIVE_SHARE * capacity, limit - width)) - rows
            # Before texts ever began alike, only as many ended rows as it takes to notice that they do.
            self._remember(live, min(room, self._retained if self._recalled else 2 * COMMON_TOKENS))
            self._compact(live)
        if spare:
            self._storage.shrink(capacity)
        if rows + width > limit:
            raise EngineError(
                f"the {rows} rows of all requests leave no room for {width} more in {limit} cache slots: "
                "run fewer requests at a time, or allow more memory"
            )

    def _is_scattered(self, used: int, needed: int) -> bool:
        """Whether so many rows came since the sequences' were gathered that it pays again: each round's lie between
        those of all others, and a panel of slots is read for the one that counts."""
        gathers = describe_backend(self._engine.spec.backend).gathers and len(self.caches) > 1
        return gathers and used - self._gathered > max(SCATTERED_ROWS, needed // 2)

    def _remember(self, live: NDArray[np.bool_], count: int) -> None:
        """Declare so many rows of ended sequences alive."""
        if self.prefixes is not None and count > 0:
            live[self.prefixes.find_recent(live, count)] = True

    def release(self) -> None:
        """Give back the rows of ended sequences, and slots that nobody needs. For when memory is short."""
        live = self._live()
        if self.prefixes is not None:
            self.prefixes.forget()
        self._compact(live)
        needed = 2 * (int(live.sum()) + self._engine.spec.max_width)
        if self.allocated > needed:
            self._storage.shrink(needed)

    def _live(self) -> NDArray[np.bool_]:
        """Which used slots some sequence refers to."""
        live = np.zeros(self._storage.speculative, np.bool_)
        for each in self.caches:
            live[each.slots] = live[each.speculative_slots] = True
        return live

    def _compact(self, live: NDArray[np.bool_]) -> None:
        """Move these rows together and tell every sequence where they are now. All of it happens or, where memory is
        too short, nothing: a sequence whose slots are not those of its rows would go on with another's text."""
        kept = self._by_sequence(live)
        moved = np.full(self._storage.speculative, EMPTY_TEXT)
        moved[kept] = np.arange(len(kept))
        places = [(cache, moved[cache.slots], moved[cache.speculative_slots]) for cache in self.caches]
        prefixes = None if self.prefixes is None else self.prefixes.renumber(kept, moved)
        self._storage.compact(kept)
        for cache, slots, drafted in places:
            cache.slots, cache.speculative_slots = slots, drafted
        self.prefixes = prefixes
        self._gathered = len(kept)

    def _by_sequence(self, live: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Live slots in a new order: sequence by sequence, what several share with the first, and ended ones last. As
        they are, should a sequence's slots not ascend then (see `prefix.py`)."""
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


def part(output: ForwardOutput, rows: slice) -> ForwardOutput:
    """The results of neighbouring rows, not copied."""
    return ForwardOutput(
        output.logits[rows],
        None if output.top_ids is None else output.top_ids[rows],
        None if output.top_logprobs is None else output.top_logprobs[rows],
        None if output.acceptance is None else output.acceptance[rows],
    )
