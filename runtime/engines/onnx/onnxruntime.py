"""The ONNX Runtime engine, for any CPU, and for GPUs with the CUDA execution provider."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....models import bindings
from ....models.errors import EngineError
from ....plugins.installation import install
from ..base import EngineSpec, ForwardOutput, KVCache, Runner, TokenBatch, check_cache, closed_error
from ..cache import StackedKVCache
from ..feeds import feed, output_of, shown
from ..layout import PassShape, axis_sizes, check_growth
from .device import DeviceKVCache, DeviceMemory
from .file import EXTERNAL

# Release 1.32 collects events for Microsoft, and keeps an id of the machine in the user's cache, unless this is set.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


class Provider(NamedTuple):
    """name: of an ONNX Runtime execution provider. device: on which it keeps caches; None: in arrays of the host."""

    name: str
    device: str | None = None
    options: Mapping[str, str] = {}


PROVIDERS = {
    "cpu": Provider("CPUExecutionProvider"),
    # fp32 is fp32, not TF32, whose products have 10 bits: the tokens of passes of different widths would differ more
    # often. Caches double by themselves, so that the provider's memory need not.
    "cuda": Provider("CUDAExecutionProvider", "cuda", {"use_tf32": "0", "arena_extend_strategy": "kSameAsRequested"}),
}
GPU_PACKAGE, GPU_RELEASE = "onnxruntime-gpu", "1.27"  # the first one whose CUDA provider has every operator of a graph
# What the provider is linked with, each after what it needs itself.
CUDA_LIBRARIES = ("cudart", "nvJitLink", "nvrtc", "cublasLt", "cublas", "cufft", "curand", "cudnn")
CACHE_DTYPES = {"tensor(float)": "float32", "tensor(float16)": "float16"}


class BoundPass(NamedTuple):
    """The buffers of one shape of pass. They are bound once, and each pass overwrites `feeds`."""

    binding: Any
    feeds: dict[str, NDArray[Any]]  # by input name
    output: ForwardOutput
    keep_alive: list[Any]  # OrtValues over the buffers

    def run(self, session: Any) -> None:
        session.run_with_iobinding(self.binding)


class OnnxRuntimeKVCache(StackedKVCache):
    """A growing cache. A layer's input and output are one slice of the buffer, so a pass appends in place."""

    buffer: NDArray[Any]

    def __init__(self, engine: OnnxRuntimeEngine) -> None:
        self._engine = engine
        super().__init__(engine.spec)

    def bind_pass(self, session: Any, batch: TokenBatch) -> BoundPass:
        """The buffers of a pass with the batch's shape; bound on first use."""
        width, columns = batch.mask.shape
        # An additive mask has one column for each slot of the cache, whatever the batch's mask has.
        shape = PassShape(width, columns if self._engine.form == bindings.COMPACT else 0, len(batch.output_rows))
        if shape not in self._passes:
            self._passes[shape] = self._engine.bind(session, self._values, self.capacity, shape)
        return self._passes[shape]

    def _allocate(self, capacity: int) -> None:
        # The cost of ONNX Runtime's attention depends on the capacity, not the length, so a small buffer is faster.
        spec = self._engine.spec
        if self._engine.form == bindings.COMPACT:
            check_growth(spec, capacity)
            capacity = spec.capacity
        shape = (2 * spec.model.num_layers, 1, spec.model.num_kv_heads, capacity, spec.model.head_dim)
        self.buffer = np.zeros(shape, self._engine.cache_dtype)
        shapes, dtype = self._engine.near_shapes, self._engine.cache_dtype
        self._near = {index: np.zeros(near, dtype) for index, near in shapes.items()}
        layers = (self._near.get(index, layer) for index, layer in enumerate(self.buffer))
        self._values = [self._engine.as_value(layer) for layer in layers]
        self._passes: dict[PassShape, BoundPass] = {}

    def _free(self) -> None:
        del self.buffer, self._near, self._values, self._passes

    def move(self, rows: NDArray[np.int64], first: int) -> None:
        if self._near:  # of a plan's graph, which runs here for a comparison only
            raise EngineError("rows of a graph whose layers have caches of several sizes stay where they are")
        super().move(rows, first)


