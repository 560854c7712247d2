"""A completions server that answers every prompt with the same text; run with --host and --port."""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TEXT = "always this"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer(b"ok")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        chunk = json.dumps({"choices": [{"text": TEXT}]})
        self.answer(f"data: {chunk}\n\ndata: [DONE]\n\n".encode())

    def answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """No word about a request."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    args = parser.parse_args()
    ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()
