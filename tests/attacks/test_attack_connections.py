"""Floods against a real server process: idle sockets, half-sent requests, storms of disconnects, readers that do not
read, odd requests, no file left. Everybody else is served all the while, and SIGTERM ends the server as ever."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from signal import SIGTERM
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
from serving import RUNNING, WAITING, Served, served, wait_for

pytest.importorskip("fastapi", reason="needs the [serve] extra")
from draftwood.runtime.serving.http import server as http_server

LINUX = sys.platform == "linux"
ROOM, RESERVE = 24, 16
SLOW = ("--served-model-name", "small", "--grow", "chain", "--budget", "fixed")  # drafts in vain: seconds for LONG
OPTIONS = (*SLOW, "--max-running", "1", "--max-waiting", "60", "--max-connections", str(ROOM))
LONG = {"model": "small", "prompt": "hello", "max_tokens": 900, "ignore_eos": True, "temperature": 0}
SHORT = {**LONG, "max_tokens": 3}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
MODELS = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
# `draftwood serve` whose target's passes wait for as long as a file exists.
PAUSABLE = """
import sys, time
from pathlib import Path
from draftwood.cli.main import main
from draftwood.runtime.bundle.bundle import EngineBundle

pause, opened = Path(sys.argv.pop(1)), EngineBundle.open_engine

def open_engine(self, role, *options):
    engine = opened(self, role, *options)
    forward = engine.score

    def waiting(*arguments):
        while role == "target" and pause.exists():
            time.sleep(0.01)
        return forward(*arguments)

    engine.score = waiting
    return engine

