"""Draftwood itself, through the same decoder as `draftwood bench`. The variant names the backend of the bundle.

The bundle is built, and the costs of its passes are measured, by the two commands a user types: built by the code as it
is, and kept until that changes, since quantising a large target takes minutes; measured on the machine as it is, anew.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

from benchmarks.peers.protocol import Generation, Options, serve
from draftwood import builder, models, plugins
from draftwood.cli.bench import parse_config
from draftwood.models.bindings import DRAFT, TARGET
from draftwood.runtime.bundle import EngineBundle
from draftwood.runtime.cost import assumed, read_costs
from draftwood.runtime.decoder import SpeculativeDecoder
from draftwood.runtime.metrics import SpecDecodeStats
from draftwood.runtime.random import seeded_streams
from draftwood.runtime.sampling import Sampler, SamplingParams

TREES = ("topk:7", "topk:11", "topk:15")  # passes of 8, 12 and 16 rows
CODE = "code"  # beside a kept bundle: a digest of what built it
BUILT_BY = (builder, models, plugins)
SOURCES = (".py", ".c", ".h")
DEFAULT = "auto"  # what a user gets who sets nothing: sizes by the measured costs


class Draftwood:
    def __init__(self, options: Options) -> None:
        backend = options.variant or "onnxruntime"
        output = bundle_of(options, backend)
        draftwood("profile", output, "--threads", options.threads)
        self._bundle = EngineBundle.open(output)
        self._engines = (self._bundle.open_engine(TARGET, options.threads), self._bundle.open_draft(options.threads))
        self._costs = read_costs(output) or assumed(*(engine.spec.model for engine in self._engines))
        self._decoders: dict[str, SpeculativeDecoder] = {}
        self.version = f"draftwood {version('draftwood')}"
        if backend != "native":
            self.version += f", {backend} {version(backend)}"
        self.methods = [*options.methods("chain"), *TREES, DEFAULT]

    def generate(self, method: str, prompt: list[int], max_tokens: int) -> Generation:
        if method not in self._decoders:
            config, length = parse_config(method), self._bundle.manifest.max_length
            self._decoders[method] = SpeculativeDecoder(*self._engines, config, length, (), self._costs)
        stats = SpecDecodeStats()
        start = perf_counter()
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        sampler = Sampler(params, prompt, (), self._engines[0].spec.model.vocab_size)
        for _ in self._decoders[method].generate(prompt, sampler, seeded_streams(0), stats):
            pass
        seconds = perf_counter() - start
        counters: dict[str, float] = {
            "target_passes": stats.target_passes,
            "drafted": stats.num_draft_tokens,
            "accepted": stats.num_accepted_tokens,
        }
        return Generation(list(sampler.output), seconds, counters)


def bundle_of(options: Options, backend: str) -> Path:
    """The pair's bundle as today's code builds it: an earlier run's only if that ran the same code."""
    code = digest_of(file for package in BUILT_BY for folder in package.__path__ for file in Path(folder).rglob("*"))

    def build(folder: Path) -> None:
        pair = ["--target", options.pair / TARGET, "--draft", options.pair / DRAFT, "--output", folder / "bundle"]
        draftwood("build", *pair, "--backend", backend, "--precision", options.precision, "--no-profile")
        (folder / CODE).write_text(code, encoding="utf-8")

    folder = options.converted(build)
    if (folder / CODE).read_text(encoding="utf-8") != code:
        shutil.rmtree(folder)
        folder = options.converted(build)
    return folder / "bundle"


def digest_of(files: Iterable[Path]) -> str:
    """Of the names and contents of source files."""
    digest = hashlib.sha256()
    for file in sorted(file for file in files if file.suffix in SOURCES):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def draftwood(*arguments: object) -> None:
    """A command of its own process, so that what building needs is not held while decoding is measured."""
    command = [sys.executable, "-m", "draftwood.cli.main", *map(str, arguments)]
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    sys.stderr.write(done.stderr)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2])


if __name__ == "__main__":
    serve(Draftwood)
