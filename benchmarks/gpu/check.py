"""Check everything that needs a GPU, on whatever machine this runs: `make gpu-check`, or, without any installation,

    PY=python3 make gpu-check

Each part says ok, failed, or not possible and why. Figures go to benchmarks/results/gpu-check-<device>-<date>.json; a
machine without a CUDA device checks what a CPU can and writes nothing. Exit code 1 if a part failed, else 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks.gpu.report import FAILED, Findings, NotPossible, Outcome, Part, outcomes, row, write_outcomes

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
BUDGET = 520.0  # seconds, of the nine minutes a check may take


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the figures")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds; parts that might not fit are left out")
    parser.add_argument("--target-shape", default="7b", help="of the model whose speed is measured, see inflate.py")
    parser.add_argument("--draft-shape", default="110m", help="of its draft")
    args = parser.parse_args()
    device = cuda_device()
    print(device or "No CUDA device: checking what a CPU can. Run this on a machine with an NVIDIA GPU for the rest.")
    parts = gpu_parts((args.target_shape, args.draft_shape)) if device else cpu_parts()
    results: list[Outcome] = []
    for outcome in outcomes(parts, args.budget):
        results.append(outcome)
        print(row(outcome), flush=True)
        if outcome.trace:
            print(outcome.trace, file=sys.stderr)
        if device:  # after every part: a machine may be taken away, or a part end the process
            file = write_outcomes(args.output, device, results)
    if device:
        print(f"Figures: {file}")
    return 1 if any(outcome.status == FAILED for outcome in results) else 0


def cuda_device() -> str | None:
    """Name of the GPU that torch uses; None without torch or a GPU."""
    try:
        import torch
    except ModuleNotFoundError:
        return None
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def cpu_parts() -> list[Part]:
    """What can be checked without a GPU: the kernel in Triton's interpreter, the static passes on the host."""
    # Triton decides when a kernel is imported, which no part has done yet.
    os.environ["TRITON_INTERPRET"] = "1"
    return [
        Part("kernel, interpreted", 60, interpreted_kernel),
        Part("torch engine", 60, partial(engine_parity, "cpu", ("fp32",))),
        Part("speculative = plain", 60, partial(same_text, "cpu", 24, 1)),
        Part("tensorrt", 30, partial(tensorrt, "tensorrt")),
        Part("tensorrt-rtx", 30, partial(tensorrt, "tensorrt-rtx")),
    ]


def gpu_parts(shapes: tuple[str, str]) -> list[Part]:
    return [
        Part("device", 20, device_figures),
        Part("kernel numerics", 120, kernel_numerics),
        Part("kernel time", 90, kernel_time),
        Part("torch engine", 60, partial(engine_parity, "cuda", ("fp32", "fp16", "bf16"))),
        Part("speculative = plain", 60, partial(same_text, "cuda", 96, 3)),
        Part(f"{shapes[0]} speculation", 180, partial(speculation, shapes)),
        Part("tensorrt", 100, partial(tensorrt, "tensorrt")),
        Part("tensorrt-rtx", 100, partial(tensorrt, "tensorrt-rtx")),
    ]


def device_figures() -> Findings:
    """What the GPU is, and what its memory brings."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    figures = {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gb": round(properties.total_memory / 1e9, 1),
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "bandwidth_gb_per_s": round(memory_bandwidth() / 1e9, 1),
    }
    return Findings(", ".join(f"{name} {value}" for name, value in figures.items() if name != "name"), figures)


def driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"


def memory_bandwidth() -> float:
    """Bytes per second that a large copy reads and writes."""
    import torch

    from benchmarks.gpu.kernel import timed

    source = torch.randint(0, 255, (1 << 31,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed([lambda: target.copy_(source)])


def interpreted_kernel() -> Findings:
    from benchmarks.gpu.kernel import interpreted, interpreted_shapes, numerics

    return numerics(interpreted, interpreted_shapes(), "cpu")


def kernel_numerics() -> Findings:
    from benchmarks.gpu.kernel import numerics, shapes
    from draftwood.plugins.tree_attention.launch import tree_attention

    cases = [shape for dtype in ("fp32", "fp16", "bf16") for shape in shapes(dtype)]
    return numerics(tree_attention, cases, "cuda")


def kernel_time() -> Findings:
    from benchmarks.gpu.kernel import speed
    from draftwood.plugins.tree_attention.launch import tree_attention

    return speed(tree_attention, memory_bandwidth())


def engine_parity(device: str, precisions: tuple[str, ...]) -> Findings:
    from benchmarks.gpu.engine import parity

    return parity(device, precisions)


def same_text(device: str, max_tokens: int, count: int) -> Findings:
    from benchmarks.gpu.engine import same_text

    return same_text(device, max_tokens, count)


def speculation(shapes: tuple[str, str]) -> Findings:
    from benchmarks.gpu.engine import speculation

    return speculation(shapes, "cuda", "fp16", max_tokens=128, count=3, threads=os.cpu_count() or 1)


def tensorrt(backend: str) -> Findings:
    """In a process of its own: TensorRT may end the process it is in, and Polygraphy serves one package in each."""
    code = f"import json; from benchmarks.gpu import tensorrt as part; print(json.dumps(part.check({backend!r})))"
    paths = [str(ROOT), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=240,
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
