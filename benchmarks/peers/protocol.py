"""The protocol between the driver and a peer's program: JSON lines on the program's stdin and stdout.

When the program has loaded, it writes {"version": ..., "methods": [...], "at_a_time": N}. To every request
{"method": "plain", "prompts": [[ids], ...], "max_tokens": N} it answers {"texts": [[ids], ...], "seconds": s,
"counters": {...}} or {"error": text}. The texts of one request are written at the same time. The program ends at the
end of stdin.

A program runs in the environment of its peer, so this file uses the standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TextIO

PLAIN = "plain"
MANY = 256  # texts at the same time, of peers that batch; no setting asks for more
FULL_DRAFT = "draft-full"


class Generation(NamedTuple):
    """The greedy continuations of prompts that were given at the same time.

    texts: token ids of the outputs; generation continues after an end of text if the peer can do that. seconds: from
    the prompts' token ids to the last token id of the last text, by the clock. counters: those of "drafted", "accepted"
    (tokens) and "target_passes" that the peer reports, each the sum over the texts.
    """

    texts: list[list[int]]
    seconds: float
    counters: dict[str, float]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.texts))


class Peer(Protocol):
    """One peer that has loaded a pair. version: of the package. methods: the plain one first. at_a_time: the largest
    number of texts that it can write at the same time."""

    version: str
    methods: list[str]
    at_a_time: int

    def generate(self, method: str, prompts: list[list[int]], max_tokens: int) -> Generation: ...


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """The options of a peer's program.

    pair: a folder with Hugging Face folders `target` and `draft`. If the draft's output vocabulary is trimmed, the same
    draft with all outputs is the folder `draft-full`. precision: of the weights of both. work: the peer's own folder,
    for converted models. draft_tokens: lengths of a proposal, one method each. variant: names one of the ways to build
    the peer; "" is the usual one.
    """

    pair: Path
    precision: str
    work: Path
    threads: int
    draft_tokens: tuple[int, ...]
    variant: str = ""

    @classmethod
    def parse(cls, arguments: list[str]) -> PeerOptions:
        parser = argparse.ArgumentParser()
        parser.add_argument("--pair", type=Path, required=True)
        parser.add_argument("--precision", required=True)
        parser.add_argument("--work", type=Path, required=True)
        parser.add_argument("--threads", type=int, required=True)
        parser.add_argument("--draft-tokens", required=True)
        parser.add_argument("--variant", default="")
        args = parser.parse_args(arguments)
        lengths = tuple(int(length) for length in args.draft_tokens.split(","))
        return cls(args.pair, args.precision, args.work, args.threads, lengths, args.variant)

    def to_arguments(self) -> list[str]:
        lengths = ",".join(map(str, self.draft_tokens))
        fields = {"pair": self.pair, "precision": self.precision, "work": self.work, "threads": self.threads}
        named = [text for name, value in fields.items() for text in (f"--{name}", str(value))]
        return [*named, "--draft-tokens", lengths, "--variant", self.variant]

    @property
    def checkpoints(self) -> dict[str, Path]:
        """The folders of target and draft, by role, for programs that cannot load a trimmed output vocabulary."""
        full = self.pair / FULL_DRAFT
        return {"target": self.pair / "target", "draft": full if full.is_dir() else self.pair / "draft"}

    def methods(self, *kinds: str) -> list[str]:
        """ "plain", and "kind:length" for every kind and length."""
        return [PLAIN, *(f"{kind}:{length}" for kind in kinds for length in self.draft_tokens)]

    def convert_once(self, convert: Callable[[Path], object]) -> Path:
        """The folder with the pair in the peer's own format. `convert` fills it, unless an earlier run did.

        The folder's name contains a digest of sizes and times of the pair's files: a changed pair gets a new folder.
        """
        kinds = (".json", ".safetensors")
        folders = dict.fromkeys((self.pair / "target", self.pair / "draft", *self.checkpoints.values()))
        found = (file for folder in folders for file in folder.iterdir())
        files = sorted(file for file in found if file.suffix in kinds)
        state = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        digest = hashlib.sha256(repr(state).encode()).hexdigest()[:8]
        folder = self.work / "models" / f"{self.pair.resolve().name}-{digest}-{self.variant}{self.precision}"
        if not folder.exists():
            partial = folder.with_name(f".{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            convert(partial)
            partial.rename(folder)
        return folder


def split_method(method: str) -> tuple[str, int]:
    """ "draft:5" -> ("draft", 5); "plain" -> ("plain", 0)."""
    kind, _, length = method.partition(":")
    return kind, int(length or 0)


def serve(open_peer: Callable[[PeerOptions], Peer]) -> None:
    """Run a peer's program: load, then answer until stdin ends. Output of libraries goes to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        peer = open_peer(PeerOptions.parse(sys.argv[1:]))
    except Exception as error:  # whatever a peer raises, the driver goes on with the others
        write_message(answers, {"error": f"{type(error).__name__}: {error}"})
        raise
    write_message(answers, {"version": peer.version, "methods": peer.methods, "at_a_time": peer.at_a_time})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            generation = peer.generate(request["method"], request["prompts"], request["max_tokens"])
        except Exception as error:
            write_message(answers, {"error": f"{type(error).__name__}: {error}"})
        else:
            write_message(answers, generation._asdict())


def write_message(stream: TextIO, message: object) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()
