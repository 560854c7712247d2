"""The GPU seam without a GPU: memory that is given back, streams, graphs, and the kernel's source run on the host."""

from __future__ import annotations

import ctypes
import gc
import re
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from bundling import ROOT
from fake_driver import FakeDriver, Kernel
from host_device import moved

from draftwood.models.errors import EngineError
from draftwood.runtime.engines.static import cuda
from draftwood.runtime.engines.static.cuda import (
    MOVE_LIMIT,
    MOVE_ROWS,
    VECTORS,
    CudaDevice,
    compile_mover,
    mover_options,
)
from draftwood.runtime.engines.static.device import CacheGeometry, RowMove

HOST = """
struct uint4 { unsigned x, y, z, w; };
struct uint2 { unsigned x, y; };
struct { int x; } blockIdx, blockDim, threadIdx;
#define __global__
%s
extern "C" void launch(int blocks, int threads, void** a) {
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
            move_rows(*(char**)a[0], *(long long*)a[1], *(int*)a[2], *(int*)a[3], *(int*)a[4], *(int*)a[5],
                      *(int*)a[6], *(Rows*)a[7]);
}
"""


def opened(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> CudaDevice:
    monkeypatch.setattr(cuda, "load_driver", lambda: driver)
    return CudaDevice()


def host_kernel(folder: Path, width: int) -> Kernel:
    """MOVE_ROWS compiled for the host; its threads run one after the other."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++ to run the kernel's source on the host")
    source, library = folder / "move_rows.cpp", folder / f"move_rows_{width}.so"
    source.write_text(HOST % MOVE_ROWS)
    options = mover_options(width)
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", *options, source, "-o", library], check=True)
    launch = ctypes.CDLL(str(library)).launch
    launch.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    return lambda blocks, threads, pointers: void(launch(blocks, threads, pointers))


def void(result: object) -> None:
    """A C function's result nobody asked for."""


@pytest.mark.parametrize(("row_bytes", "width"), [(128, 16), (24, 8), (12, 4), (6, 2)])
def test_the_kernel_moves_rows_as_numpy_does(
    row_bytes: int, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every plane of every layer, padding between layers untouched, more rows than one launch takes, rows that were
    overwritten before they are read."""
    kernel = host_kernel(tmp_path, width)
    monkeypatch.setattr(cuda, "compile_mover", lambda asked, capability: f"{asked} {capability}".encode())
    driver = FakeDriver(kernel=kernel)
    device = opened(monkeypatch, driver)
    geometry = CacheGeometry(
        tensors=3, heads=2, capacity=400, row_bytes=row_bytes, tensor_bytes=2 * 400 * row_bytes + 64
    )
    rng = np.random.default_rng(0)
    for kept in (1, 5, 300):
        sources, targets = rng.choice(400, kept, replace=False), rng.choice(400, kept, replace=False)
        content = rng.integers(0, 255, geometry.nbytes, np.uint8)
        memory = device.allocate(geometry.nbytes)
        device.upload(memory.address, content, 0)
        driver.calls.clear()
        device.move_rows(RowMove(memory.address, geometry, sources, targets), 0)
        assert driver.calls.count("launch") == -(-kept // MOVE_LIMIT)
        moved(RowMove(content.ctypes.data, geometry, sources, targets))
        found = device.allocate_pinned(geometry.nbytes)
        device.download(found, memory.address, 0)
        np.testing.assert_array_equal(found, content)


def test_memory_is_zeroed_and_given_back_when_nobody_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    device = opened(monkeypatch, driver)
    memory, block = device.allocate(1000), device.allocate_pinned(100)
    found = device.allocate_pinned(1000)
    found[:] = 1
    device.download(found, memory.address, 0)
    assert not found.any() and not block.any()
    view = block[50:].view(np.int16)
    del block, memory, found
    gc.collect()
    assert (len(driver.device), len(driver.host)) == (0, 1), "a view keeps page-locked memory"
    view[:] = 3
    del view
    gc.collect()
    assert not driver.host


def test_a_full_gpu_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    device = opened(monkeypatch, FakeDriver(total=3_000_000_000))
    with pytest.raises(
        EngineError, match=r"Fake GPU has 3\.00 of 3\.00 GB free and 8\.00 GB are needed: .*--max-length"
    ):
        device.allocate(8_000_000_000)


def test_any_thread_may_use_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    device = opened(monkeypatch, driver)
    made: list[int] = []
    thread = threading.Thread(target=lambda: made.append(device.allocate(10).address))
    thread.start()
    thread.join()
    assert len(made) == 1 and device.compute_capability == "8.9" and device.name == "Fake GPU"


def test_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    device = opened(monkeypatch, driver)
    stream, memory, block = device.new_stream(), device.allocate(8), device.allocate_pinned(8)
    graph = device.capture(lambda: device.upload(memory.address, block, stream), stream)
    assert graph is not None
    device.replay(graph, stream)
    device.synchronize(stream)
    assert driver.calls == ["begin", "upload", "end", "destroy graph", "executable graph"]
    del graph
    gc.collect()
    assert driver.calls[-1] == "destroy executable graph"

    def refused() -> None:
        raise EngineError("TensorRT could not run a pass")

    assert device.capture(refused, stream) is None
    assert driver.calls[-2:] == ["begin", "end"], "the stream was left in capture mode"
    assert opened(monkeypatch, FakeDriver(captures=False)).capture(lambda: None, stream) is None


def test_every_driver_function_exists() -> None:
    """The stand-in and the real driver have what is called."""
    driver = pytest.importorskip("cuda.bindings.driver")
    source = (ROOT / "runtime" / "engines" / "static" / "cuda.py").read_text()
    called = set(re.findall(r'"(cu[A-Z]\w+)"', source)) | set(re.findall(r"driver\.(cu[A-Z]\w+)", source))
    assert len(called) > 20
    for name in called:
        assert hasattr(driver, name)
    for name in ("CUdevice_attribute", "CUstream_flags", "CUstreamCaptureMode"):
        assert vars(getattr(FakeDriver, name)).keys() <= set(dir(getattr(driver, name)))
    assert driver.CUresult.CUDA_SUCCESS == 0 and int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING) == 1


@pytest.mark.parametrize("width", VECTORS)
def test_the_kernel_compiles_for_gpus(width: int, tmp_path: Path) -> None:
    """By nvcc, which is what NVRTC is a library of; no GPU is needed."""
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc, of the CUDA toolkit")
    source = tmp_path / "move_rows.cu"
    source.write_text(MOVE_ROWS)
    command = ["nvcc", "-cubin", "-arch=sm_90", *mover_options(width), str(source), "-o", str(tmp_path / "move_rows")]
    subprocess.run(command, check=True, capture_output=True)
    assert (tmp_path / "move_rows").stat().st_size > 1000


def test_nvrtc_compiles_the_kernel_or_says_what_to_install() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    try:
        assert compile_mover(16, "9.0").startswith(b"\x7fELF")
    except EngineError as error:
        assert "pip install 'cuda-bindings[all]'" in str(error)


def test_no_memory_is_freed_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA forbids it. Garbage that holds device memory waits for a collection, which any new object may begin."""
    driver = FakeDriver()
    device = opened(monkeypatch, driver)
    garbage: list[object] = [device.allocate(8)]
    garbage.append(garbage)
    stream, thresholds = device.new_stream(), gc.get_threshold()

    def work() -> None:
        gc.set_threshold(1)
        _ = [[number] for number in range(100)]

    del garbage
    try:
        device.capture(work, stream)
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert gc.isenabled() and driver.calls.index("free") > driver.calls.index("end")


def test_a_machine_without_a_driver_is_told_so() -> None:
    pytest.importorskip("cuda.bindings.driver")
    try:
        CudaDevice()
    except EngineError as error:
        assert re.search(r"no NVIDIA driver \(libcuda|finds no usable GPU", str(error))
    else:
        pytest.skip("this machine has a GPU")
