"""Check everything that needs a GPU, on whatever machine this runs: `make gpu-check`.

The check needs no installation: `PY=/path/to/python make gpu-check` runs it in any Python with torch. Each part prints
ok, failed, or not possible with the reason. Results go to benchmarks/results/gpu_check_<device>_<date>.json. A machine
without a CUDA device checks what a CPU can, and writes nothing. The exit code is 1 if a part failed, else 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.gpu.report import FAILED, Findings, NotPossible, Outcome, Part, format_row, run_parts, write_outcomes

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
BUDGET = 520.0  # seconds; a check may take nine minutes
MINUTE = 60  # what most parts may take
BACKENDS = ("tensorrt", "tensorrt-rtx")
KERNEL, SHARED, OWN = "our kernel", "4 requests", "TensorRT's attention"  # keys of tensorrt.FORMS
LOW_BIT = ("int8", "int4", "fp8")  # the others


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the figures")
    parser.add_argument(
        "--budget",
        type=float,
        default=BUDGET,
        help="seconds; a part that might take longer than what is left does not run",
    )
    parser.add_argument("--target-shape", default="7b", help="of the model whose speed is measured, see inflate.py")
    parser.add_argument("--draft-shape", default="110m", help="of its draft")
    args = parser.parse_args()
    device = find_device()
    print(device or "No CUDA device: checking what a CPU can. Run this on a machine with an NVIDIA GPU for the rest.")
    results: list[Outcome] = []
    with TemporaryDirectory() as folder:
        parts = list_gpu_parts((args.target_shape, args.draft_shape), folder) if device else list_cpu_parts()
        for outcome in run_parts(parts, args.budget):
            results.append(outcome)
            print(format_row(outcome), flush=True)
            if outcome.trace:
                print(outcome.trace, file=sys.stderr)
            if device:  # after every part: a machine may be taken away, or a part end the process
                file = write_outcomes(args.output, device, results)
    if device:
        print(f"Figures: {file}")
    return 1 if any(outcome.status == FAILED for outcome in results) else 0


def find_device() -> str | None:
    """Name of the GPU that torch uses; None without torch or a GPU."""
    try:
        import torch
    except ModuleNotFoundError:
        return None
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def list_cpu_parts() -> list[Part]:
    """What a machine without a GPU can check: the kernel in Triton's interpreter, the static passes on the host."""
    # Triton reads this when the kernel is imported. No part has imported it yet.
    os.environ["TRITON_INTERPRET"] = "1"
    return [
        Part("kernel, interpreted", 60, check_interpreted_kernel),
        Part("torch engine", 60, partial(check_engine, "cpu", ("fp32",))),
        Part("speculative = plain", 60, partial(check_texts, "cpu", 24, 1)),
        *(Part(backend, 30, partial(check_tensorrt, backend, "build", KERNEL, "")) for backend in BACKENDS),
    ]


def list_gpu_parts(shapes: tuple[str, str], folder: str) -> list[Part]:
    """Whether something works precedes how fast it is. shapes: of the target and the draft whose speed is measured,
    keys of inflate.SHAPES. folder: for bundles."""

    def stages(form: str, names: Sequence[str]) -> list[Part]:
        return [
            Part(f"{backend}, {form}: {stage}", MINUTE, partial(check_tensorrt, backend, stage, form, folder))
            for backend in BACKENDS
            for stage in names
        ]

    return [
        Part("device", 20, describe_device),
        *(
            Part(f"kernel numerics, {dtype}", MINUTE, partial(check_kernel, dtype))
            for dtype in ("fp16", "bf16", "fp32")
        ),
        Part("torch engine", MINUTE, partial(check_engine, "cuda", ("fp32", "fp16", "bf16"))),
        Part("speculative = plain", MINUTE, partial(check_texts, "cuda", 96, 3)),
        *stages(KERNEL, ("build", "load", "capture", "first token", "texts")),
        *(part for form in (SHARED, OWN, *LOW_BIT) for part in stages(form, ("build", "load", "texts"))),
        *(Part(f"ONNX Runtime, {each}", MINUTE, partial(check_onnxruntime, each)) for each in ("fp32", "int4")),
        Part("kernel time", 90, time_kernel),
        *(part for form in (KERNEL, SHARED, OWN, *LOW_BIT) for part in stages(form, ("speed",))),
        Part(f"{shapes[0]} speculation", 180, partial(measure_speed, shapes)),
    ]


def describe_device() -> Findings:
    """Properties of the GPU, and the bandwidth of its memory."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    figures = {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gb": round(properties.total_memory / 1e9, 1),
        "driver": read_driver_version(),
        "cuda": torch.version.cuda,
        "bandwidth_gb_per_s": round(measure_bandwidth() / 1e9, 1),
    }
    return Findings(", ".join(f"{name} {value}" for name, value in figures.items() if name != "name"), figures)


def read_driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"


def measure_bandwidth() -> float:
    """Bytes per second that a large copy reads and writes."""
    import torch

    from benchmarks.gpu.kernel import time_calls

    source = torch.randint(0, 255, (1 << 31,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / time_calls([lambda: target.copy_(source)])


# Each part imports what it needs itself: a package that is missing makes this part impossible, not the others.
def check_interpreted_kernel() -> Findings:
    from benchmarks.gpu import kernel

    return kernel.check_numerics(kernel.attend_interpreted, kernel.list_small_shapes(), "cpu")


def check_kernel(dtype: str) -> Findings:
    from benchmarks.gpu import kernel
    from draftwood.plugins.tree_attention.launch import tree_attention

    return kernel.check_numerics(tree_attention, kernel.list_shapes(dtype), "cuda")


def time_kernel() -> Findings:
    from benchmarks.gpu import kernel
    from draftwood.plugins.tree_attention.launch import tree_attention

    return kernel.measure_speed(tree_attention, measure_bandwidth())


def check_engine(device: str, precisions: tuple[str, ...]) -> Findings:
    from benchmarks.gpu import engine

    return engine.check_parity(device, precisions)


def check_texts(device: str, max_tokens: int, count: int) -> Findings:
    from benchmarks.gpu import engine

    return engine.check_same_text(device, max_tokens, count)


def measure_speed(shapes: tuple[str, str]) -> Findings:
    from benchmarks.gpu import engine

    return engine.measure_speculation(shapes, "cuda", "fp16", max_tokens=128, count=3, threads=os.cpu_count() or 1)


def check_tensorrt(backend: str, stage: str, form: str, folder: str) -> Findings:
    return check_apart("tensorrt", backend, stage, form, folder)


def check_onnxruntime(precision: str) -> Findings:
    return check_apart("onnx_runtime", precision, "cuda")


def check_apart(module: str, *arguments: str) -> Findings:
    """A module's `check` in a process of its own: a library may end the process it is in, and Polygraphy serves one
    package of TensorRT in each."""
    called = ", ".join(map(repr, arguments))
    code = f"import json; from benchmarks.gpu import {module} as part; print(json.dumps(part.check({called})))"
    paths = [str(ROOT), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=MINUTE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "0"},
    )
    if done.returncode == 0:
        summary, figures = json.loads(done.stdout.splitlines()[-1])
        return Findings(summary, figures)
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    name, _, reason = last.partition(": ")
    if name.split(".")[-1] in ("NotPossible", "ModuleNotFoundError"):
        raise NotPossible(reason)
    raise RuntimeError(f"{last}\n{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
