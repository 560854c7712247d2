"""Low-bit matrices in an exported graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ...models.layers import Matrix
from ..quantization.formats import Quantized, QuantizedCheckpoint
from .graph import GraphWriter


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
        return initializer(writer, f"{name}.{part}", kind, (columns, outputs), lambda: np.ascontiguousarray(read().T))

    parts = [stored("codes", dtype, inputs, codes), stored("scales", writer.dtype, inputs // block, scales)]
    return writer.node("DequantizeLinear", f"{name}/dequantized", parts, axis=0, block_size=block)


def initializer(
    writer: GraphWriter, name: str, dtype: ir.DataType, shape: tuple[int, ...], read: Callable[[], NDArray[Any]]
) -> ir.Value:
    """A weight of another type than the graph's, read when it is written."""
    tensor = ir.LazyTensor(lambda: ir.Tensor(read(), name=name), dtype, ir.Shape(shape), name=name)
    value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(dtype), const_value=tensor)
    writer.initializers[name] = value
    return value
