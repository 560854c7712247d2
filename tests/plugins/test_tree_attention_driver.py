"""The driver launcher over a driver that notes what it is told: no GPU needed."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from draftwood.plugins.tree_attention.driver import DriverLauncher
from draftwood.plugins.tree_attention.library import CUBIN, PTX, KernelImage, KernelLibrary
from draftwood.plugins.tree_attention.operands import ATTENTION, COMBINE, Operands
from draftwood.plugins.tree_attention.plan import LaunchPlan, Shape, plan_launch

SHAPE = Shape(1, 8, 2, 3, 5, 4096, 64, "fp16")
STRIDES = (192, 64)
OPERANDS = Operands(16, 32, 48, 60, 61, 64, 80, STRIDES, STRIDES)
OK, REFUSED = (SimpleNamespace(value=value, name=name) for value, name in ((0, "OK"), (200, "INVALID_IMAGE")))


class Driver(ModuleType):
    """One device of capability 9.0 with 132 multiprocessors. Takes images whose first byte is in `accepts`."""

    def __init__(self, accepts: bytes) -> None:
        super().__init__("cuda.bindings.driver")
        self.accepts = accepts
        self.context = 1
        self.loaded: list[bytes] = []
        self.launches: list[tuple[Any, ...]] = []
        self.CUresult = SimpleNamespace(CUDA_SUCCESS=OK)
        self.CUdevice_attribute = SimpleNamespace(
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=9,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=0,
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT=132,
        )
        self.CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)

    def cuCtxGetCurrent(self) -> tuple[Any, ...]:
        return OK, self.context

    def cuCtxGetDevice(self) -> tuple[Any, ...]:
        return OK, 0

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[Any, ...]:
        return OK, attribute

    def cuModuleLoadData(self, image: bytes) -> tuple[Any, ...]:
        if image[0] not in self.accepts:
            return REFUSED, None
        self.loaded.append(image)
        return OK, image

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> tuple[Any, ...]:
        return OK, (module, name)

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> tuple[Any, ...]:
        return (OK,)

    def cuLaunchKernel(self, *arguments: Any) -> tuple[Any, ...]:
        self.launches.append(arguments)
        return (OK,)


def library() -> KernelLibrary:
    """A cubin for 9.0 that begins with "c", PTX that begins with "p"."""
    variant = plan_launch(SHAPE, 132).variant
    return KernelLibrary(
        tuple(
            KernelImage(kernel, which, capability, kind, kernel, 1024, 4, kind.encode())
            for kernel, which in ((ATTENTION, variant), (COMBINE, variant.combined))
            for kind, capability in ((CUBIN, 90), (PTX, 80))
        ),
        "3.9.0",
    )


def driven(monkeypatch: pytest.MonkeyPatch, accepts: bytes = b"cp") -> Driver:
    driver = Driver(accepts)
    bindings = ModuleType("cuda.bindings")
    monkeypatch.setattr(bindings, "driver", driver, raising=False)
    for name, module in (("cuda", ModuleType("cuda")), ("cuda.bindings", bindings), (driver.__name__, driver)):
        monkeypatch.setitem(sys.modules, name, module)
    return driver


def layout(multiprocessors: int) -> LaunchPlan:
    return plan_launch(SHAPE, multiprocessors)


def test_both_kernels_are_launched_with_every_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eighteen and six parameters, and the two that Triton adds."""
    driver, launcher = driven(monkeypatch), DriverLauncher(library())
    calls = layout(launcher.multiprocessors)
    launcher.launch(calls, OPERANDS, 0.125, stream=7)
    (attention, combine) = driver.launches
    assert attention[0] == (b"cubin", b"tree_attention") and combine[0] == (b"cubin", b"combine_splits")
    assert (attention[1:9], combine[1:9]) == ((1, 2, 16, 128, 1, 1, 1024, 7), (3, 8, 1, 128, 1, 1, 1024, 7))
    logsum = 80 + calls.partial_bytes
    values, types = attention[9]
    assert values[:8] == (16, 32, 48, 60, 61, 64, 80, logsum)
    assert values[8] == pytest.approx(0.125 * 1.442695) and values[9:14] == (4096, 2, 3, 5, 16)
    assert values[14:] == (*STRIDES, *STRIDES, 0, 0) and len(types) == 20
    assert combine[9][0] == (80, logsum, 64, 16, *STRIDES, 0, 0)


def test_one_split_needs_no_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = driven(monkeypatch)
    DriverLauncher(library()).launch(layout(1), OPERANDS._replace(workspace=0), 0.125, stream=0)
    assert [launch[0][1] for launch in driver.launches] == [b"tree_attention"]


def test_modules_are_loaded_once_per_context(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, launcher = driven(monkeypatch), DriverLauncher(library())
    for context in (1, 1, 2):
        driver.context = context
        launcher.launch(layout(132), OPERANDS, 0.125, stream=0)
    assert len(driver.loaded) == 4 and len(driver.launches) == 6


def test_ptx_where_the_driver_refuses_the_cubin(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = driven(monkeypatch, accepts=b"p")
    DriverLauncher(library()).launch(layout(1), OPERANDS, 0.125, stream=0)
    assert driver.loaded == [b"ptx"]


def test_a_driver_that_takes_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    driven(monkeypatch, accepts=b"")
    with pytest.raises(RuntimeError, match=r"takes no image of tree_attention \(INVALID_IMAGE\): update the driver"):
        DriverLauncher(library()).launch(layout(1), OPERANDS, 0.125, stream=0)
