"""The table of backends. No other file compares the name of a backend, except TensorRT's own files.

A new backend over an exported graph or packed weights needs one entry here and one file with its engine.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from ...models.bindings import ADDITIVE, BITS, COMPACT, EXPORTED, FP8, HALF, INTEGERS, SUPERBLOCKS, activations
from ...models.config import LlamaConfig
from ...models.errors import EngineError
from ...models.layers import EMBEDDING, Matrix, Network, network_of
from ...models.release import version_of
from ...plugins.installation import install
from ...plugins.native.cache import check_available, kernel_identity
from ...plugins.native.compile import CompilerError
from ...plugins.native.packing import GROUPS, SUPERBLOCK, whole_panels
from ...plugins.native.processor import FUSED, X86, KernelError, available
from .base import Engine, EngineSpec
from .comparison import Comparison
from .compatibility import TensorRTPlan
from .native import weights as native
from .native.weights import read_weights
from .onnx.file import check_graph

BLOCKS = (128, 64, 32)  # sizes of a block, of which the largest that divides a matrix's inputs is taken
ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}  # bytes of a number, or of a code
SLOT_SCALE_BYTES = 4  # of a scale for each head and slot, in a cache of codes
CPU = "cpu"  # the default provider
GRAPH, WEIGHTS, PLAN = "onnx", "weights", "plan"  # what an engine's file holds, and its suffix


class Choice(NamedTuple):
    """A chosen backend. reason: a clause that says why."""

    backend: str
    reason: str


class Opening(NamedTuple):
    """threads: 0 lets the backend choose. private: whether weights are copied into memory instead of mapped."""

    threads: int = 0
    provider: str = CPU
    private: bool = False


@dataclass(frozen=True, slots=True)
class Backend:
    """A backend: what it stores, what it computes, and how it is opened.

    precisions: those that a build can make, the default first. file: GRAPH, WEIGHTS or PLAN. blocks: the largest block
    of a low-bit matrix (inputs that share a scale), by precision. scale_bytes: bytes of a scale. offsets: precisions
    whose blocks have an offset, too. heads: the precision that a build gives the vocabulary projection where it is
    another one, by that of the other matrices; where there are any, every matrix may have its own. rounds_embedding:
    whether the embedding is stored as the projection is. caches: precisions of keys and values that a build can choose,
    first that in which they are computed; none: they are stored as activations are. beside: defaults other than the
    first one, by the precision of weights. draft_precision: the default precision of a draft; None: that of the target.

    form: form of the graph, ADDITIVE or COMPACT. grows: whether caches grow, so that many sequences can share one.
    panels: whether values are stored in whole panels of 16 numbers. pads: whether a pass also computes the rows of
    padding. prompt_widths: widths that only passes over a prompt have. shares_threads: whether target and draft run
    on the same threads. most_threads: threads of one engine; 0: it has none. providers: the names of what it can
    compute on, as `LLM` takes them. maps: whether weights are mapped from the file while the engine is open. rival:
    the backend with which a measurement of costs compares it; none for "".

    open: opens an engine. check_file: compares a file with a spec and runs nothing. check_machine: checks that this
    machine has what an engine needs, given the plan if there is one. All three raise EngineError that names the fix.
    release: the installed version; None when the backend is not installed.
    """

    name: str
    precisions: tuple[str, ...]
    file: str
    open: Callable[[Path, EngineSpec, Opening], Engine]
    check_file: Callable[[Path, EngineSpec], object]
    check_machine: Callable[[TensorRTPlan | None], None]
    release: Callable[[], str | None]
    blocks: Mapping[str, int] = field(default_factory=dict)
    scale_bytes: int = 4
    offsets: tuple[str, ...] = ()
    heads: Mapping[str, str] = field(default_factory=dict)
    rounds_embedding: bool = False
    caches: tuple[str, ...] = ()
    beside: Mapping[str, str] = field(default_factory=dict)
    draft_precision: str | None = None
    form: str = ADDITIVE
    grows: bool = True
    panels: bool = False
    pads: bool = True
    prompt_widths: tuple[int, ...] = ()
    shares_threads: bool = False
    most_threads: int = 1024  # as in plugins/native/kernels/threads.h
    providers: tuple[str, ...] = ("cpu",)
    maps: bool = True
    rival: str = ""

    @property
    def is_compiled(self) -> bool:
        """Whether an engine is a plan, which is compiled for a GPU and has caches of a fixed size."""
        return self.file == PLAN


def open_onnxruntime(path: Path, spec: EngineSpec, how: Opening) -> Engine:
    from .onnx.onnxruntime import OnnxRuntimeEngine

    check_graph(path, spec)
    return OnnxRuntimeEngine(path, spec, how.threads, how.provider, how.private)


def open_native(path: Path, spec: EngineSpec, how: Opening) -> Engine:
    from .native.engine import NativeEngine

    return NativeEngine(path, spec, how.threads, how.private)


def open_tensorrt(path: Path, spec: EngineSpec, how: Opening) -> Engine:
    """Open a plan. The options have no effect: a plan runs on its GPU, and its file is read only once."""
    from .static.tensorrt import TensorRTEngine

    return TensorRTEngine(path, spec)


def check_onnxruntime(plan: TensorRTPlan | None) -> None:
    if find_spec("onnxruntime") is None:
        raise EngineError(f"onnxruntime is not installed: {install('onnxruntime')}")


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
    """Check nothing: only TensorRT can read a plan."""


ONNXRUNTIME = Backend(
    name="onnxruntime",
    precisions=("fp32", *EXPORTED),
    file=GRAPH,
    open=open_onnxruntime,
    check_file=check_graph,
    check_machine=check_onnxruntime,
    release=lambda: version_of("onnxruntime-gpu", "onnxruntime"),  # either provides the module
    blocks=dict.fromkeys(EXPORTED, 32),
    prompt_widths=(96, 128, 192, 256),  # its kernels are most efficient with many rows
    providers=("cpu", "cuda"),
)
NATIVE = Backend(
    name="native",
    precisions=("fp32", *HALF, *INTEGERS),
    file=WEIGHTS,
    open=open_native,
    check_file=read_weights,
    check_machine=check_native,
    release=kernel_identity,  # a digest of the kernels' sources, the processor and the compiler
    blocks={precision: GROUPS[BITS[precision]] for precision in (*INTEGERS, *SUPERBLOCKS)},
    scale_bytes=2,
    offsets=native.OFFSETS,
    heads={"int4": "int8"},  # docs/precision.md says why
    rounds_embedding=True,
    caches=("fp32", "fp16", "int8"),
    beside=dict.fromkeys((*HALF, *INTEGERS), "fp16"),  # where it adds nothing that can be measured: docs/native.md
    draft_precision="int8",
    panels=True,
    pads=False,
    shares_threads=True,
    rival=ONNXRUNTIME.name,
)
TENSORRT = Backend(
    name="tensorrt",
    precisions=("fp16", "bf16", "fp32", *EXPORTED, FP8),
    file=PLAN,
    open=open_tensorrt,
    check_file=check_no_file,
    check_machine=check_tensorrt,
    release=lambda: version_of("tensorrt"),
    blocks=dict.fromkeys((*EXPORTED, FP8), 128),
    form=COMPACT,
    grows=False,
    most_threads=0,
    providers=("cpu", "cuda"),
    maps=False,
)
TENSORRT_RTX = replace(TENSORRT, name="tensorrt-rtx", release=lambda: version_of("tensorrt-rtx"))
BACKENDS = {each.name: each for each in (ONNXRUNTIME, NATIVE, TENSORRT, TENSORRT_RTX)}
AUTO = "auto"  # a build's default: `choose_backend`
COMPILED = tuple(each.name for each in BACKENDS.values() if each.is_compiled)
# The entry of an engine that is in no bundle, for instance a test's in torch.
UNLISTED = replace(ONNXRUNTIME, name="", precisions=(), release=lambda: None, blocks={}, prompt_widths=(), grows=False)


def bits_of_weight(spec: EngineSpec) -> float:
    """Mean bits of a weight in the file: of all matrices and the embedding, with scales, offsets and copies."""
    backend, network = describe_backend(spec.backend), stored_network(spec)
    once = stored_matrices(network, spec.model)
    copied = spec.model.tie_embeddings and not backend.rounds_embedding and spec.precision in backend.blocks
    return 8 * matrix_bytes(spec, once + ((network.embedding,) if copied else ())) / num_weights(once)


def stored_network(spec: EngineSpec) -> Network:
    """The description of a model whose feed-forward size divides into blocks."""
    most = describe_backend(spec.backend).blocks.get(spec.precision, 1)
    most = most if most == 1 else max(most, BLOCKS[-1])
    return network_of(replace(spec.model, intermediate_size=-(-spec.model.intermediate_size // most) * most))


def stored_matrices(network: Network, model: LlamaConfig) -> tuple[Matrix, ...]:
    """Those of an engine's file: a tied embedding is the projection."""
    return pass_matrices(network) + (() if model.tie_embeddings else (network.embedding,))


