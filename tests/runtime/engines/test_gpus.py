"""What the driver says about GPUs: a compiled library stands for the driver's."""

from __future__ import annotations

import subprocess
from pathlib import Path
from shutil import which

import pytest

from draftwood.models.errors import EngineError
from draftwood.runtime.engines.gpus import Driver, Gpu, find_driver, free_bytes

SOURCE = """
#include <stddef.h>
#include <stdio.h>
static int depth;
int cuInit(unsigned flags) { return INIT; }
int cuDriverGetVersion(int *version) { *version = 13020; return 0; }
int cuDeviceGetCount(int *count) { *count = COUNT; return 0; }
int cuDeviceGet(int *device, int number) { *device = number + 7; return number < COUNT ? 0 : 101; }
int cuDeviceGetName(char *name, int length, int device) { snprintf(name, length, "GPU %d", device - 7); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)80 << 30; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 9 : attribute == 76 ? device - 7 : -1;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &depth; return device != 7; }
int cuCtxPushCurrent_v2(void *context) { depth += 1; return context != &depth; }
#ifndef OLD
int cuMemGetInfo_v2(size_t *free, size_t *total) {
    *free = (size_t)70 << 30, *total = (size_t)80 << 30;
    return depth != 1;
}
#endif
int cuCtxPopCurrent_v2(void **context) { *context = &depth; depth -= 1; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return depth; }
"""


def library(folder: Path, *options: str) -> str:
    file = folder / "libcuda.so"
    (folder / "libcuda.c").write_text(SOURCE)
    compiler = which("cc") or which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", file, folder / "libcuda.c", *options], check=True)
    return str(file)


def test_gpus_are_found(tmp_path: Path) -> None:
    driver = library(tmp_path, "-DINIT=0", "-DCOUNT=2")
    found = Driver((13, 2), (Gpu("GPU 0", "9.0", 80 << 30), Gpu("GPU 1", "9.1", 80 << 30)))
    assert find_driver(driver) == found
    assert [free_bytes(driver) for _ in range(2)] == [70 << 30] * 2  # the context is left as it was


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        (("-DINIT=0", "-DCOUNT=0"), "finds no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES"),
        (("-DINIT=999", "-DCOUNT=1"), r"reports no usable GPU \(cuInit: error 999\): check nvidia-smi"),
    ],
)
def test_a_driver_without_a_gpu_is_named(options: tuple[str, ...], fix: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=fix):
        find_driver(library(tmp_path, *options))


def test_a_missing_and_an_old_driver_are_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no NVIDIA driver \(libcuda.so.1\): install one"):
        find_driver(str(tmp_path / "libcuda.so.1"))
    with pytest.raises(EngineError, match="too old, it has no cuMemGetInfo_v2: install a newer one"):
        free_bytes(library(tmp_path, "-DINIT=0", "-DCOUNT=1", "-DOLD"))
