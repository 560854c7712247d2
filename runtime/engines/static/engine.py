"""An engine over a compiled program of static shapes: caches of fixed size, bound in place, and one graph per shape.

Everything a pass needs crosses to the device in one copy, its results come back in one, and the host waits once. What a
program and a device are is left to `device.py`; `tensorrt.py` and `cuda.py` are the real ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....models import bindings
from ....models.errors import EngineError
from ....plugins.tree_attention.op import SequenceRow
from ..base import Engine, EngineSpec, ForwardOutput, KVCache, Pass, TokenBatch, check_cache, closed_error, num_fitting
from ..cache import GrowingKVCache
from ..layout import Layout, PassShape, check_growth
from .device import Device, Execution, Program
from .memory import CacheMemory, cache_geometry
from .pool import StaticPool


class MemoryUse(NamedTuple):
    """Bytes an engine takes: on the device for weights, workspace and the cache of one sequence, or of as many as it
    was built for, and page-locked on the host for the buffers of its widest pass."""

    weights: int
    workspace: int
    kv_cache: int
    pinned: int

    @property
    def device(self) -> int:
        """Device memory with one cache open."""
        return self.weights + self.workspace + self.kv_cache


def memory_use(spec: EngineSpec, weight_bytes: int, workspace_bytes: int, cache_itemsize: int) -> MemoryUse:
    """What an engine takes; a plan's own size is its weights, but for a little."""
    widest = PassShape(spec.max_width, spec.max_width, spec.max_width)
    pinned = Layout.inputs(spec, widest).nbytes + Layout.outputs(spec, widest).nbytes
    return MemoryUse(weight_bytes, workspace_bytes, cache_geometry(spec, cache_itemsize).nbytes, pinned)


class StaticEngine(Engine):
    """An Engine over a Program. Usable from several threads; passes run one at a time, on a stream of their own,
    so that draft and target do not wait for each other's copies. Each sequence has a cache of its own, or all of them
    share one where the engine was built for several (`pool`)."""

    def __init__(self, spec: EngineSpec, program: Program, device: Device) -> None:
        self.spec = spec
        self.program = program
        self.device = device
        self.stream = device.new_stream()
        self.lock = Lock()
        self.closed = False
        self._executions: dict[PassShape, Execution] = {}
        self._pool: StaticPool | None = None

    @property
    def pool(self) -> StaticPool:
        """Where several sequences share passes; its memory is allocated on first use. EngineError once it is closed."""
        with self.lock:
            if self.closed:
                raise closed_error(self.spec)
            if self._pool is None:
                self._pool = StaticPool(self)
            return self._pool

    @property
    def memory(self) -> MemoryUse:
        program = self.program
        return memory_use(self.spec, program.weight_bytes, program.workspace_bytes, program.cache_itemsize)

    def new_cache(self) -> KVCache:
        return StaticKVCache(self) if self.spec.max_batch == 1 else self.pool.new_cache()

    def num_joint(self, passes: Sequence[Pass]) -> int:
        """See Engine.num_joint: as many as fit its widest pass, where it was built for several sequences."""
        return 1 if self.spec.max_batch == 1 else num_fitting(self.spec, passes)

    def forward(self, passes: Sequence[Pass]) -> list[ForwardOutput]:
        """See Engine.forward. Raises EngineError for more speculative rows than the program was compiled for."""
        if self.spec.max_batch > 1:
            return self.pool.forward(passes)
        return [self._score(each.batch, check_cache(each.cache, StaticKVCache)) for each in passes]

    def _score(self, batch: TokenBatch, cache: StaticKVCache) -> ForwardOutput:
        start, limit = cache.reserve(batch), self.program.max_columns
        if batch.mask.shape[1] > limit:
            raise EngineError(
                f"{batch.mask.shape[1]} speculative rows exceed the {limit} the {self.spec.role}'s plan was built for: "
                "propose fewer tokens, run fewer requests at a time, or rebuild with larger --widths"
            )
        with self.lock:
            output = cache.run(batch, start, limit)
        cache.speculative += batch.num_tokens
        return output

    def close(self) -> None:
        with self.lock:  # a pass of another thread ends first
            if not self.closed:
                self._executions.clear()
                self._pool = None
                self.program.close()
            self.closed = True

    def execution(self, shape: PassShape) -> Execution:
        """The program set up for a shape; shared by all caches, whose addresses a captured graph remembers itself."""
        if shape not in self._executions:
            self._executions[shape] = self.program.execution(shape.width, self.stream)
        return self._executions[shape]


class StaticKVCache(GrowingKVCache):
    """The one sequence of an engine that was built for one: its speculative rows follow its committed ones, so that
    committing a chain moves nothing."""

    def __init__(self, engine: StaticEngine) -> None:
        self._engine = engine
        super().__init__(engine.spec)

    @property
    def capacity(self) -> int:
        """All slots exist from the start: a graph remembers addresses, so that nothing may ever move."""
        return self._spec.capacity

    @property
    def buffer(self) -> NDArray[Any]:
        """See CacheMemory.contents."""
        with self._engine.lock:
            return self._memory.contents()

    def run(self, batch: TokenBatch, start: int, limit: int) -> ForwardOutput:
        """Score a batch whose first row goes to slot `start`, with a mask of at most `limit` columns."""
        place = SequenceRow(0, 0, self.length, self.length)
        return self._memory.bind_pass(PassShape.of(batch, limit)).run(batch, [place], start, batch.num_tokens)

    def _allocate(self, capacity: int) -> None:
        check_growth(self._spec, capacity)
        self._memory = CacheMemory(self._engine)

    def _resize(self, capacity: int, used: int) -> None:
        check_growth(self._spec, capacity)

    def _free(self) -> None:
        del self._memory

    def _move(self, rows: NDArray[np.int64]) -> None:
        if (np.diff(rows) <= 0).any():
            raise EngineError(f"slots must be kept in ascending order, ancestors first, not {rows - self.length}")
        with self._engine.lock:
            self._memory.move(rows, self.length + np.arange(len(rows)))


def missing_tensors(spec: EngineSpec, names: Sequence[str]) -> list[str]:
    """Tensors this release binds that a program with these names lacks."""
    layers = range(spec.model.num_layers)
    caches = [
        name(kind, layer) for name in (bindings.past, bindings.present) for layer in layers for kind in bindings.KINDS
    ]
    inputs = [item.name for item in bindings.inputs(bindings.COMPACT)]
    return [name for name in (*inputs, *caches, *spec.outputs) if name not in names]
