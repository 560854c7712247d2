"""What the system says of itself: how many threads a process should start, and which GPUs there are. Files, and a
compiled library, stand for the system's and the driver's."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from shutil import which

import pytest

from draftwood.models.errors import EngineError
from draftwood.runtime.engines.gpus import Driver, Gpu, find_driver, free_bytes
from draftwood.runtime.engines.limits import cores, quotas

V2, V1 = "sys/fs/cgroup/", "sys/fs/cgroup/cpu/"


def files_of(root: Path, content: dict[str, str]) -> Path:
    for name, text in content.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def older(folder: str, quota: int, period: int = 100000) -> dict[str, str]:
    return {f"{folder}cpu.cfs_quota_us": f"{quota}\n", f"{folder}cpu.cfs_period_us": f"{period}\n"}


def siblings(pairs: list[str]) -> dict[str, str]:
    names = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return {names.format(index): f"{pair}\n" for index, pair in enumerate(pairs)}


PAIRS = siblings([f"{index % 8},{index % 8 + 8}" for index in range(16)])


@pytest.fixture(autouse=True)
def sixteen_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, 16),
        ({"proc/self/cgroup": "0::/\n", V2 + "cpu.max": "max 100000\n"}, 16),
        ({"proc/self/cgroup": "0::/\n", V2 + "cpu.max": "400000 100000\n"}, 4),
        ({"proc/self/cgroup": "0::/a/b\n", V2 + "a/cpu.max": "250000 100000", V2 + "a/b/cpu.max": "max 100000"}, 2),
        ({"proc/self/cgroup": "0::/a\n", V2 + "a/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/a\n", V2 + "a/cpu.max": "9000000 100000\n"}, 16),
        ({"proc/self/cgroup": "4:cpu,cpuacct:/a\n", **older(V1 + "a/", 300000), **older(V1, -1)}, 3),
        ({"proc/self/cgroup": "4:cpu:/not/seen/from/inside\n", **older(V1, 100000, 50000)}, 2),
        ({"proc/self/cgroup": "5:memory:/a\n", **older(V1, 100000)}, 16),
        *(({"proc/self/cgroup": "0::/\n", V2 + "cpu.max": text}, 16) for text in ("no number", "100000 0\n", "")),
        (PAIRS, 8),
        (siblings(["0-1", "0-1"]), 15),
        ({"proc/self/cgroup": "0::/\n", V2 + "cpu.max": "1200000 100000"} | PAIRS, 8),
    ],
)
def test_quota_and_physical_cores_count(tmp_path: Path, content: dict[str, str], expected: int) -> None:
    assert cores(files_of(tmp_path, content)) == expected


def test_affinity_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 9, 3})
    files = files_of(tmp_path, PAIRS)
    assert cores(files) == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores(files) == 1


def test_each_group_with_a_limit_is_read(tmp_path: Path) -> None:
    content = {"proc/self/cgroup": "0::/a\n", V2 + "a/cpu.max": "150000 100000", V2 + "cpu.max": "max 100000"}
    assert list(quotas(files_of(tmp_path, content))) == [1.5]


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
