"""Requests of many tasks over one LLM whose engines are functions, for tests of their effects on each other."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import pytest
from fakes import FakeCache, FakeEngine, mixture, random_model

from draftwood.runtime import LLM, AsyncLLM, StreamChunk
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.requests.async_llm import RequestStream

T = TypeVar("T")
PATIENCE_S = 300.0  # how long a test waits for what must happen; nothing is measured by it
TURNS = 8  # of the event loop, in which a task that was woken has done what it can


class WatchedEngine(FakeEngine):
    """Knows its caches that still exist."""

    caches: weakref.WeakSet[FakeCache]

    def new_cache(self, salt: str | None = None) -> FakeCache:
        cache = super().new_cache()
        self.caches.add(cache)
        return cache


def fake_engine(self: EngineBundle, role: str, *rest: object) -> WatchedEngine:
    """The replacement of EngineBundle.open_engine."""
    spec = self.manifest.engines[role]
    target = random_model(0, spec.model.vocab_size, sharpness=2.0)
    draft = mixture(target, random_model(1, spec.model.vocab_size), 0.6)
    engine = WatchedEngine(target if role == "target" else draft, spec.model.vocab_size, role)
    engine.caches = weakref.WeakSet()
    return engine


def run(work: Callable[[AsyncLLM], Awaitable[T]], llm: LLM, **limits: int) -> T:
    """`work` in an event loop of its own, over an AsyncLLM that is closed afterwards."""

    async def inside() -> T:
        with AsyncLLM(llm, **limits) as async_llm:
            return await asyncio.wait_for(work(async_llm), PATIENCE_S)

    return asyncio.run(inside())


def over_llm(**limits: int) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Makes a test of a coroutine: its first argument is an AsyncLLM over the fixture `llm`, with these limits."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        def run_test(llm: LLM, *values: Any, **fixtures: Any) -> None:
            run(lambda served: test(served, *values, **fixtures), llm, **limits)

        llm, *others = inspect.signature(test).parameters.values()
        run_test.__name__, run_test.__doc__ = test.__name__, test.__doc__
        run_test.__signature__ = inspect.Signature([llm.replace(name="llm"), *others])  # type: ignore[attr-defined]
        return run_test

    return decorate


async def collect(stream: RequestStream) -> list[StreamChunk]:
    return [chunk async for chunk in stream]


def tokens_of(chunks: list[StreamChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


async def until(condition: Callable[[], object]) -> None:
    """Wait for what another thread does soon."""

    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.002)

    await asyncio.wait_for(wait(), PATIENCE_S)


class Gate:
    """Takes the place of a function: holds its calls, but for the first ones, until it is opened. reached: set when a
    call is held."""

    def __init__(self, function: Callable[..., Any], free: int) -> None:
        self._function, self._free, self._calls = function, free, itertools.count()
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, *arguments: Any) -> Any:
        if next(self._calls) >= self._free:
            self.reached.set()
            assert self.opened.wait(PATIENCE_S), "nobody opened the gate"
        return self._function(*arguments)


@contextmanager
def held(engine: Any, passes: int = 0) -> Iterator[Gate]:
    """While the block runs, an engine computes so many passes, and the next one lasts. A text whose end is after these
    passes cannot end meanwhile, however slow this thread is."""
    gate = Gate(engine.score, passes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "score", gate)
        try:
            yield gate
        finally:
            gate.opened.set()


class Timetable:
    """Takes the place of an engine's `score`: before each pass, every task of the event loop does what it can. So what
    tasks do between two passes does not depend on how fast either thread is. passes: that have begun."""

    def __init__(self, served: AsyncLLM, score: Callable[..., Any]) -> None:
        self.passes = 0
        self._served, self._score, self._loop = served, score, asyncio.get_running_loop()
        self._coming: list[tuple[int, asyncio.Event]] = []

    def __call__(self, *arguments: Any) -> Any:
        turned = threading.Event()
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._turn, TURNS, turned)
            while not turned.wait(0.05) and self._served.alive:  # `close` waits for this thread in the event loop
                pass
        return self._score(*arguments)

    async def reach(self, passes: int) -> None:
        """Wait until so many passes have begun. Where no request is left that could begin one, time leaps."""
        come = asyncio.Event()
        self._coming.append((passes, come))
        await asyncio.sleep(0)  # all have said when they come
        while not come.is_set():
            if not self._served.num_running and not self._served.num_waiting:
                self.passes = max(self.passes, min(number for number, _ in self._coming))
                self._admit()
            with suppress(TimeoutError):
                await asyncio.wait_for(come.wait(), 0.002)

    def _turn(self, more: int, turned: threading.Event) -> None:
        if more == TURNS:
            self.passes += 1
            self._admit()
        if more:
            self._loop.call_soon(self._turn, more - 1, turned)
        else:
            turned.set()

    def _admit(self) -> None:
        for number, come in self._coming:
            if number <= self.passes:
                come.set()
        self._coming = [(number, come) for number, come in self._coming if not come.is_set()]


@contextmanager
def in_step(served: AsyncLLM) -> Iterator[Timetable]:
    """While the block runs, the target's passes and the tasks of this event loop take turns."""
    engine: Any = served.llm.target
    with pytest.MonkeyPatch.context() as patch:
        timetable = Timetable(served, engine.score)
        patch.setattr(engine, "score", timetable)
        yield timetable
