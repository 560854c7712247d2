"""A GPU through NVIDIA's driver API (the package cuda-bindings): memory, streams, graphs, a kernel that moves rows."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....models.errors import EngineError
from ....plugins.device_round.images import CAPABILITY, KERNELS, Image, image
from .device import RowMove, Stream

MOVE_LIMIT = 256  # rows of one launch: row numbers are kernel arguments, which CUDA limits to 4 KB
THREADS = 256  # of a block
VECTORS = {16: "uint4", 8: "uint2", 4: "unsigned int", 2: "unsigned short"}  # by bytes that a thread moves at a time

# Each thread moves a few bytes of every row of one plane (a layer's keys or values of one head), row after row. The
# bytes that a move overwrites are read by the same thread only, so threads need no synchronisation.
MOVE_ROWS = r"""
struct Rows { int source[MOVE_LIMIT]; int target[MOVE_LIMIT]; };

extern "C" __global__ void move_rows(char* cache, long long tensor_bytes, int tensors, int heads, int capacity,
                                     int vectors, int count, Rows rows) {
    int index = blockIdx.x * blockDim.x + threadIdx.x;
    int plane = index / vectors;
    if (plane >= tensors * heads) return;
    VECTOR* tensor = (VECTOR*)(cache + plane / heads * tensor_bytes);
    VECTOR* column = tensor + (long long)(plane % heads) * capacity * vectors + index % vectors;
    for (int row = 0; row < count; ++row)
        column[(long long)rows.target[row] * vectors] = column[(long long)rows.source[row] * vectors];
}
"""


class CudaMemory:
    """Device memory. It is released when the object is garbage-collected."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        self.address = device.take(nbytes)
        # Not at the interpreter's exit: the driver may be unloaded by then, and it frees all memory itself.
        weakref.finalize(self, device.release, "cuMemFree", self.address).atexit = False


class CudaGraph:
    """A captured graph that can be launched. It is released when the object is garbage-collected."""

    def __init__(self, device: CudaDevice, handle: Any) -> None:
        self.handle = handle
        weakref.finalize(self, device.release, "cuGraphExecDestroy", handle).atexit = False  # see CudaMemory


