"""The two ONNX graphs that copy rows of a cache on the device where it lies, as bytes of onnx.proto.

    GATHER: source [P, H, S, D], rows [C]                           -> kept [P, H, C, D]
    MOVE:   cache [P, H, C, D], rows [n], first [P]                 -> moved, the cache itself

MOVE gathers the rows before it writes them, so a row that is overwritten may also be one that moves. TensorScatter
writes in place where its output is bound to its input's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

GATHER_OPSET, MOVE_OPSET = 13, 24  # of the operator set that has the newest operator of the graph
IR_VERSION = 10
ROWS = ("P", "H", "C", "D")
SLOT_AXIS = 2


def gather_graph(dtype: str) -> bytes:
    nodes = [("Gather", ["source", "rows"], ["kept"])]
    return model(GATHER_OPSET, nodes, dtype, {"source": ("P", "H", "S", "D"), "rows": ("C",)}, "kept")


def move_graph(dtype: str) -> bytes:
    nodes = [("Gather", ["cache", "rows"], ["kept"]), ("TensorScatter", ["cache", "kept", "first"], ["moved"])]
    return model(MOVE_OPSET, nodes, dtype, {"cache": ROWS, "rows": ("n",), "first": ("P",)}, "moved")


def model(
    opset: int,
    nodes: Sequence[tuple[str, list[str], list[str]]],
    dtype: str,
    inputs: Mapping[str, Sequence[str]],
    output: str,
) -> bytes:
    """nodes: operators along the axis of slots, their inputs and outputs. inputs: the names of their axes; those with
    one axis are int64."""
    from onnx import helper  # a base install lacks it

    def value(name: str, axes: Sequence[str]) -> Any:
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype if len(axes) > 1 else "int64"))
        return helper.make_tensor_value_info(name, kind, axes)

    given = [value(name, axes) for name, axes in inputs.items()]
    graph = helper.make_graph(
        [helper.make_node(*node, axis=SLOT_AXIS) for node in nodes], "moves", given, [value(output, ROWS)]
    )
    versions = [helper.make_opsetid("", opset)]
    content: bytes = helper.make_model(graph, opset_imports=versions, ir_version=IR_VERSION).SerializeToString()
    return content
