"""Launches of the kernels of rounds through the driver's API: a driver that runs their PTX on the host."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ptx.on_host import launch_on_host

from draftwood.plugins.device_round.images import DTYPES, ROW_BLOCK, Image, image
from draftwood.runtime.engines.static import cuda
from draftwood.runtime.engines.static.cuda import CudaDevice


class RunningDriver:
    """What CudaDevice calls to open a device and to launch a kernel. `modules`: the texts that were loaded."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __init__(self, capability: tuple[int, int]) -> None:
        self.CUdevice_attribute = SimpleNamespace(
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=capability[0],
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=capability[1],
        )
        self.modules: list[bytes] = []
        self.blocks: list[Any] = []

    def cuDeviceGet(self, index: int) -> tuple[int, int]:
        return 0, index

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, int]:
        return 0, 1

    def cuCtxSetCurrent(self, context: int) -> tuple[int]:
        return (0,)

    def cuDeviceGetName(self, length: int, device: int) -> tuple[int, bytes]:
        return 0, b"GPU"

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[int, int]:
        return 0, attribute

    def cuStreamCreate(self, flags: int) -> tuple[int, int]:
        return 0, 5

    def cuModuleLoadData(self, text: bytes) -> tuple[int, bytes]:
        self.modules.append(text)
        return 0, text

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> tuple[int, Image]:
        loaded = image(name.decode())
        assert module == loaded.text.encode() + b"\0" and f".entry {name.decode()}(".encode() in module
        return 0, loaded

    def cuLaunchKernel(self, function: Image, *sizes: int) -> tuple[int]:
        *grid, threads, block_y, block_z, shared, stream, pointers, extra = sizes
        assert (threads, block_y, block_z, shared, stream, extra) == (
            function.threads,
            1,
            1,
            function.shared_bytes,
            5,
            0,
        )
        addresses = (ctypes.c_uint64 * len(function.types)).from_address(pointers)
        values = []
        for address, kind in zip(addresses, function.types, strict=True):
            dtype: np.dtype[Any] = np.dtype(DTYPES.get(kind, np.uint64))
            values.append(int(np.frombuffer(ctypes.string_at(address, dtype.itemsize), dtype)[0]))
        assert values[-2:] == [0, 0] and grid[2] == 1
        launch_on_host(function, (grid[0], grid[1]), values[:-2], self.blocks)
        return (0,)


@pytest.mark.parametrize("size", [2, 300])
def test_a_launch_has_the_arguments_of_its_kernel(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best nodes of a tree, on a grid of several programs; a module is loaded once."""
    driver = RunningDriver((8, 9))
    monkeypatch.setattr(cuda, "load_driver", lambda: driver)
    device = CudaDevice()
    assert device.runs_rounds and size < 2 * ROW_BLOCK
    totals, rows, row_nodes = np.array([4], np.int32), np.zeros(4, np.int32), np.zeros(size + 1, np.int32)
    arrays = (totals, np.array([0.0, -2.0, -1.0, -2.0]), rows, row_nodes)
    driver.blocks = [array.view(np.uint8) for array in arrays]
    for _ in range(2):
        device.launch("unroll", (3, 1), (*(array.ctypes.data for array in arrays), 0, size), 5)
        assert rows.tolist() == ([0, 2, 1, -1] if size == 2 else [0, 2, 1, 3])
        assert row_nodes[:3].tolist() == [0, 2, 1] and set(row_nodes[4:]) <= {-1}
    assert len(driver.modules) == 1


@pytest.mark.parametrize(("capability", "runs"), [((7, 5), False), ((8, 0), True), ((10, 0), True)])
def test_devices_that_the_kernels_are_compiled_for(
    capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "load_driver", lambda: RunningDriver(capability))
    assert CudaDevice().runs_rounds is runs
