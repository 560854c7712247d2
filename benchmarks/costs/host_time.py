"""Time of a round outside both engines: growing, unrolling, verifying, committing.

python -m benchmarks.costs.host_time bundles/demo bundles/demo-native --output benchmarks/results
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.tools.record import add_output, make_parser, write_results
from draftwood.models.bindings import TARGET
from draftwood.runtime import SamplingParams, SpeculativeConfig
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
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
REPEATS = 7


def measure(bundle: EngineBundle) -> dict[str, dict[str, float]]:
    """Median milliseconds per round, by configuration and setting."""
    found: dict[str, dict[str, list[float]]] = {name: {setting: [] for setting in SETTINGS} for name in CONFIGS}
    target, draft = bundle.open_engine(TARGET), bundle.open_draft()
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
                    found[name][setting].append(1e3 * stats.host_seconds / stats.target_passes)
    return {name: {setting: round(median(values), 4) for setting, values in row.items()} for name, row in found.items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("bundles", type=Path, nargs="+")
    add_output(parser, "costs_host_time")
    args = parser.parse_args()
    figures: dict[str, dict[str, Any]] = {}
    for bundle in map(EngineBundle.open, args.bundles):
        spec = bundle.manifest.engines[TARGET]
        title = f"{spec.backend}, vocabulary of {spec.model.vocab_size} tokens"
        figures[title] = rows = measure(bundle)
        table = Table("host time per round, ms", *SETTINGS, title=title)
        for name, row in rows.items():
            table.add_row(name, *(f"{value:.3f}" for value in row.values()))
        Console().print(table)
    write_results(args.output, args.name, {"unit": "ms per round, median", "host_time": figures})


if __name__ == "__main__":
    main()
