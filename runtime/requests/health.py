"""EngineHealth: whether anybody can still expect a text from an engine that runs."""

from __future__ import annotations

from collections.abc import Generator, Hashable
from contextlib import contextmanager
from time import monotonic

from ...models.errors import ConfigError, RequestError

# Requests that fail in a row until nobody can expect a text. OpenAI's clients send what failed twice more, and people
# try again: one prompt that an engine cannot take must not look like an engine that takes none.
MAX_FAILURES = 8
# For one pass, until it is taken for stuck, as passes are on a device that hangs. The slowest in order is the first
# one, where some backends still compile.
MAX_PASS_SECONDS = 300.0


class EngineHealth:
    """What the engine's thread tells about itself. Others may ask at any time."""

    def __init__(self) -> None:
        self._failed: set[Hashable] = set()  # calls since a round last went well, as many as count
        self._began: float | None = None  # when it began what it is doing, monotonic; None while it waits

    @contextmanager
    def watch_pass(self) -> Generator[None, None, None]:
        """Around one pass and what follows from it."""
        self._began = monotonic()
        try:
            yield
        finally:
            self._began = None

    def record_round(self) -> None:
        """A round of anybody's went well."""
        if self._failed:
            self._failed = set()

    def record_failure(self, error: Exception, call: Hashable) -> None:
        """A request ended with an error, its own fault or not. call: which it belongs to; what many choices of one
        call have in common counts once."""
        if not isinstance(error, (RequestError, ConfigError)) and len(self._failed) < MAX_FAILURES:
            self._failed = self._failed | {call}

    @property
    def trouble(self) -> str | None:
        """Why nobody can expect a text; None while they can, and as soon as a round goes well again."""
        began = self._began
        if began is not None and monotonic() - began > MAX_PASS_SECONDS:
            return f"stuck: a pass has taken more than {MAX_PASS_SECONDS:g} s"
        if len(self._failed) >= MAX_FAILURES:
            return f"failing: {MAX_FAILURES} requests or more failed in a row; the log says why"
        return None
