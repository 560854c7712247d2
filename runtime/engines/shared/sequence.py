"""One sequence of a pool: its slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ....models.errors import EngineError
from .placement import Run

if TYPE_CHECKING:  # pool.py imports this module
    from .pool import PooledEngine

NO_SLOTS: NDArray[np.int64] = np.zeros(0, np.int64)


class PooledKVCache:
    """One sequence. slots: of its committed rows, in order. speculative_slots: of its speculative rows, in order."""

    def __init__(self, pool: PooledEngine) -> None:
        self.slots, self.speculative_slots = NO_SLOTS, NO_SLOTS
        self.run = Run()  # where the next rows go, if the storage places rows
        self.salt: str | None = None  # only sequences of the same salt share rows; set before the first pass
        self._pool = pool

    @property
    def length(self) -> int:
        return len(self.slots)

    @property
    def speculative(self) -> int:
        return len(self.speculative_slots)

    def commit(self, slots: Sequence[int]) -> None:
        """See KVCache.commit. Raises EngineError for a slot that was not computed."""
        if any(not 0 <= slot < self.speculative for slot in slots):
            raise EngineError(f"slots {list(slots)} were not computed; {self.speculative} speculative rows exist")
        accepted = self.speculative_slots[np.asarray(slots, np.int64)]
        prefixes = self._pool.prefixes
        if prefixes is None:
            self.slots = np.concatenate((self.slots, accepted))
        else:
            self.slots = prefixes.commit(self.slots, accepted, prefixes.empty_text(self.salt))
        self.speculative_slots = NO_SLOTS
        self.run = self.run.commit(int(accepted[-1]) if len(accepted) else -1)

    def truncate(self, length: int) -> None:
        """See KVCache.truncate."""
        self.slots, self.speculative_slots = self.slots[:length], NO_SLOTS
        self.run = self.run.commit(-1)

    @property
    def last(self) -> int:
        """The last slot that the sequence refers to; -1 for an empty one."""
        path = self.speculative_slots if self.speculative else self.slots
        return int(path[-1]) if len(path) else -1

    def close(self) -> None:
        """See KVCache.close. The rows become garbage."""
        self._pool.caches.pop(self, None)
        self.truncate(0)
