"""The driver launcher over a driver in the place of libcuda.so.1: the real cuda-bindings marshal every argument."""

from __future__ import annotations

import importlib.util
import re
import struct
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from attention import SCALE, TOLERANCES, Case
from cuda_driver.kernels import Kernel, Launched
from cuda_driver.machine import Machine
from cuda_driver.memory import Memory

from draftwood.plugins.tree_attention.driver import DriverLauncher
from draftwood.plugins.tree_attention.library import CUBIN, PTX, KernelImage, KernelLibrary
from draftwood.plugins.tree_attention.operands import ATTENTION, COMBINE, Operands
from draftwood.plugins.tree_attention.plan import LaunchPlan, Shape, plan_launch
from draftwood.runtime.engines.static.cuda import CudaDevice, CudaMemory

pytestmark = pytest.mark.usefixtures("no_faults")

SHAPE = Shape(1, 8, 2, 3, 5, 4096, 64, "fp16")
STRIDES = (192, 64)
OPERANDS = Operands(16, 32, 48, 60, 61, 64, 80, STRIDES, STRIDES)
# Nineteen and seven parameters, and the two that Triton adds.
PARAMETERS = {ATTENTION: "<9Qf9i2Q", COMBINE: "<4Q3i2Q"}
TREE = Case(2, 4, 7, 5, 600, (250, 3), 64, "fp16", multiprocessors=4)


def noted(launched: Launched, memory: Memory) -> None:
    """A kernel that does nothing: the machine notes its launch."""


def kernel(name: str) -> Kernel:
    letters = re.sub(r"(\d+)(\w)", lambda found: found[2] * int(found[1]), PARAMETERS[name][1:])
    return Kernel(name, tuple(struct.calcsize(letter) for letter in letters), noted)