EngineBundle.open_engine = open_engine
sys.exit(main(sys.argv[1:]))
"""
HERE, ELSEWHERE = "127.0.0.1", "127.0.0.2"  # two addresses of this machine, as two clients have them


class Answer(NamedTuple):
    status: int
    body: bytes
    headers: dict[str, str]


@pytest.fixture(scope="module")
def pause(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pause") / "file"


@pytest.fixture(scope="module")
def server(tiny_bundle: Path, pause: Path) -> Iterator[Served]:
    """At the end it has said nothing but what is expected, however it was attacked."""
    with served(tiny_bundle, *OPTIONS, program=("-c", PAUSABLE, str(pause))) as running:
        yield running
        quiet_end(running)


@contextmanager
def paused(pause: Path) -> Iterator[None]:
    """Requests run and do not end, until the block does."""
    pause.touch()
    try:
        yield
    finally:
        pause.unlink()


def quiet_end(server: Served, code: int = 0) -> None:
    """SIGTERM ends the server in time, with this exit code, no trace and few words."""
    server.process.send_signal(SIGTERM)
    assert server.process.wait(60) == code
    assert server.process.stderr is not None
    said = server.process.stderr.read()
    assert "Traceback" not in said and len(said.splitlines()) < 10, said


def opened(server: Served, said: bytes = b"", source: str = HERE) -> socket.socket:
    """A connection from an address of this machine, on which this was said; the system reads little ahead on it."""
    address = urlsplit(server.url)
    assert address.hostname is not None and address.port is not None
    client = socket.create_connection((address.hostname, address.port), timeout=30, source_address=(source, 0))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.sendall(said)
    return client


def posted(body: dict[str, object]) -> bytes:
    content = json.dumps(body).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(content) + content


def answer_of(client: socket.socket) -> Answer:
    with http.client.HTTPResponse(client) as response:
        response.begin()
        return Answer(response.status, response.read(), {name.lower(): value for name, value in response.getheaders()})


def asked(server: Served, said: bytes, source: str = HERE) -> Answer:
    with opened(server, said, source) as client:
        return answer_of(client)


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def files_of(server: Served) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def serves_everybody(server: Served) -> None:
    for path in ("/health", "/health/ready", "/metrics", "/v1/models"):
        assert asked(server, get(path)).status == 200, path
    answer = asked(server, posted(SHORT))
    assert answer.status == 200 and json.loads(answer.body)["usage"]["completion_tokens"] == 3


@contextmanager
def flood(server: Served, kind: str, number: int) -> Iterator[list[socket.socket]]:
    """Many connections that do one thing wrong, until the end of the block."""
    said = {
        "idle": b"",
        "half a head": b"POST /v1/completions HTTP/1.1\r\nHost: loc",
        "half a body": HEAD + b"Content-Length: 100\r\n\r\n{",
        "no end of chunks": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 50,
        "waits for 100": HEAD + b"Content-Length: 100\r\nExpect: 100-continue\r\n\r\n",
        "answered, then idle": MODELS,
        "unread answers": get("/openapi.json") * 30,
    }[kind]
    with ExitStack() as stack:
        yield [stack.enter_context(opened(server, said)) for _ in range(number)]


FLOODS = (
    "idle",
    "half a head",
    "half a body",
    "no end of chunks",
    "waits for 100",
    "answered, then idle",
    "unread answers",
)


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


def test_when_every_connection_is_busy_the_state_can_still_be_asked_for(server: Served, pause: Path) -> None:
    with ExitStack() as stack:
        with paused(pause):
            busy = [stack.enter_context(opened(server, posted(SHORT))) for _ in range(ROOM - 1)]
            wait_for(lambda: server.metric(WAITING) == ROOM - 2, seconds=30)
            while asked(server, MODELS).status != 503:  # asking costs the last one its connection if it is not read yet
                last = stack.enter_context(opened(server, posted(SHORT)))
                time.sleep(0.3)
            busy.append(last)
            with flood(server, "idle", 2 * RESERVE):  # the longest idle ones make room in the reserve, too
                for path in ("/health", "/health/ready", "/metrics"):
                    answer = asked(server, get(path))
                    assert answer.status == 200 and answer.headers["connection"] == "close"
                for said in (MODELS, posted(SHORT), get("/nothing")):
                    refused = asked(server, said)
                    assert refused.status == 503 and refused.headers["retry-after"] == "1"
                    assert refused.headers["connection"] == "close"
                    assert json.loads(refused.body)["error"]["code"] == "too_many_connections"
        for client in busy:  # and none of them lost its connection
            assert json.loads(answer_of(client).body)["usage"]["completion_tokens"] == 3
    serves_everybody(server)


def test_a_storm_of_disconnects_leaves_nothing_behind(server: Served) -> None:
    reset = struct.pack("ii", 1, 0)
    whole = posted({**LONG, "n": 2})
    for number in range(120):
        with opened(server, (whole, whole[:-3], HEAD, posted({**LONG, "stream": True}))[number % 4]) as client:
            if number % 3:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    wait_for(lambda: server.idle, seconds=60)
    serves_everybody(server)


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


ODD = {
    "two lengths": (HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc", 400),
    "a length of 20 digits": (HEAD + b"Content-Length: 99999999999999999999\r\n\r\n", 413),
    "too long, asking before": (HEAD + b"Content-Length: 30000000\r\nExpect: 100-continue\r\n\r\n", 413),
    "length and chunks": (HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "a bad chunk": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\nzz\r\n", 400),
    "a bad chunk after the answer": (
        b"POST /version HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n",
        405,
    ),
    "nonsense after a request": (get("/health") + b"nonsense\r\n\r\n", 200),
    "a thousand pipelined": (get("/version") * 1000, 200),
    "no host": (b"GET /v1/models HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", 400),
    "HTTP/1.0": (b"GET /v1/models HTTP/1.0\r\n\r\n", 200),
    "another host": (b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
    "health of another host": (b"GET /health HTTP/1.1\r\nHost: 10.0.0.7:8000\r\n\r\n", 200),
    "a target with a host": (b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    "a WebSocket": (
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n",
        200,
    ),
    "a tunnel": (b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    "a trace": (b"TRACE /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
    "options of everything": (b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    "a long address": (get("/" + "a" * 15_000), 404),
    "endless address": (b"GET /" + b"a" * 100_000, 400),
    "a long method": (b"A" * 15_000 + b" / HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    "many headers": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a:\r\n" * 3_000 + b"\r\n", 200),
    "endless headers": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 20_000, 400),
    "no letters in an address": (get("/%00%ff%0a"), 404),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_requests_are_answered_and_hold_nothing(server: Served, name: str) -> None:
    said, status = ODD[name]
    with opened(server) as client:
        try:
            client.sendall(said)
            answer = answer_of(client)
        except ConnectionError:  # it was closed before it could say all
            assert name.startswith("endless")
            return
        assert answer.status == status and len(answer.body) < 10_000
        if name == "a bad chunk after the answer":  # once a trace in the log: the answer was given already
            client.sendall(b"zz\r\n")
            assert client.recv(1) == b""
    assert server.idle
    serves_everybody(server)


@pytest.mark.skipif(not LINUX, reason="other systems have one loopback address")
def test_forged_names_and_addresses_gain_a_client_nothing(server: Served, pause: Path) -> None:
    """Its `user`s and whatever it says of X-Forwarded-For are its own affair: another waits for one text of it."""
    with ExitStack() as stack:
        with paused(pause):
            for number in range(16):
                forged = posted({**LONG, "max_tokens": 100, "user": (ELSEWHERE, f"u{number}")[number % 2]})
                forged = forged.replace(b"\r\n", b"\r\nX-Forwarded-For: 10.0.0.%d\r\n" % number, 1)
                stack.enter_context(opened(server, forged))
            wait_for(lambda: server.metric(WAITING) == 15, seconds=30)
            victim = stack.enter_context(opened(server, posted(SHORT), ELSEWHERE))
            wait_for(lambda: server.metric(WAITING) == 16, seconds=30)
        assert answer_of(victim).status == 200
        assert server.metric(WAITING) >= 8  # fourteen, but for the time it takes to ask
    wait_for(lambda: server.idle, seconds=30)


@pytest.mark.skipif(not LINUX, reason="other systems have one loopback address")
def test_a_client_that_fills_its_share_leaves_places_for_others(server: Served, pause: Path) -> None:
    with ExitStack() as stack:
        with paused(pause):
            many = stack.enter_context(opened(server, posted({**SHORT, "n": 32})))
            wait_for(lambda: server.metric(WAITING) == 31, seconds=30)
            refused = asked(server, posted(SHORT))
            assert refused.status == 429 and b"of this client are waiting" in refused.body
            other = stack.enter_context(opened(server, posted({**SHORT, "n": 15}), ELSEWHERE))
            wait_for(lambda: server.metric(WAITING) == 46, seconds=30)
        assert (answer_of(many).status, answer_of(other).status) == (200, 200)


def test_a_kept_connection_waits_for_no_acknowledgement(server: Served) -> None:
    """Without TCP_NODELAY every answer but the first takes 40 ms; the fastest of 40 shows it on a busy machine, too."""
    with opened(server) as client:
        seconds = []
        for _ in range(40):
            begun = time.perf_counter()
            client.sendall(get("/health"))
            assert answer_of(client).status == 200
            seconds.append(time.perf_counter() - begun)
    assert min(seconds[1:]) < 0.03


def test_connections_inherit_that_nothing_is_held_back() -> None:
    with http_server.listen(HERE, 0) as listener, socket.create_connection(listener.getsockname()[:2]):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


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
        served(tiny_bundle, *SLOW, *load, *options, program=("-c", PAUSABLE, str(pause))) as running,
        ExitStack() as stack,
    ):
        assert asked(running, forwarded("192.0.2.1", SHORT, key="wrong")).status == 401
        assert asked(running, forwarded("192.0.2.1", SHORT, host="evil.example")).status == 421
        with paused(pause):
            many = stack.enter_context(opened(running, forwarded("192.0.2.1", {**SHORT, "n": 6})))
            wait_for(lambda: running.metric(WAITING) == 5, seconds=30)
            assert asked(running, forwarded("192.0.2.1", SHORT)).status == 429
            other = stack.enter_context(opened(running, forwarded("192.0.2.2", SHORT)))
            wait_for(lambda: running.metric(WAITING) == 6, seconds=30)
        assert (answer_of(many).status, answer_of(other).status) == (200, 200)
        quiet_end(running)


def test_sigterm_amid_every_flood_ends_the_server(tiny_bundle: Path) -> None:
    options = (*SLOW, "--max-running", "1", "--max-connections", str(8 * len(FLOODS)))
    with served(tiny_bundle, *options) as running, ExitStack() as stack:
        for kind in FLOODS:
            stack.enter_context(flood(running, kind, 8))
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
