"""Waits for a part of a request's work no longer than its client does."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from time import monotonic
from typing import Any, TypeVar

from starlette.types import Receive

from ..requests.async_llm import DeadlineError

T = TypeVar("T")


class ClientGone(Exception):
    """The client has disconnected, or cancelled its request."""


class TimeLimit:
    """The time of a request from its arrival on."""

    def __init__(self, seconds: float | None, arrived: float | None = None) -> None:
        """seconds: None for any time. arrived: by time.monotonic(); None for now."""
        self.seconds = seconds
        self.arrived = monotonic() if arrived is None else arrived

    @property
    def left(self) -> float | None:
        """Seconds; None for any time."""
        return None if self.seconds is None else max(0.0, self.arrived + self.seconds - monotonic())


async def disconnected(receive: Receive) -> None:
    """Ends when the client is gone, whose body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(work: Coroutine[Any, Any, T], gone: Coroutine[Any, Any, None], limit: TimeLimit | None) -> T:
    """The result of `work`. It is cancelled when `gone` ends, with ClientGone, and when no time is left, with
    DeadlineError."""
    left = None if limit is None else limit.left
    task, watcher = asyncio.create_task(work), asyncio.create_task(gone)
    try:
        await asyncio.wait((task, watcher), timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and watcher.done():
            raise ClientGone("the client cancelled this request")
        if not task.done() and limit is not None:
            raise DeadlineError(f"no token was computed within the deadline of {limit.seconds:g} s")
        return task.result()
    finally:
        for pending in (task, watcher):
            pending.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
