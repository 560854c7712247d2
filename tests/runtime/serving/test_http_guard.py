"""RequestGuard by itself: an ASGI application after it, and messages fed by hand; whose request it is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from draftwood.models.errors import ConfigError
from draftwood.runtime.serving.http.bodies import ArrivingBodies
from draftwood.runtime.serving.http.clients import ApiKey, network_of, owner_of, read_keys
from draftwood.runtime.serving.http.errors import Refusal
from draftwood.runtime.serving.http.fair import FairLimit
from draftwood.runtime.serving.http.guard import IN_PROGRESS, PIECE_BYTES, Limits, RequestGuard, in_pieces
from draftwood.runtime.serving.http.hosts import AllowedHosts

LOCAL = AllowedHosts.of("127.0.0.1", [], has_key=False)


def in_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*arguments: Any, **options: Any) -> None:
        asyncio.run(test(*arguments, **options))  # type: ignore[arg-type]

    return run


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


def part(body: bytes, more: bool = False) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


async def ask(
    guard: RequestGuard,
    messages: Iterable[Message | float] = (part(b"x"),),
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


async def settle() -> None:
    """Let other tasks run until each waits for something outside: none of them waits for time or for the network."""
    for _ in range(200):
        await asyncio.sleep(0)


def result_of(answer: list[Message]) -> tuple[int, Any]:
    """Status, and the code of an error."""
    body = answer[1]["body"]
    return answer[0]["status"], json.loads(body)["error"]["code"] if answer[0]["status"] != 200 else None


@in_a_loop
async def test_a_body_arrives_whole_in_time_or_not_at_all() -> None:
    echo = Echo()
    guard = RequestGuard(echo, Limits(10, 1, body_seconds=0.02))
    answer = await ask(guard, [part(b"abc", True), part(b"", True), part(b"def")])
    assert answer[0]["status"] == 200 and answer[1]["body"] == b"abcdef"
    assert (await ask(guard, [part(b"abc", True), 5.0]))[0]["status"] == 408
    assert await ask(guard, [part(b"abc", True), {"type": "http.disconnect"}]) == []
    assert result_of(await ask(guard, [part(b"abcdef", True), part(b"abcdef")])) == (413, "body_too_large")
    assert result_of(await ask(guard)) == (200, None) and echo.bodies == [b"abcdef", b"x"]


@in_a_loop
async def test_more_requests_than_allowed_are_refused_before_they_are_read() -> None:
    """But not those for the state, nor a GET, unless it is of a stored response; bodies on the way take no place."""
    echo, counted = Echo(), list[int]()
    guard = RequestGuard(echo, Limits(10, 2), counted.append)
    arriving = [asyncio.create_task(ask(guard, [part(b"x", True), 60.0])) for _ in range(144)]
    await settle()
    echo.go.clear()
    running = [asyncio.create_task(ask(guard)) for _ in range(2)]
    await settle()
    assert len(echo.bodies) == 2 and result_of(await ask(guard, [])) == (429, "queue_full")
    assert result_of(await ask(guard, [], "/v1/responses/resp_1", method="GET")) == (429, "queue_full")
    others = [asyncio.create_task(ask(guard, path="/health"))]
    others.append(asyncio.create_task(ask(guard, path="/v1/models", method="GET")))
    echo.go.set()
    assert {result_of(answer) for answer in await asyncio.gather(*running, *others)} == {(200, None)}
    assert result_of(await ask(guard)) == (200, None)
    assert sorted(counted) == [200, 200, 200, 200, 429, 429], "but not of /health"
    for each in arriving:
        each.cancel()
    await asyncio.gather(*arriving, return_exceptions=True)


@in_a_loop
async def test_a_place_that_is_gone_when_the_body_has_come_is_a_429() -> None:
    echo = Echo()
    echo.go.clear()
    guard = RequestGuard(echo, Limits(10, 1))
    slow = asyncio.create_task(ask(guard, [part(b"a", True), 0.05, part(b"b")]))
    await asyncio.sleep(0)
    first = asyncio.create_task(ask(guard, [part(b"first")]))
    assert result_of(await slow) == (429, "queue_full")
    echo.go.set()
    assert result_of(await first) == (200, None) and echo.bodies == [b"first"]


def test_the_client_that_holds_the_most_loses_its_oldest() -> None:
    limit, ended = FairLimit(100), list[str]()
    with ExitStack() as stack:
        names = ("b old", "a empty", "a old", "a new")
        answers = [stack.enter_context(limit.hold(name[0], partial(ended.append, name))) for name in names]
        for answer, size in zip(answers, (40, 0, 30, 30), strict=True):
            answer.add(size)
        assert not ended
        answers[0].add(1)
        assert ended == ["a old"]
        answers[2].add(1000)  # it is ended: what it still writes counts no more
        answers[3].add(-30)
        answers[1].add(59)
        assert ended == ["a old"]
    with limit.hold("c", lambda: ended.append("c")) as last:
        last.add(100)  # all others' bytes came back with their ends
        assert ended == ["a old"]
        last.add(1)
    assert ended == ["a old", "c"]


@pytest.mark.parametrize("limits", [{"max_arriving": 5}, {"max_bytes": 500}], ids=["count", "bytes"])
@in_a_loop
async def test_whoever_has_most_on_the_way_loses_its_slowest_body(limits: dict[str, int]) -> None:
    bodies = ArrivingBodies(max_body_bytes=100, seconds=60, **limits)

    async def next_message(messages: list[Message]) -> Message:
        if not messages:
            await asyncio.sleep(60)
        return messages.pop()

    def arriving(clients: str) -> list[asyncio.Task[bytes | Refusal | None]]:
        """A body of each client, in this order, that never ends."""
        endless = [partial(next_message, [part(bytes(100), True)]) for _ in clients]
        return [asyncio.create_task(bodies.read(*each)) for each in zip(clients, endless, strict=True)]

    tasks = arriving("baaacbaa")
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
    again = arriving("ddddd")  # nothing is left in the count
    await settle()
    assert not any(task.done() for task in again)


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES, 3 * PIECE_BYTES + 7])
@pytest.mark.parametrize("more", [False, True])
@in_a_loop
async def test_a_large_answer_is_handed_over_piece_by_piece(size: int, more: bool) -> None:
    body, sent = (bytes(range(251)) * (size // 251 + 1))[:size], list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    with FairLimit(len(body)).hold("a", pytest.fail) as held:
        await in_pieces(send, held)({"type": "http.response.body", "body": body, "more_body": more})
        assert held.size == 0
    assert b"".join(each["body"] for each in sent) == body
    assert all(len(each["body"]) <= PIECE_BYTES for each in sent)
    assert [each["more_body"] for each in sent] == [True] * (len(sent) - 1) + [more]


ONE, TWO, ROTATED = (ApiKey.of(name, key, "test") for name, key in (("a", "k1"), ("b", "k2"), ("a", "k3")))


@pytest.mark.parametrize(
    ("keys", "clients"),
    [
        ((ONE, TWO, ROTATED), ["key a", "key a", "key b", "key a"]),
        ((ONE,), ["address 192.0.2.1", "address 192.0.2.2"]),  # one key is everybody's
        ((ONE, ROTATED), ["address 192.0.2.1", "address 192.0.2.2", "address 192.0.2.1"]),
        ((), [f"address 192.0.2.{number}" for number in (1, 2, 1, 1, 1)]),
    ],
)
@in_a_loop
async def test_a_client_is_its_key_or_its_address(keys: tuple[ApiKey, ...], clients: list[str]) -> None:
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["state"]["client"])
        assert scope["state"][IN_PROGRESS]
        await send({"type": "http.response.start", "status": 200, "headers": []})

    guard = RequestGuard(app, Limits(10, 9, keys))
    for key, number in (("k1", 1), ("k1", 2), ("k2", 1), ("k3", 1), ("k4", 1)):
        headers = [(b"authorization", f"Bearer {key}".encode())]
        await ask(guard, headers=headers, address=f"{'::ffff:' * (key == 'k2')}192.0.2.{number}")
    assert seen == clients


def test_a_file_of_keys_names_clients(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# who key\n\nanna  k-1\nben k-2\nanna k-3\n")
    keys = read_keys(file)
    assert [key.name for key in keys] == ["anna", "ben", "anna"]
    for given_key, owner in (("k-1", "anna"), ("k-2", "ben"), ("k-3", "anna"), ("k-4", None), ("", None)):
        assert owner_of(keys, f"Bearer {given_key}") == owner_of(keys, f"bearer {given_key}") == owner
        assert owner_of(keys, f"Basic {given_key}") is owner_of(keys, given_key) is None


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "cannot read the API keys"),
        (b"\xff\xfe", "cannot read the API keys"),
        (b"", "has no API keys"),
        (b"# only a comment", "has no API keys"),
        (b"anna", "line 1, is no API key: write a name, a space and a key"),
        (b"anna k 1", "line 1, is no API key"),
        (b"anna k\nben k", "line 2, repeats the key of 'anna'"),
        *((f"anna {key}".encode(), "visible ASCII") for key in ("schlüssel", "ключ", "a\0")),
    ],
)
def test_a_file_of_other_things_is_refused(tmp_path: Path, content: bytes | None, named: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=named) as refused:
        read_keys(file)
    assert "k 1" not in str(refused.value), "errors reach logs, keys must not"


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:0:0:ffff::1", "2001:db8::/64"),
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("x" * 9999, "x" * 64),
    ],
)
def test_one_customer_of_a_provider_is_one_client(address: str, client: str) -> None:
    assert network_of(address) == client


LOOPBACK = ("localhost", "LOCALHOST.", "app.localhost:3000", "127.0.0.1", "127.8.9.1:80", "[::1]", "[::1]:8000")
NO_HOSTS = ("", ":", "[", "[::1", "::1]", "localhost:x", "localhost:80:80", "a b", "127.0.0.1.evil.example", "0x7f.1")


@pytest.mark.parametrize(
    ("listening", "names", "has_key", "allowed", "refused"),
    [
        ("127.0.0.1", [], False, LOOPBACK, (*NO_HOSTS, "evil.example", "localhost.evil.example", "192.0.2.1")),
        ("localhost", [], True, LOOPBACK, (*NO_HOSTS, "evil.example")),
        ("::1", ["Ours.example."], False, (*LOOPBACK, "ours.example:80"), (*NO_HOSTS, "x.ours.example")),
        ("127.0.0.1", ["*.ours.example"], False, ("a.ours.example", "a.b.ours.example"), ("ours.example", "x.com")),
        ("0.0.0.0", [], False, (*LOOPBACK, "192.0.2.1:80", "[2001:db8::1]"), (*NO_HOSTS, "evil.example", "box")),
        ("0.0.0.0", [], True, (*LOOPBACK, "evil.example", "box"), ()),
        ("0.0.0.0", ["box"], True, (*LOOPBACK, "box", "192.0.2.1"), (*NO_HOSTS, "evil.example")),
        ("box.lan", [], False, (*LOOPBACK, "box.lan"), (*NO_HOSTS, "evil.lan")),
        ("127.0.0.1", ["*"], False, (*LOOPBACK, "evil.example"), ()),
    ],
)
def test_a_server_answers_to_its_own_names(
    listening: str, names: list[str], has_key: bool, allowed: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    hosts = AllowedHosts.of(listening, names, has_key)
    assert [host for host in allowed if not hosts.allow(host)] == []
    assert [host for host in refused if hosts.allow(host)] == []


@given(st.text())
def test_any_text_may_be_sent_as_a_host(host: str) -> None:
    assert AllowedHosts.of("127.0.0.1", ["*"], False).allow(host) and LOCAL.allow(host) in (True, False)
