"""RequestGuard by itself: an ASGI application behind it, and messages fed by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the [serve] extra")
from starlette.types import Message, Receive, Scope, Send

from draftwood.runtime.decoding.queue import max_client_places
from draftwood.runtime.serving.http.bodies import ArrivingBodies
from draftwood.runtime.serving.http.clients import ApiKey
from draftwood.runtime.serving.http.errors import Refusal
from draftwood.runtime.serving.http.guard import IN_PROGRESS, PIECE_BYTES, Limits, RequestGuard, in_pieces
from draftwood.runtime.serving.http.held import HeldAnswers
from draftwood.runtime.serving.http.hosts import AllowedHosts


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


async def ask(
    guard: RequestGuard,
    messages: Iterable[Message | float],
    path: str = "/v1/x",
    headers: Sequence[tuple[bytes, bytes]] = (),
    address: str = "192.0.2.1",
    method: str = "POST",
) -> list[Message]:
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

    scope = {"type": "http", "method": method, "path": path, "headers": headers, "client": (address, 1)}
    await guard(scope, receive, send)
    return sent


def part(body: bytes, more: bool) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


async def until(condition: Callable[[], object]) -> None:
    """Lets other tasks run until it is true."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("waited in vain")


async def settle() -> None:
    """Let other tasks run until each waits for something outside: none of them waits for time or for the network."""
    for _ in range(200):
        await asyncio.sleep(0)


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
        counted: list[int] = []
        guard = RequestGuard(echo, Limits(10, 2), counted.append)
        running = [asyncio.create_task(ask(guard, [part(b"x", False)])) for _ in range(2)]
        await until(lambda: len(echo.bodies) == 2)
        assert code_of(await ask(guard, [])) == (429, "queue_full")
        health = asyncio.create_task(ask(guard, [part(b"", False)], "/health"))
        echo.go.set()
        assert [answer[0]["status"] for answer in await asyncio.gather(*running, health)] == [200] * 3
        assert (await ask(guard, [part(b"x", False)]))[0]["status"] == 200
        assert counted == [429, 200, 200, 200], "but not of /health"

    asyncio.run(crowd())


def test_bodies_on_the_way_take_no_place_and_a_get_never_does() -> None:
    """144 half-sent bodies once answered everybody with 429 for half a minute."""

    async def crowd() -> None:
        echo = Echo()
        guard = RequestGuard(echo, Limits(10, 2))
        arriving = [asyncio.create_task(ask(guard, [part(b"x", True), 60.0])) for _ in range(144)]
        await asyncio.sleep(0)
        assert (await ask(guard, [part(b"x", False)]))[0]["status"] == 200
        assert (await ask(guard, [part(b"", False)], "/v1/models", method="GET"))[0]["status"] == 200
        echo.go.clear()
        running = [asyncio.create_task(ask(guard, [part(b"run", False)])) for _ in range(2)]
        await until(lambda: echo.bodies.count(b"run") == 2)
        listing = asyncio.create_task(ask(guard, [part(b"", False)], "/v1/models", method="GET"))
        await until(lambda: echo.bodies[-1] == b"")
        echo.go.set()
        assert {answer[0]["status"] for answer in await asyncio.gather(*running, listing)} == {200}
        for each in arriving:
            each.cancel()
        await asyncio.gather(*arriving, return_exceptions=True)

    asyncio.run(crowd())


def test_a_place_that_is_gone_when_the_body_has_come_is_a_429() -> None:
    async def race() -> None:
        echo = Echo()
        echo.go.clear()
        guard = RequestGuard(echo, Limits(10, 1))
        slow = asyncio.create_task(ask(guard, [part(b"a", True), 0.05, part(b"b", False)]))
        await asyncio.sleep(0)
        first = asyncio.create_task(ask(guard, [part(b"first", False)]))
        assert code_of(await slow) == (429, "queue_full")
        echo.go.set()
        assert (await first)[0]["status"] == 200 and echo.bodies == [b"first"]

    asyncio.run(race())


def test_no_client_has_all_places() -> None:
    async def crowd() -> None:
        echo = Echo()
        echo.go.clear()
        guard = RequestGuard(echo, Limits(10, 10))

        async def taken(address: str) -> list[asyncio.Task[list[Message]]]:
            asking = [asyncio.create_task(ask(guard, [part(b"x", False)], address=address)) for _ in range(10)]
            await settle()
            return [task for task in asking if not task.done()]

        first, second = await taken("2001:db8:1:2:3::4"), await taken("192.0.2.7")
        assert (len(first), len(second)) == (max_client_places(10), max_client_places(10 - max_client_places(10)))
        assert await taken("2001:db8:1:2:ffff::1") == []  # its neighbour in one network
        echo.go.set()
        assert {answer[0]["status"] for answer in await asyncio.gather(*first, *second)} == {200}

    asyncio.run(crowd())


def test_the_client_with_the_most_bytes_of_answers_loses_its_oldest() -> None:
    held, ended = HeldAnswers(100), list[str]()
    with ExitStack() as stack:
        names = ("b old", "a empty", "a old", "a new")
        answers = [stack.enter_context(held.answer(name[0], partial(ended.append, name))) for name in names]
        for answer, size in zip(answers, (40, 0, 30, 30), strict=True):
            answer.add(size)
        assert not ended
        answers[0].add(1)
        assert ended == ["a old"]
        answers[2].add(1000)  # it is ended: what it still writes counts no more
        answers[3].add(-30)
        answers[1].add(59)
        assert ended == ["a old"]
    with held.answer("c", lambda: ended.append("c")) as last:
        last.add(100)  # all others' bytes came back with their ends
        assert ended == ["a old"]
        last.add(1)
    assert ended == ["a old", "c"]


