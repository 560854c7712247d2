"""LineEditor: reads lines in a terminal, with a history, and gives ctrl-C its meaning in a conversation."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Any

from ..models.errors import RequestError
from ..plugins.native.cache import cache_folder

HISTORY = "chat_history"  # file in the user's cache folder
HISTORY_LINES = 1000


class LineEditor:
    """A context of the main thread. Inside, ctrl-C is a KeyboardInterrupt only in `read`; within `stoppable` it sets
    an event, and elsewhere it does nothing.

    The history is kept in a file that only its owner can read. Where Python has no readline, lines are read without
    editing and history. A history that cannot be read or written is left out.
    """

    def __init__(self) -> None:
        folder = cache_folder()
        self._file: Path | None = None if folder is None else folder / HISTORY
        self._reading = False
        self._stop: Event | None = None

    def __enter__(self) -> LineEditor:
        with suppress(ImportError, OSError):
            import readline

            readline.parse_and_bind("set enable-bracketed-paste on")  # several lines that are pasted are one message
            if self._file is not None:
                readline.clear_history()
                readline.read_history_file(self._file)
        self._before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)
        with suppress(ImportError, OSError):
            import readline

            if self._file is not None:
                self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                os.close(os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o600))
                readline.set_history_length(HISTORY_LINES)
                readline.write_history_file(self._file)

    def read(self, prompt: str) -> str:
        """One line. Raises EOFError at ctrl-D, KeyboardInterrupt at ctrl-C, RequestError for what is no UTF-8."""
        self._reading = True
        try:
            line = input(prompt)
            line.encode()  # in some locales Python reads bytes that are no UTF-8 as lone surrogates
            return line
        except UnicodeError as error:
            raise RequestError(f"this line is no UTF-8 text ({error}): type it again") from error
        finally:
            self._reading = False

    @contextmanager
    def stoppable(self) -> Iterator[Event]:
        """An event that ctrl-C sets while the block runs."""
        self._stop = Event()
        try:
            yield self._stop
        finally:
            self._stop = None

    def _interrupt(self, number: int, frame: FrameType | None) -> Any:
        if self._stop is not None:
            self._stop.set()
        elif self._reading:
            raise KeyboardInterrupt
