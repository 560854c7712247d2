"""Start and stop the servers under load."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.process import PeerError, PeerProcess, make_command, parse_entries
from benchmarks.peers.programs.llama_cpp import start_server
from benchmarks.peers.protocol import PLAIN, PeerOptions
from draftwood.models.errors import RequestError

MODEL = "pair"  # name of the model on every server
OURS, LLAMA_CPP = "draftwood", "llama.cpp"
# Options that turn the prefix cache off. Prompts recur in a load, and every request must read its own.
WITHOUT_CACHE = {OURS: ("--prefix-cache-slots", 0), LLAMA_CPP: ("--no-cache-prompt", "--cache-ram", 0)}
SECONDS_TO_END = 30


@dataclass(frozen=True, slots=True)
class Server:
    """How to start one server. command: accepts --host and --port."""

    peer: str
    method: str
    command: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.peer} {self.method}"


def draftwood_servers(bundle: Path, at_a_time: int, threads: int) -> list[Server]:
    """A plain and a speculative server of the same bundle."""
    serve = [sys.executable, "-m", "draftwood", "serve", bundle, "--served-model-name", MODEL]
    command = tuple(map(str, [*serve, "--max-running", at_a_time, "--threads", threads, *WITHOUT_CACHE[OURS]]))
    return [Server(OURS, PLAIN, (*command, "--no-speculation")), Server(OURS, "speculative", command)]


def llama_cpp_servers(options: PeerOptions, at_a_time: int, context: int) -> list[Server]:
    """A plain server, and one per length of a proposal with the pair's draft. Every slot holds `context` tokens."""
    models = options.convert_once(refuse_conversion)
    program = options.work / "build" / "bin" / "llama-server"
    target = [program, "-m", models / "target.gguf", "--alias", MODEL, "-np", at_a_time, "-c", at_a_time * context]
    threads = ["-t", options.threads, "-tb", options.threads]
    command = tuple(map(str, [*target, *threads, *WITHOUT_CACHE[LLAMA_CPP], "--log-disable"]))
    draft = ("-md", str(models / "draft.gguf"), "--spec-type", "draft-simple", "--spec-draft-n-max")
    drafts = [Server(LLAMA_CPP, f"draft:{n}", (*command, *draft, str(n))) for n in options.draft_tokens]
    return [Server(LLAMA_CPP, PLAIN, command), *drafts]


def prepare_llama_cpp(options: PeerOptions) -> str:
    """Let llama.cpp's program convert the pair, unless an earlier run did. Returns llama.cpp's version.

    Raises RequestError for a precision that llama.cpp lacks, and PeerError that names the script which installs it.
    """
    chosen = parse_entries([LLAMA_CPP], [options.precision])
    if not chosen:
        raise RequestError(f"llama.cpp has no {options.precision} weights: leave --pair out, or take another bundle")
    program = PeerProcess(make_command(chosen[0], options), options.work / "log.txt")
    program.close()
    return program.version


def refuse_conversion(folder: Path) -> None:
    raise PeerError(f"llama.cpp's program did not convert the pair to {folder}")


@contextmanager
def running(server: Server) -> Iterator[str]:
    """The address of a server that runs, from when it is healthy. Raises PeerError when it does not start."""
    try:
        connection, process = start_server(server.command)
    except RuntimeError as error:
        raise PeerError(f"{server.name}: {error}") from error
    try:
        yield f"http://{connection.host}:{connection.port}"
    finally:
        connection.close()
        process.terminate()
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
