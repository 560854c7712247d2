"""OpenVINO: the fastest low-bit matrices on a CPU, and the same bits for a row however it is verified."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...models import bindings
from ...models.errors import EngineError
from .base import EngineSpec, ForwardOutput, StackedKVCache, TokenBatch, closed
from .feeds import feed, output_of
from .signal_stack import signal_stack_kept

# Inputs of a low-bit matrix that share a scale, and activations of a row that are rounded to int8 together: the integer
# kernels are taken only where both are the same. At 4 bits 64 keeps the text closer than 128, for 5 % of the time.
BLOCKS = {"int8": 128, "int4": 64}


class BoundPass(NamedTuple):
    """Buffers of one (width, outputs) shape, bound once; a pass refills `feeds` in place."""

    request: Any
    feeds: dict[str, NDArray[Any]]  # by input name
    new_rows: NDArray[np.float32]  # [2 * layers, 1, H_kv, W, D]
    output: ForwardOutput


class OpenVinoKVCache(StackedKVCache):
    """Every layer's input is a slice of the buffer; a pass reads it, and the host appends the new rows."""

    buffer: NDArray[np.float32]

    def __init__(self, engine: OpenVinoEngine) -> None:
        self._engine = engine
        super().__init__(engine.spec)

    def bound(self, compiled: Any, width: int, outputs: int) -> BoundPass:
        """The buffers for a pass of this shape, bound on first use."""
        key = (width, outputs)
        if key not in self._passes:
            self._passes[key] = self._engine.bind(compiled, self.buffer, width, outputs)
        return self._passes[key]

    def _allocate(self, capacity: int) -> None:
        model = self._spec.model
        self.buffer = np.zeros((2 * model.num_layers, 1, model.num_kv_heads, capacity, model.head_dim), np.float32)
        self._passes: dict[tuple[int, int], BoundPass] = {}


class OpenVinoEngine:
    """One exported graph compiled for the CPU when it is opened. Matrices of int8 and int4 are multiplied in integers,
    each row's activations rounded by themselves."""

    def __init__(self, path: Path, spec: EngineSpec, threads: int = 0, private: bool = False) -> None:
        """Open `path`. threads: 0 lets OpenVINO choose. private: no file stays mapped. Raises EngineError when OpenVINO
        or the file are unusable, or when the engine has a pass of one row, whose kernels round differently from those
        of wider ones."""
        if spec.widths[0] < 2:
            raise EngineError("an OpenVINO engine has no pass of one row: rebuild the bundle with this release")
        try:
            import openvino
        except ModuleNotFoundError as error:
            raise EngineError("this bundle needs OpenVINO: pip install 'draftwood[openvino]'") from error
        from .openvino_graph import read_graph

        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": BLOCKS.get(spec.precision, 0),
        }
        if threads:
            settings["INFERENCE_NUM_THREADS"] = threads
        try:
            with signal_stack_kept():
                model = read_graph(path, spec.model.num_layers, not private)
                self._compiled: Any = openvino.Core().compile_model(model, "CPU", settings)
        except Exception as error:  # OpenVINO raises RuntimeError for everything
            raise EngineError(f"{path.name} cannot be opened by OpenVINO: {error}") from error
        self._openvino = openvino
        self.spec = spec

    def new_cache(self) -> OpenVinoKVCache:
        return OpenVinoKVCache(self)

    def forward(self, batch: TokenBatch, cache: OpenVinoKVCache) -> ForwardOutput:
        """See Engine.forward."""
        compiled = self._compiled  # another thread may close the engine meanwhile
        if compiled is None:
            raise closed(self.spec)
        start = cache.reserve(batch)
        bound = cache.bound(compiled, len(batch.mask), len(batch.output_rows))
        feed(bound.feeds, batch, cache.length, start)
        try:
            with signal_stack_kept():
                bound.request.infer()
        except RuntimeError as error:
            raise EngineError(f"OpenVINO could not run a pass of the {self.spec.role}: {error}") from error
        rows = batch.num_tokens
        cache.buffer[:, :, :, start : start + rows] = bound.new_rows[:, :, :, :rows]
        cache.speculative += rows
        return bound.output

    def close(self) -> None:
        self._compiled = None

    def bind(self, compiled: Any, cache: NDArray[np.float32], width: int, outputs: int) -> BoundPass:
        """Allocate and bind the buffers of a pass of `width` rows, `outputs` of them scored, over one cache."""
        from .openvino_graph import NEW_ROWS

        model = self.spec.model
        request = compiled.create_infer_request()
        stacked, _, kv_heads, capacity, head_dim = cache.shape

        def bound(name: str, array: NDArray[Any]) -> NDArray[Any]:
            request.set_tensor(name, self._openvino.Tensor(array, shared_memory=True))
            return array

        sizes = {"B": 1, "1": 1, "T": width, "C": capacity, "R": outputs, "V": model.vocab_size}
        sizes["K"] = bindings.top_columns(model.vocab_size)

        def buffer(item: bindings.Binding) -> NDArray[Any]:
            return bound(item.name, np.zeros([sizes[axis] for axis in item.shape], item.dtype))

        feeds = {item.name: buffer(item) for item in bindings.inputs(bindings.ADDITIVE)}
        for index, layer in enumerate(cache):
            bound(bindings.past(bindings.KINDS[index % 2], index // 2), layer)
        new_rows = bound(NEW_ROWS, np.zeros((stacked, 1, kv_heads, width, head_dim), np.float32))
        results = {item.name: buffer(item) for item in bindings.outputs(self.spec.outputs)}
        return BoundPass(request, feeds, new_rows, output_of(results))
