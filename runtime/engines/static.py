"""An engine over a compiled program of static shapes: caches of fixed size, bound in place, and one graph per shape.

Everything a pass needs crosses to the device in one copy, its results come back in one, and the host waits once. What a
program and a device are is left to `device.py`; `tensorrt.py` and `cuda.py` are the real ones.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...models import bindings
from ...models.errors import EngineError
from .base import EngineSpec, ForwardOutput, StackedKVCache, TokenBatch
from .device import CacheGeometry, Device, Execution, Program, RowMove
from .feeds import feed, output_of
from .layout import Layout, PassShape, aligned, refuse_growth

log = logging.getLogger("draftwood.engines")


class MemoryUse(NamedTuple):
    """Bytes an engine takes: on the device for weights, workspace and one sequence's cache, and page-locked on the host
    for the buffers of its widest pass."""

    weights: int
    workspace: int
    kv_cache: int
    pinned: int

    @property
    def device(self) -> int:
        """Device memory with one sequence open."""
        return self.weights + self.workspace + self.kv_cache


def memory_use(spec: EngineSpec, weight_bytes: int, workspace_bytes: int, cache_itemsize: int) -> MemoryUse:
    """What an engine takes; a plan's own size is its weights, but for a little."""
    widest = PassShape(spec.max_width, spec.max_width, spec.max_width)
    pinned = Layout.inputs(spec, widest).nbytes + Layout.outputs(spec, widest).nbytes
    return MemoryUse(weight_bytes, workspace_bytes, cache_geometry(spec, cache_itemsize).nbytes, pinned)


def cache_geometry(spec: EngineSpec, itemsize: int) -> CacheGeometry:
    """Keys and values of one sequence at full length, in one allocation."""
    model = spec.model
    row_bytes = model.head_dim * itemsize
    return CacheGeometry(
        tensors=2 * model.num_layers,
        heads=model.num_kv_heads,
        capacity=spec.capacity,
        row_bytes=row_bytes,
        tensor_bytes=aligned(model.num_kv_heads * spec.capacity * row_bytes),
    )


class StaticEngine:
    """Engine protocol over a Program. Usable from several threads; passes run one at a time, on a stream of their own,
    so that draft and target do not wait for each other's copies."""

    def __init__(self, spec: EngineSpec, program: Program, device: Device) -> None:
        self.spec = spec
        self.program = program
        self.device = device
        self.stream = device.new_stream()
        self.lock = Lock()
        self._executions: dict[PassShape, Execution] = {}

    @property
    def memory(self) -> MemoryUse:
        program = self.program
        return memory_use(self.spec, program.weight_bytes, program.workspace_bytes, program.cache_itemsize)

    def new_cache(self) -> StaticKVCache:
        return StaticKVCache(self)

    def forward(self, batch: TokenBatch, cache: StaticKVCache) -> ForwardOutput:
        """See Engine.forward. Raises EngineError for more speculative rows than the program was compiled for."""
        start, limit = cache.reserve(batch), self.program.max_columns
        if batch.mask.shape[1] > limit:
            raise EngineError(
                f"{batch.mask.shape[1]} speculative rows exceed the {limit} the {self.spec.role}'s plan was built for: "
                "propose fewer tokens, run fewer requests at a time, or rebuild with larger --widths"
            )
        with self.lock:
            output = cache.bound(PassShape.of(batch, limit)).run(batch, cache.length, start)
        cache.speculative += batch.num_tokens
        return output

    def close(self) -> None:
        with self.lock:  # a pass of another thread ends first
            self._executions.clear()
            self.program.close()

    def execution(self, shape: PassShape) -> Execution:
        """The program set up for a shape; shared by all caches, whose addresses a captured graph remembers itself."""
        if shape not in self._executions:
            self._executions[shape] = self.program.execution(shape.width, self.stream)
        return self._executions[shape]


