"""Stop signals end a command by an exception, so that no half-written files stay behind."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

# The third comes when a terminal is closed; Windows has none.
SIGNALS = (signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGTERM))
SAME_S = 1.0  # a signal that repeats within this time counts as one: timeout(1) sends its signal twice at once


@contextmanager
def termination_unwinds() -> Iterator[None]:
    """End the block with SystemExit at SIGTERM (143) and SIGHUP (129), and with KeyboardInterrupt at Ctrl-C.

    Libraries may change such an exception: the import of an extension module turns it into an ImportError, and a
    callback may drop it. The block nevertheless ends with the exception of the signal. A repetition within a second is
    ignored. Outside of the main thread, which alone may handle signals, this function does nothing.
    """
    received: list[tuple[int, float]] = []  # signals and their times, in s

    def unwind(number: int, frame: object) -> None:
        now = time.monotonic()
        repeated = bool(received) and now - received[-1][1] < SAME_S
        received.append((number, now))
        if not repeated:
            raise ending(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heeded = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, unwind) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        if received:
            raise ending(received[0][0])


def ending(number: int) -> BaseException:
    """The exception for a signal: KeyboardInterrupt for Ctrl-C, else SystemExit with the shell's exit code."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
