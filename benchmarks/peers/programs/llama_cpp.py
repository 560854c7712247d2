"""llama.cpp: one llama-server per method, asked over a local connection.

A server's draft and length of a proposal are fixed when it starts. Weights are memory-mapped, so the servers share
them. Key and value caches stay fp16, the default, at every precision of the weights. Q8_0 and Q4_0 are llama.cpp's own
recipes; Q4_0 keeps the vocabulary projection at 6 bits, the variant "pure" does not. Seconds are those of the whole
request over an open connection. The counter "own_seconds" has the server's own measurement, without HTTP.
"""

from __future__ import annotations

import atexit
import http.client
import json
import socket
import subprocess
import sys
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any

from benchmarks.peers.protocol import PLAIN, Generation, PeerOptions, serve, split_method

TYPES = {"fp32": "F32", "bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
CONTEXT = 1024
SECONDS_TO_LOAD = 120


class LlamaCpp:
    def __init__(self, options: PeerOptions) -> None:
        self._options = options
        self._models = options.convert_once(self._convert)
        self._servers: dict[str, tuple[http.client.HTTPConnection, subprocess.Popen[bytes]]] = {}
        atexit.register(self.close)
        shown = subprocess.run([self._program("llama-server"), "--version"], capture_output=True, text=True, check=True)
        self.version = (shown.stdout + shown.stderr).partition("\n")[0]
        self.methods = options.methods("draft")
        self._server(PLAIN)

    def generate(self, method: str, prompt: list[int], max_tokens: int) -> Generation:
        connection = self._server(method)
        # ignore_eos would forbid the end of text, which changes what is written before it.
        request = {"prompt": prompt, "n_predict": max_tokens, "temperature": 0.0, "samplers": ["temperature"]}
        body = json.dumps(request | {"cache_prompt": False, "return_tokens": True, "ignore_eos": False})
        connection.close()  # the server closes idle connections
        connection.connect()
        start = perf_counter()
        connection.request("POST", "/completion", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
        seconds = perf_counter() - start
        reply: dict[str, Any] = json.loads(content)
        if answer.status != 200:
            raise RuntimeError(f"llama-server answered {reply}")
        timings = reply["timings"]
        own = (timings["prompt_ms"] + timings["predicted_ms"]) / 1e3
        counters = {"own_seconds": own}
        if "draft_n" in timings:
            counters |= {"drafted": timings["draft_n"], "accepted": timings["draft_n_accepted"]}
        return Generation(reply["tokens"], seconds, counters)

    def close(self) -> None:
        for _, process in self._servers.values():
            process.terminate()
            process.wait()

    def _server(self, method: str) -> http.client.HTTPConnection:
        if method not in self._servers:
            self._servers[method] = self._start(method)
        return self._servers[method][0]

    def _start(self, method: str) -> tuple[http.client.HTTPConnection, subprocess.Popen[bytes]]:
        kind, length = split_method(method)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        threads = str(self._options.threads)
        arguments = ["-m", self._models / "target.gguf", "-c", CONTEXT, "-np", 1, "-t", threads, "-tb", threads]
        if kind == "draft":
            draft = ["-md", self._models / "draft.gguf", "--spec-type", "draft-simple"]
            arguments += [*draft, "--spec-draft-n-max", length]
        elif kind != PLAIN:
            raise ValueError(f"method {method!r} is not one of {', '.join(self.methods)}")
        arguments += ["--host", "127.0.0.1", "--port", port, "--no-warmup", "--log-disable"]
        process = subprocess.Popen([self._program("llama-server"), *map(str, arguments)], stdout=sys.stderr)
        connection = http.client.HTTPConnection("127.0.0.1", port)
        deadline = monotonic() + SECONDS_TO_LOAD
        while not is_healthy(connection):
            if process.poll() is not None or monotonic() > deadline:
                process.kill()
                raise RuntimeError(f"llama-server for {method} did not start; its last lines are on stderr")
            sleep(0.1)
        return connection, process

    def _program(self, name: str) -> str:
        return str(self._options.work / "build" / "bin" / name)

    def _convert(self, folder: Path) -> None:
        precision = TYPES[self._options.precision]
        for role in ("target", "draft"):
            whole = folder / f"{role}-F32.gguf"
            source = self._options.pair / role
            converter = [sys.executable, "-m", "benchmarks.peers.programs.convert_gguf"]
            convert = [*converter, str(self._options.work / "source"), str(source)]
            subprocess.run([*convert, "--outfile", str(whole), "--outtype", "f32"], check=True, stdout=sys.stderr)
            if precision == "F32":
                whole.rename(folder / f"{role}.gguf")
                continue
            pure = ["--pure"] if self._options.variant == "pure" else []
            quantize = [self._program("llama-quantize"), *pure, str(whole), str(folder / f"{role}.gguf"), precision]
            subprocess.run(quantize, check=True, stdout=sys.stderr)
            whole.unlink()


def is_healthy(connection: http.client.HTTPConnection) -> bool:
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
    except (OSError, http.client.HTTPException):
        connection.close()
        return False
    return answer.status == 200


if __name__ == "__main__":
    serve(LlamaCpp)
