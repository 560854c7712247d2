"""The protocol between the driver and a peer's program: JSON lines on the program's stdin and stdout.

When the program has loaded, it writes {"version": ..., "methods": [...]}. To every request
{"method": "plain", "prompt": [ids], "max_tokens": N} it answers {"tokens": [ids], "seconds": s, "counters": {...}} or
{"error": text}. It ends at the end of stdin.

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


class Generation(NamedTuple):
    """The greedy continuation of one prompt.

    tokens: of the output; generation continues after an end of text if the peer can do that. seconds: from the prompt's
    token ids to the last token id, by the clock. counters: those of "drafted", "accepted" (tokens) and "target_passes"
    that the peer reports.
    """

    tokens: list[int]
    seconds: float
    counters: dict[str, float]


class Peer(Protocol):
    """One peer that has loaded a pair. version: of the package. methods: the plain one first."""

    version: str
    methods: list[str]

    def generate(self, method: str, prompt: list[int], max_tokens: int) -> Generation: ...


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """The options of a peer's program.

    pair: a folder with Hugging Face folders `target` and `draft`. precision: of the weights of both. work: the peer's
    own folder, for converted models. draft_tokens: lengths of a proposal, one method each. variant: names one of the
    ways to build the peer; "" is the usual one.
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

    def methods(self, *kinds: str) -> list[str]:
        """ "plain", and "kind:length" for every kind and length."""
        return [PLAIN, *(f"{kind}:{length}" for kind in kinds for length in self.draft_tokens)]

    def convert_once(self, convert: Callable[[Path], object]) -> Path:
        """The folder with the pair in the peer's own format. `convert` fills it, unless an earlier run did.

        The folder's name contains a digest of sizes and times of the pair's files: a changed pair gets a new folder.
        """
        kinds = (".json", ".safetensors")
        found = (file for role in ("target", "draft") for file in (self.pair / role).iterdir())
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
    write_message(answers, {"version": peer.version, "methods": peer.methods})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            generation = peer.generate(request["method"], request["prompt"], request["max_tokens"])
        except Exception as error:
            write_message(answers, {"error": f"{type(error).__name__}: {error}"})
        else:
            write_message(answers, generation._asdict())


def write_message(stream: TextIO, message: object) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()
