"""The TensorRT plugin without a GPU: what it tells TensorRT, what it stores in an engine, and what it refuses."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attention import SCALE, TOLERANCES, Case, Tensors, interpreter, model, workspace
from numpy.typing import NDArray

from draftwood.plugins.tensorrt import load_tensorrt, tensorrt_logger
from draftwood.plugins.tree_attention.driver import DriverLauncher
from draftwood.plugins.tree_attention.library import PTX, KernelImage, KernelLibrary
from draftwood.plugins.tree_attention.op import NAME
from draftwood.plugins.tree_attention.operands import ATTENTION, Launcher
from draftwood.plugins.tree_attention.plan import Variant, plan_launch, row_blocks, workspace_bound
from draftwood.plugins.tree_attention.plugin import PluginClasses, driver_launcher, plugin_classes, register

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None or importlib.util.find_spec("triton") is None,
    reason="needs TensorRT-RTX and Triton: pip install 'draftwood[tensorrt-rtx,kernel]'",
)

CASE = Case(2, 2, 6, 3, 600, (150, 0, 120), 64, "fp16", multiprocessors=8)
WIDEST = replace(CASE, rows=16)


def library(dtype: str = "fp16") -> KernelLibrary:
    """Variants without code."""
    variants = [Variant(64, 2, dtype, block) for block in row_blocks(WIDEST.rows * WIDEST.group, 64, dtype)]
    images = [KernelImage(ATTENTION, variant, 80, PTX, ATTENTION, 0, 4, b"code\0") for variant in variants]
    return KernelLibrary(tuple(images), "3.9.0")


def interpreter_launcher(content: bytes) -> Launcher:
    from interpreter import InterpreterLauncher

    assert KernelLibrary.from_bytes(content) == library()
    return InterpreterLauncher(CASE.multiprocessors)


def described(tensors: Tensors, dtype: str = "HALF") -> list[Any]:
    """A call as TensorRT describes it: inputs, then the output."""
    trt = load_tensorrt("tensorrt-rtx")
    types = [dtype] * 3 + ["INT32", "BOOL", dtype]
    descriptions = []
    for tensor, name in zip((*tensors, tensors.query), types, strict=True):
        description = trt.PluginTensorDesc()
        description.dims, description.type = trt.Dims(tensor.shape), getattr(trt.DataType, name)
        description.format = trt.TensorFormat.LINEAR
        descriptions.append(description)
    return descriptions


def ranges(dtype: str = "HALF") -> list[Any]:
    """A profile from `CASE` to `WIDEST`."""
    dynamic = []
    for now, largest in zip(described(CASE.tensors(), dtype), described(WIDEST.tensors(), dtype), strict=True):
        each = load_tensorrt("tensorrt-rtx").DynamicPluginTensorDesc()
        each.desc, each.min, each.opt, each.max = now, now.dims, now.dims, largest.dims
        dynamic.append(each)
    return dynamic


def classes() -> PluginClasses:
    return plugin_classes(load_tensorrt("tensorrt-rtx"), interpreter_launcher)


def built(content: bytes | None = None, scale: float = SCALE) -> Any:
    """A plugin as the parser makes it from a node."""
    trt = load_tensorrt("tensorrt-rtx")
    field = trt.PluginField("scale", np.array([scale], np.float32), trt.PluginFieldType.FLOAT32)
    creator = classes().creator(library().to_bytes() if content is None else content)
    return creator.create_plugin("layer", trt.PluginFieldCollection([field]), trt.TensorRTPhase.BUILD)


def deserialized(plugin: Any) -> Any:
    phase = load_tensorrt("tensorrt-rtx").TensorRTPhase.RUNTIME
    return classes().creator(b"").create_plugin("layer", plugin.get_fields_to_serialize(), phase)


def configured(dtype: str = "HALF", content: bytes | None = None) -> Any:
    plugin, tensors = built(content), ranges(dtype)
    plugin.configure_plugin(tensors[:5], tensors[5:])
    return plugin


def test_everything_an_engine_needs_comes_back_from_its_fields() -> None:
    plugin = configured()
    again = deserialized(plugin)
    assert (again.scale, again.library) == (pytest.approx(SCALE), library().to_bytes())
    assert again.variant == plugin.variant == Variant(64, 2, "fp16", 32)
    assert deserialized(again).library == library().to_bytes()


def test_a_clone_is_another_object_with_the_same_content() -> None:
    plugin = configured()
    for copy in (plugin.clone(), plugin.attach_to_context(None)):
        assert copy is not plugin
        assert (copy.scale, copy.library, copy.variant) == (plugin.scale, plugin.library, plugin.variant)


@pytest.mark.parametrize("dtype", ["HALF", "BF16", "FLOAT"])
def test_formats(dtype: str) -> None:
    """Linear tensors of one floating type, int32 sequences, a bool mask; nothing else."""
    trt = load_tensorrt("tensorrt-rtx")
    plugin, accepted = built(), []
    for position in range(6):
        for change in (None, trt.DataType.INT8, trt.DataType.INT64, trt.TensorFormat.CHW32):
            tensors = ranges(dtype)
            changed = tensors[position].desc
            if isinstance(change, trt.DataType):
                changed.type = change
            elif isinstance(change, trt.TensorFormat):
                changed.format = change
            tensors[position].desc = changed
            if plugin.supports_format_combination(position, tensors, 5):
                accepted.append((position, change))
    assert accepted == [(position, None) for position in range(6)]


def test_the_workspace_is_enough_for_the_largest_call() -> None:
    tensors = ranges()
    found = built().get_workspace_size(tensors[:5], tensors[5:])
    assert found == workspace_bound(WIDEST.tensors().shape())
    assert found >= plan_launch(WIDEST.tensors().shape(), CASE.multiprocessors).workspace_bytes > 0


def test_a_library_for_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no Variant.*dtype='fp16'"):
        configured(content=library("bf16").to_bytes())


def test_building_without_a_library_is_refused() -> None:
    with pytest.raises(RuntimeError, match="call register with a kernel library"):
        built(content=b"")


@pytest.mark.parametrize(
    ("missing", "message"), [("scale", "no attribute scale"), ("library", "lacks the plugin's lib")]
)
def test_missing_fields_are_refused(missing: str, message: str) -> None:
    trt = load_tensorrt("tensorrt-rtx")
    plugin = configured()
    fields = [field for field in plugin.get_fields_to_serialize() if field.name != missing]
    with pytest.raises(ValueError, match=message):
        classes().creator(b"").create_plugin("layer", trt.PluginFieldCollection(fields), trt.TensorRTPhase.RUNTIME)


def enqueue(case: Case, misalign: int = 0) -> NDArray[np.float32]:
    """The whole way through TensorRT's types on host pointers; runs in a worker of `interpreter`."""
    tensors = case.tensors()
    plugin = deserialized(configured()).attach_to_context(None)
    descriptions = described(tensors)
    plugin.on_shape_change(descriptions[:5], descriptions[5:])
    output, memory = tensors.query.clone(), workspace(plan_launch(tensors.shape(), case.multiprocessors))
    assert memory is not None
    pointers = [tensor.data_ptr() for tensor in tensors]
    pointers[1] += misalign
    plugin.enqueue(descriptions[:5], descriptions[5:], pointers, [output.data_ptr()], memory.data_ptr(), 0)
    result: NDArray[np.float32] = output.float().numpy()
    return result


