"""ONNX Runtime: the embedded default, on any CPU, or on CUDA where its provider is really active."""

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
    """Buffers of one shape of pass, bound once; a pass refills `feeds` in place."""

    binding: Any
    feeds: dict[str, NDArray[Any]]  # by input name
    output: ForwardOutput
    keep_alive: list[Any]


class OnnxRuntimeKVCache(StackedKVCache):
    """Every layer's input and output alias a slice of the buffer, so that a pass appends in place."""

    buffer: NDArray[Any]

    def __init__(self, engine: OnnxRuntimeEngine) -> None:
        self._engine = engine
        super().__init__(engine.spec)

    def bind_pass(self, session: Any, width: int, outputs: int, columns: int) -> BoundPass:
        """The buffers for a pass of `width` rows, `outputs` of them scored, that see `columns` speculative slots; bound
        on first use."""
        # An additive mask spans the whole cache, however many of its slots are speculative.
        key = (width, outputs, columns if self._engine.form == bindings.COMPACT else 0)
        if key not in self._passes:
            self._passes[key] = self._engine.bind(session, self._values, self.capacity, *key)
        return self._passes[key]

    def _allocate(self, capacity: int) -> None:
        # ONNX Runtime's attention pays for capacity, not length: a buffer that starts small is faster, too.
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
    """One exported graph in one ONNX Runtime session. Arrays live in host memory; with the CUDA provider ONNX Runtime
    copies them itself."""

    def __init__(
        self, path: Path, spec: EngineSpec, threads: int = 0, provider: str = "cpu", private: bool = False
    ) -> None:
        """Open `path`. threads: 0 lets ONNX Runtime choose. private: weights beside the graph are read into memory,
        where ONNX Runtime maps them. Raises EngineError when file or provider are unusable."""
        try:
            import onnxruntime
        except ModuleNotFoundError as error:
            raise EngineError("this bundle needs ONNX Runtime: pip install 'draftwood[cpu]'") from error
        if provider not in PROVIDERS:
            raise EngineError(f"provider {provider!r} is unknown; choose one of {', '.join(PROVIDERS)}")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        # 4: low-bit matrices round a row's activations to int8, block by block, which is several times faster. 1: fp32.
        accuracy = "4" if spec.precision in bindings.LOW_BIT else "1"
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", accuracy)
        # Two sessions share the cores: a pool that goes on spinning after its pass steals them from the other one.
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
        session = self._session  # another thread may close the engine meanwhile
        if session is None:
            raise closed_error(self.spec)
        cache = check_cache(cache, OnnxRuntimeKVCache)
        start = cache.reserve(batch)
        width, columns = batch.mask.shape
        bound = cache.bind_pass(session, width, len(batch.output_rows), columns)
        feed(bound.feeds, batch, cache.length, start)
        try:
            session.run_with_iobinding(bound.binding)
        except Exception as error:  # a full GPU, for example
            if "alloc" in str(error).lower():
                raise MemoryError(f"ONNX Runtime has no memory for a pass of the {self.spec.role}: {error}") from error
            raise EngineError(f"ONNX Runtime could not run a pass of the {self.spec.role}: {error}") from error
        cache.speculative += batch.num_tokens
        return bound.output

    def close(self) -> None:
        self._session = None

    def as_value(self, array: NDArray[Any]) -> Any:
        """An OrtValue over the same memory: what ONNX Runtime writes is seen in `array`, and the other way round."""
        value = self._ort.OrtValue.ortvalue_from_numpy(array)
        if value.data_ptr() != array.ctypes.data:
            raise EngineError("ONNX Runtime copied a buffer instead of sharing it; this release cannot append in place")
        return value

    def bind(self, session: Any, cache: list[Any], capacity: int, width: int, outputs: int, columns: int) -> BoundPass:
        """Allocate and bind the buffers of one shape of pass (see OnnxRuntimeKVCache.bind_pass) over one cache."""
        model = self.spec.model
        binding = session.io_binding()
        keep_alive: list[Any] = []

        sizes = {"B": 1, "1": 1, "T": width, "S": columns, "C": capacity, "R": outputs, "V": model.vocab_size}
        sizes |= {"N": self.spec.max_batch, "4": 4, "K": bindings.top_columns(model.vocab_size)}

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
