"""What a request's pass costs beside others, in processor time of one thread: by their number, contexts and steps.

    python -m benchmarks.costs.neighbours bundles/smollm2 --output benchmarks/results

All requests decode plainly in joint passes over one cache. Their rows alternate in time; a pass costs more with every
step if they also alternate in memory. One request is then timed alone, beside the contexts of all others.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from time import thread_time

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.tools.record import add_output, write_results
from draftwood.runtime import LLM
from draftwood.runtime.engines.base import Pass
from draftwood.runtime.engines.passes import causal_batch, prefill

CASES = ((1, 64), (16, 64), (32, 64), (64, 64), (32, 400))  # requests, tokens that each has read
OWN = 64  # tokens of the request that is timed alone
STEPS = 40
REPEATS = 9


def measure(llm: LLM, requests: int, context: int) -> dict[str, float]:
    """Milliseconds of a joint pass at first, of one after STEPS steps, and of a pass of a request alone."""
    scheduler = llm.scheduler(requests + 1)
    pool, rng = scheduler.pools[0], np.random.default_rng(0)
    vocab_size = pool.spec.model.vocab_size
    caches = [pool.new_cache() for _ in range(requests)]
    own = pool.new_cache()
    for cache in (own, *caches):
        prefill(pool, cache, rng.integers(0, vocab_size, OWN if cache is own else context).tolist())
    times = []
    for _ in range(STEPS):
        passes = [Pass(pool, causal_batch(pool.spec, [1], cache.length), cache) for cache in caches]
        start = thread_time()
        pool.forward(passes)
        times.append(1e3 * (thread_time() - start))
        for cache in caches:
            cache.commit([0])
    alone = []
    for _ in range(REPEATS):
        start = thread_time()
        pool.score(causal_batch(pool.spec, [1], own.length), own)
        alone.append(1e3 * (thread_time() - start))
        own.commit([])
    for cache in (own, *caches):
        cache.close()
    scheduler.close()
    found = {"first": median(times[:5]), "later": median(times[-5:]), "alone": median(alone)}
    return {name: round(value, 2) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    add_output(parser, "costs_neighbours")
    args = parser.parse_args()
    table = Table("requests", "context", "first passes", f"after {STEPS} steps", f"one of {OWN} tokens alone, ms")
    rows = []
    with LLM(args.bundle, speculative=None, threads=1) as llm:
        for requests, context in CASES:
            found = measure(llm, requests, context)
            rows.append({"requests": requests, "context": context, **found})
            table.add_row(str(requests), str(context), *(f"{value:.1f}" for value in found.values()))
    Console().print(table)
    settings = {"bundle": args.bundle.name, "unit": "ms of processor time, one thread", "steps": STEPS}
    write_results(args.output, args.name, settings | {"passes": rows})


if __name__ == "__main__":
    main()
