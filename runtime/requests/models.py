"""Models: several models behind one server. A request opens the one that it names, for which others are closed where
memory is needed: the least recently used first.

Each open model has its own engine thread, caches and queue, so requests of two models run at the same time; they share
the processor and the memory. A model that is in use is closed after its requests, and new ones for it wait meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import chain, count
from typing import NamedTuple

from ...models.errors import DraftwoodError, NoRoomError
from ..engines.limits import available_bytes
from ..engines.shared.memory import CACHE_SHARE, OutOfMemoryError
from ..llm import LLM
from .async_llm import AsyncLLM
from .metrics import GAUGES, ServingMetrics, Values, written
from .stream import ShutdownError

log = logging.getLogger(__name__)
OPEN, OPENING, CLOSED = "open", "opening", "closed"


class NotOpened(DraftwoodError):
    """A model could not be opened; the log says why."""


class Opener(NamedTuple):
    """num_bytes: of its files."""

    open: Callable[[], AsyncLLM]
    num_bytes: int


class Shelved:
    """One model. Only the event loop's thread changes it."""

    def __init__(self, name: str, opener: Opener) -> None:
        self.name, self.opener = name, opener
        self.llm: AsyncLLM | None = None
        self.closing = False  # after its present requests
        self.users, self.used = 0, 0  # requests, and when the latest one came
        self.unused = asyncio.Event()
        self.unused.set()
        self.opening: asyncio.Task[None] | None = None
        self.places: list[asyncio.Future[None]] = []  # of requests that wait for it
        self.metrics: ServingMetrics | None = None  # which go on when it is opened again

    @property
    def state(self) -> str:
        opening = self.opening is not None and not self.opening.done()
        return OPEN if self.llm is not None and not self.closing else OPENING if opening else CLOSED


class Models:
    """See above. It has what a server needs of an AsyncLLM."""

    def __init__(self, openers: Mapping[str, Opener], max_loaded: int | None = None) -> None:
        """openers: by name. max_loaded: open models; None for as many as the memory has room for."""
        self._models = {name: Shelved(name, opener) for name, opener in openers.items()}
        self._most = max_loaded or len(openers)
        available = available_bytes()
        self._room = None if available is None else (1 - CACHE_SHARE) * available
        self._turn, self._clock = asyncio.Lock(), count(1)
        self._draining = False
        self.metrics = ServingMetrics()  # of answers, whichever model gives them

    @property
    def states(self) -> dict[str, str]:
        return {name: model.state for name, model in self._models.items()}

    @property
    def opened(self) -> dict[str, LLM | None]:
        """All models by name; None for those that are closed."""
        return {name: None if model.llm is None else model.llm.llm for name, model in self._models.items()}

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[AsyncLLM]:
        """A model, open inside. Raises KeyError for an unknown name, NotOpened, OutOfMemoryError and ShutdownError."""
        model = self._models[name]
        if model.llm is None or model.closing:
            await self._wait(model)
        else:
            self._take(model)
        assert model.llm is not None
        try:
            yield model.llm
        finally:
            self._release(model)

    def _take(self, model: Shelved) -> None:
        model.users, model.used = model.users + 1, next(self._clock)
        model.unused.clear()

    def _release(self, model: Shelved) -> None:
        model.users -= 1
        if not model.users:
            model.unused.set()

    async def _wait(self, model: Shelved) -> None:
        """Wait until a model is open, and taken for this request: else another request could close it first."""
        if self._draining:
            raise stopping()
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        model.places.append(place)
        if model.opening is None or model.opening.done():
            model.opening = asyncio.create_task(self._open(model))
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled() and place.exception() is None:
                self._release(model)
            raise

    async def _open(self, model: Shelved) -> None:
        """Open a model for those who wait for it, or tell them why it cannot be opened."""
        error: Exception | None = None
        async with self._turn:
            try:
                await self._make_room(model)
            except Exception as failure:
                log.error("the model %r cannot be opened: %s", model.name, failure)
                error = NotOpened(f"the model {model.name!r} cannot be opened; the server's log says why")
            places, model.places = model.places, []
            for place in places:
                if place.done():  # its client is gone
                    continue
                if error is None:
                    self._take(model)
                    place.set_result(None)
                else:
                    place.set_exception(error)

    async def _make_room(self, model: Shelved) -> None:
        while model.llm is None and (others := self._loaded) and not self._fits(model, others):
            await self._close_one()
        while model.llm is None:
            try:
                model.llm = await asyncio.to_thread(model.opener.open)
            except (NoRoomError, OutOfMemoryError, MemoryError):
                if not self._loaded:
                    raise
                await self._close_one()  # perhaps it has the memory
        model.metrics = model.llm.metrics = model.metrics or model.llm.metrics

    @property
    def _loaded(self) -> list[Shelved]:
        return [model for model in self._models.values() if model.llm is not None]

    def _fits(self, model: Shelved, others: list[Shelved]) -> bool:
        needed = model.opener.num_bytes + sum(other.opener.num_bytes for other in others)
        return len(others) < self._most and (self._room is None or needed <= self._room)

    async def _close_one(self) -> None:
        """Close the model that was not used for the longest time, one without requests if there is any."""
        model = min(self._loaded, key=lambda each: (each.users > 0, each.used))
        model.closing = True
        await model.unused.wait()
        llm, model.llm = model.llm, None
        if llm is not None:
            await asyncio.to_thread(llm.close)
        model.closing = False

    @property
    def num_running(self) -> int:
        return sum(model.llm.num_running for model in self._loaded if model.llm is not None)

    @property
    def num_waiting(self) -> int:
        return sum(model.llm.num_waiting for model in self._loaded if model.llm is not None)

    @property
    def accepting(self) -> bool:
        return not self._draining

    @property
    def trouble(self) -> str | None:
        """Of the first open model that has any."""
        known = ((model.name, model.llm.trouble) for model in self._loaded if model.llm is not None)
        return next((f"{name}: {trouble}" for name, trouble in known if trouble is not None), None)

    def to_prometheus(self) -> str:
        """The metrics of all models that were open once; the model "" has what is counted for all together."""
        values: dict[str | None, Values] = {"": self.metrics.values({})}
        for model in self._models.values():
            if model.llm is not None:
                values[model.name] = model.llm.values
            elif model.metrics is not None:
                values[model.name] = model.metrics.values(dict.fromkeys(GAUGES, 0.0))
        return written(values)

    async def drain(self, timeout_s: float | None = None) -> bool:
        self._draining = True
        for place in chain.from_iterable(model.places for model in self._models.values()):
            if not place.done():
                place.set_exception(stopping())
        open_ones = [model.llm for model in self._loaded if model.llm is not None]
        return all(await asyncio.gather(*(llm.drain(timeout_s) for llm in open_ones)))

    def close(self) -> None:
        for model in self._loaded:
            if model.llm is not None:
                model.llm.close()


def stopping() -> ShutdownError:
    return ShutdownError("this server is stopping and opens no further models: send requests to another one")
