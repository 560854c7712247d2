"""A small writer of ONNX graphs: named nodes, and weights that are read only while the file is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ...models.bindings import Binding
from ...models.errors import CheckpointError
from ...models.layers import Matrix
from ..quantization.formats import Quantized, QuantizedCheckpoint

IR_VERSION = 11
EXTERNAL_DATA_BYTES = 8_000_000  # writing and checking a protobuf copies it several times, and it may have 2 GB
# onnx-ir 1.1 writes weights by many threads unless it is told otherwise, earlier releases by one.
WORKERS: dict[str, Any] = {"max_workers": 1} if "max_workers" in signature(ir.save).parameters else {}
Weight = Callable[[], NDArray[Any]]


class GraphWriter:
    """Collects the nodes and initializers of one graph whose floating tensors are of `dtype`.

    axes: sizes of the axes that are fixed; every other axis of a binding stays symbolic.
    """

    def __init__(self, dtype: str, axes: Mapping[str, int]) -> None:
        self.dtype = ir.DataType[{"float32": "FLOAT"}.get(dtype, dtype.upper())]
        self.axes = axes
        self.nodes: list[ir.Node] = []
        self.initializers: dict[str, ir.Value] = {}

    def lazy(self, name: str, shape: tuple[int, ...], read: Weight, dtype: ir.DataType | None = None) -> ir.Value:
        """An initializer read when the file is written, one at a time. Without a dtype it has the graph's."""
        convert = self.cast if dtype is None else np.asarray
        kind, axes = dtype or self.dtype, ir.Shape(shape)
        return self.initializer(ir.LazyTensor(lambda: ir.Tensor(convert(read()), name=name), kind, axes, name=name))

    def constant(self, name: str, array: NDArray[Any]) -> ir.Value:
        """An initializer that is in memory. An array of floating-point numbers is converted to `dtype`."""
        return self.initializer(ir.Tensor(self.cast(array) if array.dtype.kind == "f" else array, name=name))

    def initializer(self, tensor: ir.Tensor[Any] | ir.LazyTensor) -> ir.Value:
        name = str(tensor.name)
        if name not in self.initializers:
            kind = ir.TensorType(tensor.dtype)
            self.initializers[name] = ir.Value(name=name, shape=tensor.shape, type=kind, const_value=tensor)
        return self.initializers[name]

    def cast(self, array: NDArray[Any]) -> NDArray[Any]:
        """Convert to `dtype`; an array that has it is not copied."""
        return array.astype(self.dtype.numpy(), copy=False)

    def node(self, kind: str, name: str, inputs: Sequence[ir.Value], domain: str = "", **attributes: Any) -> ir.Value:
        return self.nodes_out(kind, name, inputs, 1, domain, **attributes)[0]

    def nodes_out(
        self,
        kind: str,
        name: str,
        inputs: Sequence[ir.Value],
        outputs: int,
        domain: str = "",
        **attributes: Any,
    ) -> Sequence[ir.Value]:
        """Append one node named `name`; its outputs are named after it."""
        node = ir.node(kind, inputs, attributes, domain=domain, num_outputs=outputs, name=name)
        for index, value in enumerate(node.outputs):
            value.name = name if outputs == 1 else f"{name}.{index}"
        self.nodes.append(node)
        return node.outputs

    def widened(self, name: str, value: ir.Value) -> ir.Value:
        """Convert a value to fp32. No node is added when it is fp32 already."""
        if self.dtype == ir.DataType.FLOAT:
            return value
        return self.node("Cast", name, [value], to=ir.DataType.FLOAT)

    def input(self, binding: Binding) -> ir.Value:
        return ir.Value(name=binding.name, shape=self.shape(binding.shape), type=type_of(binding.dtype))

    def output(self, value: ir.Value, binding: Binding) -> ir.Value:
        """Give a value the name, shape and type of a graph output."""
        value.name, value.shape, value.type = binding.name, self.shape(binding.shape), type_of(binding.dtype)
        return value

    def cache_input(self, name: str, axes: Sequence[str]) -> ir.Value:
        return ir.Value(name=name, shape=self.shape(axes), type=ir.TensorType(self.dtype))

    def shape(self, axes: Sequence[str]) -> ir.Shape:
        """The shape of these axes: numbers for fixed axes, names for others."""
        return ir.Shape([self.axes.get(axis, axis) for axis in axes])


def type_of(dtype: str) -> ir.TensorType:
    return ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype)))


def save(model: ir.Model, path: Path, weight_bytes: int, progress: Callable[[str], None]) -> None:
    """Write a model. Weights of more than 8 MB in all go to `<path>.data` beside it, one at a time; `progress` is then
    told the name of each before it is written. Raises CheckpointError when a weight cannot be used."""
    external = weight_bytes > EXTERNAL_DATA_BYTES
    try:
        ir.save(
            model,
            path,
            external_data=path.name + ".data" if external else None,
            callback=(lambda tensor, _: progress(tensor.name or "")) if external else None,
            **WORKERS if external else {},
        )
    except ir.serde.SerdeError as error:
        # Weights are read inside `save`, which wraps what their reader raises, several times over.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, CheckpointError):
            cause = cause.__cause__
        if cause is None:
            raise
        raise cause from None


def dequantized(writer: GraphWriter, name: str, checkpoint: QuantizedCheckpoint, matrix: Matrix) -> ir.Value:
    """The transposed matrices side by side, [K, N], dequantised in the graph from codes read while it is written. Codes
    are stored as [K, N], too: ONNX Runtime and TensorRT fuse that form."""
    form, inputs, outputs = checkpoint.form.of(matrix.weights[0]), matrix.inputs, sum(matrix.outputs)
    block = form.block_of(name, inputs)
    dtype = ir.DataType.FLOAT8E4M3FN if form.floating else {8: ir.DataType.INT8, 4: ir.DataType.INT4}[form.bits]
    waiting: list[Quantized] = []  # codes and scales are read one after the other: each matrix is rounded once

    def merged() -> Quantized:
        parts = [checkpoint.quantized(weight) for weight in matrix.weights]
        return Quantized(
            np.concatenate([part.codes for part in parts]), np.concatenate([part.scales for part in parts])
        )

    def codes() -> NDArray[Any]:
        waiting[:] = [merged()]
        return waiting[0].codes.astype(dtype.numpy())

    def scales() -> NDArray[Any]:
        return writer.cast((waiting.pop() if waiting else merged()).scales)

    def stored(part: str, kind: ir.DataType, columns: int, read: Callable[[], NDArray[Any]]) -> ir.Value:
        return writer.lazy(f"{name}.{part}", (columns, outputs), lambda: np.ascontiguousarray(read().T), kind)

    parts = [stored("codes", dtype, inputs, codes), stored("scales", writer.dtype, inputs // block, scales)]
    return writer.node("DequantizeLinear", f"{name}/dequantized", parts, axis=0, block_size=block)
