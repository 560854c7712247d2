"""A stand-in for a GPU and a compiled program, on the host: work is queued on streams and runs when the host waits.

Errors of a static engine then change its results: without a wait it reads old numbers, with a wrong address it reads
other memory, and a captured graph keeps the addresses of its capture.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from ptx.on_host import launch_on_host

from draftwood.models import bindings
from draftwood.models.errors import EngineError
from draftwood.plugins.device_round.images import image
from draftwood.runtime.engines.base import EngineSpec
from draftwood.runtime.engines.static.device import RowMove, Stream
from draftwood.runtime.engines.static.engine import StaticEngine

Work = Callable[[], None]
DTYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}


class HostMemory:
    """Zeroed memory at an aligned address. It goes to `freed` when nothing refers to it any more."""

    def __init__(self, nbytes: int, freed: list[NDArray[np.uint8]]) -> None:
        block = np.zeros(nbytes + 256, np.uint8)
        self.address, self.nbytes = -(-block.ctypes.data // 256) * 256, nbytes
        weakref.finalize(self, freed.append, block)


class HostDevice:
    """See `runtime/engines/static/device.py`. `launches` counts what a driver would be asked for, by kind; `done` what
    ran, in graphs too, and `copied` the bytes of copies. rounds: whether it runs the kernels of rounds, from their
    PTX."""

    def __init__(self, captures: bool = True, rounds: bool = False) -> None:
        self.captures, self.runs_rounds, self.number = captures, rounds, id(self)
        self._allocations: weakref.WeakSet[HostMemory] = weakref.WeakSet()
        self.launches: dict[str, int] = {}
        self.done, self.copied = Counter[str](), Counter[str]()
        self._queues: dict[Stream, list[Work]] = {}
        self._freed: list[NDArray[np.uint8]] = []  # a driver gives memory back after what was queued has run
        self._recording: list[Work] | None = None

    def allocate(self, nbytes: int) -> HostMemory:
        memory = HostMemory(nbytes, self._freed)
        self._allocations.add(memory)
        return memory

    def allocate_pinned(self, nbytes: int) -> NDArray[np.uint8]:
        return np.zeros(nbytes, np.uint8)

    def new_stream(self) -> Stream:
        stream = len(self._queues) + 1
        self._queues[stream] = []
        return stream

    def upload(self, address: int, array: NDArray[np.uint8], stream: Stream) -> None:
        self.submit("upload", stream, lambda: self.copy("upload", address, array.ctypes.data, array.nbytes))

    def download(self, array: NDArray[np.uint8], address: int, stream: Stream) -> None:
        self.submit("download", stream, lambda: self.copy("download", array.ctypes.data, address, array.nbytes))

    def copy(self, kind: str, target: int, source: int, nbytes: int) -> None:
        self.copied[kind] += nbytes
        ctypes.memmove(target, source, nbytes)

    def move_rows(self, move: RowMove, stream: Stream) -> None:
        self.submit("move_rows", stream, lambda: moved(move))

    def launch(self, kernel: str, grid: tuple[int, int], values: Sequence[int], stream: Stream) -> None:
        numbers = tuple(values)
        self.submit(kernel, stream, lambda: launch_on_host(image(kernel), grid, numbers, self.blocks()))

    def blocks(self) -> list[NDArray[np.uint8]]:
        """All allocations."""
        return [array_at(each.address, (each.nbytes,), np.uint8) for each in self._allocations if each.nbytes]

    def capture(self, work: Work, stream: Stream) -> list[Work] | None:
        if not self.captures:
            return None
        self._recording = []
        work()
        graph, self._recording = self._recording, None
        return graph

    def replay(self, graph: list[Work], stream: Stream) -> None:
        self.submit("replay", stream, lambda: [work() for work in graph])

    def synchronize(self, stream: Stream) -> None:
        self.count("synchronize")
        queue, self._queues[stream] = self._queues[stream], []
        for work in queue:
            work()
        if not any(self._queues.values()):
            self._freed.clear()

    @property
    def is_recording(self) -> bool:
        return self._recording is not None

    def submit(self, kind: str, stream: Stream, work: Callable[[], object]) -> None:
        """Queue work, or record it while a graph is captured."""
        self.count(kind if self._recording is None else "captured")
        queue = self._queues[stream] if self._recording is None else self._recording
        queue.append(lambda: self.do(kind, work))

    def do(self, kind: str, work: Callable[[], object]) -> None:
        self.done[kind] += 1
        work()

    def count(self, kind: str) -> None:
        self.launches[kind] = self.launches.get(kind, 0) + 1


def moved(move: RowMove) -> None:
    """RowMove in numpy; rows are read one after the other, as the kernel does."""
    tensors, heads, capacity, row_bytes, tensor_bytes = move.cache
    block = array_at(move.address, (tensors, tensor_bytes), np.uint8)
    planes = block[:, : heads * capacity * row_bytes].reshape(tensors, heads, capacity, row_bytes)
    assert np.shares_memory(planes, block)
    for source, target in zip(move.sources.tolist(), move.targets.tolist(), strict=True):
        planes[:, :, target] = planes[:, :, source]


def array_at(address: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """An array over memory that somebody else keeps alive."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    block: NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
    viewed: NDArray[Any] = block.view(dtype).reshape(shape)
    return viewed


