"""Runs an ASGI application until it is told to stop, and stops it without losing an accepted request."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import Timer
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from ...models.errors import ConfigError
from ..async_llm import AsyncLLM

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
REPEAT_SECONDS = 0.5  # some senders, such as timeout(1), deliver one signal twice
FLUSH_SECONDS = 5  # for answers that are generated already, to be read by their clients
UNREAD_SECONDS = 60.0  # a client that reads nothing of its answer for so long is gone: it would keep its place for ever
CLOSE_SECONDS = 60.0  # for the pass that is computed when requests are cut off; longer ones are on a device that hangs
HEAD_SECONDS = 30.0  # at least, until a connection on which no whole request head arrives is closed; twice that at most
MAX_CONNECTIONS = 1024  # idle ones included; a defence against being flooded, far above what is ever served at a time


class Server(uvicorn.Server):
    """uvicorn without its own signal handling, which would close the door before readiness says so."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def listen(host: str, port: int, unread_seconds: float = UNREAD_SECONDS) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises ConfigError when the address cannot be had.

    unread_seconds: until the connection of a client that does not read its answer breaks. Linux only; elsewhere such a
    client is waited for.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if not 0 <= port < 1 << 16:
            raise OSError("ports go from 0 to 65535")
        listener = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
        if sys.platform == "linux":  # connections inherit it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(unread_seconds * 1000))
        return listener
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
    raise_file_limit()
    config = uvicorn.Config(
        app,
        log_level=log_level,
        lifespan="off",
        limit_concurrency=MAX_CONNECTIONS,
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
        watching = asyncio.create_task(hang_up_on_silent(server))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        watching.cancel()
        finished = await drained(async_llm, drain_seconds, hurry)
        with ended_after(CLOSE_SECONDS):
            await asyncio.to_thread(async_llm.close)
        server.should_exit = True
        await asyncio.wait((serving,), timeout=FLUSH_SECONDS)
        for connection in server.server_state.connections:  # whoever reads no more, or never sent all of its request
            connection.transport.abort()
        await serving
    return finished


@contextmanager
def ended_after(seconds: float) -> Generator[None, None, None]:
    """The process ends with exit code 1 if what is inside takes longer: nothing else ends a thread that hangs."""

    def end() -> None:
        print("draftwood: the engine hangs, and was left in the middle of a pass", file=sys.stderr, flush=True)
        os._exit(1)

    timer = Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


async def hang_up_on_silent(server: uvicorn.Server) -> None:
    """Close connections that begin no request: uvicorn waits for one for ever, and enough of them keep others out."""
    silent: dict[Any, Any] = {}  # connection -> what it asked for last
    while True:
        found: dict[Any, Any] = {
            connection: cycle
            for connection in server.server_state.connections
            if (cycle := getattr(connection, "cycle", None)) is None or cycle.response_complete
        }
        for connection in [each for each, cycle in found.items() if each in silent and silent[each] is cycle]:
            connection.transport.abort()
        silent = found
        await asyncio.sleep(HEAD_SECONDS)


def raise_file_limit() -> None:
    """As many open files as MAX_CONNECTIONS takes, where that is allowed: the usual 1024 are a few too small."""
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 2 * MAX_CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, 2 * MAX_CONNECTIONS)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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
