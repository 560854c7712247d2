"""TextThreads: encodes text beside an event loop, so that no text, however long, keeps the other ones waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Lock
from typing import TypeVar

from ..engines.shared.memory import LONG_TEXT
from .stream import ShutdownError, to_exception

# A text longer than LONG_TEXT waits for other long ones: four million characters take ten seconds, and a gigabyte.
SHORT_THREADS, LONG_THREADS = 4, 1
CONVERSATION_THREADS = 32  # they wait for a template's process, and compute nothing themselves

T = TypeVar("T")


class TextThreads:
    """Threads for texts, for long texts, and for conversations that a template has to write."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(SHORT_THREADS, "draftwood-text")
        self._long = ThreadPoolExecutor(LONG_THREADS, "draftwood-long-text")
        self._conversations = ThreadPoolExecutor(CONVERSATION_THREADS, "draftwood-conversation")
        self._lock = Lock()
        self._closed = False
        self._stops: set[Callable[[], None]] = set()

    async def compute(self, work: Callable[[], T], size: int) -> T:
        """The result of `work` on a text of so many characters. Raises what it raises; ShutdownError when closed."""
        return await self._run(self._long if size > LONG_TEXT else self._short, lambda _: work())

    async def write(self, work: Callable[[Event], T]) -> T:
        """The same for work that waits for a process. Its argument is set when nobody wants the result any more."""
        return await self._run(self._conversations, work)

    def close(self) -> None:
        """Everybody who waits gets a ShutdownError at once; what runs is finished by nobody's request."""
        with self._lock:
            self._closed = True
            stops = list(self._stops)
        for stop in stops:
            stop()
        for threads in (self._short, self._long, self._conversations):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, threads: ThreadPoolExecutor, work: Callable[[Event], T]) -> T:
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        given_up = Event()

        def settle(value: T | None, error: Exception | None) -> None:
            if result.done():  # cancelled, or closed
                return
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(value)  # type: ignore[arg-type]  # work's own, which may be None

        def report(value: T | None, error: Exception | None) -> None:
            try:
                loop.call_soon_threadsafe(settle, value, error)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return

        def run() -> None:
            if given_up.is_set():
                return
            try:
                value = work(given_up)
            except BaseException as error:  # whatever it is: who waits must not wait for ever
                report(None, to_exception(error))
            else:
                report(value, None)

        def stop() -> None:
            given_up.set()
            report(None, ShutdownError("the server stopped before it had read this text"))

        with self._lock:
            if self._closed:
                raise ShutdownError("this server is stopping and takes no further requests: send them to another one")
            self._stops.add(stop)
        try:
            future = threads.submit(run)
            try:
                return await result
            finally:
                given_up.set()
                future.cancel()
        finally:
            with self._lock:
                self._stops.discard(stop)
