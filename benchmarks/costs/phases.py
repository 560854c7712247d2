"""Idle share of the native engine's threads against their number, by simulating the phases of a pass.

A pass is a list of phases, and a phase a number of units. A free thread takes the next unit, and a phase ends when all
of its units are done (plugins/native/kernels/threads.h). The simulation counts bytes, products and waiting, with the
rates below. It leaves out everything else: interconnects, frequencies, and memory that idle threads leave to others.

    python -m benchmarks.costs.phases --output benchmarks/results
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.tools.record import add_output, write_results

LANES, MOST_ROWS, MOST_QUERIES = 16, 8, 64  # plugins/native/kernels: lanes.h, isa_avx512.h, attention.h
ROUNDED = 32  # matrix.h
SHARES, PARTS_OF_SCORES, LEAST_PART, LEAST_SHARED = 2, 4, 16, 192  # engine.h
THREADS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128)
THREAD_BANDWIDTH, BANDWIDTH = 12e9, 300e9  # bytes per second that one thread reads, and all together
PRODUCTS = 3e11  # of integers, per second and thread
FLOAT_PRODUCTS = 2e10  # of attention, per second and thread
VECTOR_SECONDS, SCALAR_SECONDS = 0.2e-9, 1e-9  # for a number that is normalised or rounded, and that is rotated
CLAIM_SECONDS = 40e-9  # of the line that all threads write to; one after the other
WAKE_SECONDS = 300e-9  # until the last unit's end is seen by all threads
WEIGHT_BYTES = 5 / 8  # int4
CACHE_BYTES = 2  # fp16


class Shape(NamedTuple):
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


SHAPES = {
    "1.1B": Shape(2048, 5632, 22, 32, 4, 64, 32000),  # TinyLlama
    "7B": Shape(4096, 11008, 32, 32, 32, 128, 32000),  # LLaMA 2
    "8B": Shape(4096, 14336, 32, 32, 8, 128, 128256),  # LLaMA 3
}


class Phase(NamedTuple):
    """memory: bytes of a unit. seconds: of computing one. sizes: of each unit, over the mean, where they differ.
    shared: whether all threads take units by one counter, instead of by one for each thread's own share."""

    name: str
    units: int
    memory: float
    seconds: float
    sizes: tuple[float, ...] = ()
    shared: bool = True


class Result(NamedTuple):
    """seconds: of a pass. idle: share of the threads' time without a unit. attention: share of the pass."""

    seconds: float
    idle: float
    attention: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser, "costs_phases")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        for rows, context in ((1, 512), (1, 8192), (8, 512), (8, 8192)):
            title = f"{name}, {rows} row{'s'[: rows - 1]}, {context} slots"
            table = Table("idle share", *map(str, THREADS), title=title)
            for parts in (False, True):
                results = [simulate(shape, rows, context, threads, parts) for threads in THREADS]
                kind = "parts" if parts else "whole units"
                table.add_row(kind, *(f"{each.idle:.2f}" for each in results))
                table.add_row("ms", *(f"{1e3 * each.seconds:.2f}" for each in results))
                figures.setdefault(title, {})[kind] = {
                    str(threads): {
                        "ms": round(1e3 * each.seconds, 3),
                        "idle": round(each.idle, 3),
                        "attention": round(each.attention, 3),
                    }
                    for threads, each in zip(THREADS, results, strict=True)
                }
            Console(width=120).print(table)
    rates = {"thread_gb_per_s": THREAD_BANDWIDTH / 1e9, "gb_per_s": BANDWIDTH / 1e9, "claim_ns": CLAIM_SECONDS * 1e9}
    write_results(args.output, args.name, {**rates, "wake_ns": WAKE_SECONDS * 1e9, "passes": figures})


def simulate(shape: Shape, rows: int, context: int, threads: int, parts: bool) -> Result:
    """A pass of that many rows. parts: whether attention is cut further where its units are few."""
    rate = min(THREAD_BANDWIDTH, BANDWIDTH / threads)
    total = busy = attention = 0.0
    for phase, times in phases(shape, rows, context, threads, parts):
        seconds, worked = run(phase, threads, rate)
        total, busy = total + times * seconds, busy + times * worked
        attention += times * seconds * phase.name.startswith("attention")
    return Result(total, 1 - busy / (threads * total), attention / total)


