"""Floods of connections, and clients that want more than their share, against a real server process, which answers all
other clients meanwhile; SIGTERM ends it as usual."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from signal import SIGTERM

import pytest
from connections import (
    DOORS,
    ELSEWHERE,
    HEAD,
    HERE,
    LINUX,
    LONG,
    MODELS,
    RESERVE,
    ROOM,
    SHORT,
    SLOW,
    answer_of,
    asked,
    files_of,
    get,
    opened,
    posted,
    quiet_end,
    serves_everybody,
)
from serving import RUNNING, WAITING, Served, faulty, pace, paused, served, wait_for

from draftwood.runtime.decoding.queue import max_client_places

FLOODS = {
    "idle": b"",
    "half a head": b"POST /v1/completions HTTP/1.1\r\nHost: loc",
    "half a body": HEAD + b"Content-Length: 100\r\n\r\n{",
    "no end of chunks": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 50,
    "waits for 100": HEAD + b"Content-Length: 100\r\nExpect: 100-continue\r\n\r\n",
    "answered, then idle": MODELS,
    "unread answers": get("/openapi.json") * 30,
}


@contextmanager
def flood(server: Served, kind: str, number: int) -> Iterator[list[socket.socket]]:
    """Many connections that do one thing wrong, until the end of the block."""
    with ExitStack() as stack:
        yield [stack.enter_context(opened(server, FLOODS[kind])) for _ in range(number)]


@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood_keeps_nobody_out(server: Served, kind: str) -> None:
    """The connections are closed that are older, so that there is always room for one more, and never more files."""
    with flood(server, kind, 4 * ROOM):
        serves_everybody(server)
        if LINUX:
            assert files_of(server) < ROOM + RESERVE + 40
    assert server.idle


@pytest.mark.skipif(not LINUX, reason="other systems have one loopback address")
def test_a_flood_from_one_address_costs_another_none_of_its_connections(server: Served) -> None:
    with opened(server, MODELS, ELSEWHERE) as kept, opened(server, HEAD, ELSEWHERE) as half:
        assert answer_of(kept).status == 200
        with flood(server, "idle", 4 * ROOM), flood(server, "half a body", 4 * ROOM):
            kept.sendall(MODELS)
            assert answer_of(kept).status == 200
            content = json.dumps(SHORT).encode()
            half.sendall(b"Content-Length: %d\r\n\r\n" % len(content) + content)
            assert answer_of(half).status == 200


@pytest.mark.skipif(not LINUX, reason="other systems have one loopback address")
def test_when_no_further_request_is_taken_the_state_can_still_be_asked_for(server: Served, pause: Path) -> None:
    first = max_client_places(ROOM)
    with ExitStack() as stack:
        with paused(pause):
            busy = [stack.enter_context(opened(server, posted(SHORT))) for _ in range(first)]
            wait_for(lambda: server.metric(WAITING) == first - 1)
            second = max_client_places(ROOM - first)
            busy += [stack.enter_context(opened(server, posted(SHORT), ELSEWHERE)) for _ in range(second)]
            wait_for(lambda: server.metric(WAITING) == first + second - 1)
            refused = asked(server, posted(SHORT))
            assert refused.status == 429 and refused.headers["retry-after"] == "1"
            assert json.loads(refused.body)["error"]["code"] == "queue_full"
            with flood(server, "idle", 4 * ROOM):
                for path in ("/health", "/health/ready", "/metrics", "/v1/models"):
                    assert asked(server, get(path)).status == 200
        for client in busy:  # and none of them lost its connection
            assert json.loads(answer_of(client).body)["usage"]["completion_tokens"] == 3
    serves_everybody(server)


def test_a_storm_of_disconnects_leaves_nothing_behind(server: Served) -> None:
    reset = struct.pack("ii", 1, 0)
    doors = [*DOORS.items()] * 20
    for number, (path, body) in enumerate(doors):
        whole = posted(body, path)
        with opened(server, (whole, whole[:-3], HEAD, posted({**body, "stream": True}, path))[number % 4]) as client:
            if number % 3:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    wait_for(lambda: server.idle)
    serves_everybody(server)


@pytest.mark.parametrize("path", DOORS)
@pytest.mark.parametrize(("stream", "after"), [(False, b""), (True, b""), (False, b"\r\n"), (False, posted(LONG))])
def test_a_disconnect_frees_the_engine_whatever_comes_before_it(
    server: Served, pause: Path, path: str, stream: bool, after: bytes
) -> None:
    aborts = 'draftwood_requests_total{finish_reason="abort"}'
    before = server.metric(aborts)
    with paused(pause), opened(server, posted(DOORS[path] | {"stream": stream}, path)) as client:
        wait_for(lambda: server.metric(RUNNING) == 1)
        client.sendall(after)
        assert asked(server, MODELS).status == 200  # it was read
    wait_for(lambda: server.idle)
    assert server.metric(aborts) == before + 1


@pytest.mark.skipif(not LINUX, reason="only Linux sets another process' limits")
def test_without_a_file_left_nothing_spins(server: Served) -> None:
    """As when the whole machine runs out of them: Python's own servers retry at once and log every time."""
    import resource

    pid = server.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (files_of(server) + 5, before[1]))
    try:
        with flood(server, "idle", 4 * ROOM):
            serves_everybody(server)
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    serves_everybody(server)


