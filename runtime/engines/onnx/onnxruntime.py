"""The ONNX Runtime engine, for any CPU, and for GPUs with the CUDA execution provider."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....models import bindings
from ....models.errors import EngineError
from ..base import EngineSpec, ForwardOutput, KVCache, SoloEngine, TokenBatch, check_cache, closed_error
from ..cache import StackedKVCache
from ..feeds import feed, output_of
from ..layout import check_growth
from .file import EXTERNAL

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
CACHE_DTYPES = {"tensor(float)": "float32", "tensor(float16)": "float16"}


class BoundPass(NamedTuple):
    """The buffers of one shape of pass. They are bound once, and each pass overwrites `feeds`."""

    binding: Any
    feeds: dict[str, NDArray[Any]]  # by input name
    output: ForwardOutput
    keep_alive: list[Any]  # OrtValues over the buffers


class OnnxRuntimeKVCache(StackedKVCache):
    """A growing cache. The input and output of each layer are the same slice of the buffer, so a pass appends in
    place."""

    buffer: NDArray[Any]

    def __init__(self, engine: OnnxRuntimeEngine) -> None:
        self._engine = engine
        super().__init__(engine.spec)

    def bind_pass(self, session: Any, width: int, outputs: int, columns: int) -> BoundPass:
        """The buffers for a pass of `width` rows with `outputs` output rows and `columns` columns of the mask; bound on
        first use."""
        # An additive mask has one column for each slot of the cache, whatever `columns` is.
        key = (width, outputs, columns if self._engine.form == bindings.COMPACT else 0)
        if key not in self._passes:
            self._passes[key] = self._engine.bind(session, self._values, self.capacity, *key)
        return self._passes[key]

    def _allocate(self, capacity: int) -> None:
        # The cost of ONNX Runtime's attention depends on the capacity, not the length, so a small buffer is faster.
        spec = self._engine.spec
        if self._engine.form == bindings.COMPACT:
            check_growth(spec, capacity)
            capacity = spec.capacity
        shape = (2 * spec.model.num_layers, 1, spec.model.num_kv_heads, capacity, spec.model.head_dim)
        self.buffer = np.zeros(shape, self._engine.cache_dtype)
        self._values = [self._engine.as_value(layer) for layer in self.buffer]
        self._passes: dict[tuple[int, int, int], BoundPass] = {}

    def _free(self) -> None:
        del self.buffer, self._values, self._passes


class OnnxRuntimeEngine(SoloEngine):
    """One exported graph in one ONNX Runtime session. All arrays are in host memory; with the CUDA provider ONNX
    Runtime copies them to and from the GPU."""

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
            raise EngineError("this bundle needs ONNX Runtime: pip install 'draftwood[cpu]'") from error
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
        name = PROVIDERS[provider]
        if name not in onnxruntime.get_available_providers():
            raise EngineError(
                f"this onnxruntime has no {name}: install the [gpu] extra (onnxruntime-gpu) or choose --provider cpu"
            )
        beside = path.with_name(path.name + EXTERNAL)
        try:
            if private and beside.is_file():
                content = np.fromfile(beside, np.uint8)
                options.add_external_initializers_from_files_in_memory([beside.name], [content], [content.nbytes])
            self._session: Any = onnxruntime.InferenceSession(str(path), options, providers=[name])
        except Exception as error:  # ONNX Runtime's own exception types are not public
            raise EngineError(f"{path.name} cannot be opened by ONNX Runtime: {error}") from error
        if self._session.get_providers()[0] != name:
            raise EngineError(
                f"ONNX Runtime fell back from {name} to the CPU: check the CUDA 13 and cuDNN 9 installation"
            )
        self._ort = onnxruntime
        self.spec = spec
        types = {value.name: value.type for value in self._session.get_inputs()}
        self.form = bindings.COMPACT if bindings.TREE_MASK.name in types else bindings.ADDITIVE
        self.cache_dtype = CACHE_DTYPES[types[bindings.past(bindings.KINDS[0], 0)]]

    def new_cache(self) -> OnnxRuntimeKVCache:
        return OnnxRuntimeKVCache(self)

    def score(self, batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        """See Engine.forward."""
        session = self._session  # another thread may close the engine during the pass
        if session is None:
            raise closed_error(self.spec)
        cache = check_cache(cache, OnnxRuntimeKVCache)
        start = cache.reserve(batch)
        width, columns = batch.mask.shape
        bound = cache.bind_pass(session, width, len(batch.output_rows), columns)
        feed(bound.feeds, batch, cache.length, start)
        try:
            session.run_with_iobinding(bound.binding)
        except Exception as error:  # for example no free memory on the GPU
            if "alloc" in str(error).lower():
                raise MemoryError(f"ONNX Runtime has no memory for a pass of the {self.spec.role}: {error}") from error
            raise EngineError(f"ONNX Runtime could not run a pass of the {self.spec.role}: {error}") from error
        cache.speculative += batch.num_tokens
        return bound.output

    def close(self) -> None:
        self._session = None

    def as_value(self, array: NDArray[Any]) -> Any:
        """An OrtValue that shares the memory of `array`. Raises EngineError when ONNX Runtime copies the array."""
        value = self._ort.OrtValue.ortvalue_from_numpy(array)
        if value.data_ptr() != array.ctypes.data:
            raise EngineError("ONNX Runtime copied a buffer instead of sharing it; this release cannot append in place")
        return value

    def bind(self, session: Any, cache: list[Any], capacity: int, width: int, outputs: int, columns: int) -> BoundPass:
        """Allocate and bind the buffers of one shape of pass over one cache, see OnnxRuntimeKVCache.bind_pass."""
        model = self.spec.model
        binding = session.io_binding()
        keep_alive: list[Any] = []

        sizes = {"B": 1, "1": 1, "T": width, "S": columns, "C": capacity, "R": outputs, "V": model.num_logits}
        sizes |= {"N": self.spec.max_batch, "4": 4, "K": bindings.top_columns(model.num_logits)}

        def buffer(item: bindings.Binding, bind: Callable[[str, Any], None]) -> NDArray[Any]:
            array = np.zeros([sizes[axis] for axis in item.shape], item.dtype)
            value = self.as_value(array)
            keep_alive.append(value)
            bind(item.name, value)
            return array

        feeds = {item.name: buffer(item, binding.bind_ortvalue_input) for item in bindings.inputs(self.form)}
        for layer in range(model.num_layers):
            for offset, kind in enumerate(bindings.KINDS):
                value = cache[2 * layer + offset]
                binding.bind_ortvalue_input(bindings.past(kind, layer), value)
                binding.bind_ortvalue_output(bindings.present(kind, layer), value)
        results = {
            item.name: buffer(item, binding.bind_ortvalue_output) for item in bindings.outputs(self.spec.outputs)
        }
        return BoundPass(binding, feeds, output_of(results), keep_alive)
