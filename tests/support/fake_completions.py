"""A completions server that answers every prompt with the same text; run with --host and --port."""

from __future__ import annotations

import argparse
import json
from http.server import ThreadingHTTPServer

from answering import QuietHandler

TEXT = "always this"


class Handler(QuietHandler):
    def do_GET(self) -> None:
        self.reply(b"ok")

    def do_POST(self) -> None:
        self.body()
        chunk = json.dumps({"choices": [{"text": TEXT}]})
        self.reply(f"data: {chunk}\n\ndata: [DONE]\n\n".encode())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    args = parser.parse_args()
    ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()
