"""Commands that are told to stop unwind: nothing half-written stays behind, whatever was under way."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

SAME_S = 1.0  # timeout(1) sends its signal twice at once; whoever repeats one later means it


@contextmanager
def termination_unwinds() -> Iterator[None]:
    """Ends the block by SystemExit (143) at SIGTERM and by KeyboardInterrupt at Ctrl-C.

    Libraries do not always let such an exception through: an extension module that was being imported makes an
    ImportError of it, a callback may swallow it. What leaves the block is the one that belongs to the signal all the
    same. A repetition within a second does not disturb what the first one set off. Outside of the main thread, which
    alone may handle signals, nothing happens.
    """
    received: list[tuple[int, float]] = []  # signals and when, in s

    def unwind(number: int, frame: object) -> None:
        now = time.monotonic()
        repeated = bool(received) and now - received[-1][1] < SAME_S
        received.append((number, now))
        if not repeated:
            raise ending(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heeded = [number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, unwind) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        if received:
            raise ending(received[0][0])


def ending(number: int) -> BaseException:
    """What Python itself raises at Ctrl-C, and for another signal the shell's exit code."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
