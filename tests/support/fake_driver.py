"""A stand-in for cuda.bindings.driver: "device" memory is host memory, and kernels are host functions.

Like a driver it checks that addresses are allocated and not freed, that the thread has a context, and sizes.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

Answer = tuple[Any, ...]
Kernel = Callable[[int, int, int], None]  # blocks, threads, address of the argument pointers
OK, OUT_OF_MEMORY, NOT_PERMITTED = 0, 2, 900


class FakeDriver:
    """total: bytes of memory. kernel: what every module holds. captures: whether work can be captured."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=OK)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=8, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=9
    )
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)

    def __init__(self, total: int = 1 << 30, kernel: Kernel | None = None, captures: bool = True) -> None:
        self.total, self.kernel, self.captures = total, kernel, captures
        self.device: dict[int, Any] = {}
        self.host: dict[int, Any] = {}
        self.calls: list[str] = []
        self._context = threading.local()

    @property
    def used(self) -> int:
        return sum(len(block) for block in self.device.values())

    def cuGetErrorString(self, status: int) -> Answer:
        return OK, {OUT_OF_MEMORY: b"out of memory", NOT_PERMITTED: b"operation not permitted"}[status]

    def cuDeviceGet(self, index: int) -> Answer:
        return OK, index

    def cuDevicePrimaryCtxRetain(self, device: int) -> Answer:
        return OK, 77

    def cuCtxSetCurrent(self, context: int) -> Answer:
        self._context.value = context
        return (OK,)

    def cuDeviceGetName(self, length: int, device: int) -> Answer:
        return OK, b"Fake GPU".ljust(length, b"\0")

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> Answer:
        return OK, attribute

    def cuMemGetInfo(self) -> Answer:
        return OK, self.total - self.used, self.total

    def cuMemAlloc(self, nbytes: int) -> Answer:
        self.entered()
        if self.used + nbytes > self.total:
            return OUT_OF_MEMORY, 0
        return OK, self.new(self.device, nbytes)

    def cuMemsetD8Async(self, address: int, value: int, nbytes: int, stream: int) -> Answer:
        assert len(self.device[address]) == nbytes
        ctypes.memset(address, value, nbytes)
        return (OK,)

    def cuMemFree(self, address: int) -> Answer:
        self.entered()
        self.calls.append("free")
        del self.device[address]
        return (OK,)

    def cuMemHostAlloc(self, nbytes: int, flags: int) -> Answer:
        return OK, self.new(self.host, nbytes)

    def cuMemFreeHost(self, address: int) -> Answer:
        del self.host[address]
        return (OK,)

    def cuStreamCreate(self, flags: int) -> Answer:
        assert flags == 1
        return OK, 5

    def cuStreamSynchronize(self, stream: int) -> Answer:
        return (OK,)

    def cuMemcpyHtoDAsync(self, target: int, source: int, nbytes: int, stream: int) -> Answer:
        self.entered()
        self.calls.append("upload")
        ctypes.memmove(target, source, nbytes)
        return (OK,)

    def cuMemcpyDtoHAsync(self, target: int, source: int, nbytes: int, stream: int) -> Answer:
        ctypes.memmove(target, source, nbytes)
        return (OK,)

    def cuModuleLoadData(self, image: bytes) -> Answer:
        self.calls.append("load")
        return OK, image

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> Answer:
        assert name == b"move_rows"
        return OK, self.kernel

    def cuLaunchKernel(self, function: Kernel, *arguments: int) -> Answer:
        blocks, grid_y, grid_z, threads, block_y, block_z, shared, _, pointers, extra = arguments
        assert (grid_y, grid_z, block_y, block_z, shared, extra) == (1, 1, 1, 1, 0, 0)
        self.calls.append("launch")
        function(blocks, threads, pointers)
        return (OK,)

    def cuStreamBeginCapture(self, stream: int, mode: int) -> Answer:
        self.calls.append("begin")
        return (OK,)

    def cuStreamEndCapture(self, stream: int) -> Answer:
        self.calls.append("end")
        return (OK, "graph") if self.captures else (NOT_PERMITTED, None)

    def cuGraphInstantiate(self, graph: str, flags: int) -> Answer:
        return OK, f"executable {graph}"

    def cuGraphDestroy(self, graph: str) -> Answer:
        self.calls.append(f"destroy {graph}")
        return (OK,)

    def cuGraphExecDestroy(self, graph: str) -> Answer:
        self.entered()
        self.calls.append(f"destroy {graph}")
        return (OK,)

    def cuGraphLaunch(self, graph: str, stream: int) -> Answer:
        self.calls.append(graph)
        return (OK,)

    def new(self, blocks: dict[int, Any], nbytes: int) -> int:
        block = (ctypes.c_uint8 * nbytes)(*(255 for _ in range(min(nbytes, 64))))  # nothing comes zeroed
        address = ctypes.addressof(block)
        blocks[address] = block
        return address

    def entered(self) -> None:
        assert getattr(self._context, "value", None) == 77, "this thread has no context"
