"""A stand-in for the parts of tensorrt and tensorrt_rtx that the engine uses, over ONNX Runtime and host memory.

A "plan" is the ONNX graph itself. `test_tensorrt_engine.py` compares its names with the real package's.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from cuda_driver.machine import Machine
from cuda_driver.memory import Span
from onnx_program import Bound, OnnxProgram

from draftwood.runtime.engines.compatibility import WidthFamily

HEADER = b"plan:"  # followed by the path of a graph


class DataType(NamedTuple):
    itemsize: int


class ExecutionContext:
    def __init__(self, engine: CudaEngine) -> None:
        self._engine = engine
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._family: WidthFamily | None = None
        self._number = engine._num_contexts = engine._num_contexts + 1
        self._setup = Span(0, 0)

    def set_device_memory(self, memory: int, size: int) -> None:
        assert memory % 256 == 0 and size >= self._engine.device_memory_size_v2 > self._number
        self._setup = Span(memory + self._number, memory + self._number + 1)  # a byte for each context

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._family = self._engine.families[profile_index]
        # The device sets the context up: a pass on another stream must wait for this.
        self._engine.program.machine.enqueue("a profile", lambda: None, ([], [self._setup]), stream_handle)
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._require_no_capture("a shape")
        assert self._family is not None, "no optimisation profile"
        self._shapes[name] = shape
        if name == "input_ids":
            return self._family.minimum <= shape[1] <= self._family.maximum
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._require_no_capture("an address")
        self._addresses[name] = memory
        return memory % 256 == 0

    def execute_async_v3(self, stream_handle: int) -> bool:
        program = self._engine.program
        sizes: dict[str, int] = {}
        for name, symbols in self._engine.inputs.items():
            sizes |= {axis: size for axis, size in zip(symbols, self._shapes[name], strict=True) if axis is not size}
        shapes = self._shapes | {
            name: tuple(sizes.get(axis, axis) for axis in symbols) for name, symbols in self._engine.outputs.items()
        }
        bound = {name: Bound(shapes[name], address) for name, address in self._addresses.items()}
        program.enqueue(bound, stream_handle, (self._setup,))
        return True

    def _require_no_capture(self, what: str) -> None:
        machine = self._engine.program.machine
        machine.answer(machine.enter, what, True)

    def is_stream_capturable(self, stream: int) -> bool:
        return self._engine.program.machine.captures


class RuntimeCache:
    def __init__(self) -> None:
        self.content = b"kernels"

    def serialize(self) -> bytes:
        return self.content

    def deserialize(self, blob: bytes) -> bool:
        self.content = blob + b"+"
        return True


class RuntimeConfig:
    cuda_graph_strategy = ""
    dynamic_shapes_kernel_specialization_strategy = ""

    def set_execution_context_allocation_strategy(self, strategy: str) -> None:
        assert strategy == "USER_MANAGED"

    def create_runtime_cache(self) -> RuntimeCache:
        return RuntimeCache()

    def set_runtime_cache(self, cache: RuntimeCache) -> bool:
        return True


class CudaEngine:
    device_memory_size_v2 = 4096
    _num_contexts = 0

    def __init__(self, package: FakeTensorRT, program: OnnxProgram) -> None:
        self.program = program
        self.families = package.families
        self.columns = package.columns
        self.aliased = package.aliased
        self.inputs, self.outputs = program.symbols
        self.num_optimization_profiles = len(self.families)
        self._names: list[str] = list(program.types)
        self.num_io_tensors = len(self._names)

    def get_tensor_name(self, index: int) -> str:
        return self._names[index]

    def get_tensor_mode(self, name: str) -> str:
        return "INPUT" if name in self.inputs else "OUTPUT"

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType(self.program.cache_itemsize)

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return name.replace("present", "past") if self.aliased else None

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        return [(1, 1, 1), (1, 1, 1), (1, self.families[profile_index].maximum, self.columns)]

    def create_runtime_config(self) -> RuntimeConfig:
        return RuntimeConfig()

    def create_execution_context(self, runtime_config: RuntimeConfig) -> ExecutionContext:
        return ExecutionContext(self)


class FakeTensorRT:
    """The package as a module: attributes the engine reads. families, columns: of the plans; aliased: whether their
    cache outputs are their inputs' memory."""

    ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="USER_MANAGED")
    TensorIOMode = SimpleNamespace(INPUT="INPUT", OUTPUT="OUTPUT")
    CudaGraphStrategy = SimpleNamespace(DISABLED="DISABLED")
    DynamicShapesKernelSpecializationStrategy = SimpleNamespace(EAGER="EAGER")

    def __init__(self, machine: Machine, families: tuple[WidthFamily, ...], columns: int) -> None:
        self.machine = machine
        self.families = families
        self.columns = columns
        self.aliased = True

    def Runtime(self, logger: Any) -> SimpleNamespace:
        return SimpleNamespace(
            deserialize_cuda_engine=self.deserialize,
            engine_header_size=len(HEADER),
            get_engine_validity=lambda header: (SimpleNamespace(name="INVALID"), 0x10),
        )

    def deserialize(self, plan: mmap.mmap) -> CudaEngine | None:
        content = bytes(plan)
        if not content.startswith(HEADER):
            return None
        path = Path(content[len(HEADER) :].decode())
        return CudaEngine(self, OnnxProgram(path, self.machine, self.columns))
