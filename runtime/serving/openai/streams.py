"""Merges the streams of several choices into one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

from ...engines.shared.memory import OutOfMemoryError
from ...requests.async_llm import RequestStream
from ...requests.stream import to_exception
from ...text.writer import StreamChunk
from ..http.fair import Held

CHUNK_BYTES, TOKEN_BYTES, LOGPROB_BYTES = 400, 200, 200  # of memory, in CPython 3.11


class Numbered(NamedTuple):
    """A chunk with the number of its stream."""

    choice: int
    chunk: StreamChunk


async def merged(streams: Sequence[RequestStream], held: Held, keeps: bool = False) -> AsyncGenerator[Numbered, None]:
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
