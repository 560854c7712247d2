"""Invalid and unusual HTTP requests against a real server process: each is answered and leaves nothing behind."""

from __future__ import annotations

import socket
import time

import pytest
from connections import DOORS, HEAD, HERE, answer_of, get, opened, serves_everybody
from serving import Served

from draftwood.runtime.serving.http import server as http_server

ODD = {
    "two lengths": (HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc", 400),
    "a length of 20 digits": (HEAD + b"Content-Length: 99999999999999999999\r\n\r\n", 413),
    "too long, asking before": (HEAD + b"Content-Length: 30000000\r\nExpect: 100-continue\r\n\r\n", 413),
    "length and chunks": (HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "a slash after the address": (get("/v1/models/"), 404),
    "a bad chunk": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\nzz\r\n", 400),
    "a bad chunk after the answer": (
        b"POST /version HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n",
        405,
    ),
    "nonsense after a request": (get("/health") + b"nonsense\r\n\r\n", 200),
    "a thousand pipelined": (get("/version") * 1000, 200),
    "no host": (b"GET /v1/models HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "a method alone": (b"GET\r\n\r\n", 400),
    "a negative length": (HEAD + b"Content-Length: -5\r\n\r\n", 400),
    "an unknown encoding": (HEAD + b"Content-Encoding: x\r\nContent-Length: 3\r\n\r\n\x1f\x8b\x08", 400),
    "HTTP/1.0": (b"GET /v1/models HTTP/1.0\r\n\r\n", 200),
    "another host": (b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
    "metrics of another host": (b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
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
    "a long method": (b"A" * 15_000 + b" / HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
    "many headers": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a:\r\n" * 3_000 + b"\r\n", 200),
    "endless headers": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 20_000, 400),
    "no letters in an address": (get("/%00%ff%0a"), 404),
}


ODD |= {
    f"{name} to {path}": (ODD[name][0].replace(b"/v1/completions", path.encode()), ODD[name][1])
    for name in ("a length of 20 digits", "too long, asking before", "length and chunks", "a bad chunk")
    for path in DOORS
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


@pytest.mark.parametrize("address", [b"POST /version", b"OPTIONS /v1/models", b"POST /v1/completions"])
def test_a_request_of_two_lengths_ends_its_connection(server: Served, address: bytes) -> None:
    """What comes after it may be a request to this server, and a part of its body to a proxy before it."""
    both = b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    with opened(server) as client:
        client.sendall(address + both + get("/health"))
        answer = answer_of(client)
        assert answer.status == 400 and b"send one of them" in answer.body
        assert client.recv(1) == b""


def test_a_kept_connection_waits_for_no_acknowledgement(server: Served) -> None:
    """Without TCP_NODELAY every answer but the first takes 40 ms; one of thousands that takes less shows it."""

    def seconds() -> float:
        begun = time.perf_counter()
        client.sendall(get("/health"))
        assert answer_of(client).status == 200
        return time.perf_counter() - begun

    with opened(server) as client:
        seconds()
        assert any(seconds() < 0.03 for _ in range(5000))


def test_connections_inherit_that_nothing_is_held_back() -> None:
    with http_server.bind(HERE, 0) as listener:
        with pytest.raises(ConnectionRefusedError):  # while the model is opened
            socket.create_connection(listener.getsockname()[:2])
        http_server.listen(listener)
        with socket.create_connection(listener.getsockname()[:2]), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