class StaticKVCache(StackedKVCache):
    """One allocation [2 * layers, 1, H_kv, C, D] that every pass reads and writes in place, and the passes over it."""

    def __init__(self, engine: StaticEngine) -> None:
        self._engine = engine
        self._geometry = cache_geometry(engine.spec, engine.program.cache_itemsize)
        self._passes: dict[PassShape, StaticPass] = {}
        super().__init__(engine.spec)

    @property
    def capacity(self) -> int:
        """All slots exist from the start: a graph remembers addresses, so that nothing may ever move."""
        return self._spec.capacity

    @property
    def buffer(self) -> NDArray[Any]:
        """A copy in host memory, [2 * layers, 1, H_kv, C, D], of fp32, or of fp16's or bf16's bits as uint16."""
        model, device, geometry = self._spec.model, self._engine.device, self._geometry
        block = device.pinned(geometry.nbytes)
        with self._engine.lock:
            device.download(block, self._memory.address, self._engine.stream)
            device.synchronize(self._engine.stream)
        dtype = np.float32 if geometry.row_bytes == 4 * model.head_dim else np.uint16
        used = geometry.heads * geometry.capacity * geometry.row_bytes
        shape = (geometry.tensors, 1, geometry.heads, geometry.capacity, model.head_dim)
        return block.reshape(geometry.tensors, -1)[:, :used].copy().view(dtype).reshape(shape)

    def bound(self, shape: PassShape) -> StaticPass:
        """The pass of a shape over this cache, made on first use."""
        if shape not in self._passes:
            self._passes[shape] = StaticPass(self._engine, self._addresses(), shape)
        return self._passes[shape]

    def _allocate(self, capacity: int) -> None:
        refuse_growth(self._spec, capacity)
        self._memory = self._engine.device.allocate(self._geometry.nbytes)

    def _addresses(self) -> dict[str, int]:
        """Address of every layer's keys and values, by the names of input and output alike."""
        names = [(layer, kind) for layer in range(self._spec.model.num_layers) for kind in bindings.KINDS]
        return {
            name(kind, layer): self._memory.address + index * self._geometry.tensor_bytes
            for index, (layer, kind) in enumerate(names)
            for name in (bindings.past, bindings.present)
        }

    def _move(self, rows: NDArray[np.int64]) -> None:
        if (np.diff(rows) <= 0).any():
            raise EngineError(f"slots must be kept in ascending order, ancestors first, not {rows - self.length}")
        with self._engine.lock:
            move = RowMove(self._memory.address, self._geometry, self.length, rows)
            self._engine.device.move_rows(move, self._engine.stream)


class StaticPass:
    """One shape of pass over one cache: buffers, bindings and, after its first run, the graph that repeats it."""

    def __init__(self, engine: StaticEngine, caches: dict[str, int], shape: PassShape) -> None:
        self._engine, self._shape, self._caches = engine, shape, caches
        device, spec = engine.device, engine.spec
        self._inputs, self._outputs = Layout.inputs(spec, shape), Layout.outputs(spec, shape)
        self._host_inputs, self._host_outputs = device.pinned(self._inputs.nbytes), device.pinned(self._outputs.nbytes)
        self._device_inputs = device.allocate(self._inputs.nbytes)
        self._device_outputs = device.allocate(self._outputs.nbytes)
        self._feeds = self._inputs.views(self._host_inputs)
        self._output = output_of(self._outputs.views(self._host_outputs))
        self._graph: Any | None = None
        self._may_capture = True

    def run(self, batch: TokenBatch, length: int, start: int) -> ForwardOutput:
        """Score a batch behind `length` committed rows, its first row at slot `start`."""
        device, stream = self._engine.device, self._engine.stream
        feed(self._feeds, batch, length, start)
        if self._graph is None:
            self._enqueue()
        else:
            device.replay(self._graph, stream)
        needed = self._outputs.needed_bytes(batch.num_tokens, batch.ranking_only)
        device.download(self._host_outputs[:needed], self._device_outputs.address, stream)
        device.synchronize(stream)
        if self._graph is None and self._may_capture:
            self._capture()
        return self._output

    def _enqueue(self) -> None:
        """Queue copy and program. Bindings are made each time: another cache may have used the execution since."""
        execution, stream = self._engine.execution(self._shape), self._engine.stream
        blocks = ((self._inputs, self._device_inputs), (self._outputs, self._device_outputs))
        for layout, memory in blocks:
            for name, field in layout.fields.items():
                execution.bind(name, field.shape, memory.address + field.offset)
        model = self._engine.spec.model
        shape = (1, model.num_kv_heads, self._engine.spec.capacity, model.head_dim)
        for name, address in self._caches.items():
            execution.bind(name, shape, address)
        self._engine.device.upload(self._device_inputs.address, self._host_inputs, stream)
        execution.enqueue(stream)

    def _capture(self) -> None:
        """Only after a first run: TensorRT does what it put off then, which no graph may hold."""
        if self._engine.execution(self._shape).capturable(self._engine.stream):
            self._graph = self._engine.device.capture(self._enqueue, self._engine.stream)
        self._may_capture = self._graph is not None
        if self._graph is None:
            log.warning(
                "a pass of %d rows cannot be captured as a CUDA graph; it is queued each time", self._shape.width
            )


def missing_tensors(spec: EngineSpec, names: Sequence[str]) -> list[str]:
    """Tensors this release binds that a program with these names lacks."""
    layers = range(spec.model.num_layers)
    caches = [
        name(kind, layer) for name in (bindings.past, bindings.present) for layer in layers for kind in bindings.KINDS
    ]
    inputs = [item.name for item in bindings.inputs(bindings.COMPACT)]
    return [name for name in (*inputs, *caches, *spec.outputs) if name not in names]