def arriving_bodies(bodies: ArrivingBodies, clients: str, size: int = 1) -> list[asyncio.Task[bytes | Refusal | None]]:
    """A body of each client, in this order, that never ends."""

    def receive() -> Receive:
        messages: list[Message] = [part(bytes(size), True)]

        async def next_message() -> Message:
            if not messages:
                await asyncio.sleep(60)
            return messages.pop()

        return next_message

    return [asyncio.create_task(bodies.read(client, receive())) for client in clients]


@pytest.mark.parametrize("limits", [{"max_arriving": 5}, {"max_bytes": 500}], ids=["count", "bytes"])
def test_whoever_has_most_on_the_way_loses_its_slowest_body(limits: dict[str, int]) -> None:
    async def crowd() -> None:
        bodies = ArrivingBodies(max_body_bytes=100, seconds=60, **limits)
        tasks = arriving_bodies(bodies, "baaacbaa", size=100)
        await settle()
        given_up = [index for index, task in enumerate(tasks) if task.done()]
        assert given_up == [1, 2, 3]
        for index in given_up:
            refusal = await tasks[index]
            assert isinstance(refusal, Refusal) and refusal.code == "body_too_slow"
            assert refusal.headers["connection"] == "close"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        again = arriving_bodies(bodies, "ddddd", size=100)  # nothing is left behind in the count
        await settle()
        assert not any(task.done() for task in again)

    asyncio.run(crowd())


def test_a_large_answer_is_handed_over_piece_by_piece() -> None:
    async def cut(body: bytes, more: bool) -> list[Message]:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        with HeldAnswers(len(body)).answer("a", pytest.fail) as held:
            await in_pieces(send, held)({"type": "http.response.body", "body": body, "more_body": more})
            assert held.num_bytes == 0
        return sent

    for size in (0, 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES, 3 * PIECE_BYTES + 7):
        body = bytes(range(251)) * (size // 251 + 1)
        for more in (False, True):
            sent = asyncio.run(cut(body[:size], more))
            assert b"".join(each["body"] for each in sent) == body[:size]
            assert all(len(each["body"]) <= PIECE_BYTES for each in sent)
            assert [each["more_body"] for each in sent] == [True] * (len(sent) - 1) + [more]


def test_a_client_is_its_key_or_its_address() -> None:
    async def clients(keys: tuple[ApiKey, ...], *asked: tuple[str, str]) -> list[str]:
        seen = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            seen.append(scope["state"]["client"])
            assert scope["state"][IN_PROGRESS]
            await send({"type": "http.response.start", "status": 200, "headers": []})

        guard = RequestGuard(app, Limits(10, 9, keys))
        for key, address in asked:
            headers = [(b"authorization", f"Bearer {key}".encode())]
            await ask(guard, [part(b"", False)], headers=headers, address=address)
        return seen

    one, two, rotated = (ApiKey.of(name, key, "test") for name, key in (("a", "k1"), ("b", "k2"), ("a", "k3")))
    asked = [("k1", "192.0.2.1"), ("k1", "192.0.2.2"), ("k2", "192.0.2.1"), ("k3", "192.0.2.1"), ("k4", "192.0.2.1")]
    assert asyncio.run(clients((one, two, rotated), *asked)) == ["key a", "key a", "key b", "key a"]
    addresses = ["address 192.0.2.1", "address 192.0.2.2"]
    assert asyncio.run(clients((one,), *asked)) == addresses, "one key is everybody's"
    assert asyncio.run(clients((one, rotated), *asked)) == [*addresses, "address 192.0.2.1"]
    assert asyncio.run(clients((), *asked[:2], ("", "::ffff:192.0.2.1"))) == [*addresses, addresses[0]]


def test_another_name_of_this_machine_is_refused_except_for_health() -> None:
    async def statuses(*hosts: bytes, path: str = "/v1/x") -> list[int]:
        guard = RequestGuard(Echo(), Limits(10, 9, hosts=AllowedHosts.of("127.0.0.1", [], has_key=False)))
        answers = [await ask(guard, [part(b"x", False)], path, [(b"host", host)]) for host in hosts]
        return [answer[0]["status"] for answer in answers]

    names = (b"localhost:8000", b"127.0.0.1", b"[::1]:8000", b"evil.example", b"192.0.2.1", b"")
    assert asyncio.run(statuses(*names)) == [200, 200, 200, 421, 421, 421]
    assert asyncio.run(statuses(*names, path="/health")) == [200] * 6
    assert asyncio.run(statuses(*names, path="/metrics")) == [200, 200, 200, 421, 421, 421]
    guard = RequestGuard(Echo(), Limits(10, 9, hosts=AllowedHosts.of("127.0.0.1", [], has_key=False)))
    assert asyncio.run(ask(guard, [part(b"x", False)]))[0]["status"] == 200, "HTTP/1.0 has no host, browsers have one"
