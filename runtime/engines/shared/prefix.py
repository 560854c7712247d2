"""PrefixTree: which cache slot holds which text's row, so that what one request has read no other reads again.

A row of a cache depends on the text up to its token and on nothing else, and a committed row never changes. So a slot
stands for a whole text, the one its token ends, and a dictionary is all a radix tree takes: (slot of a text, the token
behind it) -> slot of the longer text. Equal texts get equal slots: whoever commits a row that is here already takes
that one, and its own becomes garbage.

The slots of a text ascend, in every sequence and along the tree: an engine adds a row's values up in the order of the
slots, so that any other order would change its last bits. A sequence that computed its rows before another committed
the same ones from later slots cannot always go over to those; then it keeps its own, and they stay out of the tree.

Texts may have different roots, one for each salt: then equal texts are different ones, and share nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

EMPTY_TEXT = -1  # in place of a slot: the empty text without a salt; those with one have smaller numbers


class PrefixTree:
    """The committed rows of a cache of at most `slots`, whether a sequence still has them or not."""

    def __init__(self, slots: int) -> None:
        self._tokens, self._positions = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        self._used = np.zeros(slots, np.int64)  # when last; 0 for rows that cannot be found
        self._after: dict[tuple[int, int], int] = {}
        self._clock = 0
        self._empty_texts: dict[str, int] = {}
        self._last_empty_text = EMPTY_TEXT  # a number is never given twice

    def empty_text(self, salt: str | None) -> int:
        """In place of a slot: the empty text of this salt."""
        if salt is None:
            return EMPTY_TEXT
        if salt not in self._empty_texts:
            self._last_empty_text -= 1
            self._empty_texts[salt] = self._last_empty_text
        return self._empty_texts[salt]

    def record(self, first: int, token_ids: NDArray[np.int64], position_ids: NDArray[np.int64]) -> None:
        """What the rows from slot `first` on were computed from, committed or not."""
        rows = slice(first, first + len(token_ids))
        self._tokens[rows], self._positions[rows], self._used[rows] = token_ids, position_ids, 0

    def find(self, before: int, token_ids: Sequence[int]) -> list[int]:
        """Slots of as many of these tokens, behind the text of slot `before`, as there are rows of."""
        slots: list[int] = []
        for token in token_ids:
            slot = self._after.get((before, token))
            if slot is None:
                break
            slots.append(slot)
            before = slot
        return slots

    def commit(self, path: NDArray[np.int64], slots: NDArray[np.int64], root: int = EMPTY_TEXT) -> NDArray[np.int64]:
        """The text of `path` [n], from its root, goes on with rows that are computed; returns the slots of the whole,
        with those of rows that were here already in place of new ones as far as the order allows."""
        before = int(path[-1]) if len(path) else root
        if before >= 0 and not self._used[before]:
            return np.concatenate((path, slots))
        own, tokens = slots.tolist(), self._tokens[slots].tolist()
        here = self.find(before, tokens)
        taken = len(here)
        while 0 < taken < len(own) and own[taken] < here[taken - 1]:
            taken -= 1
        chain = [before, *here[:taken], *own[taken:]]
        whole = np.concatenate((path, np.array(chain[1:], np.int64)))
        found = len(whole) if taken == len(here) else len(path) + taken
        for index in range(taken, found - len(path)):
            self._after[chain[index], tokens[index]] = chain[index + 1]
        # The whole path, so that no row looks older than one that cannot be found without it.
        self._clock += 1
        self._used[whole[:found]] = self._clock
        return whole

    def find_recent(self, live: NDArray[np.bool_], count: int) -> NDArray[np.int64]:
        """At most `count` of the rows that are not `live` [slots], those used last; none without the rows before it."""
        slots = np.fromiter(self._after.values(), np.int64, len(self._after))
        slots = slots[~live[slots]]
        newest: NDArray[np.int64] = slots[np.lexsort((self._positions[slots], -self._used[slots]))]
        return newest[:count]

    def renumber(self, kept: NDArray[np.int64], moved: NDArray[np.int64]) -> PrefixTree:
        """The same rows where slots have new names. kept: those that still exist, in their new order. moved: old ->
        new, negative for those that do not exist any more."""
        tree = PrefixTree(len(self._tokens))
        for ours, theirs in zip(self._rows, tree._rows, strict=True):
            theirs[: len(kept)] = ours[kept]
        names = moved.tolist()
        tree._after = {
            (names[before] if before >= 0 else before, token): names[slot]
            for (before, token), slot in self._after.items()
            if names[slot] >= 0
        }
        tree._clock, tree._last_empty_text = self._clock, self._last_empty_text
        rooted = {before for before, _ in tree._after if before < 0}
        tree._empty_texts = {salt: root for salt, root in self._empty_texts.items() if root in rooted}
        return tree

    def forget(self) -> None:
        """Nothing is found any more; what the rows were computed from stays known."""
        self._after, self._empty_texts = {}, {}
        self._used[:] = 0

    @property
    def _rows(self) -> tuple[NDArray[np.int64], ...]:
        return self._tokens, self._positions, self._used
