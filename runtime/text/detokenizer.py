"""Incremental text of generated tokens: only whole characters, and no text that may become part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import islice, product, takewhile
from typing import NamedTuple

from .tokenizer import Tokenizer

INCOMPLETE = "\ufffd"  # the text of bytes that are not UTF-8, or not yet
UNFINISHED = 3  # bytes of a character that lacks its end, at most, and so tokens
CONTEXT_TOKENS = 6  # of the prompt, enough to decide whether the first token begins with a space
PENDING_TOKENS = 16  # more than any character has; when the limit is reached, the older half is not decoded again


class IncrementalDetokenizer:
    """Converts one request's token ids to text, token by token, each in constant time.

    The text of an output is the difference between the decoded prompt with output and the decoded prompt. A character
    that begins in the prompt and ends in the output belongs to the output. Bytes of the prompt that never become a
    character do not.

    A token's text depends on its neighbours (leading spaces, characters split into bytes), so a short window is decoded
    again for each token: first the context (tokens whose text is complete), then the pending tokens. Tokens that stand
    for one byte (`Tokenizer.byte_values`) are decoded here as bytes, because the library turns valid characters beside
    an invalid byte into U+FFFD, too. So are all tokens of a tokenizer whose text is that of their bytes, one after the
    other (`Tokenizer.is_byte_level`).
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool = True) -> None:
        """skip_special_tokens: special tokens have no text. Otherwise they have their own, and the text around them
        does not change."""
        self._tokenizer, self._skips = tokenizer, skip_special_tokens
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        window = last_tokens(tokenizer, prompt)
        if tokenizer.is_byte_level:
            self._set_context([])
            for token in window[-UNFINISHED:]:
                self._bytes.decode(tokenizer.piece(token))
            self._prompt_end = INCOMPLETE if self._bytes.getstate()[0] else ""
        elif tokenizer.byte_values:
            self._set_context(window)
            for token in window[-UNFINISHED:]:
                self._bytes.decode(tokenizer.byte_values.get(token, b" "))
            self._prompt_end = INCOMPLETE if self._bytes.getstate()[0] else ""
        else:
            context, pending = split_unfinished(tokenizer, window)
            self._set_context(context, pending)
            self._prompt_end = self._decode()  # the prompt's text after the context

    def push(self, token_ids: Sequence[int]) -> list[str]:
        """One text per token; empty while a character is incomplete."""
        return [self._push(token) for token in token_ids]

    def finish(self) -> str:
        """The remaining text at the end of the output: bytes that never became a character."""
        return self._end_bytes() + self._take(self._decode())

    def _end_character(self) -> str:
        """The remaining text before a special token, after which no earlier character continues."""
        text = self.finish()
        self._set_context(self._context)
        self._prompt_end = ""
        return text

    def _push(self, token: int) -> str:
        if token in self._tokenizer.special_token_ids:  # it has no effect on the text of its neighbours
            return "" if self._skips else self._end_character() + self._tokenizer.decode([token], False)
        if self._tokenizer.is_byte_level:
            text = self._bytes.decode(self._tokenizer.piece(token))
            return self._after_the_prompt(text) if text else ""
        byte = self._tokenizer.byte_values.get(token)
        return self._end_bytes() + self._push_piece(token) if byte is None else self._push_byte(token, byte)

    def _push_byte(self, token: int, byte: bytes) -> str:
        before = self._take(self._decode())
        text = self._bytes.decode(byte)
        self._set_context([token])
        return before + (self._after_the_prompt(text) if text else "")

    def _end_bytes(self) -> str:
        """The text of the pending bytes, when the next token is no byte."""
        text = self._bytes.decode(b"", final=True)
        return self._after_the_prompt(text) if text else ""

    def _push_piece(self, token: int) -> str:
        self._pending.append(token)
        text = self._decode()
        delta = self._take(text.removesuffix(INCOMPLETE))
        if text and not text.endswith(INCOMPLETE):
            # The tokens of this character are enough context for the next token's text.
            self._set_context(self._pending)
            self._prompt_end = ""
        elif len(self._pending) > PENDING_TOKENS:
            self._forget(text)
        return delta

    def _set_context(self, context: list[int], pending: Sequence[int] = (), written: int = 0) -> None:
        """written: number of characters of the pending tokens' text that were already returned."""
        self._context, self._before = context, self._tokenizer.decode(context)
        self._pending, self._written = list(pending), written

    def _decode(self) -> str:
        """The text of the pending tokens after the context."""
        if not self._pending:
            return ""
        return self._tokenizer.decode([*self._context, *self._pending])[len(self._before) :]

    def _take(self, text: str) -> str:
        """The new part of `text`, the complete text of the pending tokens: neither the prompt's nor returned."""
        start = max(self._written, common_prefix(self._prompt_end, text))
        self._written = max(self._written, len(text))
        return text[start:]

    def _after_the_prompt(self, text: str) -> str:
        """The first text of the output, without the part that belongs to the prompt."""
        if not self._prompt_end:
            return text
        own, self._prompt_end = common_prefix(self._prompt_end, text), ""
        return text[own:]

    def _forget(self, text: str) -> None:
        """Keep the last of many pending tokens alone, if they suffice for the text that was not returned yet."""
        kept = self._pending[-PENDING_TOKENS // 2 :]
        end = self._tokenizer.decode(kept)
        if not text and self._before:
            self._set_context(self._context)
        elif text and end.endswith(text[-UNFINISHED:]):
            self._set_context([], kept, written=len(end) - (len(text) - self._written))
            self._prompt_end = ""


def common_prefix(first: str, second: str) -> int:
    """The length of the longest common prefix of two texts."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def last_tokens(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """The last tokens with text of a prompt, as many as the text of the output may depend on."""
    textual = (token for token in reversed(prompt) if token not in tokenizer.special_token_ids)
    return list(islice(textual, CONTEXT_TOKENS + 2 * UNFINISHED))[::-1]


def split_unfinished(tokenizer: Tokenizer, tokens: list[int]) -> tuple[list[int], list[int]]:
    """Split `tokens` in two: those that end with a whole character, and those after them, which do not."""
    for pending, start in product(range(UNFINISHED + 1), repeat=2):
        end = len(tokens) - pending
        text = tokenizer.decode(tokens[start:end])
        if not text.startswith(INCOMPLETE) and not text.endswith(INCOMPLETE) and (text or not start):
            return tokens[start:end], tokens[end:]
    return tokens[:-UNFINISHED], tokens[-UNFINISHED:]  # never for fewer tokens: the first has no text before it


class StopResult(NamedTuple):
    text: str  # certainly before any stop string
    stopped: str | None  # the stop string that follows `text`, or ends it where stop strings are kept


class StopChecker:
    """Finds the earliest stop string in a text that arrives in pieces."""

    def __init__(self, stop: Sequence[str], keeps: bool = False) -> None:
        """keeps: a text ends with its stop string, not before it."""
        self._stop, self._keeps = tuple(stop), keeps
        self._begun = [BegunStop(each) for each in self._stop]
        self._held = ""

    def push(self, delta: str) -> StopResult:
        """Add text. The end of the text is held back as long as it may be the beginning of a stop string."""
        text = self._held + delta
        # A stop string that ends inside the held text does not count (see `pass_over`).
        places = ((text.find(stop, max(0, len(self._held) - len(stop) + 1)), stop) for stop in self._stop)
        found = [(start, start + len(stop)) for start, stop in places if start >= 0]
        if found:
            self._held = ""
            start, end = first = min(found)
            return StopResult(text[: first[self._keeps]], text[start:end])
        return StopResult(self.pass_over(delta), None)

    def pass_over(self, delta: str) -> str:
        """Add text in which no stop string may end yet. A stop string may begin at its end, which is then held back."""
        text = self._held + delta
        keep = max((begun.add(delta) for begun in self._begun), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text that was held back, when no more text follows."""
        text, self._held = self._held, ""
        return text


class BegunStop:
    """How much of a stop string ends a text (Knuth, Morris and Pratt 1977), in a constant time for each letter."""

    def __init__(self, stop: str) -> None:
        self._stop, self._size = stop, 0
        # By the letters at the beginning of the stop string, from one on: the longest part of them, not all, that they
        # both begin and end with. As many entries as were needed so far.
        self._borders = [0]

    def add(self, text: str) -> int:
        """Add text. Returns the length of its longest end that begins the stop string and is not all of it."""
        stop, size = self._stop, self._size
        for letter in text:
            while size and stop[size] != letter:
                size = self._border(size)
            size += stop[size] == letter
            if size == len(stop):
                size = self._border(size)
        self._size = size
        return size

    def _border(self, size: int) -> int:
        stop, borders = self._stop, self._borders
        while len(borders) < size:
            border = borders[-1]
            while border and stop[border] != stop[len(borders)]:
                border = borders[border - 1]
            borders.append(border + (stop[border] == stop[len(borders)]))
        return borders[size - 1]


def overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
