"""Check everything that needs a GPU, on whatever machine this runs: `make gpu-check`.

The check needs no installation: `PY=/path/to/python make gpu-check` runs it in any Python with torch. It has two halves
of under seven minutes each (`HALF=a`, `HALF=b`):

a  the device and its bandwidth, the attention kernel against the oracle, the static engine and its rounds over a model
   that torch executes, and the speed of an 8B shape with a 1B draft;
b  times of the attention kernel, ONNX Runtime's CUDA provider, TensorRT and TensorRT-RTX where they are installed, and
   the tests that need a GPU.

Each stage is ok, failed, or not possible with the reason. Groups of stages run in processes of their own: none takes
the others down. Results go to benchmarks/results/gpu_check_<half>_<device>_<date>.json as they come. The exit code is 1
if a stage failed, else 0. Without a CUDA device nothing is written.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import NamedTuple

from benchmarks.gpu.report import (
    FAILED,
    NOT_POSSIBLE,
    Findings,
    NotPossible,
    Outcome,
    Part,
    format_row,
    run_parts,
    shorten,
    write_outcomes,
)
from benchmarks.tools.record import make_parser

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
BUDGET = 410.0  # seconds of a half
COMMAND = (sys.executable, "-m", "benchmarks.gpu.check")
BACKENDS = ("tensorrt", "tensorrt-rtx")
STAGES = {  # of a form of bundle, see tensorrt.FORMS
    "our kernel": ("build", "load", "capture", "first token", "texts", "speed"),
    "4 requests": ("build", "load", "texts", "speed"),
    "TensorRT's attention": ("build", "load", "texts", "speed"),
    **dict.fromkeys(("int8", "int4", "fp8"), ("build", "load", "texts", "speed")),
}
GPU_TESTS = ("tests/runtime/engines",)


class Group(NamedTuple):
    """Parts that run in one process. seconds: the most that it may take."""

    half: str
    seconds: int
    parts: Callable[[str], Iterator[Part]]  # from a folder for bundles
    package: str = ""  # whose absence makes the group impossible


def device_parts(folder: str) -> Iterator[Part]:
    yield Part("device", 20, describe_device)
    for dtype in ("fp16", "bf16", "fp32"):
        yield Part(f"attention kernel, {dtype}", 60, partial(check_kernel, dtype))


def static_parts(folder: str) -> Iterator[Part]:
    from benchmarks.gpu import engine

    yield Part("kernels of rounds are loaded", 60, load_rounds)
    yield Part("logits", 60, partial(engine.check_parity, ("fp32", "fp16", "bf16")))
    yield Part("texts, T = 0", 60, partial(engine.check_greedy, 3))
    yield Part("texts that share passes", 60, partial(engine.check_shared, 4))
    yield Part("texts, T = 1", 90, partial(engine.check_drawn, 3, 600))


def headline_parts(folder: str) -> Iterator[Part]:
    from benchmarks.gpu.headline import SHAPES, Headline, Scale

    yield from Headline(Scale(SHAPES), measured_bandwidth()).parts()


def kernel_time_parts(folder: str) -> Iterator[Part]:
    yield Part("attention kernel, time", 60, time_kernel)


def onnxruntime_parts(folder: str) -> Iterator[Part]:
    from benchmarks.gpu import onnx_runtime

    for precision in ("fp32", "int4"):
        yield Part(f"ONNX Runtime, {precision}", 90, partial(onnx_runtime.check, precision, "cuda"))


def tensorrt_parts(backend: str, form: str, folder: str) -> Iterator[Part]:
    from benchmarks.gpu import tensorrt

    for stage in STAGES[form]:
        yield Part(f"{backend}, {form}: {stage}", 60, partial(tensorrt.check, backend, stage, form, folder))


def test_parts(folder: str) -> Iterator[Part]:
    yield Part("pytest -m gpu", 180, run_tests)


GROUPS: dict[str, Group] = {
    "kernel": Group("a", 120, device_parts),
    "static engine": Group("a", 180, static_parts),
    "headline": Group("a", 300, headline_parts),
    "kernel time": Group("b", 120, kernel_time_parts),
    "onnxruntime": Group("b", 180, onnxruntime_parts),
    **{
        f"{backend}, {form}": Group("b", 300, partial(tensorrt_parts, backend, form), backend)
        for backend in BACKENDS
        for form in STAGES
    },
    "tests": Group("b", 200, test_parts, "pytest"),
}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--half", choices=("a", "b"), help="default: both, one after the other")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the figures")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds of a half")
    parser.add_argument("--only", nargs="+", choices=GROUPS, metavar="GROUP", help=f"some of {', '.join(GROUPS)}")
    parser.add_argument("--group", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.group:
        name, folder = args.group
        return run_group(name, folder, args.budget)
    device = find_device()
    if not device:
        print("No CUDA device: nothing is checked here. Run this on a machine with an NVIDIA GPU.")
        print("Without one, `pytest tests/benchmarks/test_gpu.py` runs the stages over a driver on the host.")
        return 0
    print(device, flush=True)
    statuses = []
    for half in (args.half,) if args.half else ("a", "b"):
        results: list[Outcome] = []
        for outcome in run_half(half, args.only or tuple(GROUPS), args.budget):
            results.append(outcome)
            print(format_row(outcome), flush=True)
            if outcome.trace:
                print(outcome.trace, file=sys.stderr, flush=True)
            # After every part: a machine may be taken away.
            file = write_outcomes(args.output, half, device, results)
        print(f"Figures: {file}", flush=True)
        statuses += [outcome.status for outcome in results]
    return 1 if FAILED in statuses else 0


def run_half(half: str, names: Sequence[str], budget: float) -> Iterator[Outcome]:
    """The outcomes of the groups of a half, each in a process of its own."""
    ends = monotonic() + budget
    with TemporaryDirectory() as folder:
        for name, group in GROUPS.items():
            if group.half == half and name in names:
                yield from run_apart(name, group, folder, min(ends - monotonic(), group.seconds))


def run_apart(name: str, group: Group, folder: str, seconds: float) -> Iterator[Outcome]:
    """The outcomes of one group's process, which is ended after so many seconds."""
    if group.package and importlib.util.find_spec(group.package.replace("-", "_")) is None:
        yield Outcome(name, NOT_POSSIBLE, 0.0, f"the package {group.package} is not installed", {})
        return
    if seconds < 5:
        yield Outcome(name, NOT_POSSIBLE, 0.0, "no time is left", {})
        return
    begun = monotonic()
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    process = subprocess.Popen(
        [*COMMAND, "--group", name, folder, "--budget", str(seconds)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    errors: list[str] = []
    assert process.stdout is not None and process.stderr is not None
    reader = threading.Thread(target=errors.extend, args=(process.stderr,))
    reader.start()
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    for line in process.stdout:
        if line.startswith(MARK):
            yield Outcome(**json.loads(line.removeprefix(MARK)))
        else:
            print(line, end="", flush=True)
    code = process.wait()
    timer.cancel()
    reader.join()
    process.stdout.close()
    process.stderr.close()
    if code:
        reason = f"its process ended with {code} after {monotonic() - begun:.0f} s"
        yield Outcome(f"{name}: process", FAILED, monotonic() - begun, reason, {}, "".join(errors[-40:]))


MARK = "outcome "  # begins the lines that a group's process writes for the check


def run_group(name: str, folder: str, budget: float) -> int:
    """Run a group's parts in this process, which dies if a library does."""
    try:
        parts: Sequence[Part] = list(GROUPS[name].parts(folder))
    except ModuleNotFoundError as reason:
        print(MARK + json.dumps(Outcome(name, NOT_POSSIBLE, 0.0, shorten(reason), {})._asdict()))
        return 0
    for outcome in run_parts(parts, budget):
        print(MARK + json.dumps(outcome._asdict()), flush=True)
    return 0


def find_device() -> str | None:
    """Name of the GPU that torch uses; None without torch or a GPU."""
    try:
        import torch
    except ModuleNotFoundError:
        return None
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


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
        "bandwidth_gb_per_s": round(measured_bandwidth()() / 1e9, 1),
    }
    return Findings(", ".join(f"{name} {value}" for name, value in figures.items() if name != "name"), figures)


def read_driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"


def measured_bandwidth() -> Callable[[], float]:
    """A function that measures once: bytes per second of a reduction over 2 GiB, which reads only, as passes do."""
    from functools import cache

    @cache
    def bandwidth() -> float:
        import torch

        from benchmarks.gpu.kernel import time_calls

        source = torch.zeros(1 << 29, dtype=torch.int32, device="cuda")
        # The best of three: a GPU that was idle takes a second to raise its clocks.
        return source.nbytes / min(time_calls([source.amax]) for _ in range(3))

    return bandwidth


# Each part imports what it needs itself: a package that is missing makes this part impossible, not the others.
def check_kernel(dtype: str) -> Findings:
    from benchmarks.gpu import kernel
    from benchmarks.gpu.attention import tree_attention

    return kernel.check_numerics(tree_attention, kernel.list_shapes(dtype), "cuda")


def load_rounds() -> Findings:
    from draftwood.runtime.engines.static.cuda import CudaDevice

    device, begun = CudaDevice(), monotonic()
    count = device.load_rounds()
    seconds = monotonic() - begun
    return Findings(f"{count} kernels in {seconds:.1f} s", {"kernels": count, "seconds": round(seconds, 2)})


def time_kernel() -> Findings:
    from benchmarks.gpu import kernel
    from benchmarks.gpu.attention import tree_attention

    return kernel.measure_speed(tree_attention, measured_bandwidth()())


def run_tests() -> Findings:
    """Raises NotPossible where the tests' own packages are missing."""
    for package in ("hypothesis",):
        if importlib.util.find_spec(package) is None:
            raise NotPossible(f"the package {package} is not installed")
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *GPU_TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=175)
    lines = done.stdout.strip().splitlines() or [done.stderr]
    if done.returncode:
        raise AssertionError(f"{lines[-1]}\n{done.stdout[-6000:]}")
    return Findings(lines[-1], {"summary": lines[-1]})


if __name__ == "__main__":
    sys.exit(main())
