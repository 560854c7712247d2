"""TextThreads: threads that encode texts for an event loop. A long text does not delay the encoding of short texts."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event, Lock
from typing import TypeVar

from ..decoding.queue import FairQueue
from ..engines.shared.memory import LONG_TEXT
from ..structured import grammars
from ..text import chat_template
from .stream import ShutdownError, to_exception

# Texts longer than LONG_TEXT are encoded one at a time: four million characters take ten seconds and a gigabyte.
SHORT_THREADS, LONG_THREADS = 4, 1
# These threads wait for a process: one for each, and the next in turn, which makes the others hurry. More would wait in
# the order in which they came, and not in that of their clients' turns.
CONVERSATION_THREADS = chat_template.PROCESSES + 1
GRAMMAR_THREADS = grammars.PROCESSES + 1

T = TypeVar("T")


class FairThreads:
    """A pool of threads that works for clients in turn."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._turns: FairQueue[Callable[[], object]] = FairQueue(threads, sys.maxsize)
        self._begun: set[Callable[[], object]] = set()
        self._lock = Lock()

    def submit(self, work: Callable[[], object], client: Hashable) -> None:
        with self._lock:
            self._turns.submit(work, client)
            self._begin()

    def withdraw(self, work: Callable[[], object]) -> None:
        """Forget work that has not begun, and the text that it holds."""
        with self._lock:
            if work not in self._begun:
                with suppress(ValueError):  # it has ended
                    self._turns.remove(work)

    def close(self) -> None:
        """Work that has not begun never does."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        for work in self._turns.running:
            if work not in self._begun:
                self._begun.add(work)
                self._pool.submit(self._do, work)

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        finally:
            with self._lock:
                self._turns.remove(work)
                self._begun.remove(work)
                with suppress(RuntimeError):  # closed meanwhile
                    self._begin()


class TextThreads:
    """Threads for short texts, long texts, conversations that a chat template formats, and grammars; each kind works
    for clients in turn. client: None stands for all senders together."""

    def __init__(self) -> None:
        self._short = FairThreads(SHORT_THREADS, "draftwood-text")
        self._long = FairThreads(LONG_THREADS, "draftwood-long-text")
        self._conversations = FairThreads(CONVERSATION_THREADS, "draftwood-conversation")
        self._grammars = FairThreads(GRAMMAR_THREADS, "draftwood-grammar")
        self._lock = Lock()
        self._closed = False
        self._stops: set[Callable[[], None]] = set()

    async def compute(self, work: Callable[[Event], T], size: int, client: Hashable = None) -> T:
        """Run `work` on a text of `size` characters; returns its result. The Event that `work` receives is set when the
        caller no longer needs the result. Raises the errors of `work`, and ShutdownError when closed."""
        return await self._run(self._long if size > LONG_TEXT else self._short, work, client)

    async def write(self, work: Callable[[Event], T], client: Hashable = None) -> T:
        """The same for conversations that a template formats."""
        return await self._run(self._conversations, work, client)

    async def compile(self, work: Callable[[Event], T], client: Hashable = None) -> T:
        """The same for grammars, which conversations need not wait for."""
        return await self._run(self._grammars, work, client)

    def close(self) -> None:
        """Raise ShutdownError in all waiting calls at once. The results of running work are discarded."""
        with self._lock:
            self._closed = True
            stops = list(self._stops)
        for stop in stops:
            stop()
        for threads in (self._short, self._long, self._conversations, self._grammars):
            threads.close()

    async def _run(self, threads: FairThreads, work: Callable[[Event], T], client: Hashable) -> T:
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
            threads.submit(run, client)  # before anybody closes the threads
            self._stops.add(stop)
        try:
            return await result
        finally:
            given_up.set()
            threads.withdraw(run)
            with self._lock:
                self._stops.discard(stop)
