"""What the formats of keys and values cost and bring on the native engine: divergence, bytes, and time of a pass.

    python -m benchmarks.precision.cache_formats --checkpoint DIR --prompts ../shared/data/prompts --work WORK \\
        --output benchmarks/results

divergence: KL in nats per token on the texts of `front`, of each pair of weights and cache: from the model in fp32, and
from the same weights with a cache in fp32. What a format adds is the difference of the former to that of a cache in
fp32, with its standard error over the scored tokens. A control shows what rounding alone does: the cache in fp32, and
every entry of the embedding multiplied by 1 + or - NUDGE. It is another rounding of the same model, no worse one.

time: passes behind random keys and values, all formats in turn; the minimum counts, since others may use the machine.
Two threads spin while they wait for each other, so the wall time is taken, not the processor's. --repeats 0 leaves it
out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.precision.front import logprobs
from benchmarks.precision.texts import read_texts
from benchmarks.tools.record import add_output, write_results
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.engines.make import Source
from draftwood.builder.engines.native import write_weights
from draftwood.models.bindings import TARGET, output_names
from draftwood.models.layers import EMBEDDING
from draftwood.runtime.engines.backends import NATIVE, Opening, slot_bytes
from draftwood.runtime.engines.base import EngineSpec, TokenBatch
from draftwood.runtime.engines.native.engine import NativeEngine, NativeKVCache

EXACT, NUDGED = "fp32", "fp32, nudged"  # caches
WEIGHTS = ("fp32", "bf16", "int8", "int4")
CONTEXTS, ROWS = (512, 2048, 8192), (1, 8)
WIDTHS, CAPACITY = (1, 8, 64), CONTEXTS[-1] + 256
NUDGE = 2.0**-20  # eight units in the last place of fp32; fp16 rounds by up to 2^-11
LogProbs = NDArray[np.float32]  # [scored, V]


class Reading(NamedTuple):
    """What an engine says of texts, by scored token: KL from the model in fp32, KL from the same weights with a cache
    in fp32, and whether the latter has the same best token."""

    model: NDArray[np.float64]
    exact: NDArray[np.float64]
    same: NDArray[np.bool_]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR")
    parser.add_argument("--prompts", type=Path, required=True, metavar="DIR", help="folder of prompts, *.jsonl")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="for engines")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=40, help="of a pass")
    parser.add_argument("--windows", type=int, default=4, help="of each text, at most")
    parser.add_argument("--weights", nargs="+", default=WEIGHTS, metavar="NAME")
    add_output(parser, "precision_cache_formats")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    texts = read_texts(args.prompts, args.checkpoint, 1).windows
    windows = [window for each in texts.values() for window in each[: args.windows]]
    with ExitStack() as stack:
        exact = opened(args.checkpoint, EXACT, args.work, args.threads, stack)[EXACT]
        model = [logprobs(exact, window) for window in track(windows, "Reading with the model in fp32")]
    figures: dict[str, Any] = {}
    for precision in args.weights:
        with ExitStack() as stack:
            engines = opened(args.checkpoint, precision, args.work, args.threads, stack)
            found = divergences(engines, windows, model)
            formats = {form: engine for form, engine in engines.items() if form in NATIVE.caches}
            figures[precision] = {
                "slot_bytes": {form: slot_bytes(engine.spec) for form, engine in formats.items()},
                "divergence": {form: described(reading, found[EXACT]) for form, reading in found.items()},
                "ms": timed(formats, args.repeats) if args.repeats else {},
            }
    show(figures)
    write_results(args.output, args.name, {"threads": args.threads, "windows": len(windows), "weights": figures})


def show(figures: dict[str, Any]) -> None:
    table = Table("weights", "cache", "bytes of a token", "KL from fp32", "added", "KL from its fp32", "best token")
    passes = Table("weights", "rows", "context", *NATIVE.caches, title="ms of a pass")
    for precision, each in figures.items():
        for form, found in each["divergence"].items():
            kls = (f"{found['model']:.6f}", f"{found['added']:+.1e} ± {found['error']:.1e}", f"{found['exact']:.1e}")
            table.add_row(precision, form, str(each["slot_bytes"].get(form, "")), *kls, f"{found['same']:.4f}")
        for name, times in each["ms"].items():
            passes.add_row(precision, *name.split(), *(f"{times[form]:.2f}" for form in NATIVE.caches))
    Console(width=120).print(table, passes)


def opened(folder: Path, precision: str, work: Path, threads: int, stack: ExitStack) -> dict[str, NativeEngine]:
    """An engine of each format over one file of weights, and the control, until `stack` is closed."""
    weights, file = (
        Source(Checkpoint(folder), TARGET, None, NATIVE.name, precision).weights,
        work / f"{precision}.cache",
    )
    if not file.is_file():
        write_weights(weights, CAPACITY, file)
    spec = EngineSpec(TARGET, NATIVE.name, "", weights.config, WIDTHS, CAPACITY, precision, output_names(TARGET))
    engines = {}
    for name in (*NATIVE.caches, NUDGED):
        stored = EXACT if name == NUDGED else name
        engine = NATIVE.open(file, replace(spec, cache_precision=stored), Opening(threads, private=name == NUDGED))
        assert isinstance(engine, NativeEngine)
        stack.callback(engine.close)
        engines[name] = engine
    embedding = engines[NUDGED]._weights[EMBEDDING]
    signs = np.random.default_rng(0).integers(0, 2, embedding.shape, np.int8)
    embedding *= np.float32(1) + NUDGE * (2 * signs - 1).astype(np.float32)
    return engines


def divergences(
    engines: dict[str, NativeEngine], windows: Sequence[list[int]], model: Sequence[LogProbs]
) -> dict[str, Reading]:
    """By format. model: of the model in fp32, for each window."""
    parts: dict[str, list[Reading]] = {form: [] for form in engines}
    for window, best in track(list(zip(windows, model, strict=True)), f"Reading with {engines[EXACT].spec.precision}"):
        exact = logprobs(engines[EXACT], window)
        for form, engine in engines.items():
            own = exact if form == EXACT else logprobs(engine, window)
            parts[form].append(Reading(kl(best, own), kl(exact, own), exact.argmax(-1) == own.argmax(-1)))
    return {form: Reading(*map(np.concatenate, zip(*each, strict=True))) for form, each in parts.items()}


def kl(first: LogProbs, second: LogProbs) -> NDArray[np.float64]:
    """KL(first || second) of each token."""
    divergence: NDArray[np.float64] = (np.exp(first) * (first - second)).sum(-1, dtype=np.float64)
    return divergence


def described(reading: Reading, exact: Reading) -> dict[str, float]:
    """Means over the tokens. added: the divergence from the model beyond that of a cache in fp32; error: the standard
    error of this mean."""
    added = reading.model - exact.model
    return {
        "model": float(reading.model.mean()),
        "added": float(added.mean()),
        "error": float(added.std() / np.sqrt(len(added))),
        "exact": float(reading.exact.mean()),
        "same": float(reading.same.mean()),
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
