"""KV caches that allocate slots as a sequence grows. Accepted rows move directly after the committed rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ...models.errors import EngineError
from .base import EngineSpec, KVCache, TokenBatch

FIRST_CAPACITY = 256  # initial slots of a growing cache, which doubles its capacity when it is full


class NearRows(Protocol):
    """Rows of the layers with a window, of which a cache may drop those that no window reaches. window: tokens that a
    row sees, itself included. held: bool [slots], whether a slot's row is there."""

    window: int
    held: NDArray[np.bool_]

    def lacks(self, slots: int) -> bool:
        """Whether the memory may be too small for so many further slots."""

    def keep(self, slots: NDArray[np.int64]) -> None:
        """Drop what lies in no panel of these slots."""

    def usable(self, path: NDArray[np.int64]) -> int:
        """The length of the longest beginning of a text, in the slots `path`, after which a pass finds its window."""


@runtime_checkable
class Storage(KVCache, Protocol):
    """A cache whose slots several sequences can share (see `shared/pool.py`). It counts all of its rows as
    speculative. places: whether the rows of a pass may go to other slots than the next ones, and attention reads only
    panels with slots that a row attends to. near: of layers with a window the rows, where others may be dropped."""

    places: bool
    near: NearRows | None

    @property
    def capacity(self) -> int:
        """The number of allocated slots."""

    def limit(self, slots: int) -> None:
        """Set the largest number of slots. It may differ from the engine's `capacity` for one sequence."""

    def drop(self, slots: int) -> None:
        """Keep the first `slots` slots; discard the others."""

    def move(self, rows: NDArray[np.int64], first: int) -> None:
        """Copy these slots, in this order, to those from `first` on."""

    def reserve_near(self, slots: int) -> None:
        """Make sure that `near` does not lack so many slots."""

    def move_near(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Copy rows of layers with a window, which are held, to other slots."""

    def compact(self, slots: NDArray[np.int64]) -> None:
        """Keep these speculative slots, in this order, as speculative slots; discard the others."""

    def shrink(self, capacity: int) -> None:
        """Free the slots above `capacity`, except those in use."""


class GrowingKVCache(ABC):
    """A Storage with contiguous rows. A subclass implements allocation, copying and release of the memory."""

    places = False  # see Storage
    near: NearRows | None = None

    def __init__(self, spec: EngineSpec) -> None:
        self._spec, self._widest = spec, spec.pass_widths[-1]
        self._limit = spec.capacity
        self._closed = False
        self.length = 0
        self.speculative = 0
        self._allocate(min(FIRST_CAPACITY, spec.capacity))

    @property
    @abstractmethod
    def capacity(self) -> int:
        """The number of allocated slots."""

    def limit(self, slots: int) -> None:
        self._limit = slots

    def commit(self, slots: Sequence[int]) -> None:
        """See KVCache.commit. The first slots that are in their places do not move. Raises EngineError for a slot that
        was not computed, and for a slot that is named twice."""
        kept, placed = len(slots), 0
        while placed < kept and slots[placed] == placed:
            placed += 1
        if placed < kept or kept > self.speculative:
            if not 0 <= min(slots) <= max(slots) < self.speculative:
                raise EngineError(f"slots {list(slots)} were not computed; {self.speculative} speculative rows exist")
            if len(set(slots)) != kept:
                raise EngineError(f"slots {list(slots)} name a row twice: a row can be committed once")
            moved = self.length + np.asarray(slots[placed:], np.int64)
            self.length += placed
            self.speculative -= placed
            self.move(moved, self.length)
            kept -= placed
        self.length += kept
        self.speculative = 0

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)
        self.speculative = 0

    def close(self) -> None:
        if not self._closed:
            self._free()
        self._closed, self.length, self.speculative = True, 0, 0

    def drop(self, slots: int) -> None:
        self.speculative = min(self.speculative, slots - self.length)

    def compact(self, slots: NDArray[np.int64]) -> None:
        self.move(self.length + slots, self.length)
        self.speculative = len(slots)

    def reserve_near(self, slots: int) -> None:  # noqa: B027 - most caches hold the rows of all layers together
        """See Storage."""

    def move_near(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> None:  # noqa: B027
        """See Storage."""

    def shrink(self, capacity: int) -> None:
        used = self.length + self.speculative
        self._replace(min(max(capacity, used, FIRST_CAPACITY), self._limit), used)

    def reserve(self, batch: TokenBatch) -> int:
        """Allocate slots for a batch after all computed rows; returns the slot of the batch's first row.

        The capacity doubles when it is too small, so growth costs O(1) per row. Raises EngineError when the engine has
        no pass of this width, when the limit of slots is too small, and for slots of a batch that cannot be its own.
        """
        if self._closed:
            raise EngineError("this cache was closed: open another one for the next text")
        width = len(batch.mask)
        sound = batch.num_tokens <= width <= self._widest and batch.mask.dtype == np.bool_
        ids, positions = batch.token_ids, batch.position_ids
        if not sound or not (len(ids) == len(positions) == width and ids.dtype == positions.dtype == np.int64):
            raise EngineError(
                f"{batch.num_tokens} of {width} rows, with {len(ids)} token ids and {len(positions)} positions, are no "
                f"pass of this engine, which has up to {self._widest} rows of int64"
            )
        check_states(self._spec, batch)
        if batch.slots is None:
            check_mask(self._spec, batch.mask, self.speculative)
        elif not self.places:
            raise EngineError("rows of this engine follow each other: leave the slots of the batch out")
        else:
            check_slots(batch, self.length, self.speculative)
        used, needed = self.length + self.speculative, self.length + batch.mask.shape[1]
        if needed > self.capacity:
            self._grow(needed, used)
        return used

    def repeat(self, length: int) -> None:
        """Commit copies of the committed rows, one after the other, until there are `length`. Passes after them take
        as long as after a text of so many tokens, and their outputs mean nothing. Raises EngineError where there is no
        committed row, where there are speculative ones, and for more rows than the cache may have."""
        if not self.length or self.speculative:
            raise EngineError("only committed rows, at least one, can be repeated")
        self._grow(length, self.length)
        while self.length < length:
            copied = min(self.length, length - self.length, self._spec.max_width)
            self.move(np.arange(copied), self.length)
            self.length += copied

    def _grow(self, slots: int, used: int) -> None:
        """Allocate so many slots, of which the first `used` keep their content."""
        if slots > self._limit:
            raise EngineError(
                f"{slots} rows exceed this engine's {self._limit} cache slots: "
                "shorten the request or rebuild with a larger --max-length"
            )
        capacity = self.capacity
        while capacity < slots:
            capacity *= 2
        if capacity > self.capacity:
            self._replace(min(capacity, self._limit), used)

    def _replace(self, capacity: int, used: int) -> None:
        """Resize, or change nothing: when an allocation fails, the cache keeps its old buffers."""
        before = dict(vars(self))
        try:
            self._resize(capacity, used)
        except BaseException:
            vars(self).clear()
            vars(self).update(before)
            raise

    @abstractmethod
    def _allocate(self, capacity: int) -> None:
        """Allocate zeroed memory of `capacity` slots in place of the old memory."""

    @abstractmethod
    def _resize(self, capacity: int, used: int) -> None:
        """Allocate memory of `capacity` slots and copy the first `used` slots into it."""

    @abstractmethod
    def move(self, rows: NDArray[np.int64], first: int) -> None:
        """See Storage.move: in every layer."""

    @abstractmethod
    def _free(self) -> None:
        """Free the memory."""


class StackedKVCache(GrowingKVCache):
    """A cache in one buffer [2 * layers, 1, H_kv, C, D], of numpy or torch. One indexing operation moves the accepted
    rows of all layers. A subclass allocates the buffer."""

    buffer: Any

    @property
    def capacity(self) -> int:
        return int(self.buffer.shape[3])

    def _resize(self, capacity: int, used: int) -> None:
        old = self.buffer
        self._allocate(capacity)
        self.buffer[:, :, :, :used] = old[:, :, :, :used]

    def move(self, rows: NDArray[np.int64], first: int) -> None:
        self.buffer[:, 0, :, first : first + len(rows)] = self.buffer[:, 0][:, :, rows]

    def _free(self) -> None:
        del self.buffer


def check_mask(spec: EngineSpec, mask: NDArray[np.bool_], speculative: int) -> None:
    """Raises EngineError when a mask [W, S] fits no pass after `speculative` earlier speculative rows."""
    width, columns = mask.shape
    if width not in spec.pass_widths or columns != speculative + width:
        compiled = ", ".join(map(str, spec.pass_widths))
        raise EngineError(
            f"a mask of {width} x {columns} does not fit this engine: its passes have {compiled} rows, "
            f"with one column for each and for the {speculative} speculative rows before them"
        )


def check_states(spec: EngineSpec, batch: TokenBatch) -> None:
    """Raises EngineError unless a batch has the states that the engine takes, and asks for none that it lacks."""
    states, inputs = batch.states, spec.model.state_inputs
    if states is None and not inputs and not (batch.states_read and not spec.model.state_size):
        return
    sound = states is not None and states.dtype == np.float32 and states.flags.c_contiguous
    if not inputs or states is None or not sound or states.shape != (batch.num_tokens, inputs):
        raise EngineError(
            f"a pass of {batch.num_tokens} rows over the {spec.role} takes {inputs} numbers of states for each, in "
            f"float32, and returns {spec.model.state_size}: this one has "
            f"{'none' if states is None else f'{states.dtype} {list(states.shape)}'}"
        )


def joined_states(batches: Iterable[TokenBatch]) -> NDArray[np.float32] | None:
    """The states that batches take, one after the other. None for those that take none."""
    states = [batch.states for batch in batches if batch.states is not None]
    return (np.concatenate(states) if len(states) > 1 else states[0]) if states else None


def check_slots(batch: TokenBatch, committed: int, speculative: int) -> None:
    """Raises EngineError when two rows of a batch have the same slot, when a slot is none of the mask's columns, or
    when the mask leaves out speculative slots."""
    columns = batch.mask.shape[1]
    slots = [] if batch.slots is None else batch.slots.tolist()
    if not len(set(slots)) == len(slots) == batch.num_tokens or columns < speculative:
        raise EngineError(f"{len(slots)} slots and {columns} columns of a mask fit no pass of {batch.num_tokens} rows")
    if slots and not committed <= min(slots) <= max(slots) < committed + columns:
        raise EngineError(f"slots of rows must be from {committed} to {committed + columns - 1}, not {slots}")
