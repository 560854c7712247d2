"""RequestStream: one request of an AsyncLLM as its consumer sees it, and as the engine's thread does."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass, field
from time import sleep
from traceback import format_exception

from ...models.errors import DraftwoodError
from ..decoding.loop import Job
from ..text.writer import StreamChunk
from .metrics import DraftCounts

DELIVERIES = 100  # attempts to hand an item over while memory is short


class DeadlineError(DraftwoodError):
    """A request's time was over before its text was."""


class ShutdownError(DraftwoodError):
    """No request is taken any more, or one was cut off, because the server stops."""


class EngineTraceback(Exception):
    """Where in the engine's thread an error came from, as text."""


class RequestFailure(RuntimeError):
    """A request ended by what is no error of a program, such as a panic of an extension module."""


def to_exception(error: BaseException) -> Exception:
    """The error as one that ends a single request. What is no Exception (a panic of an extension module, SystemExit)
    would end the thread or event loop it is raised in, and the ends of iterators would be taken for such."""
    if isinstance(error, Exception) and not isinstance(error, (StopIteration, StopAsyncIteration)):
        return error
    failure = RequestFailure(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def drop_frames(error: BaseException) -> Exception:
    """The error, contained, with its traceback as text: the frames of a real one hold every cache of the engine's
    thread, for as long as anybody keeps the error."""
    error = to_exception(error)
    error.__cause__ = EngineTraceback("".join(format_exception(error)))
    error.__context__ = None
    return error.with_traceback(None)


@dataclass(eq=False, slots=True, kw_only=True)
class Request(Job[StreamChunk]):
    """One request on its way. Only the engine's thread advances it; anybody may set `aborted`."""

    id: str
    num_prompt_tokens: int
    call: Hashable  # equal for those that came in one call, such as the choices of a prompt
    loop: asyncio.AbstractEventLoop
    arrived: float  # all times in seconds, monotonic
    deadline: float | None
    delivered: asyncio.Queue[StreamChunk | Exception]
    draft_counts: DraftCounts = field(default_factory=DraftCounts)
    last_round: float | None = None
    aborted: bool = False

    def deliver(self, item: StreamChunk | Exception) -> None:
        """Hand an item to the consumer's event loop. Raises MemoryError when there is none for it for seconds."""
        for attempt in range(DELIVERIES):
            try:
                self.loop.call_soon_threadsafe(self.delivered.put_nowait, item)
                return
            except RuntimeError:  # the loop is closed: nobody reads any more
                self.aborted = True
                return
            except MemoryError:  # a consumer who never hears of the end waits for ever
                if attempt == DELIVERIES - 1:
                    raise
                sleep(0.05)


class RequestStream:
    """The chunks of one request, as an asynchronous iterator. The last one has a finish_reason and the final stats:
    "stop", "length", or "abort". Closing it, cancelling the task that waits for it, or dropping it aborts the request.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._ended = False

    @property
    def request_id(self) -> str:
        return self._request.id

    @property
    def num_prompt_tokens(self) -> int:
        return self._request.num_prompt_tokens

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> StreamChunk:
        """Raises DeadlineError, ShutdownError, or whatever went wrong in a round of this request."""
        if self._ended:
            raise StopAsyncIteration
        try:
            item = await self._request.delivered.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if isinstance(item, Exception):
            self._ended = True
            raise item
        self._ended = item.finish_reason is not None
        return item

    async def aclose(self) -> None:
        """Abort the request unless it ended; the engine is free from the next round on."""
        self._ended = True
        self._request.aborted = True

    def __del__(self) -> None:
        self._request.aborted = True
