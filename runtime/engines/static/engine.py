"""An engine over a compiled program of static shapes, with caches of fixed size and one CUDA graph per shape of pass.

One copy moves the inputs of a pass to the device, one copy moves its results back, and the host waits once. `device.py`
defines the interfaces of program and device. `tensorrt.py` and `cuda.py` implement them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....models import bindings
from ....models.errors import EngineError
from ....plugins.tree_attention.op import SequenceRow
from ..base import Engine, EngineSpec, ForwardOutput, KVCache, Pass, TokenBatch, check_cache, closed_error, num_fitting
from ..cache import GrowingKVCache
from ..layout import Layout, PassShape, check_growth
from ..rounds import Rounds
from .device import Device, Execution, Program
from .memory import CacheMemory, cache_parts
from .pool import SharedKVCache, StaticPool
from .rounds import SharedRounds, StaticRounds, can_run

MAX_PAIRS = 8  # of memories whose rounds are kept: their buffers have rows of the vocabulary


class MemoryUse(NamedTuple):
    """The bytes that an engine takes. weights, workspace: on the device. kv_cache: on the device, for all sequences of
    the engine. pinned: page-locked on the host, for the buffers of the widest pass."""

    weights: int
    workspace: int
    kv_cache: int
    pinned: int


class StaticEngine(Engine):
    """An Engine over a Program. Several threads may use it. Passes run one at a time, on a stream of the engine, so
    draft and target do not wait for each other's copies. An engine for one sequence opens separate caches. An engine
    that was built for several sequences has one shared cache (`pool`)."""

    def __init__(self, spec: EngineSpec, program: Program, device: Device) -> None:
        self.spec = spec
        self.program = program
        self.device = device
        self.stream = device.new_stream()
        self.lock = Lock()
        self.closed = False
        self.has_queued_moves = False  # whether commits are queued that no pass has waited for
        self._executions: dict[PassShape, Execution] = {}
        self._pool: StaticPool | None = None
        # The rounds over two memories, the latest pair last: graphs contain addresses, so later texts use both again.
        self._rounds: dict[tuple[CacheMemory, CacheMemory], SharedRounds] = {}
        self._idle: list[CacheMemory] = []  # of closed caches of an engine for one sequence

    @property
    def pool(self) -> StaticPool:
        """The shared cache of several sequences, allocated on first use. Raises EngineError for a closed engine."""
        with self.lock:
            if self.closed:
                raise closed_error(self.spec)
            if self._pool is None:
                self._pool = StaticPool(self)
            return self._pool

    @property
    def memory(self) -> MemoryUse:
        """The size of the plan is a close estimate of its weights."""
        spec, program = self.spec, self.program
        widest = PassShape(spec.max_width, spec.max_width, spec.max_width)
        pinned = Layout.inputs(spec, widest).nbytes + Layout.outputs(spec, widest).nbytes
        parts = cache_parts(spec, program.cache_itemsize, program.near_slots)
        kv_cache = sum(part.geometry.nbytes for part in parts)
        return MemoryUse(program.weight_bytes, program.workspace_bytes, kv_cache, pinned)

    def new_cache(self, salt: str | None = None) -> KVCache:
        return StaticKVCache(self) if self.spec.max_batch == 1 else self.pool.new_cache()

    def warm_up(self) -> list[Callable[[], None]]:
        """See Engine.warm_up: a pass of each width, with one output row as for prompts, and with all. It makes the
        program's context and kernels, and captures its graph, which the next cache of this memory uses."""
        shapes = [(width, outputs) for width in self.spec.pass_widths for outputs in sorted({1, width})]
        return [partial(self._prepare, width, outputs) for width, outputs in shapes]

    def _prepare(self, width: int, outputs: int) -> None:
        """Run a pass over an empty cache."""
        cache, rows, inputs = self.new_cache(), np.arange(width), self.spec.model.state_inputs
        batch = TokenBatch.pad(np.zeros_like(rows), rows, np.tri(width, dtype=np.bool_), width, outputs == 1)
        batch = replace(batch, states=np.zeros((width, inputs), np.float32) if inputs else None)
        self.forward([Pass(self, batch, cache)])
        cache.close()

    def lend(self) -> CacheMemory:
        """Memory for a cache, that of a closed one if there is any."""
        try:
            return self._idle.pop()
        except IndexError:  # not checked before: another thread could take it in between
            return CacheMemory(self)

    def take_back(self, memory: CacheMemory) -> None:
        """Keep the memory of a closed cache for the next one."""
        if not self.closed:
            self._idle.append(memory)

    def num_joint(self, passes: Sequence[Pass]) -> int:
        """See Engine.num_joint: 1, or the passes that fit the widest pass of an engine for several sequences."""
        return 1 if self.spec.max_batch == 1 else num_fitting(self.spec, passes)

    def forward(self, passes: Sequence[Pass]) -> list[ForwardOutput]:
        """See Engine.forward. Also raises EngineError for more speculative rows than the program was compiled for."""
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

    def rounds(self, cache: KVCache, draft: Engine, draft_cache: KVCache) -> Rounds | None:
        """See Engine.rounds: with a static draft on the same device, both for one sequence or both for several."""
        if not isinstance(draft, StaticEngine) or draft.device.number != self.device.number:
            return None
        kind = StaticKVCache if self.spec.max_batch == 1 else SharedKVCache
        if not isinstance(cache, kind) or not isinstance(draft_cache, kind):
            return None
        if not self.device.runs_rounds or not all(map(can_run, (self, draft))):
            return None
        memories = cache.memory, draft_cache.memory
        with self.lock:
            shared = self._rounds.pop(memories, None) or SharedRounds(self, draft, memories)
            self._rounds[memories] = shared
            if len(self._rounds) > MAX_PAIRS:
                del self._rounds[next(iter(self._rounds))]
            return StaticRounds(shared, cache, draft_cache)

    def close(self) -> None:
        with self.lock:  # waits for the pass of another thread
            if not self.closed:
                self.device.synchronize(self.stream)  # rows of a commit may be on their way
                self._executions.clear()
                self._idle.clear()
                self._rounds.clear()
                self._pool = None
                self.program.close()
            self.closed = True

    def execution(self, shape: PassShape) -> Execution:
        """The program for a shape, of all caches: a captured graph contains the addresses of its own cache."""
        if shape not in self._executions:
            self._executions[shape] = self.program.execution(shape.width, self.stream)
        return self._executions[shape]


