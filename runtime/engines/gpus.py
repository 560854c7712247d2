"""What NVIDIA's driver says about this machine's GPUs, asked directly: without a package, and in milliseconds."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from ...models.errors import EngineError

LIBRARY = "libcuda.so.1"
NO_DRIVER = "this machine has no NVIDIA driver (libcuda.so.1): install one, or use a backend for CPUs"
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
NAME_BYTES = 128


class Gpu(NamedTuple):
    """A GPU. compute_capability: for example "9.0". nbytes: all of its memory."""

    name: str
    compute_capability: str
    nbytes: int


class Driver(NamedTuple):
    """The driver. cuda: the newest CUDA that it runs, for example (13, 0)."""

    cuda: tuple[int, int]
    gpus: tuple[Gpu, ...]


def find_driver(library: str = LIBRARY) -> Driver:
    """The driver and its GPUs, of which there is at least one. Raises EngineError that names the fix."""
    driver = load(library)
    version = value_of(driver, "cuDriverGetVersion")
    gpus = tuple(gpu(driver, number) for number in range(value_of(driver, "cuDeviceGetCount")))
    if not gpus:
        raise EngineError("the NVIDIA driver finds no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES")
    return Driver((version // 1000, version % 1000 // 10), gpus)


def free_bytes(library: str = LIBRARY) -> int:
    """The free memory of the first GPU. Raises EngineError. This makes CUDA's context in the process, or uses it."""
    driver = load(library)
    device = value_of(driver, "cuDeviceGet", 0)
    context, before, free, total = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    call(driver, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        call(driver, "cuCtxPushCurrent_v2", context)
        try:
            call(driver, "cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        finally:
            call(driver, "cuCtxPopCurrent_v2", ctypes.byref(before))
    finally:
        call(driver, "cuDevicePrimaryCtxRelease_v2", device)
    return free.value


def gpu(driver: Any, number: int) -> Gpu:
    device = value_of(driver, "cuDeviceGet", number)
    name, nbytes = ctypes.create_string_buffer(NAME_BYTES), ctypes.c_size_t()
    call(driver, "cuDeviceGetName", name, NAME_BYTES, device)
    call(driver, "cuDeviceTotalMem_v2", ctypes.byref(nbytes), device)
    major, minor = (value_of(driver, "cuDeviceGetAttribute", attribute, device) for attribute in (MAJOR, MINOR))
    return Gpu(name.value.decode(errors="replace"), f"{major}.{minor}", nbytes.value)


def load(library: str) -> Any:
    try:
        driver = ctypes.CDLL(library)
    except OSError as error:
        raise EngineError(NO_DRIVER) from error
    call(driver, "cuInit", 0)
    return driver


def value_of(driver: Any, function: str, *arguments: int) -> int:
    """The number that a function writes where its first argument points."""
    found = ctypes.c_int()
    call(driver, function, ctypes.byref(found), *arguments)
    return found.value


def call(driver: Any, function: str, *arguments: Any) -> None:
    try:
        status = getattr(driver, function)(*arguments)
    except AttributeError as error:
        raise EngineError(f"the NVIDIA driver is too old, it has no {function}: install a newer one") from error
    if status:
        raise EngineError(f"the NVIDIA driver reports no usable GPU ({function}: error {status}): check nvidia-smi")
