"""What a build of Llama-3.1-8B with a draft of 1B takes: memory, processor time and plan size, on random weights.

    python -m benchmarks.gpu.large_build --layers 2,16 --output benchmarks/results

Each step of a build with TensorRT-RTX runs in a process of its own: the export, the torch reference layer by layer, the
comparison in ONNX Runtime, and the compilation. No GPU is needed. `--layers 32` builds the whole target, which takes 33
GB of disk; the draft has 16 layers at most. From two numbers of layers follows what every further layer takes, and
thereby the whole model, which is marked as extrapolated.

A step's memory is counted twice: everything that is resident, and what is the process's own. The difference is files
that are mapped, mostly the graph's weights; the system drops their pages where memory is short.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from time import process_time
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from benchmarks.tools.record import add_output, write_results
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.engines.export import export
from draftwood.builder.engines.plan import CompileOptions, compile_plan
from draftwood.builder.parity import Scored, largest_difference, rows_of
from draftwood.builder.reference import Reference
from draftwood.models.bindings import COMPACT, DRAFT, TARGET, output_names
from draftwood.models.config import LlamaConfig
from draftwood.models.layers import network_of
from draftwood.runtime.engines.base import EngineSpec
from draftwood.runtime.engines.onnx.onnxruntime import OnnxRuntimeEngine

WIDTHS, COLUMNS, MAX_LENGTH = (1, 2, 4, 8, 16, 32, 64), 64, 8192
SHAPES = {
    TARGET: LlamaConfig(128256, 4096, 14336, 32, 32, 8, 128, 131072, 1e-5, 500000.0),
    DRAFT: LlamaConfig(128256, 2048, 8192, 16, 32, 8, 64, 131072, 1e-5, 500000.0, tie_embeddings=True),
}
FIGURES = ("own_gb", "peak_gb", "cpu_seconds", "file_gb")
SAMPLE_SECONDS = 0.02


class RandomCheckpoint(Checkpoint):
    """Random weights of a shape, which are made when they are read."""

    def __init__(self, config: LlamaConfig) -> None:
        self.config = config
        self._shapes = network_of(config).tensors()
        self._numbers = np.random.default_rng(0).standard_normal((1 << 20) + 1, np.float32).astype(np.float16)

    def tensor(self, name: str) -> NDArray[Any]:
        """The numbers repeat with a period that divides no matrix, and begin elsewhere in every tensor: a plan stores
        equal tensors once. A norm has ones."""
        shape = self._shapes[name]
        if len(shape) == 1:
            return np.ones(shape, np.float16)
        numbers = np.roll(self._numbers, crc32(name.encode())) / np.float16(np.sqrt(shape[1]))
        return np.resize(numbers, shape)


def spec_of(role: str, layers: int) -> EngineSpec:
    model = replace(SHAPES[role], num_layers=layers)
    names = output_names(role, form=COMPACT)
    return EngineSpec(role, "tensorrt-rtx", f"{role}.plan", model, WIDTHS, MAX_LENGTH + COLUMNS, "fp16", names)


def run_export(spec: EngineSpec, folder: Path) -> Path:
    path = folder / "graph.onnx"
    export(RandomCheckpoint(spec.model), spec.role, spec.capacity, path, void, form=COMPACT, precision="fp16")
    return path.with_name("graph.onnx.data")


def run_reference(spec: EngineSpec, folder: Path) -> Path:
    reference = Reference(RandomCheckpoint(spec.model).tensor, spec.model, rows_of(spec))
    for layer in range(spec.model.num_layers):
        reference.layer(layer)
    np.save(folder / "logits.npy", reference.scored().logits)
    return folder / "logits.npy"


def run_comparison(spec: EngineSpec, folder: Path) -> Path:
    engine = OnnxRuntimeEngine(folder / "graph.onnx", spec, threads=1, unprepared=True)
    found = largest_difference(engine, Scored(np.load(folder / "logits.npy"), None))
    print(f"{spec.role}: the largest difference is {found:.3g}", file=sys.stderr)
    return folder / "logits.npy"


def run_compilation(spec: EngineSpec, folder: Path) -> Path:
    options = CompileOptions("tensorrt-rtx", "fp16", WIDTHS, COLUMNS, ("8.9",))
    compile_plan(folder / "graph.onnx", folder / spec.file, spec.model, options, lambda step: lambda: None)
    return folder / spec.file


STEPS: dict[str, Callable[[EngineSpec, Path], Path]] = {
    "export": run_export,
    "reference": run_reference,
    "comparison": run_comparison,
    "compilation": run_compilation,
}


def void(name: str) -> None:
    """Progress that nobody sees."""


@contextmanager
def own_memory() -> Iterator[list[float]]:
    """The most bytes of memory that are no pages of a file, read from time to time: one number, while it runs and
    after."""
    most, ended = [0.0], Event()

    def follow() -> None:
        while not ended.wait(SAMPLE_SECONDS):
            (found,) = re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
            most[0] = max(most[0], 1024.0 * int(found))

    thread = Thread(target=follow)
    thread.start()
    try:
        yield most
    finally:
        ended.set()
        thread.join()


def run_step(role: str, layers: int, step: str, folder: Path) -> None:
    """One step in this process; prints its figures."""
    with own_memory() as own:
        made = STEPS[step](spec_of(role, layers), folder)
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    values = (own[0] / 1e9, usage / 1e9, process_time(), made.stat().st_size / 1e9)
    print(json.dumps(dict(zip(FIGURES, (round(value, 3) for value in values), strict=True))))


def measure(role: str, layers: int) -> dict[str, Any]:
    """The figures of each step for so many layers."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for step in STEPS:
            command = [sys.executable, "-m", __spec__.name, "--step", step, "--role", role, "--layers", str(layers)]
            done = subprocess.run([*command, "--folder", folder], stdout=subprocess.PIPE, text=True, check=True)
            found[step] = json.loads(done.stdout.splitlines()[-1])
            print(role, layers, step, found[step], flush=True)
    return found


def extrapolated(role: str, few: dict[str, Any], more: dict[str, Any], counts: Sequence[int]) -> dict[str, Any]:
    """The figures of the whole model, if every layer takes the same. counts: the layers of both measurements."""
    further = SHAPES[role].num_layers - counts[-1]
    return {
        step: {
            name: round(more[step][name] + further * (more[step][name] - few[step][name]) / (counts[-1] - counts[0]), 1)
            for name in FIGURES
        }
        for step in STEPS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="2,16", help="numbers of layers that are built (default %(default)s)")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--role", choices=SHAPES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    add_output(parser, "gpu_large_build", required=False)
    args = parser.parse_args()
    counts = sorted({int(count) for count in args.layers.split(",")})
    if args.step is not None:
        run_step(args.role, counts[0], args.step, args.folder)
        return
    results: dict[str, Any] = {}
    for role, shape in SHAPES.items():
        built = sorted({min(count, shape.num_layers) for count in counts})
        measured = {count: measure(role, count) for count in built}
        results[role] = {"layers": shape.num_layers, "measured": measured}
        if len(built) > 1 and built[-1] < shape.num_layers:
            results[role]["extrapolated"] = extrapolated(role, measured[built[0]], measured[built[-1]], built)
    if args.output is not None:
        write_results(args.output, args.name, {"widths": WIDTHS, "slots": MAX_LENGTH + COLUMNS, "roles": results})


if __name__ == "__main__":
    main()