class StaticKVCache(GrowingKVCache):
    """A cache of one sequence. The speculative rows follow the committed ones: a chain's commit moves nothing."""

    def __init__(self, engine: StaticEngine) -> None:
        self._engine = engine
        super().__init__(engine.spec)

    @property
    def capacity(self) -> int:
        """The number of slots. All are allocated at once, because a CUDA graph contains their addresses."""
        return self._spec.capacity

    @property
    def memory(self) -> CacheMemory:
        """The memory of an open cache. The caller holds the engine's lock while it uses it."""
        if self._closed:
            raise EngineError("this cache was closed: open another one for the next text")
        return self._memory

    def run(self, batch: TokenBatch, start: int, limit: int) -> ForwardOutput:
        """Score a batch. start: the slot of its first row. limit: the most columns that its mask may have."""
        self._memory.make_room(self.length, start, self.length + batch.mask.shape[1])
        place = SequenceRow(0, 0, self.length, self.length)
        return self._memory.bind_pass(PassShape.of(batch, limit)).run(batch, [place], start, batch.num_tokens)

    def has_room(self, first: int, rows: int) -> bool:
        """Whether a pass of `rows` rows fits after `first` speculative rows."""
        seen = first + self._spec.width_for(rows)
        return seen <= self._engine.program.max_columns and self.length + seen <= self._spec.capacity

    def place(self, columns: int) -> tuple[int, int]:
        """The first slot of the committed rows, and that of `columns` speculative ones. The caller holds the lock."""
        self._memory.make_room(self.length, self.length, self.length + columns)
        return 0, self.length

    def truncate(self, length: int) -> None:
        """See KVCache.truncate. Raises EngineError where rows were dropped that a window would reach again."""
        first = max(0, length - (self._spec.model.variant.window or 0))
        if not self._closed:
            with self._engine.lock:
                if length and first < self._memory.dropped:
                    raise EngineError(f"a text of {length} tokens needs rows that this cache has dropped: read it anew")
                if not length:
                    self._memory.drop(0)
        super().truncate(length)

    def accept(self, length: int) -> None:
        """A round on the device has committed rows, of which there are now `length`."""
        self.length, self.speculative = length, 0

    def _allocate(self, capacity: int) -> None:
        check_growth(self._spec, capacity)
        self._memory = self._engine.lend()
        with self._engine.lock:
            self._memory.drop(0)

    def _resize(self, capacity: int, used: int) -> None:
        check_growth(self._spec, capacity)

    def _free(self) -> None:
        self._engine.take_back(self._memory)
        del self._memory

    def move(self, rows: NDArray[np.int64], first: int) -> None:
        if (np.diff(rows) <= 0).any():
            raise EngineError("slots must be kept in ascending order, ancestors first")
        with self._engine.lock:
            self._memory.move(rows, first + np.arange(len(rows)))


def missing_tensors(spec: EngineSpec, names: Sequence[str]) -> list[str]:
    """The tensors that this release binds and that are not among a program's tensor names."""
    layers = range(spec.model.num_layers)
    caches = [
        name(kind, layer) for name in (bindings.past, bindings.present) for layer in layers for kind in bindings.KINDS
    ]
    inputs = [item.name for item in bindings.inputs(bindings.COMPACT, spec.model.reads is not None)]
    return [name for name in (*inputs, *caches, *spec.outputs) if name not in names]
