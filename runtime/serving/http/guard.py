"""RequestGuard: checks a request before the application: its host, API key, size, and the number of other requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...engines.limits import available_bytes
from ..places import Places
from .bodies import ArrivingBodies
from .clients import ApiKey, network_of, owner_of
from .errors import MAX_SHOWN, RETRY_SECONDS, Refusal
from .fair import FairLimit, Held
from .hosts import AllowedHosts

GUARDED = ("/v1/", "/api/", "/infill", "/tokenize", "/detokenize")
STORED = "/v1/responses/"  # below it answers are as large as those to a POST
HEALTH = ("/health", "/health/ready")  # allowed for every host name, because these answers contain no secrets
REQUEST_ID = "x-request-id"
MAX_REQUEST_ID = 128
IN_PROGRESS = "in_progress"  # key of a scope's state: set while the request counts as in progress
HANG_UP = "hang_up"  # key of a scope's state: closes the connection without writing what is left
HELD = "held"  # key of a scope's state: what is held of the answer to a request in progress
MIN_BYTES = 256 << 20  # of all answers together: ten of the largest
SHARE = 8  # they may take one in so many bytes of the memory that is available at the start
PIECE_BYTES = 64 << 10


class Limits(NamedTuple):
    """Limits of paths below GUARDED."""

    max_body_bytes: int
    max_requests: int  # in progress: queued, running, or being answered
    api_keys: tuple[ApiKey, ...] = ()  # if empty, no key is needed
    body_seconds: float = 30.0  # for one body
    hosts: AllowedHosts | None = None  # accepted host names, None for any; HEALTH always answers
    trusted_proxies: tuple[str, ...] = ()  # addresses or networks whose X-Forwarded-For names the sender of a request
    answer_bytes: int = MIN_BYTES  # of all answers that clients have not read


def answer_bytes() -> int:
    """The bytes that all answers may take by the memory that is available now."""
    return max(MIN_BYTES, (available_bytes() or 0) // SHARE)


class RequestGuard:
    """ASGI middleware. It reads the body of a POST, or of what asks for a stored response, completely; only then the
    request counts as in progress, and the application is called. `is_within_share` limits the requests in progress of
    each client.

    The scope's state gets a `client`: the name of the API key if there are several names, else the address; a request
    in progress also gets HELD.
    """

    def __init__(self, app: ASGIApp, limits: Limits, count: Callable[[int], None] = lambda status: None) -> None:
        """count: called with the status of every answer to a path below GUARDED, and of a misdirected request."""
        self._app = app
        self._limits = limits
        self._count = count
        self._bodies = ArrivingBodies(limits.max_body_bytes, limits.body_seconds)
        self._places = Places(limits.max_requests)
        self._held = FairLimit(limits.answer_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if misdirected := self._misdirected(scope["path"], headers.get("host")):
            await refuse(misdirected, counted(self._count, send), scope["path"])
        elif scope["path"].startswith(GUARDED):
            sending = with_id(headers.get(REQUEST_ID, ""), counted(self._count, send))
            await self._guarded(scope, headers, receive, sending)
        else:
            await self._app(scope, receive, send)

    async def _guarded(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        client = self._client(scope, headers)
        if client is None:
            wanted = "this server wants its API key: Authorization: Bearer <key>, or x-api-key: <key>"
            await refuse(Refusal(401, wanted, code="invalid_api_key"), send, scope["path"])
            return
        state = scope.setdefault("state", {})
        state["client"] = client
        if scope["method"] != "POST" and not scope["path"].startswith(STORED):
            await self._app(scope, receive, send)
            return
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._limits.max_body_bytes:
            await refuse(self._bodies.too_large(), send, scope["path"])
            return
        body = self._full(client) or await self._bodies.read(client, receive)
        if isinstance(body, bytes):
            body = self._full(client) or body  # other requests may have begun meanwhile
        if isinstance(body, Refusal):
            await refuse(body, send, scope["path"])
        elif body is not None:
            hang_up = state.get(HANG_UP, lambda: None)
            with self._places.take(client), self._held.hold(client, hang_up) as held:
                state[IN_PROGRESS], state[HELD] = True, held
                await self._app(scope, replay(body, receive), in_pieces(send, held))

    def _misdirected(self, path: str, host: str | None) -> Refusal | None:
        """The refusal of a wrong Host. A missing Host (HTTP/1.0) is allowed, because no browser omits it."""
        hosts = self._limits.hosts
        if hosts is None or host is None or path in HEALTH or hosts.allow(host):
            return None
        message = (
            f"this server does not go by the name {host[:MAX_SHOWN]!r}: call it by an address, or start it with "
            "--allowed-hosts and that name"
        )
        return Refusal(421, message, code="host_not_allowed")

    def _client(self, scope: Scope, headers: Headers) -> str | None:
        """The client of a request; None without a valid key. Keys of one name do not distinguish clients."""
        keys = self._limits.api_keys
        given = headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}"  # Anthropic's
        owner = owner_of(keys, given)
        if keys and owner is None:
            return None
        if len({key.name for key in keys}) > 1:
            return f"key {owner}"
        address = scope.get("client")
        return f"address {network_of(address[0])}" if address else "no address"

    def _full(self, client: str) -> Refusal | None:
        """The refusal of a further request, if too many are in progress; else None."""
        if (shortage := self._places.shortage(client)) is None:
            return None
        return Refusal(429, shortage, "rate_limit_error", code="queue_full", retry_after=RETRY_SECONDS)


def counted(count: Callable[[int], None], send: Send) -> Send:
    """`send` that calls `count` with the status of the answer."""

    async def send_counted(message: Message) -> None:
        if message["type"] == "http.response.start":
            count(message["status"])
        await send(message)

    return send_counted


def with_id(name: str, send: Send) -> Send:
    """`send` with a header that contains the client's request id, or a new id."""
    name = name if 0 < len(name) <= MAX_REQUEST_ID else uuid4().hex

    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)[REQUEST_ID] = name
        await send(message)

    return send_with_id


def in_pieces(send: Send, held: Held) -> Send:
    """`send` that passes a large answer on in pieces. The next piece waits until the client has read enough, and the
    request stays in progress until then; `held` counts the answer. Otherwise slow clients would make the server keep
    any number of whole answers in memory.
    """

    async def send_pieces(message: Message) -> None:
        body = message.get("body", b"") if message["type"] == "http.response.body" else b""
        held.add(len(body))
        for start in range(0, len(body) - PIECE_BYTES, PIECE_BYTES):
            piece = body[start : start + PIECE_BYTES]
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if len(body) > PIECE_BYTES:
            message = {**message, "body": body[(len(body) - 1) // PIECE_BYTES * PIECE_BYTES :]}
        await send(message)
        held.add(-len(body))

    return send_pieces


async def refuse(refusal: Refusal, send: Send, path: str = "") -> None:
    """Answer without the application. path: the address, whose API has its form of errors."""
    headers = [(name.encode(), value.encode()) for name, value in refusal.headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": refusal.body_for(path)})


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body in one message, and afterwards the messages of `receive`: a disconnect."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return pending.pop() if pending else await receive()

    return next_message
