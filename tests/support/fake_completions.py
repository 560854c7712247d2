"""A server of OpenAI's endpoints that stands for any program; run with --host and --port. It answers "always this".

Fields of a request: `claimed` is the number of tokens that it claims, `says` another text, `broken` an error.
"""

from __future__ import annotations

import argparse
import json
from http.server import ThreadingHTTPServer
from typing import Any

from answering import QuietHandler

TEXT = "always this"


class Handler(QuietHandler):
    def do_GET(self) -> None:
        self.reply(b"ok")

    def do_POST(self) -> None:
        body = json.loads(self.body())
        if body.get("broken"):
            self.reply(b"no such draft", 500)
            return
        says, tokens = body.get("says", TEXT), body.get("claimed", body["max_tokens"])
        named = "content" if "messages" in body else "text"
        pieces = [{"delta": {named: piece}} if "messages" in body else {named: piece} for piece in (says[:6], says[6:])]
        if "logprobs" in body:
            pieces = [{"logprobs": {"top_logprobs": [{" a": -0.1, " b": -3.0}]}}]
        chunks: list[dict[str, Any]] = [{"choices": [piece]} for piece in pieces]
        chunks[-1] |= {
            "usage": {"completion_tokens": tokens},
            "timings": {"draft_n": tokens, "draft_n_accepted": tokens // 2},
        }
        if not body.get("stream"):
            self.reply(json.dumps(chunks[-1]).encode())
            return
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        self.reply("".join([*lines, "data: [DONE]\n\n"]).encode())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    args = parser.parse_known_args()[0]
    ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()
