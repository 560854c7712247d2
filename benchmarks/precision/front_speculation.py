"""Speculative decoding for front.py: the same weights with a draft, over chat prompts. The text stays that of the
weights, so a format's divergence does not change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from benchmarks.precision.front_peer import Complete, Decoded
from draftwood.cli.bench import read_prompts
from draftwood.cli.main import main
from draftwood.runtime import LLM, SamplingParams

SUFFIX = " with a draft"


class Pair(NamedTuple):
    """A target and its draft: Hugging Face folders. prompts: questions, JSON lines. work: for bundles. threads: of each
    engine."""

    target: Path
    draft: Path
    prompts: Path
    work: Path
    threads: int

    def bundle(self, form: str) -> Path:
        """A bundle whose target has one of our weight formats; it is built once."""
        folder = self.work / f"{form}.bundle"
        if not folder.is_dir():
            models = ["--target", str(self.target), "--draft", str(self.draft), "--output", str(folder)]
            failed = main(["build", *models, "--backend", "native", "--precision", form, "--max-length", "2048"])
            if failed:
                raise SystemExit(failed)
        return folder

    @contextmanager
    def decoder(self, form: str) -> Iterator[Complete]:
        """Speculative decoding with the default settings."""
        with LLM(self.bundle(form), threads=self.threads) as llm:
            prompts = [llm.encode_chat([{"role": "user", "content": each}]) for each in read_prompts(self.prompts)]

            def complete(prompt: list[int], tokens: int) -> Decoded:
                """Greedy text behind every question instead of the prompt; the speed is that of all of them."""
                params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
                written, seconds = list[int](), 0.0
                for question in prompts:
                    chunks = llm.stream(question, params)
                    next(chunks)  # takes the prompt's time
                    start = perf_counter()
                    for chunk in chunks:
                        written += chunk.token_ids
                    seconds += perf_counter() - start
                return Decoded(written, len(written) / seconds)

            yield complete