@pytest.fixture(scope="module")
def worker() -> Iterator[ProcessPoolExecutor]:
    with interpreter() as pool:
        yield pool


def test_enqueue_gives_the_oracle_s_numbers(worker: ProcessPoolExecutor) -> None:
    found = worker.submit(enqueue, CASE).result()
    np.testing.assert_allclose(found, CASE.tensors().expected(), rtol=0, atol=TOLERANCES["fp16"])


def test_enqueue_refuses_what_the_kernel_cannot_read(worker: ProcessPoolExecutor) -> None:
    with pytest.raises(ValueError, match=r"key is at 0x.*not a multiple of 16"):
        worker.submit(enqueue, CASE, misalign=8).result()
    descriptions = described(CASE.tensors())
    with pytest.raises(RuntimeError, match="no shapes"):
        configured().enqueue(descriptions[:5], descriptions[5:], [0] * 5, [0], 0, 0)


def test_registering_twice_is_once() -> None:
    """Another library replaces the first for engines built from now on."""
    trt = load_tensorrt("tensorrt-rtx")
    registry = trt.get_plugin_registry()
    register(trt, library())
    first = registry.get_creator(NAME, "1", "")
    register(trt, library())
    register(trt)
    assert registry.get_creator(NAME, "1", "") is first
    register(trt, library("bf16"))
    assert registry.get_creator(NAME, "1", "").library == library("bf16").to_bytes()
    assert sum(creator.name == NAME for creator in registry.all_creators) == 1


def test_running_an_engine_needs_no_compiler() -> None:
    """Nor torch, nor ONNX: the kernels come with the engine."""
    code = (
        "import sys; import draftwood.plugins.tree_attention.plugin\n"
        "sys.exit(', '.join({'triton', 'torch', 'onnx', 'onnx_ir'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, f"imported: {done.stderr}"


def test_layers_share_one_launcher() -> None:
    content = library().to_bytes()
    assert isinstance(driver_launcher(content), DriverLauncher)
    assert driver_launcher(content) is driver_launcher(bytes(bytearray(content)))


def engine() -> bytes:
    """Built by TensorRT-RTX, for a GPU this machine need not have; runs in a worker."""
    trt = load_tensorrt("tensorrt-rtx")
    register(trt, library())
    builder = trt.Builder(tensorrt_logger("tensorrt-rtx"))
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, tensorrt_logger("tensorrt-rtx"))
    parser.set_flag(trt.OnnxParserFlag.ENABLE_PLUGIN_OVERRIDE)
    assert parser.parse(model("fp16", CASE.capacity, 4, CASE.kv_heads, CASE.head_dim).SerializeToString())
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM80, 0)
    for index, (least, most) in enumerate(zip(CASE.tensors(), WIDEST.tensors(), strict=True)):
        profile.set_shape(network.get_input(index).name, least.shape, least.shape, most.shape)
    config.add_optimization_profile(profile)
    return bytes(builder.build_serialized_network(network, config))


def test_an_engine_carries_the_library(worker: ProcessPoolExecutor) -> None:
    assert library().to_bytes() in worker.submit(engine).result()


def test_a_plugin_of_somebody_else_is_not_replaced() -> None:
    trt = load_tensorrt("tensorrt-rtx")
    registry, theirs = trt.get_plugin_registry(), classes().creator(b"")
    ours = registry.get_creator(NAME, "1", "")
    if ours is not None:
        registry.deregister_creator(ours)
    assert registry.register_creator(theirs, "")
    try:
        with pytest.raises(RuntimeError, match="takes no second one"):
            register(trt)
    finally:
        registry.deregister_creator(theirs)
