"""Door: takes connections in, as many as there is room for, and closes those that keep others out."""

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
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from .clients import network_of
from .connection_limit import RESERVE
from .openai_errors import RETRY_SECONDS, Refusal
from .openai_guard import HEALTH, IN_PROGRESS, refuse

STATE = (*HEALTH, "/metrics")  # what the reserve answers
HEAD_SECONDS = 30.0  # at least, until a connection on which no whole request head arrives is closed; twice that at most
CLOSED_AT_ONCE = 32  # one in so many
READ_BYTES = 8 << 10  # at a time; a body in chunks of one byte keeps others waiting for 45 ms with it, else for 1.5 s
RETRY_ACCEPT_SECONDS = 0.1
REPEAT_SECONDS = 60.0  # until the log says again what it has said
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
log = logging.getLogger("uvicorn.error")


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """A client's connection. home: where it is from. since: when it was opened, or its last answer was complete, in the
    event loop's time."""

    def __init__(self, server: uvicorn.Server, reserved: bool) -> None:
        """reserved: for questions about the server's state only."""
        super().__init__(server.config, server.server_state, {})
        self.reserved = reserved
        self.home = ""
        self._buffer = bytearray(READ_BYTES)
        self.since = self.loop.time()
        if reserved:
            self.app = for_state_only(self.app)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client:
            self.home = network_of(self.client[0])

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(memoryview(self._buffer)[:nbytes]))

    @property
    def asked(self) -> bool:
        """Whether a request has begun and its answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def busy(self) -> bool:
        """Whether its request has a place, see RequestGuard: then it is never closed for the sake of others."""
        return self.asked and bool(self.scope["state"].get(IN_PROGRESS))

    @property
    def idle(self) -> bool:
        """Whether nothing would be lost with it, at most half of a request's head."""
        return not self.asked and not self.transport.get_write_buffer_size()

    def on_response_complete(self) -> None:
        self.since = self.loop.time()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn says to bytes that are no HTTP, also in the middle of a body or after an early answer."""
        if self.asked:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def shutdown(self) -> None:
        """Close it once its answer is complete; at once if none has begun and the request has no place."""
        if self.asked and (self.busy or self.cycle.response_started):
            self.cycle.keep_alive = False
        else:
            self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        if not self.asked:
            self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """A client that asks for a WebSocket is answered in HTTP; that is no news."""


class Door:
    """Accepts connections for a uvicorn server, which itself listens to nothing.

    Beyond `room` connections, a new one takes the place of one that does nothing: of those from the address that has
    most, the one that did nothing for the longest time; half-sent requests and unread ends of answers come after. So no
    number of silent connections keeps anybody out. A few are closed at once, since looking for them takes time. When
    all have requests in progress, RESERVE further ones are taken for questions about the server's state, under the same
    rule among themselves.
    """

    def __init__(self, server: uvicorn.Server, listener: socket.socket, room: int) -> None:
        self._server = server
        self._listener = listener
        self._room = room

    @property
    def connections(self) -> list[Connection]:
        return [each for each in self._server.server_state.connections if isinstance(each, Connection)]

    async def accept(self) -> None:
        """Until it is cancelled; then nobody listens any more."""
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
        reserved = not self._has_room(reserve=False)
        if reserved and not self._has_room(reserve=True):
            accepted.close()
            await asyncio.sleep(0)  # for those that are inside
            return
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: Connection(self._server, reserved), accepted)
        except OSError:  # it is gone again
            accepted.close()

    def _has_room(self, reserve: bool) -> bool:
        """Whether there is room for another connection, among the others or in the reserve."""
        inside = [each for each in self.connections if each.reserved == reserve]
        return len(inside) < (RESERVE if reserve else self._room) or self._close_some(inside)

    def _close_some(self, connections: Sequence[Connection]) -> bool:
        """Close the connections that are missed least. Returns whether there was one that could be closed."""
        held = Counter(each.home for each in connections)
        able = [each for each in connections if not each.busy]
        number = max(1, len(connections) // CLOSED_AT_ONCE)
        for each in nsmallest(number, able, key=lambda each: (-held[each.home], not each.idle, each.since)):
            self._abort(each)
        return bool(able)

    def _abort(self, connection: Connection) -> None:
        connection.transport.abort()
        self._server.server_state.connections.discard(connection)  # which it would do itself, a turn later

    async def hang_up_on_silent(self) -> None:
        """Close connections that begin no request, until it is cancelled: uvicorn waits for one for ever."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(HEAD_SECONDS)
            for each in self.connections:
                if each.idle and loop.time() - each.since >= HEAD_SECONDS:
                    self._abort(each)

    def hang_up(self) -> None:
        """Close every connection now."""
        for each in self.connections:
            self._abort(each)


def for_state_only(app: ASGIApp) -> ASGIApp:
    """`app` where it is asked for the server's state, else a 503; the connection ends with the answer."""

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        async def last(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        if scope["path"] in STATE:
            await app(scope, receive, last)
            return
        message = "every connection of this server has a request in progress: retry later, or raise --max-connections"
        await refuse(
            Refusal(503, message, "server_error", code="too_many_connections", retry_after=RETRY_SECONDS), last
        )

    return answered


class Rarely(logging.Filter):
    """Lets a warning pass once in a while: what strangers cause must not fill the log."""

    def __init__(self, seconds: float = REPEAT_SECONDS) -> None:
        super().__init__()
        self._seconds = seconds
        self._said: dict[Any, float] = {}  # message -> when

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        now = monotonic()
        if now - self._said.get(record.msg, -self._seconds) < self._seconds:
            return False
        self._said[record.msg] = now
        return True