class OnnxRuntimeEngine(Runner):
    """One exported graph in one ONNX Runtime session. With the CPU provider all arrays are in host memory. With the
    CUDA provider caches lie on the GPU (`device.py`)."""

    def __init__(
        self,
        path: Path,
        spec: EngineSpec,
        threads: int = 0,
        provider: str = "cpu",
        private: bool = False,
        unprepared: bool = False,
    ) -> None:
        """Open `path`. threads: 0 lets ONNX Runtime choose. private: read the data file into memory, where ONNX Runtime
        would map it. unprepared: keep no converted copy of a weight; every pass converts what it reads, which takes
        less memory than a model and, for a few passes, less time. Raises EngineError when the file or the provider
        cannot be used."""
        try:
            import onnxruntime
        except ModuleNotFoundError as error:
            raise EngineError(f"this bundle needs ONNX Runtime: {install('onnxruntime')}") from error
        if provider not in PROVIDERS:
            raise EngineError(f"provider {provider!r} is unknown; choose one of {', '.join(PROVIDERS)}")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        if unprepared:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            # The default order converts all weights of the graph first.
            options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
            options.add_session_config_entry("session.disable_prepacking", "1")
        # 4: products with low-bit weights round the activations of a row to int8 by blocks, which is several times
        # faster. 1: fp32.
        accuracy = "4" if spec.precision in bindings.LOW_BIT else "1"
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", accuracy)
        # Draft and target share the cores. Threads that spin after a pass would take cores from the other session.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        chosen = PROVIDERS[provider]
        if chosen.name not in onnxruntime.get_available_providers():
            raise EngineError(
                f"this onnxruntime has no {chosen.name}: install the [gpu] extra ({GPU_PACKAGE} {GPU_RELEASE} or "
                "later) in place of onnxruntime, or choose --provider cpu"
            )
        if chosen.device is not None:
            preload_cuda()
        beside = path.with_name(path.name + EXTERNAL)

        def open_session(graph: str | bytes) -> Any:
            return onnxruntime.InferenceSession(graph, options, providers=[(chosen.name, dict(chosen.options))])

        try:
            if private and beside.is_file():
                content = np.fromfile(beside, np.uint8)
                options.add_external_initializers_from_files_in_memory([beside.name], [content], [content.nbytes])
            self._session: Any = open_session(str(path))
        except Exception as error:  # ONNX Runtime's own exception types are not public
            raise EngineError(f"{path.name} cannot be opened by ONNX Runtime: {error}") from error
        if self._session.get_providers()[0] != chosen.name:
            raise EngineError(
                f"ONNX Runtime fell back from {chosen.name} to the CPU: check the NVIDIA driver (nvidia-smi), CUDA 13 "
                f"and cuDNN 9 (pip install '{GPU_PACKAGE}[cuda,cudnn]')"
            )
        self._ort = onnxruntime
        self.spec = spec
        types = {value.name: value.type for value in self._session.get_inputs()}
        names = [bindings.past(kind, layer) for layer in range(spec.model.num_layers) for kind in bindings.KINDS]
        shapes = {value.name: value.shape for value in self._session.get_inputs()}
        # The shapes of caches with fewer slots than others, by their place among all.
        self.near_shapes = {
            index: shapes[name]
            for index, name in enumerate(names)
            if bindings.DROPPED.name in types and shapes[name][2] != spec.capacity
        }
        self.form = bindings.COMPACT if bindings.TREE_MASK.name in types else bindings.ADDITIVE
        self.cache_dtype = CACHE_DTYPES[types[bindings.past(bindings.KINDS[0], 0)]]
        self._memory: DeviceMemory | None = None
        if chosen.device is not None:
            check_inputs(self._session, path.name, chosen.device)
            place = (onnxruntime.OrtValue, chosen.device, spec, self.cache_dtype)
            self._memory = DeviceMemory(*place, open_session, self._errors)

    def new_cache(self, salt: str | None = None) -> OnnxRuntimeKVCache | DeviceKVCache:
        return OnnxRuntimeKVCache(self) if self._memory is None else DeviceKVCache(self._memory)

    def score(self, batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        session = self._session  # another thread may close the engine during the pass
        if session is None:
            raise closed_error(self.spec)
        if self._memory is not None:
            return self._scored(session, batch, check_cache(cache, DeviceKVCache))
        return self._scored(session, batch, check_cache(cache, OnnxRuntimeKVCache))

    def _scored(self, session: Any, batch: TokenBatch, cache: OnnxRuntimeKVCache | DeviceKVCache) -> ForwardOutput:
        start = cache.reserve(batch)
        bound = cache.bind_pass(session, batch)
        feed(bound.feeds, batch, cache.length, start)
        with self._errors():
            bound.run(session)
        cache.speculative += batch.num_tokens
        return shown(bound.output, batch)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Exceptions of ONNX Runtime as MemoryError or EngineError that names the engine."""
        try:
            yield
        except Exception as error:  # for example no free memory on the GPU
            if "alloc" in str(error).lower():
                raise MemoryError(f"ONNX Runtime has no memory for a pass of the {self.spec.role}: {error}") from error
            raise EngineError(f"ONNX Runtime could not run a pass of the {self.spec.role}: {error}") from error

    def close(self) -> None:
        self._session = None

    def as_value(self, array: NDArray[Any]) -> Any:
        """An OrtValue that shares the memory of `array`. Raises EngineError when ONNX Runtime copies the array."""
        value = self._ort.OrtValue.ortvalue_from_numpy(array)
        if value.data_ptr() != array.ctypes.data:
            raise EngineError("ONNX Runtime copied a buffer instead of sharing it; this release cannot append in place")
        return value

    def bind(self, session: Any, cache: list[Any], capacity: int, shape: PassShape) -> BoundPass:
        """Allocate and bind the buffers of one shape of pass over one cache, see OnnxRuntimeKVCache.bind_pass."""
        binding = session.io_binding()
        keep_alive: list[Any] = []
        sizes = axis_sizes(self.spec, shape, capacity)

        def buffer(item: bindings.Binding, bind: Callable[[str, Any], None]) -> NDArray[Any]:
            array = np.zeros([sizes[axis] for axis in item.shape], item.dtype)
            value = self.as_value(array)
            keep_alive.append(value)
            bind(item.name, value)
            return array

        inputs = bindings.inputs(self.form, self.spec.model.reads is not None, bool(self.near_shapes))
        feeds = {item.name: buffer(item, binding.bind_ortvalue_input) for item in inputs}
        for layer in range(self.spec.model.num_layers):
            for offset, kind in enumerate(bindings.KINDS):
                value = cache[2 * layer + offset]
                binding.bind_ortvalue_input(bindings.past(kind, layer), value)
                binding.bind_ortvalue_output(bindings.present(kind, layer), value)
        results = {
            item.name: buffer(item, binding.bind_ortvalue_output) for item in bindings.outputs(self.spec.outputs)
        }
        return BoundPass(binding, feeds, output_of(results), keep_alive)


def preload_cuda() -> None:
    """Load CUDA's libraries from packages of this Python, for ONNX Runtime, which looks only beside its own."""
    import onnxruntime

    packages = importlib.util.find_spec("nvidia")
    for folder in () if packages is None else packages.submodule_search_locations or ():
        for name in CUDA_LIBRARIES:
            for library in sorted(Path(folder).glob(f"*/lib/lib{name}.so.*")):
                ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    onnxruntime.preload_dlls()


def check_inputs(session: Any, file: str, device: str) -> None:
    """Raises EngineError for an input that ONNX Runtime reads in another memory than the device's: it would copy such
    an input, cache or not, once when it is bound, and no pass would read what is written later."""
    for value, place in zip(session.get_inputs(), session.get_input_memory_infos(), strict=True):
        if place.name.lower() != device:
            raise EngineError(
                f"ONNX Runtime reads {value.name} of {file} in the memory {place.name!r} instead of on {device}, since "
                f"this release lacks an operator there: pip install '{GPU_PACKAGE}>={GPU_RELEASE}', or choose "
                "--provider cpu"
            )
