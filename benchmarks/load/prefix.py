"""Time to the first token of requests whose prompts have a common beginning, with and without a shared prefix.

    python -m benchmarks.load.prefix bundles/demo-110m --prompts models/demo/prompts.jsonl --output benchmarks/results

A prompt is a text that all requests of a run have in common, and a few tokens of its own. The requests arrive all at
once, or one after the other. Every run has a new common text. Runs with and without sharing alternate.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from itertools import chain, cycle, islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.tools.record import add_output, write_results
from draftwood.cli.bench import read_prompts
from draftwood.runtime import LLM, AsyncLLM, SamplingParams

REQUESTS = (1, 2, 4, 8)
ARRIVALS = ("at once", "one by one")
PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


class FirstToken(NamedTuple):
    """seconds: until the first token. cached: tokens of the prompt that came from the prefix cache."""

    seconds: float
    cached: int


async def ask(served: AsyncLLM, prompt: list[int]) -> FirstToken:
    start, first, cached = perf_counter(), 0.0, 0
    async for chunk in served.generate(prompt, PARAMS):
        first = first or perf_counter() - start
        cached = chunk.stats.num_cached_tokens
    return FirstToken(first, cached)


async def ask_all(served: AsyncLLM, prompts: Sequence[list[int]], arrival: str) -> list[FirstToken]:
    if arrival == "at once":
        return await asyncio.gather(*(ask(served, prompt) for prompt in prompts))
    return [await ask(served, prompt) for prompt in prompts]


def make_prompts(text: Sequence[int], run: int, requests: int, shared: int, own: int) -> list[list[int]]:
    """Prompts of run number `run`: windows of `text` that begin at another token in every run."""
    begin = run % len(text)
    common = list(islice(cycle(text), begin, begin + shared))
    ends = range(begin + shared, begin + shared + requests * own, own)
    return [[*common, *islice(cycle(text), end, end + own)] for end in ends]


async def measure(llm: LLM, text: Sequence[int], shared: int, own: int, repeats: int) -> dict[str, Any]:
    """Median seconds over the runs by arrival and number of requests; the seconds of a run are the mean of its
    requests."""
    figures: dict[str, Any] = {}
    run = 0
    with AsyncLLM(llm, prefix_cache_slots=0) as apart, AsyncLLM(llm) as together:
        for arrival in ARRIVALS:
            for requests in REQUESTS:
                seconds: dict[str, list[float]] = {"apart": [], "shared": []}
                cached: list[int] = []
                for repeat in range(repeats + 1):
                    run += 1
                    prompts = make_prompts(text, run, requests, shared, own)
                    for name, served in (("apart", apart), ("shared", together)):
                        found = await ask_all(served, prompts, arrival)
                        if repeat:  # the first one binds buffers
                            seconds[name].append(sum(answer.seconds for answer in found) / requests)
                    cached += [sum(answer.cached for answer in found)] if repeat else []
                medians = {name: round(median(values), 4) for name, values in seconds.items()}
                share = median(cached) / (requests * (shared + own))
                figures.setdefault(arrival, {})[str(requests)] = {**medians, "cached_share": round(share, 3)}
    return figures


def make_table(figures: dict[str, Any]) -> Table:
    result = Table("arrival", "requests", "first token, apart", "shared", "times sooner", "of the prompts cached")
    for arrival, by_requests in figures.items():
        for requests, each in by_requests.items():
            milliseconds = [f"{1e3 * each[name]:.0f} ms" for name in ("apart", "shared")]
            ratio = f"{each['apart'] / each['shared']:.2f}"
            result.add_row(arrival, requests, *milliseconds, ratio, f"{each['cached_share']:.0%}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--shared", type=int, default=300, help="tokens of the common beginning (default 300)")
    parser.add_argument("--own", type=int, default=20, help="tokens of each prompt's own (default 20)")
    parser.add_argument("--repeats", type=int, default=5)
    add_output(parser, "load_prefix")
    args = parser.parse_args()
    with LLM(args.bundle) as llm:
        text = list(chain.from_iterable(llm.encode(prompt) for prompt in read_prompts(args.prompts)))
        figures = asyncio.run(measure(llm, text, args.shared, args.own, args.repeats))
    Console().print(make_table(figures))
    sizes = {"shared_tokens": args.shared, "own_tokens": args.own, "repeats": args.repeats}
    write_results(args.output, args.name, {"bundle": args.bundle.name, **sizes, "first_token_seconds": figures})


if __name__ == "__main__":
    main()
