"""Runs an ASGI application until it is told to stop, and stops it without losing an accepted request."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from threading import Timer
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from ...models.errors import ConfigError
from ..async_llm import AsyncLLM
from .connection_limit import MAX_CONNECTIONS, room_for
from .connections import Door, Rarely

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
REPEAT_SECONDS = 0.5  # some senders, such as timeout(1), deliver one signal twice
FLUSH_SECONDS = 5  # for answers that are generated already, to be read by their clients
UNREAD_SECONDS = 60.0  # a client that reads nothing of its answer for so long is gone: it would keep its place for ever
CLOSE_SECONDS = 60.0  # for the pass that is computed when requests are cut off; longer ones are on a device that hangs


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
        # Connections inherit both options. Without the first, the end of an answer waits until its client has
        # acknowledged the head, and clients take 40 ms to do so.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sys.platform == "linux":
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
    max_connections: int = MAX_CONNECTIONS,
) -> bool:
    """Serve until SIGTERM or SIGINT; from then on refuse new requests, finish the accepted ones, and return.

    A later signal, or the end of drain_seconds, cuts off what still runs. started: called once requests are answered.
    max_connections: see Door; fewer, with a warning, where fewer files may be open. Closes the listener. Returns
    whether every accepted request was finished. Raises ConfigError when no connection could be had.
    """
    room = room_for(max_connections)
    if room < max_connections:
        print(
            f"draftwood: warning: room for {room} connections instead of {max_connections}: raise the limit of open "
            "files (ulimit -n)",
            file=sys.stderr,
        )
    # A proxy is believed by create_app, if at all.
    config = uvicorn.Config(
        app, log_level=log_level, lifespan="off", ws="none", http="h11", server_header=False, proxy_headers=False
    )
    logging.getLogger("uvicorn.error").addFilter(Rarely())
    server = Server(config)
    door = Door(server, listener, room)
    stop, hurry = asyncio.Event(), asyncio.Event()
    with signals_to(asyncio.get_running_loop(), stop, hurry):
        serving = asyncio.create_task(server.serve(sockets=[]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        accepting = asyncio.create_task(door.accept())
        if server.started:
            started()
        watching = asyncio.create_task(door.hang_up_on_silent())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((stopping, serving, accepting), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        watching.cancel()
        finished = await drained(async_llm, drain_seconds, hurry)
        with ended_after(CLOSE_SECONDS):
            await asyncio.to_thread(async_llm.close)
        accepting.cancel()
        server.should_exit = True
        await asyncio.wait((serving,), timeout=FLUSH_SECONDS)
        door.hang_up()  # on whoever reads no more, or never sent all of its request
        await serving
        with suppress(asyncio.CancelledError):
            await accepting
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
