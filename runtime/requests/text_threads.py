"""TextThreads: threads that encode texts for an event loop. A long text does not delay the encoding of short texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Lock
from typing import TypeVar

from ..engines.shared.memory import LONG_TEXT
from .stream import ShutdownError, to_exception

# Texts longer than LONG_TEXT are encoded one at a time: four million characters take ten seconds and a gigabyte.
SHORT_THREADS, LONG_THREADS = 4, 1
CONVERSATION_THREADS = 32  # these threads only wait for a chat template's process
GRAMMAR_THREADS = 32  # these wait for the process that tries a grammar

T = TypeVar("T")


class TextThreads:
    """Thread pools for short texts, long texts, conversations that a chat template formats, and grammars."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(SHORT_THREADS, "draftwood-text")
        self._long = ThreadPoolExecutor(LONG_THREADS, "draftwood-long-text")
        self._conversations = ThreadPoolExecutor(CONVERSATION_THREADS, "draftwood-conversation")
        self._grammars = ThreadPoolExecutor(GRAMMAR_THREADS, "draftwood-grammar")
        self._lock = Lock()
        self._closed = False
        self._stops: set[Callable[[], None]] = set()

    async def compute(self, work: Callable[[], T], size: int) -> T:
        """Run `work` on a text of `size` characters; returns its result. Raises the errors of `work`, and ShutdownError
        when closed."""
        return await self._run(self._long if size > LONG_TEXT else self._short, lambda _: work())

    async def write(self, work: Callable[[Event], T]) -> T:
        """The same for work that waits for a process. The Event that `work` receives is set when the caller no longer
        needs the result."""
        return await self._run(self._conversations, work)

    async def compile(self, work: Callable[[Event], T]) -> T:
        """The same for grammars, which conversations need not wait for."""
        return await self._run(self._grammars, work)

    def close(self) -> None:
        """Raise ShutdownError in all waiting calls at once. The results of running work are discarded."""
        with self._lock:
            self._closed = True
            stops = list(self._stops)
        for stop in stops:
            stop()
        for threads in (self._short, self._long, self._conversations, self._grammars):
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
                result.set_result(value)  # type: ignore[arg-type]  # the result of `work`, which may be None

        def report(value: T | None, error: Exception | None) -> None:
            try:
                loop.call_soon_threadsafe(settle, value, error)
            except RuntimeError:  # the event loop is closed, so the caller no longer exists
                return

        def run() -> None:
            if given_up.is_set():
                return
            try:
                value = work(given_up)
            except BaseException as error:  # any error must reach the caller, which would else wait for ever
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
