"""RequestStream: the consumer's side of a request of an AsyncLLM."""

from __future__ import annotations

import asyncio
from functools import partial
from time import sleep
from traceback import format_exception

from ...models.errors import DraftwoodError
from ..decoding.request import Request
from ..text.writer import StreamChunk

DELIVERIES = 100  # attempts to deliver an item while memory is short


class DeadlineError(DraftwoodError):
    """A request's deadline passed before its text was finished."""


class ShutdownError(DraftwoodError):
    """The server stops: a new request is refused, or a running request is ended."""


class EngineTraceback(Exception):
    """The traceback of an error in the engine's thread, as text."""


class RequestFailure(RuntimeError):
    """A request ended because of a BaseException that is no Exception, such as a panic of an extension module."""


def to_exception(error: BaseException) -> Exception:
    """Convert an error into an Exception that ends a single request. A BaseException that is no Exception (a panic of
    an extension module, SystemExit) would end the thread or event loop that receives it. StopIteration and
    StopAsyncIteration would end an iteration without an error."""
    if isinstance(error, Exception) and not isinstance(error, (StopIteration, StopAsyncIteration)):
        return error
    failure = RequestFailure(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def drop_frames(error: BaseException) -> Exception:
    """Convert an error by `to_exception` and replace its traceback by text. The frames of the real traceback would keep
    all caches of the engine's thread in memory for as long as the error exists."""
    error = to_exception(error)
    error.__cause__ = EngineTraceback("".join(format_exception(error)))
    error.__context__ = None
    return error.with_traceback(None)


class RequestStream:
    """An asynchronous iterator over the chunks of one request, for the event loop in which it is made. The last chunk
    has the final stats and the finish_reason "stop", "length" or "abort". The request is aborted when the stream is
    closed or deleted, or when the task that waits for its next chunk is cancelled."""

    def __init__(self, request: Request[StreamChunk]) -> None:
        self._request = request
        self._delivered: asyncio.Queue[StreamChunk | Exception] = asyncio.Queue()
        self._ended = False
        request.deliver = partial(deliver, request, asyncio.get_running_loop(), self._delivered)

    @property
    def request_id(self) -> str:
        return self._request.id

    @property
    def num_prompt_tokens(self) -> int:
        return self._request.num_prompt_tokens

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> StreamChunk:
        """The next chunk. Raises DeadlineError, ShutdownError, or the error of a round of this request."""
        if self._ended:
            raise StopAsyncIteration
        try:
            item = await self._delivered.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if isinstance(item, Exception):
            self._ended = True
            raise item
        self._ended = item.finish_reason is not None
        return item

    async def aclose(self) -> None:
        """Abort the request unless it has ended. Its next round does not run."""
        self._ended = True
        self._request.aborted = True

    def __del__(self) -> None:
        self._request.aborted = True


def deliver(
    request: Request[StreamChunk],
    loop: asyncio.AbstractEventLoop,
    delivered: asyncio.Queue[StreamChunk | Exception],
    item: StreamChunk | Exception,
) -> None:
    """Put an item into a consumer's queue, in its event loop. Raises MemoryError if memory is short for seconds."""
    for attempt in range(DELIVERIES):
        try:
            loop.call_soon_threadsafe(delivered.put_nowait, item)
            return
        except RuntimeError:  # the event loop is closed, so the consumer no longer exists
            request.aborted = True
            return
        except MemoryError:  # retry: without the last item the consumer would wait for ever
            if attempt == DELIVERIES - 1:
                raise
            sleep(0.05)
