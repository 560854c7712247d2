"""Launches of the kernels of rounds through the driver's API, which executes their PTX."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_driver.machine import Machine

from draftwood.plugins.device_round.images import KERNELS, NODE_BLOCK, image
from draftwood.runtime.engines.layout import Layout
from draftwood.runtime.engines.static.cuda import CudaDevice

pytestmark = pytest.mark.usefixtures("no_faults")


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
