"""What only a GPU can show of the engines; for the kernel see test_tree_attention_gpu.py. `make gpu-check` says more,
measures, and needs no pytest."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from bundling import DEMO
from onnx_program import moved

from benchmarks.gpu import engine as gpu_engine
from benchmarks.gpu.engine import CONFIGS
from draftwood.models.bindings import DRAFT, TARGET
from draftwood.runtime import LLM, SamplingParams
from draftwood.runtime.engines.static.cuda import CudaDevice
from draftwood.runtime.engines.static.device import CacheGeometry, RowMove

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_the_static_engine_computes_what_the_cpu_computes() -> None:
    gpu_engine.check_parity(("fp32", "fp16", "bf16"))


def test_rounds_on_the_device_change_no_token() -> None:
    gpu_engine.check_greedy(2)
    gpu_engine.check_shared(2)


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    pytest.importorskip("cuda.bindings.driver")
    yield CudaDevice()


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


@pytest.mark.parametrize(("plugin", "max_batch"), [(True, 1), (False, 1), (True, 4)])
@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_a_bundle_generates_with_tensorrt(
    backend: str, plugin: bool, max_batch: int, device: CudaDevice, tmp_path: Path
) -> None:
    """fp32, so that neither speculation nor company must change a token."""
    if find_spec(backend.replace("-", "_")) is None:  # not importorskip: load_tensorrt alone may import it
        pytest.skip(f"needs the package {backend}")
    from draftwood.builder.options import BuildOptions
    from draftwood.builder.pipeline import build
    from draftwood.runtime.engines.compatibility import RTX_COMPUTE_CAPABILITIES

    targets: tuple[str, ...] = ()
    if backend == "tensorrt-rtx":
        targets = (device.compute_capability,)
        if device.compute_capability not in RTX_COMPUTE_CAPABILITIES:
            pytest.skip(f"TensorRT-RTX does not compile for SM {device.compute_capability}")
    output, chosen = tmp_path / "bundle", {"compute_capability": targets, "plugin": plugin, "max_batch": max_batch}
    pair = DEMO / TARGET, DEMO / DRAFT
    build(BuildOptions(*pair, output, backend, "fp32", max_length=512, **chosen), lambda step: lambda: None)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=64, temperature=0)
    with LLM(output, None) as plain, LLM(output, CONFIGS["tree of 15"]) as speculative:
        expected = [plain.generate(prompt, params)[0].token_ids for prompt in ("def fibonacci(n):\n", "import os\n")]
        found = speculative.generate(["def fibonacci(n):\n", "import os\n"], params)
        assert [each.token_ids for each in found] == expected
