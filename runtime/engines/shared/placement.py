"""Where the rows of a sequence go in a cache that many sequences share, and that attention reads in panels of slots.

Each sequence fills runs of whole panels of its own. So a row's attention reads the panels of its own sequence only, and
costs the same whatever the other sequences hold. If rows of many sequences simply followed each other, every panel
would be read by all of them: 32 texts of 64 tokens then cost 1.7 times as much after 40 further tokens each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

PANEL = 16  # slots that are read together: LANES of plugins/native/kernels


class Run(NamedTuple):
    """The free slots of a sequence: from `next` to `end`. kept: the first of them if no speculative row is accepted."""

    kept: int = 0
    next: int = 0
    end: int = 0

    def commit(self, last: int) -> Run:
        """The run after a commit, or a rollback. last: the last accepted slot. The slots of rejected rows behind it are
        free again: no other sequence can refer to them."""
        first = last + 1 if self.kept <= last < self.next else self.kept
        return Run(first, first, self.end)


class Sequence(Protocol):
    """A sequence whose rows are placed."""

    run: Run
    last: int  # the last slot that it refers to; -1: none


class Placement(NamedTuple):
    """The slots of a pass. runs: of each sequence afterwards. slots: of the rows of each. top: the slots in use."""

    runs: list[Run]
    slots: list[NDArray[np.int64]]
    top: int


def place(sequences: Iterable[Sequence], counts: Iterable[int], top: int, panel: int) -> Placement:
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
