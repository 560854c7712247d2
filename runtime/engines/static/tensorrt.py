"""The engine of TensorRT and TensorRT-RTX plans. `static/engine.py` implements the passes."""

from __future__ import annotations

import logging
import mmap
import tempfile
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from ....models import bindings
from ....models.errors import EngineError
from ....models.release import version_of
from ....plugins.tensorrt import load_tensorrt, tensorrt_logger
from ....plugins.tree_attention.library import MAGIC
from ....plugins.tree_attention.plugin import register
from .. import compatibility
from ..base import EngineSpec
from ..compatibility import PACKAGES, TensorRTPlan, WidthFamily
from .cuda import CudaDevice
from .device import Stream
from .engine import StaticEngine, missing_tensors

log = logging.getLogger("draftwood.engines")
RUNTIME_CACHE = ".{}.runtime-cache"  # beside the bundle, because a bundle may contain only the files of its manifest


class TensorRTEngine(StaticEngine):
    """An engine that runs a plan on the first GPU."""

    def __init__(self, path: Path, spec: EngineSpec) -> None:
        """Check and load the plan at `path`. Raises EngineError that names the fix when this machine cannot run it."""
        plan = require_plan(spec)
        device = open_device(plan)
        program = TensorRTProgram(path, spec, plan, device)
        super().__init__(spec, program, device)
        if spec.role == bindings.TARGET and device.runs_rounds and not spec.model.taps:
            device.load_rounds()


class TensorRTProgram:
    """A deserialised plan with its workspace. All executions share the workspace, because only one runs at a time."""

    def __init__(self, path: Path, spec: EngineSpec, plan: TensorRTPlan, device: CudaDevice) -> None:
        """Raises EngineError when TensorRT refuses the plan, or when the plan lacks tensors that this release binds."""
        try:
            self._trt = load_tensorrt(spec.backend)
            self._runtime = self._trt.Runtime(tensorrt_logger(spec.backend))
            if plan.kernel is not None:
                register(self._trt)
        except (ModuleNotFoundError, RuntimeError) as error:
            raise EngineError(str(error)) from error
        self._families, self._device = plan.families, device
        self._is_rtx = spec.backend == "tensorrt-rtx"
        self.weight_bytes = path.stat().st_size
        if self.weight_bytes == 0:
            raise EngineError(f"{path.name} is empty: rebuild the bundle")
        # Mapped: the pages are those that the bundle's check has read, and no copy of the plan lies in memory.
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            self._engine = self._runtime.deserialize_cuda_engine(content)
            if self._engine is None:
                raise EngineError(f"{path.name} is refused by {plan.package} {plan.version}: {self._verdict(content)}")
        check_tensors(self._engine, path.name, spec)
        dtype = self._engine.get_tensor_dtype(bindings.past(bindings.KINDS[0], 0))
        self.cache_itemsize = int(dtype.itemsize)
        self.max_columns, self.near_slots = narrowest_mask(self._engine), fewest_slots(self._engine, spec)
        self.workspace_bytes = int(self._engine.device_memory_size_v2)
        self._workspace = device.allocate(self.workspace_bytes)
        self._cache_file = RuntimeCacheFile(path, spec.role) if self._is_rtx else None
        self._cache: Any = None

    def execution(self, width: int, stream: Stream) -> TensorRTExecution:
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(self._trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if self._is_rtx:
            self._configure_rtx(config)
        context = self._engine.create_execution_context(config)
        if context is None:
            raise EngineError("TensorRT cannot make an execution context: see the log messages of draftwood.tensorrt")
        context.set_device_memory(self._workspace.address, self.workspace_bytes)
        if not context.set_optimization_profile_async(profile_for(self._families, width), stream):
            raise EngineError(f"TensorRT refuses the optimisation profile of {width} rows: rebuild the bundle")
        self._device.synchronize(stream)  # a round may enqueue this context on another stream
        return TensorRTExecution(context, input_names(self._engine, self._trt), self._is_rtx)

    def close(self) -> None:
        if self._cache_file is not None and self._cache is not None:
            self._cache_file.write(bytes(memoryview(self._cache.serialize())))
        del self._engine, self._runtime

    def _configure_rtx(self, config: Any) -> None:
        """Configure an execution of TensorRT-RTX, which compiles its kernels on this machine. It compiles all of them
        before a pass is captured, and they are stored in a cache. RTX itself captures no CUDA graphs, because
        StaticPass captures graphs that include the copies."""
        trt = self._trt
        config.dynamic_shapes_kernel_specialization_strategy = trt.DynamicShapesKernelSpecializationStrategy.EAGER
        config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            stored = None if self._cache_file is None else self._cache_file.read()
            if stored and not self._cache.deserialize(stored):
                log.info("the stored kernels of TensorRT-RTX belong to another GPU or version; they are compiled anew")
        config.set_runtime_cache(self._cache)

    def _verdict(self, content: mmap.mmap) -> str:
        """The reason why TensorRT could not load a plan, as far as it reports one."""
        if self._is_rtx:
            header = content[: self._runtime.engine_header_size]
            validity, diagnostics = self._runtime.get_engine_validity(header)
            return f"{validity.name}, diagnostics {diagnostics:#x}; rebuild the bundle on this machine"
        return "the reason is in the log messages of draftwood.tensorrt; rebuild the bundle on this machine"


class TensorRTExecution:
    def __init__(self, context: Any, inputs: Set[str], is_rtx: bool) -> None:
        self._context, self._inputs, self._is_rtx = context, inputs, is_rtx

    def bind(self, name: str, shape: tuple[int, ...], address: int) -> None:
        if name in self._inputs and not self._context.set_input_shape(name, shape):
            raise EngineError(f"TensorRT refuses {name} of shape {shape}: rebuild the bundle for these widths")
        if not self._context.set_tensor_address(name, address):
            raise EngineError(
                f"TensorRT refuses to bind {name} at {address:#x}; a cache's input and output must share one address: "
                "rebuild the bundle with this release"
            )

    def enqueue(self, stream: Stream) -> None:
        if not self._context.execute_async_v3(stream):
            raise EngineError("TensorRT could not run a pass: see the log messages of draftwood.tensorrt")

    def is_capturable(self, stream: Stream) -> bool:
        return not self._is_rtx or bool(self._context.is_stream_capturable(stream))


class RuntimeCacheFile:
    """A file beside the bundle with the kernels that TensorRT-RTX compiled on this machine. It makes later openings of
    the bundle fast. The file is optional, so a failure to read or write it is no error."""

    def __init__(self, plan: Path, role: str) -> None:
        bundle = plan.resolve().parent
        self.file = bundle.with_name(RUNTIME_CACHE.format(bundle.name)) / f"{role}.bin"

    def read(self) -> bytes | None:
        try:
            return self.file.read_bytes()
        except OSError:
            return None

    def write(self, content: bytes) -> None:
        """Replace the file's content. On an error the old content stays."""
        if content == self.read():
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".partial-", dir=self.file.parent) as own:
                (Path(own) / self.file.name).write_bytes(content)
                (Path(own) / self.file.name).replace(self.file)
        except OSError as error:
            log.info("compiled kernels are not kept: %s", error)


