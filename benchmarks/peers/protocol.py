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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TextIO

PLAIN = "plain"
MANY = 256  # texts at the same time, of peers that batch; no setting asks for more
FULL_DRAFT = "draft-full"


class Generation(NamedTuple):
    """The greedy continuations of prompts that were given at the same time."""

    # Token ids; generation continues after an end of text if the peer can do that.
    texts: list[list[int]]
    # From the prompts' token ids to the last token id of the last text, by the clock.
    seconds: float
    # Those of "drafted", "accepted" (tokens) and "target_passes" that the peer reports, each the sum over the texts.
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
    """The options of a peer's program."""

    # A folder with Hugging Face folders `target` and `draft`, and `draft-full` where the draft's vocabulary is trimmed.
    pair: Path
    # Of the weights of both.
    precision: str
    # The peer's own folder, for converted models.
    work: Path
    threads: int
    # Lengths of a proposal, one method each.
    draft_tokens: tuple[int, ...]
    # Names one of the ways to build the peer; "" is the usual one.
    variant: str = ""

    @classmethod
    def parse(cls, arguments: list[str]) -> PeerOptions:
        parser = argparse.ArgumentParser()
        for name, kind in (("pair", Path), ("precision", str), ("work", Path), ("threads", int), ("draft-tokens", str)):
            parser.add_argument(f"--{name}", type=kind, required=True)
        parser.add_argument("--variant", default="")
        args = vars(parser.parse_args(arguments))
        return cls(**args | {"draft_tokens": tuple(map(int, args["draft_tokens"].split(",")))})

    def to_arguments(self) -> list[str]:
        fields = asdict(self) | {"draft_tokens": ",".join(map(str, self.draft_tokens))}
        return [text for name, value in fields.items() for text in (f"--{name.replace('_', '-')}", str(value))]

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
