"""Every TensorRT name this project uses exists in both packages and takes as many parameters as it is given, though
neither can be executed without a GPU, and TensorRT not even be imported."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from bundling import ROOT
from fake_tensorrt import CudaEngine, ExecutionContext, FakeTensorRT, RuntimeCache, RuntimeConfig
from tensorrt_names import Names, Use, missing, overridden, public_names, uses

from draftwood.plugins.tensorrt import load_tensorrt

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


def test_the_stand_in_has_only_names_of_the_real_package(rtx: Names) -> None:
    """Every attribute the engine was tested with exists in TensorRT-RTX."""
    real = {
        "IExecutionContext": ExecutionContext,
        "IRuntimeCache": RuntimeCache,
        "IRuntimeConfig": RuntimeConfig,
        "ICudaEngine": CudaEngine,
        "": FakeTensorRT,
        **{name: vars(FakeTensorRT)[name] for name in ("TensorIOMode", "CudaGraphStrategy")},
    }
    for owner, stand_in in real.items():
        own = {name for name in vars(stand_in) if not name.startswith("_")} - {"deserialize"}
        assert own and own <= rtx[owner].keys(), owner
    assert {"num_io_tensors", "num_optimization_profiles"} <= rtx["ICudaEngine"].keys()


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("trt.Bilder(logger)", ("", "Bilder")),
        ("trt.Runtime()", ("", "Runtime")),
        ("trt.LayerType.ATTENTION_IMPUT", ("LayerType", "ATTENTION_IMPUT")),
        ("engine.get_tensor_mode(1, 2, 3)", ("ICudaEngine", "get_tensor_mode")),
    ],
)
def test_a_wrong_name_is_found(source: str, problem: tuple[str, str], listed: Names, tmp_path: Path) -> None:
    """Negative control."""
    (tmp_path / "code.py").write_text(source)
    wrong = missing(list(uses(tmp_path / "code.py", {"engine": "ICudaEngine"})), listed)
    assert [(use.owner, use.name) for use in wrong] == [problem]
