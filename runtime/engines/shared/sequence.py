"""One sequence of a pool: its slots, and where its next rows go.

Where attention reads a cache in panels of slots, each sequence fills runs of whole panels of its own. So a row's
attention reads the panels of its own sequence only, and costs the same whatever the other sequences hold. If rows of
many sequences simply followed each other, every panel would be read by all of them: 32 texts of 64 tokens then cost 1.7
times as much after 40 further tokens each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....models.errors import EngineError

if TYPE_CHECKING:  # pool.py imports this module
    from .pool import PooledEngine

NO_SLOTS: NDArray[np.int64] = np.zeros(0, np.int64)
NOTHING_SEEN: NDArray[np.bool_] = np.zeros(0, np.bool_)
PANEL = 16  # slots that are read together: LANES of plugins/native/kernels


class Run(NamedTuple):
    """The free slots of a sequence: from `next` to `end`. kept: the first of them if no speculative row is accepted."""

    kept: int = 0
    next: int = 0
    end: int = 0

    def commit(self, last: int) -> Run:
        """The run after a commit, or a rollback. last: the last accepted slot. The slots of rejected rows after it are
        free again: no other sequence can refer to them."""
        first = last + 1 if self.kept <= last < self.next else self.kept
        return Run(first, first, self.end)


class PooledKVCache:
    def __init__(self, pool: PooledEngine, salt: str | None = None) -> None:
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
            if not self._pool.restore(accepted, path[self.length :]):
                path = np.concatenate((self.slots, accepted))
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
        self.visible = NOTHING_SEEN
        self.take(self.slots[:length], self.slots[:length])
        self.run = self.run.commit(-1)

    def close(self) -> None:
        """See KVCache.close. The rows become garbage."""
        self.truncate(0)
        self._pool.leave(self)


class Placement(NamedTuple):
    """The slots of a pass. runs: of each sequence afterwards. slots: of the rows of each. top: the slots in use."""

    runs: list[Run]
    slots: list[NDArray[np.int64]]
    top: int


def place(sequences: Iterable[PooledKVCache], counts: Iterable[int], top: int, panel: int) -> Placement:
    """Find slots for new rows. counts: of the new rows of each sequence. top: the number of slots in use. panel:
    new runs have a multiple of so many slots.

    The slots of a sequence ascend (see `prefix.py`): a run below its last slot is given up."""
    runs, slots = [], []
    for sequence, count in zip(sequences, counts, strict=True):
        run = sequence.run
        if run.next <= sequence.last:
            run = Run()
        own = np.arange(run.next, min(run.next + count, run.end))
        missing = count - len(own)
        if missing:
            own = np.concatenate((own, np.arange(top, top + missing)))
            end = top + -(-missing // panel) * panel
            run, top = Run(top, top + missing, end), end
        else:
            run = Run(run.kept, run.next + count, run.end)
        runs.append(run)
        slots.append(own)
    return Placement(runs, slots, top)
