"""llama.cpp: one llama-server per method, asked over local connections.

A server's draft and length of a proposal are fixed when it starts, and so is the number of its slots, which is that of
the texts at a time. Weights are memory-mapped, so the servers share them. Key and value caches stay fp16, the default,
at every precision of the weights. Q8_0 and Q4_0 are llama.cpp's own recipes; Q4_0 keeps the vocabulary projection at
6 bits, the variant "pure" does not. The variants "q4_1" and "q4_k_m" are other recipes of four bits. Seconds are those
of the whole requests over open connections. The counter "own_seconds" has the server's own measurement, without HTTP.
"""

from __future__ import annotations

import atexit
import http.client
import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any, NamedTuple

from benchmarks.peers.protocol import MANY, PLAIN, Generation, PeerOptions, serve, split_method

TYPES = {"fp32": "F32", "bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
CONTEXT = 1024  # tokens; a slot has a multiple
SECONDS_TO_LOAD = 120


class Slots(NamedTuple):
    """The room of a server: texts at a time, and tokens of each."""

    number: int
    tokens: int


class LlamaCpp:
    def __init__(self, options: PeerOptions) -> None:
        self._options = options
        self._models = options.convert_once(self._convert)
        self._servers: dict[str, tuple[http.client.HTTPConnection, subprocess.Popen[bytes]]] = {}
        self._slots = Slots(1, CONTEXT)
        atexit.register(self.close)
        shown = subprocess.run([self._program("llama-server"), "--version"], capture_output=True, text=True, check=True)
        self.version = (shown.stdout + shown.stderr).partition("\n")[0]
        self.methods, self.at_a_time = options.methods("draft"), MANY
        self._server(PLAIN)

    def generate(self, method: str, prompts: list[list[int]], max_tokens: int) -> Generation:
        longest = max(map(len, prompts)) + max_tokens
        slots = Slots(len(prompts), CONTEXT * -(-longest // CONTEXT))
        if slots != self._slots:
            self.close()
            self._slots = slots
        first = self._server(method)
        connections = [first, *(http.client.HTTPConnection(first.host, first.port) for _ in prompts[1:])]
        for connection in connections:
            connection.close()  # the server closes idle connections
            connection.connect()
        bodies = [json.dumps(self._request(prompt, max_tokens)) for prompt in prompts]
        with ThreadPoolExecutor(len(prompts)) as clients:
            start = perf_counter()
            replies = list(clients.map(lambda one, body: post(one, "/completion", body), connections, bodies))
            seconds = perf_counter() - start
        texts = [self._read_tokens(one, reply) for one, reply in zip(connections, replies, strict=True)]
        for connection in connections[1:]:
            connection.close()
        return Generation(texts, seconds, count([reply["timings"] for reply in replies]))

    def close(self) -> None:
        for connection, process in self._servers.values():
            connection.close()
            process.terminate()
            process.wait()
        self._servers = {}

    def _request(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        # ignore_eos would forbid the end of text, which changes what is written before it.
        request = {"prompt": prompt, "n_predict": max_tokens, "temperature": 0.0, "samplers": ["temperature"]}
        return request | {"cache_prompt": False, "return_tokens": True, "ignore_eos": False}

    def _read_tokens(self, connection: http.client.HTTPConnection, reply: dict[str, Any]) -> list[int]:
        tokens: list[int] = reply["tokens"]
        return tokens

    def _server(self, method: str) -> http.client.HTTPConnection:
        if method not in self._servers:
            self._servers[method] = self._start(method)
        return self._servers[method][0]

    def _start(self, method: str) -> tuple[http.client.HTTPConnection, subprocess.Popen[bytes]]:
        command = [self._program("llama-server"), "-m", self._models / "target.gguf", *self._arguments(method)]
        command += ["-np", self._slots.number, "-c", self._slots.number * self._slots.tokens]
        command += ["-t", self._options.threads, "-tb", self._options.threads, "--no-warmup", "--log-disable"]
        return start_server(command)

    def _arguments(self, method: str) -> list[object]:
        """Arguments of the server for a method."""
        kind, length = split_method(method)
        if kind == "draft":
            draft = ["-md", self._models / "draft.gguf", "--spec-type", "draft-simple"]
            return [*draft, "--spec-draft-n-max", length]
        if kind != PLAIN:
            raise ValueError(f"method {method!r} is not one of {', '.join(self.methods)}")
        return []

    def _program(self, name: str) -> str:
        return str(self._options.work / "build" / "bin" / name)

    def _converter(self) -> list[str]:
        """The command that converts a Hugging Face folder."""
        return make_converter(Path(sys.executable), self._options.work)

    def _convert(self, folder: Path) -> None:
        variant = self._options.variant
        precision = variant.upper() if variant.startswith("q4_") else TYPES[self._options.precision]
        for role, source in self._options.checkpoints.items():
            whole = folder / f"{role}-F32.gguf"
            convert = [*self._converter(), str(source), "--outfile", str(whole), "--outtype", "f32"]
            subprocess.run(convert, check=True, stdout=sys.stderr)
            if precision == "F32":
                whole.rename(folder / f"{role}.gguf")
                continue
            pure = ["--pure"] if variant == "pure" else []
            quantize = [self._program("llama-quantize"), *pure, str(whole), str(folder / f"{role}.gguf"), precision]
            subprocess.run(quantize, check=True, stdout=sys.stderr)
            whole.unlink()


def make_converter(python: Path, home: Path) -> list[str]:
    """home: llama.cpp's folder, with its source."""
    return [str(python), "-m", "benchmarks.peers.programs.convert_gguf", str(home / "source")]


def start_server(command: Sequence[object]) -> tuple[http.client.HTTPConnection, subprocess.Popen[bytes]]:
    """Start a llama-server on a free port of this machine, and wait until it has loaded. Raises RuntimeError when it
    does not."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([*map(str, command), "--host", "127.0.0.1", "--port", str(port)], stdout=sys.stderr)
    connection = http.client.HTTPConnection("127.0.0.1", port)
    deadline = monotonic() + SECONDS_TO_LOAD
    while not is_healthy(connection):
        if process.poll() is not None or monotonic() > deadline:
            process.kill()
            process.wait()
            shown = " ".join(map(str, command))
            raise RuntimeError(f"this server did not start; its last lines are on stderr: {shown}")
        sleep(0.1)
    return connection, process


def post(connection: http.client.HTTPConnection, path: str, body: str) -> dict[str, Any]:
    """One request. Raises RuntimeError with the server's message."""
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    content = answer.read()
    reply: dict[str, Any] = json.loads(content)
    if answer.status != 200:
        raise RuntimeError(f"llama-server answered {reply}")
    return reply


def count(timings: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The protocol's counters, from what the server reports of each request."""
    counters = {"own_seconds": max((each["prompt_ms"] + each["predicted_ms"]) / 1e3 for each in timings)}
    if all("draft_n" in each for each in timings):
        counters["drafted"] = sum(each["draft_n"] for each in timings)
        counters["accepted"] = sum(each["draft_n_accepted"] for each in timings)
    return counters


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
