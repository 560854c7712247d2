"""ONNX graph -> TensorRT or TensorRT-RTX plan, through Polygraphy.

TensorRT-RTX compiles for GPUs this machine need not have; TensorRT compiles for the GPU it runs on. A plan has one
optimisation profile per family of widths: within a profile rows, mask columns and scored rows vary; the cache does not.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ...models import bindings
from ...models.config import LlamaConfig
from ...models.errors import ConfigError
from ...plugins.installation import install
from ...plugins.tree_attention.library import CAPABILITIES, MAGIC
from ...plugins.tree_attention.plan import MAX_HEAD_DIM
from ...runtime.engines.backends import BACKENDS
from ...runtime.engines.compatibility import (
    PACKAGES,
    RTX_COMPUTE_CAPABILITIES,
    Kernel,
    LayerReport,
    TensorRTPlan,
    WidthFamily,
    obstacle,
)
from ..progress import Begin, Step
from .tensorrt import StreamingBuilder, builder_errors, parse, polygraphy, progress_monitor, tensorrt_module

PORTABLE = ("8.0", "8.6", "8.9", "12.0")  # compute capabilities that TensorRT-RTX compiles for by default
FIRST_FP8 = 89  # the first compute capability that multiplies fp8
TREE_ROWS = 16  # widest pass that is tuned as a token tree; wider ones as a piece of prompt
TYPICAL_TREE = 8  # rows of the default proposal


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """What a plan is compiled for. Raises ConfigError for what the package cannot do, before anything is built."""

    backend: str
    precision: str
    widths: tuple[int, ...]  # rows that a pass may have
    columns: int  # speculative slots that a pass may see, its own rows included
    compute_capabilities: tuple[str, ...] = ()  # such as "8.9"; TensorRT-RTX only, whose default is PORTABLE
    plugin: bool | None = None  # attention by our kernel; None: when Triton can compile it for every GPU
    workspace: int | None = None  # the most MiB of scratch memory of an engine; None sets no limit
    timing_cache: Path | None = None  # a file that TensorRT reads and extends, so that the next build measures less
    max_batch: int = 1  # sequences that the rows of a pass may belong to; more than one need our kernel

    def __post_init__(self) -> None:
        if self.backend not in PACKAGES:
            raise ConfigError(f"backend {self.backend!r} is no TensorRT; choose one of {', '.join(PACKAGES)}")
        if self.precision not in (precisions := BACKENDS[self.backend].precisions):
            choices = ", ".join(precisions)
            raise ConfigError(f"precision {self.precision!r} is not available for {self.backend}; choose {choices}")
        self._check_batch()
        if self.columns < self.widths[-1]:
            raise ConfigError(f"a pass of {self.widths[-1]} rows sees more than {self.columns} speculative slots")
        if self.workspace is not None and self.workspace < 1:
            raise ConfigError(f"workspace must be at least 1 MiB, not {self.workspace}")
        if self.backend == "tensorrt":
            if self.compute_capabilities:
                raise ConfigError(
                    "TensorRT compiles for the GPU of this machine: leave out --compute-capability, "
                    "or compile for other GPUs with --backend tensorrt-rtx"
                )
        else:
            self._check_rtx()

    def _check_batch(self) -> None:
        if self.max_batch < 1:
            raise ConfigError(f"--max-batch must be at least 1, not {self.max_batch}")
        if self.max_batch == 1:
            return
        needs = f"--max-batch {self.max_batch} needs our attention kernel"
        if self.plugin is False:
            raise ConfigError(
                f"{needs}, since TensorRT's own would read the slots of all sequences for every row: "
                "leave out --no-plugin, or --max-batch"
            )
        if importlib.util.find_spec("triton") is None:
            raise ConfigError(f"{needs}, and Triton is not installed: {install('kernel')}")
        if "7.5" in self.compute_capabilities:
            raise ConfigError(f"{needs}, which is not for SM 7.5: leave out --compute-capability 7.5, or --max-batch")

    def _check_rtx(self) -> None:
        for capability in self.targets:
            if capability not in RTX_COMPUTE_CAPABILITIES:
                raise ConfigError(
                    f"TensorRT-RTX compiles for SM {', '.join(RTX_COMPUTE_CAPABILITIES)}, not for {capability}: "
                    "for other GPUs build with --backend tensorrt on a machine that has one"
                )
        if len(set(self.targets)) != len(self.targets):
            raise ConfigError(f"compute capabilities are named twice: {', '.join(self.targets)}")
        if "7.5" in self.targets and self.precision not in ("fp16", "int8"):
            raise ConfigError(
                f"TensorRT-RTX compiles no {self.precision} for SM 7.5: choose --precision fp16, "
                "or leave out --compute-capability 7.5"
            )
        if self.precision == bindings.FP8:
            refuse_fp8(self.targets)
        if self.timing_cache is not None:
            raise ConfigError("TensorRT-RTX measures nothing while it builds: leave out --timing-cache")

    @property
    def targets(self) -> tuple[str, ...]:
        """The compute capabilities TensorRT-RTX compiles for."""
        if self.compute_capabilities or self.precision != bindings.FP8:
            return self.compute_capabilities or PORTABLE
        return tuple(capability for capability in PORTABLE if as_number(capability) >= FIRST_FP8)

    @property
    def families(self) -> tuple[WidthFamily, ...]:
        """Families of widths, one for each profile: token trees and smaller passes, and chunks of a prompt."""
        return width_families(self.widths)

    def takes_plugin(self, head_dim: int, targets: Sequence[str]) -> bool:
        """Whether our kernel computes attention in a plan for GPUs of these compute capabilities. Raises ConfigError
        when several sequences need the kernel and it does not support the GPUs or the size of a head."""
        if self.plugin is not None:
            return self.plugin
        compilable = head_dim <= MAX_HEAD_DIM and {*map(as_number, targets)} <= {*CAPABILITIES}
        if self.max_batch > 1 and not compilable:
            raise ConfigError(
                f"--max-batch {self.max_batch} needs our attention kernel, which is for SM 8.0 and later and for heads "
                f"of at most {MAX_HEAD_DIM}: leave out --max-batch"
            )
        return compilable and importlib.util.find_spec("triton") is not None


def refuse_fp8(capabilities: Sequence[str]) -> None:
    """Raises ConfigError for GPUs that do not multiply fp8."""
    if older := [capability for capability in capabilities if as_number(capability) < FIRST_FP8]:
        raise ConfigError(
            f"GPUs of SM {', '.join(older)} multiply no fp8, those of 8.9 and later do: choose --precision int8 or "
            "fp16, or name only later ones with --compute-capability"
        )


def width_families(widths: Sequence[int]) -> tuple[WidthFamily, ...]:
    """Divide ascending widths into families: those of up to 16 rows, and larger ones.

    Families are ranges even where `widths` has one member: a profile of one fixed shape gets weights of its own.
    """
    typical = max(width for width in widths if width <= TYPICAL_TREE)
    largest = widths[-1]
    tree = WidthFamily(1, typical, min(largest, TREE_ROWS))
    return (tree,) if largest <= TREE_ROWS else (tree, WidthFamily(TREE_ROWS + 1, largest, largest))


def check_compiler(options: CompileOptions) -> None:
    """Raises ConfigError when this machine lacks what compiling needs, before anything slow is done."""
    tensorrt_module(options.backend)
    with polygraphy(options.backend):
        pass
    if options.backend == "tensorrt":
        capability = this_gpu()
        if options.precision == bindings.FP8:
            refuse_fp8([capability])


def compile_plan(graph: Path, output: Path, model: LlamaConfig, options: CompileOptions, begin: Begin) -> TensorRTPlan:
    """Compile the exported graph of `model` (compact form) and write the plan to `output`.

    Raises ConfigError when the package is not installed, or with the package's own words when it cannot compile.
    """
    trt = tensorrt_module(options.backend)
    targets = options.targets if options.backend == "tensorrt-rtx" else (this_gpu(),)
    kernel = None
    if options.takes_plugin(model.head_dim, targets):
        advance = begin(Step(f"Compiling the {graph.stem}: attention kernel", 1))
        kernel = register_kernel(trt, options, model, targets)
        advance()
    with polygraphy(options.backend), builder_errors() as errors:
        from polygraphy.backend.trt import engine_bytes_from_network
        from polygraphy.exception import PolygraphyException

        flags = [] if kernel is None else [trt.OnnxParserFlag.ENABLE_PLUGIN_OVERRIDE]
        monitor = progress_monitor(trt, begin, graph.stem)
        try:
            parsed = parse(trt, options.backend, graph, flags)
            allow_decomposition(trt, parsed.network)
            layers = count_layers(trt, parsed.network)
            builder = StreamingBuilder(trt, parsed.builder, output)
            engine_bytes_from_network(
                (builder, parsed.network, parsed.parser),
                config(trt, options, monitor, model.state_inputs),
                save_timing_cache=options.timing_cache,
            )
        except PolygraphyException as error:
            if monitor.interruption is None:
                reason = "; ".join(errors) or str(error)
                raise ConfigError(f"{options.backend} cannot compile the {graph.stem}: {reason}") from error
        if monitor.interruption is not None:
            raise monitor.interruption
    return TensorRTPlan(
        package=options.backend,
        version=str(trt.__version__),
        compute_capabilities=targets,
        kernel=kernel,
        families=options.families,
        columns=options.columns,
        layers=layers,
        executed=False,
    )


def config(trt: ModuleType, options: CompileOptions, monitor: Any, state_inputs: int = 0) -> Any:
    """A loader of a builder configuration, for Polygraphy. state_inputs: see LlamaConfig."""
    common: dict[str, Any] = {"profiles": profiles(options, state_inputs), "progress_monitor": monitor}
    if options.workspace is not None:
        common["memory_pool_limits"] = {trt.MemoryPoolType.WORKSPACE: options.workspace << 20}
    if options.backend == "tensorrt":
        from polygraphy.backend.trt import CreateConfig

        return CreateConfig(**common, load_timing_cache=options.timing_cache)
    from polygraphy.backend.tensorrt_rtx import CreateConfigRTX

    targets = [tuple(map(int, capability.split("."))) for capability in options.targets]
    create = CreateConfigRTX(compute_capabilities=targets, **common)

    def without_allocation(builder: Any, network: Any) -> Any:
        """TensorRT-RTX promises that a pass can be captured as a CUDA graph only if it allocates nothing."""
        created = create(builder, network)
        created.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
        return created

    return without_allocation


def profiles(options: CompileOptions, state_inputs: int = 0) -> list[Any]:
    """One optimisation profile per family of widths; the caches have one shape only and need no mention."""
    from polygraphy.backend.trt import Profile

    made = []
    for family in options.families:
        rows = tuple(family)
        axes = {"B": (1, 1, 1), "T": rows, "S": (*rows[:2], options.columns), "R": (1, *rows[1:])}
        axes |= {"N": (options.max_batch,) * 3, "4": (4,) * 3, "I": (state_inputs,) * 3}
        profile = Profile()
        for item in bindings.inputs(bindings.COMPACT, state_inputs > 0):
            profile.add(item.name, *zip(*(axes[axis] for axis in item.shape), strict=True))
        made.append(profile)
    return made


def allow_decomposition(trt: ModuleType, network: Any) -> None:
    """Let the builder compute attention in parts where it has no fused kernel: other head sizes than 16 to 256."""
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer  # the documented way down from ILayer
            layer.attention.decomposable = True


def count_layers(trt: ModuleType, network: Any) -> LayerReport:
    """Count the layers of a network: all, plugins, attentions and cache updates."""
    kinds = Counter(network.get_layer(index).type for index in range(network.num_layers))
    kind = trt.LayerType
    return LayerReport(
        network.num_layers, kinds[kind.PLUGIN_V3], kinds[kind.ATTENTION_INPUT], kinds[kind.KV_CACHE_UPDATE]
    )


def this_gpu() -> str:
    """Compute capability of the GPU that TensorRT compiles for."""
    from ...runtime.engines.static.tensorrt import this_machine

    capability = this_machine().compute_capability
    if capability is None:
        raise ConfigError(
            "TensorRT compiles on the GPU it compiles for, and this machine has none: build there, "
            "or here with --backend tensorrt-rtx"
        )
    return capability


def as_number(capability: str) -> int:
    """A compute capability as kernels are named by it, 89 for "8.9"."""
    return int(capability.replace(".", ""))


def runs_here(plan: TensorRTPlan) -> bool:
    from ...runtime.engines.static.tensorrt import this_machine

    return obstacle(plan, this_machine()) is None


def register_kernel(trt: ModuleType, options: CompileOptions, model: LlamaConfig, targets: Sequence[str]) -> Kernel:
    """Compile the attention kernel for this model and register its plugin. Raises ConfigError."""
    from ...plugins.tree_attention.library import compile_library
    from ...plugins.tree_attention.plugin import register

    group = model.num_heads // model.num_kv_heads
    capabilities = [as_number(target) for target in targets]
    try:
        dtype = bindings.activations(options.precision, bindings.COMPACT)
        library = compile_library(model.head_dim, group, dtype, options.widths[-1], capabilities)
        register(trt, library)
    except (ModuleNotFoundError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{error}; --no-plugin builds without our kernel") from error
    return Kernel(library.fingerprint, MAGIC.decode())
