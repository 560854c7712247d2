"""Puts the machine in the place of libcuda.so.1, under the real cuda-bindings of this process."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
from collections.abc import Callable
from ctypes import POINTER, c_char, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import pytest

from .kernels import Kernel, Launched, parameter_values, ptx_kernel
from .machine import CONTEXT, NAME, Function, Machine, new_function
from .memory import DEVICE, PINNED, Span
from .status import INVALID_IMAGE, INVALID_VALUE, NO_DEVICE, NOT_FOUND, TEXTS, Refused

HANDLE, HANDLES, NUMBER, NUMBERS, SIZE = c_uint64, POINTER(c_uint64), c_int, POINTER(c_int), c_size_t
SIZES = POINTER(c_size_t)
NON_BLOCKING = 1
MAX_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
ANYWHERE = {"cuInit", "cuGetErrorString", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute"}  # without a context
ANYWHERE |= {"cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuCtxGetCurrent"}
IN_CAPTURE = {"cuCtxGetDevice", "cuMemsetD8Async", "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuLaunchKernel"}
IN_CAPTURE |= {"cuStreamEndCapture"}  # every other function may wait for the device

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorString": (NUMBER, POINTER(c_char_p)),
    "cuDeviceGet": (NUMBERS, NUMBER),
    "cuDeviceGetName": (POINTER(c_char), NUMBER, NUMBER),
    "cuDeviceGetAttribute": (NUMBERS, NUMBER, NUMBER),
    "cuDevicePrimaryCtxRetain": (HANDLES, NUMBER),
    "cuCtxSetCurrent": (HANDLE,),
    "cuCtxGetCurrent": (HANDLES,),
    "cuCtxGetDevice": (NUMBERS,),
    "cuMemAlloc": (HANDLES, SIZE),
    "cuMemFree": (HANDLE,),
    "cuMemHostAlloc": (HANDLES, SIZE, c_uint),
    "cuMemFreeHost": (HANDLE,),
    "cuMemGetInfo": (SIZES, SIZES),
    "cuMemsetD8Async": (HANDLE, c_ubyte, SIZE, HANDLE),
    "cuMemcpyHtoDAsync": (HANDLE, HANDLE, SIZE, HANDLE),
    "cuMemcpyDtoHAsync": (HANDLE, HANDLE, SIZE, HANDLE),
    "cuStreamCreate": (HANDLES, c_uint),
    "cuStreamSynchronize": (HANDLE,),
    "cuStreamBeginCapture": (HANDLE, NUMBER),
    "cuStreamEndCapture": (HANDLE, HANDLES),
    "cuGraphInstantiateWithFlags": (HANDLES, HANDLE, c_uint64),
    "cuGraphDestroy": (HANDLE,),
    "cuGraphExecDestroy": (HANDLE,),
    "cuGraphLaunch": (HANDLE, HANDLE),
    "cuModuleLoadData": (HANDLES, HANDLE),
    "cuModuleGetFunction": (HANDLES, HANDLE, c_char_p),
    "cuFuncSetAttribute": (HANDLE, NUMBER, NUMBER),
    "cuLaunchKernel": (HANDLE, *(c_uint,) * 7, HANDLE, HANDLE, HANDLE),
}


class Driver:
    """The functions of SIGNATURES over a machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def cuInit(self, flags: int) -> None:
        if not self._machine.is_present:
            raise Refused(NO_DEVICE)

    def cuGetErrorString(self, status: int, text: Any) -> None:
        text[0] = TEXTS.get(status, b"error %d" % status)

    def cuDeviceGet(self, device: Any, index: int) -> None:
        device[0] = index

    def cuDeviceGetName(self, name: Any, length: int, device: int) -> None:
        ctypes.memmove(name, NAME + b"\0", min(length, len(NAME) + 1))

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> None:
        if attribute not in self._machine.attributes:
            raise Refused(INVALID_VALUE, f"the device has no attribute {attribute}")
        value[0] = self._machine.attributes[attribute]

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> None:
        context[0] = CONTEXT

    def cuCtxSetCurrent(self, context: int) -> None:
        self._machine.context = context

    def cuCtxGetCurrent(self, context: Any) -> None:
        context[0] = self._machine.context

    def cuCtxGetDevice(self, device: Any) -> None:
        device[0] = 0

    def cuMemAlloc(self, address: Any, nbytes: int) -> None:
        address[0] = self._machine.memory.take(DEVICE, nbytes)

    def cuMemFree(self, address: int) -> None:
        self._machine.free(DEVICE, address)

    def cuMemHostAlloc(self, address: Any, nbytes: int, flags: int) -> None:
        address[0] = self._machine.memory.take(PINNED, nbytes)

    def cuMemFreeHost(self, address: int) -> None:
        self._machine.free(PINNED, address)

    def cuMemGetInfo(self, free: Any, total: Any) -> None:
        memory = self._machine.memory
        free[0], total[0] = memory.total - memory.used(DEVICE), memory.total

    def cuMemsetD8Async(self, address: int, value: int, nbytes: int, stream: int) -> None:
        self._machine.fill(Span(address, address + nbytes), value, stream)

    def cuMemcpyHtoDAsync(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._machine.upload(Span(target, target + nbytes), Span(source, source + nbytes), stream)

    def cuMemcpyDtoHAsync(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._machine.download(Span(target, target + nbytes), Span(source, source + nbytes), stream)

    def cuStreamCreate(self, stream: Any, flags: int) -> None:
        if flags != NON_BLOCKING:
            raise Refused(INVALID_VALUE, "a stream that waits for the default stream")
        stream[0] = self._machine.streams.create()

    def cuStreamSynchronize(self, stream: int) -> None:
        self._machine.synchronize(stream)

    def cuStreamBeginCapture(self, stream: int, mode: int) -> None:
        self._machine.streams.begin(stream, mode)

    def cuStreamEndCapture(self, stream: int, graph: Any) -> None:
        graph[0] = 0
        graph[0] = self._machine.end_capture(stream)

    def cuGraphInstantiateWithFlags(self, executable: Any, graph: int, flags: int) -> None:
        executable[0] = self._machine.new_graph(self._machine.graph(graph))

    def cuGraphDestroy(self, graph: int) -> None:
        self._machine.graph(graph)
        del self._machine.graphs[graph]

    def cuGraphExecDestroy(self, graph: int) -> None:
        self.cuGraphDestroy(graph)

    def cuGraphLaunch(self, graph: int, stream: int) -> None:
        self._machine.submit(self._machine.graph(graph), stream, "graph")

    def cuModuleLoadData(self, module: Any, image: int) -> None:
        content = ctypes.string_at(image)  # up to a zero byte, which ends PTX
        kernels = self._machine.images.get(content)
        if kernels is None:
            if not self._machine.takes_ptx or b".version" not in content:
                raise Refused(INVALID_IMAGE)
            kernels = (ptx_kernel(content.decode()),)
        module[0] = self._machine.handle(kernels)

    def cuModuleGetFunction(self, function: Any, module: int, name: bytes) -> None:
        kernels: tuple[Kernel, ...] = self._machine.get(module, tuple)
        found = [kernel for kernel in kernels if kernel.name == name.decode()]
        if not found:
            raise Refused(NOT_FOUND, f"a module without {name.decode()}")
        function[0] = self._machine.handle(new_function(found[0]))

    def cuFuncSetAttribute(self, function: int, attribute: int, value: int) -> None:
        if attribute == MAX_SHARED:
            self._machine.get(function, Function).limits[0] = value

    def cuLaunchKernel(self, function: int, *arguments: int) -> None:
        gx, gy, gz, bx, by, bz, shared, stream, pointers, extra = arguments
        found: Function = self._machine.get(function, Function)
        if extra or 0 in arguments[:6] or bx * by * bz > 1024:
            raise Refused(INVALID_VALUE, f"a launch of {found.kernel.name} with {arguments}")
        values = parameter_values(pointers, found.kernel.sizes)
        launched = Launched(found.kernel.name, (gx, gy, gz), (bx, by, bz), shared, values)
        self._machine.launch(found, launched, stream)


@functools.cache
def stand_in() -> Machine:
    """The machine of this process. cuda-bindings finds functions once, so that there is one machine."""
    internal = pytest.importorskip("cuda.bindings._internal.driver", reason="needs cuda-bindings")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler for the library in libcuda's place")
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("this machine has NVIDIA's driver, which a process cannot exchange")
    path = Path(mkdtemp(prefix="libcuda-")) / "libcuda.so.1"
    source = Path(__file__).with_name("libcuda.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", str(source), "-o", str(path)], check=True)
    library = ctypes.CDLL(str(path))
    path.unlink()
    path.parent.rmdir()
    machine = Machine()
    callbacks = [provided(library, machine, name) for name in SIGNATURES]
    internal.load_nvidia_dynamic_lib = lambda name: SimpleNamespace(_handle_uint=library._handle, callbacks=callbacks)
    machine.handles[0] = library, callbacks  # as long as the process lives
    return machine


def provided(library: ctypes.CDLL, machine: Machine, name: str) -> Any:
    """Make a function of the driver one of the library's; what must be kept alive for it."""
    function: Callable[..., None] = getattr(Driver(machine), name)

    def call(*arguments: Any) -> None:
        if name not in ANYWHERE:
            machine.enter(name, forbidden_in_capture=name not in IN_CAPTURE)
        function(*arguments)

    callback = ctypes.CFUNCTYPE(c_int, *SIGNATURES[name])(functools.partial(machine.answer, call))
    assert library.provide(name.encode(), ctypes.cast(callback, ctypes.c_void_p))
    return callback
