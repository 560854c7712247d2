"""Thought: how a text may begin. ThoughtConstraint: bounds it, and holds the form of the text back until its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .constraint import Constraint


@dataclass(frozen=True)
class Thought:
    """A thought at the beginning of a text. opens, closes: the tokens around it."""

    opens: int
    closes: int
    begun: bool  # the prompt ends inside of it; else the text may begin with `opens`
    budget: int | None = None  # the most tokens between both; 0: the text has no thought

    def count(self, tokens: Sequence[int]) -> tuple[int, Thought | None]:
        """How many of the next tokens belong to the thought with its marks, and what is left of it; None after it."""
        if not tokens or self.begun or tokens[0] == self.opens:
            found = self.closes in tokens
            rest = None if found else replace(self, begun=self.begun or bool(tokens))
            return tokens.index(self.closes) + 1 if found else len(tokens), rest
        return 0, None


class ThoughtConstraint:
    """A Constraint: any tokens up to the budget, then the token that closes the thought, then the form. The thought is
    no part of the form. A text with a form does not end inside its thought."""

    def __init__(self, thought: Thought, form: Constraint | None, vocab_size: int, endings: Sequence[int]) -> None:
        """form: of the text after the thought; None for any. endings: tokens that end a text."""
        self._thought, self._form = thought, form
        self._any, self._inside, self._close = (np.full(vocab_size, free) for free in (True, True, False))
        self._inside[[token for token in endings if form is not None and token < vocab_size]] = False
        self._inside[thought.closes] = self._close[thought.closes] = True
        self._head, self._tail = 0, 0  # tokens of the thought, and those after it
        self._answers = False  # whether the thought has ended, or there is none

    @property
    def ended(self) -> bool:
        return self._answers and self._form is not None and self._form.ended

    def allowed(self) -> NDArray[np.bool_]:
        if not (self._answers or self._undecided):
            return self._close if self._is_spent else self._inside
        lawful = self._any if self._form is None else self._form.allowed()
        if self._undecided:
            lawful = lawful.copy()
            lawful[self._thought.opens] = self._thought.budget != 0
        return lawful

    def advance(self, token: int) -> bool:
        if self._answers or (self._undecided and token != self._thought.opens):
            advanced = self._form is None or self._form.advance(token)
            self._answers |= advanced
            self._tail += advanced
            return advanced
        if not self.allowed()[token]:
            return False
        self._head += 1
        self._answers = token == self._thought.closes
        return True

    def roll_back(self, count: int) -> None:
        after = min(count, self._tail)
        if self._form is not None and after:
            self._form.roll_back(after)
        self._tail -= after
        self._head -= count - after
        self._answers = self._answers and count == after and bool(self._tail or self._head)

    def forced(self) -> list[int]:
        if self._answers:
            return [] if self._form is None else self._form.forced()
        return [self._thought.closes] if not self._undecided and self._is_spent else []

    @property
    def _undecided(self) -> bool:
        """Whether nothing says yet that the text has a thought, or has none."""
        return not (self._thought.begun or self._head or self._answers)

    @property
    def _is_spent(self) -> bool:
        used = self._head - (not self._thought.begun)
        return self._thought.budget is not None and used >= self._thought.budget


def after_thought(
    thought: Thought | None, form: Constraint | None, vocab_size: int, endings: Sequence[int]
) -> Constraint | None:
    """The constraint of a text that may think before it has its form; None if any text will do."""
    if thought is None or (form is None and thought.budget is None):
        return form
    return ThoughtConstraint(thought, form, vocab_size, endings)
