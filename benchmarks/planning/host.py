"""Processor time of planning on the host: of a token while plain decoding stays planned, of a plan, and of an offer.

    python -m benchmarks.planning.host bundles/smollm2 --output benchmarks/results

Stand-ins replace the engines, so passes take no time; shapes and costs are the bundle's. Requests without a draft and
requests that may draft take turns. `replay.py` counts planning with these figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import thread_time

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.tools.record import add_output, write_results
from draftwood.models.bindings import DRAFT, TARGET, TOP_IDS
from draftwood.models.errors import BundleError
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.bundle.costs import read_costs
from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.engines.base import EngineSpec, ForwardOutput, KVCache, SoloEngine, TokenBatch
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation.config import SpeculativeConfig
from draftwood.runtime.speculation.planning.budget import DraftBudget
from draftwood.runtime.speculation.planning.controller import Controller
from draftwood.runtime.speculation.planning.cost import CostModel
from draftwood.runtime.speculation.planning.experience import Experience

REQUESTS, TOKENS, PROMPT = 32, 400, list(range(20, 60))


class EmptyCache:
    """Counts rows."""

    def __init__(self) -> None:
        self.length = self.speculative = 0

    def commit(self, slots: Sequence[int]) -> None:
        self.length, self.speculative = self.length + len(slots), 0

    def truncate(self, length: int) -> None:
        self.length, self.speculative = min(self.length, length), 0

    def close(self) -> None:
        """Nothing is held."""


class StandIn(SoloEngine):
    """Scores every row alike."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        logits = np.random.default_rng(0).standard_normal((spec.max_width, 64)).astype(np.float32)
        ranked = (np.zeros((spec.max_width, 8), np.int64), np.zeros((spec.max_width, 8), np.float32))
        self._output = ForwardOutput(logits, *(ranked if TOP_IDS.name in spec.outputs else (None, None)))

    def new_cache(self, salt: str | None = None) -> KVCache:
        return EmptyCache()

    def close(self) -> None:
        """Nothing is held."""

    def score(self, batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        assert isinstance(cache, EmptyCache)
        cache.speculative += batch.num_tokens
        return self._output


def time_tokens(decoder: SpeculativeDecoder, vocab: int) -> float:
    """Median microseconds of a round."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    rounds = decoder.generate(PROMPT, Sampler(params, PROMPT, (), vocab), seeded_streams(0), SpecDecodeStats())
    times = [thread_time() for _ in rounds]
    return 1e6 * median(after - before for before, after in pairwise(times))


def time_plans(costs: CostModel, spec: EngineSpec) -> tuple[float, float]:
    """Microseconds of a plan beside the choice for all requests, and of a request's part of that choice."""
    experience, budget = Experience(), DraftBudget()
    made = [SpeculativeConfig().controller(costs, spec.widths, True, experience, budget) for _ in range(REQUESTS)]
    controllers: list[Controller] = [each for each in made if each is not None]
    for each in controllers:
        each.plan(64, TOKENS, REQUESTS)
    start = thread_time()
    for each in controllers:
        each.plan(64, TOKENS, REQUESTS)
    plans, start = thread_time() - start, thread_time()
    budget._solve(REQUESTS, costs)
    solved = thread_time() - start
    return 1e6 * plans / len(controllers), 1e6 * solved / len(controllers)


def measure(folder: Path, repeats: int) -> dict[str, float]:
    """Medians, in microseconds."""
    manifest, costs = EngineBundle.open(folder).manifest, read_costs(folder)
    if costs is None or costs.draft is None:
        raise BundleError(f"{folder} has no costs of a pair: run draftwood profile first")
    target, draft = (StandIn(manifest.engines[role]) for role in (TARGET, DRAFT))
    found: dict[str, list[float]] = {"plain": [], "held": [], "plan": [], "offer": []}
    experience, budget = Experience(), DraftBudget()
    for repeat in range(repeats + 1):
        row = {}
        for name, config in (("plain", None), ("held", SpeculativeConfig())):
            decoder = SpeculativeDecoder(
                target, draft, config, manifest.max_length, (), costs, lambda: REQUESTS, experience, budget
            )
            row[name] = time_tokens(decoder, target.spec.model.vocab_size)
        row["plan"], row["offer"] = time_plans(costs, target.spec)
        for name, microseconds in row.items() if repeat else ():
            found[name].append(microseconds)
    result = {name: median(values) for name, values in found.items()}
    result["held beyond plain"] = median(a - b for a, b in zip(found["held"], found["plain"], strict=True))
    return {name: round(value, 2) for name, value in result.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--repeats", type=int, default=9)
    add_output(parser, "planning_host", required=False)
    args = parser.parse_args()
    found = measure(args.bundle, args.repeats)
    table = Table(*found, title="microseconds of processor time")
    table.add_row(*(f"{value:.2f}" for value in found.values()))
    Console().print(table)
    if args.output is not None:
        write_results(args.output, args.name, {"bundle": args.bundle.name, "microseconds": found})


if __name__ == "__main__":
    main()
