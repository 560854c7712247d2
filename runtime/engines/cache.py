"""KV caches that grow: where the rows of a sequence lie, and how accepted ones move together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ...models.errors import EngineError
from .base import EngineSpec, KVCache, TokenBatch

FIRST_CAPACITY = 256  # slots a growing cache starts with; it doubles from there


@runtime_checkable
class Storage(KVCache, Protocol):
    """A cache whose slots several sequences can share: all of its rows are speculative ones to it."""

    @property
    def capacity(self) -> int:
        """Slots allocated so far."""

    def limit(self, slots: int) -> None:
        """Let it grow to so many slots, be they more or fewer than the engine has for one sequence."""

    def compact(self, slots: NDArray[np.int64]) -> None:
        """Keep these speculative slots, in this order, as speculative ones; forget the others."""

    def shrink(self, capacity: int) -> None:
        """Give back the slots beyond `capacity`, or beyond what is used."""


class GrowingKVCache(ABC):
    """A KVCache whose rows lie one behind the other in slots that are allocated as they are needed. A subclass says how
    memory is allocated, copied and freed."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._limit = spec.capacity
        self._closed = False
        self.length = 0
        self.speculative = 0
        self._allocate(min(FIRST_CAPACITY, spec.capacity))

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Slots allocated so far."""

    def limit(self, slots: int) -> None:
        """See Storage.limit."""
        self._limit = slots

    def commit(self, slots: Sequence[int]) -> None:
        """See KVCache.commit. Slots already in place are not moved. Raises EngineError for a slot never computed."""
        if any(not 0 <= slot < self.speculative for slot in slots):
            raise EngineError(f"slots {list(slots)} were not computed; {self.speculative} speculative rows exist")
        kept = len(slots)
        if any(slot != index for index, slot in enumerate(slots)):
            self._move(self.length + np.asarray(slots, np.int64))
        self.length += kept
        self.speculative = 0

    def truncate(self, length: int) -> None:
        """See KVCache.truncate."""
        self.length = min(self.length, length)
        self.speculative = 0

    def close(self) -> None:
        """See KVCache.close."""
        if not self._closed:
            self._free()
        self._closed, self.length, self.speculative = True, 0, 0

    def compact(self, slots: NDArray[np.int64]) -> None:
        """See Storage.compact."""
        self._move(self.length + slots)
        self.speculative = len(slots)

    def shrink(self, capacity: int) -> None:
        """See Storage.shrink."""
        used = self.length + self.speculative
        self._replace(min(max(capacity, used, FIRST_CAPACITY), self._limit), used)

    def reserve(self, batch: TokenBatch) -> int:
        """Make room for a batch behind everything computed so far; returns the slot of its first row.

        Doubles the buffer where needed, so that growing costs O(1) per row. Raises EngineError when the engine has no
        pass of this width, or not that many slots.
        """
        if self._closed:
            raise EngineError("this cache was closed: open another one for the next text")
        check_mask(self._spec, batch.mask, self.speculative)
        columns = batch.mask.shape[1]
        slots = self.length + columns
        if slots > self._limit:
            raise EngineError(
                f"{slots} rows exceed this engine's {self._limit} cache slots: "
                "shorten the request or rebuild with a larger --max-length"
            )
        capacity, used = self.capacity, self.length + self.speculative
        while capacity < slots:
            capacity *= 2
        if capacity > self.capacity:
            self._replace(min(capacity, self._limit), used)
        return used

    def _replace(self, capacity: int, used: int) -> None:
        """Resize, or change nothing: where memory runs out between two buffers, the old ones are in place again."""
        before = dict(vars(self))
        try:
            self._resize(capacity, used)
        except BaseException:
            vars(self).clear()
            vars(self).update(before)
            raise

    @abstractmethod
    def _allocate(self, capacity: int) -> None:
        """Replace the memory by zeroed memory of `capacity` slots."""

    @abstractmethod
    def _resize(self, capacity: int, used: int) -> None:
        """Replace the memory by that of `capacity` slots, with the first `used` ones in it."""

    @abstractmethod
    def _move(self, rows: NDArray[np.int64]) -> None:
        """Copy these slots, in this order, behind the committed rows of every layer."""

    @abstractmethod
    def _free(self) -> None:
        """Give the memory back."""


class StackedKVCache(GrowingKVCache):
    """One buffer [2 * layers, 1, H_kv, C, D] for all layers, numpy or torch: one indexing operation moves the accepted
    rows of every layer. A subclass says how the buffer is made."""

    buffer: Any

    @property
    def capacity(self) -> int:
        """See GrowingKVCache.capacity."""
        return int(self.buffer.shape[3])

    def _resize(self, capacity: int, used: int) -> None:
        old = self.buffer
        self._allocate(capacity)
        self.buffer[:, :, :, :used] = old[:, :, :, :used]

    def _move(self, rows: NDArray[np.int64]) -> None:
        self.buffer[:, 0, :, self.length : self.length + len(rows)] = self.buffer[:, 0][:, :, rows]

    def _free(self) -> None:
        del self.buffer


def check_mask(spec: EngineSpec, mask: NDArray[np.bool_], speculative: int) -> None:
    """Raises EngineError for a mask [W, S] of no pass of this engine behind so many speculative rows."""
    width, columns = mask.shape
    if width not in spec.pass_widths or columns != speculative + width:
        compiled = ", ".join(map(str, spec.pass_widths))
        raise EngineError(
            f"a mask of {width} x {columns} does not fit this engine: its passes have {compiled} rows, "
            f"with one column for each and for the {speculative} speculative rows before them"
        )
