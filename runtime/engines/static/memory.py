"""A static cache on a device, and passes over it; the addresses are fixed, so that CUDA graphs can capture passes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....models import bindings
from ....models.layers import network_of
from ....plugins.tree_attention.op import SequenceRow
from ..base import EngineSpec, ForwardOutput, TokenBatch, closed_error
from ..feeds import feed_sequences, output_of, shown
from ..layout import ALIGNMENT, Layout, PassShape, align
from .device import CacheGeometry, RowMove, Stream

if TYPE_CHECKING:  # engine.py imports this module
    from .engine import StaticEngine

log = logging.getLogger("draftwood.engines")


class Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    address: int


class CachePart(NamedTuple):
    """The keys and values, at `address`, of layers with equally many slots. dropped: the address of an int64, the
    number of slots that these layers no longer hold. Their first slot is the next one."""

    layers: tuple[int, ...]
    geometry: CacheGeometry
    address: int = 0
    dropped: int = 0


def cache_parts(spec: EngineSpec, itemsize: int, near_slots: int) -> list[CachePart]:
    """The layout of the keys and values of all sequences of an engine, at full length: of layers that see everything,
    and of those with a window. near_slots: see Program."""
    model = spec.model
    windowed = [near_slots > 0 and layer.window is not None for layer in network_of(model).layers]
    parts = []
    for is_near, capacity in ((False, spec.max_batch * spec.capacity), (True, near_slots)):
        layers = tuple(layer for layer, each in enumerate(windowed) if each == is_near)
        row_bytes = model.head_dim * itemsize
        tensor_bytes = align(model.num_kv_heads * capacity * row_bytes)
        geometry = CacheGeometry(2 * len(layers), model.num_kv_heads, capacity, row_bytes, tensor_bytes)
        parts += [CachePart(layers, geometry)] if layers else []
    return parts


class CacheMemory:
    """Keys and values [2 * layers, 1, H_kv, C, D] that every pass reads and writes in place, and the passes over them.
    C may be smaller for layers with a window. When these are full, the rows that a window still reaches move to the
    first slots, and `dropped` is the number of slots before them. The caller of any method holds the engine's lock."""

    def __init__(self, engine: StaticEngine) -> None:
        self._engine = engine
        program, device = engine.program, engine.device
        parts = cache_parts(engine.spec, program.cache_itemsize, program.near_slots)
        self._memories = [device.allocate(part.geometry.nbytes) for part in parts]
        self._numbers = device.allocate(2 * ALIGNMENT)  # of slots that are dropped: none, and those of a window
        self._host_number = device.allocate_pinned(np.dtype(np.int64).itemsize)
        is_near = [part.geometry.capacity == program.near_slots for part in parts]
        self.parts = [
            part._replace(address=memory.address, dropped=self._numbers.address + near * ALIGNMENT)
            for part, memory, near in zip(parts, self._memories, is_near, strict=True)
        ]
        self.dropped = 0
        self._passes: dict[PassShape, StaticPass] = {}

    def bind_pass(self, shape: PassShape) -> StaticPass:
        """The pass of a shape over this cache, created on first use. Raises EngineError when the engine is closed."""
        if self._engine.closed:
            raise closed_error(self._engine.spec)
        if shape not in self._passes:
            self._passes[shape] = StaticPass(self._engine, list(self._tensors()), shape)
        return self._passes[shape]

    def move(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Queue the copies of rows, in order, in every layer and head."""
        for part in self.parts:
            gone = self.dropped if part is self._near else 0
            self._move(part, sources - gone, targets - gone)

    def make_room(self, length: int, used: int, end: int) -> None:
        """Make sure that layers with a window have the slots before `end`. length: of the committed rows. used: rows,
        with the speculative ones."""
        near = self._near
        if near is None or end - self.dropped <= near.geometry.capacity:
            return
        first = max(0, length - (self._engine.spec.model.variant.window or 0))
        kept = np.arange(first, used)
        self._move(near, kept - self.dropped, kept - first)
        self.drop(first)

    def drop(self, slots: int) -> None:
        """Number the slots of layers with a window from this one on."""
        if slots == self.dropped:
            return
        self._host_number.view(np.int64)[0] = self.dropped = slots
        self._engine.device.upload(self._numbers.address + ALIGNMENT, self._host_number, self._engine.stream)
        self._engine.has_queued_moves = True

    @property
    def _near(self) -> CachePart | None:
        """The part of layers with a window, where it has fewer slots."""
        return self.parts[-1] if self._engine.program.near_slots else None

    def _move(self, part: CachePart, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        # Rows of GrowingKVCache.repeat, which mean nothing, may have no slots in layers with a window.
        there = (sources >= 0) & (np.maximum(sources, targets) < part.geometry.capacity)
        move = RowMove(part.address, part.geometry, sources[there], targets[there])
        self._engine.device.move_rows(move, self._engine.stream)
        self._engine.has_queued_moves = True

    def _tensors(self) -> Iterator[Tensor]:
        """Every layer's keys and values as inputs and as outputs, and the number of dropped slots."""
        for part in self.parts:
            cache = part.geometry
            for index, layer in enumerate(part.layers):
                for place, kind in enumerate(bindings.KINDS):
                    address = part.address + (2 * index + place) * cache.tensor_bytes
                    for name in (bindings.past, bindings.present):
                        shape = 1, cache.heads, cache.capacity, self._engine.spec.model.head_dim
                        yield Tensor(name(kind, layer), shape, address)
        if self._near is not None:
            yield Tensor(bindings.DROPPED.name, (1,), self._near.dropped)


class StaticPass:
    """One shape of pass over one cache: its buffers and, after its first run, its CUDA graph."""

    def __init__(self, engine: StaticEngine, caches: Sequence[Tensor], shape: PassShape) -> None:
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
        for tensor in self._caches:
            execution.bind(*tensor)

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
