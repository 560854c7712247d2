"""Throughput and latency of AsyncLLM, without HTTP, against the number of concurrent requests: plain and speculative.

    python -m benchmarks.load.concurrency bundles/demo-110m \\
        --prompts models/demo/prompts.jsonl --output benchmarks/results

A client sends its next request when it has the answer to the last one. A plain and a speculative run follow each other,
in turn one or the other first, and give one ratio; of the ratios the median stands with its interval of 95 %.
`serving/run.py` measures the same over HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.tools.record import add_output, make_parser, write_results
from draftwood.cli.bench import read_prompts
from draftwood.runtime import LLM, AsyncLLM, SamplingParams
from draftwood.runtime.inspection.speeds import interval

CONCURRENCY = (1, 4, 16, 32, 64)
REQUESTS = 3  # of each client
MODES = ("plain", "speculative")


class RequestTimes(NamedTuple):
    """One request. first, whole: seconds until the first token and until the end. tokens: of its text."""

    first: float
    whole: float
    tokens: int


async def ask(served: AsyncLLM, prompt: list[int], mode: str, params: SamplingParams) -> RequestTimes:
    start = perf_counter()
    first, count = 0.0, 0
    async for chunk in served.generate(prompt, params, speculative=None if mode == "plain" else "own"):
        first = first or perf_counter() - start
        count += len(chunk.token_ids)
    return RequestTimes(first, perf_counter() - start, count)


async def run_clients(
    served: AsyncLLM, prompts: Sequence[list[int]], mode: str, clients: int, params: SamplingParams
) -> dict[str, float]:
    """Figures of one run, in seconds and tokens per second."""

    async def client(number: int) -> list[RequestTimes]:
        turns = range(number, number + REQUESTS)
        return [await ask(served, prompts[turn % len(prompts)], mode, params) for turn in turns]

    start = perf_counter()
    answers = [answer for each in await asyncio.gather(*map(client, range(clients))) for answer in each]
    seconds = perf_counter() - start
    first_p50, first_p99 = np.percentile([answer.first for answer in answers], (50, 99))
    later = [(answer.whole - answer.first) / max(1, answer.tokens - 1) for answer in answers]
    later_p50, later_p99 = np.percentile(later, (50, 99))
    return {
        "tokens_per_second": sum(answer.tokens for answer in answers) / seconds,
        "first_token_p50": float(first_p50),
        "first_token_p99": float(first_p99),
        "per_token_p50": float(later_p50),
        "per_token_p99": float(later_p99),
    }


async def measure(
    llm: LLM, prompts: Sequence[list[int]], params: SamplingParams, repeats: int, counts: Sequence[int]
) -> dict[str, Any]:
    """Medians over the runs, by number of clients and mode, and the ratio of both modes' throughputs."""
    runs: dict[tuple[int, str], list[dict[str, float]]] = {}
    with AsyncLLM(llm, max_running=max(counts), prefix_cache_slots=0) as served:
        for repeat in range(repeats + 1):
            for clients in counts:
                for mode in MODES if repeat % 2 else reversed(MODES):
                    figures = await run_clients(served, prompts, mode, clients, params)
                    if repeat:  # the first one binds buffers
                        runs.setdefault((clients, mode), []).append(figures)
    result: dict[str, Any] = {}
    for clients in counts:
        plain, own = (runs[clients, mode] for mode in MODES)
        ratios = [b["tokens_per_second"] / a["tokens_per_second"] for a, b in zip(plain, own, strict=True)]
        result[str(clients)] = {
            mode: {name: round(median(run[name] for run in each), 4) for name in each[0]}
            for mode, each in zip(MODES, (plain, own), strict=True)
        }
        result[str(clients)] |= {"ratio": round(median(ratios), 4), "ratio_interval": interval(ratios, len(ratios))}
    return result


def make_table(figures: dict[str, Any]) -> Table:
    result = Table(
        "requests at a time", "tokens/s plain", "speculative", "ratio", "first token p50, p99", "per token p50, p99"
    )
    for clients, modes in figures.items():
        plain, own = (modes[mode] for mode in MODES)
        ratio, bounds = f"{modes['ratio']:.2f}", modes["ratio_interval"]
        if bounds is not None:
            ratio += f" ({bounds[0]:.2f} to {bounds[1]:.2f})"
        cells = [f"{plain['tokens_per_second']:.0f}", f"{own['tokens_per_second']:.0f}", ratio]
        cells += [
            f"{1e3 * own[f'{name}_p50']:.0f}, {1e3 * own[f'{name}_p99']:.0f} ms"
            for name in ("first_token", "per_token")
        ]
        result.add_row(clients, *cells)
    return result


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0 without a seed")
    parser.add_argument("--at-a-time", type=int, nargs="+", default=CONCURRENCY, help="numbers of clients")
    add_output(parser, "load_concurrency")
    args = parser.parse_args()
    with LLM(args.bundle) as llm:
        prompts = [llm.encode(text) for text in read_prompts(args.prompts)]
        params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, ignore_eos=True)
        figures = asyncio.run(measure(llm, prompts, params, args.repeats, args.at_a_time))
    Console().print(make_table(figures))
    settings = {"bundle": args.bundle.name, "max_tokens": args.max_tokens, "temperature": args.temperature}
    write_results(args.output, args.name, settings | {"requests": figures})


if __name__ == "__main__":
    main()
