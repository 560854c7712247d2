"""PrefixTree: finds the cache slots of a text's prefix, so that requests with the same prefix share its rows.

A cache row depends only on the text up to its token, and a committed row never changes. A slot therefore identifies the
text that ends with its token. The tree is a dictionary: (slot of a text, next token) -> slot of the longer text. When a
sequence commits a row whose text is in the tree, it takes the slot of the tree, and its own row becomes garbage.

The slots of a text always ascend, in every sequence and along every path of the tree. An engine sums over a row's
values in the order of the slots, and another order would change the last bits of the result. It can therefore happen
that a sequence cannot take slots of the tree, because another sequence has committed the same text to later slots. The
sequence then keeps its own rows, and these rows are not in the tree.

Texts with different salts have different empty texts as their beginnings, so they share no rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

EMPTY_TEXT = -1  # stands for the slot of the empty text without a salt; empty texts with a salt have smaller numbers


class PrefixTree:
    """The committed rows of a cache with at most `slots` slots, of open and of ended sequences."""

    def __init__(self, slots: int) -> None:
        self._tokens, self._positions = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        self._used = np.zeros(slots, np.int64)  # time of the last use by slot; 0 for rows that are not in the tree
        self._after: dict[tuple[int, int], int] = {}
        self._clock = 0
        self._empty_texts: dict[str, int] = {}
        self._last_empty_text = EMPTY_TEXT  # numbers are never reused

    def empty_text(self, salt: str | None) -> int:
        """The number that stands for the slot of the empty text with this salt."""
        if salt is None:
            return EMPTY_TEXT
        if salt not in self._empty_texts:
            self._last_empty_text -= 1
            self._empty_texts[salt] = self._last_empty_text
        return self._empty_texts[salt]

    def record(
        self, slots: NDArray[np.int64] | slice, token_ids: NDArray[np.int64], position_ids: NDArray[np.int64]
    ) -> None:
        """Store the tokens and positions of newly computed rows in `slots`."""
        self._tokens[slots], self._positions[slots], self._used[slots] = token_ids, position_ids, 0

    def move(self, slots: NDArray[np.int64], places: NDArray[np.int64]) -> None:
        """Rows that are not committed have moved from `slots` to `places`."""
        self._tokens[places], self._positions[places] = self._tokens[slots], self._positions[slots]

    def find(self, before: int, token_ids: Sequence[int]) -> list[int]:
        """The slots of the longest prefix of these tokens that is in the tree after the text of slot `before`."""
        slots: list[int] = []
        for token in token_ids:
            slot = self._after.get((before, token))
            if slot is None:
                break
            slots.append(slot)
            before = slot
        return slots

    def commit(self, path: NDArray[np.int64], slots: NDArray[np.int64], root: int = EMPTY_TEXT) -> NDArray[np.int64]:
        """Append computed rows to the text of `path` [n] and add them to the tree. root: the text's empty text.

        Returns the slots of the longer text. Slots of the tree replace the new slots as far as the order allows."""
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
        # Update the whole path: a row must not look older than rows that are found only through it.
        self._clock += 1
        self._used[whole[:found]] = self._clock
        return whole

    def find_recent(self, live: NDArray[np.bool_], count: int) -> NDArray[np.int64]:
        """The slots of at most `count` rows that are not `live` [slots], the most recently used first. The rows before
        a returned row in its text are live or returned, too."""
        slots = np.fromiter(self._after.values(), np.int64, len(self._after))
        slots = slots[~live[slots]]
        newest: NDArray[np.int64] = slots[np.lexsort((self._positions[slots], -self._used[slots]))]
        return newest[:count]

    def latest(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of these slots that are in the tree, the most recently used first, of one text from its end on."""
        slots = slots[self._used[slots] > 0]
        latest: NDArray[np.int64] = slots[np.lexsort((-self._positions[slots], -self._used[slots]))]
        return latest

    def renumber(self, kept: NDArray[np.int64], moved: NDArray[np.int64]) -> PrefixTree:
        """The tree after rows have moved to other slots. kept: the old slots that still exist, in their new order.
        moved: the new slot by old slot, negative for slots that no longer exist."""
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

    def clear(self) -> None:
        """Remove all rows from the tree; the tokens and positions of the slots stay."""
        self._after, self._empty_texts = {}, {}
        self._used[:] = 0

    @property
    def _rows(self) -> tuple[NDArray[np.int64], ...]:
        return self._tokens, self._positions, self._used
