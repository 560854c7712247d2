"""JsonGuard: what JSON schemas and strict readers demand of a text beyond a grammar. No object repeats a name, a name
has one spelling, and the digits of a number are bounded.

A grammar without memory cannot say that the names of an object differ. llguidance also takes a name for another one if
a letter of it is written as \\uXXXX, and lets a model write digits until max_tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

OUTSIDE, FREE, VALUE, STRING, ESCAPED, NAME, NAME_ESCAPE, NUMBER = range(8)
ANY_VALUE = b'{["-0123456789'  # the first bytes of values that matter here
BLANKS, DIGITS, IN_EXPONENTS = b" \t\r\n", b"0123456789.", b"+-eE"  # a point counts as a digit
STARTING_DIGITS = re.compile(rb"\d*(?:\.\d*)?")
EXPONENT_DIGITS = 2  # a number with more may be too large for a double, which readers take for infinity
# How a name may write control characters. All other characters of names stand for themselves.
SPELLINGS = {json.dumps(chr(code))[2:-1] for code in range(32)} | {"u007f", '"', "\\"}
BEGUN = {spelling[:length] for spelling in SPELLINGS for length in range(1, 6)}


class Level(NamedTuple):
    """An object or array around a place of a text."""

    names: frozenset[bytes] | None  # of the object so far, as they are written; None for an array
    named: bool  # whether a name comes next
    around: Level | None  # the level outside


class State(NamedTuple):
    """A place of a text."""

    kind: int
    level: Level | None = None
    text: bytes = b""  # of the name so far, or outside of JSON the end of the text
    digits: int = 0  # of the number, or of its exponent, so far
    exponent: bool = False


class Tokens:
    """The bytes of a model's tokens, shared by all texts."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = texts
        starts = map(STARTING_DIGITS.match, texts)
        self.leading = np.array([start.end() if start else 0 for start in starts], np.int32)  # [V]: digits
        self.most_leading = int(self.leading.max(initial=0))
        self.nonzero = np.array([text[:1] > b"0" for text in texts])  # [V]: of tokens that begin with digits
        quoting = [index for index, text in enumerate(texts) if b'"' in text or b"\\" in text]
        self.quoting = np.array(quoting, np.int64)

        def chosen(holds: Callable[[bytes], object]) -> NDArray[np.int64]:
            return np.array([index for index in quoting if holds(texts[index])], np.int64)

        # Those that may break a rule: where a name comes, elsewhere between values, in strings, and in names beside
        # those that end one.
        between = re.compile(rb'[,{].*"[^"]*["\\]', re.DOTALL).search
        self.between = chosen(between)
        self.where_named = chosen(lambda text: b"\\" in text or text.count(b'"') > 3 or between(text))
        self.in_strings = chosen(re.compile(rb'".*[,{].*"[^"]*["\\]', re.DOTALL).search)
        self.in_names = chosen(lambda text: b'\\"' in text or text.count(b'"') > 2 or misspells(text.split(b'"')[0]))
        self.ending: dict[bytes, list[int]] = {}  # the tokens that end a name, by what they add to it
        self.whole: dict[bytes, list[int]] = {}  # those that hold one
        for index in quoting:
            added, *more = texts[index].split(b'"')
            self.ending.setdefault(added, []).append(index)
            if len(more) > 1:
                self.whole.setdefault(more[0], []).append(index)


