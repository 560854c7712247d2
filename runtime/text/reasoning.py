"""Reasoning: whether a model thinks before it answers. ThoughtReader: separates the thought from the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..sampling.thought import Thought
from .detokenizer import overlap
from .tokenizer import Tokenizer

OPENS, CLOSES = "<think>", "</think>"  # DeepSeek-R1, Qwen3, SmolLM3
TAIL = 8  # tokens at the end of a prompt: a mark, and the line breaks after it
BEFORE, INSIDE, AFTER, REST = range(4)


class ThoughtPart(NamedTuple):
    """The next characters of a thought."""

    text: str


class Reasoning:
    """A model whose chat template knows thoughts, and whose tokenizer has a token for each mark."""

    def __init__(self, tokenizer: Tokenizer, opens: int, closes: int) -> None:
        self._tokenizer, self._opens, self._closes = tokenizer, opens, closes
        self.is_special = bool({opens, closes} & tokenizer.special_token_ids)  # so that marks have text only on demand

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Reasoning | None:
        """None for a model that does not think."""
        if not any(CLOSES in template for template in tokenizer.chat_templates.values()):
            return None
        tokens = tokenizer.vocabulary()
        marks = tokens.get(OPENS), tokens.get(CLOSES)
        return None if marks[0] is None or marks[1] is None else cls(tokenizer, marks[0], marks[1])

    def thought(self, prompt: Sequence[int], continued: str | None, budget: int | None) -> Thought | None:
        """The thought of an answer; None where the prompt has ended it. continued: what the answer goes on with."""
        if continued is None:
            end = self._tokenizer.decode(prompt[-TAIL:], skip_special_tokens=False).rstrip()
            begun, over = end.endswith(OPENS), end.endswith(CLOSES)
        else:
            begun = over = continued.rfind(OPENS) > continued.rfind(CLOSES)
            over = not begun
        return None if over else Thought(self._opens, self._closes, begun, budget)


class ThoughtReader:
    """Reads one answer, which arrives in pieces. Blanks around a thought belong to neither."""

    def __init__(self, begun: bool) -> None:
        """begun: whether the answer begins inside the thought."""
        self._state = INSIDE if begun else BEFORE
        self._held = ""  # text of which it is not known yet what it is
        self._empty = True  # whether the thought has no text yet

    def push(self, text: str) -> list[ThoughtPart | str]:
        """Add text; returns what is certain now, in order."""
        self._held += text
        found: list[ThoughtPart | str] = []
        if self._state == BEFORE:
            begun = self._held.lstrip()
            if len(begun) < len(OPENS) and OPENS.startswith(begun):
                return found
            self._state = INSIDE if begun.startswith(OPENS) else REST
            self._held = begun[len(OPENS) :] if self._state == INSIDE else self._held
        if self._state == INSIDE:
            place = self._held.find(CLOSES)
            sure = len(self._held) - overlap(self._held[-len(CLOSES) :], CLOSES) if place < 0 else place
            thought = self._held[:sure].rstrip()
            self._held = self._held[len(thought) :] if place < 0 else self._held[place + len(CLOSES) :]
            found += self._thought(thought)
            self._state = INSIDE if place < 0 else AFTER
        if self._state == AFTER:
            self._held = self._held.lstrip()
            self._state = REST if self._held else AFTER
        if self._state == REST and self._held:
            found.append(self._held)
            self._held = ""
        return found

    def finish(self) -> list[ThoughtPart | str]:
        """What is left at the end of the answer."""
        left, self._held = self._held, ""
        return self._thought(left.rstrip()) if self._state == INSIDE else [left] if left else []

    def _thought(self, text: str) -> list[ThoughtPart | str]:
        text = text.lstrip() if self._empty else text
        self._empty = self._empty and not text
        return [ThoughtPart(text)] if text else []