def run(phase: Phase, threads: int, rate: float) -> tuple[float, float]:
    """Seconds of a phase, and of its units together. The units are taken in turn; a claim waits for the one before,
    where it writes to the same line."""
    cost = max(phase.memory / rate, phase.seconds)
    free = [0.0] * threads
    claimed = end = worked = 0.0
    for unit in range(phase.units):
        claimed = max(free[0], claimed if phase.shared else 0.0) + CLAIM_SECONDS
        mine = cost * (phase.sizes[unit] if phase.sizes else 1)
        worked += mine
        end = max(end, claimed + mine)
        heapq.heapreplace(free, claimed + mine)
    return end + (WAKE_SECONDS if threads > 1 else 0), worked


def phases(shape: Shape, rows: int, context: int, threads: int, parts: bool) -> Iterator[tuple[Phase, int]]:
    """The phases of a pass, in llama.c's words, and how often each occurs."""
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    times = shape.layers
    yield Phase("embed", rows, 4 * shape.hidden, 2 * shape.hidden * VECTOR_SECONDS), 1
    yield linear("qkv", query + 2 * key, shape.hidden, rows, threads), times
    numbers = rows * (query + 2 * key) / shape.kv_heads
    remember = Phase("remember", shape.kv_heads, 0, numbers * SCALAR_SECONDS)
    first, *others = attend(shape, rows, context, threads, parts)
    if others or first.units > shape.kv_heads:
        yield remember, times
    else:
        first = first._replace(seconds=first.seconds + remember.seconds)
    rounding = rows * query * VECTOR_SECONDS
    is_rounded = not others and shape.head_dim % ROUNDED == 0
    yield first._replace(seconds=first.seconds + is_rounded * rounding / first.units), times
    for phase in others:
        yield phase, times
    if not is_rounded:
        yield Phase("round", rows, 0, rounding / rows), times
    yield linear("output", shape.hidden, query, rows, threads), times
    yield Phase("normalize", rows, 0, 3 * shape.hidden * VECTOR_SECONDS), 2 * times
    gated = linear("gate and up", 2 * shape.inner, shape.hidden, rows, threads, whole=2 * ROUNDED // LANES)
    rounding = rows * shape.inner * VECTOR_SECONDS / gated.units
    yield gated._replace(seconds=gated.seconds + rounding), times
    yield linear("down", shape.hidden, shape.inner, rows, threads), times
    yield linear("head", shape.vocab, shape.hidden, rows, threads), 1


def linear(name: str, outputs: int, inputs: int, rows: int, threads: int, whole: int = 1) -> Phase:
    """See `cut_panels` in llama.c. whole: panels that are finished together; single panels are still multiplied in
    pairs where a thread has several."""
    panels, shares = -(-outputs // LANES), threads * SHARES
    size = 1 if panels <= shares and whole == 1 else max(whole, 2)
    pieces = -(-panels // size)
    units = min(pieces, shares)
    firsts = [min(pieces * unit // units * size, panels) for unit in range(units + 1)]
    sizes = tuple((end - first) * units / panels for first, end in pairwise(firsts))
    weights = panels * LANES * inputs / units
    return Phase(name, units, weights * WEIGHT_BYTES, rows * weights / PRODUCTS, sizes, shared=False)


def attend(shape: Shape, rows: int, context: int, threads: int, parts: bool) -> Iterator[Phase]:
    """See `cut` and `attention` in llama.c; the rows see the same slots."""
    queries = rows * shape.heads // shape.kv_heads
    tiles = -(-(rows * shape.heads // (threads * SHARES)) // MOST_ROWS)
    most = min(max(tiles, 1) * MOST_ROWS, MOST_QUERIES)
    least = -(-queries // most)
    panels, values = -(-context // LANES), -(-shape.head_dim // LANES)
    halves = least == 1 and queries > MOST_ROWS and queries * panels >= LEAST_SHARED
    even = (n for n in range(least, 2 * least + halves) if n * shape.kv_heads % threads == 0)
    units = shape.kv_heads * next(even, least)
    each = queries * shape.kv_heads / units  # queries of a unit
    memory = context * shape.head_dim * CACHE_BYTES  # of keys, or of values
    seconds = each * context * shape.head_dim / FLOAT_PRODUCTS
    if not parts or units % threads == 0 or units >= threads * SHARES or panels < 2 * LEAST_PART:
        yield Phase("attention", units, 2 * memory, 2 * seconds)
        return
    cut = min(-(-threads * PARTS_OF_SCORES // units), panels // LEAST_PART)
    yield Phase("attention: scores", units * cut, memory / cut, seconds / cut)
    mixes = values if units * -(-values // 2) < threads else -(-values // 2)
    yield Phase("attention: values", units * mixes, memory / mixes, seconds / mixes)


if __name__ == "__main__":
    main()
