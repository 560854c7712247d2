"""Time a round spends outside both engines: growing, unrolling, verifying, committing.

Goals: a chain of 4 under 0.3 ms, a tree of 32 under 1 ms.

    python benchmarks/host_time.py bundles/demo --output benchmarks/results
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import median

from machine import write
from rich.console import Console
from rich.table import Table

from draftwood.runtime import LLM, SamplingParams, SpeculativeConfig

PROMPT = "def fibonacci(n):\n"
TREE = SpeculativeConfig("topk", max_total_draft_tokens=31, max_draft_len=6, frontier_width=8, budget="fixed")
CONFIGS = {
    "chain of 4": SpeculativeConfig("chain", max_draft_len=4, budget="fixed"),
    "top-k tree of 32": TREE,
    "top-k tree of 32, merged": replace(TREE, merge="gsd"),
    "DySpec tree of 32": replace(TREE, grow="dyspec"),
}
TEMPERATURES = (0.0, 0.6)
REPEATS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    llms = {name: LLM(args.bundle, config) for name, config in CONFIGS.items()}
    milliseconds: dict[tuple[str, float], list[float]] = {}
    for repeat in range(REPEATS + 1):
        for name, llm in llms.items():
            for temperature in TEMPERATURES:
                params = SamplingParams(max_tokens=128, temperature=temperature, seed=repeat, ignore_eos=True)
                stats = llm.generate(PROMPT, params).stats
                if repeat:  # the first run binds buffers
                    per_round = 1e3 * stats.host_seconds / stats.target_passes
                    milliseconds.setdefault((name, temperature), []).append(per_round)
    table = Table("host time per round, ms", *(f"temperature {temperature}" for temperature in TEMPERATURES))
    figures = {}
    for name in CONFIGS:
        medians = [median(milliseconds[name, temperature]) for temperature in TEMPERATURES]
        table.add_row(name, *(f"{value:.3f}" for value in medians))
        figures[name] = {
            f"temperature {temperature}": round(value, 4)
            for temperature, value in zip(TEMPERATURES, medians, strict=True)
        }
    Console().print(table)
    write(args.output, "host_time", {"unit": "ms per round, median", "host_time": figures})


if __name__ == "__main__":
    main()
