"""RequestGuard: what a request must pass before anybody reads it: its key, the number of others, its size."""

from __future__ import annotations

import asyncio
import hmac
from typing import NamedTuple
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .openai_errors import RETRY_SECONDS, Refusal

GUARDED = ("/v1/", "/tokenize", "/detokenize")
REQUEST_ID = "x-request-id"
MAX_REQUEST_ID = 128


class Limits(NamedTuple):
    """max_body_bytes and body_seconds: of one request's body. max_requests: at the same time, whether queued, running
    or still arriving. api_key: what is asked for, None for nothing. All of them for what is GUARDED."""

    max_body_bytes: int
    max_requests: int
    api_key: str | None = None
    body_seconds: float = 30.0


class RequestGuard:
    """ASGI middleware. It reads a body to its end before the application is called at all."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(GUARDED):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        send = with_id(headers.get(REQUEST_ID, ""), send)
        refusal = self._refusal(headers)
        if refusal is not None:
            await refuse(refusal, send)
            return
        self._in_flight += 1
        try:
            try:
                body = await asyncio.wait_for(self._read(receive), self._limits.body_seconds)
            except asyncio.TimeoutError:
                body = Refusal(408, f"the body did not arrive within {self._limits.body_seconds:g} s")
            if isinstance(body, Refusal):
                await refuse(body, send)
            elif body is not None:
                await self._app(scope, replayed(body, receive), send)
        finally:
            self._in_flight -= 1

    def _refusal(self, headers: Headers) -> Refusal | None:
        """What the headers alone decide."""
        key = self._limits.api_key
        scheme, _, given = headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.encode(), (key or "").encode()) and scheme.lower() == "bearer"
        if key is not None and not right:
            return Refusal(401, "this server wants its API key: Authorization: Bearer <key>", code="invalid_api_key")
        if self._in_flight >= self._limits.max_requests:
            message = f"{self._in_flight} requests are in progress, which is all this server takes: retry later"
            return Refusal(429, message, "rate_limit_error", code="queue_full", retry_after=RETRY_SECONDS)
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._limits.max_body_bytes:
            return self._too_large()
        return None

    def _too_large(self) -> Refusal:
        return Refusal(413, f"the body is larger than {self._limits.max_body_bytes} bytes", code="body_too_large")

    async def _read(self, receive: Receive) -> bytes | Refusal | None:
        """The whole body; None when the client went away before its end."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self._limits.max_body_bytes:
                return self._too_large()
            if not message.get("more_body", False):
                return bytes(body)


def with_id(name: str, send: Send) -> Send:
    """`send`, whose answer carries the name its client gave to the request, or a new one."""
    name = name if 0 < len(name) <= MAX_REQUEST_ID else uuid4().hex

    async def named(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)[REQUEST_ID] = name
        await send(message)

    return named


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