def test_sigterm_amid_every_flood_ends_the_server(tiny_bundle: Path, pause: Path) -> None:
    options = (*SLOW, "--max-running", "1", "--max-connections", str(8 * len(FLOODS)))
    with served(tiny_bundle, *options, program=faulty(pause)) as running, ExitStack() as stack:
        for kind in FLOODS:
            stack.enter_context(flood(running, kind, 8))
        with paused(pause):
            answered = stack.enter_context(opened(running, posted({**LONG, "max_tokens": 100}), HERE))
            wait_for(lambda: running.metric(RUNNING) == 1)
            running.process.send_signal(SIGTERM)
        assert json.loads(answer_of(answered).body)["usage"]["completion_tokens"] == 100
        quiet_end(running)


@pytest.mark.full
@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood_of_thousands(tiny_bundle: Path, kind: str) -> None:
    """Beyond the default of 1,024 connections; SIGTERM comes in the middle of it."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 4000:
        pytest.skip("a client may not open 4,000 files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4000), hard))
    try:
        number = 1200 if kind == "unread answers" else 3000
        with served(tiny_bundle, *SLOW) as running, flood(running, kind, number):
            for _ in range(5):
                serves_everybody(running)
            quiet_end(running)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(not LINUX, reason="other systems have one loopback address")
def test_forged_names_and_addresses_gain_a_client_nothing(server: Served, pause: Path) -> None:
    """Its `user`s and whatever it says of X-Forwarded-For are its own affair: another waits for one text of it."""
    with ExitStack() as stack, paused(pause):
        for number in range(16):
            forged = posted({**LONG, "max_tokens": 100, "user": (ELSEWHERE, f"u{number}")[number % 2]})
            forged = forged.replace(b"\r\n", b"\r\nX-Forwarded-For: 10.0.0.%d\r\n" % number, 1)
            stack.enter_context(opened(server, forged))
        wait_for(lambda: server.metric(WAITING) == 15)
        victim = stack.enter_context(opened(server, posted(SHORT), ELSEWHERE))
        wait_for(lambda: server.metric(WAITING) == 16)
        pace(pause, 0.03)  # each of the others takes seconds
        assert answer_of(victim).status == 200
        assert server.metric(WAITING) >= 8  # fourteen, but for the time it takes to ask
    wait_for(lambda: server.idle)


@pytest.mark.skipif(not LINUX, reason="other systems have one loopback address")
def test_a_client_that_fills_its_share_leaves_places_for_others(server: Served, pause: Path) -> None:
    with ExitStack() as stack:
        with paused(pause):
            many = stack.enter_context(opened(server, posted({**SHORT, "n": 32})))
            wait_for(lambda: server.metric(WAITING) == 31)
            refused = asked(server, posted(SHORT))
            assert refused.status == 429 and b"of this client are waiting" in refused.body
            other = stack.enter_context(opened(server, posted({**SHORT, "n": 15}), ELSEWHERE))
            wait_for(lambda: server.metric(WAITING) == 46)
        assert (answer_of(many).status, answer_of(other).status) == (200, 200)


def test_behind_a_proxy_clients_are_told_apart_by_what_it_says(tiny_bundle: Path, pause: Path, tmp_path: Path) -> None:
    """With the name and the key that clients use there; what a client says to the proxy itself counts for nothing."""
    keys = tmp_path / "keys"
    keys.write_text("all secret\n")
    options = ("--trusted-proxies", "127.0.0.0/8", "--allowed-hosts", "llm.example", "--api-keys-file", str(keys))
    load = ("--max-running", "1", "--max-waiting", "8")

    def forwarded(by: str, body: dict[str, object], key: str = "secret", host: str = "llm.example") -> bytes:
        told = f"X-Forwarded-For: 198.51.100.9, {by}, 127.0.0.1\r\nAuthorization: Bearer {key}\r\n".encode()
        return posted(body).replace(b"localhost\r\n", host.encode() + b"\r\n" + told)

    with (
        served(tiny_bundle, *SLOW, *load, *options, program=faulty(pause)) as running,
        ExitStack() as stack,
    ):
        assert asked(running, forwarded("192.0.2.1", SHORT, key="wrong")).status == 401
        assert asked(running, forwarded("192.0.2.1", SHORT, host="evil.example")).status == 421
        with paused(pause):
            many = stack.enter_context(opened(running, forwarded("192.0.2.1", {**SHORT, "n": 6})))
            wait_for(lambda: running.metric(WAITING) == 5)
            assert asked(running, forwarded("192.0.2.1", SHORT)).status == 429
            other = stack.enter_context(opened(running, forwarded("192.0.2.2", SHORT)))
            wait_for(lambda: running.metric(WAITING) == 6)
        assert (answer_of(many).status, answer_of(other).status) == (200, 200)
        quiet_end(running)
