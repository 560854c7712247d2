"""EngineHealth: whether a running engine still serves requests."""

from __future__ import annotations

from collections.abc import Generator, Hashable
from contextlib import contextmanager
from time import monotonic

from ...models.errors import ConfigError, RequestError

# Consecutive failed requests after which the engine counts as failing. OpenAI's clients send a failed request twice
# more, and users repeat it. Repetitions of a single prompt that an engine cannot decode must not reach this number.
MAX_FAILURES = 8
# Seconds after which a pass counts as stuck, as on a device that hangs. The first pass of a healthy engine is the
# slowest, because some backends still compile then.
MAX_PASS_SECONDS = 300.0


class EngineHealth:
    """The state of the engine, as recorded by its thread. Other threads may read `trouble` at any time."""

    def __init__(self) -> None:
        self._failed: set[Hashable] = set()  # failed calls since the last successful round, at most MAX_FAILURES
        self._began: float | None = None  # start of the present pass, monotonic seconds; None between passes

    @contextmanager
    def watch_pass(self) -> Generator[None, None, None]:
        """Measure the time of one pass and of the processing of its output."""
        self._began = monotonic()
        try:
            yield
        finally:
            self._began = None

    def record_round(self) -> None:
        if self._failed:
            self._failed = set()

    def record_failure(self, error: Exception, call: Hashable) -> None:
        """Record a request that ended with an error. Errors of the request itself do not count. call: the API call of
        the request; several failed choices of one call count once."""
        if not isinstance(error, (RequestError, ConfigError)) and len(self._failed) < MAX_FAILURES:
            self._failed = self._failed | {call}

    @property
    def trouble(self) -> str | None:
        """Why the engine serves no requests. None while it does, and again after the next successful round."""
        began = self._began
        if began is not None and monotonic() - began > MAX_PASS_SECONDS:
            return f"stuck: a pass has taken more than {MAX_PASS_SECONDS:g} s"
        if len(self._failed) >= MAX_FAILURES:
            return f"failing: {MAX_FAILURES} requests or more failed in a row; the log says why"
        return None
