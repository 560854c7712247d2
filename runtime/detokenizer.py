"""Text while it is generated: whole characters only, and nothing that may turn out to belong to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .tokenizer import Tokenizer

INCOMPLETE = "\ufffd"  # what bytes decode to that are not UTF-8, perhaps not yet
CONTEXT_TOKENS = 6  # of the prompt, enough to decide whether the first token begins with a space


class IncrementalDetokenizer:
    """One request's token ids to text, token by token, in amortised constant time.

    Only a short window is decoded again: the text of a new token is what the window with it has more than the window
    without. (A token's text depends on its neighbours: leading spaces, characters split into bytes.)
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window, self._context = context(tokenizer, prompt)
        self._seen = len(self._window)  # tokens of the window whose text is complete and handed out
        self._written = len(self._context.rstrip(INCOMPLETE))  # of the window's text

    def push(self, token_ids: Sequence[int]) -> list[str]:
        """One text per token; empty while a character is incomplete."""
        return [self._push(token) for token in token_ids]

    def finish(self) -> str:
        """What is left when no token follows: bytes that never became a character."""
        text = self._decode()
        delta, self._written = text[self._written :], len(text)
        return delta

    def _push(self, token: int) -> str:
        if token in self._tokenizer.special_token_ids:  # no text, and none of its neighbours' depends on it
            return ""
        self._window.append(token)
        text = self._decode()
        certain = len(text.rstrip(INCOMPLETE))
        delta = text[self._written : certain]
        if delta and certain == len(text):
            # The next token's text needs no more before it than the tokens that made up this character.
            self._window = self._window[self._seen :]
            self._seen, self._written = len(self._window), len(self._tokenizer.decode(self._window))
            self._context = ""
        else:
            self._written = max(self._written, certain)
        return delta

    def _decode(self) -> str:
        text = self._tokenizer.decode(self._window)
        if text.startswith(self._context):  # what looked incomplete at the prompt's end really stands there
            self._written = max(self._written, len(self._context))
        return text


def context(tokenizer: Tokenizer, prompt: Sequence[int]) -> tuple[list[int], str]:
    """The prompt's last tokens and their text: so many that a text does not begin inside a character, or with none."""
    length = CONTEXT_TOKENS
    while True:
        window = list(prompt[-length:])
        text = tokenizer.decode(window)
        if length >= len(prompt) or (text and not text.startswith(INCOMPLETE)):
            return window, text
        length *= 2


class StopResult(NamedTuple):
    """text: certain to stand before any stop string. stopped: a stop string was completed right behind it."""

    text: str
    stopped: bool


class StopChecker:
    """Finds the earliest stop string in a text that arrives in pieces."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""

    def push(self, delta: str) -> StopResult:
        """More text. Holds back its end as long as that could be the beginning of a stop string."""
        text = self._held + delta
        # One that ends in what was held ends where none may yet (see `pass_over`).
        starts = (text.find(stop, max(0, len(self._held) - len(stop) + 1)) for stop in self._stop)
        found = [position for position in starts if position >= 0]
        if found:
            self._held = ""
            return StopResult(text[: min(found)], True)
        return StopResult(self.pass_over(delta), False)

    def pass_over(self, delta: str) -> str:
        """More text, in which no stop string may end yet; its end is held back, too, for one may begin there."""
        text = self._held + delta
        keep = max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, once it is clear that nothing follows."""
        text, self._held = self._held, ""
        return text


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
