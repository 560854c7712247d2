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
NOTHING_SEEN: NDArray[np.bool_] = np.zeros(0, np.bool_)


class PooledKVCache:
    """One sequence."""

    def __init__(self, pool: PooledEngine, salt: str | None = None) -> None:
        """salt: see Engine.new_cache."""
        # Of the committed and of the speculative rows, int64 [length] and [speculative], in the order of the text.
        self.slots, self.speculative_slots = NO_SLOTS, NO_SLOTS
        self.length = self.speculative = 0
        self.last = -1  # the last slot of all of them; -1 for none
        # By slot, whether it holds a committed row: bool, as long as the last one needs, or longer.
        self.visible = NOTHING_SEEN
        self.run = Run()  # where the next rows go, if the storage places rows
        self.salt = salt
        self._pool = pool

    def commit(self, slots: Sequence[int]) -> None:
        """See KVCache.commit. Raises EngineError for a slot that was not computed."""
        kept = len(slots)
        if kept and not 0 <= min(slots) <= max(slots) < self.speculative:
            raise EngineError(f"slots {list(slots)} were not computed; {self.speculative} speculative rows exist")
        in_place = slots == range(kept) or [*slots] == [*range(kept)]
        accepted = self.speculative_slots[:kept] if in_place else self._gather(slots)
        prefixes = self._pool.prefixes
        if prefixes is None:
            self.take(np.concatenate((self.slots, accepted)), accepted)
        else:
            path = prefixes.commit(self.slots, accepted, prefixes.empty_text(self.salt))
            self.take(path, path[self.length :])
        last = accepted.item(-1) if kept else -1
        self.run = self.run.commit(last)
        self._pool.drop_rejected(self, last)

    def _gather(self, slots: Sequence[int]) -> NDArray[np.int64]:
        """Move accepted rows to the first slots of their pass, so that rejected ones leave no gaps; returns their
        slots. Those of a pass that follow no other in the storage stay."""
        accepted = self.speculative_slots[np.asarray(slots, np.int64)]
        first = self.speculative_slots[: len(slots)]
        if first[-1] - first[0] >= len(first) or not self._pool.move(accepted, first):
            return accepted
        return first

    def take(self, path: NDArray[np.int64], new: NDArray[np.int64]) -> None:
        """Refer to the slots `path` as the committed rows, of which `new` are new, and to no speculative ones."""
        self.slots, self.length = path, len(path)
        self.speculative_slots, self.speculative = NO_SLOTS, 0
        self.last = path.item(-1) if self.length else -1
        if self.last >= len(self.visible):  # slots ascend
            longer = np.zeros(2 * self.last + 64, np.bool_)
            longer[: len(self.visible)] = self.visible
            self.visible = longer
        self.visible[new] = True

    def renumber(self, slots: NDArray[np.int64], speculative: NDArray[np.int64]) -> None:
        """Refer to other slots, because rows have moved."""
        self.visible = NOTHING_SEEN
        self.take(slots, slots)
        self.run = Run()
        if len(speculative):
            self.append(speculative)

    def append(self, slots: NDArray[np.int64]) -> None:
        """Refer to the slots of further speculative rows."""
        known = self.speculative_slots
        self.speculative_slots = np.concatenate((known, slots)) if self.speculative else slots
        self.speculative += len(slots)
        self.last = slots.item(-1)

    def truncate(self, length: int) -> None:
        """See KVCache.truncate."""
        self.visible = NOTHING_SEEN
        self.take(self.slots[:length], self.slots[:length])
        self.run = self.run.commit(-1)

    def close(self) -> None:
        """See KVCache.close. The rows become garbage."""
        self.truncate(0)
        self._pool.leave(self)
