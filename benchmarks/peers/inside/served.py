"""A small server of OpenAI's endpoints over a library that has none, as a user would write it: transformers and
OpenVINO GenAI use it. Answers come whole, in one chunk."""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Protocol


class Written(NamedTuple):
    """drafted, accepted: tokens; None where the library does not tell."""

    text: str
    tokens: int
    drafted: int | None = None
    accepted: int | None = None


class Library(Protocol):
    """A loaded model. Threads call both methods."""

    def render(self, messages: list[dict[str, str]]) -> str: ...

    def write(self, prompt: str, body: dict[str, Any]) -> Written:
        """body: the request's max_tokens, temperature and the setting's own fields."""
        ...


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    for name in ("model", "draft", "kind", "host"):
        parser.add_argument(f"--{name}")
    for name in ("port", "threads"):
        parser.add_argument(f"--{name}", type=int)
    return parser


def serve(library: Library, host: str, port: int) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, b"ok", "text/plain")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                prompt = library.render(body["messages"]) if "messages" in body else body["prompt"]
                written = library.write(prompt, body)
            except Exception as error:  # whatever the library raises, the driver shows it
                self.reply(500, f"{type(error).__name__}: {error}".encode(), "text/plain")
                raise
            piece = {"delta": {"content": written.text}} if "messages" in body else {"text": written.text}
            chunk: dict[str, Any] = {"choices": [piece], "usage": {"completion_tokens": written.tokens}}
            if written.drafted is not None:
                chunk["timings"] = {"draft_n": written.drafted, "draft_n_accepted": written.accepted}
            self.reply(200, f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode(), "text/event-stream")

        def log_message(self, *_: object) -> None:
            pass

        def reply(self, status: int, content: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    ThreadingHTTPServer((host, port), Handler).serve_forever()
