"""The programs of llama.cpp for tests, named by the file's name: llama-server, llama-quantize, and its converter.

The server counts upwards from a prompt's last token. "ik" in the path makes it answer as ik_llama.cpp's does.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any


def serve(arguments: list[str], ik: bool) -> None:
    options = dict(pairwise(arguments))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer({"status": "ok"})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize":
                self.answer({"tokens": [int(word) for word in request["content"].split()]})
                return
            prompt, count = request["prompt"], request["n_predict"]
            tokens = [prompt[-1] + step for step in range(1, count + 1)]
            timings: dict[str, Any] = {"prompt_ms": 500, "predicted_ms": prompt[-1]}
            if "-md" in options:
                timings |= {"draft_n": 4, "draft_n_accepted": 1}
            content = " ".join(map(str, tokens[: -1 if prompt[-1] == 20 else None]))
            answer = {"content": content, "tokens_predicted": count, "timings": timings}
            self.answer(answer if ik else answer | {"tokens": tokens})

        def answer(self, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *ignored: object) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()


if __name__ == "__main__":
    file, given = Path(sys.argv[0]), sys.argv[1:]
    if given == ["--version"]:
        print("version: fake\nbuilt with nothing")
    elif file.name == "llama-quantize":
        source, output, kind = (argument for argument in given if argument != "--pure")
        Path(output).write_text(f"{kind} of {Path(source).read_text()}", encoding="utf-8")
    elif file.name == "llama-server":
        serve(given, "ik_llama.cpp" in file.parts)
    else:
        checkpoint, _, output, *_ = given
        Path(output).write_text(Path(checkpoint).name, encoding="utf-8")
