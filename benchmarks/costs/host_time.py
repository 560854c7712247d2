"""Time of a round outside both engines: growing, unrolling, verifying, committing.

    python -m benchmarks.costs.host_time bundles/demo bundles/demo-native --output benchmarks/results

The time of sampling grows with the vocabulary. LLaMAs have 32,000 tokens and more, the demo pair has 2,048:
`WidenedEngine` extends its logits to that length by tokens of low probability. A trimmed draft computes fewer columns.
A bundle whose draft is trimmed already is measured with its own vocabulary alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.tools.record import add_output, make_parser, write_results
from draftwood.models.bindings import DRAFT, TARGET
from draftwood.runtime import SamplingParams, SpeculativeConfig
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.engines.base import Engine, EngineSpec, ForwardOutput, KVCache, SoloEngine, TokenBatch
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.sampling.softmax import softmax_of
from draftwood.runtime.text.tokenizer import Tokenizer

PROMPT = "def fibonacci(n):\n"
TREE = SpeculativeConfig("topk", max_total_draft_tokens=31, max_draft_len=6, frontier_width=8, budget="fixed")
CONFIGS = {
    "chain of 4": SpeculativeConfig("chain", max_draft_len=4, budget="fixed"),
    "top-k tree of 32": TREE,
    "top-k tree of 32, merged": replace(TREE, merge="gsd"),
    "DySpec tree of 16": replace(TREE, grow="dyspec", max_total_draft_tokens=16, frontier_width=4),
    "DySpec tree of 32": replace(TREE, grow="dyspec"),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 0": {"temperature": 0.0},
    "temperature 0.6": {"temperature": 0.6},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 0.6, top_p 0.95": {"temperature": 0.6, "top_p": 0.95},
}
# Tokens, and those that the draft predicts; 0: the pair's own, all.
VOCABULARIES = ((0, 0), (32_000, 0), (49_152, 0), (49_152, 8_192))
TAIL = 8.0  # nats; the added tokens are less probable by so much, together less than half a percent
REPEATS = 7


class WidenedEngine(SoloEngine):
    """An engine with a larger vocabulary: its own tokens, repeated at a lower probability. kept: the first tokens, of
    which a trimmed draft computes columns; 0: all."""

    def __init__(self, engine: Engine, vocab_size: int, kept: int = 0) -> None:
        self._engine = engine
        self._own = engine.spec.model.vocab_size
        self.softmax = softmax_of(engine)
        model = replace(engine.spec.model, vocab_size=vocab_size, draft_vocab_size=kept or None)
        self.spec: EngineSpec = replace(engine.spec, model=model, kept_tokens=tuple(range(kept)))

    def new_cache(self) -> KVCache:
        return self._engine.new_cache()

    def close(self) -> None:
        self._engine.close()

    def score(self, batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        output = self._engine.score(replace(batch, token_ids=batch.token_ids % self._own), cache)
        logits = output.logits.take(np.arange(self.spec.model.num_logits) % self._own, axis=1)
        logits[:, self._own :] -= np.float32(TAIL)
        return output._replace(logits=logits)


def time_rounds(bundle: EngineBundle, vocab_size: int, kept: int) -> Iterator[tuple[str, str, float]]:
    """Configuration, setting and milliseconds per round, REPEATS times for each."""
    engines: list[Engine] = [bundle.open_engine(TARGET), bundle.open_draft()]
    if vocab_size:
        engines = [WidenedEngine(engines[0], vocab_size), WidenedEngine(engines[1], vocab_size, kept)]
    target, draft = engines
    prompt = Tokenizer.load(bundle.folder).encode(PROMPT)
    longest = bundle.manifest.max_length
    decoders = {name: SpeculativeDecoder(target, draft, config, longest, ()) for name, config in CONFIGS.items()}
    for repeat in range(REPEATS + 1):
        for name, decoder in decoders.items():
            for setting, changes in SETTINGS.items():
                params, stats = SamplingParams(max_tokens=128, **changes), SpecDecodeStats()
                sampler = Sampler(params, prompt, (), target.spec.model.vocab_size)
                for _ in decoder.generate(prompt, sampler, seeded_streams(repeat), stats):
                    pass
                if repeat:  # the first run binds buffers
                    yield name, setting, 1e3 * stats.host_seconds / stats.target_passes


def measure(bundle: EngineBundle, vocab_size: int, kept: int) -> dict[str, dict[str, float]]:
    """Median milliseconds per round, by configuration and setting."""
    found: dict[str, dict[str, list[float]]] = {name: {setting: [] for setting in SETTINGS} for name in CONFIGS}
    for name, setting, milliseconds in time_rounds(bundle, vocab_size, kept):
        found[name][setting].append(milliseconds)
    return {name: {setting: round(median(values), 4) for setting, values in row.items()} for name, row in found.items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("bundles", type=Path, nargs="+")
    add_output(parser, "costs_host_time")
    args = parser.parse_args()
    figures: dict[str, dict[str, Any]] = {}
    for bundle in map(EngineBundle.open, args.bundles):
        spec = bundle.manifest.engines[TARGET]
        figures[spec.backend] = {}
        is_trimmed = bool(bundle.manifest.engines[DRAFT].kept_tokens)
        for vocab_size, kept in VOCABULARIES[:1] if is_trimmed else VOCABULARIES:
            title = f"{vocab_size or spec.model.vocab_size} tokens" + (f", the draft's {kept}" if kept else "")
            figures[spec.backend][title] = rows = measure(bundle, vocab_size, kept)
            table = Table("host time per round, ms", *SETTINGS, title=f"{spec.backend}, vocabulary of {title}")
            for name, row in rows.items():
                table.add_row(name, *(f"{value:.3f}" for value in row.values()))
            Console().print(table)
    write_results(args.output, args.name, {"unit": "ms per round, median", "host_time": figures})


if __name__ == "__main__":
    main()