def require_plan(spec: EngineSpec) -> TensorRTPlan:
    """The plan of a spec. Raises EngineError when the manifest describes none."""
    if spec.plan is None:
        raise EngineError(f"the manifest does not describe the {spec.role}'s {spec.backend} plan: rebuild the bundle")
    return spec.plan


def open_device(plan: TensorRTPlan) -> CudaDevice:
    """Open the first GPU. Raises EngineError that names the fix when the plan cannot run on it."""
    try:
        device = CudaDevice()
    except EngineError as error:
        raise EngineError(f"{compatibility.obstacle(plan, machine_with(None))} ({error})") from error
    if problem := compatibility.obstacle(plan, machine_with(device)):
        raise EngineError(problem)
    return device


def this_machine() -> compatibility.Machine:
    """The GPU and packages of this machine, for `compatibility.obstacle`."""
    try:
        return machine_with(CudaDevice())
    except EngineError:
        return machine_with(None)


def machine_with(device: CudaDevice | None) -> compatibility.Machine:
    """A machine with this GPU (None: no GPU) and the packages that are installed here."""
    name, capability = (None, None) if device is None else (device.name, device.compute_capability)
    return compatibility.Machine(name, capability, installed_packages(), MAGIC.decode())


def installed_packages() -> Mapping[str, str]:
    return {package: found for package in PACKAGES if (found := version_of(package)) is not None}


def check_tensors(engine: Any, file: str, spec: EngineSpec) -> None:
    """Raises EngineError for a plan that lacks a tensor, or whose cache outputs do not share their inputs' memory.
    TensorRT would write such outputs to another place, or copy them in every pass."""
    if missing := missing_tensors(spec, tensor_names(engine)):
        raise EngineError(f"{file} has no tensor {missing[0]!r}: this release did not build it; rebuild the bundle")
    for layer in range(spec.model.num_layers):
        for kind in bindings.KINDS:
            output, expected = bindings.present(kind, layer), bindings.past(kind, layer)
            found = engine.get_aliased_input_tensor(output)
            if found != expected:
                raise EngineError(
                    f"{file} does not update its key/value cache in place: {output} is aliased to {found or 'nothing'} "
                    f"instead of {expected}; rebuild with a TensorRT that makes KV cache updates of TensorScatter"
                )


def tensor_names(engine: Any) -> list[str]:
    return [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]


def input_names(engine: Any, trt: Any) -> Set[str]:
    return {name for name in tensor_names(engine) if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT}


def narrowest_mask(engine: Any) -> int:
    """The most columns of a tree mask that every profile allows."""
    profiles = range(engine.num_optimization_profiles)
    largest = (engine.get_tensor_profile_shape(bindings.TREE_MASK.name, profile)[2] for profile in profiles)
    return min(int(shape[2]) for shape in largest)


def fewest_slots(engine: Any, spec: EngineSpec) -> int:
    """The slots of layers with a window, where they are fewer than the others', or 0."""
    if bindings.DROPPED.name not in tensor_names(engine):
        return 0
    layers = range(spec.model.num_layers)
    return min(int(engine.get_tensor_shape(bindings.past(bindings.KINDS[0], layer))[2]) for layer in layers)


def profile_for(families: Sequence[WidthFamily], width: int) -> int:
    """The best profile for `width` rows: tuned for as many if possible, the smallest of these. Raises EngineError."""
    fitting = [
        (family.optimum < width, family.maximum, index)
        for index, family in enumerate(families)
        if family.minimum <= width <= family.maximum
    ]
    if not fitting:
        raise EngineError(f"the plan has no optimisation profile for {width} rows: rebuild the bundle")
    return min(fitting)[2]
