"""An exported graph in OpenVINO's terms: a cache that is only read, and attention whose result does not depend on where
a row stands.

The exported graph writes this pass's rows into the cache and returns all of it. OpenVINO would copy that on the way in
and on the way out, which takes longer than the rest of the pass. So the cache is an input only, and the new rows of all
layers come out as one tensor, which the host writes behind the others. Keys are never put together: past and new ones
are scored apart and the scores put in their columns. Values are, because of the order in which they must be summed.

Why not softmax: it sums in vector lanes, so that a row's denominator depends on which slots the row's path happens to
have. A matrix product adds slot after slot, and a slot of weight 0 changes nothing. Numerator and denominator therefore
come from one each, and a row gives the same bits in a chain or in a tree, at any width of two rows or more, and in a
cache of any capacity; `tests/test_openvino.py` holds it to that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino
from openvino import opset15 as ops
from openvino.frontend.onnx import ConversionExtension

from ...models import bindings

NEW_ROWS = "new_rows"  # output [2 * layers, 1, H_kv, T, D]: keys and values of a layer one after the other
LANES = 16  # columns of ones: for a single column OpenVINO takes another kernel, which sums in another order
SLOT_AXIS = 2  # of a cache [B, H_kv, C, D] and of its rows


def read_graph(path: Path, num_layers: int, mapped: bool = True) -> Any:
    """The openvino.Model of an exported graph of the additive form, its cache outputs replaced by NEW_ROWS. mapped:
    weights beside the graph stay in their file."""
    core = openvino.Core()
    core.set_property({"ENABLE_MMAP": mapped})
    conversion = Conversion()
    core.add_extension(ConversionExtension("TensorScatter", conversion.scatter))
    core.add_extension(ConversionExtension("Attention", conversion.attention))
    model = core.read_model(path)
    rows = []
    for layer in range(num_layers):
        for kind in bindings.KINDS:
            written = model.output(bindings.present(kind, layer)).get_node()
            _, _, new = written.input_value(0).get_node().input_values()[:3]
            rows.append(ops.unsqueeze(new, vector(0)))
            model.remove_result(written)
    stacked = ops.concat(rows, 0)
    stacked.output(0).set_names({NEW_ROWS})
    model.add_results([ops.result(stacked)])
    return model


class Conversion:
    """Converts the cache and attention nodes of one graph. What all layers have in common is made once."""

    def __init__(self) -> None:
        self._slots: Any = None
        self._ones: Any = None

    def scatter(self, node: Any) -> list[Any]:
        """TensorScatter(cache, rows, write_indices): rows at consecutive slots."""
        cache, rows, first = (node.get_input(index) for index in range(3))
        if self._slots is None:
            start = ops.squeeze(first, vector(0))
            self._slots = ops.range(start, ops.add(start, size(rows, SLOT_AXIS)), number(1), "i64")
        return [ops.scatter_update(cache, self._slots, rows, number(SLOT_AXIS)).output(0)]

    def attention(self, node: Any) -> list[Any]:
        """Attention(query, keys, values, mask) with keys and values from `scatter`; query heads that share a key head
        are rows of one matrix product, so that keys and values are never repeated."""
        query, keys, values, mask = (node.get_input(index) for index in range(4))
        past, slots, new = keys.get_node().input_values()[:3]
        heads, kv_heads = (tensor.get_partial_shape()[1].get_length() for tensor in (query, past))
        if self._ones is None:
            shape = ops.concat([ops.unsqueeze(size(mask, 3), vector(0)), vector(LANES)], 0)
            self._ones = ops.broadcast(ops.constant(np.float32(1)), shape)
        by_head = ops.shape_of(query, "i64")
        query = ops.multiply(query, ops.constant(np.float32(node.get_attribute("scale"))))
        grouped = ops.reshape(query, vector(0, kv_heads, -1, 0), True)  # [B, H_kv, G * T, D]
        scores = ops.matmul(grouped, past, False, True)
        scores = ops.scatter_update(scores, slots, ops.matmul(grouped, new, False, True), number(3))
        if heads != kv_heads:
            shape = ops.concat(
                [vector(0, kv_heads, heads // kv_heads), ops.gather(by_head, vector(2), number(0)), vector(-1)], 0
            )
            by_group = ops.shape_of(scores, "i64")
            scores, mask = ops.reshape(scores, shape, True), ops.unsqueeze(mask, vector(1))
        scores = ops.add(scores, mask)
        weights = ops.exp(ops.subtract(scores, ops.reduce_max(scores, vector(-1), True)))
        if heads != kv_heads:
            weights = ops.reshape(weights, by_group, False)
        total = ops.slice(ops.matmul(weights, self._ones, False, False), vector(0), vector(1), vector(1), vector(3))
        attended = ops.divide(ops.matmul(weights, values, False, False), total)
        return [ops.reshape(attended, by_head, False).output(0)]


def number(value: int) -> Any:
    return ops.constant(np.int64(value))


def vector(*values: int) -> Any:
    return ops.constant(np.array(values, np.int64))


def size(tensor: Any, axis: int) -> Any:
    """Length of an axis that is known only when a pass runs."""
    return ops.gather(ops.shape_of(tensor, "i64"), number(axis), number(0))
