"""Merges the streams of several choices into one, and detects clients that disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from time import monotonic
from typing import Any, NamedTuple, TypeVar

from fastapi import Request

from ...engines.shared.memory import OutOfMemoryError
from ...requests.async_llm import DeadlineError, RequestStream
from ...requests.stream import to_exception
from ...text.writer import StreamChunk
from ..http.held import HeldAnswer

CHUNK_BYTES, TOKEN_BYTES, LOGPROB_BYTES = 400, 200, 200  # of memory, in CPython 3.11
CLIENT_CLOSED = 499  # nginx' status for requests whose client has disconnected

T = TypeVar("T")


class TimeLimit:
    """The time of a request from its arrival on. seconds: None for any time. arrived: by time.monotonic()."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.arrived = monotonic()

    @property
    def left(self) -> float | None:
        """Seconds; None for any time."""
        return None if self.seconds is None else max(0.0, self.arrived + self.seconds - monotonic())


class ClientGone(Exception):
    """The client has disconnected."""


class Numbered(NamedTuple):
    """A chunk with the number of its stream."""

    choice: int
    chunk: StreamChunk


async def merged(
    streams: Sequence[RequestStream], held: HeldAnswer, keeps: bool = False
) -> AsyncGenerator[Numbered, None]:
    """Chunks of all streams in the order of their arrival. All streams are closed at the end, also after an error.

    held: counts each chunk until the next one is asked for. keeps: the reader keeps all chunks, so they count until the
    end, and OutOfMemoryError is raised where others need their memory."""
    arrived: asyncio.Queue[Numbered | Exception | None] = asyncio.Queue()

    async def forward(index: int, stream: RequestStream) -> None:
        try:
            async for chunk in stream:
                arrived.put_nowait(Numbered(index, chunk))
                count(num_bytes(chunk))
            arrived.put_nowait(None)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # any error: the reader of this choice must not wait for ever
            arrived.put_nowait(to_exception(error))

    counted = 0

    def count(more: int) -> None:
        nonlocal counted
        counted += more
        held.add(more)

    def give_up() -> None:
        message = "the answers in progress take more memory than this server has for them: ask for fewer tokens or "
        arrived.put_nowait(OutOfMemoryError(f"{message}log-probabilities, or retry later"))

    end = held.end
    if keeps:
        held.end = give_up
    tasks = [asyncio.create_task(forward(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(streams)
        while running:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
                if not keeps:
                    count(-num_bytes(item.chunk))
    finally:
        held.end = end
        count(-counted)
        for task, stream in zip(tasks, streams, strict=True):
            task.cancel()
            await stream.aclose()


def num_bytes(chunk: StreamChunk) -> int:
    """The memory that a chunk takes, roughly."""
    known = [*chunk.logprobs, *(item for item in chunk.prompt_logprobs or () if item is not None)]
    logprobs = sum(1 + len(item.top) for item in known)
    return CHUNK_BYTES + TOKEN_BYTES * len(chunk.token_ids) + LOGPROB_BYTES * logprobs


async def while_connected(request: Request, work: Coroutine[Any, Any, T], limit: TimeLimit | None = None) -> T:
    """The result of `work`. If the client disconnects, `work` is cancelled and ClientGone is raised; at the end of the
    time, DeadlineError."""
    left = None if limit is None else limit.left
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(gone(request))
    try:
        await asyncio.wait((task, watcher), timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and watcher.done():
            raise ClientGone
        if not task.done() and limit is not None:
            raise DeadlineError(f"the prompt was not read within the deadline of {limit.seconds:g} s")
        return task.result()
    finally:
        for pending in (task, watcher):
            pending.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def gone(request: Request) -> None:
    """Wait until the client has closed its connection. The body must have been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