def pass_matrices(network: Network) -> tuple[Matrix, ...]:
    """Those that a pass multiplies with. Of the embedding only rows are looked up."""
    fusion = () if network.fusion is None else (network.fusion,)
    return (*fusion, *(part for layer in network.layers for part in layer.matrices), network.head)


def num_weights(matrices: Iterable[Matrix]) -> int:
    return sum(matrix.inputs * sum(matrix.outputs) for matrix in matrices)


def matrix_bytes(spec: EngineSpec, matrices: Iterable[Matrix]) -> float:
    """Bytes of matrices in an engine's file, scales and offsets included."""
    backend, computed = describe_backend(spec.backend), activations(spec.precision, describe_backend(spec.backend).form)
    most, bits = backend.blocks.get(spec.precision), 0.0
    for matrix in matrices:
        size, own = num_weights([matrix]), spec.matrices.get(matrix.name, spec.precision)
        if most is None or (matrix.name == EMBEDDING and not backend.rounds_embedding):
            bits += size * 8 * ITEM_BYTES[spec.precision if most is None else computed]
            continue
        kinds, item = 1 + (own in backend.offsets), min(backend.scale_bytes, ITEM_BYTES[computed])
        least = backend.blocks[own]
        block = next((block for block in BLOCKS if block <= least and matrix.inputs % block == 0), least)
        beside = 1 / block + item / SUPERBLOCK if own in SUPERBLOCKS else item / block  # bytes for each input
        bits += size * (BITS[own] + 8 * kinds * beside)
    return bits / 8


