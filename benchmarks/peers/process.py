"""The driver's side of the peers' programs: start them, ask them, end them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from os.path import relpath
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.peers.protocol import Generation, PeerOptions
from benchmarks.tools.processor import read_tree_seconds
from draftwood.models.errors import RequestError

ROOT = Path(__file__).resolve().parents[2]
SETUP = ROOT / "benchmarks" / "peers" / "setup"


class Program(NamedTuple):
    """The module of a peer, and its precisions on a CPU. variants: the precisions of those that have others."""

    module: str
    precisions: tuple[str, ...]
    variants: Mapping[str, tuple[str, ...]] = MappingProxyType({})


EVERY = ("fp32", "bf16", "int8", "int4")
RECIPES = MappingProxyType({"pure": ("int4",), "q4_1": ("int4",), "q4_k_m": ("int4",)})
PROGRAMS = {
    "draftwood": Program("draftwood", ("fp32", "int8", "int4"), MappingProxyType({"native": EVERY})),
    "huggingface": Program("huggingface", ("fp32", "bf16")),
    "llama.cpp": Program("llama_cpp", EVERY, RECIPES),
    "ik_llama.cpp": Program("ik_llama_cpp", EVERY, RECIPES),
    "openvino-genai": Program("openvino_genai", ("fp32", "int8", "int4")),
    "vllm": Program("vllm", ("fp32", "bf16")),
}


class PeerError(Exception):
    """A peer could not load or answer; the message is the peer's."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One peer at one precision. name: a key of PROGRAMS, or such a key with a variant: "draftwood/native"."""

    name: str
    precision: str

    @property
    def peer(self) -> str:
        return self.name.partition("/")[0]

    @property
    def variant(self) -> str:
        return self.name.partition("/")[2]


def parse_entries(names: list[str], precisions: list[str]) -> list[Entry]:
    """Every peer at every one of these precisions that it has. Raises RequestError that lists the peers."""
    found = []
    for name in names:
        program = PROGRAMS.get(Entry(name, "").peer)
        if program is None:
            raise RequestError(f"{name!r} is not a peer; choose of {', '.join(PROGRAMS)}")
        own = program.variants.get(Entry(name, "").variant, program.precisions)
        found += [Entry(name, precision) for precision in precisions if precision in own]
    return found


def make_command(entry: Entry, options: PeerOptions) -> list[str]:
    """The command that starts a peer's program, with the interpreter of the peer's environment (Draftwood: this one).

    Raises PeerError that names the script which makes the environment.
    """
    python = options.work / "venv" / "bin" / "python"
    if entry.peer == "draftwood":
        python = Path(sys.executable)
    elif not python.is_file():
        raise PeerError(f"{entry.peer} is not set up: sh {SETUP / entry.peer}.sh {options.work.parent}")
    return [str(python), "-m", f"benchmarks.peers.programs.{PROGRAMS[entry.peer].module}", *options.to_arguments()]


class PeerProcess:
    """One running program. Raises PeerError when it does not start."""

    def __init__(self, command: list[str], log: Path, checkout: Path = ROOT) -> None:
        """log: file for the program's output on stderr. checkout: of this project, where the program runs."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                command, cwd=checkout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
            )
        self._log = log
        try:
            hello = self._read()
        except PeerError:
            self.close()
            raise
        self.version: str = hello["version"]
        self.methods: list[str] = hello["methods"]
        self.at_a_time: int = hello["at_a_time"]

    def generate(self, method: str, prompts: list[list[int]], max_tokens: int) -> Generation:
        """Ask for texts that are written at the same time. Raises PeerError with the peer's message."""
        assert self._process.stdin is not None
        request = json.dumps({"method": method, "prompts": prompts, "max_tokens": max_tokens})
        try:
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
        except OSError as error:  # the program has ended
            raise PeerError(f"ended without an answer; see {relpath(self._log)}") from error
        return Generation(**self._read())

    def processor_seconds(self) -> float:
        """Processor time of the program and its children so far."""
        return read_tree_seconds(self._process.pid)

    def close(self) -> None:
        """End the program and wait for its end."""
        # A program that has ended already leaves a broken pipe.
        with suppress(BrokenPipeError), self._process:  # closes the pipes, which ends the program
            pass

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"ended without an answer; see {relpath(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{answer['error']}; see {relpath(self._log)}")
        return answer
