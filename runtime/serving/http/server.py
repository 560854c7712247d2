"""Runs an ASGI application until a stop signal, and then finishes the accepted requests before it stops."""

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

from ....models.errors import ConfigError
from ...requests.async_llm import AsyncLLM
from ...requests.models import Models
from .connection_limit import MAX_CONNECTIONS
from .connections import KEPT_SECONDS, Acceptor, RateLimit

CLOSED_TERMINAL = getattr(signal, "SIGHUP", signal.SIGTERM)  # a terminal was closed; Windows has no such signal
STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, CLOSED_TERMINAL}
REPEAT_SECONDS = 0.5  # some programs, such as timeout(1), send one signal twice
FLUSH_SECONDS = 5  # time for clients to read answers that are already generated
UNREAD_SECONDS = 60.0  # a client that reads nothing of its answer for so long is disconnected
CLOSE_SECONDS = 60.0  # time for the current pass when requests are aborted; a longer pass means that a device hangs


class Server(uvicorn.Server):
    """uvicorn without its own signal handling, which would close the listener before readiness changes."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def bind(host: str, port: int, unread_seconds: float = UNREAD_SECONDS) -> socket.socket:
    """A socket for `serve`; port 0 takes a free port. Until `serve` runs, clients are refused at once, so that nobody
    waits while the model is opened. Raises ConfigError if the address is not available.

    unread_seconds: time after which the connection of a client that does not read its answer is closed. Only Linux
    supports this; on other systems the server waits for such a client.
    """
    if not host:  # to the system, this means every address of the machine
        raise ConfigError("the host to listen on is empty: write 127.0.0.1 for this machine only, or 0.0.0.0 for all")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if not 0 <= port < 1 << 16:
            raise OSError("ports go from 0 to 65535")
        host.encode("idna")  # otherwise binding would raise the same error, and leave a socket open
        listener = bound(family, host, port)
        # Connections inherit both options. Without the first, the end of an answer waits until its client has
        # acknowledged the head, and clients take 40 ms to do so.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sys.platform == "linux":
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(unread_seconds * 1000))
        return listener
    except (OSError, UnicodeError) as error:
        raise unavailable(host, port, error) from error


def bound(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    """As socket.create_server does it, without listening."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # else the address would stay taken for minutes after a server's end
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def listen(listener: socket.socket) -> None:
    """Accept connections from now on. Raises ConfigError if another process has come first."""
    host, port = listener.getsockname()[:2]
    try:
        listener.listen(MAX_CONNECTIONS)
    except OSError as error:
        raise unavailable(host, port, error) from error


def unavailable(host: str, port: int, error: Exception) -> ConfigError:
    reason = (error.strerror if isinstance(error, OSError) else None) or error
    return ConfigError(f"cannot listen on {host} port {port} ({reason}): choose another --host or --port")


async def serve(
    app: ASGIApp,
    async_llm: AsyncLLM | Models,
    listener: socket.socket,
    drain_seconds: float,
    log_level: str,
    started: Callable[[], None],
    max_connections: int = MAX_CONNECTIONS,
) -> bool:
    """Serve until SIGTERM, SIGINT or SIGHUP; then refuse new requests, finish the accepted ones, and return.

    A second signal, or the end of drain_seconds, aborts running requests. started: called when requests are answered.
    max_connections: see Acceptor. Closes the listener. Returns whether every accepted request was finished.
    """
    listen(listener)
    # Only create_app decides which proxies are trusted.
    config = uvicorn.Config(
        app,
        log_level=log_level,
        lifespan="off",
        ws="none",
        http="h11",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEPT_SECONDS,
    )
    logging.getLogger("uvicorn.error").addFilter(RateLimit())
    server = Server(config)
    acceptor = Acceptor(server, listener, max_connections)
    stop, hurry = asyncio.Event(), asyncio.Event()
    with route_signals(asyncio.get_running_loop(), stop, hurry):
        serving = asyncio.create_task(server.serve(sockets=[]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        accepting = asyncio.create_task(acceptor.accept())
        if server.started:
            started()
        watching = asyncio.create_task(acceptor.hang_up_on_silent())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((stopping, serving, accepting), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        watching.cancel()
        finished = await drain(async_llm, drain_seconds, hurry)
        with end_after(CLOSE_SECONDS):
            await asyncio.to_thread(async_llm.close)
        accepting.cancel()
        server.should_exit = True
        await asyncio.wait((serving,), timeout=FLUSH_SECONDS)
        acceptor.hang_up()  # on clients that stopped reading, or sent an incomplete request
        await serving
        with suppress(asyncio.CancelledError):
            await accepting
    return finished


@contextmanager
def end_after(seconds: float) -> Generator[None, None, None]:
    """End the process with exit code 1 if the block takes longer: nothing else ends a thread that hangs."""

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


async def drain(async_llm: AsyncLLM | Models, seconds: float, hurry: asyncio.Event) -> bool:
    """Wait for the running requests. Returns whether all ended within `seconds` and before `hurry` was set."""
    draining = asyncio.create_task(async_llm.drain(seconds))
    hurrying = asyncio.create_task(hurry.wait())
    await asyncio.wait((draining, hurrying), return_when=asyncio.FIRST_COMPLETED)
    hurrying.cancel()
    return not async_llm.num_running and not async_llm.num_waiting


@contextmanager
def route_signals(
    loop: asyncio.AbstractEventLoop, stop: asyncio.Event, hurry: asyncio.Event
) -> Generator[None, None, None]:
    """The first stop signal sets `stop`, a later one `hurry`. Under nohup a closed terminal stops nothing."""
    stopped_at: list[float] = []

    def received() -> None:
        if not stopped_at:
            stopped_at.append(loop.time())
            stop.set()
        elif loop.time() - stopped_at[0] > REPEAT_SECONDS:
            hurry.set()

    def handle(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(received)

    heeded = STOP_SIGNALS if signal.getsignal(CLOSED_TERMINAL) != signal.SIG_IGN else STOP_SIGNALS - {CLOSED_TERMINAL}
    before = {number: signal.signal(number, handle) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
