"""Connections to a real server process, as attacks open them."""

from __future__ import annotations

import http.client
import json
import socket
import sys
from pathlib import Path
from signal import SIGTERM
from typing import NamedTuple
from urllib.parse import urlsplit

from serving import USER, Served

LINUX = sys.platform == "linux"
ROOM, RESERVE = 40, 16  # connections with requests in progress that the server has, and further ones
SLOW = ("--served-model-name", "small", "--speculative", "chain,budget=fixed")  # drafts in vain: seconds for LONG
OPTIONS = (*SLOW, "--max-running", "1", "--max-waiting", "60", "--max-connections", str(ROOM))
LONG = {"model": "small", "prompt": "hello", "max_tokens": 900, "ignore_eos": True, "temperature": 0}
SHORT = {**LONG, "max_tokens": 3}
SETTINGS: dict[str, object] = {"ignore_eos": True, "temperature": 0}
CHAT: dict[str, object] = {"messages": [USER], "max_tokens": 900, **SETTINGS}
OLLAMA: dict[str, object] = {"model": "small", "options": {"num_predict": 900, **SETTINGS}}
DOORS: dict[str, dict[str, object]] = {  # a long request for each
    "/v1/completions": LONG,
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"input": "hello", "max_output_tokens": 900, **SETTINGS},
    "/infill": {"input_prefix": "hello", "n_predict": 900, **SETTINGS},
    "/api/chat": {**OLLAMA, "messages": [USER]},
    "/api/generate": {**OLLAMA, "prompt": "hello"},
}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
MODELS = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
HERE, ELSEWHERE = "127.0.0.1", "127.0.0.2"  # two addresses of this machine, as two clients have them


class Answer(NamedTuple):
    """An HTTP response. headers: by names in lower case."""

    status: int
    body: bytes
    headers: dict[str, str]


def quiet_end(server: Served, code: int = 0) -> None:
    """SIGTERM ends the server in time, with this exit code, no traceback and a short log."""
    server.process.send_signal(SIGTERM)
    assert server.process.wait(60) == code
    assert server.process.stderr is not None
    said = server.process.stderr.read()
    assert "Traceback" not in said and len(said.splitlines()) < 10, said


def opened(server: Served, said: bytes = b"", source: str = HERE) -> socket.socket:
    """A connection from an address of this machine, on which `said` was sent. Its receive buffer is small."""
    address = urlsplit(server.url)
    assert address.hostname is not None and address.port is not None
    client = socket.create_connection((address.hostname, address.port), timeout=120, source_address=(source, 0))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.sendall(said)
    return client


def posted(body: dict[str, object], path: str = "/v1/completions") -> bytes:
    """A request with this JSON body."""
    content = json.dumps(body).encode()
    return HEAD.replace(b"/v1/completions", path.encode()) + b"Content-Length: %d\r\n\r\n" % len(content) + content


def answer_of(client: socket.socket) -> Answer:
    with http.client.HTTPResponse(client) as response:
        response.begin()
        return Answer(response.status, response.read(), {name.lower(): value for name, value in response.getheaders()})


def asked(server: Served, said: bytes, source: str = HERE) -> Answer:
    """The response to these bytes on a connection of their own."""
    with opened(server, said, source) as client:
        return answer_of(client)


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def files_of(server: Served) -> int:
    """File descriptors that the server process has open."""
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def serves_everybody(server: Served) -> None:
    """Every endpoint answers, and a text is generated."""
    for path in ("/health", "/health/ready", "/metrics", "/v1/models"):
        assert asked(server, get(path)).status == 200, path
    answer = asked(server, posted(SHORT))
    assert answer.status == 200 and json.loads(answer.body)["usage"]["completion_tokens"] == 3
