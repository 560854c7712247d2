"""Constraint: the tokens that a grammar allows after a text. PathMasks: the same after every path of a proposal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...models.errors import RequestError


class Constraint(Protocol):
    """A grammar's state after one text. At first the text is empty.

    One object serves all paths of a proposal: it goes back to the place where two paths part, and advances from there.
    A copy for each node would take time in proportion to the length of the text.
    """

    @property
    def ended(self) -> bool:
        """Whether the text is complete and nothing can follow."""

    def allowed(self) -> NDArray[np.bool_]:
        """[V]: whether each token may follow; at least one may. Only while the text has not ended. Raises RequestError
        if the grammar exceeds a limit here."""

    def advance(self, token: int) -> bool:
        """Append a token to the text. False, without a change, if the token is not allowed."""

    def roll_back(self, count: int) -> None:
        """Remove the last `count` tokens."""

    def forced(self) -> list[int]:
        """The tokens that probably follow, because the grammar leaves little choice; none where it does."""


class PathMasks:
    """The masks of one request, each computed once. A path is the list of tokens from the committed text to a node."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self._path: list[int] = []  # after which the constraint stands
        self._masks: dict[tuple[int, ...], NDArray[np.bool_] | None] = {}

    def after(self, path: Sequence[int]) -> NDArray[np.bool_] | None:
        """Whether each token [V] may follow a path. None where the text has ended before, or may not go that way."""
        key = tuple(path)
        if key not in self._masks:
            follows = self._move(key) and not self._constraint.ended
            self._masks[key] = self._constraint.allowed() if follows else None
        return self._masks[key]

    def ends(self, path: Sequence[int]) -> bool:
        """Whether the text is complete after a path of allowed tokens."""
        return self._move(path) and self._constraint.ended

    def forced(self) -> list[int]:
        return self._constraint.forced() if self._move(()) and not self._constraint.ended else []

    def commit(self, tokens: Sequence[int]) -> None:
        """Make a path of allowed tokens part of the text. Paths begin after it from now on. Raises RequestError if the
        grammar refuses a token that its mask allowed."""
        if not self._move(tokens):
            raise RequestError(
                f"the structured output allows one of the tokens {list(tokens)}, but cannot continue after it: "
                "leave special tokens out of it"
            )
        last = tuple(tokens)
        self._masks = {(): self._masks[last]} if last in self._masks else {}
        self._path = []

    def _move(self, path: Sequence[int]) -> bool:
        """Move the constraint after a path. False if it does not allow the path."""
        shared = 0
        while shared < min(len(path), len(self._path)) and path[shared] == self._path[shared]:
            shared += 1
        if shared < len(self._path):
            self._constraint.roll_back(len(self._path) - shared)
            del self._path[shared:]
        for token in path[shared:]:
            if self._constraint.ended or not self._constraint.advance(token):
                return False
            self._path.append(token)
        return True
