"""TreeAttention as a TensorRT plugin: IPluginV3 and its creator, for both TensorRT packages.

The classes derive from the package's own, so they are made by a function of the module that `load_tensorrt` returns.
An engine stores all data of its plugin: the scale, the variant of the kernels, and the kernels.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ..tensorrt import check_plugin_parsing
from .driver import DriverLauncher
from .library import KernelLibrary
from .op import NAME
from .operands import Launcher, Operands
from .plan import LaunchPlan, Shape, Variant, plan_launch, row_block, workspace_bound

VERSION, NAMESPACE = "1", ""  # ENABLE_PLUGIN_OVERRIDE finds creators without a namespace
ALIGNMENT = 16  # bytes, of what the kernel reads and writes in vectors
NUM_INPUTS = 5


class PluginClasses(NamedTuple):
    plugin: type[Any]
    creator: type[Any]


@functools.cache
def driver_launcher(library: bytes) -> DriverLauncher:
    """One launcher per library and process: the layers of an engine share their loaded modules."""
    return DriverLauncher(KernelLibrary.from_bytes(library))


def register(trt: ModuleType, library: KernelLibrary | None = None) -> None:
    """Make `trt` (see `plugins.tensorrt.load_tensorrt`) know the plugin; calling it again changes nothing.

    library: the kernels for plugins of engines that are built later, see `library.compile_library`. None to run
    engines, which contain theirs. Raises RuntimeError if TensorRT cannot parse plugins, or has another plugin of this
    name.
    """
    if library is not None:
        check_plugin_parsing(trt)
    creator_class = plugin_classes(trt, driver_launcher).creator
    registry = trt.get_plugin_registry()
    present = registry.get_creator(NAME, VERSION, NAMESPACE)
    content = b"" if library is None else library.to_bytes()
    if isinstance(present, creator_class):
        if content in (b"", present.library):
            return
        registry.deregister_creator(present)
    if not registry.register_creator(creator_class(content), NAMESPACE):
        raise RuntimeError(
            f"another plugin {NAME} is registered in this process already, and TensorRT takes no second one"
        )


@functools.cache
def plugin_classes(trt: ModuleType, launcher_of: Callable[[bytes], Launcher]) -> PluginClasses:
    """The plugin and its creator over `trt`; `launcher_of` runs a library's kernels."""
    dtypes = {trt.DataType.FLOAT: "fp32", trt.DataType.HALF: "fp16", trt.DataType.BF16: "bf16"}
    bases = (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime)

    class TreeAttentionPlugin(*bases):  # type: ignore[misc]  # the package has no types
        def __init__(self, scale: float, library: bytes, variant: Variant | None = None) -> None:
            for base in bases:
                base.__init__(self)
            self.plugin_name, self.plugin_version, self.plugin_namespace = NAME, VERSION, NAMESPACE
            self.num_outputs = 1
            self.scale = scale
            self.library = library
            self.variant = variant
            self.plan: LaunchPlan | None = None
            self.kept: list[Any] = []

        def get_capability_interface(self, kind: Any) -> Any:
            return self

        def clone(self) -> TreeAttentionPlugin:
            copy = TreeAttentionPlugin(self.scale, self.library, self.variant)
            copy.__dict__.update(self.__dict__)
            return copy

        def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
            return [input_types[0]]

        def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], builder: Any) -> list[Any]:
            return [trt.DimsExprs(inputs[0])]

        def supports_format_combination(self, position: int, tensors: Sequence[Any], num_inputs: int) -> bool:
            dtype = tensors[0].desc.type
            types = (dtype, dtype, dtype, trt.DataType.INT32, trt.DataType.BOOL, dtype)
            found = tensors[position].desc
            return bool(dtype in dtypes and found.type == types[position] and found.format == trt.TensorFormat.LINEAR)

        def get_aliased_input(self, output_index: int) -> int:
            return -1  # the output aliases no input

        def get_valid_tactics(self) -> list[int]:
            return []

        def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            largest = Shape.of([each.max for each in inputs], dtypes[inputs[0].desc.type])
            self.variant = largest_variant(largest)
            check_library(self.library, self.variant)

        def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
            return workspace_bound(Shape.of([each.max for each in inputs], dtypes[inputs[0].desc.type]))

        def get_fields_to_serialize(self) -> Any:
            if self.variant is None:
                raise RuntimeError(f"{NAME}: TensorRT asked for the plugin's fields before it configured it")
            variant = json.dumps(asdict(self.variant)).encode()
            self.kept = [
                np.array([self.scale], np.float32),
                np.frombuffer(variant, np.int8),
                np.frombuffer(self.library, np.int8),
            ]
            kinds = (trt.PluginFieldType.FLOAT32, trt.PluginFieldType.CHAR, trt.PluginFieldType.CHAR)
            names = ("scale", "variant", "library")
            fields = zip(names, self.kept, kinds, strict=True)
            return trt.PluginFieldCollection([trt.PluginField(*each) for each in fields])

        def set_tactic(self, tactic: int) -> None:
            return None

        def attach_to_context(self, context: Any) -> TreeAttentionPlugin:
            return self.clone()

        def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            shape = Shape.of([each.dims for each in inputs], dtypes[inputs[0].type])
            self.plan = plan_launch(shape, launcher_of(self.library).multiprocessors)

        def enqueue(
            self,
            input_desc: Sequence[Any],
            output_desc: Sequence[Any],
            inputs: Sequence[int],
            outputs: Sequence[int],
            workspace: int,
            stream: int,
        ) -> None:
            if self.plan is None:
                raise RuntimeError(f"{NAME}: TensorRT gave no shapes before it ran the plugin")
            operands = operands_of(self.plan, inputs, outputs[0], workspace)
            launcher_of(self.library).launch(self.plan, operands, self.scale, stream)

    class TreeAttentionCreator(trt.IPluginCreatorV3One):  # type: ignore[misc,name-defined]  # the package has no types
        """Makes plugins from ONNX nodes, whose one attribute is the scale, and from engines."""

        def __init__(self, library: bytes) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_version, self.plugin_namespace = NAME, VERSION, NAMESPACE
            self.library = library
            scale = trt.PluginField("scale", np.array([], np.float32), trt.PluginFieldType.FLOAT32)
            self.field_names = trt.PluginFieldCollection([scale])

        def create_plugin(self, name: str, fields: Any, phase: Any) -> TreeAttentionPlugin:
            values = {field.name: field.data for field in fields}
            scale = scale_of(values)
            if phase == trt.TensorRTPhase.BUILD:
                if not self.library:
                    raise RuntimeError(f"{NAME}: call register with a kernel library before building an engine")
                return TreeAttentionPlugin(scale, self.library)
            variant = Variant(**json.loads(content_of(values, "variant")))
            return TreeAttentionPlugin(scale, content_of(values, "library"), variant)

    return PluginClasses(TreeAttentionPlugin, TreeAttentionCreator)


