"""Caches of ONNX Runtime that lie on a provider's device, and passes over them.

A cache is one tensor [2 * layers, H_kv, C, D] on the device. Passes write into it in place, and commits and growth copy
rows within the device's memory (`moves.py`). Of a pass only its inputs, in one block, and the outputs that are read
cross the bus. `DeviceMemory` works with any provider; tests use it with that of the CPU.

ONNX Runtime copies an input to the device when it is bound, and not again when the pass runs. Therefore no array of the
host is bound as an input here: the block is copied before each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....models import bindings
from ..base import EngineSpec, ForwardOutput, TokenBatch
from ..cache import GrowingKVCache
from ..feeds import output_of
from ..layout import Layout, PassShape
from .moves import gather_graph, move_graph

NUMBER = 0  # of the device: the first one


class DeviceMemory:
    """Memory of a provider's device, and the copies within it."""

    def __init__(
        self,
        values: Any,
        device: str,
        spec: EngineSpec,
        cache_dtype: str,
        open_graph: Callable[[bytes], Any],
        errors: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """values: ONNX Runtime's class OrtValue. device: ONNX Runtime's name of it. open_graph: opens a session of the
        provider. errors: makes EngineError or MemoryError of an exception of ONNX Runtime."""
        self.device, self.spec, self.cache_dtype = device, spec, np.dtype(cache_dtype)
        self._values, self._open, self.errors = values, open_graph, errors
        self._unread: dict[int, tuple[Layout, Any]] = {}

    @cached_property
    def blank(self) -> Any:
        """A cache of one slot of zeros."""
        model = self.spec.model
        zeros = np.zeros((2 * model.num_layers, model.num_kv_heads, 1, model.head_dim), self.cache_dtype)
        value = self.allocate(zeros.shape, zeros.dtype)
        value.update_inplace(zeros)
        return value

    def unread(self, rows: int) -> tuple[Layout, Any]:
        """Memory for the outputs of so many rows that no caller reads. Passes share it."""
        rows = max(rows, self.spec.max_width)
        if rows not in self._unread:
            shape = PassShape(self.spec.pass_widths[-1], 0, rows)
            layout = Layout.of(bindings.outputs(self.spec.outputs), self.spec, shape)
            self._unread[rows] = layout, self.allocate((layout.nbytes,), np.dtype(np.uint8))
        return self._unread[rows]

    def allocate(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Any:
        """An OrtValue on the device; its content is undefined."""
        with self.errors():
            return self._values.ortvalue_from_shape_and_type(list(shape), dtype.type, self.device, NUMBER)

    def on_host(self, array: NDArray[Any]) -> Any:
        """An OrtValue over the memory of an array."""
        return self._values.ortvalue_from_numpy(array)

    def gathered(self, cache: Any, rows: NDArray[np.int64]) -> Any:
        """A new cache with these rows of another one."""
        planes, heads, _, size = cache.shape()
        kept = self.allocate((planes, heads, len(rows), size), self.cache_dtype)
        self._run(self._gather, {"source": cache, "rows": self.on_host(rows)}, {"kept": kept})
        return kept

    def move(self, cache: Any, rows: NDArray[np.int64], first: int) -> None:
        """Copy rows of a cache, in this order, to the slots from `first` on, in place."""
        places = np.full(cache.shape()[0], first, np.int64)
        feeds = {"cache": cache, "rows": self.on_host(rows), "first": self.on_host(places)}
        self._run(self._move, feeds, {"moved": cache})

    def _run(self, session: Any, feeds: dict[str, Any], results: dict[str, Any]) -> None:
        with self.errors():
            binding = session.io_binding()
            for name, value in feeds.items():
                binding.bind_ortvalue_input(name, value)
            for name, value in results.items():
                binding.bind_ortvalue_output(name, value)
            session.run_with_iobinding(binding)

    @cached_property
    def _gather(self) -> Any:
        return self._open(gather_graph(self.cache_dtype.name))

    @cached_property
    def _move(self) -> Any:
        return self._open(move_graph(self.cache_dtype.name))


class DeviceKVCache(GrowingKVCache):
    """A growing cache on the device, of a graph in the additive form."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        super().__init__(memory.spec)

    @property
    def capacity(self) -> int:
        return int(self._value.shape()[2])

    def bind_pass(self, session: Any, batch: TokenBatch) -> DevicePass:
        """The buffers of a pass with the batch's shape; bound on first use."""
        shape = PassShape(batch.mask.shape[0], 0, len(batch.output_rows))
        key = shape, outputs_read(batch, self._spec.outputs)
        if key not in self._passes:
            self._passes[key] = DevicePass(self._memory, session, self._value, *key)
        return self._passes[key]

    def _allocate(self, capacity: int) -> None:
        # All zeros: a masked slot adds nothing to a row, unless it holds NaN or infinity.
        self._set(self._memory.gathered(self._memory.blank, np.zeros(capacity, np.int64)))

    def _resize(self, capacity: int, used: int) -> None:
        rows = np.arange(capacity)
        rows[used:] = 0  # any finite row
        self._set(self._memory.gathered(self._value, rows))

    def _set(self, value: Any) -> None:
        self._value = value
        self._passes: dict[tuple[PassShape, tuple[str, ...]], DevicePass] = {}

    def move(self, rows: NDArray[np.int64], first: int) -> None:
        self._memory.move(self._value, rows, first)

    def _free(self) -> None:
        del self._value, self._passes


class DevicePass:
    """The buffers of one shape of pass over one cache. The caller overwrites `feeds` before each run."""

    def __init__(self, memory: DeviceMemory, session: Any, cache: Any, shape: PassShape, read: Sequence[str]) -> None:
        """read: names of the outputs that come to the host."""
        capacity, spec = int(cache.shape()[2]), memory.spec
        items = bindings.inputs(bindings.ADDITIVE, spec.model.reads is not None)
        inputs = Layout.of(items, spec, shape, capacity)
        self._host = np.zeros(inputs.nbytes, np.uint8)
        self.feeds = inputs.views(self._host)
        self._block = memory.allocate((inputs.nbytes,), self._host.dtype)
        self._binding = session.io_binding()
        for name, field in inputs.fields.items():
            place = (field.dtype.type, list(field.shape), self._block.data_ptr() + field.offset)
            self._binding.bind_input(name, memory.device, NUMBER, *place)
        layer_shape = [1, *cache.shape()[1:]]
        layer_bytes = int(np.prod(layer_shape)) * memory.cache_dtype.itemsize
        for layer in range(spec.model.num_layers):
            for offset, kind in enumerate(bindings.KINDS):
                address = cache.data_ptr() + (2 * layer + offset) * layer_bytes
                place = (memory.cache_dtype.type, layer_shape, address)
                self._binding.bind_input(bindings.past(kind, layer), memory.device, NUMBER, *place)
                self._binding.bind_output(bindings.present(kind, layer), memory.device, NUMBER, *place)
        self._keep_alive = [cache, *self._bind_outputs(memory, shape, read)]

    def _bind_outputs(self, memory: DeviceMemory, shape: PassShape, read: Sequence[str]) -> list[Any]:
        """Bind the outputs to the host's memory if they are read, and to the device's otherwise; returns what must live
        as long as the binding. The array of an output that is not read stays as it is."""
        layout, unread = memory.unread(shape.outputs)
        fields = Layout.of(bindings.outputs(memory.spec.outputs), memory.spec, shape).fields
        results = {name: np.zeros(field.shape, field.dtype) for name, field in fields.items()}
        alive = [unread]
        for name, field in fields.items():
            if name in read:
                alive.append(memory.on_host(results[name]))
                self._binding.bind_ortvalue_output(name, alive[-1])
            else:
                place = (field.dtype.type, list(field.shape), unread.data_ptr() + layout.fields[name].offset)
                self._binding.bind_output(name, memory.device, NUMBER, *place)
        self.output: ForwardOutput = output_of(results)
        return alive

    def run(self, session: Any) -> None:
        """Copy the inputs to the device and run the pass; the results that are read are then in `output`."""
        self._block.update_inplace(self._host)
        session.run_with_iobinding(self._binding)


def outputs_read(batch: TokenBatch, names: Sequence[str]) -> tuple[str, ...]:
    """The outputs that the caller of a pass reads, among these."""
    ranked = batch.ranking_only and bindings.TOP_IDS.name in names
    unread = {bindings.LOGITS.name} if ranked else set()
    unread |= set() if batch.states_read else {bindings.STATES.name}
    unread |= {name for name in names if name != bindings.STATES.name} if batch.cache_only else set()
    return tuple(name for name in names if name not in unread)