class CudaDevice:
    """The Device with CUDA's number `index`. It uses the primary context, like TensorRT and torch."""

    def __init__(self, index: int = 0) -> None:
        """Raises EngineError when cuda-bindings, the driver or the GPU is missing."""
        self._driver = load_driver()
        self._local = threading.local()
        self.number = index
        handle = self._call("cuDeviceGet", index)
        self._context = self._call("cuDevicePrimaryCtxRetain", handle)
        self._enter()
        self.name = self._call("cuDeviceGetName", 128, handle).split(b"\0")[0].decode()
        attribute = self._driver.CUdevice_attribute
        self.compute_capability = "{}.{}".format(
            *(
                self._call("cuDeviceGetAttribute", each, handle)
                for each in (
                    attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                    attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                )
            )
        )
        self._setup = self.new_stream()
        self._movers: dict[int, Any] = {}
        self._round_kernels: dict[str, tuple[Image, Any]] = {}
        self._busy: set[Stream] = set()  # streams with work that the host has not awaited
        self._released: deque[tuple[str, Any]] = deque()  # what is given back when no stream is busy

    @property
    def runs_rounds(self) -> bool:
        return float(self.compute_capability) >= CAPABILITY / 10

    def allocate(self, nbytes: int) -> CudaMemory:
        return CudaMemory(self, nbytes)

    def take(self, nbytes: int) -> int:
        """Allocate zeroed device memory; returns its address. The caller frees it."""
        self._enter()
        try:
            address = int(self._call("cuMemAlloc", max(nbytes, 1)))
        except EngineError as error:
            free, total = self._call("cuMemGetInfo")
            raise EngineError(
                f"{self.name} has {free / 1e9:.2f} of {total / 1e9:.2f} GB free and {nbytes / 1e9:.2f} GB are needed: "
                "rebuild with a smaller --max-length or precision, or free the GPU"
            ) from error
        # A separate stream: CUDA forbids waiting for the whole context while another thread captures a graph.
        self._call("cuMemsetD8Async", address, 0, max(nbytes, 1), self._setup)
        self._call("cuStreamSynchronize", self._setup)
        return address

    def release(self, function: str, handle: Any) -> None:
        """Give something back to the driver after all queued work, for which its functions do not promise to wait."""
        self._released.append((function, handle))
        self._give_back()

    def allocate_pinned(self, nbytes: int) -> NDArray[np.uint8]:
        self._enter()
        address = int(self._call("cuMemHostAlloc", max(nbytes, 1), 0))
        block = (ctypes.c_uint8 * nbytes).from_address(address)
        # Every view of the array refers to `block`, so the memory is freed after the last view.
        weakref.finalize(block, self.release, "cuMemFreeHost", address).atexit = False
        array: NDArray[np.uint8] = np.ctypeslib.as_array(block)
        array[:] = 0
        return array

    def new_stream(self) -> Stream:
        self._enter()
        flags = int(self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        return int(self._call("cuStreamCreate", flags))

    def upload(self, address: int, array: NDArray[np.uint8], stream: Stream) -> None:
        self._queue(stream)
        self._call("cuMemcpyHtoDAsync", address, array.ctypes.data, array.nbytes, stream)

    def download(self, array: NDArray[np.uint8], address: int, stream: Stream) -> None:
        self._queue(stream)
        self._call("cuMemcpyDtoHAsync", array.ctypes.data, address, array.nbytes, stream)

    def move_rows(self, move: RowMove, stream: Stream) -> None:
        """See Device.move_rows; one launch for every 256 rows."""
        self._queue(stream)
        width = vector_bytes(move.cache.row_bytes)
        if width not in self._movers:
            self._movers[width] = self._load_mover(width)
        blocks = -(-move.cache.tensors * move.cache.heads * (move.cache.row_bytes // width) // THREADS)
        grid = (blocks, 1, 1, THREADS, 1, 1, 0)
        for arguments in mover_arguments(move, width):
            pointers = np.array([argument.ctypes.data for argument in arguments], np.uint64)
            self._call("cuLaunchKernel", self._movers[width], *grid, stream, pointers.ctypes.data, 0)

    def launch(self, kernel: str, grid: tuple[int, int], values: Sequence[int], stream: Stream) -> None:
        self._queue(stream)
        if kernel not in self._round_kernels:
            self._load_round_kernel(kernel)
        loaded, function = self._round_kernels[kernel]
        arguments = loaded.arguments(values)
        pointers = np.array([argument.ctypes.data for argument in arguments], np.uint64)
        sizes = (*grid, 1, loaded.threads, 1, 1, loaded.shared_bytes)
        self._call("cuLaunchKernel", function, *sizes, stream, pointers.ctypes.data, 0)

    def load_rounds(self) -> int:
        """See Device.load_rounds. The driver compiles the PTX, and keeps the result on disk."""
        self._enter()
        for kernel in KERNELS:
            if kernel not in self._round_kernels:
                self._load_round_kernel(kernel)
        return len(self._round_kernels)

    def capture(self, work: Callable[[], None], stream: Stream) -> CudaGraph | None:
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        with self._nothing_given_back(stream), collection_paused():
            self._call("cuStreamBeginCapture", stream, mode)
            try:
                work()
            except EngineError:
                self._driver.cuStreamEndCapture(stream)  # leaves capture mode; the result is no graph
                return None
            try:
                captured = self._call("cuStreamEndCapture", stream)
            except EngineError:
                return None
        try:
            return CudaGraph(self, self._call("cuGraphInstantiate", captured, 0))
        except EngineError:
            return None
        finally:
            self._call("cuGraphDestroy", captured)  # the executable graph is a copy

    def replay(self, graph: CudaGraph, stream: Stream) -> None:
        self._queue(stream)
        self._call("cuGraphLaunch", graph.handle, stream)

    def synchronize(self, stream: Stream) -> None:
        self._enter()
        self._call("cuStreamSynchronize", stream)
        self._busy.discard(stream)
        self._give_back()

    def _queue(self, stream: Stream) -> None:
        """Precedes work for a stream."""
        self._enter()
        self._busy.add(stream)

    @contextmanager
    def _nothing_given_back(self, stream: Stream) -> Iterator[None]:
        """Nothing is given back to the driver while a graph is captured, which CUDA forbids."""
        was_busy = stream in self._busy
        self._queue(stream)
        try:
            yield
        finally:
            if not was_busy:
                self._busy.discard(stream)
                self._give_back()

    def _give_back(self) -> None:
        """Give back what was released, unless work is queued that may use it."""
        while not self._busy:
            try:
                function, handle = self._released.popleft()
            except IndexError:
                return
            self._enter()
            self._call(function, handle)

    def _load_round_kernel(self, kernel: str) -> None:
        try:
            loaded = image(kernel)
        except RuntimeError as error:
            raise EngineError(str(error)) from error
        module = self._call("cuModuleLoadData", loaded.text.encode() + b"\0")
        self._round_kernels[kernel] = loaded, self._call("cuModuleGetFunction", module, kernel.encode())

    def _load_mover(self, width: int) -> Any:
        """Compile the kernel `move_rows` for vectors of `width` bytes and load it on this GPU."""
        module = self._call("cuModuleLoadData", compile_mover(width, self.compute_capability))
        return self._call("cuModuleGetFunction", module, b"move_rows")

    def _enter(self) -> None:
        """Make the context current in the calling thread, on the thread's first call."""
        if not getattr(self._local, "entered", False):
            self._call("cuCtxSetCurrent", self._context)
            self._local.entered = True

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a driver function; returns its result. Raises EngineError with the driver's message."""
        status, *results = getattr(self._driver, name)(*arguments)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            message = self._driver.cuGetErrorString(status)[1]
            raise EngineError(f"{name} failed: {message.decode() if message else status}")
        if len(results) > 1:
            return tuple(results)
        return results[0] if results else None


@contextmanager
def collection_paused() -> Iterator[None]:
    """No garbage collection: it may free device memory, which CUDA forbids in a thread that captures a graph."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def vector_bytes(row_bytes: int) -> int:
    """The size in bytes of the widest vector that divides a row."""
    return next(width for width in VECTORS if row_bytes % width == 0)


def mover_arguments(move: RowMove, width: int) -> Iterator[list[NDArray[Any]]]:
    """The kernel's arguments for vectors of `width` bytes, for each launch of a move."""
    cache = move.cache
    for begin in range(0, len(move.sources), MOVE_LIMIT):
        chunk = slice(begin, begin + MOVE_LIMIT)
        count = len(move.sources[chunk])
        sizes = (cache.tensors, cache.heads, cache.capacity, cache.row_bytes // width, count)
        rows = np.zeros((2, MOVE_LIMIT), np.int32)
        rows[:, :count] = move.sources[chunk], move.targets[chunk]
        numbers = [np.array([size], np.int32) for size in sizes]
        yield [np.array([move.address], np.uint64), np.array([cache.tensor_bytes], np.int64), *numbers, rows]


def mover_options(width: int) -> list[str]:
    """The compiler options that define the macros of MOVE_ROWS."""
    return [f"-DVECTOR={VECTORS[width]}", f"-DMOVE_LIMIT={MOVE_LIMIT}"]


def compile_mover(width: int, compute_capability: str) -> bytes:
    """Compile MOVE_ROWS to a cubin. Raises EngineError when NVRTC is missing or reports an error."""
    from cuda.bindings import nvrtc

    def call(function: Any, *arguments: Any) -> Any:
        status, *results = function(*arguments)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise EngineError(f"NVRTC cannot compile the cache kernel: {nvrtc.nvrtcGetErrorString(status)[1].decode()}")
        return results[0] if results else None

    options = [f"--gpu-architecture=sm_{compute_capability.replace('.', '')}", *mover_options(width)]
    encoded = [option.encode() for option in options]
    try:
        program = call(nvrtc.nvrtcCreateProgram, MOVE_ROWS.encode(), b"move_rows.cu", 0, [], [])
    except RuntimeError as error:  # cuda.pathfinder's DynamicLibNotFoundError, which it does not export everywhere
        raise EngineError(f"the library NVRTC is missing: pip install 'cuda-bindings[all]' ({error})") from error
    call(nvrtc.nvrtcCompileProgram, program, len(encoded), encoded)
    cubin: bytes = b" " * call(nvrtc.nvrtcGetCUBINSize, program)
    call(nvrtc.nvrtcGetCUBIN, program, cubin)
    return cubin


def load_driver() -> Any:
    """Import and initialise cuda.bindings.driver. Raises EngineError that names the missing part."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise EngineError(f"the package cuda-bindings is missing ({error}): pip install cuda-bindings") from error
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as error:  # DynamicLibNotFoundError
        raise EngineError(
            "this machine has no NVIDIA driver (libcuda.so.1): install one, or use a CPU bundle"
        ) from error
    if status != driver.CUresult.CUDA_SUCCESS:
        raise EngineError(f"the NVIDIA driver finds no usable GPU ({status.name}): check nvidia-smi")
    return driver
