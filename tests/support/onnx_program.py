"""A stand-in for a compiled program, which no machine without a GPU can run: the ONNX graph that it is compiled from,
over memory of the stand-in for the driver (`cuda_driver`)."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
from cuda_driver.kernels import Kernel, Launched
from cuda_driver.machine import Machine
from cuda_driver.memory import DEVICE, Memory, Span, array_at
from engine_parts import CAPACITY, SHARED_COLUMNS, engine_spec

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.engines.export import export
from draftwood.models import bindings
from draftwood.models.errors import EngineError
from draftwood.runtime.engines.shared.sizes import plan_slots
from draftwood.runtime.engines.static.cuda import MOVE_LIMIT, VECTORS, CudaDevice
from draftwood.runtime.engines.static.device import CacheGeometry, RowMove, Stream
from draftwood.runtime.engines.static.engine import StaticEngine

DTYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}


def moved(move: RowMove) -> None:
    """RowMove in numpy; rows are read one after the other, as the kernel does."""
    tensors, heads, capacity, row_bytes, tensor_bytes = move.cache
    block = array_at(move.address, (tensors, tensor_bytes), np.uint8)
    planes = block[:, : heads * capacity * row_bytes].reshape(tensors, heads, capacity, row_bytes)
    assert np.shares_memory(planes, block)
    for source, target in zip(move.sources.tolist(), move.targets.tolist(), strict=True):
        planes[:, :, target] = planes[:, :, source]


class Bound(NamedTuple):
    shape: tuple[int, ...]
    address: int

    def span(self, dtype: Any) -> Span:
        return Span(self.address, self.address + int(np.prod(self.shape)) * np.dtype(dtype).itemsize)


class OnnxExecution:
    """The exported graph over bound addresses; refuses what a TensorRT context would."""

    def __init__(self, program: OnnxProgram) -> None:
        self._program = program
        self._bound: dict[str, Bound] = {}

    def bind(self, name: str, shape: tuple[int, ...], address: int) -> None:
        self._program.machine.answer(self._program.machine.enter, f"a binding of {name}", True)
        if name not in self._program.types:
            raise EngineError(f"the graph has no tensor {name}")
        if address % 256 and name in {item.name for item in bindings.inputs(bindings.COMPACT)}:
            raise EngineError(f"{name} is not aligned")
        self._bound[name] = Bound(shape, address)

    def enqueue(self, stream: Stream) -> None:
        bound = dict(self._bound)  # what is bound now, whatever is bound when the work runs
        assert bound.keys() == self._program.types.keys(), "not everything is bound"
        self._program.enqueue(bound, stream)

    def is_capturable(self, stream: Stream) -> bool:
        return self._program.machine.captures


class OnnxProgram:
    """The compact graph that a TensorRT plan is compiled from, in ONNX Runtime."""

    workspace_bytes = 0

    def __init__(self, path: Path, machine: Machine, max_columns: int) -> None:
        self.machine = machine
        self.max_columns = max_columns
        self.weight_bytes = path.stat().st_size
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._inputs = {value.name: DTYPES[value.type] for value in self._session.get_inputs()}
        self._outputs = {value.name: DTYPES[value.type] for value in self._session.get_outputs()}
        self.types = self._inputs | self._outputs
        self.cache_itemsize = np.dtype(self._inputs[bindings.past("key", 0)]).itemsize
        slots = [value.shape[2] for value in self._session.get_inputs() if value.name.startswith("past_")]
        self.near_slots = min(slots) if bindings.DROPPED.name in self._inputs else 0
        self.widths: list[int] = []  # of the executions asked for

    @property
    def symbols(self) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Axes of inputs and outputs by name: numbers, and names of what varies."""
        inputs = {value.name: value.shape for value in self._session.get_inputs()}
        return inputs, {value.name: value.shape for value in self._session.get_outputs()}

    def execution(self, width: int, stream: Stream) -> OnnxExecution:
        self.widths.append(width)
        return OnnxExecution(self)

    def enqueue(self, bound: dict[str, Bound], stream: Stream, setup: tuple[Span, ...] = ()) -> None:
        """Queue a pass over what is bound now. A cache is written, too. setup: what must be done before."""
        reads = (*setup, *(bound[name].span(dtype) for name, dtype in self._inputs.items()))
        writes = (bound[name].span(dtype) for name, dtype in self._outputs.items())
        self.machine.enqueue("a program", lambda: self.run(bound), (reads, writes), stream)

    def run(self, bound: dict[str, Bound]) -> None:
        binding = self._session.io_binding()
        for names, bind in ((self._inputs, binding.bind_ortvalue_input), (self._outputs, binding.bind_ortvalue_output)):
            for name, dtype in names.items():
                array = array_at(bound[name].address, bound[name].shape, dtype)
                bind(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
        self._session.run_with_iobinding(binding)

    def close(self) -> None:
        del self._session


def open_static(
    checkpoint: Checkpoint,
    place: Path,
    machine: Machine,
    role: str = bindings.DRAFT,
    capacity: int = CAPACITY,
    max_batch: int = 1,
    columns: int | None = None,
) -> StaticEngine:
    """The compact graph of a checkpoint for so many sequences, exported to `place` and opened. columns: of a mask."""
    file = place / f"{role}.onnx"
    spec = replace(engine_spec(checkpoint, "tensorrt", role, capacity), max_batch=max_batch)
    columns = columns or (SHARED_COLUMNS if max_batch > 1 else capacity)
    near, form = plan_slots(spec, columns), bindings.COMPACT
    export(checkpoint, role, capacity, file, lambda name: None, None, form, max_batch=max_batch, near_slots=near)
    return StaticEngine(spec, OnnxProgram(file, machine, columns), CudaDevice())


def mover_image(width: int, capability: str = "") -> bytes:
    """What `compile_mover` gives where a function of the host stands for the kernel."""
    return b"move_rows in vectors of %d bytes" % width


def mover_images() -> dict[bytes, tuple[Kernel, ...]]:
    """For Machine.images."""
    sizes = (8, 8, 4, 4, 4, 4, 4, 8 * MOVE_LIMIT)
    return {
        mover_image(width): (Kernel("move_rows", sizes, functools.partial(moved_by_host, width)),) for width in VECTORS
    }


def moved_by_host(width: int, launched: Launched, memory: Memory) -> None:
    address, tensor_bytes, tensors, heads, capacity, vectors, count = (
        int.from_bytes(value, "little") for value in launched.values[:7]
    )
    geometry = CacheGeometry(tensors, heads, capacity, vectors * width, tensor_bytes)
    memory.require(Span(address, address + geometry.nbytes), DEVICE, "move_rows")
    assert launched.grid[0] * launched.block[0] >= tensors * heads * vectors, "too few threads"
    sources, targets = np.frombuffer(launched.values[7], np.int32).reshape(2, MOVE_LIMIT)[:, :count]
    moved(RowMove(address, geometry, sources.astype(np.int64), targets.astype(np.int64)))
