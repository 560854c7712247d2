"""What is known of each backend, in one table. Nothing outside it and TensorRT's own files compares a backend's name.

A backend that runs an exported graph or packed weights is one entry here and one file with its engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from ...models.bindings import ADDITIVE, BITS, COMPACT, HALF, LOW_BIT, activations
from ...models.errors import EngineError
from ...models.layers import network_of
from ...plugins.native.cache import check_available, kernel_identity
from ...plugins.native.compile import CompilerError
from ...plugins.native.library import BLOCK, KernelError, available
from .base import Engine, EngineSpec
from .compatibility import TensorRTPlan
from .native import weights as native
from .native.weights import check_weights
from .onnx.file import check_graph

BLOCKS = (128, 64, 32)  # inputs that share a scale: the largest that divides a matrix's inputs
ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}  # of a number
GRAPH, WEIGHTS, PLAN = "onnx", "weights", "plan"  # what an engine's file holds, and its suffix
REMOVED = ("openvino",)  # backends of older releases


class Choice(NamedTuple):
    """A backend, and why it was chosen, as a clause."""

    backend: str
    reason: str


class Opening(NamedTuple):
    """How an engine is opened. threads: 0 lets the backend choose. private: its weights are copied, where files would
    be mapped."""

    threads: int = 0
    provider: str = "cpu"
    private: bool = False


@dataclass(frozen=True, slots=True)
class Backend:
    """precisions: what a build can make, the default first. file: GRAPH, WEIGHTS or PLAN. blocks: inputs of a low-bit
    matrix that share a scale, at most, by precision; scale_bytes: of such a scale; offsets: precisions whose blocks
    have an offset, too. draft_precision: the default of a
    draft; None takes the target's.

    form: of the graph, ADDITIVE or COMPACT. grows: caches grow, so that many sequences can share one. gathers: a cache
    is read in panels of neighbouring slots. pads: a pass computes the rows that fill it up to a width, too.
    prompt_widths: rows that only a pass over a prompt may have. shares_threads: target and draft run on the same
    threads. most_threads: of one engine. providers: whether it computes elsewhere than on the CPU when asked to.

    open: opens an engine; check_file: compares a file with a spec and opens nothing; check_machine: what this machine
    lacks, given the plan where there is one. All three raise EngineError naming the fix. release: its version, None
    where it is not installed.
    """

    name: str
    precisions: tuple[str, ...]
    file: str
    open: Callable[[Path, EngineSpec, Opening], Engine]
    check_file: Callable[[Path, EngineSpec], None]
    check_machine: Callable[[TensorRTPlan | None], None]
    release: Callable[[], str | None]
    blocks: Mapping[str, int] = field(default_factory=dict)
    scale_bytes: int = 4
    offsets: tuple[str, ...] = ()
    draft_precision: str | None = None
    form: str = ADDITIVE
    grows: bool = True
    gathers: bool = False
    pads: bool = True
    prompt_widths: tuple[int, ...] = ()
    shares_threads: bool = False
    most_threads: int = 1024
    providers: bool = False

    @property
    def is_compiled(self) -> bool:
        """Whether an engine is a plan, which is compiled for a GPU and has caches of a fixed size."""
        return self.file == PLAN


def open_onnxruntime(path: Path, spec: EngineSpec, how: Opening) -> Engine:
    from .onnx.onnxruntime import OnnxRuntimeEngine

    return OnnxRuntimeEngine(path, spec, how.threads, how.provider, how.private)


def open_native(path: Path, spec: EngineSpec, how: Opening) -> Engine:
    from .native.engine import NativeEngine

    return NativeEngine(path, spec, how.threads, how.private)


def open_tensorrt(path: Path, spec: EngineSpec, how: Opening) -> Engine:
    """Threads and provider are the GPU's own matter."""
    from .static.tensorrt import TensorRTEngine

    return TensorRTEngine(path, spec)


def check_onnxruntime(plan: TensorRTPlan | None) -> None:
    if find_spec("onnxruntime") is None:
        raise EngineError("onnxruntime is not installed: pip install 'draftwood[cpu]'")


def check_native(plan: TensorRTPlan | None) -> None:
    try:
        check_available()
    except (CompilerError, KernelError) as error:
        raise EngineError(str(error)) from error


def check_tensorrt(plan: TensorRTPlan | None) -> None:
    from .static.tensorrt import open_device

    if plan is not None:
        open_device(plan)


