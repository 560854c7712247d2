"""ToolCallReader: separates the calls of tools from the other text of an answer, while the answer arrives in pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import NamedTuple
from uuid import uuid4

from .detokenizer import overlap
from .tools import ToolFormat

STRING = r'"(?:[^"\\]|\\.)*"'
NAMED = re.compile(rf'\s*\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*({STRING})')
HEAD = re.compile(NAMED.pattern + r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
PARTS = re.compile(rf'{STRING}|"(?:[^"\\]|\\.)*\\?$|\S')
NAME = [("{",), ('"name"',), (":",), None, (",",), ('"arguments"', '"parameters"'), (":",), ("{",)]
BEGINNINGS = (NAME, [NAME[0], ('"type"',), (":",), ('"function"',), (",",), *NAME[1:]])
LONGEST_HEAD = 1000  # characters
BEFORE_CALL, AFTER_CALL = re.compile(r"[\s\[,;]*"), re.compile(r"[\s\]},;]*")
TEXT, BEGINNING, ARGUMENTS, AFTER, REST = range(5)


class CallPart(NamedTuple):
    number: int  # of the call in its answer, from 0 on
    id: str | None  # in the call's first part, as the name is; else None
    name: str | None
    arguments: str  # the next characters of a JSON object


class ToolCallReader:
    """Reads one answer. `num_calls` counts the calls so far.

    Text that is no call, or calls no known tool, stays text. Blanks directly before and after a call belong to
    neither. The arguments are passed on as they come, without a check.
    """

    def __init__(self, format: ToolFormat, names: Collection[str], parallel: bool, demanded: bool = False) -> None:
        """names: of the tools. parallel: whether there may be several calls; otherwise those after the first are left
        out. demanded: the answer consists of calls, so text is the markup of one that was cut, and is left out."""
        self._format, self._names, self._parallel, self._demanded = format, names, parallel, demanded
        self.num_calls = 0
        self._state = TEXT if format.opens else BEGINNING
        self._held = ""  # text of which it is not known yet what it is, from `_start` on
        self._start = 0  # an index, because a copy of the rest after every mark would take quadratic time
        self._raw = ""  # the text of the call's beginning before `_start`
        self._blanks = ""  # at the end of the text so far
        self._after_call = False  # whether there was no text since the last call
        self._found: list[str | CallPart] = []
        self._depth, self._quoted, self._escaped = 0, False, False

    def push(self, text: str) -> list[str | CallPart]:
        """Add text; returns the texts and parts of calls that are certain now, in order."""
        self._held += text
        steps = (self._read_text, self._begin_call, self._read_arguments, self._leave_call, self._read_rest)
        while steps[self._state]():
            pass
        self._held, self._start = self._held[self._start :], 0
        found, self._found = self._found, []
        return found

    def finish(self) -> list[str | CallPart]:
        """What is left at the end of the answer. An unfinished call stays a call if its name was complete."""
        name = self._name_of(NAMED.match(self._held)) if self._state == BEGINNING else None
        if name is not None:
            self._open_call(name)
        elif self._state in (TEXT, BEGINNING, REST):
            self._write(self._raw + self._held)
        if self._blanks:
            self._found.append(self._blanks)
        self._held = self._raw = self._blanks = ""
        found, self._found = self._found, []
        return found

    def _read_text(self) -> bool:
        """Each of these methods reads what it can, and returns whether the next one can go on."""
        opens = self._format.opens
        place = self._held.find(opens, self._start)
        if place >= 0:
            self._write_held(place)
            self._start += len(opens)
            self._raw, self._state = opens, BEGINNING
            return True
        kept = overlap(self._held[max(self._start, len(self._held) - len(opens)) :], opens)
        self._write_held(len(self._held) - kept)
        return False

    def _begin_call(self) -> bool:
        skipped = BEFORE_CALL.match(self._held, self._start)
        assert skipped is not None  # it matches the empty text
        self._raw += skipped[0]
        self._start = skipped.end()
        head = HEAD.match(self._held, self._start)
        name = self._name_of(head)
        if head is not None and name is not None:
            self._start = head.end()
            self._open_call(name)
            return True
        is_short = len(self._held) - self._start < LONGEST_HEAD
        if head is None and is_short and may_begin_call(self._held[self._start :]):
            return False
        if self._format.opens:
            self._write(self._raw)
        else:
            self._held, self._start = self._raw + self._held[self._start :], 0
        self._raw, self._state = "", TEXT if self._format.opens else REST
        return True

    def _name_of(self, head: re.Match[str] | None) -> str | None:
        """The known tool that the beginning of a call names."""
        name = None if head is None else text_of(head[1])
        return name if name in self._names else None

    def _open_call(self, name: str) -> None:
        self._raw = self._blanks = ""
        self._state, self._depth, self._after_call = ARGUMENTS, 0, True
        self._add(f"call_{uuid4().hex[:24]}", name, "")
        self.num_calls += 1

    def _read_arguments(self) -> bool:
        """Up to the brace that closes the object."""
        for place in range(self._start, len(self._held)):
            character = self._held[place]
            if self._quoted:
                self._quoted = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self._add(None, None, self._held[self._start : place + 1])
                    self._start, self._state = place + 1, AFTER
                    return True
            else:
                self._quoted = character == '"'
        self._add(None, None, self._held[self._start :])
        self._start = len(self._held)
        return False

    def _leave_call(self) -> bool:
        skipped = AFTER_CALL.match(self._held, self._start)
        assert skipped is not None  # it matches the empty text
        closes = self._format.closes
        after = self._held[skipped.end() : skipped.end() + len(closes) + 1]  # one more than the mark that may follow
        if not after or (closes.startswith(after) and after != closes):
            return False
        self._start = skipped.end() + (len(closes) if after.startswith(closes) else 0)
        if after.startswith("{"):
            self._state = BEGINNING
        else:
            self._state = TEXT if self._format.opens else REST
        return True

    def _read_rest(self) -> bool:
        self._write_held(len(self._held))
        return False

    def _add(self, id: str | None, name: str | None, arguments: str) -> None:
        """Add a part of the call that is being read, unless it is one too many."""
        index = self.num_calls if name is not None else self.num_calls - 1
        if (self._parallel or index == 0) and (name is not None or arguments):
            self._found.append(CallPart(index, id, name, arguments))

    def _write_held(self, end: int) -> None:
        self._write(self._held[self._start : end])
        self._start = end

    def _write(self, text: str) -> None:
        """Add text. Blanks at its end are held back, because a call may follow."""
        if self._demanded:
            return
        text = self._blanks + text
        if self._after_call:
            text = text.lstrip()
        kept = text.rstrip()
        self._blanks = text[len(kept) :]
        if kept:
            self._found.append(kept)
            self._after_call = False


def may_begin_call(text: str) -> bool:
    """Whether a text may be the beginning of a call's JSON, up to the arguments."""
    parts = PARTS.findall(text)
    return any(
        len(parts) <= len(beginning)
        and all(fits(part, beginning[place], place == len(parts) - 1) for place, part in enumerate(parts))
        for beginning in BEGINNINGS
    )


def fits(part: str, options: tuple[str, ...] | None, last: bool) -> bool:
    """Whether a part of JSON is one of the options, or any string for None. last: it may be incomplete."""
    if options is None:
        return part.startswith('"')
    return part in options or (last and any(option.startswith(part) for option in options))


def text_of(literal: str) -> str | None:
    """The text of a JSON string; None if it is none."""
    try:
        return str(json.loads(literal))
    except ValueError:
        return None
