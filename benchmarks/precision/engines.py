"""Every engine that a build can make of one checkpoint for a CPU: all backends with all their weight formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from draftwood.builder.checkpoint import Checkpoint
from draftwood.builder.engines.export import export
from draftwood.builder.engines.make import EXPORTED, Source
from draftwood.builder.engines.native import write_weights
from draftwood.builder.options import BACKENDS
from draftwood.builder.quantize import RoundedCheckpoint
from draftwood.models.bindings import output_names
from draftwood.runtime.engines.base import Engine, EngineSpec
from draftwood.runtime.engines.native.engine import NativeEngine

KINDS = [(backend, precision) for backend in (*EXPORTED, "native") for precision in BACKENDS[backend]]


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
        if backend == "native":
            write_weights(weights, capacity, file)
            yield backend, precision, NativeEngine(file, spec, threads)
        else:
            assert not isinstance(weights, RoundedCheckpoint)  # ONNX Runtime's engines hold the stored weights
            export(weights, role, capacity, file, lambda name: None)
            yield backend, precision, EXPORTED[backend](file, spec, threads)
