"""The TensorRT plugin without a GPU: what it tells TensorRT, what it stores in an engine, and what it refuses."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
from attention import SCALE, Case, Tensors, model, operands, workspace

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


class Noted:
    """A launcher that notes its launches: plan, operands, scale and stream."""

    multiprocessors = CASE.multiprocessors

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def launch(self, *arguments: Any) -> None:
        self.launches.append(arguments)


NOTED = Noted()


def noted_launcher(content: bytes) -> Launcher:
    assert KernelLibrary.from_bytes(content) == library()
    return NOTED


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
    return plugin_classes(load_tensorrt("tensorrt-rtx"), noted_launcher)


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


def test_copies_and_what_comes_back_from_the_fields_of_an_engine_have_the_same_content() -> None:
    plugin = configured()
    again = deserialized(plugin)
    for each in (again, deserialized(again), plugin.clone(), plugin.attach_to_context(None)):
        assert each is not plugin and (each.scale, each.library) == (pytest.approx(SCALE), library().to_bytes())
        assert each.variant == plugin.variant == Variant(64, 2, "fp16", 32)


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


def test_what_a_plugin_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no Variant.*dtype='fp16'"):
        configured(content=library("bf16").to_bytes())
    with pytest.raises(RuntimeError, match="call register with a kernel library"):
        built(content=b"")
    trt, plugin = load_tensorrt("tensorrt-rtx"), configured()  # it owns its fields
    for missing, message in (("scale", "no attribute scale"), ("library", "lacks the plugin's lib")):
        fields = [field for field in plugin.get_fields_to_serialize() if field.name != missing]
        with pytest.raises(ValueError, match=message):
            classes().creator(b"").create_plugin("layer", trt.PluginFieldCollection(fields), trt.TensorRTPhase.RUNTIME)


def test_enqueue_launches_the_plan_of_the_shapes_on_the_pointers() -> None:
    """The whole way through TensorRT's types; test_tree_attention_driver.py launches the kernels themselves."""
    plugin, tensors = deserialized(configured()).attach_to_context(None), CASE.tensors()
    descriptions, output = described(tensors), tensors.query.clone()
    memory = workspace(plan := plan_launch(tensors.shape(), CASE.multiprocessors))
    given, pointers = operands(tensors, output, memory), [tensor.data_ptr() for tensor in tensors]
    call = (descriptions[:5], descriptions[5:], pointers, [output.data_ptr()], given.workspace, 7)
    with pytest.raises(RuntimeError, match="no shapes"):
        plugin.enqueue(*call)
    plugin.on_shape_change(descriptions[:5], descriptions[5:])
    NOTED.launches.clear()
    plugin.enqueue(*call)
    assert NOTED.launches == [(plan, given, pytest.approx(SCALE), 7)]
    pointers[1] += 8
    with pytest.raises(ValueError, match=r"key is at 0x.*not a multiple of 16"):
        plugin.enqueue(*call)


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


def test_an_engine_carries_the_library() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as worker:
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
