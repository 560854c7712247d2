"""Requests of many tasks over one LLM whose engines are functions, for tests of their effects on each other."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fakes import FakeCache, FakeEngine, mixture, random_model

from draftwood.runtime import LLM, AsyncLLM, StreamChunk
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.requests.async_llm import RequestStream

T = TypeVar("T")


class WatchedEngine(FakeEngine):
    """Knows its caches that still exist."""

    caches: weakref.WeakSet[FakeCache]

    def new_cache(self) -> FakeCache:
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
            return await asyncio.wait_for(work(async_llm), 30)

    return asyncio.run(inside())


async def collect(stream: RequestStream) -> list[StreamChunk]:
    return [chunk async for chunk in stream]


def tokens_of(chunks: list[StreamChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]
