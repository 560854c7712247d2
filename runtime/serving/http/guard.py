"""RequestGuard: what a request must pass before anybody reads it: its host, its key, the number of others, its size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...decoding.scheduler import within_share
from .bodies import ArrivingBodies
from .clients import ApiKey, network_of, owner_of
from .errors import MAX_SHOWN, RETRY_SECONDS, Refusal
from .hosts import AllowedHosts

GUARDED = ("/v1/", "/tokenize", "/detokenize")
HEALTH = ("/health", "/health/ready")  # asked for by whatever name a machine has; no page learns anything there
REQUEST_ID = "x-request-id"
MAX_REQUEST_ID = 128
IN_PROGRESS = "in_progress"  # in a scope's state: set once the request has a place
PIECE_BYTES = 64 << 10


class Limits(NamedTuple):
    """max_body_bytes and body_seconds: of one request's body. max_requests: at the same time, whether queued, running
    or still being answered. api_keys: what is asked for, none for nothing. All of them for what is GUARDED.

    hosts: by which names the server may be called, None for any; HEALTH always answers. trusted_proxies: addresses or
    networks whose X-Forwarded-For says where a request is from."""

    max_body_bytes: int
    max_requests: int
    api_keys: tuple[ApiKey, ...] = ()
    body_seconds: float = 30.0
    hosts: AllowedHosts | None = None
    trusted_proxies: tuple[str, ...] = ()


class RequestGuard:
    """ASGI middleware. It reads the body of a POST to its end before the application is called at all; only then does
    the request take a place. No client may have more places than `within_share` says.

    The application finds in the scope's state the `client` whose request it is: the name of its key, where there are
    several, or else its address.
    """

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits
        self._bodies = ArrivingBodies(limits.max_body_bytes, limits.body_seconds)
        self._in_progress = Counter[str]()  # by client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if misdirected := self._misdirected(scope["path"], headers.get("host")):
            await refuse(misdirected, send)
        elif scope["path"].startswith(GUARDED):
            await self._guarded(scope, headers, receive, with_id(headers.get(REQUEST_ID, ""), in_pieces(send)))
        else:
            await self._app(scope, receive, send)

    async def _guarded(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        client = self._client(scope, headers)
        if client is None:
            wanted = "this server wants its API key: Authorization: Bearer <key>"
            await refuse(Refusal(401, wanted, code="invalid_api_key"), send)
            return
        state = scope.setdefault("state", {})
        state["client"] = client
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._limits.max_body_bytes:
            await refuse(self._bodies.too_large(), send)
            return
        body = self._full(client) or await self._bodies.read(client, receive)
        if isinstance(body, bytes):
            body = self._full(client) or body  # others may have come meanwhile
        if isinstance(body, Refusal):
            await refuse(body, send)
        elif body is not None:
            with self._place(client):
                state[IN_PROGRESS] = True
                await self._app(scope, replayed(body, receive), send)

    def _misdirected(self, path: str, host: str | None) -> Refusal | None:
        """Whoever sends no host, as HTTP/1.0 has it, is no browser."""
        hosts = self._limits.hosts
        if hosts is None or host is None or path in HEALTH or hosts.allow(host):
            return None
        message = (
            f"this server does not go by the name {host[:MAX_SHOWN]!r}: call it by an address, or start it with "
            "--allowed-hosts and that name"
        )
        return Refusal(421, message, code="host_not_allowed")

    def _client(self, scope: Scope, headers: Headers) -> str | None:
        """Whose request it is; None without a right key. One key is everybody's, and tells nobody apart."""
        keys = self._limits.api_keys
        owner = owner_of(keys, headers.get("authorization", ""))
        if keys and owner is None:
            return None
        if len({key.name for key in keys}) > 1:
            return f"key {owner}"
        address = scope.get("client")
        return f"address {network_of(address[0])}" if address else "no address"

    def _full(self, client: str) -> Refusal | None:
        """The refusal of a further request, if there is no place for it."""
        places, held, taken = self._limits.max_requests, self._in_progress[client], self._in_progress.total()
        if within_share(held, taken, places):
            return None
        message = f"{taken} requests are in progress, {held} of them yours, and this server takes {places}: retry later"
        return Refusal(429, message, "rate_limit_error", code="queue_full", retry_after=RETRY_SECONDS)

    @contextmanager
    def _place(self, client: str) -> Iterator[None]:
        self._in_progress[client] += 1
        try:
            yield
        finally:
            self._in_progress[client] -= 1
            if not self._in_progress[client]:
                del self._in_progress[client]


def with_id(name: str, send: Send) -> Send:
    """`send`, whose answer carries the name its client gave to the request, or a new one."""
    name = name if 0 < len(name) <= MAX_REQUEST_ID else uuid4().hex

    async def named(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)[REQUEST_ID] = name
        await send(message)

    return named


def in_pieces(send: Send) -> Send:
    """`send`, which hands a large answer over piece by piece: the next one waits until its client has read enough, and
    a request keeps its place for so long. Else the server would hold the whole answers of any number of slow readers.
    """

    async def cut(message: Message) -> None:
        body = message.get("body", b"") if message["type"] == "http.response.body" else b""
        for start in range(0, len(body) - PIECE_BYTES, PIECE_BYTES):
            piece = body[start : start + PIECE_BYTES]
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if len(body) > PIECE_BYTES:
            message = {**message, "body": body[(len(body) - 1) // PIECE_BYTES * PIECE_BYTES :]}
        await send(message)

    return cut


async def refuse(refusal: Refusal, send: Send) -> None:
    """Answer without the application."""
    headers = [(name.encode(), value.encode()) for name, value in refusal.headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": refusal.body})


def replayed(body: bytes, receive: Receive) -> Receive:
    """The body in one message, then whatever follows it: a disconnect."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return pending.pop() if pending else await receive()

    return next_message
