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
from .machine import CONTEXT, NAME, Machine, new_function
from .machine import Function as LoadedFunction
from .memory import DEVICE, INVALID_IMAGE, INVALID_VALUE, NO_DEVICE, NOT_FOUND, PINNED, TEXTS, Refused, Span

HANDLE, HANDLES, NUMBER, NUMBERS, SIZE = c_uint64, POINTER(c_uint64), c_int, POINTER(c_int), c_size_t
SIZES = POINTER(c_size_t)
NON_BLOCKING = 1
MAX_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
ANYWHERE = {"cuInit", "cuGetErrorString", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute"}  # without a context
ANYWHERE |= {"cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuCtxGetCurrent"}
IN_CAPTURE = {"cuCtxGetDevice", "cuMemsetD8Async", "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuLaunchKernel"}
IN_CAPTURE |= {"cuStreamEndCapture"}  # every other function may wait for the device

Function = tuple[tuple[Any, ...], Callable[..., object]]  # types of the parameters, and what is done


def put(pointer: Any, value: Any) -> None:
    """Answer by a pointer to a number."""
    pointer[0] = value


def span(address: int, nbytes: int) -> Span:
    return Span(address, address + nbytes)


def functions(machine: Machine) -> dict[str, Function]:
    """The driver's functions over a machine. One that is refused raises Refused."""
    memory, streams = machine.memory, machine.streams

    def initialize(flags: int) -> None:
        if not machine.is_present:
            raise Refused(NO_DEVICE)

    def get_attribute(value: Any, attribute: int, device: int) -> None:
        if attribute not in machine.attributes:
            raise Refused(INVALID_VALUE, f"the device has no attribute {attribute}")
        value[0] = machine.attributes[attribute]

    def get_free(free: Any, total: Any) -> None:
        free[0], total[0] = memory.total - memory.used(DEVICE), memory.total

    def create_stream(stream: Any, flags: int) -> None:
        if flags != NON_BLOCKING:
            raise Refused(INVALID_VALUE, "a stream that waits for the default stream")
        stream[0] = streams.create()

    def end_capture(stream: int, graph: Any) -> None:
        graph[0] = 0
        graph[0] = machine.end_capture(stream)

    def destroy(graph: int) -> None:
        machine.graph(graph)
        del machine.graphs[graph]

    def replay(graph: int, stream: int) -> None:
        machine.submit(machine.graph(graph), stream, "graph")

    def load(module: Any, image: int) -> None:
        content = ctypes.string_at(image)  # up to a zero byte, which ends PTX
        kernels = machine.images.get(content)
        if kernels is None:
            if not machine.takes_ptx or b".version" not in content:
                raise Refused(INVALID_IMAGE)
            kernels = (ptx_kernel(content.decode()),)
        module[0] = machine.handle(kernels)

    def get_function(function: Any, module: int, name: bytes) -> None:
        kernels: tuple[Kernel, ...] = machine.get(module, tuple)
        found = [kernel for kernel in kernels if kernel.name == name.decode()]
        if not found:
            raise Refused(NOT_FOUND, f"a module without {name.decode()}")
        function[0] = machine.handle(new_function(found[0]))

    def set_attribute(function: int, attribute: int, value: int) -> None:
        if attribute == MAX_SHARED:
            machine.get(function, LoadedFunction).limits[0] = value

    def launch(function: int, *arguments: int) -> None:
        gx, gy, gz, bx, by, bz, shared, stream, pointers, extra = arguments
        found: LoadedFunction = machine.get(function, LoadedFunction)
        if extra or 0 in arguments[:6] or bx * by * bz > 1024:
            raise Refused(INVALID_VALUE, f"a launch of {found.kernel.name} with {arguments}")
        values = parameter_values(pointers, found.kernel.sizes)
        launched = Launched(found.kernel.name, (gx, gy, gz), (bx, by, bz), shared, values)
        machine.launch(found, launched, stream)

    return {
        "cuInit": ((c_uint,), initialize),
        "cuGetErrorString": (
            (NUMBER, POINTER(c_char_p)),
            lambda status, text: put(text, TEXTS.get(status, b"error %d" % status)),
        ),
        "cuDeviceGet": ((NUMBERS, NUMBER), put),
        "cuDeviceGetName": (
            (POINTER(c_char), NUMBER, NUMBER),
            lambda name, length, device: ctypes.memmove(name, NAME + b"\0", min(length, len(NAME) + 1)),
        ),
        "cuDeviceGetAttribute": ((NUMBERS, NUMBER, NUMBER), get_attribute),
        "cuDevicePrimaryCtxRetain": ((HANDLES, NUMBER), lambda context, device: put(context, CONTEXT)),
        "cuCtxSetCurrent": ((HANDLE,), lambda context: setattr(machine, "context", context)),
        "cuCtxGetCurrent": ((HANDLES,), lambda context: put(context, machine.context)),
        "cuCtxGetDevice": ((NUMBERS,), lambda device: put(device, 0)),
        "cuMemAlloc": ((HANDLES, SIZE), lambda address, nbytes: put(address, memory.take(DEVICE, nbytes))),
        "cuMemFree": ((HANDLE,), lambda address: machine.free(DEVICE, address)),
        "cuMemHostAlloc": (
            (HANDLES, SIZE, c_uint),
            lambda address, nbytes, flags: put(address, memory.take(PINNED, nbytes)),
        ),
        "cuMemFreeHost": ((HANDLE,), lambda address: machine.free(PINNED, address)),
        "cuMemGetInfo": ((SIZES, SIZES), get_free),
        "cuMemsetD8Async": (
            (HANDLE, c_ubyte, SIZE, HANDLE),
            lambda address, value, nbytes, stream: machine.fill(span(address, nbytes), value, stream),
        ),
        "cuMemcpyHtoDAsync": (
            (HANDLE, HANDLE, SIZE, HANDLE),
            lambda target, source, nbytes, stream: machine.upload(span(target, nbytes), span(source, nbytes), stream),
        ),
        "cuMemcpyDtoHAsync": (
            (HANDLE, HANDLE, SIZE, HANDLE),
            lambda target, source, nbytes, stream: machine.download(span(target, nbytes), span(source, nbytes), stream),
        ),
        "cuStreamCreate": ((HANDLES, c_uint), create_stream),
        "cuStreamSynchronize": ((HANDLE,), machine.synchronize),
        "cuStreamBeginCapture": ((HANDLE, NUMBER), streams.begin),
        "cuStreamEndCapture": ((HANDLE, HANDLES), end_capture),
        "cuGraphInstantiateWithFlags": (
            (HANDLES, HANDLE, c_uint64),
            lambda executable, graph, flags: put(executable, machine.new_graph(machine.graph(graph))),
        ),
        "cuGraphDestroy": ((HANDLE,), destroy),
        "cuGraphExecDestroy": ((HANDLE,), destroy),
        "cuGraphLaunch": (
            (HANDLE, HANDLE),
            lambda graph, stream: machine.submit(machine.graph(graph), stream, "graph"),
        ),
        "cuModuleLoadData": ((HANDLES, HANDLE), load),
        "cuModuleGetFunction": ((HANDLES, HANDLE, c_char_p), get_function),
        "cuFuncSetAttribute": ((HANDLE, NUMBER, NUMBER), set_attribute),
        "cuLaunchKernel": ((HANDLE, *(c_uint,) * 7, HANDLE, HANDLE, HANDLE), launch),
    }


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
    callbacks = [provided(library, machine, name, *each) for name, each in functions(machine).items()]
    internal.load_nvidia_dynamic_lib = lambda name: SimpleNamespace(_handle_uint=library._handle, callbacks=callbacks)
    machine.handles[0] = library, callbacks  # as long as the process lives
    return machine


def provided(
    library: ctypes.CDLL, machine: Machine, name: str, types: tuple[Any, ...], function: Callable[..., object]
) -> Any:
    """Make a function of the driver one of the library's; what must be kept alive for it."""

    def call(*arguments: Any) -> None:
        if name not in ANYWHERE:
            machine.enter(name, forbidden_in_capture=name not in IN_CAPTURE)
        function(*arguments)

    callback = ctypes.CFUNCTYPE(c_int, *types)(functools.partial(machine.answer, call))
    assert library.provide(name.encode(), ctypes.cast(callback, ctypes.c_void_p))
    return callback
