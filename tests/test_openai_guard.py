"""RequestGuard by itself: an ASGI application behind it, and messages fed by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the [serve] extra")
from starlette.types import Message, Receive, Scope, Send

from draftwood.runtime.serving.openai_guard import Limits, RequestGuard


class Echo:
    """Answers with the body it was given; waits for `go` first."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.go.set()
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.bodies.append((await receive())["body"])
        await self.go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": self.bodies[-1]})


async def ask(guard: RequestGuard, messages: Iterable[Message | float], path: str = "/v1/x") -> list[Message]:
    """What comes back for these messages; a number is a pause in seconds."""
    arriving = iter(messages)
    sent: list[Message] = []

    async def receive() -> Message:
        message = next(arriving)
        if isinstance(message, float):
            await asyncio.sleep(message)
            return await receive()
        return message

    async def send(message: Message) -> None:
        sent.append(message)

    await guard({"type": "http", "path": path, "headers": []}, receive, send)
    return sent


def part(body: bytes, more: bool) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


def code_of(answer: list[Message]) -> Any:
    return answer[0]["status"], json.loads(answer[1]["body"])["error"]["code"]


def test_a_body_in_parts_arrives_whole() -> None:
    async def parts() -> None:
        echo = Echo()
        answer = await ask(
            RequestGuard(echo, Limits(10, 1)), [part(b"abc", True), part(b"", True), part(b"def", False)]
        )
        assert answer[0]["status"] == 200 and answer[1]["body"] == b"abcdef"

    asyncio.run(parts())


def test_a_body_that_does_not_come_is_given_up() -> None:
    async def slow() -> None:
        echo = Echo()
        guard = RequestGuard(echo, Limits(10, 1, body_seconds=0.02))
        answer = await ask(guard, [part(b"abc", True), 5.0])
        assert answer[0]["status"] == 408
        assert (await ask(guard, [part(b"x", False)]))[0]["status"] == 200
        assert echo.bodies == [b"x"]

    asyncio.run(slow())


def test_a_client_that_leaves_early_is_not_answered() -> None:
    async def left() -> None:
        echo = Echo()
        assert await ask(RequestGuard(echo, Limits(10, 1)), [part(b"abc", True), {"type": "http.disconnect"}]) == []
        assert echo.bodies == []

    asyncio.run(left())


def test_more_requests_than_allowed_are_refused_before_they_are_read() -> None:
    async def crowd() -> None:
        echo = Echo()
        echo.go.clear()
        guard = RequestGuard(echo, Limits(10, 2))
        running = [asyncio.create_task(ask(guard, [part(b"x", False)])) for _ in range(2)]
        await asyncio.sleep(0)
        assert code_of(await ask(guard, [])) == (429, "queue_full")
        health = asyncio.create_task(ask(guard, [part(b"", False)], "/health"))
        echo.go.set()
        assert [answer[0]["status"] for answer in await asyncio.gather(*running, health)] == [200] * 3
        assert (await ask(guard, [part(b"x", False)]))[0]["status"] == 200

    asyncio.run(crowd())