@dataclass(frozen=True)
class JsonGuard:
    """The rules of one form of text."""

    tokens: Tokens
    begins: bytes = ANY_VALUE  # a text that begins with one of these bytes is JSON
    opens: bytes = b""  # JSON also comes after each of these marks
    # The most of a number before its exponent. So few are different doubles, if they are different numbers: rounding
    # moves none to a bound of its schema.
    digits: int = 16

    def start(self) -> State:
        return State(FREE if self.begins else OUTSIDE)

    def push(self, state: State, token: int) -> State | None:
        """The state after a token; None if an object then repeats a name or misspells one. Digits are not checked."""
        text = self.tokens.texts[token]
        if state.kind in (STRING, NAME) and b'"' not in text and b"\\" not in text:
            return state if state.kind == STRING else state._replace(text=state.text + text)
        return self.follow(state, text)

    def follow(self, state: State, text: bytes) -> State | None:
        """The state after a text; None as above."""
        for byte in text:
            after = self._step(state, byte)
            if after is None:
                return None
            state = after
        return state

    def forbid(self, state: State, mask: NDArray[np.bool_]) -> None:
        """Remove the tokens [V] that the rules forbid after a state."""
        if state.kind == NUMBER:
            self._bound_digits(state, mask)
        if state.kind != OUTSIDE:
            tokens = self._doubtful(state, mask)
            mask[[token for token in tokens[mask[tokens]].tolist() if self.push(state, token) is None]] = False

    def _doubtful(self, state: State, mask: NDArray[np.bool_]) -> NDArray[np.int64]:
        """The tokens that may break a rule of names after a state."""
        if state.kind == NAME_ESCAPE:
            return np.flatnonzero(mask[: len(self.tokens.texts)])
        if state.kind in (STRING, ESCAPED):
            return self.tokens.in_strings
        if state.kind != NAME or state.level is None or state.level.names is None:
            if state.level is None or not state.level.named:
                return self.tokens.between
            always = self.tokens.where_named
            found = [self.tokens.whole.get(name, ()) for name in state.level.names or ()]
        elif any(b"\x7f" in name for name in state.level.names):
            return self.tokens.quoting  # the only character with two spellings
        else:
            rests = (name[len(state.text) :] for name in state.level.names if name.startswith(state.text))
            always, found = self.tokens.in_names, [self.tokens.ending.get(rest, ()) for rest in rests]
        return np.concatenate([always, np.array([token for tokens in found for token in tokens], np.int64)])

    def is_long(self, state: State, token: int) -> bool:
        """Whether a token may exceed the bound of a number's digits."""
        leading = int(self.tokens.leading[token]) if state.kind == NUMBER else 0
        return leading > 0 and leading > self._left(state)

    def _left(self, state: State) -> int:
        """The digits that a part of a number may still have."""
        return max(0, (EXPONENT_DIGITS if state.exponent else self.digits) - state.digits)

    def _bound_digits(self, state: State, mask: NDArray[np.bool_]) -> None:
        """A number that may end ends at the bound. One that must not, as 0.000… above 0, has no further zeros there."""
        if self._left(state) >= self.tokens.most_leading:
            return
        size = len(self.tokens.leading)
        longer = mask[:size] & (self.tokens.leading > self._left(state))
        rest = mask[:size] & ~longer
        if rest.any() or mask[size:].any():
            mask[:size] = rest
        elif (nonzero := longer & self.tokens.nonzero).any() and state.text == b".":
            mask[:size] = nonzero

    def _step(self, state: State, byte: int) -> State | None:
        kind, level, text, digits, _ = state
        if kind == STRING:
            return State(ESCAPED, level) if byte == ord("\\") else state if byte != ord('"') else self._after(level)
        if kind == ESCAPED:
            return State(STRING, level)
        if kind == NAME:
            if byte == ord('"'):
                return self._named(level, text)
            return State(NAME_ESCAPE if byte == ord("\\") else NAME, level, text + bytes((byte,)))
        if kind == NAME_ESCAPE:
            return escaped(level, text + bytes((byte,)))
        if kind == NUMBER:
            if byte in DIGITS:
                return State(NUMBER, level, b"." if byte == ord(".") else text, digits + 1, state.exponent)
            if byte in IN_EXPONENTS:
                return State(NUMBER, level, exponent=True)
            return self._step(self._after(level), byte)
        if kind == OUTSIDE:
            return self._outside(text, byte)
        return self._value(kind, level, byte)

    def _outside(self, text: bytes, byte: int) -> State:
        """Text that is no JSON, up to the next mark."""
        if not self.opens:
            return State(OUTSIDE)
        text = (text + bytes((byte,)))[-len(self.opens) :]
        return State(VALUE) if text == self.opens else State(OUTSIDE, text=text)

    def _value(self, kind: int, level: Level | None, byte: int) -> State | None:
        """Between values and names."""
        if kind == FREE and byte not in self.begins:
            return State(kind) if byte in BLANKS else self._outside(b"", byte)
        if byte == ord("{"):
            return State(VALUE, Level(frozenset(), True, level))
        if byte == ord("["):
            return State(VALUE, Level(None, False, level))
        if byte in b"]}":
            return self._after(None if level is None else level.around)
        if byte == ord('"'):
            return State(NAME if level is not None and level.named else STRING, level)
        if byte == ord(",") and level is not None:
            return State(VALUE, level._replace(named=level.names is not None))
        if byte in DIGITS or byte == ord("-"):
            return State(NUMBER, level, digits=int(byte != ord("-")))
        return State(VALUE, level)

    def _named(self, level: Level | None, text: bytes) -> State | None:
        """After a name."""
        assert level is not None and level.names is not None
        if b"\\u007f" in text:
            name = json.loads(
                f'"{text.decode(errors="surrogateescape")}"', strict=False
            )  # it may hold half a character
            text = json.dumps(name, ensure_ascii=False)[1:-1].encode(errors="surrogateescape")
        if text in level.names:
            return None
        return State(VALUE, Level(level.names | {text}, False, level.around))

    def _after(self, level: Level | None) -> State:
        """After a value."""
        return State(OUTSIDE) if level is None else State(VALUE, level)


def misspells(text: bytes) -> bool:
    """Whether a part of a name, from a whole character on, has an escape that no name may have."""
    state: State | None = State(NAME, None)
    for byte in text:
        if state is None:
            return True
        kind = NAME_ESCAPE if byte == ord("\\") else NAME
        added = state.text + bytes((byte,))
        state = State(kind, None, added) if state.kind == NAME else escaped(None, added)
    return state is None


def escaped(level: Level | None, text: bytes) -> State | None:
    """A name in which a character is being written as an escape."""
    spelling = text[text.rfind(b"\\", 0, -1) + 1 :].decode("latin-1") if not text.endswith(b"\\\\") else "\\"
    if spelling in SPELLINGS:
        return State(NAME, level, text)
    return State(NAME_ESCAPE, level, text) if spelling in BEGUN else None
