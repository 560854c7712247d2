"""A static cache on a device, and passes over it; the addresses are fixed, so that CUDA graphs can capture passes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ....models import bindings
from ....plugins.tree_attention.op import SequenceRow
from ..base import EngineSpec, ForwardOutput, TokenBatch, closed_error
from ..feeds import feed_sequences, output_of, shown
from ..layout import Layout, PassShape, align
from .device import CacheGeometry, RowMove, Stream

if TYPE_CHECKING:  # engine.py imports this module
    from .engine import StaticEngine

log = logging.getLogger("draftwood.engines")


def cache_geometry(spec: EngineSpec, itemsize: int) -> CacheGeometry:
    """The layout of one allocation for the keys and values of all sequences of an engine, at full length."""
    model = spec.model
    row_bytes, capacity = model.head_dim * itemsize, spec.max_batch * spec.capacity
    return CacheGeometry(
        tensors=2 * model.num_layers,
        heads=model.num_kv_heads,
        capacity=capacity,
        row_bytes=row_bytes,
        tensor_bytes=align(model.num_kv_heads * capacity * row_bytes),
    )


class CacheMemory:
    """One allocation [2 * layers, 1, H_kv, C, D] that every pass reads and writes in place, and the passes over it. The
    caller of any method holds the engine's lock."""

    def __init__(self, engine: StaticEngine) -> None:
        self._engine = engine
        self.geometry = cache_geometry(engine.spec, engine.program.cache_itemsize)
        self._memory = engine.device.allocate(self.geometry.nbytes)
        self._passes: dict[PassShape, StaticPass] = {}

    @property
    def address(self) -> int:
        return self._memory.address

    def bind_pass(self, shape: PassShape) -> StaticPass:
        """The pass of a shape over this cache, created on first use. Raises EngineError when the engine is closed."""
        if self._engine.closed:
            raise closed_error(self._engine.spec)
        if shape not in self._passes:
            self._passes[shape] = StaticPass(self._engine, self._addresses(), shape)
        return self._passes[shape]

    def move(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Queue the copies of rows, in order, in every layer and head."""
        move = RowMove(self._memory.address, self.geometry, sources, targets)
        self._engine.device.move_rows(move, self._engine.stream)
        self._engine.has_queued_moves = True

    def _addresses(self) -> dict[str, int]:
        """The addresses of every layer's keys and values, by the names of the inputs and of the outputs."""
        names = [(layer, kind) for layer in range(self._engine.spec.model.num_layers) for kind in bindings.KINDS]
        return {
            name(kind, layer): self._memory.address + index * self.geometry.tensor_bytes
            for index, (layer, kind) in enumerate(names)
            for name in (bindings.past, bindings.present)
        }


class StaticPass:
    """One shape of pass over one cache: its buffers and, after its first run, its CUDA graph."""

    def __init__(self, engine: StaticEngine, caches: dict[str, int], shape: PassShape) -> None:
        self._engine, self.shape, self._caches = engine, shape, caches
        device, spec = engine.device, engine.spec
        self._inputs, self._outputs = Layout.inputs(spec, shape), Layout.outputs(spec, shape)
        self._host_inputs, self._host_outputs = (
            device.allocate_pinned(self._inputs.nbytes),
            device.allocate_pinned(self._outputs.nbytes),
        )
        self._device_inputs = device.allocate(self._inputs.nbytes)
        self._device_outputs = device.allocate(self._outputs.nbytes)
        self._feeds = self._inputs.views(self._host_inputs)
        self._output = output_of(self._outputs.views(self._host_outputs))
        self._graph: Any | None = None
        self._may_capture = True

    def run(self, batch: TokenBatch, sequences: Sequence[SequenceRow], start: int, scored: int) -> ForwardOutput:
        """Score a batch with rows of these sequences. start: the slot of the first row. scored: the number of output
        rows, from the first on, that are copied to the host."""
        device, stream = self._engine.device, self._engine.stream
        feed_sequences(self._feeds, batch, sequences, start)
        if self._graph is None:
            self.bind()
            self._enqueue()
        else:
            device.replay(self._graph, stream)
        needed = self._outputs.needed_bytes(scored, batch.ranking_only)
        device.download(self._host_outputs[:needed], self._device_outputs.address, stream)
        device.synchronize(stream)
        self._engine.has_queued_moves = False
        if self._graph is None and self._may_capture:
            self._capture()
        return shown(self._output, batch)

    def bind(self) -> None:
        """Bind every tensor, since another cache may have used the execution in between."""
        execution = self._engine.execution(self.shape)
        blocks = ((self._inputs, self._device_inputs), (self._outputs, self._device_outputs))
        for layout, memory in blocks:
            for name, field in layout.fields.items():
                execution.bind(name, field.shape, memory.address + field.offset)
        spec = self._engine.spec
        shape = (1, spec.model.num_kv_heads, spec.max_batch * spec.capacity, spec.model.head_dim)
        for name, address in self._caches.items():
            execution.bind(name, shape, address)

    def _enqueue(self) -> None:
        """Queue the copy of the inputs and the program."""
        stream = self._engine.stream
        self._engine.device.upload(self._device_inputs.address, self._host_inputs, stream)
        self.enqueue(stream)

    def enqueue(self, stream: Stream) -> None:
        """Queue the program alone, over inputs that are on the device already. It must be bound."""
        self._engine.execution(self.shape).enqueue(stream)

    def is_capturable(self, stream: Stream) -> bool:
        return self._engine.execution(self.shape).is_capturable(stream)

    def address(self, name: str) -> int:
        for layout, memory in ((self._inputs, self._device_inputs), (self._outputs, self._device_outputs)):
            if name in layout.fields:
                return memory.address + layout.fields[name].offset
        raise KeyError(name)

    def _capture(self) -> None:
        """Capture the pass as a graph, after its first run. TensorRT completes its setup in the first run, and a graph
        must not contain this setup. The tensors remain bound, because binding them may set something up again."""
        if self.is_capturable(self._engine.stream):
            self._graph = self._engine.device.capture(self._enqueue, self._engine.stream)
        self._may_capture = self._graph is not None
        if self._graph is None:
            log.warning(
                "a pass of %d rows cannot be captured as a CUDA graph; it is queued each time", self.shape.width
            )
