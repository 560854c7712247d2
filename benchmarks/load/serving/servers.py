"""The servers under load: how each is started, when it is ready, and how it ends."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

from benchmarks.peers.process import PeerError, PeerProcess, children_of, command_for, entries, used_by
from benchmarks.peers.programs.llama_cpp import healthy
from benchmarks.peers.protocol import PLAIN, Options
from draftwood.models.errors import RequestError

MODEL = "pair"  # what every server calls it
OURS, LLAMA_CPP = "draftwood", "llama.cpp"
# Prompts recur in a load: a server that remembered them would be measured without the prompt's pass.
FORGETFUL = {OURS: ("--prefix-cache-slots", 0), LLAMA_CPP: ("--no-cache-prompt", "--cache-ram", 0)}
HOST = "127.0.0.1"
SECONDS_TO_LOAD, SECONDS_TO_END = 120, 30


@dataclass(frozen=True, slots=True)
class Server:
    """How to start one server. command: takes --host and --port."""

    peer: str
    method: str
    command: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.peer} {self.method}"


class Running(NamedTuple):
    """A server that answers. url: without a path."""

    url: str
    process: subprocess.Popen[bytes]

    def processor_seconds(self) -> float:
        """What it and its children have used so far."""
        return sum(map(used_by, [self.process.pid, *children_of(self.process.pid)]))


def draftwood_servers(bundle: Path, at_a_time: int, threads: int) -> list[Server]:
    """Plain and speculative, over the same bundle."""
    serve = [sys.executable, "-m", "draftwood.cli.main", "serve", bundle, "--served-model-name", MODEL]
    command = tuple(map(str, [*serve, "--max-running", at_a_time, "--threads", threads, *FORGETFUL[OURS]]))
    return [Server(OURS, PLAIN, (*command, "--no-speculation")), Server(OURS, "speculative", command)]


def llama_cpp_servers(options: Options, at_a_time: int, context: int) -> list[Server]:
    """Plain, and with the pair's draft. Every slot has room for `context` tokens."""
    models = options.converted(not_converted)
    program = options.work / "build" / "bin" / "llama-server"
    target = [program, "-m", models / "target.gguf", "--alias", MODEL, "-np", at_a_time, "-c", at_a_time * context]
    threads = ["-t", options.threads, "-tb", options.threads]
    command = tuple(map(str, [*target, *threads, *FORGETFUL[LLAMA_CPP], "--log-disable"]))
    draft = ("-md", str(models / "draft.gguf"), "--spec-type", "draft-simple", "--spec-draft-n-max")
    drafts = [Server(LLAMA_CPP, f"draft:{n}", (*command, *draft, str(n))) for n in options.draft_tokens]
    return [Server(LLAMA_CPP, PLAIN, command), *drafts]


def prepare_llama_cpp(options: Options) -> str:
    """Have the pair converted by its own program, unless an earlier run did. Returns llama.cpp's version.

    Raises RequestError for a precision it does not have, and PeerError that names the script which sets it up.
    """
    chosen = entries([LLAMA_CPP], [options.precision])
    if not chosen:
        raise RequestError(f"llama.cpp has no {options.precision} weights: leave --pair out, or take another bundle")
    program = PeerProcess(command_for(chosen[0], options), options.work / "log.txt")
    program.close()
    return program.version


def not_converted(folder: Path) -> None:
    raise PeerError(f"llama.cpp's program did not convert the pair to {folder}")


@contextmanager
def running(server: Server, log: Path) -> Iterator[Running]:
    """Start it on a free port and wait until it is healthy; it is gone afterwards, whatever happened.

    Raises PeerError when it does not start.
    """
    port = free_port()
    with log.open("ab") as lines:
        command = [*server.command, "--host", HOST, "--port", str(port)]
        process = subprocess.Popen(command, stdout=lines, stderr=lines)
    try:
        wait_until_healthy(server, process, port, log)
        yield Running(f"http://{HOST}:{port}", process)
    finally:
        process.terminate()
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_healthy(server: Server, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    connection = HTTPConnection(HOST, port, timeout=1)
    deadline = monotonic() + SECONDS_TO_LOAD
    while not healthy(connection):
        if process.poll() is not None or monotonic() > deadline:
            raise PeerError(f"{server.name} did not start; see {log}")
        sleep(0.1)
    connection.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
