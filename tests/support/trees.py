"""Random token trees for tests of engines, the texts of their rows, and the passes that score them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from checkpoints import VOCAB_SIZE
from hypothesis import strategies as st

from draftwood.runtime.engines.base import EngineSpec, TokenBatch


class Tree(NamedTuple):
    """Rows after a committed prefix; a parent comes before its children, -1 is the prefix itself."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def path(self, row: int) -> list[int]:
        """Rows from the prefix to `row`."""
        return [] if row < 0 else [*self.path(self.parents[row]), row]

    def texts(self, prefix: Sequence[int]) -> list[list[int]]:
        """Every row's own text."""
        return [[*prefix, *(self.tokens[each] for each in self.path(row))] for row in range(len(self.tokens))]

    def batch(self, spec: EngineSpec, committed: int, first: int = 0, stop: int | None = None) -> TokenBatch:
        """The pass that scores rows `first` to `stop`, the earlier ones being in the cache as speculative slots."""
        rows = range(first, len(self.tokens) if stop is None else stop)
        mask = np.zeros((len(rows), rows.stop), np.bool_)
        for index, row in enumerate(rows):
            mask[index, self.path(row)] = True
        positions = [committed + len(self.path(row)) - 1 for row in rows]
        return TokenBatch.pad(self.tokens[rows.start : rows.stop], positions, mask, spec.width_for(len(rows)))


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    rows = draw(st.integers(1, 14))
    parents = tuple(draw(st.integers(-1, row - 1)) for row in range(rows))
    return Tree(tuple(draw(st.integers(0, VOCAB_SIZE - 1)) for _ in parents), parents)
