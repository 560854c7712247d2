"""Standard input and output of commands: what follows when they are closed, full, or of a narrow encoding."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from rich.console import Console

from ..models.errors import RequestError
from ..models.printable import printable
from ..runtime.bundle.staging import advice

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def say(console: Console, text: str, style: str = "") -> None:
    """Print a text as it is: brackets are no markup, and a line has no end but its own."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


class LenientStream:
    """A text stream that drops what its file does not take."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._taken_or_dropped():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._taken_or_dropped():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        """What else a stream has: its encoding, its descriptor."""
        return getattr(self._stream, name)

    @contextmanager
    def _taken_or_dropped(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            abandon(self._stream)


@contextmanager
def lenient_errors() -> Iterator[None]:
    """Within the block a standard error that is full, closed, or left by its reader stays silent: a note must not cost
    the result, and an error keeps its exit code. Without a standard error Python would print errors on the output."""
    before = sys.stderr
    if before is None:
        before = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open until the process ends
    sys.stderr = cast(TextIO, LenientStream(before))
    try:
        yield
    finally:
        sys.stderr = before


def check_output() -> None:
    """Raises RequestError if standard output is closed: the first opened file would take its place."""
    if sys.stdout is None:
        raise RequestError("standard output is closed, and the result would be lost: send it to a file or to /dev/null")


def standard_input() -> TextIO:
    """Standard input. Raises RequestError if it is closed."""
    if sys.stdin is None:
        raise RequestError("standard input is closed: send the text through a pipe or from a file")
    return sys.stdin


def read_input() -> str:
    """All of standard input. Raises RequestError if it cannot be read."""
    try:
        text = standard_input().read()
        text.encode()  # in some locales Python reads bytes that are no UTF-8 as lone surrogates
    except (OSError, UnicodeError) as error:
        raise RequestError(f"standard input cannot be read ({error}): send UTF-8 text") from error
    return text.removeprefix("\ufeff")


def unwritten(error: OSError | UnicodeEncodeError) -> RequestError | None:
    """The refusal of an output that standard output did not take; None if the error has another cause."""
    if isinstance(error, UnicodeEncodeError):
        missing = printable(error.object[error.start : error.start + 1])
        return RequestError(f"standard output in {error.encoding} cannot hold {missing!r}: set PYTHONIOENCODING=utf-8")
    if error.errno not in UNWRITABLE or error.filename is not None:
        return None
    fix = advice(error, "send it to a file or to /dev/null")
    return RequestError(f"standard output cannot be written ({error.strerror}): {fix}")


def abandon(stream: TextIO) -> None:
    """Drop what a stream's file has not taken. Python would try to write it once more at its end, and complain."""
    with suppress(OSError, ValueError):  # ValueError: a stream that is no file, as in tests
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
