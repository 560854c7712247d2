"""The TensorRT engine over a stand-in for its package: how plans are opened, what is refused, and with what advice.

Nothing here runs a plan: that is what `make gpu-check` and tests marked `gpu` do on a machine with a GPU.
Every TensorRT name this project uses exists in both packages and takes as many parameters as it is given.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bundling import ROOT
from cuda_driver.machine import Machine as Gpu
from engine_parts import BUSHY, CAPACITY, WIDTHS
from fake_tensorrt import HEADER, FakeTensorRT
from tensorrt_names import Names, Use, missing, overridden, public_names, uses

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.engines.export import export
from draftwood.models import bindings
from draftwood.models.errors import EngineError
from draftwood.plugins.tensorrt import load_tensorrt
from draftwood.plugins.tree_attention.library import MAGIC
from draftwood.runtime.engines.base import EngineSpec
from draftwood.runtime.engines.compatibility import Kernel, LayerReport, Machine, TensorRTPlan, WidthFamily
from draftwood.runtime.engines.static import tensorrt
from draftwood.runtime.engines.static.tensorrt import RuntimeCacheFile, TensorRTEngine, profile_for

FAMILIES = (WidthFamily(1, 1, 1), WidthFamily(2, 8, 16), WidthFamily(32, 32, 32))
PLAN = TensorRTPlan("tensorrt-rtx", "1.7.1", ("8.9",), None, FAMILIES, 128, LayerReport(100, 0, 2, 4), False)
pytestmark = pytest.mark.usefixtures("no_faults")


class HostMachine:
    """A machine with stand-ins for driver and package. `open` opens a checkpoint as an engine over its exported
    graph."""

    def __init__(self, folder: Path, gpu: Gpu) -> None:
        self.folder = folder
        self.package = FakeTensorRT(gpu, FAMILIES, columns=128)
        self.plan: TensorRTPlan | None = PLAN

    def spec(self, checkpoint: Checkpoint, role: str) -> EngineSpec:
        names = bindings.output_names(role, form=bindings.COMPACT)
        return EngineSpec(
            role, "tensorrt-rtx", f"{role}.plan", checkpoint.config, WIDTHS, CAPACITY, "fp32", names, self.plan
        )

    def open(self, checkpoint_folder: Path, role: str = bindings.TARGET) -> TensorRTEngine:
        checkpoint = Checkpoint(checkpoint_folder)
        graph, plan = self.folder / f"{role}.onnx", self.folder / f"{role}.plan"
        export(checkpoint, role, CAPACITY, graph, lambda name: None, form=bindings.COMPACT)
        plan.write_bytes(HEADER + str(graph).encode())
        return TensorRTEngine(plan, self.spec(checkpoint, role))


@pytest.fixture
def machine(tmp_path: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> HostMachine:
    (tmp_path / "bundle").mkdir()
    made = HostMachine(tmp_path / "bundle", gpu)
    monkeypatch.setattr(tensorrt, "load_tensorrt", lambda backend: made.package)
    monkeypatch.setattr(tensorrt, "tensorrt_logger", lambda backend: None)
    monkeypatch.setattr(tensorrt, "installed_packages", lambda: {"tensorrt-rtx": "1.7.1"})
    return made


def test_an_execution_has_the_profile_of_its_width() -> None:
    assert [profile_for(FAMILIES, width) for width in (1, 2, 8, 16, 32)] == [0, 1, 1, 1, 2]
    overlapping = (WidthFamily(1, 1, 8), WidthFamily(1, 4, 8), WidthFamily(1, 8, 64))
    assert [profile_for(overlapping, width) for width in (1, 4, 5, 8, 9)] == [0, 1, 2, 2, 2]
    with pytest.raises(EngineError, match="no optimisation profile for 24 rows: rebuild"):
        profile_for(FAMILIES, 24)


def test_masks_are_no_wider_than_the_plan_allows(machine: HostMachine, gqa: Path) -> None:
    machine.package.columns = 12
    engine = machine.open(gqa)
    cache = engine.new_cache()
    for first in (0, 4, 8):
        row = BUSHY.batch(engine.spec, 0, first=0, stop=4)
        mask = np.zeros((4, first + 4), np.bool_)
        mask[:, first:] = row.mask
        engine.score(replace(row, mask=mask), cache)
    assert cache.speculative == 12  # 12 columns, where doubling alone would have asked for 16
    mask = np.eye(1, 13, 12, dtype=np.bool_)
    with pytest.raises(EngineError, match=r"13 speculative rows exceed the 12 the target's plan .* --widths"):
        engine.score(replace(BUSHY.batch(engine.spec, 0, stop=1), mask=mask), cache)
    assert cache.speculative == 12


def test_memory_of_an_open_engine(machine: HostMachine, gqa: Path) -> None:
    engine = machine.open(gqa)
    model, memory = engine.spec.model, engine.memory
    assert memory.kv_cache == 2 * model.num_layers * model.num_kv_heads * CAPACITY * model.head_dim * 4
    assert (memory.workspace, memory.weights) == (4096, (machine.folder / "target.plan").stat().st_size)


def test_a_plan_for_another_machine_is_refused(machine: HostMachine, gqa: Path) -> None:
    """test_tensorrt_bundle.py has every obstacle."""
    machine.plan = PLAN._replace(compute_capabilities=("9.0",))
    built_for = r"built for SM 9\.0 .* Stand-in GPU is SM 8\.9: rebuild with --compute-capability 8"
    with pytest.raises(EngineError, match=built_for):
        machine.open(gqa)


def test_a_plan_with_a_kernel_of_this_release_registers_the_plugin(
    machine: HostMachine, gqa: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[object] = []
    monkeypatch.setattr(tensorrt, "register", registered.append)
    for kernel, count in ((None, 0), (Kernel("0" * 64, MAGIC.decode()), 1)):
        machine.plan = PLAN._replace(kernel=kernel)
        machine.open(gqa)
        assert registered == [machine.package] * count

    def missing(backend: str) -> None:
        raise ModuleNotFoundError("cannot be imported (libnvinfer.so.11): pip install 'draftwood[tensorrt]'")

    monkeypatch.setattr(tensorrt, "load_tensorrt", missing)
    with pytest.raises(EngineError, match=r"libnvinfer.* pip install .*\[tensorrt\]'"):
        machine.open(gqa)


@pytest.mark.parametrize("module", ["runtime.engines.static.tensorrt", "plugins.tree_attention.plugin"])
def test_running_an_engine_needs_no_torch_onnx_or_compiler(module: str) -> None:
    """The kernels come with the engine."""
    code = (
        f"import sys; import draftwood.{module}\n"
        "heavy = {'torch', 'onnx', 'onnx_ir', 'onnxruntime', 'triton', 'tensorrt', 'tensorrt_rtx'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_tensorrt_refuses_is_explained(machine: HostMachine, gqa: Path) -> None:
    checkpoint = Checkpoint(gqa)
    spec, file = machine.spec(checkpoint, bindings.TARGET), machine.folder / "target.plan"
    file.write_bytes(b"something else")
    with pytest.raises(EngineError, match=r"target.plan is refused by tensorrt-rtx 1.7.1: INVALID, .* 0x10; rebuild"):
        TensorRTEngine(file, spec)
    with pytest.raises(EngineError, match="manifest does not describe the target's tensorrt-rtx plan: rebuild"):
        TensorRTEngine(file, replace(spec, plan=None))
    machine.package.aliased = False
    with pytest.raises(
        EngineError, match=r"in place: present_key.0 is aliased to nothing instead of past_key.0; rebuild"
    ):
        machine.open(gqa)
    machine.package.aliased = True
    engine = machine.open(gqa)
    with pytest.raises(EngineError, match=r"has no tensor 'past_key\.2'"):
        TensorRTEngine(file, replace(engine.spec, model=replace(engine.spec.model, num_layers=3)))
    machine.package.families = (WidthFamily(1, 1, 1), WidthFamily(4, 4, 4), WidthFamily(8, 8, 32))
    engine = machine.open(gqa)
    with pytest.raises(EngineError, match=r"TensorRT refuses input_ids of shape \(1, 8\)"):
        engine.score(BUSHY.batch(engine.spec, 0), engine.new_cache())


def test_a_machine_without_a_gpu_is_told_what_to_do(
    gqa: Path, tmp_path: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "is_present", False)
    spec = HostMachine(tmp_path, gpu).spec(Checkpoint(gqa), bindings.TARGET)
    with pytest.raises(EngineError, match=r"no NVIDIA driver or no GPU: .* or rebuild with --backend onnxruntime"):
        TensorRTEngine(tmp_path / "target.plan", spec)


def test_compiled_kernels_are_kept_beside_the_bundle(machine: HostMachine, gqa: Path) -> None:
    stored = machine.folder.with_name(".bundle.runtime-cache") / "target.bin"
    for content in (b"kernels", b"kernels+", b"kernels++"):  # each opening reads what the one before has written
        engine = machine.open(gqa)
        engine.score(BUSHY.batch(engine.spec, 0), engine.new_cache())
        engine.close()
        assert stored.read_bytes() == content
    assert {file.name for file in machine.folder.iterdir()} == {"target.onnx", "target.plan"}


def test_kernels_that_cannot_be_kept_are_no_error(tmp_path: Path) -> None:
    cache = RuntimeCacheFile(tmp_path / "bundle" / "target.plan", "target")
    assert cache.read() is None
    cache.file.parent.parent.mkdir(exist_ok=True)
    cache.file.parent.write_text("a file where a folder should be")
    cache.write(b"kernels")
    assert cache.read() is None


def test_this_machine_names_the_kernels_it_runs(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tensorrt.this_machine()
    assert found.name == "Stand-in GPU"
    monkeypatch.setattr(gpu, "is_present", False)
    assert tensorrt.this_machine().name is None
    assert isinstance(found, Machine) and found.kernel == MAGIC.decode()
    for package in found.packages:
        assert importlib.util.find_spec(package.replace("-", "_")) is not None


# By file: the variables that hold objects of the package, and their classes.
FILES: dict[str, Mapping[str, str]] = {
    "builder/engines/plan.py": {
        "network": "INetworkDefinition",
        "layer": "IAttentionInputLayer",
        "layer.attention": "IAttention",
    },
    "builder/engines/tensorrt.py": {},
    "plugins/tensorrt.py": {},
    "plugins/tree_attention/plugin.py": {
        "registry": "IPluginRegistry",
        "found": "PluginTensorDesc",
        "field": "PluginField",
    },
    "runtime/engines/static/tensorrt.py": {
        "self._runtime": "Runtime",
        "self._engine": "ICudaEngine",
        "engine": "ICudaEngine",
        "config": "IRuntimeConfig",
        "context": "IExecutionContext",
        "self._context": "IExecutionContext",
        "self._cache": "IRuntimeCache",
    },
}
# Asked of TensorRT-RTX only: what it compiles on first use, and why it refuses a plan.
RTX_ONLY = {
    (owner, name)
    for owner, names in {
        "": "DynamicShapesKernelSpecializationStrategy CudaGraphStrategy",
        "Runtime": "engine_header_size get_engine_validity",
        "DynamicShapesKernelSpecializationStrategy": "EAGER",
        "CudaGraphStrategy": "DISABLED",
        "IRuntimeConfig": "dynamic_shapes_kernel_specialization_strategy cuda_graph_strategy create_runtime_cache"
        " set_runtime_cache",
        "IRuntimeCache": "serialize deserialize",
        "IExecutionContext": "is_stream_capturable",
        "BuilderFlag": "REQUIRE_USER_ALLOCATION",
    }.items()
    for name in names.split()
}


@pytest.fixture(scope="module")
def rtx() -> Names:
    if importlib.util.find_spec("tensorrt_rtx") is None:
        pytest.skip("needs the package tensorrt-rtx")
    return public_names(load_tensorrt("tensorrt-rtx"))


@pytest.fixture(scope="module")
def listed() -> Names:
    """Names of TensorRT 11.4, written by tensorrt_names.py."""
    file = ROOT / "tests" / "support" / "tensorrt_11_names.json"
    names: Names = json.loads(file.read_text(encoding="utf-8"))
    return names


@pytest.fixture(scope="module")
def used() -> list[Use]:
    found = [use for name, receivers in FILES.items() for use in uses(ROOT / name, receivers)]
    assert len(found) > 60
    return found


def test_every_name_is_offered_by_tensorrt_rtx_and_all_but_its_own_by_tensorrt_11(
    rtx: Names, listed: Names, used: list[Use]
) -> None:
    assert missing(used, rtx) == []
    assert missing([use for use in used if (use.owner, use.name) not in RTX_ONLY], listed) == []
    absent = {(use.owner, use.name) for use in missing(used, listed)}
    assert absent == RTX_ONLY, "RTX_ONLY names something that TensorRT has, or that nobody uses"


def test_the_callbacks_exist_in_both(rtx: Names, listed: Names) -> None:
    """A method that overrides nothing would never be called."""
    for name in FILES:
        for callback in overridden(ROOT / name, rtx):
            assert callback.name in listed[callback.owner], callback
    classes = {callback.owner for name in FILES for callback in overridden(ROOT / name, rtx)}
    assert classes >= {
        "IProgressMonitor",
        "ILogger",
        "IPluginV3OneBuildV2",
        "IPluginV3OneRuntime",
        "IPluginCreatorV3One",
    }