def largest_variant(largest: Shape) -> Variant:
    """The variant of the largest call of a profile; smaller calls use smaller blocks of the same library."""
    block = row_block(largest.rows * largest.group, largest.head_dim, largest.dtype)
    return Variant(largest.head_dim, largest.group, largest.dtype, block)


@functools.cache
def check_library(library: bytes, variant: Variant) -> None:
    """Raises ValueError when a library lacks `variant`."""
    present = {image.variant for image in KernelLibrary.from_bytes(library).images}
    if variant not in present:
        raise ValueError(
            f"{NAME}: the registered kernel library has no {variant}; compile one for this model's head size, group of "
            "heads, precision and largest width"
        )


def operands_of(plan: LaunchPlan, inputs: Sequence[int], output: int, workspace: int) -> Operands:
    """The operands of contiguous tensors, by their addresses. Raises ValueError for an unaligned address."""
    query, key, value, sequences, tree_mask = inputs
    aligned = {"query": query, "key": key, "value": value, "output": output}
    if plan.workspace_bytes:
        aligned["workspace"] = workspace
    for name, address in aligned.items():
        if address % ALIGNMENT or not address:
            raise ValueError(f"{NAME}: {name} is at {address:#x}, which is not a multiple of {ALIGNMENT} bytes")
    shape = plan.shape
    strides = (shape.rows * shape.head_dim, shape.head_dim)
    return Operands(query, key, value, sequences, tree_mask, output, workspace, strides, strides)


def scale_of(values: Mapping[str, Any]) -> float:
    """The scale of a node. Raises ValueError if the node has none."""
    if "scale" not in values:
        raise ValueError(f"{NAME}: the node has no attribute scale; export the model again")
    return float(np.asarray(values["scale"]).ravel()[0])


def content_of(values: Mapping[str, Any], name: str) -> bytes:
    """A field of bytes, which TensorRT returns as an array, or as text if it can be read as such. Raises ValueError."""
    if name not in values:
        raise ValueError(f"{NAME}: the engine lacks the plugin's {name}; build it again")
    value = values[name]
    return value.encode() if isinstance(value, str) else np.asarray(value).tobytes()
