"""What the formats of keys and values cost and bring on the native engine: divergence, bytes, and time of a pass.

    python -m benchmarks.precision.cache_formats --checkpoint DIR --prompts ../shared/data/prompts --work WORK \\
        --output benchmarks/results

divergence: KL(cache in fp32 || format) in nats per token of the running engine with the same weights, on the texts of
`front`. time: passes behind random keys and values, all formats in turn; the minimum counts, since others may use the
machine. Two threads spin while they wait for each other, so the wall time is taken, not the processor's.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.precision.front import logprobs
from benchmarks.precision.front_peer import Divergence, score
from benchmarks.precision.texts import read_texts
from benchmarks.tools.record import add_output, write_results
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.engines.make import Source
from draftwood.builder.engines.native import write_weights
from draftwood.models.bindings import TARGET, output_names
from draftwood.runtime.engines.backends import NATIVE, Opening, slot_bytes
from draftwood.runtime.engines.base import EngineSpec, TokenBatch
from draftwood.runtime.engines.native.engine import NativeEngine, NativeKVCache

EXACT = "fp32"
WEIGHTS = ("fp32", "bf16", "int8", "int4")
CONTEXTS, ROWS = (512, 2048, 8192), (1, 8)
WIDTHS, CAPACITY = (1, 8, 64), CONTEXTS[-1] + 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR")
    parser.add_argument("--prompts", type=Path, required=True, metavar="DIR", help="folder of prompts, *.jsonl")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="for engines")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=40, help="of a pass")
    parser.add_argument("--windows", type=int, default=4, help="of each text, at most")
    add_output(parser, "precision_cache_formats")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    texts = read_texts(args.prompts, args.checkpoint, 1).windows
    figures: dict[str, Any] = {}
    table = Table("weights", "cache", "bytes of a token", *(f"KL {name}" for name in texts), "best token")
    passes = Table("weights", "rows", "context", *NATIVE.caches, title="ms of a pass")
    for precision in WEIGHTS:
        with ExitStack() as stack:
            engines = opened(args.checkpoint, precision, args.work, args.threads)
            for engine in engines.values():
                stack.callback(engine.close)
            found = {name: divergences(engines, windows[: args.windows]) for name, windows in texts.items()}
            times = timed(engines, args.repeats)
        size = {form: slot_bytes(engine.spec) for form, engine in engines.items()}
        figures[precision] = {"slot_bytes": size, "divergence": found, "ms": times}
        for form in NATIVE.caches:
            kl = (f"{text[form]['kl']:.1e}" for text in found.values())
            best = min(text[form]["top"] for text in found.values())
            table.add_row(precision, form, str(size[form]), *kl, f"{best:.4f}")
        for name, each in times.items():
            passes.add_row(precision, *name.split(), *(f"{each[form]:.2f}" for form in NATIVE.caches))
    Console().print(table, passes)
    write_results(args.output, args.name, {"threads": args.threads, "weights": figures})


def opened(folder: Path, precision: str, work: Path, threads: int) -> dict[str, NativeEngine]:
    """An engine of each format, over one file of weights."""
    weights, file = (
        Source(Checkpoint(folder), TARGET, None, NATIVE.name, precision).weights,
        work / f"{precision}.cache",
    )
    spec = EngineSpec(TARGET, NATIVE.name, "", weights.config, WIDTHS, CAPACITY, precision, output_names(TARGET))
    if not file.is_file():
        write_weights(weights, CAPACITY, file)
    engines = {}
    for form in NATIVE.caches:
        engine = NATIVE.open(file, replace(spec, cache_precision=form), Opening(threads))
        assert isinstance(engine, NativeEngine)
        engines[form] = engine
    return engines


def divergences(engines: dict[str, NativeEngine], windows: Sequence[list[int]]) -> dict[str, Any]:
    """By format, from the same engine with an exact cache."""
    scores: dict[str, list[Divergence]] = defaultdict(list)
    for window in windows:
        reference = logprobs(engines[EXACT], window)
        for form, engine in engines.items():
            scores[form].append(score(reference, logprobs(engine, window), window))
    return {
        form: {key: float(np.mean([window[key] for window in each])) for key in each[0]}
        for form, each in scores.items()
    }


def timed(engines: dict[str, NativeEngine], repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds by rows and context, and by format."""
    times: dict[str, dict[str, float]] = {}
    for context in CONTEXTS:
        caches = {form: filled(engine, context) for form, engine in engines.items()}
        for rows in ROWS:
            best = dict.fromkeys(engines, np.inf)
            for _ in range(repeats):
                for form, engine in engines.items():
                    batch = TokenBatch.pad([5] * rows, np.arange(rows) + context, np.tri(rows, dtype=np.bool_), rows)
                    start = perf_counter()
                    engine.score(batch, caches[form])
                    best[form] = min(best[form], perf_counter() - start)
                    caches[form].commit([])
            times[f"{rows} {context}"] = {form: round(1e3 * seconds, 3) for form, seconds in best.items()}
    return times


def filled(engine: NativeEngine, context: int) -> NativeKVCache:
    """A cache of random rows: how long attention takes does not depend on what it reads."""
    rng, cache = np.random.default_rng(0), engine.new_cache()
    cache._resize(context + 64, 0)
    cache.length = context
    for numbers in (cache.keys, cache.values):
        numbers[:] = (8 if cache.scales is not None else 0.5) * rng.standard_normal(numbers.shape, np.float32)
    if cache.scales is not None:
        cache.scales[:] = 1 / 16
    return cache


if __name__ == "__main__":
    main()
