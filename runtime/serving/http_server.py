"""Runs an ASGI application until it is told to stop, and stops it without losing an accepted request."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from ...models.errors import ConfigError
from ..async_llm import AsyncLLM

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
REPEAT_SECONDS = 0.5  # some senders, such as timeout(1), deliver one signal twice
FLUSH_SECONDS = 5  # for answers that are generated already, to be read by their clients
MAX_CONNECTIONS = 1024  # idle ones included; a defence against being flooded, far above what is ever served at a time


class Server(uvicorn.Server):
    """uvicorn without its own signal handling, which would close the door before readiness says so."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises ConfigError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if not 0 <= port < 1 << 16:
            raise OSError("ports go from 0 to 65535")
        return socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"cannot listen on {host} port {port} ({reason}): choose another --host or --port") from error


async def serve(
    app: ASGIApp,
    async_llm: AsyncLLM,
    listener: socket.socket,
    drain_seconds: float,
    log_level: str,
    started: Callable[[], None],
) -> bool:
    """Serve until SIGTERM or SIGINT; from then on refuse new requests, finish the accepted ones, and return.

    A later signal, or the end of drain_seconds, cuts off what still runs. started: called once requests are answered.
    Returns whether every accepted request was finished.
    """
    config = uvicorn.Config(
        app,
        log_level=log_level,
        lifespan="off",
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=FLUSH_SECONDS,
        server_header=False,
    )
    server = Server(config)
    stop, hurry = asyncio.Event(), asyncio.Event()
    with signals_to(asyncio.get_running_loop(), stop, hurry):
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if server.started:
            started()
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        finished = await drained(async_llm, drain_seconds, hurry)
        await asyncio.to_thread(async_llm.close)
        server.should_exit = True
        await serving
    return finished


async def drained(async_llm: AsyncLLM, seconds: float, hurry: asyncio.Event) -> bool:
    """Whether everything was finished in time, and before somebody was in a hurry."""
    draining = asyncio.create_task(async_llm.drain(seconds))
    hurrying = asyncio.create_task(hurry.wait())
    await asyncio.wait((draining, hurrying), return_when=asyncio.FIRST_COMPLETED)
    hurrying.cancel()
    return not async_llm.num_running and not async_llm.num_waiting


@contextmanager
def signals_to(
    loop: asyncio.AbstractEventLoop, stop: asyncio.Event, hurry: asyncio.Event
) -> Generator[None, None, None]:
    """The first stop signal sets `stop`, a later one `hurry`."""
    stopped_at: list[float] = []

    def received() -> None:
        if not stopped_at:
            stopped_at.append(loop.time())
            stop.set()
        elif loop.time() - stopped_at[0] > REPEAT_SECONDS:
            hurry.set()

    def handle(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(received)

    before = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
