"""Text while it is generated: whole characters only, and nothing that may turn out to belong to a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import islice, product, takewhile
from typing import NamedTuple

from .tokenizer import Tokenizer

INCOMPLETE = "\ufffd"  # what bytes decode to that are not UTF-8, perhaps not yet
UNFINISHED = 3  # bytes of a character that lacks its end, at most, and so tokens
CONTEXT_TOKENS = 6  # of the prompt, enough to decide whether the first token begins with a space
PENDING_TOKENS = 16  # more than any character has: what is older than its half is not decoded again


class IncrementalDetokenizer:
    """One request's token ids to text, token by token, each in constant time.

    The text of an output is what decoding prompt and output together adds to the decoded prompt. A character that the
    prompt begins and the output completes belongs to the output; bytes of the prompt that stay incomplete do not.

    A token's text depends on its neighbours (leading spaces, characters split into bytes), so a short window is decoded
    again: tokens whose text is complete, the context, and behind them the pending ones. Tokens that stand for one byte
    (`Tokenizer.byte_values`) are decoded as bytes: beside a bad one the library makes good characters U+FFFD, too.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        window = last_tokens(tokenizer, prompt)
        if tokenizer.byte_values:
            self._set_context(window)
            for token in window[-UNFINISHED:]:
                self._bytes.decode(tokenizer.byte_values.get(token, b" "))
            self._prompt_end = INCOMPLETE if self._bytes.getstate()[0] else ""
        else:
            context, pending = split_unfinished(tokenizer, window)
            self._set_context(context, pending)
            self._prompt_end = self._decode()  # what the text behind the context begins with if it is the prompt's

    def push(self, token_ids: Sequence[int]) -> list[str]:
        """One text per token; empty while a character is incomplete."""
        return [self._push(token) for token in token_ids]

    def finish(self) -> str:
        """What is left when no token follows: bytes that never became a character."""
        return self._end_bytes() + self._take(self._decode())

    def _push(self, token: int) -> str:
        if token in self._tokenizer.special_token_ids:  # no text, and none of its neighbours' depends on it
            return ""
        byte = self._tokenizer.byte_values.get(token)
        return self._end_bytes() + self._push_piece(token) if byte is None else self._push_byte(token, byte)

    def _push_byte(self, token: int, byte: bytes) -> str:
        before = self._take(self._decode())
        text = self._bytes.decode(byte)
        self._set_context([token])
        return before + (self._behind_the_prompt(text) if text else "")

    def _end_bytes(self) -> str:
        """The text of bytes that no further one follows."""
        text = self._bytes.decode(b"", final=True)
        return self._behind_the_prompt(text) if text else ""

    def _push_piece(self, token: int) -> str:
        self._pending.append(token)
        text = self._decode()
        delta = self._take(text.removesuffix(INCOMPLETE))
        if text and not text.endswith(INCOMPLETE):
            # The next token's text needs no more before it than the tokens that made up this character.
            self._set_context(self._pending)
            self._prompt_end = ""
        elif len(self._pending) > PENDING_TOKENS:
            self._forget(text)
        return delta

    def _set_context(self, context: list[int], pending: Sequence[int] = (), written: int = 0) -> None:
        """written: characters of the text of the pending tokens that were handed out."""
        self._context, self._before = context, self._tokenizer.decode(context)
        self._pending, self._written = list(pending), written

    def _decode(self) -> str:
        """The text of the pending tokens behind the context."""
        if not self._pending:
            return ""
        return self._tokenizer.decode([*self._context, *self._pending])[len(self._before) :]

    def _take(self, text: str) -> str:
        """What of the text of the pending tokens, now certain, is neither the prompt's nor handed out."""
        start = max(self._written, shared(self._prompt_end, text))
        self._written = max(self._written, len(text))
        return text[start:]

    def _behind_the_prompt(self, text: str) -> str:
        """The first text behind the prompt without what is the prompt's."""
        own, self._prompt_end = shared(self._prompt_end, text), ""
        return text[own:]

    def _forget(self, text: str) -> None:
        """Keep the last of many pending tokens, if what of their text is not handed out can be told from them."""
        kept = self._pending[-PENDING_TOKENS // 2 :]
        end = self._tokenizer.decode(kept)
        if not text and self._before:
            self._set_context(self._context)
        elif text and end.endswith(text[-UNFINISHED:]):
            self._set_context([], kept, written=len(end) - (len(text) - self._written))
            self._prompt_end = ""


def shared(first: str, second: str) -> int:
    """How many characters two texts begin with that are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def last_tokens(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """So many of a prompt's last tokens with text that the output's does not depend on earlier ones."""
    textual = (token for token in reversed(prompt) if token not in tokenizer.special_token_ids)
    return list(islice(textual, CONTEXT_TOKENS + 2 * UNFINISHED))[::-1]


def split_unfinished(tokenizer: Tokenizer, tokens: list[int]) -> tuple[list[int], list[int]]:
    """Tokens that neither begin nor end inside a character, and those behind them, which end inside one."""
    for pending, start in product(range(UNFINISHED + 1), repeat=2):
        end = len(tokens) - pending
        text = tokenizer.decode(tokens[start:end])
        if not text.startswith(INCOMPLETE) and not text.endswith(INCOMPLETE) and (text or not start):
            return tokens[start:end], tokens[end:]
    return tokens[:-UNFINISHED], tokens[-UNFINISHED:]  # there are more: in front of the first of fewer is no text


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
