"""Time of a pass by instruction set, precision and rows, the native kernels beside ONNX Runtime and llama.cpp under the
same restriction. Every engine has one thread, and its processor time is what counts: others may use the machine
meanwhile. The engines compute in a new random order each time, and each computes some passes before the one that
counts: after another program has used the memory, a pass takes up to 1.8 times as long, and the next ones less and
less. Of llama.cpp the clock of llama-bench counts, the least of its runs: leave the machine alone for these rows.

ONNX Runtime chooses its kernels by CPUID; tools/without_avx512.c hides what AVX2 does not have (Linux, and a processor
with cpuid_fault). On a processor without AVX-512 every program is restricted to AVX2 as it is. llama.cpp's kernels are
one library, libggml-cpu.so: the one for AVX2 is built from the same source in a folder of its own, and its `bin` takes
precedence when llama-bench starts.

    cmake -S build/peers/llama.cpp/source -B AVX2 -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=OFF \\
        -DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON \\
        -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_UI=OFF
    cmake --build AVX2 --target ggml-cpu          # under a minute
    python -m benchmarks.costs.instruction_sets --checkpoint DIR --output benchmarks/results \\
        --llama-cpp build/peers/llama.cpp --llama-cpp-avx2 AVX2
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import random
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import process_time
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.peers.programs.llama_cpp import TYPES
from benchmarks.precision.front_llama_cpp import LlamaCpp
from benchmarks.tools.record import add_output, write_results
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.models.bindings import TARGET, output_names
from draftwood.plugins.native import cache
from draftwood.plugins.native.compile import FLAGS, PROCESSOR, compiler
from draftwood.plugins.native.library import NativeLibrary
from draftwood.plugins.native.processor import KernelError, available
from draftwood.runtime.engines.backends import BACKENDS
from draftwood.runtime.engines.base import Engine, EngineSpec, TokenBatch
from draftwood.runtime.engines.passes import prefill

ROWS = (1, 2, 4, 8)
CAPACITY = 256
SETTLING = 12  # passes before one that counts, as in plain decoding, where each follows another one
TURNS = 3  # of llama.cpp's builds
HIDING = Path(__file__).parents[1] / "tools" / "without_avx512.c"
AMX = "AVX-512 with AMX"  # differs at bf16 alone
SETS = {  # of the native kernels
    AMX: ("-march=x86-64-v4", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"),
    "AVX-512 VNNI": ("-march=x86-64-v4", "-mavx512vnni"),
    "AVX-512": ("-march=x86-64-v4",),
    "AVX2": ("-march=x86-64-v3",),
}


class Contestant(NamedTuple):
    """One backend under one restriction. kernels: the native library; hiding: the library that hides AVX-512."""

    name: str
    backend: str
    kernels: Path | None = None
    hiding: Path | None = None

    def has(self, precision: str) -> bool:
        return precision in BACKENDS[self.backend].precisions and (precision == "bf16" or AMX not in self.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="Hugging Face folder")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16", "int8", "int4"], metavar="NAME")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="of a pass (default %(default)s)")
    parser.add_argument("--context", type=int, default=64, metavar="SLOTS", help="in the cache (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="of each pass (default %(default)s)")
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR", help="build/peers/llama.cpp, with llama-bench")
    parser.add_argument("--llama-cpp-avx2", type=Path, metavar="DIR", help="its build for AVX2")
    add_output(parser, "costs_instruction_sets")
    args = parser.parse_args()
    builds = {f"llama.cpp{name}": folder for name, folder in ((", AVX2", args.llama_cpp_avx2), ("", args.llama_cpp))}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        contestants = list(contestants_here(folder))
        milliseconds: dict[str, dict[str, dict[str, float]]] = {}
        for precision in args.precisions:
            able = [each for each in contestants if each.has(precision)]
            specs = {
                each.backend: make_file(args.checkpoint, each.backend, precision, args.rows, folder) for each in able
            }
            milliseconds[precision] = measure(able, specs, folder, args.context, args.repeats)
            if args.llama_cpp is not None:
                model = LlamaCpp(args.llama_cpp, args.checkpoint, folder, 1).file(TYPES[precision])
                program = args.llama_cpp / "build" / "bin" / "llama-bench"
                folders = {name: build for name, build in builds.items() if build is not None}
                milliseconds[precision] |= bench(program, folders, model, args.rows, args.context, args.repeats)
    table = Table("precision", "engine", *(f"{rows} rows" for rows in args.rows), title="processor ms of a pass")
    for precision, engines in milliseconds.items():
        for engine, passes in engines.items():
            table.add_row(precision, engine, *(f"{value:.2f}" for value in passes.values()))
    Console().print(table)
    figures = {"checkpoint": args.checkpoint.name, "context": args.context, "cpu_ms": milliseconds}
    write_results(args.output, args.name, figures)


def contestants_here(folder: Path) -> Iterator[Contestant]:
    """What this processor has instructions for. Without AVX-512 there is nothing to hide from ONNX Runtime."""
    others = tuple(flag for flag in FLAGS if flag != PROCESSOR)
    for name, flags in SETS.items():
        if name == AMX and "amx_bf16" not in available(("amx_bf16",)):
            continue
        kernels = cache.kernels((*others, *flags))
        try:
            NativeLibrary(kernels)
        except KernelError:
            continue
        yield Contestant(f"native, {name}", "native", kernels)
    if "avx512f" in available(("avx512f",)):
        hiding = folder / "hiding.so"
        subprocess.run([*compiler(), "-O1", "-fPIC", "-shared", str(HIDING), "-o", str(hiding)], check=True)
        yield Contestant("ONNX Runtime, AVX2", "onnxruntime", hiding=hiding)
    yield Contestant("ONNX Runtime", "onnxruntime")


def make_file(checkpoint: Path, backend: str, precision: str, rows: Sequence[int], folder: Path) -> EngineSpec:
    """Write an engine's file, unless it is there; returns what it is."""
    from draftwood.builder.engines.make import Source, write_graph
    from draftwood.builder.engines.native import write_weights

    source = Source(Checkpoint(checkpoint), TARGET, None, backend, precision)
    model = source.checkpoint.config
    file = f"{precision}.{BACKENDS[backend].file}"
    spec = EngineSpec(TARGET, backend, file, model, tuple(rows), CAPACITY, precision, output_names(TARGET))
    if not (folder / file).exists():
        if backend == "native":
            write_weights(source.weights, CAPACITY, folder / file, None)
        else:
            write_graph(source, spec, folder / file, lambda step: lambda: None)
    return spec