def cache_precision(spec: EngineSpec) -> str:
    """What keys and values are stored in."""
    backend = describe_backend(spec.backend)
    computed = backend.caches[0] if backend.caches else activations(spec.precision, backend.form)
    return spec.cache_precision or computed


def slot_bytes(spec: EngineSpec, layers: int | None = None) -> int:
    """Bytes of a token's keys and values in a cache: of every kv head of so many layers (None: of all), and with the
    scales of codes."""
    backend, model, precision = describe_backend(spec.backend), spec.model, cache_precision(spec)
    key = value = model.head_dim * ITEM_BYTES[precision]
    if backend.panels:
        value = whole_panels(model.head_dim) * ITEM_BYTES[precision]
    scales = 2 * SLOT_SCALE_BYTES if precision in INTEGERS else 0
    return (model.num_layers if layers is None else layers) * model.num_kv_heads * (key + value + scales)


def format_of_weight(spec: EngineSpec) -> str:
    backend = describe_backend(spec.backend)
    if (most := backend.blocks.get(spec.precision)) is None:
        return spec.precision
    beside = "scale and offset" if spec.precision in backend.offsets else "scale"
    others = Counter(spec.matrices.values())
    told = "".join(f", {count} {'matrix' if count == 1 else 'matrices'} {name}" for name, count in others.items())
    return f"{spec.precision} with a {beside} per block of up to {most}{told}"


def describe_backend(name: str) -> Backend:
    """The entry of a backend; UNLISTED for an unknown name."""
    return BACKENDS.get(name, UNLISTED)


def instead(reason: str) -> Choice:
    """ONNX Runtime, for this reason. Raises EngineError where it is not installed either."""
    try:
        check_onnxruntime(None)
    except EngineError as error:
        raise EngineError(f"{reason}, and {error}") from error
    return Choice(ONNXRUNTIME.name, reason)


def choose_backend(compared: Callable[[], Comparison]) -> Choice:
    """Choose the native engine where it has its kernels and they were found fast, and ONNX Runtime otherwise. compared:
    compares the two here, on a processor for which nothing was measured before."""
    known = platform.machine() in X86
    if known and (missing := FUSED - available(tuple(FUSED))):
        return instead(f"this processor has no {', '.join(sorted(missing))}")
    try:
        check_native(None)
    except EngineError as error:
        return instead(f"the native kernels cannot be used here ({error})")
    if known:
        return Choice(NATIVE.name, "its kernels are at hand, and the processor has AVX2 or more")
    try:
        found = compared()
    except EngineError as error:
        return instead(f"the native kernels cannot be compared with it here ({error})")
    return Choice(ONNXRUNTIME.name if found.is_slower else NATIVE.name, f"measured here, {found.described}")
