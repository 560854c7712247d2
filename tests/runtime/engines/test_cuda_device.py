"""The GPU seam over a driver in the place of libcuda.so.1: the real cuda-bindings call a machine on the host."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from cuda_driver.machine import Machine
from onnx_program import moved
from ptx.images import mover_image

from draftwood.models.errors import EngineError
from draftwood.plugins.device_round.images import KERNELS, NODE_BLOCK, image
from draftwood.runtime.engines.layout import Layout
from draftwood.runtime.engines.static import cuda
from draftwood.runtime.engines.static.cuda import MOVE_LIMIT, CudaDevice, compile_mover
from draftwood.runtime.engines.static.device import CacheGeometry, RowMove

pytestmark = pytest.mark.usefixtures("no_faults")


@pytest.fixture(scope="module")
def device(gpu: Machine) -> CudaDevice:
    return CudaDevice()


def used(gpu: Machine) -> tuple[int, int]:
    """Bytes of device memory and of page-locked memory."""
    gc.collect()
    return gpu.memory.used("device"), gpu.memory.used("page-locked")


@pytest.mark.parametrize(("row_bytes", "width"), [(128, 16), (24, 8), (12, 4), (6, 2)])
@pytest.mark.parametrize("by", ["a function of the host", "the executor"])
def test_rows_are_moved(by: str, row_bytes: int, width: int, gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plane of every layer, padding between layers untouched, more rows than one launch takes, rows that were
    overwritten before they are read. The kernel's PTX, or what stands for it in tests of engines."""
    if by == "the executor":
        monkeypatch.setattr(cuda, "compile_mover", lambda width, capability: mover_image(width).text.encode())
    device = CudaDevice()
    geometry = CacheGeometry(3, 2, 400, row_bytes, 2 * 400 * row_bytes + 64)
    rng, stream = np.random.default_rng(0), device.new_stream()
    for kept in (1, 5, 300):
        sources, targets = rng.choice(400, kept, replace=False), rng.choice(400, kept, replace=False)
        content, found = (device.allocate_pinned(geometry.nbytes) for _ in range(2))
        content[:] = rng.integers(0, 255, geometry.nbytes, np.uint8)
        memory = device.allocate(geometry.nbytes)
        device.upload(memory.address, content, stream)
        gpu.counts.clear()
        device.move_rows(RowMove(memory.address, geometry, sources, targets), stream)
        assert gpu.calls == {"launch": -(-kept // MOVE_LIMIT)}
        device.download(found, memory.address, stream)
        device.synchronize(stream)
        moved(RowMove(content.ctypes.data, geometry, sources, targets))
        np.testing.assert_array_equal(found, content)


def test_threads_that_shared_bytes_would_be_noticed(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is moved by one thread. Here all threads move what the first moves."""
    text = mover_image(16).text
    wrong = text.replace("%tid.x", "%ctaid.x")
    assert wrong != text
    monkeypatch.setattr(cuda, "compile_mover", lambda width, capability: wrong.encode())
    device, geometry = CudaDevice(), CacheGeometry(1, 1, 40, 128, 40 * 128)
    memory, stream = device.allocate(geometry.nbytes), device.new_stream()
    with gpu.expecting() as faults, pytest.raises(EngineError):
        device.move_rows(RowMove(memory.address, geometry, np.arange(1, 9), np.arange(8)), stream)
        device.synchronize(stream)
    assert any(each.startswith("Race") for each in faults)


def test_memory_is_zeroed_and_given_back_when_nobody_holds_it(device: CudaDevice, gpu: Machine) -> None:
    before, stream = used(gpu), device.new_stream()
    memory, block = device.allocate(1000), device.allocate_pinned(100)
    found = device.allocate_pinned(1000)
    found[:] = 1
    device.download(found, memory.address, stream)
    device.synchronize(stream)
    assert not found.any() and not block.any()
    view = block[50:].view(np.int16)
    del block, memory, found
    assert used(gpu) == (before[0], before[1] + 100), "a view keeps page-locked memory"
    view[:] = 3
    del view
    assert used(gpu) == before


def test_nothing_is_given_back_under_queued_work(device: CudaDevice, gpu: Machine) -> None:
    """CUDA's functions that free memory may wait for queued work; their documents do not promise it."""
    before, graphs, stream = used(gpu), len(gpu.graphs), device.new_stream()
    held: list[Any] = [device.allocate(64), device.allocate_pinned(64)]
    graph = device.capture(lambda: device.upload(held[0].address, held[1], stream), stream)
    assert graph is not None
    device.replay(graph, stream)
    held.clear()
    del graph
    assert used(gpu) == (before[0] + 64, before[1] + 64) and len(gpu.graphs) == graphs + 1
    device.synchronize(stream)
    assert used(gpu) == before and len(gpu.graphs) == graphs


def test_a_full_gpu_is_explained(device: CudaDevice, gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    total = used(gpu)[0] + 3_000_000_000  # tests of other files may still hold memory
    monkeypatch.setattr(gpu.memory, "total", total)
    explained = f"Stand-in GPU has 3.00 of {total / 1e9:.2f} GB free and 8.00 GB are needed: "
    with pytest.raises(EngineError, match=f"{re.escape(explained)}.*--max-length"):
        device.allocate(8_000_000_000)


def test_any_thread_may_use_the_device(device: CudaDevice) -> None:
    made: list[int] = []
    thread = threading.Thread(target=lambda: made.append(device.allocate(10).address))
    thread.start()
    thread.join()
    assert len(made) == 1 and device.compute_capability == "8.9" and device.name == "Stand-in GPU"


def test_a_graph_is_replayed_with_its_addresses(device: CudaDevice, gpu: Machine) -> None:
    stream, memory = device.new_stream(), device.allocate(8)
    source, target = device.allocate_pinned(8), device.allocate_pinned(8)

    def copies() -> None:
        device.upload(memory.address, source, stream)
        device.download(target, memory.address, stream)

    source[:] = 1
    gpu.counts.clear()
    graph = device.capture(copies, stream)
    assert graph is not None and gpu.calls == {"captured": 2} and not target.any()
    for value in (2, 3):
        source[:] = value
        device.replay(graph, stream)
        device.synchronize(stream)
        assert (target == value).all()
    assert gpu.counts == {"captured": 2, "graph": 2, "wait": 2, "upload bytes": 16, "download bytes": 16}


def test_what_cannot_be_captured_leaves_capture_mode(
    device: CudaDevice, gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> None:
        raise EngineError("TensorRT could not run a pass")

    stream = device.new_stream()
    assert device.capture(refused, stream) is None
    device.synchronize(stream)
    monkeypatch.setattr(gpu, "captures", False)
    assert device.capture(lambda: None, stream) is None
    device.synchronize(stream)


def test_nvrtc_compiles_the_kernel_or_says_what_to_install() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    try:
        assert compile_mover(16, "9.0").startswith(b"\x7fELF")
    except EngineError as error:
        assert "pip install 'cuda-bindings[all]'" in str(error)


def test_no_memory_is_freed_while_a_graph_is_captured(device: CudaDevice, gpu: Machine) -> None:
    """CUDA forbids it. Memory is released where its last reference ends, and garbage that holds memory where a
    collection begins, which any new object may cause."""
    before = used(gpu)
    garbage: list[object] = [device.allocate(8)]
    garbage.append(garbage)
    held, stream, thresholds = [device.allocate(8)], device.new_stream(), gc.get_threshold()

    def work() -> None:
        held.clear()
        gc.set_threshold(1)
        _ = [[number] for number in range(100)]
        assert gpu.memory.used("device") == before[0] + 16

    del garbage
    try:
        assert device.capture(work, stream) is not None
    finally:
        gc.set_threshold(*thresholds)
    assert gc.isenabled() and used(gpu) == before


def test_a_machine_without_a_driver_is_told_so(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "is_present", False)
    with pytest.raises(EngineError, match=r"the NVIDIA driver finds no usable GPU \(CUDA_ERROR_NO_DEVICE\)"):
        CudaDevice()


def test_a_machine_without_a_library_is_told_so() -> None:
    """In a process of its own: cuda-bindings look for the library once."""
    code = "from draftwood.runtime.engines.static.cuda import CudaDevice; CudaDevice()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode == 0:
        pytest.skip("this machine has a GPU")
    assert re.search(r"EngineError: .*(no NVIDIA driver \(libcuda|finds no usable GPU)", done.stderr)


@pytest.mark.parametrize("size", [2, 300])
def test_a_launch_has_the_arguments_of_its_kernel(size: int, gpu: Machine) -> None:
    """The best nodes of two trees, on a grid of several programs; a module is loaded once."""
    device, modules = CudaDevice(), len(gpu.handles)
    stream, programs = device.new_stream(), -(-(size + 1) // NODE_BLOCK)
    kinds = {"totals": "int32", "values": "float64", "rows": "int32", "row_nodes": "int32"}
    counts = dict(zip(kinds, (1, 4, 4, size + 1), strict=True))
    layout = Layout.packed({name: (kind, (2, counts[name])) for name, kind in kinds.items()})
    memory = device.allocate(layout.nbytes)
    source, target = device.allocate_pinned(layout.nbytes), device.allocate_pinned(layout.nbytes)
    arrays, found = layout.views(source), layout.views(target)
    arrays["totals"][:], arrays["values"][:] = [[4], [3]], [(0.0, -2.0, -1.0, -2.0), (0.0, -1.0, -2.0, 9.0)]
    arrays["rows"][:], arrays["row_nodes"][:] = 7, 7
    for _ in range(2):
        device.upload(memory.address, source, stream)
        addresses = (memory.address + layout.fields[name].offset for name in kinds)
        device.launch("unroll", (programs, 2), (*addresses, 0, size, 4), stream)
        device.download(target, memory.address, stream)
        device.synchronize(stream)
        assert found["rows"].tolist() == [[0, 2, 1, -1] if size == 2 else [0, 2, 1, 3], [0, 1, 2, 7]]
        assert found["row_nodes"][:, :3].tolist() == [[0, 2, 1], [0, 1, 2]]
        assert set(found["row_nodes"][:, 4:].flatten().tolist()) <= {-1}
    loaded = image("unroll")
    for launched in gpu.launches:
        assert launched[:4] == ("unroll", (programs, 2, 1), (loaded.threads, 1, 1), loaded.shared_bytes)
        assert [np.frombuffer(value, np.uint64)[0] for value in launched.values[-2:]] == [0, 0], "scratch memory"
    assert len(gpu.launches) == 2 and len(gpu.handles) == modules + 2, "a module and its function"


@pytest.mark.parametrize(("capability", "runs"), [((7, 5), False), ((8, 0), True), ((10, 0), True)])
def test_devices_that_the_kernels_are_compiled_for(
    capability: tuple[int, int], runs: bool, gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for attribute, number in zip((75, 76), capability, strict=True):
        monkeypatch.setitem(gpu.attributes, attribute, number)
    assert CudaDevice().runs_rounds is runs


def test_kernels_are_loaded_when_a_plan_is_opened_and_not_by_the_first_round(gpu: Machine) -> None:
    device, modules = CudaDevice(), len(gpu.handles)
    assert device.load_rounds() == len(KERNELS) and len(gpu.handles) == modules + 2 * len(KERNELS)
    assert device.load_rounds() == len(KERNELS) and len(gpu.handles) == modules + 2 * len(KERNELS)