def measure(
    contestants: list[Contestant], specs: dict[str, EngineSpec], folder: Path, context: int, repeats: int
) -> dict[str, dict[str, float]]:
    """Median milliseconds by contestant and rows; each has a process, and they compute in turn."""
    spawn = multiprocessing.get_context("spawn")
    ends = []
    for each in contestants:
        mine, theirs = spawn.Pipe()
        spawn.Process(target=serve, args=(each, specs[each.backend], folder, context, theirs), daemon=True).start()
        theirs.close()  # so that the end of a process that fails is seen
        mine.recv()  # it is ready
        ends.append(mine)
    widths = next(iter(specs.values())).widths
    times = {each.name: {rows: list[float]() for rows in widths} for each in contestants}
    order, rng = list(zip(contestants, ends, strict=True)), random.Random(0)
    for _ in range(repeats):
        for rows in widths:
            rng.shuffle(order)
            for each, end in order:
                end.send(rows)
                times[each.name][rows].append(end.recv())
    for end in ends:
        end.send(0)
    return {
        name: {str(rows): round(1e3 * median(seconds), 3) for rows, seconds in passes.items()}
        for name, passes in times.items()
    }


def bench(
    program: Path, builds: Mapping[str, Path], model: Path, widths: Sequence[int], context: int, repeats: int
) -> dict[str, dict[str, float]]:
    """Least milliseconds by build and rows; the builds run in turn. Only the last row goes through the vocabulary."""
    asked = ["-m", str(model), "-p", ",".join(map(str, widths)), "-n", "0", "-d", str(context), "-t", "1"]
    best = {name: dict.fromkeys(map(str, widths), float("inf")) for name in builds}
    for _ in range(TURNS):
        for name, build in builds.items():
            environment = environment_of(program, build)
            command = [str(program), *asked, "-r", str(-(-repeats // TURNS)), "-o", "json"]
            shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            for rows, milliseconds in least_milliseconds(shown.stdout).items():
                best[name][rows] = min(best[name][rows], milliseconds)
    return best


def environment_of(program: Path, build: Path) -> dict[str, str]:
    """In which the program loads the kernels of a build. Raises SystemExit where it loads others."""
    own = build / "bin" if (build / "bin").is_dir() else build / "build" / "bin"
    environment = os.environ | {"LD_LIBRARY_PATH": str(own.resolve())}
    listed = subprocess.run(["ldd", str(program)], env=environment, capture_output=True, text=True, check=True).stdout
    if not loads_from(listed, own.resolve()):
        raise SystemExit(f"{program} does not load libggml-cpu.so from {own}: build the target ggml-cpu there")
    return environment


def loads_from(listed: str, folder: Path) -> bool:
    """Whether a program loads its kernels from this folder, by what `ldd` lists."""
    found = [line.split("=>")[1].split()[0] for line in listed.splitlines() if "libggml-cpu" in line and "=>" in line]
    return [Path(file).parent for file in found] == [folder]


def least_milliseconds(shown: str) -> dict[str, float]:
    """By rows, the least time of what llama-bench shows as JSON. Raises SystemExit unless it measured all of ROWS."""
    least = {
        str(test["n_prompt"]): round(min(test["samples_ns"]) / 1e6, 3)
        for test in json.loads(shown)
        if not test["n_gen"]
    }
    if least.keys() != set(map(str, ROWS)):
        raise SystemExit(f"llama-bench measured {', '.join(least) or 'no'} rows, not {', '.join(map(str, ROWS))}")
    return least


def serve(contestant: Contestant, spec: EngineSpec, folder: Path, context: int, end: Connection) -> None:
    """A process: passes of as many rows as `end` asks for, until it asks for none; answers seconds."""
    if contestant.hiding is not None and ctypes.CDLL(str(contestant.hiding)).hide_avx512():
        raise SystemExit("this processor or system cannot hide instructions")
    engine = open_engine(contestant, spec, folder)
    rng = np.random.default_rng(0)
    cache = engine.new_cache()
    prefill(engine, cache, rng.integers(0, spec.model.vocab_size, context).tolist())
    end.send(0.0)
    while rows := end.recv():
        tokens, positions = rng.integers(0, spec.model.vocab_size, rows), np.arange(context, context + rows)
        batch = TokenBatch.pad(tokens, positions, np.tri(rows, dtype=np.bool_), rows)
        for _ in range(SETTLING):
            engine.score(batch, cache)
            cache.commit([])
        start = process_time()
        engine.score(batch, cache)
        end.send(process_time() - start)
        cache.commit([])


def open_engine(contestant: Contestant, spec: EngineSpec, folder: Path) -> Engine:
    """On one thread."""
    if contestant.kernels is None:
        from draftwood.runtime.engines.onnx.onnxruntime import OnnxRuntimeEngine

        return OnnxRuntimeEngine(folder / spec.file, spec, 1)
    from draftwood.runtime.engines.native import engine as native

    with patch.object(native, "open_kernels", lambda: NativeLibrary(contestant.kernels or Path())):
        return native.NativeEngine(folder / spec.file, spec, 1)


if __name__ == "__main__":
    main()
