"""Draftwood, with the decoder of `draftwood bench`; AsyncLLM writes several texts at a time. The variant names the
backend of the bundle.

The program runs the commands of a user: `draftwood build`, then `draftwood profile`. A bundle is kept until the code
that built it changes, since quantising a large target takes minutes. Its costs are measured anew in every run.
"""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

from benchmarks.peers.protocol import MANY, Generation, PeerOptions, serve
from draftwood import builder, models, plugins
from draftwood.models.bindings import DRAFT, TARGET
from draftwood.runtime import LLM, AsyncLLM, StreamChunk
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.bundle.costs import assumed_costs, read_costs
from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation.named import parse

TREES = ("topk:7", "topk:11", "topk:15")  # passes of 8, 12 and 16 rows
BUILDING_PACKAGES = (builder, models, plugins)
SOURCES = (".py", ".c", ".h")
DEFAULT_METHOD = "auto"  # the default of a user: sizes planned by the measured costs


class Draftwood:
    def __init__(self, options: PeerOptions) -> None:
        backend = options.variant or "onnxruntime"
        output = build_bundle(options, backend)
        run_draftwood("profile", output, "--threads", options.threads)
        self._bundle = EngineBundle.open(output)
        self._engines = (self._bundle.open_engine(TARGET, options.threads), self._bundle.open_draft(options.threads))
        self._costs = read_costs(output) or assumed_costs(self._engines[0].spec, self._engines[1].spec)
        self._decoders: dict[str, SpeculativeDecoder] = {}
        self._threads = options.threads
        self._llm: LLM | None = None
        self._served: AsyncLLM | None = None
        self.version = f"draftwood {version('draftwood')}"
        if backend != "native":
            self.version += f", {backend} {version(backend)}"
        self.methods, self.at_a_time = [*options.methods("chain"), *TREES, DEFAULT_METHOD], MANY

    def generate(self, method: str, prompts: list[list[int]], max_tokens: int) -> Generation:
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        if len(prompts) > 1:
            return asyncio.run(self._generate_all(method, prompts, params))
        (prompt,) = prompts
        if method not in self._decoders:
            config, length = parse(method), self._bundle.manifest.max_length
            self._decoders[method] = SpeculativeDecoder(*self._engines, config, length, (), self._costs)
        stats = SpecDecodeStats()
        start = perf_counter()
        sampler = Sampler(params, prompt, (), self._engines[0].spec.model.vocab_size)
        for _ in self._decoders[method].generate(prompt, sampler, seeded_streams(0), stats):
            pass
        seconds = perf_counter() - start
        return Generation([list(sampler.output)], seconds, count([stats]))

    async def _generate_all(self, method: str, prompts: list[list[int]], params: SamplingParams) -> Generation:
        served = self._serve(len(prompts))
        config = parse(method)

        async def collect(prompt: list[int]) -> list[StreamChunk]:
            return [chunk async for chunk in served.generate(prompt, params, speculative=config)]

        start = perf_counter()
        answers = await asyncio.gather(*map(collect, prompts))
        seconds = perf_counter() - start
        texts = [[token for chunk in chunks for token in chunk.token_ids] for chunks in answers]
        return Generation(texts, seconds, count([chunks[-1].stats for chunks in answers]))

    def _serve(self, at_a_time: int) -> AsyncLLM:
        if self._llm is None:
            self._llm = LLM(self._bundle.folder, threads=self._threads)
        if self._served is None or self._served.max_running != at_a_time:
            if self._served is not None:
                self._served.close()
            self._served = AsyncLLM(self._llm, max_running=at_a_time, prefix_cache_slots=0)
        return self._served


def count(stats: Iterable[SpecDecodeStats]) -> dict[str, float]:
    """The protocol's counters. A pass of several texts counts for each of them."""
    each = list(stats)
    return {
        "target_passes": sum(own.target_passes for own in each),
        "drafted": sum(own.num_draft_tokens for own in each),
        "accepted": sum(own.num_accepted_tokens for own in each),
    }


def build_bundle(options: PeerOptions, backend: str) -> Path:
    """The pair's bundle, built by the present code; that of an earlier run if the code has not changed."""
    code = digest_files(
        file for package in BUILDING_PACKAGES for folder in package.__path__ for file in Path(folder).rglob("*")
    )

    def build(folder: Path) -> None:
        pair = ["--target", options.pair / TARGET, "--draft", options.pair / DRAFT, "--output", folder / "bundle"]
        run_draftwood("build", *pair, "--backend", backend, "--precision", options.precision, "--no-profile")

    return replace(options, variant=f"{options.variant}-{code[:8]}-").convert_once(build) / "bundle"


def digest_files(files: Iterable[Path]) -> str:
    """A digest of the names and contents of source files."""
    digest = hashlib.sha256()
    for file in sorted(file for file in files if file.suffix in SOURCES):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def run_draftwood(*arguments: object) -> None:
    """Run a command in a process of its own, so that the memory of a build is free while decoding is measured."""
    command = [sys.executable, "-m", "draftwood", *map(str, arguments)]
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    sys.stderr.write(done.stderr)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2])


if __name__ == "__main__":
    serve(Draftwood)
