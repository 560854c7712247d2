"""Every engine that a build can make of one checkpoint for a CPU: all backends with all their weight formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.engines.export import export
from draftwood.builder.engines.make import Source
from draftwood.builder.engines.native import write_weights
from draftwood.builder.quantization.formats import RoundedCheckpoint
from draftwood.models.bindings import output_names
from draftwood.runtime.engines.backends import BACKENDS, WEIGHTS, Opening
from draftwood.runtime.engines.base import Engine, EngineSpec

KINDS = [(each.name, kind) for each in BACKENDS.values() if not each.is_compiled for kind in each.precisions]


def open_engines(
    folder: Path, role: str, widths: Sequence[int], capacity: int, work: Path, threads: int = 0
) -> Iterator[tuple[str, str, Engine]]:
    """Build and open the engines of a checkpoint folder one after the other. Yields backend, precision and engine.

    work: folder for the files. threads: of each engine, 0: one per core.
    """
    for backend, precision in KINDS:
        weights = Source(Checkpoint(folder), role, None, backend, precision).weights
        file = work / f"{role}-{backend}-{precision}.onnx"
        spec = EngineSpec(
            role, backend, file.name, weights.config, tuple(widths), capacity, precision, output_names(role)
        )
        if BACKENDS[backend].file == WEIGHTS:
            write_weights(weights, capacity, file)
        else:
            assert not isinstance(weights, RoundedCheckpoint)  # a graph on a CPU holds fp32, int8 or int4
            export(weights, role, capacity, file, lambda name: None)
        yield backend, precision, BACKENDS[backend].open(file, spec, Opening(threads))
