"""What do many sampled texts at a time cost outside the engine, and what do rows save that their pass has prepared?

    python -m benchmarks.costs.sampled_rows bundles/smollm2 --requests 1,8,32 --output benchmarks/results

Texts are written side by side, with their softmax prepared by the pass on all threads and row by row on the host, in
turn in one process. The texts of both are the same. host_ms: milliseconds of processor time of the decoding thread
outside passes, for each token. host_share: their share of all processor time. wall_ratio: seconds of a list of texts,
prepared / row by row.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.tools.record import add_output, write_results
from draftwood.cli.options import integers
from draftwood.runtime import LLM, SamplingParams, SpeculativeConfig
from draftwood.runtime.engines.base import ForwardOutput, KVCache, TokenBatch
from draftwood.runtime.engines.native.engine import NativeEngine
from draftwood.runtime.sampling.sampler import Sampler

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 0.7": {"temperature": 0.7},
    "temperature 0.7, top_p 0.95": {"temperature": 0.7, "top_p": 0.95},
    "temperature 0.7, top_k 50": {"temperature": 0.7, "top_k": 50},
}
CONFIGS = {"plain": None, "default": SpeculativeConfig()}
PROMPT = "Tell me the story of number {}: how it was found, who used it first, and what it is good for today."


class Cost(NamedTuple):
    """Of a list of texts: seconds, processor seconds of all threads, and of the decoding thread outside passes."""

    wall: float
    cpu: float
    host: float
    tokens: list[list[int]]


class Stopwatch:
    """The decoding thread's processor time within passes."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Add the passes of every native engine."""
        score = NativeEngine.score

        def timed(engine: NativeEngine, batch: TokenBatch, cache: KVCache) -> ForwardOutput:
            begun = time.thread_time()
            try:
                return score(engine, batch, cache)
            finally:
                self.seconds += time.thread_time() - begun

        NativeEngine.score = timed  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            NativeEngine.score = score  # type: ignore[method-assign]


@contextmanager
def row_by_row() -> Iterator[None]:
    """Passes prepare nothing."""
    wanted = Sampler.wanted
    Sampler.wanted = None  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Sampler.wanted = wanted  # type: ignore[method-assign]


def write(llm: LLM, prompts: Sequence[str], params: Sequence[SamplingParams]) -> Cost:
    stopwatch = Stopwatch()
    with stopwatch.watching():
        wall, cpu, own = time.perf_counter(), time.process_time(), time.thread_time()
        results = llm.generate(prompts, params)
        wall, cpu, own = time.perf_counter() - wall, time.process_time() - cpu, time.thread_time() - own
    return Cost(wall, cpu, own - stopwatch.seconds, [list(each.outputs[0].token_ids) for each in results])


def measure(llm: LLM, requests: int, setting: dict[str, Any], tokens: int, repeats: int) -> dict[str, float]:
    """Medians of `repeats` lists of texts each way, in turn; the first lists do not count."""
    prompts = [PROMPT.format(number) for number in range(requests)]
    params = [SamplingParams(max_tokens=tokens, ignore_eos=True, seed=seed, **setting) for seed in range(requests)]
    found: dict[str, list[Cost]] = {"prepared": [], "row by row": []}
    for repeat in range(repeats + 1):
        costs = {"prepared": write(llm, prompts, params)}
        with row_by_row():
            costs["row by row"] = write(llm, prompts, params)
        if costs["prepared"].tokens != costs["row by row"].tokens:
            raise AssertionError("prepared rows changed a text")
        for name, cost in costs.items() if repeat else ():
            found[name].append(cost)
    row: dict[str, float] = {}
    for name, every in found.items():
        row[f"host_ms, {name}"] = 1e3 * median(each.host for each in every) / (requests * tokens)
        row[f"host_share, {name}"] = median(each.host / each.cpu for each in every)
    pairs = zip(found["prepared"], found["row by row"], strict=True)
    row["wall_ratio"] = median(one.wall / other.wall for one, other in pairs)
    return {name: round(value, 4) for name, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--requests", type=integers, default=(1, 8, 32), help="texts at a time (default 1,8,32)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a text (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="lists of texts each way (default %(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="of the engines (default: one for each core)")
    add_output(parser, "costs_sampled_rows")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    for name, config in CONFIGS.items():
        table = Table(title=f"{args.bundle.name}, {name}")
        figures[name] = {}
        with LLM(args.bundle, config, threads=args.threads, draft_threads=args.threads) as llm:
            for requests in args.requests:
                figures[name][str(requests)] = rows = {}
                for title, setting in SETTINGS.items():
                    rows[title] = row = measure(llm, requests, setting, args.tokens, args.repeats)
                    for column in ("texts", "settings", *row) if not table.columns else ():
                        table.add_column(column)
                    table.add_row(str(requests), title, *(f"{value:.3f}" for value in row.values()))
        Console().print(table)
    content = {"bundle": args.bundle.name, "tokens": args.tokens, "threads": args.threads, "sampled_rows": figures}
    write_results(args.output, args.name, content)


if __name__ == "__main__":
    main()
