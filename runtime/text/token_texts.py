"""The text, the bytes and the place of each token, for log-probabilities."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from ..decoding.chunk import TokenLogprob
from .detokenizer import UNFINISHED
from .result import by_token, entry_of
from .tokenizer import Tokenizer, token_texts

KNOWN_TOKENS = 65536  # most cached token texts: the alternatives of a long answer are mostly the same tokens


class TokenTexts:
    """The texts of tokens in answers; shared by all requests."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.text = lru_cache(KNOWN_TOKENS)(token_texts(tokenizer))
        self.bytes = lru_cache(KNOWN_TOKENS)(self._bytes)
        self.special = tokenizer.special_token_ids

    def prompt_entry(self, item: TokenLogprob | None) -> dict[int, Any] | None:
        """vLLM's entry of a prompt's token, JSON-ready: log-probabilities of the token and its alternatives."""
        return None if item is None else entry_of(by_token(item, self.text))

    def _bytes(self, token: int) -> tuple[int, ...]:
        """The UTF-8 bytes of the token, which may be a part of a character."""
        known = self._tokenizer.bytes_of(token)
        return tuple(self.text(token).encode() if known is None else known)


class Offsets:
    """Where the tokens of a choice begin in its text, in characters. A character belongs to its last token."""

    def __init__(self, texts: TokenTexts, prompt: Sequence[int], echo: str | None, skips: bool) -> None:
        """prompt: whose last character may end in the choice; with an echo it comes first in the choice. skips: special
        tokens have no text after the echo."""
        self._texts, self._echo, self._skips = texts, echo or "", skips
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._place = 0
        for token in prompt[-UNFINISHED:] if echo is None else ():
            self._length(token)

    def next(self, tokens: Iterable[int]) -> Iterator[int]:
        """The places of the next tokens."""
        for token in tokens:
            yield self._place
            self._place += self._length(token)

    def _length(self, token: int) -> int:
        """The characters that end in a token."""
        place, echoing = self._place, self._place < len(self._echo)
        if token in self._texts.special:
            name = self._texts.text(token)
            shown = self._echo.startswith(name, place) if echoing or not self._place else not self._skips
            # A token without a text has no effect on that of its neighbours: a character may go on after it.
            return len(self._decoder.decode(b"", True)) + len(name) if shown else 0
        text = self._decoder.decode(bytes(self._texts.bytes(token)))
        # An encoder may put a blank before a text, which the text does not have.
        added = echoing and text.startswith(" ") and not self._echo.startswith(" ", place)
        return len(text) - added
