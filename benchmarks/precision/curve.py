"""Milliseconds per pass against rows, for every backend and weight format.

    python -m benchmarks.tools.inflate --checkpoint models/demo/target --shape 110m --output inflated
    python -m benchmarks.precision.curve --checkpoint inflated --output benchmarks/results

A sweep times every engine once at one width. Other programs may run meanwhile. Only the quarter of the sweeps in which
they used least of the processor counts; the results contain how much that was. If the machine is never quiet, measure
with --threads 1 and --show processor: processor time does not include other programs. (With several threads it includes
the time in which they wait for each other.)
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.precision.engines import open_engines
from benchmarks.tools.processor import read_busy_seconds
from benchmarks.tools.record import add_output, write_results
from benchmarks.tools.svg import new_figure, save_svg
from draftwood.models.bindings import TARGET
from draftwood.runtime.engines.base import Engine, TokenBatch
from draftwood.runtime.engines.passes import prefill

ROWS = (1, 2, 4, 8, 12, 16, 32)
CONTEXT, CAPACITY = 128, 1024
COLOURS = {"fp32": "tab:blue", "fp16": "tab:purple", "bf16": "tab:red", "int8": "tab:orange", "int4": "tab:green"}
LINES = {"onnxruntime": ":", "native": "-"}
QUIETEST = 4  # one of so many sweeps counts


class Timing(NamedTuple):
    """Seconds of one pass: by the clock, and of processor time."""

    wall: float
    processor: float


class Sweep(NamedTuple):
    """One pass of every engine. others: share of the processor that other programs used. timings: by engine."""

    others: float
    timings: dict[tuple[str, str], Timing]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    add_output(parser, "precision_curve")
    parser.add_argument("--sweeps", type=int, default=40, help="for each number of rows")
    parser.add_argument("--threads", type=int, default=2, help="of each engine")
    parser.add_argument("--show", choices=Timing._fields, default="wall", help="what the picture and the table show")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engines = open_all(args.checkpoint, Path(folder), args.threads)
        curve = measure(engines, args.sweeps)
    table = Table("ms per pass", *map(str, ROWS))
    figures: dict[str, Any] = {}
    quiet = {rows: choose_quietest(sweeps) for rows, sweeps in curve.items()}
    for key in engines:
        name = " ".join(key)
        wall = {rows: median(s.timings[key].wall for s in sweeps) for rows, sweeps in quiet.items()}
        # Other programs only add to processor time, through the shared caches: the minimum is the best estimate.
        processor = {rows: min(s.timings[key].processor for s in sweeps) for rows, sweeps in curve.items()}
        figures[name] = {
            kind: {str(rows): round(1e3 * value, 2) for rows, value in seconds.items()}
            for kind, seconds in (("wall", wall), ("processor", processor))
        }
        table.add_row(name, *(f"{value:.1f}" for value in figures[name][args.show].values()))
    busy = {str(rows): round(median(s.others for s in sweeps), 3) for rows, sweeps in quiet.items()}
    Console().print(table, f"share of the processor that other programs had: {busy}")
    settings = {"context": CONTEXT, "threads": args.threads, "others": busy}
    file = write_results(args.output, args.name, settings | {"ms": figures})
    draw(figures, args.show, args.threads, file.with_suffix(".svg"))


def choose_quietest(sweeps: list[Sweep]) -> list[Sweep]:
    return sorted(sweeps, key=lambda sweep: sweep.others)[: max(1, len(sweeps) // QUIETEST)]


def open_all(folder: Path, work: Path, threads: int) -> dict[tuple[str, str], Engine]:
    """An engine of each backend and format, with all timed widths."""
    made = open_engines(folder, TARGET, ROWS, CAPACITY, work, threads)
    return {(backend, precision): engine for backend, precision, engine in made}


def measure(engines: dict[tuple[str, str], Engine], count: int) -> dict[int, list[Sweep]]:
    caches: dict[tuple[str, str], Any] = {}
    rng = np.random.default_rng(0)
    for key, engine in engines.items():
        caches[key] = engine.new_cache()
        prefill(engine, caches[key], rng.integers(0, engine.spec.model.vocab_size, CONTEXT).tolist())

    def time_pass(key: tuple[str, str], rows: int) -> Timing:
        engine, cache = engines[key], caches[key]
        positions = np.arange(CONTEXT, CONTEXT + rows)
        batch = TokenBatch.pad(
            np.arange(rows) + 5, positions, np.tri(rows, dtype=np.bool_), engine.spec.width_for(rows)
        )
        engine.score(batch, cache)  # brings its weights back into the caches, and binds buffers the first time
        cache.commit([])
        start, worked = perf_counter(), process_time()
        engine.score(batch, cache)
        timing = Timing(perf_counter() - start, process_time() - worked)
        cache.commit([])
        return timing

    sweeps: dict[int, list[Sweep]] = {rows: [] for rows in ROWS}
    for rows in ROWS:  # buffers are bound outside of what counts
        for key in engines:
            time_pass(key, rows)
    for _ in range(count):
        for rows in ROWS:
            busy, own = read_busy_seconds(), process_time()
            start = perf_counter()
            timings = {key: time_pass(key, rows) for key in engines}
            available = (perf_counter() - start) * len(os.sched_getaffinity(0))
            others = (read_busy_seconds() - busy) - (process_time() - own)
            sweeps[rows].append(Sweep(max(0.0, others / available), timings))
    return sweeps


def draw(figures: dict[str, Any], shown: str, threads: int, picture: Path) -> None:
    canvas = new_figure(6, 4)
    axes = canvas.subplots()
    for name, row in figures.items():
        backend, precision = name.split()
        rows = [int(rows) for rows in row[shown]]
        axes.plot(rows, row[shown].values(), LINES[backend], color=COLOURS[precision], marker=".", label=name)
    axes.set_xlabel("rows in a pass")
    axes.set_ylabel(f"ms per pass, {threads} thread{'s'[: threads - 1]}, {shown} time")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ROWS, [str(rows) for rows in ROWS])
    axes.set_ylim(bottom=0)
    axes.legend()
    save_svg(canvas, picture)


if __name__ == "__main__":
    main()
