"""Draftwood itself, through the same decoder as `draftwood bench`. The variant names the backend of the bundle.

The bundle is built, and the costs of its passes are measured, by the two commands a user types and anew each time: by
the code as it is, on the machine as it is.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from draftwood.cli.bench import parse_config
from draftwood.models.bindings import DRAFT, TARGET
from draftwood.runtime.bundle import EngineBundle
from draftwood.runtime.cost import assumed, read_costs
from draftwood.runtime.decoder import SpeculativeDecoder
from draftwood.runtime.metrics import SpecDecodeStats
from draftwood.runtime.random import seeded_streams
from draftwood.runtime.sampling import Sampler, SamplingParams
from peers.protocol import Generation, Options, serve

TREE = "topk:7"  # one pass of 8 rows
DEFAULT = "auto"  # what a user gets who sets nothing: sizes by the measured costs


class Draftwood:
    def __init__(self, options: Options) -> None:
        backend = options.variant or "onnxruntime"
        options.work.mkdir(parents=True, exist_ok=True)
        self._folder = TemporaryDirectory(dir=options.work)
        output = Path(self._folder.name) / "bundle"
        pair = ["--target", options.pair / TARGET, "--draft", options.pair / DRAFT, "--output", output]
        draftwood("build", *pair, "--backend", backend, "--precision", options.precision)
        draftwood("profile", output, "--threads", options.threads)
        self._bundle = EngineBundle.open(output)
        self._engines = (self._bundle.open_engine(TARGET, options.threads), self._bundle.open_engine(DRAFT, 1))
        self._costs = read_costs(output) or assumed(*(engine.spec.model for engine in self._engines))
        self._decoders: dict[str, SpeculativeDecoder] = {}
        self.version = f"draftwood {version('draftwood')}"
        if backend != "native":
            self.version += f", {backend} {version(backend)}"
        self.methods = [*options.methods("chain"), TREE, DEFAULT]

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


def draftwood(*arguments: object) -> None:
    """A command of its own process, so that what building needs is not held while decoding is measured."""
    command = [sys.executable, "-m", "draftwood.cli.main", *map(str, arguments)]
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    sys.stderr.write(done.stderr)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2])


if __name__ == "__main__":
    serve(Draftwood)