def check_no_file(path: Path, spec: EngineSpec) -> None:
    """A plan can be read by TensorRT alone."""


def release_of(*packages: str) -> str | None:
    """The version of the first package that is installed."""
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


ONNXRUNTIME = Backend(
    name="onnxruntime",
    precisions=("fp32", *LOW_BIT),
    file=GRAPH,
    open=open_onnxruntime,
    check_file=check_graph,
    check_machine=check_onnxruntime,
    release=lambda: release_of("onnxruntime", "onnxruntime-gpu"),  # either provides the module
    blocks=dict.fromkeys(LOW_BIT, 32),
    prompt_widths=(96, 128, 192, 256),  # its kernels are the faster the more rows there are
    providers=True,
)
NATIVE = Backend(
    name="native",
    precisions=("fp32", *HALF, *LOW_BIT),
    file=WEIGHTS,
    open=open_native,
    check_file=check_weights,
    check_machine=check_native,
    release=kernel_identity,  # what the kernels were compiled from, for and by
    blocks=dict.fromkeys(LOW_BIT, BLOCK),  # activations share the blocks
    scale_bytes=2,
    offsets=native.OFFSETS,
    draft_precision="int8",
    gathers=True,
    pads=False,
    shares_threads=True,
    most_threads=64,  # as in plugins/native/kernels/threads.h
)
TENSORRT = Backend(
    name="tensorrt",
    precisions=("fp16", "bf16", "fp32", *LOW_BIT),
    file=PLAN,
    open=open_tensorrt,
    check_file=check_no_file,
    check_machine=check_tensorrt,
    release=lambda: release_of("tensorrt"),
    blocks=dict.fromkeys(LOW_BIT, 128),
    form=COMPACT,
    grows=False,
    providers=True,
)
TENSORRT_RTX = replace(TENSORRT, name="tensorrt-rtx", release=lambda: release_of("tensorrt-rtx"))
BACKENDS = {each.name: each for each in (ONNXRUNTIME, NATIVE, TENSORRT, TENSORRT_RTX)}
AUTO = "auto"  # a build's default: `choose_backend`
FAST = {"avx512f", "avx512_vnni"}  # instructions with which the native kernels are faster than ONNX Runtime
COMPILED = tuple(each.name for each in BACKENDS.values() if each.is_compiled)
# Of an engine that no bundle holds, the torch reference for instance: it shares nothing, and no package is asked.
UNLISTED = replace(ONNXRUNTIME, name="", precisions=(), release=lambda: None, blocks={}, prompt_widths=(), grows=False)


def bits_of_weight(spec: EngineSpec) -> float:
    """Bits of a weight in the matrices that a pass multiplies with, their shares of scales and offsets included. The
    embedding, whose rows are looked up, does not count."""
    backend, computed = describe_backend(spec.backend), activations(spec.precision, describe_backend(spec.backend).form)
    most = backend.blocks.get(spec.precision)
    if most is None:
        return 8.0 * ITEM_BYTES[spec.precision]
    inner = -(-spec.model.intermediate_size // most) * most
    network = network_of(replace(spec.model, intermediate_size=inner))
    numbers = 2 if spec.precision in backend.offsets else 1
    beside = 8 * numbers * min(backend.scale_bytes, ITEM_BYTES[computed])  # bits of a block
    weights = bits = 0.0
    for matrix in (*(part for layer in network.layers for part in layer.matrices), network.head):
        size = matrix.inputs * sum(matrix.outputs)
        block = next(block for block in BLOCKS if block <= most and matrix.inputs % block == 0)
        weights, bits = weights + size, bits + size * (BITS[spec.precision] + beside / block)
    return bits / weights


def describe_backend(name: str) -> Backend:
    """Its entry in the table."""
    return BACKENDS.get(name, UNLISTED)


def choose_backend() -> Choice:
    """The native kernels where they can be compiled and are fast, ONNX Runtime elsewhere."""
    if missing := FAST - available(()):
        return Choice(ONNXRUNTIME.name, f"this processor has no {', '.join(sorted(missing))}")
    try:
        check_native(None)
    except EngineError:
        return Choice(ONNXRUNTIME.name, "there is no C compiler: pip install 'draftwood[native]' brings one")
    return Choice(NATIVE.name, "there is a C compiler, and the processor has AVX-512")
