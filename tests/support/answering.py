"""Small HTTP servers in this process, which stand for others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class QuietHandler(BaseHTTPRequestHandler):
    """Says no word about a request."""

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["content-length"]))

    def reply(self, content: bytes = b"", status: int = 200, headers: Iterable[tuple[str, str]] = ()) -> None:
        self.send_response(status)
        for name, value in (*headers, ("content-length", str(len(content)))):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def answering(server: ThreadingHTTPServer) -> Iterator[str]:
    """The address of a server that answers until the end of the block."""
    with server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
