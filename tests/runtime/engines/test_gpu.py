"""What only a GPU can show of launches. `make gpu-check` runs these tests, compares numbers and texts, and measures; it
needs no pytest."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention import SCALE, TOLERANCES, Case, Tensors, operands, workspace
from onnx_program import moved

from draftwood.plugins.tree_attention.driver import DriverLauncher, device_attribute
from draftwood.plugins.tree_attention.library import CAPABILITIES, compile_library
from draftwood.plugins.tree_attention.plan import plan_launch
from draftwood.runtime.engines.static.cuda import CudaDevice
from draftwood.runtime.engines.static.device import CacheGeometry, RowMove

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TREE = Case(2, 4, 7, 5, 6000, (2500, 3), 128, "fp16")
CASES = (
    TREE,
    replace(TREE, dtype="bf16"),
    replace(TREE, dtype="fp32"),
    replace(TREE, head_dim=64, group=1, rows=64),
    replace(TREE, head_dim=80, rows=1, earlier=0),
    replace(TREE, head_dim=96, rows=200, earlier=0, lengths=(0, 1000)),
)


@pytest.fixture
def device() -> CudaDevice:
    pytest.importorskip("cuda.bindings.driver")
    return CudaDevice()


def test_rows_are_moved_on_the_device(device: CudaDevice) -> None:
    rng = np.random.default_rng(0)
    for row_bytes in (256, 24, 12, 6):
        geometry = CacheGeometry(5, 4, 700, row_bytes, 4 * 700 * row_bytes + 256)
        sources, targets = rng.choice(700, 300, replace=False), rng.choice(700, 300, replace=False)
        content, stream = device.allocate_pinned(geometry.nbytes), device.new_stream()
        content[:] = rng.integers(0, 255, geometry.nbytes, np.uint8)
        memory, found = device.allocate(geometry.nbytes), device.allocate_pinned(geometry.nbytes)
        device.upload(memory.address, content, stream)
        device.move_rows(RowMove(memory.address, geometry, sources, targets), stream)
        device.download(found, memory.address, stream)
        device.synchronize(stream)
        moved(RowMove(content.ctypes.data, geometry, sources, targets))
        np.testing.assert_array_equal(found, content)


def test_copies_are_captured_and_replayed(device: CudaDevice) -> None:
    stream, memory = device.new_stream(), device.allocate(512)
    source, target = (device.allocate_pinned(512) for _ in range(2))

    def copies() -> None:
        device.upload(memory.address, source, stream)
        device.download(target, memory.address, stream)

    graph = device.capture(copies, stream)
    assert graph is not None
    for value in (1, 2):
        source[:] = value
        device.replay(graph, stream)
        device.synchronize(stream)
        assert (target == value).all()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton")
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("portable", [True, False])
def test_the_attention_kernel_by_the_driver(case: Case, portable: bool) -> None:
    """From PTX and from a cubin for this device."""
    tensors = Tensors(*(tensor.cuda() for tensor in case.tensors()))
    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor not in CAPABILITIES:
        pytest.skip(f"no kernel is compiled for compute capability {major}.{minor}")
    capabilities = () if portable else (10 * major + minor,)
    library = compile_library(case.head_dim, case.group, case.dtype, case.rows, capabilities)
    layout = plan_launch(tensors.shape(), device_attribute("MULTIPROCESSOR_COUNT"))
    output, memory = torch.full_like(tensors.query, float("nan")), workspace(layout, "cuda")
    stream = torch.cuda.current_stream().cuda_stream
    DriverLauncher(library).launch(layout, operands(tensors, output, memory), SCALE, stream)
    torch.cuda.synchronize()
    expected = case.tensors().expected()
    np.testing.assert_allclose(output.float().cpu().numpy(), expected, rtol=0, atol=TOLERANCES[case.dtype])
