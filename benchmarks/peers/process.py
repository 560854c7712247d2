"""Peers' programs as the driver sees them: started, asked, ended; and who else used the processor meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers.protocol import Generation, Options
from draftwood.models.errors import RequestError

ROOT = Path(__file__).resolve().parents[2]
SETUP = ROOT / "benchmarks" / "peers" / "setup"


class Program(NamedTuple):
    """A peer's module, and the precisions it has on a CPU."""

    module: str
    precisions: tuple[str, ...]


PROGRAMS = {
    "draftwood": Program("draftwood", ("fp32", "int8", "int4")),
    "huggingface": Program("huggingface", ("fp32", "bf16")),
    "llama.cpp": Program("llama_cpp", ("fp32", "bf16", "int8", "int4")),
    "onnxruntime-genai": Program("onnxruntime_genai", ("fp32", "int8", "int4")),
    "openvino-genai": Program("openvino_genai", ("fp32", "int8", "int4")),
}


class PeerError(Exception):
    """A peer could not load or answer, in its own words."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One peer at one precision. name: a key of PROGRAMS, perhaps with a variant: "draftwood/openvino"."""

    name: str
    precision: str

    @property
    def peer(self) -> str:
        return self.name.partition("/")[0]

    @property
    def variant(self) -> str:
        return self.name.partition("/")[2]


def entries(names: list[str], precisions: list[str]) -> list[Entry]:
    """Every peer at every precision it has. Raises RequestError that lists the peers."""
    found = []
    for name in names:
        program = PROGRAMS.get(Entry(name, "").peer)
        if program is None:
            raise RequestError(f"{name!r} is not a peer; choose of {', '.join(PROGRAMS)}")
        found += [Entry(name, precision) for precision in precisions if precision in program.precisions]
    return found


def without(chosen: Sequence[Entry], left_out: Iterable[str]) -> list[Entry]:
    """The entries but those named as "NAME:PRECISION". Raises RequestError for one that is not among them."""
    named = {f"{entry.name}:{entry.precision}": entry for entry in chosen}
    for name in left_out:
        if named.pop(name, None) is None:
            raise RequestError(f"{name!r} is no entry of this run; choose of {', '.join(named)}")
    return list(named.values())


def command_for(entry: Entry, options: Options) -> list[str]:
    """How to start its program: with the interpreter of its own environment, or with this one for Draftwood.

    Raises PeerError naming the script that makes the environment.
    """
    python = options.work / "venv" / "bin" / "python"
    if entry.peer == "draftwood":
        python = Path(sys.executable)
    elif not python.is_file():
        raise PeerError(f"{entry.peer} is not set up: sh {SETUP / entry.peer}.sh {options.work.parent}")
    return [str(python), "-m", f"benchmarks.peers.programs.{PROGRAMS[entry.peer].module}", *options.to_arguments()]


class PeerProcess:
    """One program, loaded. Raises PeerError when it does not start."""

    def __init__(self, command: list[str], log: Path) -> None:
        """log: file for what it writes besides answers."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
            )
        self._log = log
        try:
            hello = self._read()
        except PeerError:
            self.close()
            raise
        self.version: str = hello["version"]
        self.methods: list[str] = hello["methods"]

    def generate(self, method: str, prompt: list[int], max_tokens: int) -> Generation:
        """Raises PeerError with what the peer complains of."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"method": method, "prompt": prompt, "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        return Generation(**self._read())

    def processor_seconds(self) -> float:
        """What it and its children have used so far."""
        return sum(map(used_by, [self._process.pid, *children_of(self._process.pid)]))

    def close(self) -> None:
        """End it and wait for its end."""
        with self._process:  # closes the pipes: its requests are over
            pass

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"ended without an answer; see {self._log}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{answer['error']}; see {self._log}")
        return answer


def used_by(pid: int) -> float:
    """Processor seconds of a process, 0 for one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def used_by_all() -> float:
    """Processor seconds of the whole machine so far; 0 where /proc does not tell."""
    try:
        user, nice, system = Path("/proc/stat").read_text().split()[1:4]
    except OSError:
        return 0.0
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")
