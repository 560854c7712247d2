"""Acceptor: accepts connections up to a limit, and closes inactive ones when new ones need their place."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections import Counter
from collections.abc import Sequence
from heapq import nsmallest
from time import monotonic
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from .clients import network_of
from .connection_limit import RESERVE
from .errors import Refusal
from .guard import HANG_UP, IN_PROGRESS, refuse

HEAD_SECONDS = 30.0  # a connection without a complete request head is closed after 1 to 2 times this
KEPT_SECONDS = 75  # the same after an answer: longer than proxies keep theirs, which would else meet closed ones
CLOSED_AT_ONCE = 32  # one in this many connections is closed at once
READ_BYTES = 8 << 10  # read at a time; a body in chunks of one byte delays others by 45 ms, without this limit by 1.5 s
READ_AHEAD = 16 << 10  # bytes after a request that are read before it is answered
RETRY_ACCEPT_SECONDS = 0.1
REPEAT_SECONDS = 60.0  # interval in which the log does not repeat a message
TWO_LENGTHS = Refusal(
    400, "the request has both Content-Length and Transfer-Encoding: send one of them, not both", closing=True
)
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
log = logging.getLogger("uvicorn.error")


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """A client's connection. home: the client's network, see `network_of`. since: the event loop's time at which it was
    opened, or its last answer was complete. answered: whether there was an answer."""

    def __init__(self, server: uvicorn.Server) -> None:
        super().__init__(server.config, server.server_state, {HANG_UP: self.hang_up})
        self.home = ""
        self._buffer = bytearray(READ_BYTES)
        self.since = self.loop.time()
        self.answered = False
        self.app = with_one_length(self.app)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client:
            self.home = network_of(self.client[0])

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(memoryview(self._buffer)[:nbytes]))
        # h11 pauses reading where a request has bytes after it. The end of the connection, with which a request that
        # nobody waits for ends, would be among what is not read.
        if self.asked and self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) <= READ_AHEAD:
            self.flow.resume_reading()

    @property
    def asked(self) -> bool:
        """Whether a request has begun and its answer is incomplete."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def busy(self) -> bool:
        """Whether its request is in progress, see RequestGuard; then it is never closed to admit another."""
        return self.asked and bool(self.scope["state"].get(IN_PROGRESS))

    @property
    def idle(self) -> bool:
        """Whether closing it would lose at most an incomplete request head."""
        return not self.asked and not self.transport.get_write_buffer_size()

    def hang_up(self) -> None:
        """Close it, because its answer was not read and others need the memory."""
        log.warning("closed a connection whose client reads slowly: its answer's memory was needed for others")
        self.transport.abort()

    def on_response_complete(self) -> None:
        self.since, self.answered = self.loop.time(), True
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to bytes that are no HTTP, also in the middle of a body or after an early answer."""
        if self.asked:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def shutdown(self) -> None:
        """Close it after its answer; at once if no answer has begun and no request is in progress."""
        if self.asked and (self.busy or self.cycle.response_started):
            self.cycle.keep_alive = False
        else:
            self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        if not self.asked:
            self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: a client that asks for a WebSocket gets an HTTP answer."""


class Acceptor:
    """Accepts connections for a uvicorn server, which itself listens on no address.

    When `limit` and RESERVE connections are open, a new one replaces an idle one: the one that has been idle for the
    longest time among those of the network with the most connections. If none is idle, incomplete requests and unread
    ends of answers are closed. Therefore silent connections cannot keep other clients out. Several are closed together,
    because the search takes time. The server takes at most `limit` requests, so that there is always one to close.
    """

    def __init__(self, server: uvicorn.Server, listener: socket.socket, limit: int) -> None:
        self._server = server
        self._listener = listener
        self._limit = limit

    @property
    def connections(self) -> list[Connection]:
        return [each for each in self._server.server_state.connections if isinstance(each, Connection)]

    async def accept(self) -> None:
        """Accept connections until cancelled, then close the listener."""
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        with self._listener:
            while True:
                try:
                    accepted, _ = await loop.sock_accept(self._listener)
                except OSError as error:  # asyncio's own servers log and retry without a pause
                    if error.errno in OUT_OF_RESOURCES:
                        log.warning("cannot accept connections: %s", error.strerror)
                        closed = self._close_some(self.connections)
                        await asyncio.sleep(0 if closed else RETRY_ACCEPT_SECONDS)
                    continue
                await self._enter(accepted)

    async def _enter(self, accepted: socket.socket) -> None:
        connections = self.connections
        if len(connections) >= self._limit + RESERVE and not self._close_some(connections):
            accepted.close()
            await asyncio.sleep(0)  # lets existing connections make progress
            return
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: Connection(self._server), accepted)
        except OSError:  # the client has already disconnected
            accepted.close()

    def _close_some(self, connections: Sequence[Connection]) -> bool:
        """Close the least active connections. Returns whether at least one could be closed."""
        held = Counter(each.home for each in connections)
        able = [each for each in connections if not each.busy]
        number = max(1, len(connections) // CLOSED_AT_ONCE)
        for each in nsmallest(number, able, key=lambda each: (-held[each.home], not each.idle, each.since)):
            self._abort(each)
        return bool(able)

    def _abort(self, connection: Connection) -> None:
        connection.transport.abort()
        self._server.server_state.connections.discard(connection)  # the connection itself would do this only later

    async def hang_up_on_silent(self) -> None:
        """Close connections without a request, until cancelled; uvicorn never closes them."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(HEAD_SECONDS)
            for each in self.connections:
                if each.idle and loop.time() - each.since >= (KEPT_SECONDS if each.answered else HEAD_SECONDS):
                    self._abort(each)

    def hang_up(self) -> None:
        """Close every connection now."""
        for each in self.connections:
            self._abort(each)


def with_one_length(app: ASGIApp) -> ASGIApp:
    """`app` without requests whose end a proxy before it may see elsewhere; RFC 9112, 6.1, has their connection end."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
            await refuse(TWO_LENGTHS, send)
        else:
            await app(scope, receive, send)

    return answer


class RateLimit(logging.Filter):
    """Limits how often a warning is logged: clients must not be able to fill the log."""

    def __init__(self, seconds: float = REPEAT_SECONDS) -> None:
        super().__init__()
        self._seconds = seconds
        self._said: dict[Any, float] = {}  # message -> time of the last record

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        now = monotonic()
        if now - self._said.get(record.msg, -self._seconds) < self._seconds:
            return False
        self._said[record.msg] = now
        return True