@pytest.fixture
def h100(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A device of capability 9.0 with 132 multiprocessors, whose kernels do nothing."""
    monkeypatch.setattr(gpu, "attributes", {75: 9, 76: 0, 16: 132})
    for name in PARAMETERS:
        for kind in (CUBIN, PTX):
            monkeypatch.setitem(gpu.images, f"{kind} {name}".encode(), (kernel(name),))
    CudaDevice()  # makes the context current
    yield gpu


def library() -> KernelLibrary:
    """A cubin for 9.0 and PTX of both kernels."""
    variant = plan_launch(SHAPE, 132).variant
    return KernelLibrary(
        tuple(
            KernelImage(name, which, capability, kind, name, 1024, 4, f"{kind} {name}".encode())
            for name, which in ((ATTENTION, variant), (COMBINE, variant.combined))
            for kind, capability in ((CUBIN, 90), (PTX, 80))
        ),
        "3.9.0",
    )


def layout(multiprocessors: int) -> LaunchPlan:
    return plan_launch(SHAPE, multiprocessors)


def test_both_kernels_are_launched_with_every_parameter(h100: Machine) -> None:
    launcher, stream = DriverLauncher(library()), CudaDevice().new_stream()
    calls = layout(launcher.multiprocessors)
    launcher.launch(calls, OPERANDS, 0.125, stream)
    attention, combine = h100.launches
    assert attention[:4] == (ATTENTION, (1, 2, 32), (128, 1, 1), 1024)
    assert combine[:4] == (COMBINE, (3, 8, 1), (128, 1, 1), 1024)
    values = struct.unpack(PARAMETERS[ATTENTION], b"".join(attention.values))
    logsum = 80 + calls.partial_bytes
    live = logsum + calls.logsum_bytes
    assert values[:9] == (16, 32, 48, 60, 61, 64, 80, logsum, live)
    assert values[9] == pytest.approx(0.125 * 1.442695) and values[10:15] == (4096, 2, 3, 5, 32)
    assert values[15:] == (*STRIDES, *STRIDES, 0, 0)
    found = struct.unpack(PARAMETERS[COMBINE], b"".join(combine.values))
    assert found == (80, logsum, live, 64, 32, *STRIDES, 0, 0)


def test_one_split_needs_no_reduction(h100: Machine) -> None:
    stream = CudaDevice().new_stream()
    DriverLauncher(library()).launch(layout(1), OPERANDS._replace(workspace=0), 0.125, stream)
    assert [launched.name for launched in h100.launches] == [ATTENTION]


def test_modules_are_loaded_once_per_context(h100: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, stream, before = DriverLauncher(library()), CudaDevice().new_stream(), len(h100.handles)
    for context in (1, 1, 2):
        monkeypatch.setattr(h100, "context", context)
        launcher.launch(layout(132), OPERANDS, 0.125, stream)
    assert len(h100.handles) == before + 2 * 4 and len(h100.launches) == 6  # a module and a function of each


def test_ptx_where_the_driver_refuses_the_cubin(h100: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(h100.images, f"{CUBIN} {ATTENTION}".encode())
    DriverLauncher(library()).launch(layout(1), OPERANDS, 0.125, CudaDevice().new_stream())
    assert len(h100.launches) == 1


def test_a_driver_that_takes_nothing_is_named(h100: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h100, "images", {})
    with pytest.raises(
        RuntimeError, match=r"takes no image of tree_attention \(CUDA_ERROR_INVALID_IMAGE\): update the driver"
    ):
        DriverLauncher(library()).launch(layout(1), OPERANDS, 0.125, CudaDevice().new_stream())


def test_too_much_shared_memory_is_asked_for_before_the_launch(h100: Machine) -> None:
    """As CUDA wants it for more than 48 KB."""
    images = tuple(
        KernelImage(each.kernel, each.variant, each.capability, each.format, each.entry, 90_000, 4, each.code)
        for each in library().images
    )
    DriverLauncher(KernelLibrary(images, "3.9.0")).launch(layout(1), OPERANDS, 0.125, CudaDevice().new_stream())
    assert h100.launches[0].shared_bytes == 90_000


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="compiling needs Triton: pip install triton")
def test_a_call_equals_the_oracle(gpu: Machine) -> None:
    """From the launcher through cuda-bindings to the compiled kernels: tensors are uploaded, both kernels run on the
    executor when the host waits, and the output is downloaded."""
    from ptx.images import attention_image

    tensors = TREE.tensors()
    shape = tensors.shape()
    plan, device = plan_launch(shape, TREE.multiprocessors), CudaDevice()
    images = []
    for name, variant in ((ATTENTION, plan.variant), (COMBINE, plan.variant.combined)):
        image = attention_image(name, variant, 80, portable=True)
        entry, code = image.program.entry, image.text.encode()
        images.append(KernelImage(name, variant, 80, PTX, entry, image.shared_bytes, image.threads // 32, code))
    stream = device.new_stream()

    def put(tensor: torch.Tensor) -> CudaMemory:
        content = tensor.contiguous().view(torch.uint8).numpy().ravel()
        memory, block = device.allocate(content.nbytes), device.allocate_pinned(content.nbytes)
        block[:] = content
        device.upload(memory.address, block, stream)
        return memory

    memories = [put(tensor) for tensor in tensors]
    output, workspace = device.allocate(tensors.query.nbytes), device.allocate(plan.workspace_bytes)
    strides = (shape.rows * shape.head_dim, shape.head_dim)
    query, key, value, sequences, mask = (each.address for each in memories)
    operands = Operands(query, key, value, sequences, mask, output.address, workspace.address, strides, strides)
    launcher = DriverLauncher(KernelLibrary(tuple(images), "3.9.0"))
    launcher.launch(plan, operands, SCALE, stream)
    found = device.allocate_pinned(tensors.query.nbytes)
    device.download(found, output.address, stream)
    device.synchronize(stream)
    values = torch.from_numpy(found.copy()).view(tensors.query.dtype).float().numpy().reshape(tensors.query.shape)
    assert plan.num_splits > 1 and [launched.name for launched in gpu.launches] == [ATTENTION, COMBINE]
    np.testing.assert_allclose(values, tensors.expected(), rtol=0, atol=TOLERANCES[TREE.dtype])