class Bound(NamedTuple):
    shape: tuple[int, ...]
    address: int


class OnnxExecution:
    """The exported graph over bound addresses; refuses what a TensorRT context would."""

    def __init__(self, program: OnnxProgram) -> None:
        self._program = program
        self._bound: dict[str, Bound] = {}

    def bind(self, name: str, shape: tuple[int, ...], address: int) -> None:
        assert not self._program.device.is_recording, "shapes and addresses are set before a pass is captured"
        if name not in self._program.types:
            raise EngineError(f"the graph has no tensor {name}")
        if address % 256 and name in {item.name for item in bindings.inputs(bindings.COMPACT)}:
            raise EngineError(f"{name} is not aligned")
        self._bound[name] = Bound(shape, address)

    def enqueue(self, stream: Stream) -> None:
        bound = dict(self._bound)  # what is bound now, whatever is bound when the work runs
        assert bound.keys() == self._program.types.keys(), "not everything is bound"
        self._program.device.submit("enqueue", stream, lambda: self._program.run(bound))

    def is_capturable(self, stream: Stream) -> bool:
        return self._program.device.captures


class OnnxProgram:
    """The compact graph that a TensorRT plan is compiled from, in ONNX Runtime."""

    workspace_bytes = 0

    def __init__(self, path: Path, device: HostDevice, max_columns: int) -> None:
        self.device = device
        self.max_columns = max_columns
        self.weight_bytes = path.stat().st_size
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._inputs = {value.name: DTYPES[value.type] for value in self._session.get_inputs()}
        self._outputs = {value.name: DTYPES[value.type] for value in self._session.get_outputs()}
        self.types = self._inputs | self._outputs
        self.cache_itemsize = np.dtype(self._inputs[bindings.past("key", 0)]).itemsize
        self.widths: list[int] = []  # of the executions asked for

    @property
    def symbols(self) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Axes of inputs and outputs by name: numbers, and names of what varies."""
        inputs = {value.name: value.shape for value in self._session.get_inputs()}
        return inputs, {value.name: value.shape for value in self._session.get_outputs()}

    def execution(self, width: int, stream: Stream) -> OnnxExecution:
        self.widths.append(width)
        return OnnxExecution(self)

    def run(self, bound: dict[str, Bound]) -> None:
        binding = self._session.io_binding()
        for names, bind in ((self._inputs, binding.bind_ortvalue_input), (self._outputs, binding.bind_ortvalue_output)):
            for name, dtype in names.items():
                array = array_at(bound[name].address, bound[name].shape, dtype)
                bind(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
        self._session.run_with_iobinding(binding)

    def close(self) -> None:
        del self._session


def static_engine(path: Path, spec: EngineSpec, captures: bool = True, columns: int | None = None) -> StaticEngine:
    """An engine over the compact graph at `path`. columns: of its widest mask, None for as many as a cache."""
    device = HostDevice(captures)
    return StaticEngine(spec, OnnxProgram(path, device, columns or spec.capacity), device)
